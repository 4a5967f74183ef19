"""Attention with a learned sink: each head may give part of its weight to nothing.

ONNX Attention has no such input, so this one is written in elementary operations over the whole capacity.
"""

from __future__ import annotations

import torch
from torch import Tensor


def attend_with_sinks(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, *, position: Tensor, scale: float, mask: Tensor | None
) -> Tensor:
    """Softmax over the scores and one more column, the head's sink, whose value is zero.

    Args:
        query: [B, heads, S, D]
        key: [B, kv_heads, T, D]; rows no query may see must be finite.
        value: [B, kv_heads, T, Dv]
        sinks: [heads] logit of the sink.
        position: [B] rows committed before this pass.
        scale: Factor of the scores.
        mask: Boolean [B, 1, S, T], True where a key is seen; None for plain causal attention.

    Returns:
        [B, heads, S, Dv]
    """
    B, heads, S, D = query.shape
    _, kv_heads, T, _ = key.shape
    if mask is None:
        rows = position[:, None] + torch.arange(S)[None, :]
        mask = (torch.arange(T)[None, None, :] <= rows[:, :, None])[:, None]
    grouped = query.reshape(B, kv_heads, heads // kv_heads, S, D)
    scores = (grouped @ key[:, :, None].transpose(3, 4)).float() * scale  # [B, kv_heads, group, S, T]
    scores = torch.where(mask[:, :, None], scores, torch.finfo(torch.float32).min)
    column = sinks.float().reshape(1, kv_heads, heads // kv_heads, 1, 1).expand(B, -1, -1, S, 1)
    weights = torch.cat([scores, column], dim=-1).softmax(dim=-1)[..., :-1]
    output = weights.to(value.dtype) @ value[:, :, None]
    return output.reshape(B, heads, S, value.shape[-1])
