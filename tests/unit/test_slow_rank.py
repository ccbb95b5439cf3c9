"""Why one rank is slower than the others, from written device events."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.verdict_runs import HEALTHY, planted

from allranks.probe.device_sampler import neighbours, slowed_by
from allranks.run.record import RankRecord
from allranks.timing.slow_rank import slow_rank_reason
from allranks.timing.verdict import judge

GPU: dict[str, Any] = {
    **{"utilization": 97, "clock": 1755, "clock_max": 1980, "temperature": 61, "power": 650},
    **{"power_limit": 700, "slowed_by": [], "neighbours": 0, "cpus_allotted": 12, "cpu_wait": 1.5},
}


def reason(slow: dict[str, Any], others: dict[str, Any] | None = None) -> tuple[str, str] | None:
    """Of rank 2 of four, with these values in place of the healthy ones."""

    def rank(number: int) -> RankRecord:
        changed = slow if number == 2 else others or {}
        event = {"event": "device", **GPU, **changed}
        return RankRecord(number, [{**event, "t": 1.0 + 2 * i} for i in range(5)])

    found = slow_rank_reason({number: rank(number) for number in range(4)}, 2)
    return None if found is None else (found.kind, found.text)


@pytest.mark.parametrize(
    ("slow", "kind", "words"),
    [
        ({"neighbours": 1}, "neighbour", "another process computes on its GPU"),
        (
            {"clock": 1110, "temperature": 88, "slowed_by": ["software thermal slowdown"]},
            "temperature",
            "1,110 MHz, the others at 1,755: it is hot (88 °C)",
        ),
        ({"clock": 1110, "temperature": 88}, "temperature", "hot"),
        (
            {"clock": 1200, "power": 298, "power_limit": 300, "slowed_by": ["power cap"]},
            "power",
            "its power limit is 300 W, that of the others 700 W",
        ),
        ({"clock": 1500, "power": 699, "slowed_by": ["power cap"]}, "power", "(699 W)"),
        ({"clock": 900, "slowed_by": ["hardware slowdown"]}, "clock", "its hardware slows"),
        ({"clock": 1500}, "clock", "1,500 MHz"),
        ({"cpus_allotted": 2}, "cores", "it may use 2 CPUs, the others 12"),
        ({"cpu_wait": 41.0}, "load", "it waits for a CPU 41% of the time, the others 2%"),
    ],
)
def test_what_is_different_about_the_slow_rank_is_named(
    slow: dict[str, Any], kind: str, words: str
) -> None:
    found = reason(slow)
    assert found is not None
    assert found[0] == kind
    assert words in found[1]


@pytest.mark.parametrize(
    ("slow", "others"),
    [
        ({}, {}),
        ({"clock": 345, "utilization": 4}, {}),  # idle: its clock is low because it waits
        ({"clock": 1700}, {}),  # chips differ
        # What holds for all ranks makes none of them slower.
        ({"neighbours": 1}, {"neighbours": 1}),
        ({"slowed_by": ["power cap"]}, {"slowed_by": ["power cap"]}),
        ({"cpu_wait": 30.0, "cpus_allotted": 1}, {"cpu_wait": 25.0, "cpus_allotted": 1}),
        ({"cpu_wait": 62.0, "cpu": 0.3}, {"cpu_wait": 30.0, "cpu": 0.12}),  # it computes longer
    ],
)
def test_no_reason_is_made_up(slow: dict[str, Any], others: dict[str, Any]) -> None:
    assert reason(slow, others) is None


def test_ranks_without_samples_or_without_others_have_no_reason() -> None:
    lonely = RankRecord(0, [{"event": "device", "t": 1.0, **GPU}])
    assert slow_rank_reason({0: lonely}, 0) is None
    assert slow_rank_reason({0: lonely, 1: RankRecord(1)}, 1) is None
    assert slow_rank_reason({0: lonely, 1: RankRecord(1)}, 0) is None


def test_the_verdict_says_why_a_rank_is_slow(tmp_path: Path) -> None:
    slow = {**HEALTHY, "forward": 130.0}
    devices = [{"event": "device", **GPU}, {"event": "device", **GPU, "neighbours": 1}]
    run = planted(tmp_path, HEALTHY, slow, comm=1.0, events=lambda rank: [devices[rank]])
    found = judge(run).verdict
    assert (found.limit, found.rank) == ("straggler", 1)
    assert found.why.endswith("for rank 1: another process computes on its GPU")
    assert found.next and "nvidia-smi" in found.next


def test_nvmls_answers_in_words_and_counts() -> None:
    assert slowed_by(0x1) == []  # idle
    assert slowed_by(0x4 | 0x20) == ["power cap", "software thermal slowdown"]
    assert neighbours([10, 11, 99], own=[10, 11]) == 1
    assert neighbours([10], own=[10]) == 0
    assert neighbours([], own=[10]) == 0
    assert neighbours([4001], own=[10]) == 0  # a container: by the host's ids, it is this rank
