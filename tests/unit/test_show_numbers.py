"""How quantities are spelled."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allranks.show import numbers
from allranks.show.numbers import (
    bit_rate,
    count,
    dollars,
    duration,
    metric,
    moment,
    number,
    percent,
    progress,
    rate,
    ratio,
    short,
    size,
)

GIB = 2**30
NOON = time.mktime((2026, 11, 15, 12, 0, 0, 0, 0, -1))


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (number(0), "0"),
        (number(0.04119), "0.0412"),
        (number(9.996), "10.0"),
        (number(-12345.6), "-12,346"),
        (number(3e-9), "3.00e-09"),
        (number(float("nan")), "nan"),
        (number(1.5, signed=True), "+1.50"),
        (metric(0.4123456), "0.41235"),
        (metric(-0.001, signed=True), "-0.0010000"),
        (short(850), "850"),
        (short(12_340), "12.3k"),
        (short(4_500_000), "4.5M"),
        (count(12_345), "12,345"),
        (count(1, "rank"), "1 rank"),
        (count(0, "rank"), "0 ranks"),
        (progress(1200, 5000), "1,200/5,000"),
        (progress(120_000, 2_000_000), "120k/2M"),
        (progress(7, None), "7"),
        (ratio(3.906), "3.91x"),
        (percent(0.97449), "97.4%"),
        (percent(0.97449, 0), "97%"),
        (percent(0.1, signed=True), "+10.0%"),
        (numbers.between((117.6, 131.2)), "118-131"),
        (duration(0), "0s"),
        (duration(84.2e-6), "84.2µs"),
        (duration(0.0126), "12.6ms"),
        (duration(0.99999), "1.00s"),
        (duration(3.417), "3.42s"),
        (duration(59.96), "1m"),
        (duration(125), "2m05s"),
        (duration(3599), "59m59s"),
        (duration(3599.9), "1h"),
        (duration(86399), "23h59m"),
        (duration(8_640_000), "100d"),
        (duration(4325), "1h12m"),
        (duration(100_000), "1d03h"),
        (duration(44.6, whole=True), "45s"),
        (duration(59.6, whole=True), "1m"),
        (size(0), "0 B"),
        (size(4096), "4 KiB"),
        (size(512 * 2**20), "512 MiB"),
        (size(1023 * 2**20), "1,023 MiB"),
        (size(71.23 * GIB), "71.2 GiB"),
        (size(1.5 * 1024 * GIB), "1.5 TiB"),
        (size(71.23 * GIB, narrow=True), "71.2Gi"),
        (rate(12.5e9), "12.5 GB/s"),
        (rate(850e6), "850 MB/s"),
        (bit_rate(100e9), "100 Gbit/s"),
        (dollars(0.0412), "$0.0412"),
        (dollars(3.9), "$3.90"),
        (dollars(1234.5), "$1,234"),
        (moment(NOON, NOON + 60), "12:00"),
        (moment("2026-11-16T09:30:00", NOON), "16 Nov 09:30"),
        (moment("soon", NOON), "soon"),
    ],
)
def test_a_quantity_is_spelled_so(shown: str, expected: str) -> None:
    assert shown == expected


def test_what_is_not_known_is_a_dash() -> None:
    spelled = (number, metric, short, count, ratio, percent, duration, size, rate, dollars, moment)
    assert {one(None) for one in spelled} == {"-"}


@given(st.floats(0, 1e9))
def test_any_time_can_be_shown(seconds: float) -> None:
    assert len(duration(seconds)) <= 9
