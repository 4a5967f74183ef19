"""The fp16 guard: what leaves fp16's range is named and kept in fp32, and the fp16 graphs give the fp32 answer."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from conftest import Once
from massive_values import with_large_product, with_large_residual, with_large_values
from pairs import quiet
from safetensors.torch import load_file, save_file
from tiny_models import write_drafter, write_target

from dflash_engines.half_precision import emulate_half, keep_in_fp32, to_fp32
from dflash_export import graph_pieces, piecewise_runner, range_guard, range_scan
from dflash_export.build import describe, export_bundle
from dflash_export.build_plan import BuildOptions, plan_build
from dflash_export.graph_files import load_graph
from dflash_export.graph_runner import GraphRunner
from dflash_export.parity import PrecisionPasses, serialise
from dflash_export.range_guard import RangeGuard
from dflash_export.range_scan import calibration_texts, scan_graph, target_calls
from dflash_export.weight_values import weights_as_float32
from dflash_runtime import Bundle, ParityError
from dflash_runtime.value_ranges import RANGES_NAME, RangeRecord, ValueRange, read_ranges
from dflash_tools import pipeline
from dflash_tools.bundle_summary import summary_lines

GUARDED = PrecisionPasses(to_fp32, emulate_half, keep_in_fp32=keep_in_fp32)
UNGUARDED = PrecisionPasses(to_fp32, emulate_half)
PROMPT = [5, 17, 3, 260, 42, 8, 111]
TAPS = (0, 1)


def _export(folder: Path, passes: PrecisionPasses = GUARDED, precision: str = "fp16", name: str = "bundle") -> Bundle:
    drafter = str(folder / "drafter") if (folder / "drafter").is_dir() else None
    plan = plan_build(BuildOptions(str(folder / "target"), drafter, precision=precision))
    (folder / name).mkdir()
    export_bundle(plan, folder / name, quiet, None, passes)
    return Bundle.open(folder / name)


@pytest.fixture(scope="module")
def large_residual(once: Once) -> Path:
    def make(folder: Path) -> None:
        write_drafter(folder / "drafter", with_large_residual(folder / "target", 1e5), taps=TAPS)
        _export(folder)

    return once("large-residual", make)


def _record(bundle: Bundle) -> RangeRecord:
    record = read_ranges(bundle)
    assert record is not None
    return record


def _answer(bundle: Bundle, edit: Callable[[ir.Model], ir.Model]) -> tuple[list[int], np.ndarray]:
    """24 greedy tokens of the target graph, and the logits of the last call."""
    facts = bundle.manifest.target.graph
    model = edit(load_graph(bundle.path, bundle.manifest.weights, facts.file))
    weights = weights_as_float32(bundle.path, bundle.manifest, model) if edit is to_fp32 else None
    runner = GraphRunner(serialise(model), bundle.path, facts, 64, weights)
    ids, position, said = list(PROMPT), 0, list[int]()
    while len(said) < 24:
        given = {"input_ids": np.array([ids]), "position": np.array([position])}
        outputs = runner.run(**given, logit_rows=np.array([len(ids) - 1]))
        position += len(ids)
        ids = [int(outputs["token_ids"][0, 0])]
        said += ids
    return said, outputs["logits"]


def test_a_residual_of_1e5_is_named_and_the_answer_is_that_of_fp32(large_residual: Path) -> None:
    bundle = Bundle.open(large_residual / "bundle")
    beyond = {one.what: one for one in _record(bundle).beyond("target")}
    assert beyond["residual after layer 1"].reached == pytest.approx(1e5, rel=0.01)
    assert beyond["residual after layer 1"].layer == 1
    tokens, logits = _answer(bundle, emulate_half)
    assert np.isfinite(logits).all() and len(set(tokens)) > 1
    assert tokens == _answer(bundle, to_fp32)[0]
    lines = "\n".join(summary_lines(bundle))
    assert re.search(r"residual (after|in) layer \d reached 9\.98\de\+04: residuals from layer 0 on", lines)


def test_without_the_guard_the_same_model_has_no_answer(large_residual: Path, tmp_path: Path) -> None:
    shutil.copytree(large_residual / "target", tmp_path / "target")
    bundle = _export(tmp_path, UNGUARDED)
    assert RANGES_NAME not in bundle.manifest.files
    tokens, logits = _answer(bundle, emulate_half)
    assert not np.isfinite(logits).all() and tokens != _answer(bundle, to_fp32)[0]


def test_taps_beyond_fp16_reach_the_drafter_in_fp32(large_residual: Path) -> None:
    bundle = Bundle.open(large_residual / "bundle")
    manifest = bundle.manifest
    assert manifest.drafter is not None
    sides = (manifest.target.graph.outputs, manifest.drafter.context_graph.inputs)
    assert [t.dtype for side in sides for t in side if t.name == "taps"] == ["F32", "F32"]
    taps = next(one for one in _record(bundle).beyond() if one.value == "taps")
    assert taps.reached == pytest.approx(1e5, rel=0.01)
    facts = manifest.drafter.context_graph
    model = emulate_half(load_graph(bundle.path, manifest.weights, facts.file))
    given = np.full((1, 3, int(facts.inputs[0].shape[-1])), 1e5, np.float32)
    outputs = GraphRunner(serialise(model), bundle.path, facts, 8).run(taps=given, position=np.array([0]))
    assert all(np.isfinite(array).all() for array in outputs.values())


def test_a_product_the_residual_does_not_show(tmp_path: Path) -> None:
    with_large_product(tmp_path / "target", 2e4)
    bundle = _export(tmp_path)
    beyond = _record(bundle).beyond()
    assert {one.layer for one in beyond} == {1} and not any("residual" in one.what for one in beyond)
    assert "product with model.layers.1.mlp.up_proj" in {one.what for one in beyond}
    assert max(one.reached for one in beyond) > 65504
    tokens, logits = _answer(bundle, emulate_half)
    assert np.isfinite(logits).all() and tokens == _answer(bundle, to_fp32)[0]


@pytest.mark.parametrize("gate", ["full", "layers"])
def test_the_whole_build_passes_its_gate_with_what_was_kept(large_residual: Path, tmp_path: Path, gate: str) -> None:
    options = BuildOptions(str(large_residual / "target"), precision="fp16", gate=gate)
    report = pipeline.build(options, tmp_path / "b", "ort-cpu", quiet)
    rows = [row for row in report.manifest.checks if row.stage == "precision"]
    assert rows and all(row.passed and np.isfinite(row.tolerance) for row in rows)


def test_a_drafter_with_a_large_residual_is_kept_in_fp32(tmp_path: Path) -> None:
    config = write_target(tmp_path / "target", "llama")
    write_drafter(tmp_path / "drafter", config, taps=TAPS, layers=1)
    file = tmp_path / "drafter" / "model.safetensors"
    tensors = load_file(file)
    tensors["layers.0.mlp.down_proj.weight"] *= 1e4
    save_file(tensors, file)
    options = BuildOptions(str(tmp_path / "target"), str(tmp_path / "drafter"), precision="fp16")
    report = pipeline.build(options, tmp_path / "b", "none", quiet)
    beyond = _record(Bundle.open(tmp_path / "b")).beyond()
    assert {one.graph for one in beyond} == {"drafter"} and max(one.reached for one in beyond) > 65504
    rows = {row.tensor: row for row in report.manifest.checks if row.stage == "precision"}
    assert rows["draft_logits"].worst < 0.1 and np.isfinite(rows["draft_logits"].tolerance)


def test_values_that_a_cache_holds_end_the_build(tmp_path: Path) -> None:
    with_large_values(tmp_path / "target", 2e4)
    with pytest.raises(ParityError, match=r"model\.layers\.1\.self_attn\.v_proj reached .*Build with --precision bf16"):
        _export(tmp_path)


def test_a_healthy_graph_is_left_as_it_is(tmp_path: Path) -> None:
    config = write_target(tmp_path / "target", "llama")
    write_drafter(tmp_path / "drafter", config, taps=TAPS)
    bundle = _export(tmp_path, UNGUARDED)
    guard = RangeGuard(bundle.path, GUARDED, quiet)
    assert guard.guard_drafter(guard.guard_target(bundle.manifest)) == bundle.manifest
    guard.write(bundle.manifest)
    bundle.check_files(full=True)  # every file is as it was, byte for byte
    describe(bundle.path, bundle.manifest, {})
    guarded = Bundle.open(bundle.path)
    assert not _record(guarded).beyond()
    assert {one.graph for one in _record(guarded).ranges} == {"target", "drafter_context", "drafter"}
    assert any("all values fit" in line for line in summary_lines(guarded))


def test_outliers_under_the_margin_stay_in_fp16(tmp_path: Path) -> None:
    with_large_residual(tmp_path / "target", 1.6e4, layers=(0,), num_hidden_layers=2)
    bundle = _export(tmp_path)
    largest = _record(bundle).largest()
    assert largest is not None and 1.5e4 < largest.reached < 16376 and not _record(bundle).beyond()
    taps = next(t for t in bundle.manifest.target.graph.outputs if t.name == "taps")
    assert taps.dtype == "F16"
    assert _answer(bundle, emulate_half)[0] == _answer(bundle, to_fp32)[0]


def test_every_residual_norm_input_tap_and_logit_is_in_the_record(large_residual: Path) -> None:
    bundle = Bundle.open(large_residual / "bundle")
    record = _record(bundle)
    found = {one.what for one in record.ranges if one.graph == "target"}
    layers = bundle.manifest.target.num_layers
    assert {f"residual after layer {i}" for i in range(layers)} <= found
    assert {f"residual in layer {i}" for i in range(layers)} <= found  # what the second norm of a layer reads
    parts = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
             "mlp.gate_proj", "mlp.up_proj")  # fmt: skip
    assert {f"product with model.layers.{i}.{part}" for i in range(layers) for part in parts} <= found
    assert {"taps", "logits", "embedding rows"} <= found
    assert all(isinstance(one, ValueRange) and one.reached >= 0 for one in record.ranges)


def test_a_target_too_large_for_memory_is_scanned_to_its_last_layer(
    large_residual: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = Bundle.open(large_residual / "bundle")
    manifest = bundle.manifest
    calls = target_calls(manifest, calibration_texts(bundle.path, manifest))
    found = []
    for elements in (1 << 24, 1500):
        for module in (graph_pieces, piecewise_runner):
            monkeypatch.setattr(module, "PIECE_ELEMENTS", elements)
        found.append(scan_graph(bundle.path, manifest, "target", manifest.target.graph, GUARDED, calls).ranges)
    whole, pieces = ({one.value: one.reached for one in ranges} for ranges in found)
    assert whole.keys() == pieces.keys() and len(whole) > 50
    assert all(pieces[name] == pytest.approx(whole[name], rel=1e-3) for name in whole)


@pytest.mark.parametrize(("precision", "scanned"), [("fp16", True), ("bf16", False)])
def test_a_large_target_is_scanned_in_fp16_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str, scanned: bool
) -> None:
    monkeypatch.setattr(range_guard, "SCANNED_PARAMETERS", 1000)
    write_target(tmp_path / "t", "llama")
    plan = plan_build(BuildOptions(str(tmp_path / "t"), precision=precision))
    (tmp_path / "b").mkdir()
    manifest = export_bundle(plan, tmp_path / "b", quiet, None, GUARDED)
    assert (RANGES_NAME in manifest.files) == scanned


def test_a_value_is_measured_as_soon_as_it_is_there(large_residual: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values that waited for the end would be all activations of a model at once."""
    bundle = Bundle.open(large_residual / "bundle")
    seen: list[onnx.GraphProto] = []

    class Watched(piecewise_runner.PiecewiseRunner):
        def __init__(self, model: onnx.ModelProto, *args: Any) -> None:
            seen.append(model.graph)
            super().__init__(model, *args)

    monkeypatch.setattr(range_scan, "PiecewiseRunner", Watched)
    calls = target_calls(bundle.manifest, [[1, 2, 3, 4]])
    scan_graph(bundle.path, bundle.manifest, "target", bundle.manifest.target.graph, GUARDED, calls)
    (graph,) = seen
    place = {name: number for number, node in enumerate(graph.node) for name in node.output}
    waits = [number - place[node.input[0]] for number, node in enumerate(graph.node) if node.op_type == "Abs"]
    assert len(waits) > 10 and max(waits) <= 4


def test_a_drafter_added_later_gets_its_taps_in_fp32_too(tmp_path: Path) -> None:
    """Its first tap is small and its second one large."""
    config = with_large_residual(tmp_path / "target", 5e4, layers=(1,), num_hidden_layers=2)
    write_drafter(tmp_path / "drafter", config, taps=TAPS, layers=1)
    pipeline.build(BuildOptions(str(tmp_path / "target"), precision="fp16"), tmp_path / "b", "none", quiet)
    before = _record(Bundle.open(tmp_path / "b"))
    pipeline.add_drafter(tmp_path / "b", str(tmp_path / "drafter"), "none", quiet)
    bundle = Bundle.open(tmp_path / "b")
    manifest, after = bundle.manifest, _record(bundle)
    assert manifest.drafter is not None
    sides = (manifest.target.graph.outputs, manifest.drafter.context_graph.inputs)
    assert [t.dtype for side in sides for t in side if t.name == "taps"] == ["F32", "F32"]
    assert [one for one in after.beyond("target") if one.value != "taps"] == [
        one for one in before.beyond("target") if one.value != "taps"
    ]
    assert {one.graph for one in after.ranges} == {"target", "drafter_context", "drafter"}


def test_a_mask_as_large_as_fp16_is_no_overflow(tmp_path: Path) -> None:
    write_target(tmp_path / "target", "bloom", n_layer=2, n_head=4)
    bundle = _export(tmp_path)
    masks = ir.load(bundle.file("target.onnx")).graph
    assert any(node.op_type == "Where" and node.outputs[0].dtype == ir.DataType.FLOAT16 for node in masks)
    assert not _record(bundle).beyond()
