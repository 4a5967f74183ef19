"""Products and rows of quantised weights as ONNX Runtime's kernels, against the graph they stand for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from dflash_engines.passes.quantized_matmul import QuantizedMatMulPass
from dflash_engines.passes.quantized_rows import QuantizedRowsPass

N, K, V = 24, 96, 40
RNG = np.random.default_rng(5)


def pack(values: np.ndarray[Any, Any], bits: int) -> bytes:
    flat = values.reshape(-1)
    return (flat[0::2] | (flat[1::2] << 4)).tobytes() if bits == 4 else flat.tobytes()


def graph(folder: Path, bits: int, group: int | None, symmetric: bool, rows: bool) -> ir.Model:
    """y = x @ W.T with W quantised [N, K], or the rows `ids` of W."""
    count = V if rows else N
    integers = ir.DataType.UINT4 if bits == 4 else ir.DataType.UINT8
    values = RNG.integers(0, 1 << bits, (count, K)).astype(np.uint8)
    shape = (count,) if group is None else (count, K // group)
    scales = (RNG.random(shape) * 0.1 + 0.01).astype(np.float32)
    zeros = RNG.integers(0, 1 << bits, shape).astype(np.uint8)
    parts = {"w": (integers, (count, K), pack(values, bits)), "w.scales": (ir.DataType.FLOAT, shape, scales.tobytes())}
    if not symmetric:
        parts["w.zero_points"] = (integers, shape, pack(zeros, bits))
    initializers, offset = {}, 0
    with (folder / "w.bin").open("wb") as stream:
        for name, (dtype, size, data) in parts.items():
            stream.seek(offset)
            stream.write(data)
            shaped = ir.Shape(size)
            tensor = ir.ExternalTensor("w.bin", offset, len(data), dtype, shape=shaped, name=name, base_dir=folder)
            initializers[name] = ir.Value(name=name, shape=shaped, type=ir.TensorType(dtype), const_value=tensor)
            offset += len(data) + -len(data) % 64
    nodes = []
    inputs = [initializers["w"], initializers["w.scales"]]
    if symmetric:
        middle = ir.Tensor(np.array(1 << (bits - 1), np.uint8), name="middle")
        lengths = ir.Tensor(np.array(shape, np.int64), name="lengths")
        for tensor in (middle, lengths):
            initializers[tensor.name] = ir.Value(
                name=tensor.name, shape=tensor.shape, type=ir.TensorType(tensor.dtype), const_value=tensor
            )
        nodes.append(ir.node("Expand", [initializers["middle"], initializers["lengths"]]))
        if bits == 4:
            nodes.append(ir.node("Cast", [nodes[-1].outputs[0]], {"to": ir.DataType.UINT4}))
        inputs.append(nodes[-1].outputs[0])
    else:
        inputs.append(initializers["w.zero_points"])
    attributes = {"axis": 0} if group is None else {"axis": 1, "block_size": group}
    dequantized = ir.node("DequantizeLinear", inputs, attributes)
    dequantized.outputs[0].type, dequantized.outputs[0].shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape([count, K])
    nodes.append(dequantized)
    if rows:
        source = ir.Value(name="ids", shape=ir.Shape([1, "S"]), type=ir.TensorType(ir.DataType.INT64))
        nodes.append(ir.node("Gather", [dequantized.outputs[0], source], {"axis": 0}))
    else:
        source = ir.Value(name="x", shape=ir.Shape([1, "S", K]), type=ir.TensorType(ir.DataType.FLOAT))
        nodes.append(ir.node("Transpose", [dequantized.outputs[0]], {"perm": [1, 0]}))
        nodes.append(ir.node("MatMul", [source, nodes[-1].outputs[0]]))
    output = nodes[-1].outputs[0]
    output.name, output.type = "y", ir.TensorType(ir.DataType.FLOAT)
    output.shape = ir.Shape([1, "S", K if rows else N])
    made = ir.Graph([source], [output], nodes=nodes, initializers=list(initializers.values()), name="g",
                    opset_imports={"": 24})  # fmt: skip
    return ir.Model(made, ir_version=11)


def run(model: ir.Model, folder: Path, **inputs: Any) -> Any:
    options = ort.SessionOptions()
    options.add_session_config_entry("session.disable_quant_qdq", "1")  # else ORT rounds activations by itself
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
    data = ir.to_proto(model).SerializeToString()
    return ort.InferenceSession(data, options, providers=["CPUExecutionProvider"]).run(None, inputs)[0]


CASES = [(4, 32, True), (4, 32, False), (4, 16, True), (8, None, True), (8, 32, True), (8, None, False), (8, 32, False)]
"""96 inputs in groups of 32 make three zero points a row: an odd number, whose rows must be packed anew."""


@pytest.mark.parametrize(("bits", "group", "symmetric"), CASES)
def test_products_say_the_same(tmp_path: Path, bits: int, group: int | None, symmetric: bool) -> None:
    model = graph(tmp_path, bits, group, symmetric, rows=False)
    x = RNG.standard_normal((1, 5, K)).astype(np.float32)
    expected = run(model, tmp_path, x=x)
    for activations, tolerance in (("fp32", 1e-4), ("int8", 0.1)):
        lowered = model.clone()
        assert QuantizedMatMulPass(activations)(lowered).modified  # type: ignore[arg-type]
        kinds = {node.op_type for node in lowered.graph}
        assert "MatMulNBits" in kinds and not kinds & {"DequantizeLinear", "Transpose", "MatMul"}
        found = run(lowered, tmp_path, x=x)
        assert np.abs(found - expected).max() < tolerance * expected.std()
        alone = np.concatenate([run(lowered, tmp_path, x=x[:, i : i + 1]) for i in range(5)], axis=1)
        if activations == "int8":
            assert np.array_equal(alone, found)  # a row says the same with and without others beside it


@pytest.mark.parametrize(
    ("bits", "group", "symmetric"),
    [(4, 32, True), (4, 16, False), (8, None, True), (8, None, False), (8, 32, True), (8, 32, False)],
)
def test_rows_say_the_same(tmp_path: Path, bits: int, group: int | None, symmetric: bool) -> None:
    model = graph(tmp_path, bits, group, symmetric, rows=True)
    ids = np.array([[0, V - 1, 7]])
    expected = run(model, tmp_path, ids=ids)
    assert QuantizedRowsPass()(model).modified
    assert "DequantizeLinear" not in {node.op_type for node in model.graph}
    np.testing.assert_allclose(run(model, tmp_path, ids=ids), expected, rtol=1e-6, atol=1e-6)


def test_a_wrong_zero_point_would_be_seen(tmp_path: Path) -> None:
    model = graph(tmp_path, 4, 32, False, rows=False)
    x = RNG.standard_normal((1, 2, K)).astype(np.float32)
    expected = run(model, tmp_path, x=x)
    QuantizedMatMulPass("fp32")(model)
    (node,) = (node for node in model.graph if node.op_type == "MatMulNBits")
    node.replace_input_with(3, None)
    assert np.abs(run(model, tmp_path, x=x) - expected).max() > expected.std()
