"""What the drafter is trained on: blocks that start at anchors inside an answer.

A block is an anchor, which the drafter knows, and mask tokens, whose true tokens it has to guess. Letters: S tokens
of a text, N blocks, b block tokens (anchor included).

Source: DFlash, arXiv 2602.06036, sections 4.2 and A.1.
"""

from __future__ import annotations

import dataclasses
import hashlib

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Blocks:
    """N blocks of one text."""

    anchors: Tensor
    """[N] position of each block's known token, ascending. A block sees taps of earlier positions only."""
    input_ids: Tensor
    """[N, b] anchor token, then mask ids."""
    positions: Tensor
    """[N, b] absolute positions: anchor, anchor + 1, ..."""
    labels: Tensor
    """[N, b - 1] the text's tokens at the same positions; 0 past its end."""
    weights: Tensor
    """[N, b - 1] share of each slot in the loss; 0 past the text's end."""

    def to(self, device: torch.device) -> Blocks:
        """The same on another device."""
        return Blocks(*(getattr(self, field.name).to(device) for field in dataclasses.fields(self)))


def loss_decay(block_size: int) -> float:
    """Gamma of the slot weights, in slots: 7, 5 and 4 for blocks of 16, 10 and 8, on straight lines between."""
    return block_size / 2 if block_size <= 10 else 5 + (block_size - 10) / 3


def slot_weights(block_size: int, gamma: float) -> Tensor:
    """[b - 1] exp(-(k - 1) / gamma) of slot k = 1, 2, ...: an early slot decides about all later ones."""
    return torch.exp(-torch.arange(block_size - 1, dtype=torch.float32) / gamma)


def drawn_weights(weights: Tensor, generator: torch.Generator) -> Tensor:
    """Weights of 0 and 1 that are the given ones on average: the same gradient in expectation, for fewer slots.

    Args:
        weights: [N, b - 1] between 0 and 1.
        generator: Of the draw.
    """
    return (torch.rand(weights.shape, generator=generator) < weights).to(weights.dtype)


def anchor_range(answer_start: int, num_tokens: int) -> range:
    """Positions a block may start at: answer tokens that have a next one.

    Args:
        answer_start: Position of the first answer token.
        num_tokens: S.
    """
    return range(answer_start, num_tokens - 1)


def draw_anchors(eligible: range, count: int, generator: torch.Generator) -> Tensor:
    """[N] different positions, ascending; all of them where there are no more than `count`."""
    if len(eligible) <= count:
        return torch.tensor(list(eligible), dtype=torch.long)
    chosen = torch.randperm(len(eligible), generator=generator)[:count]
    return (chosen + eligible.start).sort().values


def text_seed(*parts: int) -> int:
    """A seed that depends on the numbers alone, such as a run's seed, epoch and text: no state to save."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def seeded_generator(*parts: int) -> torch.Generator:
    """A generator started from `text_seed`."""
    return torch.Generator().manual_seed(text_seed(*parts))


def make_blocks(token_ids: Tensor, anchors: Tensor, block_size: int, mask_token_id: int, gamma: float) -> Blocks:
    """Blocks of a text at the given anchors.

    Args:
        token_ids: [S] prompt and answer.
        anchors: [N] positions of answer tokens.
        block_size: b; a block may run past the end of the text, where nothing is asked.
        mask_token_id: Stands for a token not known yet.
        gamma: Decay of the slot weights, in slots.
    """
    positions = anchors[:, None] + torch.arange(block_size)
    input_ids = torch.full_like(positions, mask_token_id)
    input_ids[:, 0] = token_ids[anchors]
    asked = positions[:, 1:]
    inside = asked < len(token_ids)
    labels = torch.where(inside, token_ids[asked.clamp(max=len(token_ids) - 1)], 0)
    return Blocks(anchors, input_ids, positions, labels, inside * slot_weights(block_size, gamma))
