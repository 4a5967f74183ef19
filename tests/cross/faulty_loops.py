"""Faulty loops over right graphs: what a runtime may do to caches, taps and ids."""

from __future__ import annotations

from typing import Any, NamedTuple

from dflash_tools.graph_probe import ProbeBackend


class DropsARow(ProbeBackend):
    """The last row of a round never reaches the drafter's context."""

    def append_context(self, rows: int, position: int) -> None:
        super().append_context(max(1, rows - 1), position)


class WritesARowLate(ProbeBackend):
    """Context rows of a round are written one row further."""

    def append_context(self, rows: int, position: int) -> None:
        super().append_context(rows, position + (0 if position == 0 else 1))


class KeepsStaleTaps(ProbeBackend):
    """A round appends the taps of the pass before."""

    def verify(self, block: Any, position: int) -> list[int]:
        taps = self._taps
        found = super().verify(block, position)
        self._taps = taps if taps is not None and len(taps) >= len(block) else self._taps
        return found


class ForgetsTheRollback(ProbeBackend):
    """After a round the target goes on behind the rows of rejected tokens."""

    _surplus = 0

    def reset(self, kept_rows: int = 0) -> int:
        self._surplus = 0
        return super().reset(kept_rows)

    def verify(self, block: Any, position: int) -> list[int]:
        found = super().verify(block, position + self._surplus)
        self._surplus = 1
        return found


class SpoilsACacheRow(ProbeBackend):
    """One number of a KV row is another one after the prefill."""

    def prefill(self, ids: Any, position: int) -> int:
        found = super().prefill(ids, position)
        self.probe._caches["target"]["past_key_values.1.key"][0, 1, 2, 5] += 0.5  # type: ignore[attr-defined]
        return found


class CommitsOthers(ProbeBackend):
    """What the target chooses is shifted on its way to the host."""

    def verify(self, block: Any, position: int) -> list[int]:
        return [(token + 1) % 512 for token in super().verify(block, position)]


class ProposesOthers(ProbeBackend):
    """The proposals are handed over in another order."""

    def draft(self, anchor: int, block_size: int, position: int) -> list[int]:
        return super().draft(anchor, block_size, position)[::-1]


class RuntimeFault(NamedTuple):
    """A faulty loop over right graphs."""

    backend: type[ProbeBackend]
    level: str
    graph: str
    layer: int | None
    part: str


RUNTIME_FAULTS = [
    RuntimeFault(DropsARow, "state", "drafter_context", 0, "cached key"),
    RuntimeFault(WritesARowLate, "state", "drafter_context", 0, "cached key"),
    RuntimeFault(KeepsStaleTaps, "state", "drafter_context", 0, "cached key"),
    RuntimeFault(ForgetsTheRollback, "state", "target", 0, "cached key"),
    RuntimeFault(SpoilsACacheRow, "state", "target", 1, "cached key"),
    RuntimeFault(CommitsOthers, "tokens", "target", None, "token"),
    RuntimeFault(ProposesOthers, "acceptance", "drafter", None, "proposal"),
]
