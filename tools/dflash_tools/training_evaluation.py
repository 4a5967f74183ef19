"""What a drafter would get accepted on texts it was not trained on, without running the decoding loop.

The texts are the target's own answers. A round that starts at some anchor accepts the longest prefix of right
guesses, and the next round starts behind them: so the guesses at every anchor say what every round would have done.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dflash_export.drafter import Drafter
from dflash_tools.training_answers import Answer
from dflash_tools.training_attention import draft_blocks
from dflash_tools.training_blocks import anchor_range, make_blocks
from dflash_tools.training_loss import best_tokens

ANCHORS_AT_ONCE = 256


@torch.no_grad()
def right_prefixes(drafter: Drafter, head: Tensor, text: Answer, taps: Tensor) -> list[int]:
    """Guesses that are right before the first wrong one, for a block at every anchor of an answer.

    Args:
        drafter: The drafter.
        head: [V, H] output head, in the dtype of its products.
        text: Prompt and answer.
        taps: [S, K*H] of its rows, on the drafter's device.

    Returns:
        One count an anchor, from the first answer token to the last but one.
    """
    config = drafter.config
    ids = torch.tensor(text.token_ids)
    eligible = torch.tensor(list(anchor_range(text.answer_start, len(ids))))
    counts: list[int] = []
    for start in range(0, len(eligible), ANCHORS_AT_ONCE):
        anchors = eligible[start : start + ANCHORS_AT_ONCE]
        blocks = make_blocks(ids, anchors, config.block_size, config.mask_token_id, 1.0)
        blocks = blocks.to(taps.device)
        hidden = draft_blocks(drafter, taps, blocks)[:, 1:]
        guesses = best_tokens(hidden.flatten(0, 1), head).view(blocks.labels.shape)
        right = (guesses == blocks.labels) & (blocks.weights > 0)
        counts += right.long().cumprod(-1).sum(-1).tolist()
    return counts


def walk_rounds(prefixes: Sequence[int]) -> list[int]:
    """Acceptance lengths of the rounds that would have made an answer.

    Args:
        prefixes: Right guesses of the block at every anchor; there is one answer token more than anchors.
    """
    lengths, at = [], 0
    while at < len(prefixes):
        lengths.append(min(prefixes[at] + 1, len(prefixes) - at))
        at += lengths[-1]
    return lengths
