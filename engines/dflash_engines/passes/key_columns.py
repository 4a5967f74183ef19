"""The keys of two-part attention as columns: the T rows of the cache, then the S rows of this call.

A portable mask is a function of key numbers 0 ... T-1, because there the new rows already lie in the cache. Here they
do not, so every mask is computed over the T cache rows and the S new ones, whose numbers follow `position`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterable

import numpy as np
import onnx_ir as ir

from dflash_engines.passes.graph_reading import constant, dims, integer_attribute, integers, made_by, scalar
from dflash_engines.passes.graph_writing import add_constant, add_integers, emit
from dflash_runtime.errors import EngineError

_ELEMENTWISE = frozenset({
    "Abs", "Add", "And", "Cast", "Div", "Equal", "Greater", "GreaterOrEqual", "Identity", "Less", "LessOrEqual", "Max",
    "Min", "Mod", "Mul", "Neg", "Not", "Or", "Sub", "Where", "Xor",
})  # fmt: skip
_SAME_NUMBER = frozenset({"Cast", "Identity", "Reshape", "Squeeze", "Unsqueeze"})
_CAPACITY_AXIS = 2
_NO_END = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class KeyColumns:
    """Values every layer's attention shares; those no layer reads are dead and go."""

    capacity: ir.Value
    """INT64 [1], T: rows the cache has."""
    positions: ir.Value
    """INT64 [T+S], the number of the row in each column; a cache row past the valid length has one that is wrong."""
    live: ir.Value
    """BOOL [T+S], the column holds a row: it is older than `position`, or of this call."""
    causal: ir.Value
    """BOOL [1,1,S,T+S], live and not after the query."""


def add_key_columns(graph: ir.Graph, past: ir.Value, position: ir.Value, tokens: ir.Value) -> KeyColumns:
    """Computes the columns in front of everything that needs them.

    Args:
        graph: The graph.
        past: A cache, [1, kv_heads, T, D]; those of all layers that share the columns have the same T.
        position: INT64 [1], rows committed before this call, or of a ring the slot behind them.
        tokens: What is [1, S] or [1, S, ...] of this call.
    """
    made = position.producer()
    first = graph[0] if made is None else next(after for before, after in itertools.pairwise(graph) if before is made)
    zero, one = (add_constant(graph, f"lowered.number.{n}", np.array(n, np.int64)) for n in (0, 1))
    capacity = emit(first, "Shape", [past], {"start": 2, "end": 3}, dtype=ir.DataType.INT64, shape=(1,))
    count = emit(first, "Shape", [tokens], {"start": 1, "end": 2}, dtype=ir.DataType.INT64, shape=(1,))

    def numbers(length: ir.Value, name: str) -> ir.Value:
        end = emit(first, "Squeeze", [length], shape=())
        return emit(first, "Range", [zero, end, one], shape=(name,))

    cache_rows = numbers(capacity, "T")
    new_rows = emit(first, "Add", [numbers(count, "S"), position], shape=("S",))
    positions = emit(first, "Concat", [cache_rows, new_rows], {"axis": 0})
    boolean = ir.DataType.BOOL
    old = emit(first, "Less", [cache_rows, position], dtype=boolean, shape=("T",))
    own = emit(first, "GreaterOrEqual", [new_rows, position], dtype=boolean, shape=("S",))  # true: they are all live
    live = emit(first, "Concat", [old, own], {"axis": 0})
    queries = emit(first, "Reshape", [new_rows, add_integers(graph, [1, 1, -1, 1])], shape=(1, 1, "S", 1))
    not_after = emit(first, "LessOrEqual", [positions, queries], dtype=boolean)
    return KeyColumns(capacity, positions, live, emit(first, "And", [not_after, live]))


def find_key_numbers(graph: ir.Graph, caches: Collection[ir.Value]) -> list[ir.Node]:
    """The Range nodes that number the rows of one of these caches.

    Raises:
        EngineError: the capacity is used otherwise.
    """
    numbers = [node.outputs[0] for node in graph if _is_capacity(node, caches)]
    ranges: list[ir.Node] = []
    while numbers:
        number = numbers.pop()
        for node in number.consumers():
            if node.op_type in _SAME_NUMBER and node.inputs[0] is number:
                numbers.append(node.outputs[0])
            elif node.op_type == "Range" and [scalar(node.inputs[i]) for i in (0, 2)] == [0, 1]:
                ranges.append(node)
            else:
                raise _unknown_use(node)
    return ranges


def widen_masks(ranges: Iterable[ir.Node], columns: KeyColumns) -> set[ir.Value]:
    """Makes everything that was computed per cache row be computed per column.

    Args:
        ranges: What `find_key_numbers` found before the columns were added.
        columns: The columns.

    Returns:
        The values that now have one entry per column; their shapes are no longer stated.

    Raises:
        EngineError: something other than an elementwise mask is computed from the numbers of cache rows.
    """
    wide: set[ir.Value] = set()
    for node in ranges:
        readers = list(node.outputs[0].consumers())
        ir.convenience.replace_all_uses_with(node.outputs[0], columns.positions)
        _widen(readers, columns.positions, wide)
    return wide


def _is_capacity(node: ir.Node, caches: Collection[ir.Value]) -> bool:
    """Whether this reads T off one of the caches, before or after its write: the shape is the same."""
    source = node.inputs[0] if node.op_type == "Shape" else None
    scatter = made_by(source, "TensorScatter")
    cache = scatter.inputs[0] if scatter is not None else source
    if cache not in caches:
        return False
    start, end = integer_attribute(node, "start", 0), integer_attribute(node, "end", 4)
    if not start <= _CAPACITY_AXIS < end:
        return False
    if (start, end) != (_CAPACITY_AXIS, _CAPACITY_AXIS + 1):
        raise _unknown_use(node)
    return True


def _widen(readers: Iterable[ir.Node], source: ir.Value, wide: set[ir.Value]) -> None:
    pending = [(node, source) for node in readers]
    while pending:
        node, value = pending.pop()
        if node.op_type == "Attention" and node.inputs[3] is value:
            continue
        if node.op_type not in _ELEMENTWISE and not _keeps_columns(node, value):
            raise _unknown_use(node)
        output = node.outputs[0]
        if output not in wide:
            wide.add(output)
            output.shape = None
            pending += [(reader, output) for reader in output.consumers()]


def _keeps_columns(node: ir.Node, value: ir.Value) -> bool:
    """Whether a node that moves data leaves every column where it is."""
    if node.inputs[0] is not value:
        return False
    if node.op_type == "Unsqueeze":
        return constant(node.inputs[1]) is not None
    if node.op_type == "Reshape":
        shape = integers(node.inputs[1])
        return shape is not None and shape[-1] == -1 and set(shape[:-1]) <= {1}
    if node.op_type == "Slice":
        bounds = [integers(bound) for bound in node.inputs[1:]]
        starts, ends = bounds[:2]
        steps = bounds[3] if len(bounds) > 3 else [1]
        return starts == [0] and steps == [1] and ends is not None and ends[0] >= _NO_END
    return False


def _unknown_use(node: ir.Node) -> EngineError:
    shapes = [dims(value) for value in node.inputs]
    return EngineError(
        f"The graph uses the capacity of a cache in {node.op_type} ({node.name}, inputs {shapes}), which is neither a "
        "number of rows nor part of an elementwise mask. This attention cannot be split in two parts; use a backend "
        "with an Attention operator (ort-cpu, or TensorRT 10.15 and later)."
    )
