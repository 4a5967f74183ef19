"""Caches of windowed attention of constant size, for devices: rows follow one another and move to the front in time.

TensorRT writes new rows of a cache one behind the other, never in a circle. So row s lies in slot s - `first_row`; the
runtime moves the rows of the window to the front before the end is reached, and says which row lies there.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from dflash_engines.passes.cached_attention import CachedAttention, find_cached_attention
from dflash_engines.passes.graph_reading import dims, made_by
from dflash_engines.passes.graph_writing import add_constant, add_integers, emit, remove_dead_nodes
from dflash_runtime.errors import EngineError
from dflash_runtime.window_rings import Ring

FIRST_ROW = "first_row"
"""Input: INT64 [1], the row in the first slot of these caches. `position` stays what keys are rotated by."""


class WindowRowsPass(ir.passes.InPlacePass):
    """Writes and reads caches at `position` - `first_row`, under a mask that says the window.

    Args:
        rings: Cache input -> its ring. A layer that saw the whole context sees the window too.
    """

    def __init__(self, rings: Mapping[str, Ring]) -> None:
        self._rings = rings

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """See the class.

        Raises:
            EngineError: the graph has no input `position`.
        """
        graph = model.graph
        scatters = [node for node in graph if node.op_type == "TensorScatter" and _cache_name(node) in self._rings]
        if not scatters:
            return ir.passes.PassResult(model, False)
        position = next((value for value in graph.inputs if value.name == "position"), None)
        if position is None:
            raise EngineError("The graph writes caches and has no input `position`. Build the bundle again.")
        first_row = ir.Value(name=FIRST_ROW, shape=ir.Shape([1]), type=ir.TensorType(ir.DataType.INT64))
        graph.inputs.insert(graph.inputs.index(position) + 1, first_row)
        slot = emit(graph[0], "Sub", [position, first_row], shape=(1,))
        attentions = [a for a in find_cached_attention(model) if _cache_name(a.key_scatter) in self._rings]
        _read_whole_capacity(graph, self._rings)
        lengths: dict[ir.Value, ir.Value] = {}
        masks: dict[tuple[ir.Value, Ring, bool], ir.Value] = {}
        for attention in attentions:
            _read_window(attention, slot, self._rings[_cache_name(attention.key_scatter)], lengths, masks)
        for node in scatters:
            node.replace_input_with(2, slot)
            for value in (node.inputs[0], node.outputs[0]):
                assert value is not None and value.shape is not None
                value.shape = ir.Shape([*value.shape[:2], self._rings[_cache_name(node)].rows, value.shape[3]])
        remove_dead_nodes(model)
        return ir.passes.PassResult(model, True)

    def ensures(self, model: ir.Model) -> None:
        """Every cache that should be one has its size."""
        inputs = {str(value.name): dims(value) for value in model.graph.inputs}
        wrong = [name for name, ring in self._rings.items() if (inputs.get(name) or [0] * 4)[2] not in (0, ring.rows)]
        if wrong:
            raise ir.passes.PostconditionError(f"caches that are as long as the context: {wrong}")


def is_position(value: ir.Value) -> bool:
    """Whether this is the graph's `position`."""
    return value.is_graph_input() and value.name == "position"


def is_ring_slot(value: ir.Value) -> bool:
    """Whether this is `position` - `first_row`."""
    node = made_by(value, "Sub")
    return node is not None and [str(source.name) for source in node.inputs if source is not None] == [
        "position", FIRST_ROW]  # fmt: skip


def _cache_name(scatter: ir.Node) -> str:
    past = scatter.inputs[0]
    return "" if past is None or not past.is_graph_input() else str(past.name)


def _read_whole_capacity(graph: ir.Graph, rings: Mapping[str, Ring]) -> None:
    """What other layers compute from the rows of a cache is read off one of theirs."""
    whole = next((v for v in graph.inputs if str(v.name).startswith("past_key_values.") and v.name not in rings), None)
    for node in graph if whole is not None else ():
        source = node.inputs[0] if node.op_type == "Shape" else None
        maker = None if source is None else source.producer()
        cache = maker.inputs[0] if maker is not None and maker.op_type == "TensorScatter" else source
        if cache is not None and cache.name in rings:
            node.replace_input_with(0, whole)


def _read_window(attention: CachedAttention, slot: ir.Value, ring: Ring, lengths: dict[ir.Value, ir.Value],
                 masks: dict[tuple[ir.Value, Ring, bool], ir.Value]) -> None:
    """Attention over the slots up to the call's last row, those of the window alone."""
    node, length = attention.node, attention.length
    add = length.producer()
    if add is None or add.op_type != "Add" or len(add.inputs) != 2:
        raise EngineError(f"Attention of layer {attention.layer} does not read `position` + S rows. Build the bundle "
                          "again with this version.")
    if length not in lengths:
        count = next(value for value in add.inputs if value is not None and not value.is_graph_input())
        lengths[length] = emit(node, "Add", [slot, count], shape=(1,))
    key = lengths[length], ring, attention.causal
    if key not in masks:
        masks[key] = _mask(attention, slot, ring)
    node.resize_inputs(max(len(node.inputs), 7))
    node.replace_input_with(3, masks[key])
    node.replace_input_with(6, lengths[length])
    node.metadata_props["dflash.window"] = str(ring.window_tokens)


def _mask(attention: CachedAttention, slot: ir.Value, ring: Ring) -> ir.Value:
    """BOOL [1, 1, S, T]: which slots are less than a window away, and for causal layers not behind the query."""
    node, cache = attention.node, attention.key_scatter.inputs[0]
    assert node.graph is not None and cache is not None
    graph, boolean = node.graph, ir.DataType.BOOL
    zero, one = (add_constant(graph, f"lowered.number.{n}", np.array(n, np.int64)) for n in (0, 1))

    def numbers(source: ir.Value) -> ir.Value:
        count = emit(node, "Shape", [source], {"start": 2, "end": 3}, dtype=ir.DataType.INT64, shape=(1,))
        return emit(node, "Range", [zero, emit(node, "Squeeze", [count], shape=()), one], shape=(None,))

    keys = emit(node, "Reshape", [numbers(cache), add_integers(graph, [1, 1, 1, -1])])
    rows = emit(node, "Add", [numbers(attention.query), slot], shape=(None,))
    distance = emit(node, "Sub", [emit(node, "Reshape", [rows, add_integers(graph, [1, 1, -1, 1])]), keys])
    near = emit(node, "Less", [distance, add_integers(graph, [ring.window_tokens])], dtype=boolean)
    least = add_integers(graph, [0 if attention.causal else 1 - ring.window_tokens])
    return emit(node, "And", [near, emit(node, "GreaterOrEqual", [distance, least], dtype=boolean)],
                shape=(1, 1, None, None))  # fmt: skip
