"""Rotation of queries and keys inside the attention kernel, instead of two nodes in front of it."""

from __future__ import annotations

import onnx_ir as ir

from dflash_engines.passes.graph_reading import dims, integer_attribute, made_by
from dflash_engines.passes.graph_writing import MICROSOFT_DOMAIN, add_integers, emit, remove_dead_nodes

_TOTAL, _FIRST_TABLE = 6, 7  # inputs of the kernel
# The kernel refuses tables that are not a multiple of this wide.
_TABLE_MULTIPLE = 8


class KernelRotationPass(ir.passes.InPlacePass):
    """Two RotaryEmbedding and a GroupQueryAttention -> one GroupQueryAttention that rotates.

    The kernel looks a row's angles up by its position, in tables from position 0 on. The graph has them for the rows
    of this call, whatever the kind of rotation; zeros in front, which the kernel never reads, put them in their place.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """See the class."""
        placed: dict[tuple[ir.Value | None, ...], list[ir.Value]] = {}
        fused = 0
        for kernel in list(model.graph):
            rotations = _rotations(kernel)
            if rotations is None:
                continue
            key = (*rotations[0].inputs[1:], kernel.inputs[_TOTAL])
            if key not in placed:
                placed[key] = _by_position(kernel, rotations[0])
            kernel.resize_inputs(_FIRST_TABLE + 2)
            sources = [rotation.inputs[0] for rotation in rotations]
            for index, value in enumerate(sources):
                kernel.replace_input_with(index, value)
            for index, table in enumerate(placed[key], _FIRST_TABLE):
                kernel.replace_input_with(index, table)
            kernel.attributes["do_rotary"] = ir.AttrInt64("do_rotary", 1)
            fused += 1
        remove_dead_nodes(model)
        return ir.passes.PassResult(model, fused > 0)


def _rotations(kernel: ir.Node) -> tuple[ir.Node, ir.Node] | None:
    """What rotates queries and keys of a kernel, if the kernel can do the same."""
    if (kernel.op_type, kernel.domain) != ("GroupQueryAttention", MICROSOFT_DOMAIN):
        return None
    if len(kernel.inputs) > _FIRST_TABLE:
        return None  # it rotates already
    query, key = (made_by(value, "RotaryEmbedding") for value in kernel.inputs[:2])
    if query is None or key is None or query.inputs[1:] != key.inputs[1:] or len(query.inputs) != 3:
        return None
    table, width = dims(query.inputs[1]), dims(query.inputs[0])
    heads = kernel.attributes.get_int("num_heads", 0)
    if table is None or width is None or len(table) != 3 or len(width) != 3 or not isinstance(table[2], int):
        return None
    whole = width[2] == 2 * table[2] * heads and table[2] % _TABLE_MULTIPLE == 0 and table[0] == 1
    plain = all(
        not integer_attribute(node, "interleaved", 0) and not integer_attribute(node, "rotary_embedding_dim", 0)
        for node in (query, key)
    )
    alone = all(len(node.outputs[0].uses()) == 1 and not node.outputs[0].is_graph_output() for node in (query, key))
    return (query, key) if whole and plain and alone else None


def _by_position(kernel: ir.Node, rotation: ir.Node) -> list[ir.Value]:
    """The tables [1, S, D/2] of a rotation, which are those of the last S rows, as [total, D/2] for all rows."""
    graph, total = kernel.graph, kernel.inputs[_TOTAL]
    tables = [table for table in rotation.inputs[1:] if table is not None]
    assert graph is not None
    zero, half = add_integers(graph, [0]), (dims(tables[0]) or [])[2]
    rows = emit(kernel, "Shape", [tables[0]], {"start": 1, "end": 2}, dtype=ir.DataType.INT64, shape=(1,))
    end = emit(kernel, "Cast", [total], {"to": ir.DataType.INT64}, dtype=ir.DataType.INT64, shape=())
    earlier = emit(kernel, "Sub", [end, rows], shape=(1,))
    pads = emit(kernel, "Concat", [earlier, zero], {"axis": 0}, shape=(2,))
    flat = [emit(kernel, "Squeeze", [table, zero], shape=(None, half)) for table in tables]
    return [emit(kernel, "Pad", [table, pads, None, zero], shape=(None, half)) for table in flat]
