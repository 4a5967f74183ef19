"""Moves between the two layouts of attention: [1, heads, S, D] in the portable graph, [1, S, heads * D] in kernels."""

from __future__ import annotations

import onnx_ir as ir

from dflash_engines.passes.graph_reading import dims, made_by, swaps_heads_and_rows
from dflash_engines.passes.graph_writing import add_integers, emit


def as_rows(value: ir.Value, before: ir.Node) -> ir.Value:
    """The value [1, heads, S, D] as [1, S, heads * D].

    Looks through the transposition and reshape the traced graph made it with; where there are none, adds them.

    Args:
        value: heads and D must be known numbers.
        before: Where new nodes go.
    """
    graph = before.graph
    assert graph is not None
    _, heads, rows, head_dim = _known_dims(value)
    width = heads * head_dim
    shape = (1, rows, width)
    transpose = value.producer()
    if transpose is not None and swaps_heads_and_rows(transpose):
        source = transpose.inputs[0]
        reshape = made_by(source, "Reshape")
        if reshape is not None and dims(reshape.inputs[0]) == [1, rows, width]:
            found = reshape.inputs[0]
            assert found is not None
            return found
    else:
        source = emit(before, "Transpose", [value], {"perm": [0, 2, 1, 3]}, shape=(1, rows, heads, head_dim))
    return emit(before, "Reshape", [source, add_integers(graph, [0, 0, width])], shape=shape)


def as_heads(value: ir.Value, like: ir.Value, before: ir.Node) -> ir.Value:
    """The value [1, S, heads * D] in the layout [1, heads, S, D] of `like`."""
    graph = before.graph
    assert graph is not None
    _, heads, rows, head_dim = _known_dims(like)
    shape = add_integers(graph, [0, 0, heads, head_dim])
    four = emit(before, "Reshape", [value, shape], shape=(1, rows, heads, head_dim))
    return emit(before, "Transpose", [four], {"perm": [0, 2, 1, 3]}, shape=(1, heads, rows, head_dim))


def has_known_heads(value: ir.Value | None) -> bool:
    """Whether this is [1, heads, S, D] with known heads and D."""
    shape = dims(value)
    return shape is not None and len(shape) == 4 and isinstance(shape[1], int) and isinstance(shape[3], int)


def readers_as_rows(value: ir.Value) -> list[ir.Value]:
    """Values the graph made from `value` [1, heads, S, D] that are its rows [1, S, heads * D]."""
    _, heads, rows, head_dim = _known_dims(value)
    found = []
    for node in value.consumers():
        if swaps_heads_and_rows(node):
            for user in node.outputs[0].consumers():
                if user.op_type == "Reshape" and dims(user.outputs[0]) == [1, rows, heads * head_dim]:
                    found.append(user.outputs[0])
    return found


def _known_dims(value: ir.Value) -> tuple[int, int, int | str, int]:
    shape = dims(value)
    assert shape is not None and isinstance(shape[1], int) and isinstance(shape[3], int)
    return 1, shape[1], shape[2], shape[3]
