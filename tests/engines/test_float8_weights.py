"""FP8 weights on ONNX Runtime's CPU: the same products, and no cast of a weight left for every call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from dflash_engines.passes.float8_weights import Float8WeightsPass
from dflash_engines.passes.quantized_matmul import QuantizedMatMulPass

N, K = 24, 96
RNG = np.random.default_rng(6)
VALUES = RNG.standard_normal((N, K)).astype(ml_dtypes.float8_e4m3fn)
SCALES = (RNG.random(N) * 0.1 + 0.01).astype(np.float32)


def product(folder: Path) -> ir.Model:
    """y = x @ W.T with W in FP8 [N, K], as a bundle's graph has it."""
    (folder / "w.bin").write_bytes(VALUES.tobytes() + SCALES.tobytes())
    parts = []
    for name, array, offset in (("w", VALUES, 0), ("w.scales", SCALES, VALUES.nbytes)):
        kind, shape = ir.DataType.from_numpy(array.dtype), ir.Shape(array.shape)
        tensor = ir.ExternalTensor("w.bin", offset, array.nbytes, kind, shape=shape, name=name, base_dir=folder)
        parts.append(ir.Value(name=name, shape=shape, type=ir.TensorType(kind), const_value=tensor))
    x = ir.Value(name="x", shape=ir.Shape([1, "S", K]), type=ir.TensorType(ir.DataType.FLOAT))
    weight = ir.node("DequantizeLinear", parts, {"axis": 0})
    weight.outputs[0].type, weight.outputs[0].shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape([N, K])
    turned = ir.node("Transpose", [weight.outputs[0]], {"perm": [1, 0]})
    result = ir.node("MatMul", [x, turned.outputs[0]])
    y = result.outputs[0]
    y.name, y.type, y.shape = "y", ir.TensorType(ir.DataType.FLOAT), ir.Shape([1, "S", N])
    made = ir.Graph([x], [y], nodes=[weight, turned, result], initializers=parts, name="g", opset_imports={"": 24})
    return ir.Model(made, ir_version=11)


def run(model: ir.Model, folder: Path, x: Any) -> tuple[Any, set[str]]:
    """What a session says, and the operators it has left when it is open."""
    options = ort.SessionOptions()
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
    options.optimized_model_filepath = str(folder / "open.onnx")
    options.log_severity_level = 3
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"])
    kinds = {node.op_type for node in ir.load(folder / "open.onnx").graph}
    return session.run(None, {"x": x})[0], kinds


def test_products_say_the_same_and_weights_are_dequantised_once(tmp_path: Path) -> None:
    x = RNG.standard_normal((1, 5, K)).astype(np.float32)
    expected = x @ (VALUES.astype(np.float32) * SCALES[:, None]).T
    model = product(tmp_path)
    found, kinds = run(model, tmp_path, x)
    assert np.abs(found - expected).max() < 1e-5 * expected.std() and "DequantizeLinear" in kinds
    assert not QuantizedMatMulPass()(model).modified  # no kernel of integers reads floats
    assert Float8WeightsPass()(model).modified
    found, kinds = run(model, tmp_path, x)
    assert np.abs(found - expected).max() < 1e-5 * expected.std()
    assert not kinds & {"DequantizeLinear", "Cast", "Mul"}
