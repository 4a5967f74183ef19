from __future__ import annotations

import math

import pytest

from dflash_tools.bench_statistics import (
    FASTER,
    SLOWER,
    TOO_FEW,
    UNDECIDED,
    compare,
    effect_text,
    percentile,
    summarise,
    t_95,
)


def test_percentiles_by_hand() -> None:
    assert percentile([4, 1, 3, 2], 0.5) == 2.5
    assert percentile([10, 20, 30, 40, 50], 0.9) == pytest.approx(46)
    assert percentile([7], 0.99) == 7
    assert percentile([1, 2], 0) == 1
    assert percentile([1, 2], 1) == 2
    with pytest.raises(ValueError, match="no values"):
        percentile([], 0.5)


def test_a_summary_keeps_the_order_of_the_rounds() -> None:
    found = summarise([3.0, 1.0, 2.0])
    assert (found.median, found.lowest, found.highest, found.rounds) == (2.0, 1.0, 3.0, [3.0, 1.0, 2.0])


def test_an_effect_by_hand() -> None:
    # ratios 2, 2, 8: logarithms to base 2 are 1, 1, 3, mean 5/3, deviation 2/sqrt(3)
    effect = compare([2.0, 4.0, 8.0], [1.0, 2.0, 1.0])
    half_width = 4.303 * (2 / math.sqrt(3)) / math.sqrt(3)
    assert effect.rounds == [2.0, 2.0, 8.0]
    assert effect.ratio == pytest.approx(2 ** (5 / 3))
    assert effect.low == pytest.approx(2 ** (5 / 3 - half_width))
    assert effect.high == pytest.approx(2 ** (5 / 3 + half_width))


@pytest.mark.parametrize(
    ("first", "verdict"),
    [
        ([1.50, 1.52, 1.48], FASTER),
        ([0.70, 0.71, 0.69], SLOWER),
        ([1.00, 1.30, 1.05], UNDECIDED),  # faster on the average and in no round slower, but the spread is larger
        ([1.40, 0.80, 1.60], UNDECIDED),
        ([1.02, 1.00, 0.99], UNDECIDED),
        ([1.50, 1.50], TOO_FEW),
        ([3.00], TOO_FEW),
    ],
)
def test_only_an_effect_larger_than_its_spread_is_called_one(first: list[float], verdict: str) -> None:
    effect = compare(first, [1.0] * len(first))
    assert effect.verdict == verdict
    text = effect_text(effect)
    assert ("speedup" not in text) or ("no speedup" in text) or ("too few" in text)
    assert (verdict == FASTER) == text.endswith(", faster")


def test_a_slow_minute_hits_both_sides_of_a_round() -> None:
    # The machine halves its speed in the second round: what is measured in turn stays comparable.
    assert compare([30.0, 15.0, 31.0], [20.0, 10.0, 20.0]).verdict == FASTER
    # The same speeds, paired with the wrong rounds, tell nothing: the pairing is what makes them comparable.
    assert compare([30.0, 15.0, 31.0], [10.0, 20.0, 20.0]).verdict == UNDECIDED


def test_what_cannot_be_compared_is_refused() -> None:
    for first, second in (([1.0], [1.0, 2.0]), ([], []), ([0.0, 1.0], [1.0, 1.0])):
        with pytest.raises(ValueError, match=r"rounds against|not positive"):
            compare(first, second)


def test_students_t() -> None:
    assert (t_95(1), t_95(4), t_95(30)) == (12.706, 2.776, 2.042)
    assert t_95(1000) == 1.960
