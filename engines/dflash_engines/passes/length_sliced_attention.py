"""Other attention over a cache (bidirectional, masked, odd head sizes), cut to the valid rows."""

from __future__ import annotations

import onnx_ir as ir

from dflash_engines.passes.cached_attention import CachedAttention, find_cached_attention, is_node_causal
from dflash_engines.passes.graph_reading import dims, made_by
from dflash_engines.passes.graph_writing import add_integers, emit, remove_dead_nodes


class LengthSlicedAttentionPass(ir.passes.InPlacePass):
    """Gives Attention the first `length` rows of keys, values and mask, so that its cost follows the length.

    TensorScatter stays and writes in place.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """See the class."""
        masks: dict[tuple[ir.Value, ir.Value], ir.Value] = {}
        found = find_cached_attention(model)
        for attention in found:
            _cut(attention, masks)
        remove_dead_nodes(model)
        return ir.passes.PassResult(model, bool(found))

    def ensures(self, model: ir.Model) -> None:
        """No Attention reads a whole cache."""
        whole = [
            node.name
            for node in model.graph
            if node.op_type == "Attention" and made_by(node.inputs[1], "TensorScatter") is not None
        ]
        if whole:
            raise ir.passes.PostconditionError(f"attention over the whole capacity: {whole}")


def _cut(attention: CachedAttention, masks: dict[tuple[ir.Value, ir.Value], ir.Value]) -> None:
    node, length = attention.node, attention.length
    for index in (1, 2):
        rows = node.inputs[index]
        assert rows is not None
        node.replace_input_with(index, _first_rows(rows, length, 2, node))
    mask, shape = attention.mask, dims(attention.mask)
    if mask is not None and shape is not None and shape[-1] != 1:
        if (mask, length) not in masks:
            masks[mask, length] = _first_rows(mask, length, len(shape) - 1, node)
        node.replace_input_with(3, masks[mask, length])
    if not is_node_causal(attention):
        node.replace_input_with(6, None)


def _first_rows(value: ir.Value, length: ir.Value, axis: int, before: ir.Node) -> ir.Value:
    graph = before.graph
    assert graph is not None
    bounds = [add_integers(graph, [0]), length, add_integers(graph, [axis])]
    shape = dims(value)
    cut = None if shape is None else [None if i == axis else dim for i, dim in enumerate(shape)]
    return emit(before, "Slice", [value, *bounds], shape=cut)
