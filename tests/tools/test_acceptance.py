"""The two means of acceptance that reports use differ, and both are right."""

from __future__ import annotations

import pytest

from dflash_tools.acceptance import mean_acceptance


def test_both_means() -> None:
    mean = mean_acceptance([[4, 4], [1, 1, 1, 1], []])
    assert mean is not None
    assert mean.over_rounds == pytest.approx(12 / 6)
    assert mean.over_requests == pytest.approx((4 + 1) / 2)


def test_nothing_drafted_has_no_mean() -> None:
    assert mean_acceptance([[], []]) is None
