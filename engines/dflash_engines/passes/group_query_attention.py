"""Causal attention over a cache as ONNX Runtime's GroupQueryAttention, whose cost follows the valid length."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from dflash_engines.passes.cached_attention import (
    CachedAttention,
    find_cached_attention,
    is_node_causal,
    read_capacity_from_past,
    writes_own_caches,
)
from dflash_engines.passes.graph_writing import (
    MICROSOFT_DOMAIN,
    add_constant,
    emit,
    insert,
    remove_dead_nodes,
    replace,
)
from dflash_engines.passes.head_rows import as_heads, as_rows, readers_as_rows

# The kernel refuses other head sizes.
_HEAD_DIM_MULTIPLE = 8


class GroupQueryAttentionPass(ir.passes.InPlacePass):
    """Two TensorScatter and a causal Attention (full or windowed) -> one com.microsoft GroupQueryAttention.

    The node writes the new rows itself, in place where past and present are bound to one buffer. Where they are not,
    it copies the valid rows only: rows of `present` past the valid length are then undefined.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """See the class."""
        read_capacity_from_past(model.graph)
        lengths: dict[ir.Value, tuple[ir.Value, ir.Value]] = {}
        fused = 0
        for attention in find_cached_attention(model):
            if _fits(attention):
                if attention.length not in lengths:
                    lengths[attention.length] = _kernel_lengths(attention)
                _fuse(attention, *lengths[attention.length])
                fused += 1
        remove_dead_nodes(model)
        return ir.passes.PassResult(model, fused > 0)

    def ensures(self, model: ir.Model) -> None:
        """Every causal attention the kernel can do was given to it."""
        left = [attention.layer for attention in find_cached_attention(model) if _fits(attention)]
        if left:
            raise ir.passes.PostconditionError(f"causal layers not lowered: {left}")


def _fits(attention: CachedAttention) -> bool:
    if attention.needs_mask or (attention.mask is None and not is_node_causal(attention)):
        return False
    same_size = attention.head_dim == attention.value_dim and attention.head_dim % _HEAD_DIM_MULTIPLE == 0
    grouped = attention.heads % attention.kv_heads == 0
    return same_size and grouped and writes_own_caches(attention) and attention.query.dtype == ir.DataType.FLOAT


def _kernel_lengths(attention: CachedAttention) -> tuple[ir.Value, ir.Value]:
    """(rows - 1 as INT32 [1], rows as INT32 scalar), the form the kernel wants."""
    node = attention.node
    assert node.graph is not None
    one = add_constant(node.graph, "lowered.one", np.ones(1, np.int32))
    rows = emit(node, "Cast", [attention.length], {"to": ir.DataType.INT32}, dtype=ir.DataType.INT32, shape=(1,))
    last = emit(node, "Sub", [rows, one], shape=(1,))
    total = emit(node, "Squeeze", [rows], shape=())
    return last, total


def _fuse(attention: CachedAttention, last: ir.Value, total: ir.Value) -> None:
    node = attention.node
    scatters = (attention.key_scatter, attention.value_scatter)
    new_rows = []
    for heads in (attention.query, scatters[0].inputs[1], scatters[1].inputs[1]):
        assert heads is not None
        new_rows.append(as_rows(heads, node))
    attributes: dict[str, Any] = {
        "num_heads": attention.heads,
        "kv_num_heads": attention.kv_heads,
        "scale": node.attributes.get_float("scale", attention.head_dim**-0.5),
        "softcap": node.attributes.get_float("softcap", 0.0),
        "local_window_size": attention.window_tokens or -1,
    }
    kernel = ir.node(
        "GroupQueryAttention", [*new_rows, scatters[0].inputs[0], scatters[1].inputs[0], last, total], attributes,
        domain=MICROSOFT_DOMAIN, num_outputs=3, metadata_props=dict(node.metadata_props),
    )
    insert(node, kernel)
    output, *presents = kernel.outputs
    output.type, output.shape = ir.TensorType(ir.DataType.FLOAT), new_rows[0].shape
    for reader in readers_as_rows(node.outputs[0]):
        replace(reader, output)
    replace(node.outputs[0], as_heads(output, node.outputs[0], node))
    for scatter, present in zip(scatters, presents, strict=True):
        replace(scatter.outputs[0], present)
