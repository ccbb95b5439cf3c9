"""Repeats, and the interval that their mean is in."""

from __future__ import annotations

import math

import pytest

from allranks.timing.comparison import spread, t_975


def test_one_value_has_no_interval() -> None:
    alone = spread([5.0])
    assert (alone.mean, alone.min, alone.max, alone.n, alone.ci95) == (5.0, 5.0, 5.0, 1, None)


def test_the_interval_is_students() -> None:
    """Three values 9, 10, 11: standard deviation 1, t(2) = 4.3027."""
    several = spread([9.0, 10.0, 11.0])
    half = 4.3027 / math.sqrt(3)
    assert several.ci95 == pytest.approx((10 - half, 10 + half))
    assert (several.min, several.max, several.n) == (9.0, 11.0, 3)


def test_a_rate_is_not_negative() -> None:
    interval = spread([1.0, 9.0], lowest=0.0).ci95
    assert interval is not None and interval[0] == 0.0


@pytest.mark.parametrize(
    ("freedom", "quantile"), [(1, 12.706), (10, 2.228), (31, 2.0395), (60, 2.0003), (1000, 1.9623)]
)
def test_quantiles_agree_with_published_tables(freedom: int, quantile: float) -> None:
    assert t_975(freedom) == pytest.approx(quantile, abs=5e-4)
