"""What a validation says: one verdict for each level, and the first thing that is wrong with its usual cause."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from dflash_runtime.bundle import CheckRow

LEVELS = ("graph", "state", "tokens", "acceptance", "speed")
PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"


@dataclasses.dataclass(frozen=True)
class Divergence:
    """The first thing of a level that is not as it should be."""

    graph: str
    """target, drafter_context, drafter; empty where it is no graph's."""
    tensor: str
    """Its name in the graph or module, or what was compared in words."""
    layer: int | None
    part: str
    """norm, q, k, v, rope, attention, MLP, tap, context, head, ... or a class of cause."""
    where: str
    """Call, row and position, or text and round."""
    found: str
    expected: str
    deviation: float
    allowed: float
    seen_on: str
    """`engine` for what it hands out, else which debug engine showed it."""
    cause: str
    """What usually causes this."""

    def text(self) -> str:
        """The divergence in one sentence."""
        layer = "" if self.layer is None else f" layer {self.layer}"
        graph = f"{self.graph.replace('_', ' ')}" if self.graph else "pair"
        size = "" if self.allowed == self.deviation == 0 else f" (deviation {self.deviation:.3g}, allowed "
        size += "" if not size else f"{self.allowed:.3g})"
        return (
            f"{graph}{layer} {self.part}: {self.tensor} at {self.where} is {self.found} instead of {self.expected}"
            f"{size}, seen on {self.seen_on}. Usual cause: {self.cause}"
        )


@dataclasses.dataclass(frozen=True)
class Verdict:
    """How one level ended."""

    level: str
    status: str
    """`passed`, `failed`, or `skipped` where the level does not apply."""
    rows: list[CheckRow]
    first: Divergence | None
    notes: list[str]


def judge(level: str, rows: Sequence[CheckRow], first: Divergence | None, notes: Sequence[str] = ()) -> Verdict:
    """A level passes when something was checked and all of it passed."""
    if not rows:
        return Verdict(level, FAILED, [], first, [*notes, "nothing was checked, so nothing is proven"])
    failed = first is not None or not all(row.passed for row in rows)
    return Verdict(level, FAILED if failed else PASSED, list(rows), first, list(notes))


def skipped(level: str, reason: str) -> Verdict:
    """A level that does not apply, and why."""
    return Verdict(level, SKIPPED, [], None, [reason])


def not_finite(level: str, words: str) -> Verdict:
    """A level that ended where the engine's logits are no numbers."""
    first = Divergence("target", "logits", None, "head", "the decode loop", "not finite", "finite", math.inf, 0.0,
                       "engine", words)  # fmt: skip
    return judge(level, [CheckRow(level, "decode loop", math.inf, 0.0, False, words)], first)


def all_passed(verdicts: Sequence[Verdict]) -> bool:
    """Whether something passed and nothing failed."""
    states = [verdict.status for verdict in verdicts]
    return PASSED in states and FAILED not in states
