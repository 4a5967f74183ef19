"""Caches of constant size: which rows they still hold, and so how much of a prefix a request can keep."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True)
class Ring:
    """A cache for attention that sees a window of the context.

    On the CPU row s lies in slot s mod `rows`. On a device rows follow one another, as TensorRT writes them so: row s
    lies in slot s - first, and before the end is reached those of the window move to the front.
    """

    window_tokens: int
    """Rows a query sees, its own included."""
    rows: int
    """On the CPU window + block - 1: what a block sees of the context, and the block, as all of it may be rejected.
    On a device twice the window and some calls: rows move seldom, and never onto themselves."""


class RingRows:
    """Which rows all rings of a backend hold; from the oldest to the newest written one all are right or dead."""

    def __init__(self, rings: Iterable[Ring]) -> None:
        self.rings = list(rings)
        self.fewest_rows = min((ring.rows for ring in self.rings), default=2**63)
        self.widest_tokens = max((ring.window_tokens for ring in self.rings), default=0)
        self.first = self._end = 0
        """On a device, the row in the first slot. On the CPU a row that was kept, and where writing has got to."""

    def oldest(self, ring: Ring) -> int:
        """The oldest row that a ring holds."""
        return max(self.first, self._end - ring.rows)

    def wrote(self, end: int) -> None:
        """Rows up to `end` were written, on the CPU."""
        self._end = max(self._end, end)

    def keep(self, kept_rows: int) -> int:
        """Of the rows both models have, those a request can begin behind.

        Where a ring has lost a row that the next block sees, they are a window fewer: the target runs over these
        again, and its taps fill the rings.
        """
        if any(max(0, kept_rows - ring.window_tokens + 1) < self.oldest(ring) for ring in self.rings):
            kept_rows = self.first = self._end = max(0, kept_rows - self.widest_tokens + 1)
        return kept_rows
