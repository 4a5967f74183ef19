"""Lowers portable graphs to the fused form: TensorRT's KV update and fused attention.

For TensorRT-RTX and for TensorRT from 10.15 on. The portable nodes stay; what TensorRT would ignore or do badly is
said otherwise.
"""

from __future__ import annotations

import onnx_ir as ir

from dflash_engines.passes.cached_attention import find_cached_attention
from dflash_engines.passes.explicit_mask import ExplicitMaskPass
from dflash_engines.passes.graph_reading import HALF_TYPES
from dflash_runtime.errors import EngineError


def lower_fused(model: ir.Model) -> ir.Model:
    """Lowers one portable graph.

    Args:
        model: The portable graph in fp16 or bf16; left as it is.

    Returns:
        A new model with the same inputs and outputs, in which masks say which rows of a cache are seen.

    Raises:
        EngineError: a layer whose attention TensorRT has no fused kernel for; the message names layer and reason.
    """
    lowered = model.clone()
    for attention in find_cached_attention(lowered):
        where = f"Attention of layer {attention.layer}"
        if attention.query.dtype not in HALF_TYPES:
            raise EngineError(
                f"{where} computes in {attention.query.dtype}; TensorRT's fused attention takes fp16 and bf16. Build "
                "the bundle with --precision bf16 or fp16."
            )
        softcap = attention.node.attributes.get_float("softcap", 0.0)
        if softcap:
            raise EngineError(
                f"{where} caps its scores at {softcap}, which TensorRT's attention leaves out without a word. "
                "Run this model with --backend ort-cpu."
            )
    ExplicitMaskPass()(lowered)
    return lowered
