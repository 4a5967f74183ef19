"""Restates a graph of ONNX opset 21 ... 24 as opset 20, operator by operator.

Source of the tables: the operator changelog of ONNX 1.16 ... 1.19 (opsets 21 ... 24). Between 20 and 24 no operator
named here changed what it computes; most only take more types.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from dflash_engines.passes.graph_reading import integer_attribute
from dflash_engines.passes.graph_writing import add_constant, add_integers, emit, remove_dead_nodes, replace
from dflash_runtime.errors import EngineError

OPSET = 20
IR_VERSION = 9
"""The one ONNX 1.15 introduced opset 20 with; newer ones only add fields this form does not use."""
NEWEST_OPSET = 24
"""The tables below end here."""

_FOUR_BITS = frozenset({"INT4", "UINT4", "FLOAT4E2M1", "FLOAT8E8M0"})
_EIGHT_BITS = frozenset({"FLOAT8E4M3FN", "FLOAT8E4M3FNUZ", "FLOAT8E5M2", "FLOAT8E5M2FNUZ"})
_BFLOAT16 = frozenset({"BFLOAT16"})

_ANY_DATA = "Cast CastLike Constant ConstantOfShape Identity If Loop Reshape Scan Shape Size"
_MOVING = "Flatten Pad Squeeze Transpose Unsqueeze"
_COMPUTING = (
    "Acos Acosh Asin Asinh Atan Atanh AveragePool Bernoulli Conv ConvTranspose Cos Cosh DeformConv Det Elu EyeLike GRU "
    "GlobalAveragePool GlobalLpPool GlobalMaxPool GridSample HardSigmoid HardSwish InstanceNormalization LSTM "
    "LpNormalization LpPool MaxPool MaxRoiPool MaxUnpool Mish Multinomial NegativeLogLikelihoodLoss RNN RandomNormal "
    "RandomNormalLike RandomUniform RandomUniformLike RoiAlign Round Selu Sin Sinh Softplus Softsign SplitToSequence "
    "Tan ThresholdedRelu TopK"
)

TYPES_ADDED: dict[str, frozenset[str]] = {
    **dict.fromkeys(_ANY_DATA.split(), _FOUR_BITS),  # opsets 21, 23 and 24
    **dict.fromkeys(_MOVING.split(), _FOUR_BITS | _EIGHT_BITS),  # opsets 21, 23 and 24
    **dict.fromkeys(_COMPUTING.split(), _BFLOAT16),  # opset 22; TopK and SplitToSequence opset 24
    "Dropout": _EIGHT_BITS | _BFLOAT16,  # opset 22
}
"""Operator -> types its opset-20 form does not take; nothing else changed."""

ATTRIBUTES_ADDED: dict[str, dict[str, str]] = {
    "Cast": {"round_mode": "up"},  # opset 24; says how to round to FLOAT8E8M0, and means nothing for other types
    "CastLike": {"round_mode": "up"},
}
"""Operator -> attributes opset 20 does not have and the value that says what opset 20 does."""

RAISED: dict[str, str] = {
    "Attention": "opset 23 and 24",
    "DequantizeLinear": "since opset 21 with blocks, since 23 with an output type",
    "GroupNormalization": "since opset 21 with scale and bias per channel instead of per group",
    "QLinearMatMul": "since opset 21 with other types of scales",
    "QuantizeLinear": "since opset 21 with blocks and an output type, since 23 with a precision",
    "RotaryEmbedding": "opset 23",
    "Swish": "opset 24",
    "TensorScatter": "opset 24",
}
"""Operators that opset 20 cannot say, or says otherwise. RMSNormalization (opset 23) is written out instead."""


class OpsetDowngradePass(ir.passes.InPlacePass):
    """Checks every node against the tables, writes out RMSNormalization and stamps the model opset 20."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """See the class.

        Raises:
            EngineError: an opset newer than the tables, or a node opset 20 has no equal for.
        """
        version = model.opset_imports.get("", OPSET)
        if version > NEWEST_OPSET:
            raise EngineError(
                f"The graph is of opset {version}; its changes are known up to {NEWEST_OPSET}. Build the bundle again "
                "with this version."
            )
        for node in list(model.graph):
            if node.op_type == "RMSNormalization" and node.domain == "":
                _write_out_norm(node)
        remove_dead_nodes(model)
        problems = [problem for graph in model.graphs() for node in graph for problem in _restate(node)]
        if problems:
            raise EngineError(f"The graph cannot be stated in opset {OPSET}: {'; '.join(sorted(set(problems)))}.")
        for graph in model.graphs():
            graph.opset_imports[""] = OPSET
        model.ir_version = IR_VERSION
        return ir.passes.PassResult(model, version != OPSET)


def _restate(node: ir.Node) -> list[str]:
    """Drops what opset 20 does not know and says the same without; returns what it cannot."""
    if node.domain:
        return [f"{node.domain}::{node.op_type} is no standard operator"]
    if node.op_type == "DequantizeLinear" and not {"block_size", "output_dtype"} & node.attributes.keys():
        node.version = None  # one scale a channel is what opset 20 says too
        return [f"DequantizeLinear of {name}" for name in ("INT4", "UINT4") if _type_name(node.inputs[0]) == name]
    if node.op_type in RAISED:
        return [f"{node.op_type} ({RAISED[node.op_type]})"]
    problems = []
    for name, old in ATTRIBUTES_ADDED.get(node.op_type, {}).items():
        attribute = node.attributes.pop(name, None)
        if attribute is not None and attribute.as_string() != old:
            problems.append(f"{node.op_type} with {name}={attribute.as_string()}")
    types = {_type_name(value) for value in (*node.inputs, *node.outputs)}
    refused = types & TYPES_ADDED.get(node.op_type, frozenset())
    problems += [f"{node.op_type} of {name}" for name in sorted(refused)]
    node.version = None
    return problems


def _type_name(value: ir.Value | None) -> str:
    """The type of a value; of one the tracer left untyped, that of what it is computed from."""
    while value is not None and value.dtype is None:
        node = value.producer()
        value = node.inputs[0] if node is not None and node.inputs else None
    return "" if value is None or value.dtype is None else value.dtype.name


def _write_out_norm(node: ir.Node) -> None:
    """RMSNormalization-23: x / sqrt(mean(x^2) + epsilon) in fp32, times the weight."""
    x, weight = node.inputs[0], node.inputs[1]
    graph, kind = node.graph, None if x is None else x.dtype
    assert x is not None and weight is not None and graph is not None
    axis, epsilon = integer_attribute(node, "axis", -1), node.attributes.get_float("epsilon", 1e-5)
    stash = integer_attribute(node, "stash_type", int(ir.DataType.FLOAT))
    if axis != -1 or stash != int(ir.DataType.FLOAT):
        raise EngineError(f"RMSNormalization with axis {axis} and stash_type {stash}; only -1 and 1 (fp32) are known.")

    def op(name: str, inputs: list[ir.Value], **attributes: Any) -> ir.Value:
        return emit(node, name, inputs, attributes, dtype=ir.DataType.FLOAT)

    wide = x if kind == ir.DataType.FLOAT else op("Cast", [x], to=ir.DataType.FLOAT)
    mean = op("ReduceMean", [op("Mul", [wide, wide]), add_integers(graph, [-1])], keepdims=1)
    small = add_constant(graph, f"lowered.float.{epsilon!r}", np.array(epsilon, np.float32))
    normed = op("Div", [wide, op("Sqrt", [op("Add", [mean, small])])])
    if kind != ir.DataType.FLOAT:
        normed = emit(node, "Cast", [normed], {"to": kind}, dtype=kind)
    replace(node.outputs[0], emit(node, "Mul", [normed, weight], dtype=kind))
