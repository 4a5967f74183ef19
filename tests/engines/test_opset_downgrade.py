"""The tables of the opset downgrade against ONNX's own operator schemas, and what the pass does with them."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx.defs
import onnx_ir as ir
import onnxruntime as ort
import pytest

from dflash_engines.passes.opset_downgrade import (
    ATTRIBUTES_ADDED,
    NEWEST_OPSET,
    OPSET,
    RAISED,
    TYPES_ADDED,
    OpsetDowngradePass,
)
from dflash_runtime.errors import EngineError

WRITTEN_OUT = {"RMSNormalization"}


def schemas() -> list[tuple[str, Any, Any]]:
    """(operator, its schema at 20 or None, its schema at 24) of every standard operator."""
    names = sorted({schema.name for schema in onnx.defs.get_all_schemas_with_history() if schema.domain == ""})
    found = []
    for name in names:
        if onnx.defs.has(name, NEWEST_OPSET) and not onnx.defs.get_schema(name, NEWEST_OPSET).deprecated:
            old = onnx.defs.get_schema(name, OPSET) if onnx.defs.has(name, OPSET) else None
            found.append((name, old, onnx.defs.get_schema(name, NEWEST_OPSET)))
    return found


def test_every_change_of_every_operator_is_in_the_tables() -> None:
    changed = set()
    for name, old, new in schemas():
        if old is not None and old.since_version == new.since_version:
            continue
        changed.add(name)
        if name in RAISED or name in WRITTEN_OUT:
            continue
        assert set(new.attributes) - set(old.attributes) == set(ATTRIBUTES_ADDED.get(name, {})), name
        assert not set(old.attributes) - set(new.attributes), name
        for attribute, value in old.attributes.items():
            assert str(value.default_value) == str(new.attributes[attribute].default_value), name
        assert [i.name for i in old.inputs] == [i.name for i in new.inputs], name
        assert [o.name for o in old.outputs] == [o.name for o in new.outputs], name
        known = {constraint.type_param_str: set(constraint.allowed_type_strs) for constraint in old.type_constraints}
        added: set[str] = set()
        for constraint in new.type_constraints:
            added |= set(constraint.allowed_type_strs) - known.get(constraint.type_param_str, set())
        assert {t[7:-1].upper() for t in added if t.startswith("tensor(")} == TYPES_ADDED[name], name
    assert changed == set(TYPES_ADDED) | set(RAISED) | WRITTEN_OUT


def test_the_default_of_a_new_attribute_is_what_opset_20_does() -> None:
    for name, attributes in ATTRIBUTES_ADDED.items():
        schema = onnx.defs.get_schema(name, NEWEST_OPSET)
        for attribute, value in attributes.items():
            assert onnx.helper.get_attribute_value(schema.attributes[attribute].default_value).decode() == value


def one_node(op_type: str, dtype: ir.DataType, weight: np.ndarray | None = None, **attributes: Any) -> ir.Model:
    x = ir.Value(name="x", shape=ir.Shape([1, "S", 8]), type=ir.TensorType(dtype))
    inputs = [x]
    if weight is not None:
        inputs.append(ir.Value(name="w", const_value=ir.Tensor(weight), shape=ir.Shape([8]), type=ir.TensorType(dtype)))
    node = ir.node(op_type, inputs, attributes)
    node.outputs[0].name = "y"
    node.outputs[0].type = ir.TensorType(ir.DataType(attributes["to"]) if "to" in attributes else dtype)
    node.outputs[0].shape = x.shape
    graph = ir.Graph([x], [node.outputs[0]], nodes=[node], initializers=inputs[1:], opset_imports={"": 24}, name="one")
    return ir.Model(graph, ir_version=11)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (one_node("Cos", ir.DataType.BFLOAT16), "Cos of BFLOAT16"),
        (one_node("Swish", ir.DataType.FLOAT), r"Swish \(opset 24\)"),
        (one_node("Cast", ir.DataType.FLOAT, to=ir.DataType.INT4), "Cast of INT4"),
        (one_node("Cast", ir.DataType.FLOAT, to=ir.DataType.FLOAT16, round_mode="down"), "round_mode=down"),
    ],
)
def test_what_opset_20_cannot_say_is_refused(model: ir.Model, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        OpsetDowngradePass()(model)


def test_types_the_tracer_left_out_are_looked_up() -> None:
    model = one_node("Cos", ir.DataType.BFLOAT16)
    (cos,) = model.graph
    negated = ir.node("Neg", [model.graph.inputs[0]])  # its output has no type
    model.graph.insert_before(cos, negated)
    cos.replace_input_with(0, negated.outputs[0])
    cos.outputs[0].type = None
    with pytest.raises(EngineError, match="Cos of BFLOAT16"):
        OpsetDowngradePass()(model)


def test_a_newer_opset_than_the_tables_is_refused() -> None:
    model = one_node("Cos", ir.DataType.FLOAT)
    model.graph.opset_imports[""] = 25
    with pytest.raises(EngineError, match="opset 25; its changes are known up to 24"):
        OpsetDowngradePass()(model)


def test_the_default_rounding_is_dropped() -> None:
    model = one_node("Cast", ir.DataType.FLOAT, to=ir.DataType.FLOAT16, round_mode="up")
    OpsetDowngradePass()(model)
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    assert model.opset_imports == {"": 20}


@pytest.mark.parametrize(("dtype", "tolerance"), [(ir.DataType.FLOAT, 1e-6), (ir.DataType.FLOAT16, 2e-3)])
def test_rms_normalization_is_written_out(dtype: ir.DataType, tolerance: float) -> None:
    random = np.random.default_rng(0)
    weight, x = (random.standard_normal(shape).astype(dtype.numpy()) for shape in (8, (1, 3, 8)))
    model = one_node("RMSNormalization", dtype, weight, epsilon=1e-3)
    before = run(model, x)
    OpsetDowngradePass()(model)
    assert "RMSNormalization" not in {node.op_type for node in model.graph}
    np.testing.assert_allclose(run(model, x), before, rtol=tolerance, atol=tolerance)


def run(model: ir.Model, x: np.ndarray) -> np.ndarray:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    data = ir.to_proto(model).SerializeToString()
    return ort.InferenceSession(data, options, providers=["CPUExecutionProvider"]).run(None, {"x": x})[0]
