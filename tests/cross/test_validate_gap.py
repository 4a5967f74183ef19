"""What validate says of acceptance and of tokens that differ: causes by their class, and nothing unproven passes."""

from __future__ import annotations

import dataclasses
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from conftest import Make, Once
from faults import taps_are_swapped
from faulty_loops import ProposesOthers
from pairs import quiet
from planted_faults import swap_two_letters
from planting import PAIR, Change, manifest, planted, text_file
from validation_runs import make, ort_cpu, portable, stored

from dflash_runtime import Session
from dflash_runtime.bundle import Bundle
from dflash_tools.reference_file import Reference
from dflash_tools.reference_record import OwnDeviation
from dflash_tools.validate_acceptance import check_acceptance
from dflash_tools.validate_comparison import Bounds
from dflash_tools.validate_graph import check_graphs
from dflash_tools.validate_run import Validation, validate
from dflash_tools.validate_tokens import check_tokens, margin_of

TEMPLATE = "template or thinking mode"


@pytest.fixture(scope="module")
def healthy(exported: Make) -> Path:
    return exported(PAIR)


@pytest.fixture(scope="module")
def reference(healthy: Path, once: Once) -> Reference:
    prompts = ["sky: u and v", "2 + 2"]
    return stored(once("gap-reference", lambda f: make(healthy, f / "r", new_tokens=12, prompts=prompts)) / "r")


def acceptance_of(bundle: Path, reference: Reference, engine: Any = ort_cpu) -> Validation:
    opened = Bundle.open(bundle, check_files=False)
    return validate(opened, engine(opened), reference, quiet, ("acceptance",))


def other_windows(data: dict[str, Any]) -> None:
    for tensor in data["drafter"]["graph"]["state"]:
        tensor["window_tokens"] = tensor["window_tokens"] and tensor["window_tokens"] + 1


CAUSES: list[tuple[str, Change]] = [
    ("taps", manifest(lambda d: d["taps"].update(layer_ids=[1, 3]))),
    ("window", manifest(other_windows)),
    ("mask id", manifest(lambda d: d["drafter"].update(mask_token_id=510))),
    (TEMPLATE, manifest(lambda d: d["text"].update(template_args={"enable_thinking": True}))),
    (TEMPLATE, text_file("chat_template.jinja", lambda text: text.replace("t: ", "t:"))),
    ("tokenizer", text_file("tokenizer.json", swap_two_letters)),
    ("graphs: see the first tensor of level graph", planted(taps_are_swapped)),
]


@pytest.mark.parametrize(("cause", "change"), CAUSES, ids=[f"{i}-{one[0]}" for i, one in enumerate(CAUSES)])
def test_a_gap_has_its_class_of_cause(
    healthy: Path, reference: Reference, tmp_path: Path, cause: str, change: Change
) -> None:
    bundle = shutil.copytree(healthy, tmp_path / "b")
    change(bundle)
    levels = ("graph", "acceptance") if cause.startswith("graphs") else ("acceptance",)
    opened = Bundle.open(bundle, check_files=False)
    found = validate(opened, ort_cpu(opened), reference, quiet, levels)
    assert not found.passed and found.gap is not None and found.gap.cause == cause
    assert cause in found.gap.text()


def test_a_wrong_tokenizer_shows_in_the_gap_as_a_user_would_see_it(
    healthy: Path, reference: Reference, tmp_path: Path
) -> None:
    """Acceptance is measured on the ids that the bundle makes of the prompts, not on the right ones."""
    seen = list[list[int]]()
    bundle = Bundle.open(shutil.copytree(healthy, tmp_path / "b"), check_files=False)
    text_file("tokenizer.json", swap_two_letters)(bundle.path)

    class Watched(Session):
        def stream(self, prompt: Any, config: Any = None) -> Any:
            seen.append(list(prompt))
            return super().stream(prompt, config)

    from dflash_runtime.backend import open_backend
    from dflash_runtime.tokenizer import Tokenizer

    backend = open_backend("ort-cpu", bundle, 1, 16)
    with Watched(bundle, backend, Tokenizer.open(bundle)) as session:
        check_acceptance(session, backend, reference, Bounds(reference, "fp32"), [], True, lambda size: True)
    first = reference.facts.texts[0].ids
    assert seen[0] == first and seen[1] != first and len(seen[1]) == len(first)


def test_a_healthy_pair_has_no_gap(healthy: Path, reference: Reference) -> None:
    gap = acceptance_of(healthy, reference).gap
    assert gap is not None and gap.engine == gap.reference and gap.cause is None


def test_rounding_is_called_numerics(healthy: Path, reference: Reference) -> None:
    """Proposals that differ within the bound, on graphs and facts that are right."""
    bundle = Bundle.open(healthy, check_files=False)
    lenient = _lenient(reference, "bf16")
    backend = ProposesOthers(portable(bundle).probe(160), bundle.manifest, 16)
    with Session(bundle, backend, None) as session:
        verdict, gap = check_acceptance(session, backend, reference, lenient, [], True, lambda size: True)
    assert verdict.status == "passed" and gap.engine < gap.reference and gap.cause == "numerics"
    assert "differ, by a margin of at most" in verdict.rows[0].covered
    tight = Bounds(_with_margins(reference, 0.0), "bf16")
    with Session(bundle, backend, None) as session:
        verdict, _ = check_acceptance(session, backend, reference, tight, [], True, lambda size: True)
    assert verdict.status == "failed" and verdict.first is not None and verdict.first.deviation > 0


def _lenient(reference: Reference, precision: str) -> Bounds:
    """Allows any token below fp32; a reference cannot say so."""
    bounds = Bounds(_with_margins(reference, 1.0), precision)
    if not bounds.exact:
        bounds.margin = lambda model: math.inf  # type: ignore[method-assign]
    return bounds


def _with_margins(reference: Reference, margin: float) -> Reference:
    """A reference whose PyTorch in bf16 moves margins that far, and nothing else."""
    facts = dataclasses.replace(reference.facts, own={"bf16": OwnDeviation({}, {}, margin, margin)})
    return dataclasses.replace(reference, facts=facts)


def test_a_distance_that_is_not_known_is_under_no_bound(reference: Reference) -> None:
    ids = reference.expected("text0.top_ids")
    assert margin_of(reference, "text0.top", 0, int(ids[0, 0])) == 0.0
    known = margin_of(reference, "text0.top", 0, int(ids[0, 1]))
    assert 0 < known < math.inf
    unlikely = next(token for token in range(512) if token not in ids[0])
    assert margin_of(reference, "text0.top", 0, unlikely) == math.inf


def test_an_engine_that_can_make_no_call_of_a_graph_is_not_proven(healthy: Path, reference: Reference) -> None:
    engine = ort_cpu(Bundle.open(healthy, check_files=False))
    probe = engine.probe(160)
    probe.can_draft = lambda size: False  # type: ignore[method-assign]
    verdict, _ = check_graphs(probe, reference, Bounds(reference, "fp32"))
    assert verdict.status == "failed" and [row.tensor for row in verdict.rows if not row.passed] == ["drafter"]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_no_proposal_compared_is_not_proven(healthy: Path, reference: Reference, precision: str) -> None:
    lenient = _lenient(reference, precision)
    with Session.open(healthy, threads=1) as session:
        verdict, _ = check_acceptance(session, session._backend, reference, lenient, [], True, lambda size: False)
        empty = dataclasses.replace(reference, facts=dataclasses.replace(reference.facts, texts=[]))
        tokens = check_tokens(session, empty, lenient, [4], [])
    assert verdict.status == "failed" and "0 proposals in 0 rounds" in verdict.rows[0].covered
    assert tokens.status == "failed" and "0 greedy tokens" in tokens.rows[0].covered

