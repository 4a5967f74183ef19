"""Numbers about measured times: percentiles, and whether one side is faster than the other beyond the spread."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence

FEWEST_ROUNDS = 3
"""With fewer, a spread says nothing and no result is called faster or slower."""

# Student's t, two-sided 95 %, for 1 to 30 degrees of freedom; above that the normal value is within 2 %.
_T_95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
_NORMAL_95 = 1.960

FASTER, SLOWER, UNDECIDED, TOO_FEW = "faster", "slower", "within the spread", "too few rounds"


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` (0 to 1) of the values lie, interpolated between neighbours.

    Raises:
        ValueError: there are no values.
    """
    if not values:
        raise ValueError("a percentile of no values")
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


@dataclasses.dataclass(frozen=True)
class Summary:
    """A quantity measured once in every round."""

    median: float
    lowest: float
    highest: float
    rounds: list[float]
    """In the order they were measured."""


def summarise(values: Sequence[float]) -> Summary:
    """Median and range of the rounds; ValueError where there are none."""
    return Summary(statistics.median(values), min(values), max(values), list(values))


@dataclasses.dataclass(frozen=True)
class Effect:
    """How many times as fast one side is as the other."""

    ratio: float
    """Geometric mean over the rounds; above 1 the first side is faster."""
    low: float
    high: float
    """95 % interval of that mean (Student's t over the logarithms of the rounds); equal to `ratio` for one round."""
    rounds: list[float]
    verdict: str
    """`faster` or `slower` only where the whole interval lies on that side of 1, else `within the spread`, or
    `too few rounds`."""


def compare(first: Sequence[float], second: Sequence[float]) -> Effect:
    """Compares two sides measured in the same rounds, in turn.

    Args:
        first: Speed of one side, round by round.
        second: Speed of the other side in the same rounds.

    Raises:
        ValueError: no rounds, not the same number, or a speed that is not positive.
    """
    if len(first) != len(second) or not first:
        raise ValueError(f"{len(first)} rounds against {len(second)}")
    if min(*first, *second) <= 0:
        raise ValueError(f"a speed that is not positive among {list(first)} and {list(second)}")
    ratios = [a / b for a, b in zip(first, second, strict=True)]
    logs = [math.log(ratio) for ratio in ratios]
    mean = statistics.fmean(logs)
    half_width = 0.0
    if len(logs) > 1:
        half_width = t_95(len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
    low, high = math.exp(mean - half_width), math.exp(mean + half_width)
    verdict = TOO_FEW if len(ratios) < FEWEST_ROUNDS else FASTER if low > 1 else SLOWER if high < 1 else UNDECIDED
    return Effect(math.exp(mean), low, high, ratios, verdict)


def t_95(degrees_of_freedom: int) -> float:
    """Student's t for a two-sided 95 % interval."""
    return _T_95[degrees_of_freedom - 1] if degrees_of_freedom <= len(_T_95) else _NORMAL_95


def effect_text(effect: Effect) -> str:
    """`1.42 x (1.31 to 1.53), faster`: the spread is never left out."""
    if effect.verdict == TOO_FEW:
        shown = ", ".join(f"{ratio:.2f}" for ratio in effect.rounds)
        return f"{effect.ratio:.2f} x (rounds: {shown}), {TOO_FEW} to call it a speedup"
    words = {UNDECIDED: "no speedup and no slowdown: the spread is larger than the effect"}
    return f"{effect.ratio:.2f} x ({effect.low:.2f} to {effect.high:.2f}), {words.get(effect.verdict, effect.verdict)}"
