"""The residual stream of a half-precision graph in fp32: what layers add to it is rounded, the sum is not."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from dflash_engines.passes.graph_reading import HALF_TYPES, dims
from dflash_engines.passes.graph_writing import emit, remove_dead_nodes, replace
from dflash_runtime.errors import EngineError

_FP32 = ir.DataType.FLOAT
_MOVES = frozenset({"Gather", "GatherND", "Identity", "Slice"})
"""They pick rows of the stream, as before the output head."""


class Fp32ResidualsPass(ir.passes.InPlacePass):
    """Adds up the residual stream in fp32, from the embedding rows to the last norm.

    Norms compute in fp32 already and take the stream as it is; whatever else reads it (taps, norms written in half
    precision) gets it rounded. A residual may so pass the range of fp16; what a layer adds, and a tap, may not.

    Raises:
        EngineError: the graph takes tokens and no stream is found in it.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """See the class."""
        starts = [rows for node in list(model.graph) if (rows := _embedded(node)) is not None]
        stream = {rows: _widen(rows) for rows in starts}  # as readers see it -> in fp32
        for node in list(model.graph):  # in the order of the graph: a sum comes after what it sums
            if node.op_type == "Add" and any(value in stream for value in node.inputs):
                half, wide = _in_fp32(node, [_term(node, value, stream) for value in node.inputs])
            elif node.op_type in _MOVES and node.inputs[0] in stream:
                half, wide = _in_fp32(node, [stream[node.inputs[0]], *node.inputs[1:]])
            else:
                continue
            stream[half] = wide
        embeds = any(value.name == "input_ids" for value in model.graph.inputs)
        kept = any(_summed_in_fp32(node.outputs[0]) for node in model.graph if node.op_type in ("Gather", "Mul"))
        if embeds and len(stream) == len(starts) and not kept:
            raise EngineError(
                "No residual stream is found in this graph: nothing is added to its embedding rows. Leave out "
                "--fp32-residuals."
            )
        for half, wide in stream.items():
            for reader in half.consumers():
                target = reader.outputs[0]
                if reader.op_type == "Cast" and target is not wide and target.dtype == _FP32:
                    replace(target, wide)
        remove_dead_nodes(model)
        return ir.passes.PassResult(model, bool(starts))

    def ensures(self, model: ir.Model) -> None:
        """No embedding row is added to in half precision."""
        for node in model.graph:
            start = _embedded(node)
            if start is not None and any(user.op_type == "Add" for user in start.consumers()):
                raise ir.passes.PostconditionError(f"still added to in half precision: {start.name}")


def _embedded(node: ir.Node) -> ir.Value | None:
    """The half-precision rows a Gather reads from a matrix, scaled where the model does, that sums begin with."""
    if node.op_type != "Gather" or node.outputs[0].dtype not in HALF_TYPES:
        return None
    rows, table = node.outputs[0], node.inputs[0]
    if table is None or table.producer() is not None or table.shape is None or len(table.shape) != 2:
        return None
    while not any(user.op_type == "Add" for user in rows.consumers()):
        scaled = [user for user in rows.consumers() if user.op_type in ("Mul", "Identity")]
        if len(scaled) != 1:
            return None
        rows = scaled[0].outputs[0]
    return rows


def _summed_in_fp32(rows: ir.Value) -> bool:
    """Whether the graph itself widens what sums begin with: then all of its stream is in fp32 as it is."""
    wide = [user.outputs[0] for user in rows.consumers() if user.op_type == "Cast" and rows.dtype in HALF_TYPES]
    return any(user.op_type == "Add" and dims(user.outputs[0]) == dims(rows) for v in wide for user in v.consumers())


def _widen(rows: ir.Value) -> ir.Value:
    node = rows.producer()
    assert node is not None and node.graph is not None
    cast = ir.node("Cast", [rows], {"to": _FP32})
    node.graph.insert_after(node, cast)
    wide = cast.outputs[0]
    wide.shape, wide.type = rows.shape, ir.TensorType(_FP32)
    return wide


def _term(node: ir.Node, value: ir.Value | None, stream: dict[ir.Value, ir.Value]) -> ir.Value:
    assert value is not None
    return stream[value] if value in stream else emit(node, "Cast", [value], {"to": _FP32}, dtype=_FP32)


def _in_fp32(node: ir.Node, inputs: Sequence[ir.Value | None]) -> tuple[ir.Value, ir.Value]:
    """Puts the node in fp32, and its result rounded for whoever reads half precision, in place of the node."""
    before = node.outputs[0]
    wide = emit(node, node.op_type, inputs, dict(node.attributes), dtype=_FP32)
    wide.shape = before.shape
    rounded = emit(node, "Cast", [wide], {"to": before.dtype}, dtype=before.dtype)
    replace(before, rounded)
    return rounded, wide
