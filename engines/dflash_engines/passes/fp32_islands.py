"""Named values of a half-precision graph in fp32, and nothing else: what fp16 cannot hold."""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir

from dflash_engines.passes.graph_reading import HALF_TYPES, dims
from dflash_engines.passes.graph_writing import emit
from dflash_engines.passes.retype_to_fp32 import widen_attributes
from dflash_runtime.errors import EngineError

_FP32 = ir.DataType.FLOAT
_MOVES = frozenset({
    "Concat", "Expand", "Flatten", "Gather", "GatherND", "Identity", "Neg", "Reshape", "Slice", "Split", "Squeeze",
    "Transpose", "Unsqueeze",
})  # fmt: skip
"""They hand on the magnitude of what they read."""
_HALF_ONLY = frozenset({"Attention", "TensorScatter"})
"""Caches and fused attention kernels hold half precision."""
_FREE = frozenset({"taps"})
"""Inputs and outputs whose type may change; caches may not."""


class Fp32IslandsPass(ir.passes.InPlacePass):
    """Types the named half-precision values fp32 and computes their makers and readers in fp32.

    With a value go what only moves it and the sums it enters, so that a residual stream stays in fp32 from its first
    large sum to the last norm. A reader's own result is rounded as before. Names stay where they are.

    Args:
        names: Values of the graph; those that are no half-precision values of it are left out.

    Raises:
        EngineError: a value enters a cache or attention, which hold half precision.
    """

    def __init__(self, names: Collection[str]) -> None:
        super().__init__()
        self._names = frozenset(names)

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """See the class."""
        graph = model.graph
        islands = _spread(graph, self._names)
        if not islands:
            return ir.passes.PassResult(model, False)
        _refuse_half_only(graph, islands)
        was = {value: value.dtype for value in islands if value.dtype is not None}
        for value in islands:
            value.type = ir.TensorType(_FP32)
        casts: dict[ir.Value, ir.Value] = {}
        for node in list(graph):
            reads = any(value in was for value in node.inputs)
            if reads and node.op_type == "Cast" and node.outputs[0].dtype == _FP32:
                _bypass(node)
            elif not reads and node.op_type in _MOVES and node.outputs[0] in was:
                for output in node.outputs:  # rows of a table: the table stays as it is
                    _cast_behind(node, output, was[output], _FP32)
            elif reads or any(value in was for value in node.outputs):
                _compute_in_fp32(node, was, casts)
        return ir.passes.PassResult(model, True)

    def ensures(self, model: ir.Model) -> None:
        """No named value is left in half precision."""
        values = [*model.graph.inputs, *(output for node in model.graph for output in node.outputs)]
        left = [value.name for value in values if value.name in self._names and value.dtype in HALF_TYPES]
        if left:
            raise ir.passes.PostconditionError(f"still half precision: {left[:5]}")


def _spread(graph: ir.Graph, names: frozenset[str]) -> set[ir.Value]:
    """The named values, and those that are as large because they move or sum them."""
    islands = {value for value in graph.inputs if value.name in names and value.dtype in HALF_TYPES}
    for node in graph:
        for output in node.outputs:
            if output.dtype in HALF_TYPES and (output.name in names or _carries(node, output, islands)):
                islands.add(output)
    return islands


def _carries(node: ir.Node, output: ir.Value, islands: set[ir.Value]) -> bool:
    read = [value for value in node.inputs if value in islands]
    if not read:
        return False
    shape = dims(output)
    is_sum = node.op_type == "Add" and shape is not None and len(shape) == 3
    return node.op_type in _MOVES or (is_sum and any(dims(value) == shape for value in read))


def _refuse_half_only(graph: ir.Graph, islands: set[ir.Value]) -> None:
    interface = [v for v in (*graph.inputs, *graph.outputs) if v in islands and v.name not in _FREE]
    stuck = [v for node in graph if node.op_type in _HALF_ONLY for v in (*node.inputs, *node.outputs) if v in islands]
    for value in (*stuck, *interface):
        raise EngineError(
            f"{value.name} would have to be fp32, and it is held by attention or a KV cache, which have no fp32 form."
        )


def _compute_in_fp32(node: ir.Node, was: dict[ir.Value, ir.DataType], casts: dict[ir.Value, ir.Value]) -> None:
    half = next(was[value] for value in (*node.inputs, *node.outputs) if value in was)
    for index, value in enumerate(node.inputs):
        if value is not None and value.dtype in HALF_TYPES:
            if value not in casts:
                casts[value] = _widened(node, value)
            node.replace_input_with(index, casts[value])
    widen_attributes(node)
    for output in node.outputs:
        if output.dtype in HALF_TYPES:
            _cast_behind(node, output, _FP32, half)


def _widened(before: ir.Node, value: ir.Value) -> ir.Value:
    """The value in fp32.

    Of a turned weight the stored one is cast, as engines are given a weight in the type of a cast right behind it; a
    quantised one stays as its kernels look for it, and what they give is cast.
    """
    turn = value.producer()
    weight = None if turn is None or turn.op_type != "Transpose" else turn.inputs[0]
    if turn is None or weight is None or not weight.is_initializer():
        return _cast(before, value)
    turned = emit(before, "Transpose", [_cast(before, weight)], dict(turn.attributes), dtype=_FP32)
    turned.shape = value.shape
    return turned


def _cast(before: ir.Node, value: ir.Value) -> ir.Value:
    wide = emit(before, "Cast", [value], {"to": _FP32}, dtype=_FP32)
    wide.shape = value.shape
    return wide


def _cast_behind(node: ir.Node, output: ir.Value, made: ir.DataType, wanted: ir.DataType) -> None:
    """The node makes one type, its readers get the other under the same name."""
    assert node.graph is not None
    cast = ir.node("Cast", [None], {"to": wanted})
    result = cast.outputs[0]
    result.shape, result.type, name = output.shape, ir.TensorType(wanted), output.name
    ir.convenience.replace_all_uses_with(output, result, replace_graph_outputs=True)
    cast.replace_input_with(0, output)
    node.graph.insert_after(node, cast)
    output.name, result.name = (None if name is None else f"{name}.made"), name
    output.type = ir.TensorType(made)


def _bypass(cast: ir.Node) -> None:
    """A cast that no longer does anything goes, but for one that makes an output of the graph."""
    output, source = cast.outputs[0], cast.inputs[0]
    assert cast.graph is not None and source is not None
    if not output.is_graph_output():
        ir.convenience.replace_all_uses_with(output, source)
        cast.graph.remove(cast, safe=True)
