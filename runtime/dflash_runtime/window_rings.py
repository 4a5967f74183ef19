"""Caches kept as rings: which rows they still hold, and so how much of a prefix a request can keep."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True)
class Ring:
    """A cache in which row s lies in slot s mod `rows`."""

    window_tokens: int
    """Rows a query sees, its own included."""
    rows: int
    """What a block sees of the context, and the block, any part of which may be rejected: window + block - 1."""


class RingRows:
    """The oldest row that each ring holds; from there to the newest written one all rows are right or dead."""

    def __init__(self, rings: Iterable[Ring]) -> None:
        self._oldest = dict.fromkeys(rings, 0)

    def wrote(self, end: int) -> None:
        """Rows up to `end` were written."""
        for ring, oldest in self._oldest.items():
            self._oldest[ring] = max(oldest, end - ring.rows)

    def keep(self, kept_rows: int) -> int:
        """Of the rows both models have, those a request can begin behind.

        Where a ring has lost a row that the next block sees, they are a window fewer: the target runs over these
        again, and its taps fill the rings.
        """
        seen_from = {ring: max(0, kept_rows - ring.window_tokens + 1) for ring in self._oldest}
        if any(seen_from[ring] < oldest for ring, oldest in self._oldest.items()):
            kept_rows = min(seen_from.values())
            self._oldest = dict.fromkeys(self._oldest, kept_rows)
        return kept_rows
