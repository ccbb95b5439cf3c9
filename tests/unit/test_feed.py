"""What a rank does to measure its data, in one process."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from allranks.train import feed_bench
from allranks.train.data import Batch
from allranks.train.feed_bench import feed_pace, worker_counts


@pytest.mark.parametrize(
    ("cpus", "counts"),
    [(1, [0, 1]), (2, [0, 1, 2]), (6, [0, 1, 2, 4, 6]), (16, [0, 1, 2, 4, 8, 16])],
)
def test_workers_up_to_the_cpus(cpus: int, counts: list[int]) -> None:
    assert worker_counts(cpus) == counts


class Clock:
    """Time that passes only while batches are made."""

    def __init__(self) -> None:
        self.now = 0.0

    def batches(self, seconds: float, first: float) -> Iterator[Batch]:
        """Batches of 4 samples; the first ones, of a pipeline that is starting, take longer."""
        while True:
            self.now += seconds if self.now >= feed_bench.SETTLE_SECONDS else first
            yield Batch(1, 4, 4, False, iter([]), 1)


@pytest.mark.parametrize(
    ("seconds_of_a_batch", "made"),
    [(0.1, 10), (0.5, 3), (2.0, 3), (30.0, 1)],  # for a second, three of them, at most 5 seconds
)
def test_the_pace_is_that_of_workers_that_have_started(
    monkeypatch: pytest.MonkeyPatch, seconds_of_a_batch: float, made: int
) -> None:
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    pace = feed_pace(clock.batches(seconds_of_a_batch, first=0.15), 1.0, lambda: None)
    assert pace == pytest.approx(4 / seconds_of_a_batch)
    assert clock.now == pytest.approx(0.3 + made * seconds_of_a_batch)
