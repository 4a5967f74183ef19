"""Cycles of draft, verify, accept, append: what the decode loop asks for, and the host's own for other backends."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from dflash_runtime.backend import Backend

if TYPE_CHECKING:
    from dflash_runtime.sampling import TokenChooser


class Round(NamedTuple):
    """What one pass over the target committed."""

    committed: list[int]
    """Tokens that now belong to the output, oldest first."""
    proposed: list[int]
    """What the drafter proposed for them; empty for the prefill and for plain steps."""
    finish_reason: str | None = None
    """`stop`, `length` or `context` in the last round, else None."""
    kept_rows: int = 0
    """Of the prefill: tokens of the prompt whose rows were there already."""

    @property
    def block_size(self) -> int:
        """Of the pass, anchor included."""
        return len(self.proposed) + 1


@runtime_checkable
class Cycles(Protocol):
    """Greedy cycles one after another, the state between them kept by whoever runs them.

    A cycle commits up to the first stop token and never past the limit; one that starts behind either commits nothing.
    """

    cycles_ahead: int
    """Cycles that may be enqueued before the one before them is read."""

    def start_cycles(self, anchor: int, position: int, limit: int, stop_ids: Collection[int]) -> None:
        """Begins behind the prefill: the newest token, its place, the first place that must stay empty."""

    def enqueue_cycle(self, block_size: int) -> None:
        """Asks for the next cycle."""

    def read_cycle(self) -> Round:
        """The oldest cycle not read yet."""


class HostCycles:
    """Cycles whose state the host keeps; each is run when it is read. With a chooser it says what the target says."""

    cycles_ahead = 0

    def __init__(self, backend: Backend, chooser: TokenChooser | None = None) -> None:
        self._backend, self._chooser = backend, chooser

    def start_cycles(self, anchor: int, position: int, limit: int, stop_ids: Collection[int]) -> None:
        """See `Cycles`."""
        self._anchor, self._position, self._limit, self._stop_ids = anchor, position, limit, stop_ids
        if self._chooser is not None:
            self._chooser.commit([anchor])

    def enqueue_cycle(self, block_size: int) -> None:
        """See `Cycles`."""
        self._block_size = block_size

    def read_cycle(self) -> Round:
        """See `Cycles`."""
        backend, block_size, position = self._backend, self._block_size, self._position
        proposed = backend.draft(self._anchor, block_size, position) if block_size > 1 else []
        if self._chooser is not None:
            proposed = self._chooser.propose(backend, proposed, position + 1)
        block = [self._anchor, *proposed]
        posterior = backend.verify(block, position)
        if self._chooser is not None:
            posterior = self._chooser.decide(backend, len(block), proposed, position + 1)
        committed = cut(accept(proposed, posterior), self._limit - position - 1, self._stop_ids)
        # All rows of the block are written; the next cycle begins where the rejected ones do and replaces them.
        backend.append_context(len(block), position)
        if self._chooser is not None:
            self._chooser.commit(committed)
        self._anchor, self._position = committed[-1], position + len(committed)
        return Round(committed, proposed)


def accept(proposed: Sequence[int], posterior: Sequence[int]) -> list[int]:
    """The greedy rule: keep proposals while they are what the target says, then add the target's own token.

    `proposed` are the b-1 drafted tokens, `posterior` is the target's choice after each of the b block tokens.
    """
    accepted = next((i for i, token in enumerate(proposed) if token != posterior[i]), len(proposed))
    return list(posterior[: accepted + 1])


def cut(tokens: list[int], room: int, stop_ids: Collection[int]) -> list[int]:
    """Tokens up to the first stop token, and no more than there is room for."""
    stop = next((i for i, token in enumerate(tokens) if token in stop_ids), len(tokens))
    return tokens[: min(room, stop + 1)]
