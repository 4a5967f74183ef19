"""A bf16 or fp16 graph with its own rounding, on a backend that has no half-precision kernels."""

from __future__ import annotations

import onnx_ir as ir

from dflash_engines.passes.graph_reading import HALF_TYPES, integer_attribute
from dflash_engines.passes.graph_writing import emit, remove_dead_nodes
from dflash_engines.passes.retype_to_fp32 import widen_attributes

# They only move or convert values, and ONNX Runtime's CPU has them for every half-precision type. Transpose is not
# among them: MatMul behind a cast behind a transposed bf16 weight crashes ONNX Runtime 1.32's optimizer.
_MOVES = frozenset(
    {"Cast", "Concat", "Constant", "Gather", "GatherND", "Identity", "Reshape", "Shape", "Size", "Slice", "Squeeze"}
    | {"TensorScatter", "Unsqueeze"}
)
_INT64_RESULTS = frozenset({"ArgMax", "ArgMin", "NonZero", "Shape", "Size"})
_BOOL_RESULTS = frozenset({"And", "Equal", "Greater", "GreaterOrEqual", "IsInf", "IsNaN", "Less", "LessOrEqual", "Not"})


class EmulateHalfPass(ir.passes.InPlacePass):
    """Computes every node in fp32 and rounds its result to the type the graph gives it.

    Caches, weights and everything between nodes stay in half precision. Inputs and outputs of the graph become fp32,
    so that it is called like the fp32 graph.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """See the class."""
        graph = model.graph
        _fill_in_types(graph)
        widened: dict[ir.Value, ir.Value] = {}
        changed = _widen_inputs(graph)
        for node in list(graph):
            if node.op_type not in _MOVES and _touches_half(node):
                _compute_in_fp32(graph, node, widened)
                changed = True
        changed |= _widen_outputs(graph)
        remove_dead_nodes(model)
        return ir.passes.PassResult(model, changed)

    def ensures(self, model: ir.Model) -> None:
        """Only nodes that move or convert values touch half precision."""
        left = {node.op_type for node in model.graph if node.op_type not in _MOVES and _touches_half(node)}
        if left:
            raise ir.passes.PostconditionError(f"still computes in half precision: {sorted(left)}")


def _touches_half(node: ir.Node) -> bool:
    return any(value is not None and value.dtype in HALF_TYPES for value in (*node.inputs, *node.outputs))


def _fill_in_types(graph: ir.Graph) -> None:
    """Types values the tracer left untyped, so that no half-precision node is missed."""
    for node in graph:
        for output in node.outputs:
            if output.dtype is None:
                known = _result_type(node)
                if known is not None:
                    output.type = ir.TensorType(known)


def _result_type(node: ir.Node) -> ir.DataType | None:
    if node.op_type in _INT64_RESULTS:
        return ir.DataType.INT64
    if node.op_type in _BOOL_RESULTS:
        return ir.DataType.BOOL
    if node.op_type == "Cast":
        return ir.DataType(integer_attribute(node, "to", int(ir.DataType.FLOAT)))
    source = node.inputs[1 if node.op_type == "Where" else 0] if node.inputs else None
    return None if source is None else source.dtype


def _widen_inputs(graph: ir.Graph) -> bool:
    halves = [value for value in graph.inputs if value.dtype in HALF_TYPES]
    for value in halves:
        cast = ir.node("Cast", [None], {"to": value.dtype})
        rounded = cast.outputs[0]
        rounded.name, rounded.shape, rounded.type = f"{value.name}.rounded", value.shape, value.type
        ir.convenience.replace_all_uses_with(value, rounded)
        cast.replace_input_with(0, value)
        value.type = ir.TensorType(ir.DataType.FLOAT)
        graph.insert_before(graph[0], cast)
    return bool(halves)


def _compute_in_fp32(graph: ir.Graph, node: ir.Node, widened: dict[ir.Value, ir.Value]) -> None:
    for index, value in enumerate(node.inputs):
        if value is not None and value.dtype in HALF_TYPES:
            if value not in widened:
                widened[value] = emit(node, "Cast", [value], {"to": ir.DataType.FLOAT}, dtype=ir.DataType.FLOAT)
                widened[value].shape = value.shape
            node.replace_input_with(index, widened[value])
    widen_attributes(node)
    for output in node.outputs:
        if output.dtype in HALF_TYPES:
            _round(graph, node, output)


def _round(graph: ir.Graph, node: ir.Node, output: ir.Value) -> None:
    """Rounds a result right behind its node; readers get the rounded value, which takes the name over."""
    cast = ir.node("Cast", [None], {"to": output.dtype})
    rounded = cast.outputs[0]
    rounded.shape, rounded.type = output.shape, output.type
    name = output.name
    ir.convenience.replace_all_uses_with(output, rounded, replace_graph_outputs=True)
    cast.replace_input_with(0, output)
    graph.insert_after(node, cast)
    output.name, rounded.name = (None if name is None else f"{name}.exact"), name
    output.type = ir.TensorType(ir.DataType.FLOAT)


def _widen_outputs(graph: ir.Graph) -> bool:
    halves = [(index, value) for index, value in enumerate(graph.outputs) if value.dtype in HALF_TYPES]
    for index, value in halves:
        cast = ir.node("Cast", [value], {"to": ir.DataType.FLOAT})
        output = cast.outputs[0]
        output.shape, output.type = value.shape, ir.TensorType(ir.DataType.FLOAT)
        name = value.name
        graph.outputs[index] = output
        value.name, output.name = f"{name}.rounded", name
        graph.append(cast)
    return bool(halves)
