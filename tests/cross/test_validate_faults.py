"""Every planted fault is caught, at the right level, with the right first tensor; nothing healthy is accused."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from conftest import Make, Once
from faults import edit_graph
from faulty_loops import RUNTIME_FAULTS, RuntimeFault
from pairs import HALF_PAIRS, quiet
from planted_faults import FAULTS, Fault
from planting import NEUTRAL_NODES, NEUTRAL_PLACES, PAIR, graph, insert, overflows_in_half
from validation_runs import (
    LEVELS,
    assert_fault_is_named,
    assert_healthy,
    assert_loop_fault_is_named,
    first_failure,
    make,
    ort_cpu,
    portable,
    stored,
)

from dflash_runtime.bundle import Bundle
from dflash_tools.graph_probe import ProbeBackend
from dflash_tools.reference_file import Reference
from dflash_tools.validate_engine import BundleEngine
from dflash_tools.validate_run import validate


@pytest.fixture(scope="module")
def healthy(exported: Make) -> Path:
    return exported(PAIR)


@pytest.fixture(scope="module")
def reference(healthy: Path, once: Once) -> Reference:
    folder = once("validated-reference", lambda f: make(healthy, f / "r", new_tokens=12, prompts=["sky", "2 + 2"]))
    return stored(folder / "r")


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_named(healthy: Path, reference: Reference, tmp_path: Path, fault: Fault) -> None:
    assert_fault_is_named(healthy, reference, tmp_path, fault)


@pytest.mark.parametrize("fault", RUNTIME_FAULTS, ids=lambda fault: fault.backend.__name__)
def test_a_fault_of_the_loop_is_named(healthy: Path, reference: Reference, fault: RuntimeFault) -> None:
    assert_loop_fault_is_named(healthy, reference, fault)


def test_an_overflow_in_half_precision_is_named(exported: Make, tmp_path: Path) -> None:
    """The same graph is right in the precision PyTorch holds it in, and not where a value leaves fp16's range."""
    healthy = exported(HALF_PAIRS[1])
    make(healthy, tmp_path / "r", new_tokens=6, prompts=["sky"])
    reference = stored(tmp_path / "r")
    bundle = shutil.copytree(healthy, tmp_path / "b")
    assert_healthy(bundle, portable, reference)
    graph("target.onnx", overflows_in_half)(bundle)
    verdict = first_failure(bundle, portable, reference)
    assert verdict is not None and verdict.first is not None
    assert (verdict.level, verdict.first.graph, verdict.first.layer) == ("graph", "target", 1)
    assert "hidden_states.2" in verdict.first.tensor and "cannot hold" in verdict.first.cause


@pytest.mark.parametrize("nodes", NEUTRAL_NODES, ids=lambda nodes: nodes.__name__)
@pytest.mark.parametrize("place", NEUTRAL_PLACES, ids=lambda place: place[1])
def test_a_graph_that_computes_the_same_otherwise_passes(
    healthy: Path, reference: Reference, tmp_path: Path, nodes: Any, place: tuple[str, str]
) -> None:
    bundle = shutil.copytree(healthy, tmp_path / "b")
    file, name = place
    edit_graph(bundle, file, lambda model: insert(model, name, nodes))
    assert_healthy(bundle, portable, reference)


@pytest.mark.parametrize("prompt", ["", "a", "two words", "x" * 17, "y" * 33, "z" * 60, "é ü ß", "1 2 3 4 5 6 7"])
def test_other_prompts_pass(healthy: Path, tmp_path: Path, prompt: str) -> None:
    make(healthy, tmp_path / "r", new_tokens=7, prompts=[prompt])
    assert_healthy(healthy, ort_cpu, stored(tmp_path / "r"))


@pytest.mark.parametrize("new_tokens", [2, 3, 5, 17, 40])
def test_other_lengths_pass(healthy: Path, tmp_path: Path, new_tokens: int) -> None:
    make(healthy, tmp_path / "r", new_tokens=new_tokens, prompts=["sky"], budgets={"outputs": 0, "inner": 0})
    assert_healthy(healthy, ort_cpu, stored(tmp_path / "r"))


@pytest.mark.parametrize("chunk", [1, 3, 7, 64])
def test_other_pieces_of_the_prefill_pass(healthy: Path, reference: Reference, chunk: int) -> None:
    class Chunked(BundleEngine):
        def backend(self) -> ProbeBackend:
            manifest = self.bundle.manifest
            return ProbeBackend(self.probe(manifest.max_context_tokens + 64), manifest, chunk)

    assert_healthy(healthy, lambda bundle: Chunked(bundle, "ort-cpu", 1), reference)


@pytest.mark.parametrize("name", ["ort-cpu", "portable"])
def test_every_level_passes_on_every_engine(healthy: Path, reference: Reference, name: str) -> None:
    bundle = Bundle.open(healthy, check_files=False)
    found = validate(bundle, BundleEngine(bundle, name, 1), reference, quiet, LEVELS)
    assert found.passed and [verdict.level for verdict in found.verdicts] == [*LEVELS]
    assert found.gap is not None and found.gap.engine == found.gap.reference and found.gap.cause is None
