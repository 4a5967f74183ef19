"""Attention over a cache as MatMul and Softmax, for backends without Attention and TensorScatter.

The cache stays an input the graph never writes. The scores of the queries against its T rows and against the S new
rows of this call stand side by side under one softmax:

    weights = softmax([q K_cache^T | q K_new^T] where the column is seen)      [kv_heads, group * S, T + S]
    output  = weights[:, :T] V_cache + weights[:, T:] V_new

Which columns are seen follows from `position` alone, so any T >= position gives the same result and rows of the cache
at and past `position` never count, as long as they are finite: a weight of zero times a value that is NaN or infinite
is NaN. Keys may hold anything.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import onnx_ir as ir

from dflash_engines.passes.cached_attention import CachedAttention, find_cached_attention, is_node_causal
from dflash_engines.passes.graph_reading import dims, integer_attribute, made_by
from dflash_engines.passes.graph_writing import add_constant, add_integers, emit, remove_dead_nodes, replace
from dflash_engines.passes.key_columns import KeyColumns, add_key_columns, find_key_numbers, widen_masks
from dflash_engines.passes.window_rows import is_position, is_ring_slot
from dflash_runtime.errors import EngineError

SoftmaxPrecision = Literal["fp32", "graph"]

_HIDDEN_SCORE = {ir.DataType.FLOAT: -1e30, ir.DataType.BFLOAT16: -1e30, ir.DataType.FLOAT16: -6e4}
_TOKENS = "input_ids"


class PrimitiveAttentionPass(ir.passes.InPlacePass):
    """Every Attention over a cache -> two-part attention. TensorScatter stays, with nobody but outputs reading it.

    Args:
        softmax_precision: "fp32" computes scale, soft cap and softmax of a half-precision graph in fp32; "graph" in
            the graph's own precision.
    """

    def __init__(self, softmax_precision: SoftmaxPrecision = "fp32") -> None:
        super().__init__()
        self.softmax_precision = softmax_precision

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """See the class.

        Raises:
            EngineError: a layer attends in a way that cannot be split; the message names it.
        """
        graph = model.graph
        found = find_cached_attention(model)
        _refuse_other_readers(graph, found)
        if not found:
            return ir.passes.PassResult(model, False)
        tokens = next(value for value in graph.inputs if value.name == _TOKENS)
        alike: dict[ir.Value, list[CachedAttention]] = {}  # by where they write: caches of the context, and rings
        for attention in found:
            alike.setdefault(_check(attention, tokens), []).append(attention)
        ranges = {position: find_key_numbers(graph, _caches(members)) for position, members in alike.items()}
        for position, members in alike.items():
            _lower(members, position, tokens, ranges[position], self.softmax_precision)
        remove_dead_nodes(model)
        return ir.passes.PassResult(model, True)


def _caches(members: list[CachedAttention]) -> set[ir.Value]:
    scatters = [scatter for attention in members for scatter in (attention.key_scatter, attention.value_scatter)]
    return {cache for scatter in scatters if (cache := scatter.inputs[0]) is not None}


def _lower(members: list[CachedAttention], position: ir.Value, tokens: ir.Value, ranges: list[ir.Node],
           softmax_precision: SoftmaxPrecision) -> None:
    """Layers whose caches have the same rows."""
    graph, past = members[0].node.graph, members[0].key_scatter.inputs[0]
    assert graph is not None and past is not None
    columns = add_key_columns(graph, past, position, tokens)
    wide = widen_masks(ranges, columns)
    seen: dict[tuple[ir.Value | None, bool], ir.Value] = {}
    for attention in members:
        pattern = (attention.mask, is_node_causal(attention))
        if pattern not in seen:
            seen[pattern] = _seen_columns(attention, columns, wide)
        _Lowering(attention, columns, seen[pattern], softmax_precision).write()


def _refuse_other_readers(graph: ir.Graph, found: list[CachedAttention]) -> None:
    attentions = {attention.node for attention in found}
    for node in graph:
        if node.op_type != "TensorScatter":
            continue
        for reader in node.outputs[0].consumers():
            if reader not in attentions and reader.op_type != "Shape":
                raise EngineError(
                    f"{reader.op_type} reads the cache {node.outputs[0].name} after its write: that layer attends in a "
                    "way of its own (sinks, ALiBi, keys or values computed from what it keeps), which cannot be split "
                    "in two parts. Use a backend with a KV update operator (ort-cpu, or TensorRT 10.15 and later)."
                )


def _check(attention: CachedAttention, tokens: ir.Value) -> ir.Value:
    """Where the layer writes its rows."""
    layer = f"Attention of layer {attention.layer}"
    if attention.heads % attention.kv_heads:
        raise EngineError(f"{layer} has {attention.heads} heads for {attention.kv_heads} KV heads; not a whole group.")
    if attention.mask is not None and not _is_plain(attention.mask):
        raise EngineError(
            f"{layer} has a mask of type {attention.mask.dtype} and shape {dims(attention.mask)}; two-part attention "
            "takes a boolean one that is the same for all heads."
        )
    position = attention.key_scatter.inputs[2]
    for scatter in (attention.key_scatter, attention.value_scatter):
        at = scatter.inputs[2]
        known = at is position and at is not None and (is_position(at) or is_ring_slot(at))
        if not known or not _is_cache(scatter.inputs[0]):
            raise EngineError(f"{layer} does not write its rows at `position` of an input. Build the bundle again.")
    assert position is not None
    length = made_by(attention.length, "Add")
    if length is None or position not in length.inputs or not any(_counts(v, tokens) for v in length.inputs):
        raise EngineError(f"{layer} does not read `position` + S rows. Build the bundle again with this version.")
    kind = attention.query.dtype
    if kind not in _HIDDEN_SCORE:
        raise EngineError(f"{layer} computes in {kind}; two-part attention is made for fp32, fp16 and bf16.")
    return position


def _is_plain(mask: ir.Value) -> bool:
    shape = dims(mask)
    return mask.dtype == ir.DataType.BOOL and shape is not None and all(size == 1 for size in shape[:-2])


def _is_cache(value: ir.Value | None) -> bool:
    return value is not None and value.is_graph_input()


def _counts(value: ir.Value | None, tokens: ir.Value) -> bool:
    """Whether `value` is S, read off the tokens of the call."""
    node = None if value is None else value.producer()
    while node is not None and node.op_type in ("Squeeze", "Unsqueeze", "Reshape", "Cast"):
        source = node.inputs[0]
        node = None if source is None else source.producer()
    if node is None or node.op_type != "Shape" or node.inputs[0] is not tokens:
        return False
    return (integer_attribute(node, "start", 0), integer_attribute(node, "end", 0)) == (1, 2)


def _seen_columns(attention: CachedAttention, columns: KeyColumns, wide: set[ir.Value]) -> ir.Value:
    """BOOL, broadcast over [.., S, T+S]: which columns each query of this call sees."""
    rule = columns.causal if is_node_causal(attention) else columns.live
    mask, shape = attention.mask, dims(attention.mask)
    if mask is None:
        return rule
    if mask not in wide and (shape is None or shape[-1] != 1):
        raise EngineError(
            f"Attention of layer {attention.layer} has a mask {shape} that is not computed from key numbers. It cannot "
            "be split in two parts; use a backend with an Attention operator."
        )
    return emit(attention.node, "And", [mask, rule])


@dataclasses.dataclass(frozen=True)
class _Lowering:
    """Writes one layer in front of its Attention node, which then is dead."""

    attention: CachedAttention
    columns: KeyColumns
    seen: ir.Value
    softmax_precision: SoftmaxPrecision

    def write(self) -> None:
        a = self.attention
        query, factor = self.scaled_query()
        caches = [scatter.inputs[0] for scatter in (a.key_scatter, a.value_scatter)]
        rows = [scatter.inputs[1] for scatter in (a.key_scatter, a.value_scatter)]
        turned = [self.op("Transpose", [keys], perm=[0, 1, 3, 2]) for keys in (caches[0], rows[0])]
        scores = [self.op("MatMul", [query, keys]) for keys in turned]
        weights = self.softmax(self.op("Concat", scores, axis=3), factor)
        start, end = self.integers(0), self.integers(np.iinfo(np.int64).max)
        parts = [(start, self.columns.capacity), (self.columns.capacity, end)]
        cut = [self.op("Slice", [weights, *bounds, self.integers(3)]) for bounds in parts]
        sums = [self.op("MatMul", [w, v]) for w, v in zip(cut, (caches[1], rows[1]), strict=True)]
        output = self.op("Add", sums)
        if a.heads != a.kv_heads:
            output = self.op("Reshape", [output, self.integers(1, a.heads, -1, a.value_dim)])
        replace(a.node.outputs[0], output)

    def scaled_query(self) -> tuple[ir.Value, float]:
        """([1, kv_heads, group * S, D], what is left of the scale).

        Before the product the power of two next to the scale is applied: that is exact in every precision and keeps
        fp16 scores in range. The rest follows where the softmax is computed.
        """
        a = self.attention
        scale = a.node.attributes.get_float("scale", a.head_dim**-0.5)
        near = 2.0 ** round(math.log2(scale))
        query = self.op("Mul", [a.query, self.number(near, a.query.dtype)])
        if a.heads != a.kv_heads:
            query = self.op("Reshape", [query, self.integers(1, a.kv_heads, -1, a.head_dim)])
        return query, scale / near

    def softmax(self, scores: ir.Value, factor: float) -> ir.Value:
        """Weights [1, kv_heads, group * S, T + S] of scores of that shape."""
        a = self.attention
        grouped, kind = a.heads != a.kv_heads, a.query.dtype
        inner = ir.DataType.FLOAT if self.softmax_precision == "fp32" else kind
        assert inner is not None
        if grouped:  # a mask is the same for all heads of a group
            scores = self.op("Reshape", [scores, self.integers(a.kv_heads, a.heads // a.kv_heads, -1, 0)])
        scores = self.cast(scores, inner)
        if factor != 1.0:
            scores = self.op("Mul", [scores, self.number(factor, inner)])
        cap = a.node.attributes.get_float("softcap", 0.0)
        if cap:
            cap_value = self.number(cap, inner)
            scores = self.op("Mul", [self.op("Tanh", [self.op("Div", [scores, cap_value])]), cap_value])
        scores = self.op("Where", [self.seen, scores, self.number(_HIDDEN_SCORE[inner], inner)], dtype=inner)
        weights = self.cast(self.op("Softmax", [scores], axis=-1), kind)
        return self.op("Reshape", [weights, self.integers(1, a.kv_heads, -1, 0)]) if grouped else weights

    def op(self, kind: str, inputs: Sequence[ir.Value | None], dtype: ir.DataType | None = None, **attributes: Any
           ) -> ir.Value:
        return emit(self.attention.node, kind, inputs, attributes, dtype=dtype)

    def cast(self, value: ir.Value, kind: ir.DataType | None) -> ir.Value:
        return value if value.dtype == kind else self.op("Cast", [value], dtype=kind, to=kind)

    def number(self, number: float, kind: ir.DataType | None) -> ir.Value:
        assert kind is not None and self.attention.node.graph is not None
        return add_constant(self.attention.node.graph, f"lowered.{kind.name.lower()}.{number!r}",
                            np.array(number).astype(kind.numpy()))

    def integers(self, *numbers: int) -> ir.Value:
        assert self.attention.node.graph is not None
        return add_integers(self.attention.node.graph, numbers)
