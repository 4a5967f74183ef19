"""Caches of windowed attention as rings: of constant size, whatever the context."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from dflash_engines.passes.cached_attention import CachedAttention, find_cached_attention
from dflash_engines.passes.graph_reading import dims
from dflash_engines.passes.graph_writing import add_integers, emit, remove_dead_nodes
from dflash_runtime.window_rings import Ring

_TO_THE_END = np.iinfo(np.int64).max


class WindowRingsPass(ir.passes.InPlacePass):
    """Row s of a ringed cache lies in slot s mod rows; attention reads the ring under a mask by absolute positions.

    Keys are rotated by their absolute position before they are written, so their order in the ring is of no matter.
    Of a call with more rows than the ring the last ones are written. A slot counts as the latest row that may lie
    there; a dead row of a rejected draft counts as the one it replaced, which no query of the next block sees any more.

    Args:
        rings: Cache input -> its ring. A layer that saw the whole context sees the window too.
    """

    def __init__(self, rings: Mapping[str, Ring]) -> None:
        self._rings = rings

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """See the class."""
        masks: dict[tuple[Ring, bool], tuple[ir.Value, ir.Value]] = {}
        for attention in find_cached_attention(model):
            past = attention.key_scatter.inputs[0]
            if past is not None and (ring := self._rings.get(str(past.name))) is not None:
                if (ring, attention.causal) not in masks:
                    masks[ring, attention.causal] = _mask(attention, ring)
                _read_ring(attention, *masks[ring, attention.causal])
        scatters = [node for node in model.graph if node.op_type == "TensorScatter"]
        written = [(node, self._rings[name]) for node in scatters if (name := _cache_name(node)) in self._rings]
        for node, ring in written:
            _write_ring(node, ring)
        remove_dead_nodes(model)
        return ir.passes.PassResult(model, bool(written))

    def ensures(self, model: ir.Model) -> None:
        """Every cache that should be a ring has its size and is written in a circle."""
        circular = {_cache_name(node) for node in model.graph if node.attributes.get_string("mode", "") == "circular"}
        inputs = {str(value.name): dims(value) for value in model.graph.inputs}
        wrong = [name for name, ring in self._rings.items()
                 if name in inputs and (name not in circular or (inputs[name] or [0] * 4)[2] != ring.rows)]  # fmt: skip
        if wrong:
            raise ir.passes.PostconditionError(f"caches that are no rings: {wrong}")


def _cache_name(scatter: ir.Node) -> str:
    past = scatter.inputs[0]
    return "" if past is None or not past.is_graph_input() else str(past.name)


def _mask(attention: CachedAttention, ring: Ring) -> tuple[ir.Value, ir.Value]:
    """(how many slots are in use [1], what each query sees of them [1, 1, b, slots])."""
    node, length = attention.node, attention.length
    graph = node.graph
    assert graph is not None
    zero, one, window, size = (add_integers(graph, [n]) for n in (0, 1, ring.window_tokens, ring.rows))
    used = emit(node, "Min", [length, size], shape=(1,))
    count = emit(node, "Shape", [attention.query], {"start": 2, "end": 3}, dtype=ir.DataType.INT64, shape=(1,))
    last = emit(node, "Sub", [length, one], shape=(1,))
    slots = _counted(node, used)
    age = emit(node, "Mod", [emit(node, "Sub", [last, slots], shape=(None,)), size], shape=(None,))
    keys = emit(node, "Sub", [last, age], shape=(None,))  # the latest row of each slot
    first = emit(node, "Sub", [length, count], shape=(1,))
    queries = emit(node, "Add", [first, _counted(node, count)], shape=(None,))
    queries = emit(node, "Unsqueeze", [queries, one], shape=(None, 1))
    distance = emit(node, "Sub", [queries, keys], shape=(None, None))
    near = emit(node, "Less", [distance, window], dtype=ir.DataType.BOOL, shape=(None, None))
    least = zero if attention.causal else add_integers(graph, [1 - ring.window_tokens])
    behind = emit(node, "GreaterOrEqual", [distance, least], dtype=ir.DataType.BOOL, shape=(None, None))
    seen = emit(node, "And", [near, behind], shape=(None, None))
    return used, emit(node, "Unsqueeze", [seen, add_integers(graph, [0, 1])], shape=(1, 1, None, None))


def _counted(node: ir.Node, count: ir.Value) -> ir.Value:
    """0, 1, ... up to `count` [1]."""
    assert node.graph is not None
    ends = [add_integers(node.graph, [n]) for n in (0, 1)]
    start, end, step = (emit(node, "Squeeze", [value], shape=()) for value in (ends[0], count, ends[1]))
    return emit(node, "Range", [start, end, step], shape=(None,))


def _read_ring(attention: CachedAttention, used: ir.Value, mask: ir.Value) -> None:
    """Attention over the slots in use. The copy costs less than walking slots that are empty yet."""
    node = attention.node
    assert node.graph is not None
    zero, rows_axis = (add_integers(node.graph, [n]) for n in (0, 2))
    for index, scatter in ((1, attention.key_scatter), (2, attention.value_scatter)):
        shape = dims(scatter.outputs[0])
        assert shape is not None
        kept = emit(node, "Slice", [scatter.outputs[0], zero, used, rows_axis], shape=[*shape[:2], None, shape[3]])
        node.replace_input_with(index, kept)
    node.replace_input_with(3, mask)
    node.replace_input_with(6, None)
    node.attributes.pop("is_causal", None)
    node.metadata_props["dflash.derived"] = "ring"


def _write_ring(scatter: ir.Node, ring: Ring) -> None:
    """Writes the last rows of the call, as many as the ring has, from slot to slot and round."""
    graph, (past, rows, position) = scatter.graph, scatter.inputs[:3]
    assert graph is not None and past is not None and rows is not None and position is not None
    zero, size, end, rows_axis = (add_integers(graph, [n]) for n in (0, ring.rows, _TO_THE_END, 2))
    count = emit(scatter, "Shape", [rows], {"start": 2, "end": 3}, dtype=ir.DataType.INT64, shape=(1,))
    over = emit(scatter, "Max", [emit(scatter, "Sub", [count, size], shape=(1,)), zero], shape=(1,))
    shape = dims(past)
    assert shape is not None
    kept = emit(scatter, "Slice", [rows, over, end, rows_axis], shape=[*shape[:2], None, shape[3]])
    scatter.replace_input_with(1, kept)
    scatter.replace_input_with(2, emit(scatter, "Add", [position, over], shape=(1,)))
    scatter.attributes["mode"] = ir.AttrString("mode", "circular")
    for value in (past, scatter.outputs[0]):
        value.shape = ir.Shape([*shape[:2], ring.rows, shape[3]])
