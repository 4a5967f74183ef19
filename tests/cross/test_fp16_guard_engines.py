"""fp16 engines of a model whose residual leaves fp16's range, from an fp16 and from a bf16 bundle."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from conftest import Once
from massive_values import with_large_product, with_large_residual, with_large_values
from pairs import quiet
from recording_device import RecordingDevice
from test_fp16_guard import GUARDED, PROMPT, TAPS
from tiny_models import write_drafter

from dflash_engines import ort_cpu, ort_cuda
from dflash_engines.fp16_graphs import fp16_warnings, load_for_precision
from dflash_engines.half_precision import emulate_half, keep_in_fp32, to_fp32
from dflash_engines.passes.fp32_residuals import Fp32ResidualsPass
from dflash_engines.passes.retype_half import RetypeHalfPass
from dflash_engines.portable_graph import load_portable
from dflash_engines.tensorrt_engines import build_engines
from dflash_engines.tensorrt_network import make_network
from dflash_engines.tensorrt_plan import EngineOptions
from dflash_engines.tensorrt_versions import row_for
from dflash_export.build import export_bundle
from dflash_export.build_plan import BuildOptions, plan_build
from dflash_export.graph_runner import GraphRunner
from dflash_export.parity import serialise
from dflash_export.quantization import quantize_options
from dflash_runtime import Bundle
from dflash_runtime.backend import Backend, open_backend
from dflash_runtime.decode import decode
from dflash_runtime.device_backend import open_engines
from dflash_runtime.errors import EngineError
from dflash_runtime.weights import MappedWeights
from dflash_tools.bundle_summary import summary_lines
from dflash_tools.device_probe import taps_dtype
from dflash_tools.gpu_check_device import read_taps


@pytest.fixture(scope="module")
def bundles(once: Once) -> Path:
    """`fp16` and `bf16` bundles of one pair."""

    def make(folder: Path) -> None:
        config = with_large_residual(folder / "target", 1e5, num_hidden_layers=2)
        write_drafter(folder / "drafter", config, taps=TAPS, layers=1)
        for precision in ("fp16", "bf16"):
            options = BuildOptions(str(folder / "target"), str(folder / "drafter"), precision=precision)
            (folder / precision).mkdir()
            export_bundle(plan_build(options), folder / precision, quiet, None, GUARDED)

    return once("guarded-pair", make)


def _tokens(bundle: Bundle, model: ir.Model, half: Any) -> tuple[list[int], bool]:
    """Greedy tokens of a target graph whose weights are given in `half`, and whether its logits are finite."""
    weights = MappedWeights(bundle)
    given = {name: weights.float32(name).astype(half) for name in model.graph.initializers
             if name in bundle.manifest.weights}  # fmt: skip
    runner = GraphRunner(serialise(model), bundle.path, bundle.manifest.target.graph, 48, given)
    ids, position, said, finite = list(PROMPT), 0, list[int](), True
    while len(said) < 16:
        call = {"input_ids": np.array([ids]), "position": np.array([position])}
        outputs = runner.run(**call, logit_rows=np.array([len(ids) - 1]))
        finite &= bool(np.isfinite(outputs["logits"]).all())
        position += len(ids)
        ids = [int(outputs["token_ids"][0, 0])]
        said += ids
    return said, finite


def test_fp16_of_a_bf16_bundle_gives_the_fp32_answer(bundles: Path) -> None:
    bundle = Bundle.open(bundles / "bf16")
    file = bundle.manifest.target.graph.file
    expected, _ = _tokens(bundle, to_fp32(load_portable(bundle, file)), np.float32)
    found = {}
    for name, model in (("guarded", load_for_precision(bundle, "target", file, "fp16")),
                        ("plain", load_portable(bundle, file))):  # fmt: skip
        RetypeHalfPass(ir.DataType.FLOAT16)(model)
        found[name] = _tokens(bundle, emulate_half(model), np.float16)
    assert found["guarded"] == (expected, True)
    assert not found["plain"][1]
    assert any("values would be, in fp16 engines, kept in fp32" in line for line in summary_lines(bundle))


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_both_sides_of_the_taps_are_fp32(bundles: Path, precision: str) -> None:
    bundle = Bundle.open(bundles / precision)
    assert any("kept in fp32" in one for one in fp16_warnings(bundle, "fp16"))
    assert fp16_warnings(bundle, "bf16") == []
    types = []
    for kind, file in bundle.manifest.graph_files().items():
        model = ort_cuda.lower_model(load_for_precision(bundle, kind, file, "fp16"), kind, "fp16")
        types += [v.dtype for v in (*model.graph.inputs, *model.graph.outputs) if v.name == "taps"]
    assert types == [ir.DataType.FLOAT] * 2
    plain = load_for_precision(bundle, "target", bundle.manifest.target.graph.file, "bf16")
    assert (plain.graph.outputs[2].dtype == ir.DataType.FLOAT) == (precision == "fp16")


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_the_runtime_drafts_and_says_the_fp32_answer(bundles: Path, precision: str, tmp_path: Path) -> None:
    """ort-cuda's own fp16 engines, on the host."""
    bundle = Bundle.open(shutil.copytree(bundles / precision, tmp_path / "b"))
    ort_cpu.lower_bundle(bundle)
    ort_cuda.lower_bundle(bundle, "fp16")
    ours = open_engines("ort-cuda", bundle, RecordingDevice(tensorrt_version=None), 16)
    expected = _say(open_backend("ort-cpu", bundle, 1, 16), 1)
    assert [_say(ours, block_size) for block_size in (1, 4)] == [expected] * 2
    assert taps_dtype(ours) == "F32"
    ours.reset()
    ours.prefill(PROMPT, 0)
    assert np.abs(read_taps(ours, len(PROMPT))).max() == pytest.approx(1e5, rel=0.01)


def _say(backend: Backend, block_size: int) -> list[int]:
    rounds = decode(backend, PROMPT, max_new_tokens=24, max_context_tokens=48, stop_token_ids=(),
                    block_size_of=lambda n: block_size)  # fmt: skip
    return [token for one in rounds for token in one.committed]


def test_all_residuals_in_fp32_on_top(bundles: Path) -> None:
    """The stream that begins in half precision joins the one the guard keeps; one in fp32 throughout is left alone."""
    bundle = Bundle.open(bundles / "fp16")
    model = load_portable(bundle, bundle.manifest.target.graph.file)
    Fp32ResidualsPass()(model)
    halves = [n for n in model.graph if n.op_type == "Add" and n.outputs[0].dtype == ir.DataType.FLOAT16
              and (n.outputs[0].name or "").startswith("hidden_states")]  # fmt: skip
    assert not halves
    whole = Bundle.open(bundles / "bf16")
    first = load_portable(whole, whole.manifest.target.graph.file)
    sums = [n.outputs[0] for n in first.graph if n.op_type == "Add" and len(n.outputs[0].shape or ()) == 3]
    kept = keep_in_fp32(first, [str(sums[1].name), "hidden_states.1", "hidden_states.0"])
    Fp32ResidualsPass()(kept)


def test_what_fp32_cannot_mend_is_refused_by_name(tmp_path: Path) -> None:
    with_large_values(tmp_path / "target", 2e4)
    (tmp_path / "b").mkdir()
    export_bundle(plan_build(BuildOptions(str(tmp_path / "target"), precision="bf16")), tmp_path / "b", quiet, None,
                  GUARDED)  # fmt: skip
    bundle = Bundle.open(tmp_path / "b")
    with pytest.raises(EngineError, match=r"layers\.1\.self_attn\.v_proj reached .* Leave --precision at bf16"):
        ort_cuda.lower_bundle(bundle, "fp16")
    ort_cuda.lower_bundle(bundle)


@pytest.mark.parametrize("bits", ["int8", "int4"])
def test_tensorrt_takes_products_of_quantised_weights_in_fp32(bits: str, tmp_path: Path) -> None:
    trt = pytest.importorskip("tensorrt_rtx")
    with_large_product(tmp_path / "target", 2e4)
    (tmp_path / "b").mkdir()
    quantize = quantize_options(bits, "keep", "keep", 32, symmetric=True)
    plan = plan_build(BuildOptions(str(tmp_path / "target"), precision="fp16", quantize=quantize))
    export_bundle(plan, tmp_path / "b", quiet, None, GUARDED)
    model = load_portable(Bundle.open(tmp_path / "b"), "target.onnx")
    row = row_for("tensorrt-rtx", trt.__version__)
    network = make_network(model, "target", row, precision="fp16", capacity_rows=160, share_weights=True)
    products = [n for n in _graph(network.onnx) if n.op_type == "MatMul" and n.outputs[0].dtype == ir.DataType.FLOAT]
    assert len(products) == 2  # to the large values and from them


def _graph(data: bytes) -> ir.Graph:
    return ir.from_proto(onnx.load_model_from_string(data)).graph


@pytest.mark.parametrize("form", ["fused", "primitive"])
def test_tensorrt_takes_the_island_and_keeps_its_types(
    bundles: Path, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trt = pytest.importorskip("tensorrt_rtx")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    bundle = Bundle.open(shutil.copytree(bundles / "bf16", tmp_path / "b"))
    row = row_for("tensorrt-rtx", trt.__version__) if form == "fused" else row_for("tensorrt", "10.3")
    model = load_for_precision(bundle, "target", "target.onnx", "fp16")
    network = make_network(model, "target", row, precision="fp16", capacity_rows=160, share_weights=True)
    sums = [node.outputs[0].dtype for node in _graph(network.onnx) if node.op_type == "Add"]
    assert ir.DataType.FLOAT in sums
    log = trt.Logger(trt.Logger.ERROR)
    made = trt.Builder(log).create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(made, log)
    assert parser.parse(network.onnx), [str(parser.get_error(i)) for i in range(parser.num_errors)]
    outputs = {made.get_output(i).name: made.get_output(i).dtype for i in range(made.num_outputs)}
    assert outputs["taps"] == trt.float32
    if form == "fused":
        options = EngineOptions("tensorrt-rtx", "8.9", (4,), 32, precision="fp16")
        built = build_engines(bundle, options)
        assert {engine.kind for engine in built.record.engines} >= {"target", "drafter_context", "drafter"}
        assert any("kept in fp32" in warning for warning in built.warnings)

