"""Greedy texts of a target in PyTorch with the taps of every row, and how far a drafter gets on them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dflash_export.drafter import Drafter, draft_without_cache, proposals_by_definition
from dflash_export.quality import Logits
from dflash_export.reference_run import Array, Step, TargetReference

ACCEPTANCE_TOKENS = 64


@dataclasses.dataclass(frozen=True)
class TextRun:
    """Prompts with their greedy continuations."""

    prompt_tokens: list[int]
    ids: list[list[int]]
    """Each prompt and its continuation."""
    taps: list[Tensor]
    """[1, rows, K*H] for each text."""


def run_texts(reference: TargetReference, prompts: Sequence[list[int]], layer_ids: list[int], room: int) -> TextRun:
    """Continues prompts greedily.

    Args:
        reference: The target.
        prompts: Token ids.
        layer_ids: Layers whose output a drafter reads.
        room: Most tokens a text may have.
    """
    texts, taps = [], []
    for prompt in prompts:
        ids = prompt + reference.greedy(prompt, max(1, min(ACCEPTANCE_TOKENS, room - len(prompt))))
        reference.reset()
        hidden = reference.run(Step(0, ids)).hidden
        texts.append(ids)
        taps.append(torch.from_numpy(np.concatenate([hidden[i] for i in layer_ids], axis=-1))[None])
    return TextRun([len(prompt) for prompt in prompts], texts, taps)


def acceptance_length(drafter: Drafter, run: TextRun, block_size: int, mask_token_id: int) -> float:
    """Mean tokens a round of draft and verify commits, the target's own token included.

    Greedy verification commits what the target says, so its rounds can be read off its text.

    Args:
        drafter: With the weights it has beside this target, in fp32.
        run: The target's texts.
        block_size: Tokens of a block, anchor included.
        mask_token_id: Fills the slots after the anchor.
    """
    committed = rounds = 0
    for start, ids, taps in zip(run.prompt_tokens, run.ids, run.taps, strict=True):
        anchor = start  # the newest token, which has no row yet
        while anchor + 1 < len(ids):
            block = torch.tensor([[ids[anchor], *[mask_token_id] * (block_size - 1)]])
            hidden, logits = draft_without_cache(drafter, taps[:, :anchor], block)
            proposed = proposals_by_definition(drafter, hidden, logits, block[:, :1])[0].tolist()
            wanted = ids[anchor + 1 : anchor + block_size]
            right = next((i for i, (a, b) in enumerate(zip(proposed, wanted, strict=False)) if a != b), len(wanted))
            if right + 1 > len(ids) - anchor - 1:
                break  # the text ends inside this round
            committed, rounds, anchor = committed + right + 1, rounds + 1, anchor + right + 1
    return committed / rounds if rounds else 1.0


def logits_of(reference: TargetReference) -> Logits:
    """The target as `perplexity` calls it."""

    def run(ids: Sequence[int], position: int) -> Array:
        if position == 0:
            reference.reset()
        return reference.run(Step(position, list(ids))).logits

    return run
