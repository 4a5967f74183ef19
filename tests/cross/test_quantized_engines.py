"""TensorRT's form of quantised bundles: what it computes, what it refuses, and that TensorRT-RTX builds it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from pairs import MAIN, quiet

from dflash_engines.passes.signed_weights import SIGNED_FILE, SignedWeightsPass
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
from dflash_runtime.weights import SIGNED_TRANSPOSED, MappedWeights

OPTIONS = EngineOptions("tensorrt-rtx", "8.9", (8,), prefill_chunk_tokens=32, use_cache=False)


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


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_engines_build_without_a_gpu(name: str, request: pytest.FixtureRequest) -> None:
    pytest.importorskip("tensorrt_rtx")
    bundle: Bundle = request.getfixturevalue(name)
    built = build_engines(bundle, OPTIONS)
    by_kind = {engine.kind: engine for engine in built.record.engines}
    taken = {bound.weight: bound.dtype for engine in built.record.engines for bound in engine.weights}
    facts = bundle.manifest.quantized
    assert taken[bundle.manifest.target.head_weight] == SIGNED_TRANSPOSED
    assert {weight for weight, dtype in taken.items() if dtype == SIGNED_TRANSPOSED} == {
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


def test_zero_points_and_int4_tables_are_refused_by_name(tmp_path: Path) -> None:
    row = row_for("tensorrt-rtx", "1.7.1")
    for folder, words, symmetric, expected in (
        ("zero points", ("int4", "keep", "keep"), False, "is quantised with zero points.*--asymmetric"),
        ("table", ("keep", "int4", "keep"), True, "is an int4 table.*--quantize-head keep or int8"),
    ):
        bundle = export(tmp_path / folder, *words, symmetric=symmetric)
        model = ir.load(bundle.file(bundle.manifest.target.graph.file))
        with pytest.raises(EngineError, match=expected):
            make_network(model, "target", row, precision="bf16", capacity_rows=256, share_weights=True)
    with pytest.raises(EngineError, match="Leave --weights at shared"):
        build_engines(bundle, dataclasses.replace(OPTIONS, weights_mode="embedded"))


def test_int8_has_a_primitive_form_and_int4_is_refused_there(int8: Bundle, int4: Bundle) -> None:
    row = row_for("tensorrt", "10.3.0")
    for bundle, refused in ((int8, False), (int4, True)):
        for kind, file in bundle.manifest.graph_files().items():
            arguments = {"precision": bundle.manifest.precision, "capacity_rows": 256, "share_weights": True}
            if refused:
                with pytest.raises(EngineError, match="DequantizeLinear"):
                    make_network(ir.load(bundle.file(file)), kind, row, **arguments)
            else:
                assert make_network(ir.load(bundle.file(file)), kind, row, **arguments).weight_inputs
