"""Which rows of a cache each query sees, as a mask: TensorRT leaves the valid length of Attention out.

TensorRT has no use for `nonpad_kv_seqlen` and counts the causal rule from the ends of queries and keys, while the
rows of a cache past the valid length are dead. So the mask says everything, and is computed once for all layers that
see alike.
"""

from __future__ import annotations

import onnx_ir as ir

from dflash_engines.passes.cached_attention import CachedAttention, find_cached_attention, is_node_causal
from dflash_engines.passes.graph_reading import dims
from dflash_engines.passes.graph_writing import add_integers, emit, remove_dead_nodes
from dflash_runtime.errors import EngineError

_MASK_INPUT = 3


class ExplicitMaskPass(ir.passes.InPlacePass):
    """Attention(q, k, v, mask, valid length, is_causal) -> Attention(q, k, v, mask of live and allowed rows)."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """See the class.

        Raises:
            EngineError: a mask that is not boolean, or an Attention not of the contract's form.
        """
        rules: dict[tuple[ir.Value, bool], ir.Value] = {}
        masks: dict[tuple[ir.Value, ir.Value], ir.Value] = {}
        found = find_cached_attention(model)
        for attention in found:
            causal = is_node_causal(attention)
            key = attention.length, causal
            if key not in rules:
                rules[key] = _live_rows(attention, causal)
            _apply(attention, rules[key], masks)
        remove_dead_nodes(model)
        return ir.passes.PassResult(model, bool(found))

    def ensures(self, model: ir.Model) -> None:
        """No Attention relies on its valid length or on the causal rule of the node."""
        left = [
            node.name
            for node in model.graph
            if node.op_type == "Attention" and (len(node.inputs) > _MASK_INPUT + 1 or "is_causal" in node.attributes)
        ]
        if left:
            raise ir.passes.PostconditionError(f"Attention without an explicit mask: {left}")


def _live_rows(attention: CachedAttention, causal: bool) -> ir.Value:
    """BOOL [1, 1, S, T]: rows not after the query, and without the causal rule all rows before the end of the call."""
    node, (cache, _, position) = attention.node, attention.key_scatter.inputs[:3]
    assert node.graph is not None and cache is not None and position is not None
    graph, boolean = node.graph, ir.DataType.BOOL
    zero, one = (emit(node, "Squeeze", [add_integers(graph, [n])], shape=()) for n in (0, 1))

    def numbers(source: ir.Value) -> ir.Value:
        count = emit(node, "Shape", [source], {"start": 2, "end": 3}, dtype=ir.DataType.INT64, shape=(1,))
        return emit(node, "Range", [zero, emit(node, "Squeeze", [count], shape=()), one])

    keys = emit(node, "Reshape", [numbers(cache), add_integers(graph, [1, 1, 1, -1])])
    rows = emit(node, "Add", [numbers(attention.query), position])
    queries = emit(node, "Reshape", [rows, add_integers(graph, [1, 1, -1, 1])])
    seen = emit(node, "LessOrEqual", [keys, queries], dtype=boolean)
    if causal:
        return seen
    end = emit(node, "Reshape", [attention.length, add_integers(graph, [1, 1, 1, 1])])
    return emit(node, "Or", [seen, emit(node, "Less", [keys, end], dtype=boolean)])


def _apply(attention: CachedAttention, rule: ir.Value, masks: dict[tuple[ir.Value, ir.Value], ir.Value]) -> None:
    node, mask = attention.node, attention.mask
    if mask is not None and mask.dtype != ir.DataType.BOOL:
        raise EngineError(
            f"Attention of layer {attention.layer} has a mask of type {mask.dtype} and shape {dims(mask)}; TensorRT is "
            "given boolean ones. Use --backend ort-cpu for this model."
        )
    seen = rule
    if mask is not None:
        if (mask, rule) not in masks:
            masks[mask, rule] = emit(node, "And", [mask, rule])
        seen = masks[mask, rule]
    node.replace_input_with(_MASK_INPUT, seen)
    node.resize_inputs(_MASK_INPUT + 1)
    node.attributes.pop("is_causal", None)
