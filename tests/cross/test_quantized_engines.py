"""TensorRT's form of quantised bundles: what it computes, what it refuses, and that TensorRT-RTX builds it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from pairs import MAIN, quiet

from dflash_engines import signed_weight_file
from dflash_engines.passes.signed_weights import SIGNED_FILE, OffsetPart, SignedWeightsPass
from dflash_engines.signed_weight_file import write_signed_weights
from dflash_engines.tensorrt_engines import build_engines
from dflash_engines.tensorrt_network import make_network
from dflash_engines.tensorrt_plan import EngineOptions
from dflash_engines.tensorrt_versions import row_for
from dflash_export.build import export_bundle
from dflash_export.build_plan import plan_build
from dflash_export.dequantized_weights import read_float_weight, read_integers
from dflash_export.quantization import quantize_options
from dflash_runtime.bundle import Bundle
from dflash_runtime.errors import EngineError
from dflash_runtime.weights import FLOAT8_TRANSPOSED, SIGNED_TRANSPOSED, MappedWeights
from dflash_tools.lowered_check import check_fused

OPTIONS = EngineOptions("tensorrt-rtx", "8.9", (8,), prefill_chunk_tokens=8, use_cache=False)


def export(folder: Path, *words: str, precision: str = "bf16", symmetric: bool = True, **target: Any) -> Bundle:
    pair = dataclasses.replace(MAIN, precision=precision, target=target)
    pair.write(folder)
    options = dataclasses.replace(pair.options(folder), quantize=quantize_options(*words, symmetric=symmetric))
    (folder / "bundle").mkdir()
    export_bundle(plan_build(options), folder / "bundle", quiet)
    return Bundle.open(folder / "bundle", check_files=False)


@pytest.fixture(scope="module")
def int8(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return export(tmp_path_factory.mktemp("int8"), "int8", "int8", "int8")


@pytest.fixture(scope="module")
def int4(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return export(tmp_path_factory.mktemp("int4"), "int4", "int8", "int4", precision="fp16")


@pytest.fixture(scope="module")
def asymmetric(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return export(tmp_path_factory.mktemp("asymmetric"), "int4", "keep", "int4", symmetric=False)


@pytest.fixture(scope="module")
def float8(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return export(tmp_path_factory.mktemp("float8"), "fp8", "fp8", "fp8", tie_word_embeddings=False)


_IN_EVERY_RUN = ("int8", "asymmetric")  # asymmetric is int4 with zero points
BUILT = [
    pytest.param(name, marks=[] if name in _IN_EVERY_RUN else pytest.mark.slow)
    for name in ("int8", "int4", "asymmetric", "float8")
]


@pytest.mark.parametrize("name", BUILT)
def test_engines_build_without_a_gpu(name: str, request: pytest.FixtureRequest) -> None:
    pytest.importorskip("tensorrt_rtx")
    bundle: Bundle = request.getfixturevalue(name)
    built = build_engines(bundle, OPTIONS)
    by_kind = {engine.kind: engine for engine in built.record.engines}
    taken = {bound.weight: bound.dtype for engine in built.record.engines for bound in engine.weights}
    facts = bundle.manifest.quantized
    turned = {"asymmetric": "BF16", "float8": FLOAT8_TRANSPOSED}.get(name, SIGNED_TRANSPOSED)
    assert taken[bundle.manifest.target.head_weight] == turned
    assert {weight for weight, dtype in taken.items() if dtype in (SIGNED_TRANSPOSED, FLOAT8_TRANSPOSED)} == {
        weight for weight, quantized in facts.items() if quantized.bits == 8
    }
    assert not any(weight in taken for weight, quantized in facts.items() if quantized.bits == 4)
    assert not list(bundle.path.rglob(f"{SIGNED_FILE}*")) and max(by_kind["target"].scratch_bytes) < 64 << 20
    int4 = sum(bundle.manifest.weights[n].length_bytes for n, q in facts.items() if q.bits == 4)
    assert (built.held_bytes > int4) if int4 else built.held_bytes == 0  # scales too


def _dequantized_by(bundle: Bundle, file: str, folder: Path) -> dict[str, Any]:
    """What the nodes of the signed form make of the weights, which they have as [in, out]: weight -> [out, in]."""
    model = ir.load(bundle.file(file))
    half = ir.DataType.FLOAT16 if bundle.manifest.precision == "fp16" else ir.DataType.BFLOAT16
    signing = SignedWeightsPass(half)
    signing(model)
    write_signed_weights(bundle, signing.parts, folder / SIGNED_FILE)
    mapped, found = MappedWeights(bundle), {}
    for node in model.graph:
        if node.op_type != "DequantizeLinear":
            continue
        values, scales = node.inputs[0], node.inputs[1]
        assert values is not None and scales is not None and (len(node.inputs) < 3 or node.inputs[2] is None)
        name = str(values.name)
        if values.dtype == ir.DataType.INT8:
            integers = read_integers(bundle.path, bundle.manifest.weights[name])
            stored = (integers ^ np.uint8(0x80)).view(np.int8)
            found[name] = stored.astype(np.float32) * mapped.float32(str(scales.name))[:, None]
            continue
        values.const_value.base_dir = scales.const_value.base_dir = folder  # type: ignore[union-attr]
        group = node.attributes["block_size"].value
        wide = scales.const_value.numpy().astype(np.float32)  # type: ignore[union-attr]
        found[name] = (values.const_value.numpy().astype(np.float32) * np.repeat(wide, group, axis=0)).T  # type: ignore[union-attr]
    return found


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_the_signed_form_means_the_same_weights(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    bundle: Bundle = request.getfixturevalue(name)
    found = {}
    for file in bundle.manifest.graph_files().values():
        found |= _dequantized_by(bundle, file, tmp_path)
    assert found.keys() == bundle.manifest.quantized.keys()
    for weight, values in found.items():
        expected = read_float_weight(bundle.path, bundle.manifest, weight).numpy()
        assert np.array_equal(values, expected), weight


def test_rows_of_an_int8_table_are_picked_from_its_turned_form(int8: Bundle) -> None:
    """The embedding of the network, run in fp32 on the weights an engine is given."""
    model = ir.load(int8.file(int8.manifest.target.graph.file))
    from dflash_engines.half_precision import to_fp32

    model = to_fp32(model)
    SignedWeightsPass(ir.DataType.BFLOAT16)(model)
    part = ir.convenience.extract(model.graph, ["input_ids", "position"], ["hidden_states.0"])
    part.inputs[:] = [value for value in part.inputs if value.uses()]
    mapped, table = MappedWeights(int8), int8.manifest.target.embedding_weight
    scales = int8.manifest.quantized[table].scales
    integers = read_integers(int8.path, int8.manifest.weights[table])
    turned = np.ascontiguousarray((integers ^ np.uint8(0x80)).view(np.int8).T)
    for name, array in ((table, turned), (scales, mapped.float32(scales))):
        part.initializers[name].const_value = ir.Tensor(array, name=name)
    proto = ir.to_proto(ir.Model(part, ir_version=model.ir_version))
    session = ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    (rows,) = session.run(None, {"input_ids": np.array([[3, 500, 0]])})
    expected = read_float_weight(int8.path, int8.manifest, table).numpy()
    np.testing.assert_allclose(rows[0], expected[[3, 500, 0]], rtol=1e-6)


@pytest.mark.parametrize("name", ["int8", "int4", "asymmetric", "float8"])
def test_the_network_computes_what_the_portable_graph_does(name: str, request: pytest.FixtureRequest) -> None:
    bundle: Bundle = request.getfixturevalue(name)
    rows = check_fused(bundle)
    assert {row.tensor for row in rows} >= {"target logits", "drafter draft_logits", "drafter_context cache"}
    assert all(row.passed for row in rows), rows
    assert not list(bundle.path.glob(f".{SIGNED_FILE}*"))


def test_a_lost_zero_point_is_found(asymmetric: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    offsets = signed_weight_file._offsets

    def without_the_last(bundle: Bundle, part: OffsetPart) -> Iterator[Any]:
        for piece in offsets(bundle, part):
            piece[-1] = 0
            yield piece

    monkeypatch.setattr(signed_weight_file, "_offsets", without_the_last)
    failed = [row.tensor for row in check_fused(asymmetric) if not row.passed]
    assert {"target logits", "drafter_context cache", "drafter draft_logits"} <= set(failed)


def test_offsets_are_those_of_the_scales_an_engine_holds(asymmetric: Bundle) -> None:
    """A bf16 bundle's engines in fp16 round scales, and what zero points add is rounded no further."""
    weight = next(name for name, facts in asymmetric.manifest.quantized.items() if facts.zero_points)
    facts = asymmetric.manifest.quantized[weight]
    assert facts.zero_points is not None
    part = OffsetPart(facts.scales, 0, 0, "F32", facts.zero_points, 8, "F16")
    found = np.concatenate(list(signed_weight_file._offsets(asymmetric, part)))
    scales = MappedWeights(asymmetric).float32(facts.scales).astype(np.float16).astype(np.float64)
    points = read_integers(asymmetric.path, asymmetric.manifest.weights[facts.zero_points])
    assert np.array_equal(found.reshape(scales.shape), (8.0 - points) * scales) and len(set(points.reshape(-1))) > 4


@pytest.mark.slow
def test_zero_points_take_no_copy_of_the_weights(tmp_path: Path) -> None:
    """Scratch memory at a width where a dequantised matrix of the MLP would show, which has 16 MiB.

    A second workspace of a kernel does come on top: 9 MiB for matrices of 8 MiB, 10 MiB for those of 16 MiB.
    """
    pytest.importorskip("tensorrt_rtx")
    wide = {"hidden_size": 1024, "intermediate_size": 8192, "num_hidden_layers": 3}
    scratch = {}
    for symmetric in (True, False):
        bundle = export(tmp_path / str(symmetric), "int4", "keep", "int4", symmetric=symmetric, **wide)
        engines = build_engines(bundle, OPTIONS).record.engines
        scratch[symmetric] = {engine.kind: max(engine.scratch_bytes) for engine in engines}
    assert all(scratch[False][kind] < scratch[True][kind] + (12 << 20) for kind in scratch[True]), scratch


def test_fp8_wants_a_gpu_that_knows_it(float8: Bundle) -> None:
    with pytest.raises(EngineError, match=r"weights are FP8.*capability 8.9 on; these engines are for 8.6"):
        build_engines(float8, dataclasses.replace(OPTIONS, compute_capability="8.6"))


def test_what_has_no_engine_form_is_refused_by_name(tmp_path: Path) -> None:
    bundle = export(tmp_path, "keep", "int4", "keep")
    model = ir.load(bundle.file(bundle.manifest.target.graph.file))
    with pytest.raises(EngineError, match=r"is an int4 table.*--quantize-head keep or int8"):
        make_network(model, "target", row_for("tensorrt-rtx", "1.7.1"), precision="bf16", capacity_rows=256,
                     share_weights=True)  # fmt: skip
    with pytest.raises(EngineError, match="Leave --weights at shared"):
        build_engines(bundle, dataclasses.replace(OPTIONS, weights_mode="embedded"))


def test_eight_bits_have_a_primitive_form_and_int4_is_refused_there(
    int8: Bundle, int4: Bundle, float8: Bundle
) -> None:
    row = row_for("tensorrt", "10.3.0")
    for bundle, refused in ((int8, False), (int4, True), (float8, False)):
        for kind, file in bundle.manifest.graph_files().items():
            arguments = {"precision": bundle.manifest.precision, "capacity_rows": 256, "share_weights": True}
            if refused:
                with pytest.raises(EngineError, match="DequantizeLinear"):
                    make_network(ir.load(bundle.file(file)), kind, row, **arguments)
            else:
                assert make_network(ir.load(bundle.file(file)), kind, row, **arguments).weight_inputs
