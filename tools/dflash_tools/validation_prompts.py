"""The prompts a pair is validated with unless others are given: short, of several kinds and lengths."""

from __future__ import annotations

import random
from collections.abc import Sequence

VALIDATION_PROMPTS = ("Why is the sky blue?", "def reverse(items):", "3, 5, 7, 11,")
_SEED = 20602
_LENGTHS = (23, 9, 16)


def random_prompts(vocab_size: int) -> list[list[int]]:
    """Ids for a pair without a tokenizer."""
    rng = random.Random(_SEED)
    return [[rng.randrange(vocab_size) for _ in range(count)] for count in _LENGTHS]


def fitting(ids: Sequence[int], max_context_tokens: int, new_tokens: int) -> list[int]:
    """The last ids of a prompt, as many as leave room for an answer in a short context."""
    room = max(1, max_context_tokens - new_tokens)
    return list(ids[-room:])
