"""Attention over a cache as ONNX Runtime's GroupQueryAttention on CUDA, causal or not, with nothing left to the host.

The kernel wants the largest length in host memory. Here that is the capacity of the cache, known when the session
opens, so the graph copies nothing to the host; which rows count is said by the length in device memory alone.
"""

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
from dflash_engines.passes.graph_reading import HALF_TYPES
from dflash_engines.passes.graph_writing import (
    MICROSOFT_DOMAIN,
    add_constant,
    emit,
    insert,
    remove_dead_nodes,
    replace,
)
from dflash_engines.passes.head_rows import as_heads, as_rows, readers_as_rows

# Flash attention's limits: beyond them the kernel refuses or takes a slow path.
_HEAD_DIM_MULTIPLE, _LARGEST_HEAD_DIM = 8, 256


class CudaAttentionPass(ir.passes.InPlacePass):
    """Two TensorScatter and an Attention in half precision -> one com.microsoft GroupQueryAttention.

    Causal layers, full or windowed, and bidirectional ones without a window (`causal` = 0, ONNX Runtime 1.30 and
    later). Others are left as they are.
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
        """Every layer the kernel can do was given to it."""
        left = [attention.layer for attention in find_cached_attention(model) if _fits(attention)]
        if left:
            raise ir.passes.PostconditionError(f"layers not lowered: {left}")


def _fits(attention: CachedAttention) -> bool:
    causal = not attention.needs_mask and (attention.mask is not None or is_node_causal(attention))
    bidirectional = not attention.causal and attention.mask is None and not is_node_causal(attention)
    size = attention.head_dim
    same_size = size == attention.value_dim and size % _HEAD_DIM_MULTIPLE == 0 and size <= _LARGEST_HEAD_DIM
    grouped = attention.heads % attention.kv_heads == 0
    half = attention.query.dtype in HALF_TYPES
    return (causal or bidirectional) and same_size and grouped and writes_own_caches(attention) and half


def _kernel_lengths(attention: CachedAttention) -> tuple[ir.Value, ir.Value]:
    """(number of the last valid row as INT32 [1], rows of the cache as INT32 scalar)."""
    node, cache, narrow = attention.node, attention.key_scatter.inputs[0], {"to": ir.DataType.INT32}
    assert node.graph is not None and cache is not None
    one = add_constant(node.graph, "lowered.one", np.ones(1, np.int32))
    rows = emit(node, "Cast", [attention.length], narrow, dtype=ir.DataType.INT32, shape=(1,))
    last = emit(node, "Sub", [rows, one], shape=(1,))
    size = emit(node, "Shape", [cache], {"start": 2, "end": 3}, dtype=ir.DataType.INT64, shape=(1,))
    capacity = emit(node, "Cast", [size], narrow, dtype=ir.DataType.INT32, shape=(1,))
    # Not Squeeze: ONNX Runtime 1.31 follows a shape through it and then finds INT64 where the kernel wants INT32.
    return last, emit(node, "ReduceMax", [capacity], {"keepdims": 0}, shape=())


def _fuse(attention: CachedAttention, last: ir.Value, capacity: ir.Value) -> None:
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
    if not attention.causal:
        attributes["causal"] = 0
    kernel = ir.node(
        "GroupQueryAttention", [*new_rows, scatters[0].inputs[0], scatters[1].inputs[0], last, capacity], attributes,
        domain=MICROSOFT_DOMAIN, num_outputs=3, metadata_props=dict(node.metadata_props),
    )
    insert(node, kernel)
    output, *presents = kernel.outputs
    output.type, output.shape = new_rows[0].type, new_rows[0].shape
    for reader in readers_as_rows(node.outputs[0]):
        replace(reader, output)
    replace(node.outputs[0], as_heads(output, node.outputs[0], node))
    for scatter, present in zip(scatters, presents, strict=True):
        replace(scatter.outputs[0], present)
