"""x * cos + rotate_half(x) * sin, seven nodes in the traced graph, as one RotaryEmbedding node."""

from __future__ import annotations

import sys

import onnx_ir as ir

from dflash_engines.passes.graph_reading import (
    HALF_TYPES,
    dims,
    integer_attribute,
    integers,
    made_by,
    scalar,
    swaps_heads_and_rows,
)
from dflash_engines.passes.graph_writing import emit, remove_dead_nodes, replace
from dflash_engines.passes.head_rows import as_heads, as_rows, has_known_heads

_UNBOUNDED = sys.maxsize >> 1
_ELEMENTWISE = ("Cos", "Sin", "Cast", "Identity")
_KINDS = HALF_TYPES | {ir.DataType.FLOAT}


class FuseRotaryEmbeddingPass(ir.passes.InPlacePass):
    """Fuses rotations in halves whose tables repeat their first half, as every "neox" rotary embedding does."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """See the class."""
        tables: dict[ir.Value, ir.Value] = {}
        fused = 0
        for node in list(model.graph):
            match = _match(node)
            if match is None:
                continue
            x, cos, sin = match
            halves = [_first_half(table, tables) for table in (cos, sin)]
            replace(node.outputs[0], _rotate(node, x, halves))
            fused += 1
        remove_dead_nodes(model)
        return ir.passes.PassResult(model, fused > 0)


def _rotate(before: ir.Node, x: ir.Value, tables: list[ir.Value]) -> ir.Value:
    if not swaps_heads_and_rows(x.producer()):
        return emit(before, "RotaryEmbedding", [x, *tables], shape=dims(x))
    # In rows, [1, S, heads * D], no transposition is needed before or after.
    rows, shape = as_rows(x, before), dims(x)
    assert shape is not None
    rotated = emit(before, "RotaryEmbedding", [rows, *tables], {"num_heads": shape[1]}, shape=dims(rows))
    return as_heads(rotated, x, before)


def _match(node: ir.Node) -> tuple[ir.Value, ir.Value, ir.Value] | None:
    """(x, cos, sin) with tables [1, S, D] if `node` adds the two products."""
    if node.op_type != "Add" or node.outputs[0].dtype not in _KINDS:
        return None
    for straight, crossed in (tuple(node.inputs), tuple(reversed(node.inputs))):
        by_cos, by_sin = made_by(straight, "Mul"), made_by(crossed, "Mul")
        if by_cos is None or by_sin is None:
            continue
        x, cos = by_cos.inputs
        turned, sin = by_sin.inputs
        if not has_known_heads(x) or not _is_rotated_half(turned, x):
            continue
        cos_table, sin_table = _table(cos, x), _table(sin, x)
        if x is not None and cos_table is not None and sin_table is not None:
            return x, cos_table, sin_table
    return None


def _is_rotated_half(turned: ir.Value | None, x: ir.Value | None) -> bool:
    """Whether `turned` is concat(-x[half:], x[:half])."""
    shape, concat = dims(x), made_by(turned, "Concat")
    if concat is None or len(concat.inputs) != 2 or integer_attribute(concat, "axis", 0) not in (-1, 3):
        return False
    negated = made_by(concat.inputs[0], "Neg")
    size = shape[3] if shape else None
    if negated is None or not isinstance(size, int) or size % 2:
        return False
    return _is_slice(negated.inputs[0], x, size // 2, size) and _is_slice(concat.inputs[1], x, 0, size // 2)


def _is_slice(value: ir.Value | None, source: ir.Value | None, start: int, end: int) -> bool:
    node = made_by(value, "Slice")
    if node is None or node.inputs[0] is not source or len(node.inputs) < 4:
        return False
    starts, ends, axes = (integers(number) for number in node.inputs[1:4])
    steps = integers(node.inputs[4]) if len(node.inputs) > 4 else [1]
    if starts != [start] or steps != [1] or ends is None or len(ends) != 1 or axes not in ([3], [-1]):
        return False
    shape = dims(source)
    return ends[0] == end or (shape is not None and end == shape[3] and ends[0] >= _UNBOUNDED)


def _table(value: ir.Value | None, x: ir.Value | None) -> ir.Value | None:
    """The table [1, S, D] behind [1, 1, S, D], if its two halves are the same."""
    node, x_shape = made_by(value, "Unsqueeze"), dims(x)
    if node is None or integers(node.inputs[1]) != [1] or x_shape is None:
        return None
    table = node.inputs[0]
    shape = dims(table)
    if shape is None or shape != [1, x_shape[2], x_shape[3]] or not _halves_are_equal(table):
        return None
    return table


def _halves_are_equal(value: ir.Value | None) -> bool:
    while value is not None and (node := value.producer()) is not None:
        if node.op_type == "Concat":
            same = len(node.inputs) == 2 and node.inputs[0] is node.inputs[1]
            return same and integer_attribute(node, "axis", 0) in (-1, 2)
        scaled = node.op_type in ("Mul", "Add") and scalar(node.inputs[1]) is not None
        if not scaled and node.op_type not in _ELEMENTWISE:
            return False
        value = node.inputs[0]
    return False


def _first_half(table: ir.Value, known: dict[ir.Value, ir.Value]) -> ir.Value:
    """The first half of the last axis, made once per table: the same steps on what its two halves repeat."""
    if table not in known:
        node, shape = table.producer(), dims(table)
        assert node is not None and node.graph is not None and shape is not None and isinstance(shape[2], int)
        if node.op_type == "Concat":
            assert node.inputs[0] is not None
            return node.inputs[0]
        source, *others = node.inputs
        assert source is not None
        step = ir.node(node.op_type, [_first_half(source, known), *others], node.attributes)
        node.graph.insert_after(node, step)
        step.outputs[0].type = table.type
        step.outputs[0].shape = ir.Shape([1, shape[1], shape[2] // 2])
        known[table] = step.outputs[0]
    return known[table]
