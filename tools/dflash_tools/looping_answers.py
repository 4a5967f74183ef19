"""Answers that have fallen into a loop: a small model, decoded greedily, often repeats itself to the end.

A loop is easy to draft, so it raises the mean acceptance length of any drafter; measurements are given with and
without such answers.
"""

from __future__ import annotations

from collections.abc import Sequence

TAIL_TOKENS = 64
LONGEST_PERIOD_TOKENS = 32
RULE = f"the last {TAIL_TOKENS} tokens of the answer repeat with a period of at most {LONGEST_PERIOD_TOKENS} tokens"


def loops(token_ids: Sequence[int]) -> bool:
    """Whether an answer ends in a loop by `RULE`; one shorter than the tail does not."""
    tail = list(token_ids[-TAIL_TOKENS:])
    if len(tail) < TAIL_TOKENS:
        return False
    return any(tail[period:] == tail[:-period] for period in range(1, LONGEST_PERIOD_TOKENS + 1))
