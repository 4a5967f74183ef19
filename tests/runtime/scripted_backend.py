"""A backend in plain Python: a target whose next token depends on every row before it, and a scripted drafter.

Every call is checked: nothing is written past the capacity, and the drafter's context rows are those of the
target, neither more nor fewer.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Literal

import numpy.typing as npt

from dflash_runtime.backend import Round
from dflash_runtime.decode import accept, cut

VOCAB = 97


class ScriptedBackend:
    name = "scripted"

    def __init__(
        self,
        *,
        errors_at: Collection[int] = (),
        max_context: int = 64,
        largest_block: int = 8,
        prefill_chunk_tokens: int = 4,
        not_finite_at: int | None = None,
    ) -> None:
        self.prefill_chunk_tokens = prefill_chunk_tokens
        self.errors_at = errors_at  # absolute positions of tokens the drafter gets wrong
        self.not_finite_at = not_finite_at  # position of the token whose logits are NaN
        self.max_context = max_context
        capacity = max_context + max(largest_block, prefill_chunk_tokens)
        self.target_rows: list[int | None] = [None] * capacity
        self.context_rows: list[int | None] = [None] * capacity
        self.taps: list[int] = []
        self.calls: list[tuple[str, int, int]] = []
        self.closed = False

    def reset(self, kept_rows: int = 0) -> int:
        self.calls.append(("reset", kept_rows, 0))
        for rows in (self.target_rows, self.context_rows):
            rows[kept_rows:] = [None] * (len(rows) - kept_rows)  # dead: whoever reads one fails
        return kept_rows

    def prefill(self, ids: Sequence[int], position: int) -> int:
        assert 0 < len(ids) <= self.prefill_chunk_tokens
        self.calls.append(("prefill", len(ids), position))
        return self._target(ids, position)[-1]

    def verify(self, block: Sequence[int], position: int) -> list[int]:
        self.calls.append(("verify", len(block), position))
        return self._target(block, position)

    def draft(self, anchor: int, block_size: int, position: int) -> list[int]:
        self.calls.append(("draft", block_size, position))
        assert self.context_rows[:position] == self.target_rows[:position]
        assert position + block_size <= len(self.context_rows)
        self.context_rows[position : position + block_size] = [-5] * block_size  # scratch
        history = [*self._history(position), anchor]
        drafts = []
        for place in range(position + 1, position + block_size):
            true = next_token(history)
            history.append(true)
            drafts.append((true + 1) % VOCAB if place in self.errors_at else true)
        return drafts

    def outputs(self, kind: Literal["target", "drafter"], rows: int) -> dict[str, npt.NDArray[Any]]:
        raise AssertionError("greedy decoding asks for no logits and draws no proposals")

    def append_context(self, rows: int, position: int) -> None:
        self.calls.append(("append", rows, position))
        assert rows == len(self.taps)
        self.context_rows[position : position + rows] = self.taps

    def close(self) -> None:
        self.closed = True

    def _target(self, ids: Sequence[int], position: int) -> list[int]:
        assert position <= self.max_context
        assert position + len(ids) <= len(self.target_rows), "write past the capacity"
        self.target_rows[position : position + len(ids)] = ids
        self.taps = list(ids)
        chosen = [next_token(self._history(position + i + 1)) for i in range(len(ids))]
        return [-1 if position + i + 1 == self.not_finite_at else t for i, t in enumerate(chosen)]

    def _history(self, rows: int) -> list[int]:
        history = [row for row in self.target_rows[:rows] if row is not None]
        assert len(history) == rows, "a row was skipped"
        return history


class LateBackend(ScriptedBackend):
    """Keeps the state between cycles itself, as a device does, and is read late."""

    cycles_ahead = 1

    def start_cycles(self, anchor: int, position: int, limit: int, stop_ids: Collection[int]) -> None:
        self.anchor, self.position, self.limit, self.stop_ids = anchor, position, limit, stop_ids
        self.unread: list[Round] = []
        self.void_cycles = 0

    def enqueue_cycle(self, block_size: int) -> None:
        assert len(self.unread) <= self.cycles_ahead
        proposed = self.draft(self.anchor, block_size, self.position) if block_size > 1 else []
        posterior = self.verify([self.anchor, *proposed], self.position)
        room = max(self.limit - self.position - 1, 0)
        committed = [] if self.anchor in self.stop_ids else cut(accept(proposed, posterior), room, self.stop_ids)
        self.void_cycles += not committed
        self.append_context(block_size, self.position)
        self.anchor, self.position = [self.anchor, *committed][-1], self.position + len(committed)
        self.unread.append(Round(committed, proposed))

    def read_cycle(self) -> Round:
        return self.unread.pop(0)


def next_token(history: Sequence[int]) -> int:
    """Depends on every token and its place, so that one stale row changes what follows."""
    value = 1
    for place, token in enumerate(history):
        value = (value * 31 + token * 17 + place) % 1009
    return value % VOCAB


def greedy(prompt: Sequence[int], count: int) -> list[int]:
    history = list(prompt)
    for _ in range(count):
        history.append(next_token(history))
    return history[len(prompt) :]
