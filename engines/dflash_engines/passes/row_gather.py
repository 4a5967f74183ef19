"""Rows picked by number, which the tracer writes with six nodes, as one Gather."""

from __future__ import annotations

import onnx_ir as ir

from dflash_engines.passes.graph_reading import dims, integer_attribute, made_by
from dflash_engines.passes.graph_writing import emit, remove_dead_nodes, replace

_SWAP = [1, 0, 2]


class RowGatherPass(ir.passes.InPlacePass):
    """Transpose(GatherND(Transpose(x [1, S, H]), numbers as [R, 1])) -> Gather(x, numbers [R], axis=1)."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """See the class."""
        changed = 0
        for node in list(model.graph):
            match = _match(node)
            if match is not None:
                x, numbers = match
                replace(node.outputs[0], emit(node, "Gather", [x, numbers], {"axis": 1}, dtype=x.dtype))
                changed += 1
        remove_dead_nodes(model)
        return ir.passes.PassResult(model, changed > 0)


def _match(node: ir.Node) -> tuple[ir.Value, ir.Value] | None:
    gather = made_by(node.inputs[0], "GatherND") if _swaps(node) else None
    if gather is None or integer_attribute(gather, "batch_dims", 0):
        return None
    turned, column = (None if value is None else value.producer() for value in gather.inputs)
    if not _swaps(turned) or column is None or column.op_type != "Unsqueeze":
        return None
    assert turned is not None
    numbers = _without_expand(column.inputs[0])
    rank = dims(numbers)
    return (turned.inputs[0], numbers) if turned.inputs[0] and numbers and rank and len(rank) == 1 else None


def _without_expand(value: ir.Value | None) -> ir.Value | None:
    """What an Expand to the value's own length expands."""
    expand = made_by(value, "Expand")
    shape = None if expand is None else made_by(expand.inputs[1], "Shape")
    if expand is None or shape is None:
        return value
    alone = made_by(shape.inputs[0], "Max")
    source = alone.inputs[0] if alone is not None and len(alone.inputs) == 1 else shape.inputs[0]
    return source if source is expand.inputs[0] else value


def _swaps(node: ir.Node | None) -> bool:
    return node is not None and node.op_type == "Transpose" and list(node.attributes.get_ints("perm", ())) == _SWAP
