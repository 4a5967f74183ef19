"""The build's gate on engines with quantised weights: what is read wrongly is named, what is healthy passes."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from conftest import Once
from planting import PAIR, engine, planted, write_weight
from quantized_planting import OTHER_SCALES, export_quantized

from dflash_engines.portable_graph import load_portable
from dflash_export.graph_runner import GraphRunner
from dflash_export.parity import require_passed
from dflash_export.quantization import quantize_options
from dflash_runtime.bundle import Bundle, GraphFacts
from dflash_runtime.errors import ParityError
from dflash_tools import greedy_check, lowered_check
from dflash_tools.engine_check import check_engine
from dflash_tools.greedy_check import check_own_tokens
from dflash_tools.int8_product_graphs import round_activations
from dflash_tools.lowered_check import Call, allowed_rounding, check_lowered, open_graph

BACKEND = "ort-cpu"


@pytest.fixture(scope="module")
def healthy(once: Once) -> Path:
    """int4 with zero points in the target, int8 in the drafter, whose caches are rings."""
    return once("quantized-exported", export_quantized) / "bundle"


def checked(folder: Path) -> Bundle:
    return Bundle.open(folder, check_files=False)


def weights_read(name: str, index: int, change: Callable[[ir.Node], None]) -> Callable[[ir.Model], None]:
    """Changes the product whose input `index` is a part of this weight."""

    def edit(model: ir.Model) -> None:
        found = [n for n in model.graph if n.op_type == "MatMulNBits" and name in str(n.inputs[index].name)]  # type: ignore[union-attr]
        assert len(found) == 1
        change(found[0])

    return edit


def without_zero_points(node: ir.Node) -> None:
    node.replace_input_with(3, None)


DOWN, GATE = "model.layers.2.mlp.down_proj", "drafter.layers.1.mlp.gate_proj"


def swapped(node: ir.Node) -> None:
    """Reads another product's scales, of the same shape."""
    other = GATE.replace("gate", "up")
    graph = node.graph
    assert graph is not None
    theirs = next(n for n in graph if n.op_type == "MatMulNBits" and other in str(n.inputs[1].name))  # type: ignore[union-attr]
    node.replace_input_with(2, theirs.inputs[2])


FAULTS = {
    "another layer's scales": (engine("target.onnx", OTHER_SCALES), "target model.layers.1.self_attn.v_proj"),
    "lost zero points": (
        engine("target.onnx", weights_read(DOWN, 1, without_zero_points)), f"target {DOWN}",
    ),
    "a drafter's scales": (engine("drafter.onnx", weights_read(GATE, 1, swapped)), f"drafter {GATE}"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_weight_that_an_engine_reads_wrongly_is_named(healthy: Path, tmp_path: Path, name: str) -> None:
    change, wanted = FAULTS[name]
    bundle = shutil.copytree(healthy, tmp_path / "b")
    change(bundle)
    rows = check_engine(checked(bundle), BACKEND)
    first = rows[0]
    assert not first.passed and first.tensor == wanted
    with pytest.raises(ParityError, match=f"lowered {first.tensor}"):
        require_passed(rows)


@pytest.mark.parametrize("factor", [1.0, 200.0, 0.005])
def test_a_healthy_one_passes_whatever_the_size_of_its_logits(healthy: Path, tmp_path: Path, factor: float) -> None:
    bundle = shutil.copytree(healthy, tmp_path / "b")
    if factor != 1.0:
        planted(lambda root: write_weight(root, "model.norm.weight", lambda values: values * factor))(bundle)
    opened = checked(bundle)
    rows = check_engine(opened, BACKEND) + check_own_tokens(bundle, opened.manifest, BACKEND)
    assert {row.stage for row in rows} == {"lowered", "int8 products", "rings", "int8 rings", "tokens"}
    failed = [row for row in rows if not row.passed]
    assert not failed, failed


def test_an_engine_that_rounds_to_fewer_steps_fails(healthy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """7 steps either way in place of 127, which products in fp32 do not show: the rows of the engine as it runs do."""

    def coarse(bundle: Bundle, facts: GraphFacts, backend: str, calls: list[Call]) -> GraphRunner:
        model = load_portable(bundle, facts.file)
        round_activations(model)
        model.graph.initializers["int8.127"].const_value = ir.Tensor(np.array(7, np.float32))
        return open_graph(bundle, model, facts, 64)

    monkeypatch.setattr(lowered_check, "open_lowered", coarse)
    rows = check_lowered(checked(healthy), BACKEND)
    assert all(row.passed for row in rows if row.stage == "lowered")
    failed = {row.tensor for row in rows if not row.passed}
    assert failed >= {"target logits", "target cache", "drafter_context cache", "drafter draft_logits"}


def test_what_proves_nothing_allows_nothing() -> None:
    assert allowed_rounding(float("inf")) == 0.0 and allowed_rounding(float("nan")) == 0.0
    assert allowed_rounding(0.0) == lowered_check.TOLERANCE


def test_the_bound_of_tokens_is_the_models_own(healthy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any rounding in the portable graph nothing is allowed for it, so that an engine's shows."""
    opened = checked(healthy)
    allowed = {row.tolerance for row in check_own_tokens(healthy, opened.manifest, BACKEND)}
    assert len(allowed) == 1 and allowed.pop() > 10 * lowered_check.TOLERANCE
    portable = greedy_check.portable_logits
    monkeypatch.setattr(greedy_check, "portable_logits", lambda b, n, *, rounds: portable(b, n, rounds=False))
    allowed = {row.tolerance for row in check_own_tokens(healthy, opened.manifest, BACKEND)}
    assert allowed.pop() < 1.1 * lowered_check.TOLERANCE


@pytest.mark.slow
def test_a_target_with_a_float_head_passes_too(tmp_path: Path) -> None:
    pair = dataclasses.replace(PAIR, precision="bf16")
    bundle = export_quantized(tmp_path, pair, quantize_options("int4", "keep", "keep", group_size=64))
    opened = checked(bundle)
    rows = check_lowered(opened, BACKEND)
    assert all(row.passed for row in rows), rows
    context = next(row for row in rows if row.tensor == "drafter_context cache" and row.stage == "int8 products")
    assert context.tolerance == pytest.approx(lowered_check.TOLERANCE, rel=0.01)  # a drafter that rounds nothing
