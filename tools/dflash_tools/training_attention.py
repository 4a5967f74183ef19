"""Many blocks of one text in one pass of the drafter: each sees the context before its anchor and itself.

Letters: S context rows, N blocks, b block tokens, D head dim, H hidden, K taps.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dflash_export.drafter import Drafter
from dflash_export.drafter_attention import LayerAttention
from dflash_tools.training_blocks import Blocks

MAX_SCORES = 1 << 26
"""Attention scores held at once; more blocks than that are done in parts, and their scores made again for the
gradient."""


def draft_blocks(drafter: Drafter, taps: Tensor, blocks: Blocks) -> Tensor:
    """Hidden states [N, b, H] of all blocks after the final norm, as if each were drafted alone.

    Args:
        drafter: The drafter.
        taps: [S, K*H] of the text's rows; those at and after the last anchor are not looked at.
        blocks: Of this text, on the drafter's device.
    """
    N, b = blocks.input_ids.shape
    rows = int(blocks.anchors[-1])
    context = drafter.context(taps[None, :rows].float(), torch.arange(rows, device=taps.device)[None])

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return block_attention(query, context[layer], (key, value), blocks, drafter.config.layers[layer])

    hidden = drafter.block(blocks.input_ids.view(1, N * b), blocks.positions.view(1, N * b), attend)
    return hidden.view(N, b, -1)


def block_attention(
    query: Tensor, context: tuple[Tensor, Tensor], own: tuple[Tensor, Tensor], blocks: Blocks, rule: LayerAttention
) -> Tensor:
    """Softmax attention of blocks that do not see each other.

    Args:
        query: [1, heads, N*b, D]
        context: Keys and values [1, kv_heads, S, D] of the text's rows.
        own: Keys and values [1, kv_heads, N*b, D] of the blocks.
        blocks: Their anchors and positions.
        rule: Causality and window of the layer.

    Returns:
        [1, heads, N*b, D]
    """
    N, b = blocks.input_ids.shape
    heads, D, kv_heads = query.shape[1], query.shape[-1], own[0].shape[1]
    grouped = query[0].view(kv_heads, heads // kv_heads, N, b, D)
    keys, values = (part[0].view(kv_heads, N, b, D) for part in own)
    part_size = max(1, MAX_SCORES // (heads * b * (context[0].shape[2] + b)))
    seen = []
    for start in range(0, N, part_size):
        part = slice(start, start + part_size)
        rows = int(blocks.anchors[part][-1])  # ascending, so no block of this part sees more
        arguments = (
            grouped[:, :, part], context[0][0, :, :rows], context[1][0, :, :rows], keys[:, part], values[:, part],
            blocks.positions[part], rule,
        )  # fmt: skip
        if part_size < N and torch.is_grad_enabled():
            seen.append(checkpoint(_attend, *arguments, use_reentrant=False))
        else:
            seen.append(_attend(*arguments))
    return torch.cat(seen, dim=2).reshape(1, heads, N * b, D)


def _attend(
    query: Tensor, context_keys: Tensor, context_values: Tensor, keys: Tensor, values: Tensor, positions: Tensor,
    rule: LayerAttention,
) -> Tensor:  # fmt: skip
    """Query [kv, g, N, b, D], context [kv, S, D], own [kv, N, b, D], positions [N, b] -> [kv, g, N, b, D]."""
    kv, g, N, b, D = query.shape
    S = context_keys.shape[1]
    far = (query.reshape(kv, g * N * b, D) @ context_keys.transpose(1, 2)).view(kv, g, N, b, S)
    near = query @ keys.unsqueeze(1).transpose(3, 4)
    rows = torch.arange(S, device=query.device)
    # The anchor's own row is not there yet when a block is drafted: the target has not seen the anchor.
    before = (rows < positions[:, :1, None]) & rule.sees(positions[:, :, None], rows)
    inside = rule.sees(positions[:, :, None], positions[:, None, :])
    scores = torch.cat((far, near), dim=-1).float() * D**-0.5
    shown = torch.cat((before, inside), dim=-1)
    weights = scores.masked_fill(~shown, -torch.inf).softmax(-1).to(values.dtype)
    from_context = weights[..., :S].reshape(kv, g * N * b, S) @ context_values
    seen: Tensor = from_context.view(kv, g, N, b, D) + weights[..., S:] @ values.unsqueeze(1)
    return seen
