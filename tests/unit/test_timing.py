"""From the events of all ranks: samples a second, and where the time of a step went."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allranks.run.folder import RunDir
from allranks.timing.steps import (
    PARTS,
    exchange_seconds,
    split_waits,
    steady_from,
    timing,
    timing_of,
)
from allranks.timing.timeline import PHASES, WAIT


def event(
    step: int = 1, *, samples: int = 8, waits: list[float] | None = None, **phases: float
) -> dict[str, Any]:
    """A step event whose phases sum to its seconds."""
    given_phases = {**dict.fromkeys(PHASES, 0.0), **phases}
    if waits is not None:
        given_phases[WAIT] = sum(waits)
    made: dict[str, Any] = {
        "event": "step",
        "step": step,
        "samples": samples,
        "seconds": sum(given_phases.values()),
        **given_phases,
    }
    if waits is not None:
        made["waits"] = waits
    return made


def same(num_steps: int, *ranks: dict[str, Any]) -> dict[int, dict[int, dict[str, Any]]]:
    """Every rank makes the same step again and again."""
    return {
        rank: {n: {**one, "step": n} for n in range(1, num_steps + 1)}
        for rank, one in enumerate(ranks)
    }


seconds = st.floats(0, 5).map(lambda value: round(value, 6))
rank_events = st.builds(
    event,
    data=seconds,
    forward=seconds,
    backward=seconds,
    optimizer=seconds,
    other=seconds,
    wait=seconds,
)
rows = st.integers(1, 5).flatmap(
    lambda ranks: st.lists(
        st.lists(rank_events, min_size=ranks, max_size=ranks), min_size=1, max_size=6
    )
)


@given(rows)
def test_parts_sum_to_the_steps_of_a_rank(drawn: list[list[dict[str, Any]]]) -> None:
    split = split_waits(drawn)
    totals = [sum(row[r]["seconds"] for row in drawn) / len(drawn) for r in range(len(drawn[0]))]
    late = max(0.0, split.parts["data"])  # what a slower rank waits for data is taken off another
    assert set(split.parts) == set(PARTS)
    assert any(sum(split.parts.values()) == pytest.approx(total, abs=1e-6) for total in totals)
    assert all(value >= -1e-9 for value in split.parts.values()), (split.parts, late)


@given(rows)
def test_one_rank_alone_never_waits_for_a_slower_one(drawn: list[list[dict[str, Any]]]) -> None:
    alone = [[row[0]] for row in drawn]
    split = split_waits(alone)
    assert split.parts["straggler"] == 0
    assert split.slowest is None


def test_a_slow_rank_is_named_and_the_others_wait_for_it() -> None:
    found = timing_of(
        same(
            30,
            event(forward=0.010, backward=0.020, wait=0.025, optimizer=0.005),
            event(forward=0.030, backward=0.020, wait=0.005, optimizer=0.005),
            event(forward=0.010, backward=0.020, wait=0.025, optimizer=0.005),
        ),
        None,
    )
    assert found is not None and found.parts is not None
    assert found.parts == pytest.approx(
        {"compute": 0.035, "comm": 0.005, "straggler": 0.020, "data": 0.0, "other": 0.0}
    )
    assert (found.slowest_rank, found.slowest_share) == (1, 1.0)
    assert found.slowest_part == "forward"


def test_data_that_one_rank_waits_for_is_data_for_all() -> None:
    found = timing_of(
        same(30, event(forward=0.01, wait=0.025), event(forward=0.01, data=0.02, wait=0.005)), None
    )
    assert found is not None and found.parts is not None
    assert found.parts["data"] == pytest.approx(0.02)
    assert found.parts["straggler"] == pytest.approx(0.0)
    assert found.parts["comm"] == pytest.approx(0.005)
    assert (found.slowest_rank, found.slowest_part) == (1, "data")


def test_an_exchange_that_is_slow_for_all_is_communication() -> None:
    found = timing_of(
        same(30, event(forward=0.01, wait=0.02), event(forward=0.01, wait=0.02)), None
    )
    assert found is not None and found.parts is not None
    assert found.parts["comm"] == pytest.approx(0.02)
    assert found.parts["straggler"] == pytest.approx(0.0)


def test_ranks_that_are_slow_in_turns_make_each_other_wait() -> None:
    """In each exchange another one comes last: none of it is communication."""
    steps = same(
        30,
        event(forward=0.01, backward=0.03, waits=[0.021, 0.001]),
        event(forward=0.03, backward=0.01, waits=[0.001, 0.021]),
    )
    found = timing_of(steps, None)
    assert found is not None and found.parts is not None
    assert found.parts["comm"] == pytest.approx(0.002)
    assert found.parts["straggler"] == pytest.approx(0.020)


def test_exchanges_that_cannot_be_paired_are_compared_as_sums() -> None:
    assert exchange_seconds([event(waits=[1.0, 2.0]), event(waits=[1.0, 1.0, 0.5])]) == 2.5
    assert exchange_seconds([event(waits=[1.0, 2.0]), event(waits=[2.0, 0.5])]) == 1.5
    assert exchange_seconds([event(wait=3.0), event(wait=2.0)]) == 2.0
    # Stages wait for different neighbours: their first waits have nothing in common.
    stages = [event(waits=[0.0, 3.0]), event(waits=[3.0, 0.0])]
    assert exchange_seconds(stages) == 0.0
    assert exchange_seconds([{**one, "exchanges": {"pipeline": 3.0}} for one in stages]) == 3.0


def noise(seed: int, num_steps: int = 60) -> dict[int, dict[int, dict[str, Any]]]:
    """Two equal ranks: now one comes late, now the other."""
    random = Random(seed)
    steps: dict[int, dict[int, dict[str, Any]]] = {0: {}, 1: {}}
    for number in range(1, num_steps + 1):
        took = [0.010 + random.expovariate(1 / 0.002) for _ in range(2)]
        for rank in range(2):
            wait = 0.002 + max(took) - took[rank]
            steps[rank][number] = event(number, forward=took[rank], wait=wait)
    return steps


def test_of_equal_ranks_none_is_named() -> None:
    named = [found.slowest_rank for seed in range(100) if (found := timing_of(noise(seed), None))]
    assert len(named) == 100
    assert named.count(None) >= 97


def test_of_two_steps_no_rank_is_named() -> None:
    found = timing_of(
        same(2, event(forward=0.010, wait=0.002), event(forward=0.011, wait=0.001)), None
    )
    assert found is not None and found.parts is not None
    assert found.slowest_rank is None


def test_a_rank_that_is_late_only_now_and_then_is_named() -> None:
    steps = noise(0, 200)
    for number in range(5, 201, 10):
        steps[0][number] = event(number, forward=0.01, wait=0.102)
        steps[1][number] = event(number, forward=0.11, wait=0.002)
    found = timing_of(steps, None)
    assert found is not None
    assert (found.slowest_rank, found.slowest_part) == (1, "forward")


def test_waiting_for_a_rank_by_less_than_a_hundredth_of_a_step_names_none() -> None:
    late = [event(forward=1.0, wait=0.019), event(forward=1.009, wait=0.010)]
    found = timing_of(same(30, *late), None)
    assert found is not None and found.slowest_rank is None


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("slow", [0, 1])
def test_what_a_rank_does_around_an_exchange_is_communication_and_its_doing(
    ranks: int, slow: int
) -> None:
    """All wait equally long: this one in code of its own, the others for it."""
    usual = event(forward=0.01, wait=0.025)
    own = {**usual, "own": [0.02]}
    found = timing_of(same(30, *(own if r == slow else usual for r in range(ranks))), None)
    assert found is not None and found.parts is not None
    assert found.parts["comm"] == pytest.approx(0.025)
    assert found.parts["straggler"] == pytest.approx(0.0)
    assert (found.slowest_rank, found.slowest_share, found.slowest_part) == (slow, 1.0, "comm")


def test_what_all_ranks_do_around_an_exchange_names_none() -> None:
    own = {**event(forward=0.01, wait=0.025), "own": [0.02]}
    found = timing_of(same(30, own, own, own), None)
    assert found is not None and found.parts is not None
    assert found.parts["comm"] == pytest.approx(0.025)
    assert found.slowest_rank is None


def test_a_slow_rank_with_a_hook_of_its_own_is_both() -> None:
    """10 ms in forward, 20 ms in its hook: the others wait 30."""
    usual = event(forward=0.01, wait=0.035)
    slow = {**event(forward=0.02, wait=0.025), "own": [0.02]}
    found = timing_of(same(30, usual, slow, usual), None)
    assert found is not None and found.parts is not None
    assert found.parts["comm"] == pytest.approx(0.025)
    assert found.parts["straggler"] == pytest.approx(0.010)
    assert (found.slowest_rank, found.slowest_part) == (1, "comm")


def test_own_code_around_several_exchanges() -> None:
    first = {**event(waits=[0.021, 0.002]), "own": [0.020, 0.001]}
    second = {**event(waits=[0.021, 0.001])}
    assert exchange_seconds([first, second]) == pytest.approx(0.002)
    many = {**event(wait=0.023), "own": [0.021]}  # too many to be told apart
    assert exchange_seconds([many, second]) == pytest.approx(0.002)


def held(num_steps: int, rank: int, ranks: int, apart: float) -> dict[int, dict[int, Any]]:
    """A rank leaves each exchange `apart` seconds after the others; all wait as long."""
    wait = 0.005 + apart
    return {
        r: {
            n: {**event(n, forward=0.01, wait=wait), "arrive": at, "left": at + wait}
            for n in range(1, num_steps + 1)
            for at in [n * 1.0 + apart * (r == rank)]
        }
        for r in range(ranks)
    }


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_that_is_held_in_an_exchange_is_named_by_one_clock(ranks: int) -> None:
    steps = held(30, 1, ranks, 0.020)
    found = timing_of(steps, None, one_clock=True)
    assert found is not None and found.parts is not None
    assert (found.slowest_rank, found.slowest_share, found.slowest_part) == (1, 1.0, "comm")
    assert found.parts["comm"] == pytest.approx(0.025)
    apart = timing_of(steps, None)
    assert apart is not None and apart.slowest_rank is None  # clocks of several machines
    together = timing_of(held(30, 1, ranks, 0.0001), None, one_clock=True)
    assert together is not None and together.slowest_rank is None


def test_longest_waits_in_different_exchanges_name_none() -> None:
    steps = held(30, 1, 2, 0.020)
    for number, one in steps[1].items():
        one.update(arrive=number + 0.5, left=number + 0.52)
    found = timing_of(steps, None, one_clock=True)
    assert found is not None and found.slowest_rank is None


def test_ranks_that_never_meet_have_no_slowest() -> None:
    found = timing_of(same(30, event(forward=0.01), event(forward=0.05)), None)
    assert found is not None
    assert (found.slowest_rank, found.slowest_share, found.slowest_part) == (None, 0.0, None)


def test_samples_of_all_ranks_over_the_time_of_one() -> None:
    found = timing_of(same(40, event(forward=0.5, samples=8), event(forward=0.5, samples=24)), None)
    assert found is not None
    assert found.ranks == 2
    assert found.samples_per_second == pytest.approx(64)
    assert found.samples == 32 * found.num_steps
    assert found.step_seconds == pytest.approx(0.5)
    assert found.step_deviation == pytest.approx(0.0)


def test_the_window_of_the_probe_is_taken() -> None:
    window = {"event": "window", "first": 21, "last": 30, "steady": False}
    found = timing_of(same(30, event(forward=0.5)), window)
    assert found is not None
    assert (found.first_step, found.last_step, found.steady) == (21, 30, False)


def test_a_window_that_was_never_reached_is_not() -> None:
    window = {"event": "window", "first": 31, "last": 90, "steady": True}
    found = timing_of(same(30, event(forward=0.5)), window)
    assert found is not None
    assert found.last_step == 30 and found.first_step < 21


def test_only_steps_that_all_ranks_made_are_counted() -> None:
    steps = same(30, event(forward=0.5), event(forward=0.5))
    for late in range(26, 31):
        del steps[1][late]
    found = timing_of(steps, None)
    assert found is not None and found.last_step == 25


def test_too_few_steps_tell_nothing() -> None:
    assert timing_of({}, None) is None
    assert timing_of({0: {}}, None) is None
    assert timing_of(same(1, event(forward=1.0)), None) is None
    assert timing_of({0: {1: event()}, 1: {2: event(2)}}, None) is None


def test_without_phases_there_are_no_parts() -> None:
    bare = {"event": "step", "seconds": 0.5, "samples": 4}
    found = timing_of(same(30, bare), None)
    assert found is not None
    assert found.parts is None and found.slowest_rank is None
    assert found.samples_per_second == pytest.approx(8)


@pytest.mark.parametrize("slow", [0, 1, 3, 4, 5, 12])
def test_warm_up_is_left_out(slow: int) -> None:
    first, is_steady = steady_from([(n, 50.0 if n <= slow else 1.0) for n in range(1, 61)])
    assert is_steady
    assert slow < first <= slow + 12


def test_steps_that_get_ever_slower_are_not_steady() -> None:
    first, is_steady = steady_from([(n, 1.5**n) for n in range(1, 40)])
    assert not is_steady and first == 3
    assert steady_from([(1, 1.0), (2, 2.0), (3, 9.0)]) == (2, False)


@given(st.lists(st.floats(1e-6, 10), min_size=1, max_size=80))
def test_the_first_step_is_never_measured_if_there_is_another(times: list[float]) -> None:
    first, _ = steady_from(list(enumerate(times, start=1)))
    assert 1 <= first <= len(times)
    assert first > 1 or len(times) == 1


def write(run: RunDir, rank: int, events: list[dict[str, Any]]) -> None:
    path = run.events(0, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"v": 1, "t": 0.0, **one}) + "\n" for one in events))


def test_a_run_s_files_are_read_with_a_torn_last_line(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "job-20261115-120000-abcd")
    for rank in range(2):
        start = {"event": "start", "rank": rank}
        write(run, rank, [start, *(event(n, forward=0.5) for n in range(1, 31))])
    with run.events(0, 1).open("a") as file:
        file.write('{"v":1,"event":"st')
    found = timing(run)
    assert found is not None
    assert (found.ranks, found.last_step) == (2, 30)
    assert found.samples_per_second == pytest.approx(32)


def test_of_the_windows_of_ranks_that_never_meet_the_last_one_counts(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "job-20261115-120000-abcd")
    steps = [event(n, forward=0.5) for n in range(1, 41)]
    for rank, first in enumerate((22, 18)):
        window = {"event": "window", "first": first, "last": 40, "steady": True}
        write(run, rank, [*steps, window])
    found = timing(run)
    assert found is not None and found.first_step == 22


def test_a_run_without_steps_has_no_timing(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "job-20261115-120000-abcd")
    assert timing(run) is None
    write(run, 0, [{"event": "start", "rank": 0}])
    assert timing(run) is None
