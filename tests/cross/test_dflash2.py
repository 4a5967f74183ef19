"""DFlash 2 on a real bundle against the authors' package: every proposal of every round, and that faults show.

The pairs are tiny and random: no public DFlash 2 target is small enough to be tried here.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from authors import Authors, Rounds, differences
from conftest import Make, Once
from faults import edit_graph, plant
from pairs import FULL, SLIDING, Pair, build_fully
from primitive_session import PrimitiveSession, filled_caches
from test_against_authors import NEW_TOKENS, compared, ours, prompts
from test_primitive_traces import CAPACITY, assert_same, load
from tiny_models import DFLASH2

from dflash_engines.half_precision import emulate_half, to_fp32
from dflash_engines.primitive_form import lower_primitive
from dflash_engines.tensorrt_versions import PRIMITIVE_OPERATORS
from dflash_export import drafter_gate
from dflash_export.build_plan import plan_build
from dflash_export.drafter_config import DFlash2Config
from dflash_export.drafter_dflash2 import MOST_SLOTS, CandidateSelector
from dflash_export.drafter_gate import DrafterGate
from dflash_export.parity import PrecisionPasses
from dflash_runtime import GenerationConfig, Session
from dflash_runtime.bundle import Bundle
from dflash_runtime.sampling import TokenChooser

PAIRS = [
    Pair(
        "dflash2-sliding",
        drafter={**DFLASH2, "layer_types": [SLIDING] * 2, "sliding_window": 18, "is_causal": False, "block_size": 16},
        likely_tokens=5,
    ),
    Pair(
        "dflash2-mixed",
        "qwen2",
        target={"tie_word_embeddings": False},
        drafter={
            **DFLASH2, "taps": (1, 0), "block_size": 8, "selector_top_k": 16, "conv_kernel_size": 3,
            "conv_group_size": 8, "layer_types": [FULL, SLIDING], "sliding_window": 20, "output_multiplier": 0.3,
            "final_logit_softcapping": 4.0,
        },
        likely_tokens=5,
    ),
]  # fmt: skip


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.name)
def test_every_round_is_the_authors(exported: Make, pair: Pair) -> None:
    bundle = exported(pair)
    authors = Authors(bundle.parent)
    assert type(authors.drafter).__name__ == "DFlash2DraftModel"
    accepted = set()
    with Session.open(bundle, threads=1, prefill_chunk_tokens=16) as session:
        for block_size in (2, 3, 8, 16)[: 4 if pair.drafter["block_size"] == 16 else 3]:
            config = GenerationConfig(max_new_tokens=NEW_TOKENS, stop_token_ids=[], block_size=block_size)
            for prompt in prompts():
                expected = authors.run(prompt, NEW_TOKENS, block_size=block_size)
                assert differences(session.generate(prompt, config), expected) == []
                accepted |= set(expected.acceptance_lengths)
    assert len(accepted) > 2


def test_proposals_are_drawn_from_the_selectors_distribution(exported: Make) -> None:
    """Slot by slot along the authors' own path, whose draws are theirs; then a request that draws its own."""
    bundle, temperature, prompt = exported(PAIRS[0]), 0.6, prompts()[1]
    authors, calls = Authors(bundle.parent), list[Any]()
    select = authors.drafter.candidate_selector.select

    def noted(hidden: Any, logits: Any, anchor_ids: Any, temperature: float) -> Any:
        calls.append((int(anchor_ids), [found[0] for found in select(hidden, logits, anchor_ids, temperature)]))
        path, candidates, rows = calls[-1][1]
        return path[None], candidates[None], rows[None]

    authors.drafter.candidate_selector.select = noted
    torch.manual_seed(0)
    authors._generate(authors.drafter, authors.target, torch.tensor([prompt]), 3, None, block_size=8,
                      temperature=temperature)  # fmt: skip
    anchor, (path, candidates, rows) = calls[0]
    options: Any = {"temperature": temperature, "seed": 1, "stop_token_ids": []}
    with Session.open(bundle, threads=1) as session:
        backend: Any = session._backend
        backend.reset()
        backend.prefill(prompt, 0)
        backend.append_context(len(prompt), 0)
        backend.draft(anchor, 1 + len(path), len(prompt))
        chooser = TokenChooser(GenerationConfig(**options, proposals="sampled"), prompt, 512)
        drawn: list[int] = []
        for i, (ids, scores) in enumerate(chooser._draft_rows(backend, len(path), drawn)):
            q = np.zeros(512)
            q[ids] = np.exp(scores) / np.exp(scores).sum()
            expected = np.zeros(512)
            expected[candidates[i].numpy()] = rows[i].numpy()
            np.testing.assert_allclose(q, expected, atol=1e-5)
            drawn.append(int(path[i]))
        plain = session.generate(prompt, GenerationConfig(**options, plain=True))
        coupled = session.generate(prompt, GenerationConfig(**options, proposals="coupled"))
        sampled = session.generate(prompt, GenerationConfig(**options, proposals="sampled"))
    assert coupled.token_ids == plain.token_ids and len(set(sampled.acceptance_lengths)) > 1


@pytest.mark.slow
def test_a_half_precision_build_passes_its_gate(once: Once) -> None:
    pair = dataclasses.replace(PAIRS[0], name="dflash2-fp16", precision="fp16")
    bundle = once(pair.name, lambda folder: build_fully(pair, folder)) / "bundle"
    manifest = Bundle.open(bundle).manifest
    assert manifest.drafter is not None
    assert manifest.drafter.architecture == "DFlash2DraftModel"
    assert {row.tensor for row in manifest.checks if row.stage == "precision"} >= {"drafter context", "draft_logits"}


def test_the_gate_over_part_of_the_vocabulary(exported: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a model does not fit into memory, embedding, head and codebooks are cut to the same rows."""
    monkeypatch.setattr(drafter_gate, "SAMPLED_ROWS", 40)
    bundle = exported(PAIRS[0])
    plan = plan_build(PAIRS[0].options(bundle.parent))
    assert plan.drafter is not None
    gate = DrafterGate(
        bundle, Bundle.open(bundle).manifest, plan.drafter, PrecisionPasses(to_fp32, emulate_half, None),
        whole_tables=False,
    )  # fmt: skip
    assert gate.token_rows is not None and len(gate.token_rows) < 200
    rows = gate.check(None)
    assert all(row.passed for row in rows) and "draft_ids" in {row.tensor for row in rows}


def test_the_form_for_older_tensorrt_chooses_the_same(exported: Make) -> None:
    """Opset 20 without Attention and TensorScatter, and no loop: ids are those of the portable graph."""
    context, append = load(exported(PAIRS[0]), "drafter_context")
    drafter, draft = load(exported(PAIRS[0]), "drafter")
    draft.caches = append.caches
    lowered = lower_primitive(context, "drafter_context")
    lowered_drafter = lower_primitive(drafter, "drafter")
    assert {node.op_type for node in lowered_drafter.graph} <= PRIMITIVE_OPERATORS - {"Loop", "Scan", "If"}
    caches = filled_caches(lowered, CAPACITY, 1e4)
    primitive_append, primitive_draft = PrimitiveSession(lowered, caches), PrimitiveSession(lowered_drafter, caches)
    taps = {"taps": np.random.default_rng(0).standard_normal((1, 20, 128)).astype(np.float32)}
    assert_same(primitive_append(**taps, position=np.array([0])), append(**taps, position=np.array([0])), 20)
    for block in (2, 7, 16):
        inputs = {"input_ids": np.array([[9, *[511] * (block - 1)]]), "position": np.array([20])}
        assert_same(primitive_draft(**inputs), draft(**inputs), 20, caches=False)


def forgets_the_neighbour(bundle: Path) -> None:
    """Every slot takes its likeliest token, whatever stands before it."""

    def change(model: ir.Model) -> None:
        scores = next(node for node in model.graph if node.op_type == "ArgMax").inputs[0]
        assert scores is not None
        total = scores.producer()
        assert total is not None and total.op_type == "Add"
        transitions = total.inputs[1]
        nothing = ir.node("Sub", [transitions, transitions])
        model.graph.insert_before(total, nothing)
        total.replace_input_with(1, nothing.outputs[0])

    edit_graph(bundle, "drafter.onnx", change)


def convolves_only_the_token(bundle: Path) -> None:
    """The kernels' second half weighs the token itself, not the one before it."""

    def change(model: ir.Model) -> None:
        joined = [n for n in model.graph if n.op_type == "Concat" and _pads_the_block(n)]
        assert joined
        for node in joined:
            node.outputs[0].uses()[0].node.replace_input_with(0, node.inputs[1])

    edit_graph(bundle, "drafter.onnx", change)


def _pads_the_block(node: ir.Node) -> bool:
    shape = node.inputs[1].shape if node.inputs[1] is not None else None
    return shape is not None and len(shape) == 3 and shape[2] == 64


@pytest.mark.parametrize("fault", [forgets_the_neighbour, convolves_only_the_token], ids=lambda fault: fault.__name__)
def test_planted_faults_show(exported: Make, fault: Callable[[Path], None], tmp_path: Path) -> None:
    bundle = exported(PAIRS[0])
    authors = Authors(bundle.parent)
    expected: list[Rounds] = [authors.run(prompt, NEW_TOKENS) for prompt in prompts()]
    copy = shutil.copytree(bundle, tmp_path / "b")
    plant(copy, fault)
    assert any("proposes" in words for words in compared(ours(copy), expected))


def test_the_composed_walk_is_the_walk_for_every_number_of_slots() -> None:
    torch.manual_seed(0)
    selector = CandidateSelector(DFlash2Config(2, 4, 8, 5), 12, 40)
    with torch.no_grad():
        for parameter in selector.parameters():
            parameter.normal_()
        for slots in (1, 2, 3, 15, 16, 33, MOST_SLOTS):
            hidden, logits = torch.randn(1, slots, 12), torch.randn(1, slots, 40)
            anchor = torch.tensor([[7]])
            one = selector.walk(*selector.edges(hidden, logits, anchor))
            two = selector.walk_slot_by_slot(hidden, logits, anchor)
            assert torch.equal(one, two)
            assert slots == 1 or not torch.equal(one, logits.argmax(-1))  # the selector did choose
