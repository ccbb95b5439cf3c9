"""What is told from the events of long runs, and of ranks that are nearly equal."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from tests.watch_runs import GrowingRun, event_line

from allranks.watch.live import Watcher
from allranks.watch.reader import MAX_POINTS, Points, RunReader

STEP_SECONDS, PAUSE = 0.1, 400.0


def write_steps(run: GrowingRun, steps: range, *, pause_before: int | None = None) -> None:
    """Many steps of the first rank, with one pause in them."""
    lines = []
    for step in steps:
        run.now += STEP_SECONDS + (PAUSE if step == pause_before else 0.0)
        loss = {"loss": 1.0} if step % 10 == 0 else {}
        fields = {"step": step, "samples": 32, "seconds": STEP_SECONDS, "data": 0.01, **loss}
        lines.append(event_line(run.now, "step", **fields))
    with run.run.events(run.attempt, 0).open("a") as file:
        file.writelines(lines)


@pytest.mark.parametrize("is_live", [False, True], ids=["read at once", "as it grows"])
def test_the_longest_pause_of_a_long_run_survives_thinning(tmp_path: Path, is_live: bool) -> None:
    """100,000 steps in the first attempt, a validation of minutes in them, then a second one."""
    run = GrowingRun(tmp_path, "1x1", steps=200_000, begin=1e9)
    run.begin()
    reader = RunReader(run.run)
    for begin in range(1, 100_001, 20_000):
        write_steps(run, range(begin, begin + 20_000), pause_before=71_234)
        if is_live:
            reader.look(all_ranks=False)
    run.now += 5000  # in the queue, between the attempts: not a pause
    run.begin(attempt=1, step=100_000)
    run.now += 300  # imports and compilers: not a pause either
    write_steps(run, range(100_001, 130_001))
    reader.look(all_ranks=False)
    assert reader.attempt == 1 and reader.lead.last_step == 130_000
    assert reader.longest_pause == pytest.approx(PAUSE + STEP_SECONDS)
    assert reader.lead.longest_pause == pytest.approx(STEP_SECONDS)


@pytest.mark.parametrize(("silent", "is_stalled"), [(PAUSE, False), (11 * PAUSE, True)])
def test_a_resumed_run_is_as_patient_as_before(
    tmp_path: Path, silent: float, is_stalled: bool
) -> None:
    run = GrowingRun(tmp_path, "1x1", steps=200_000, begin=1e9)
    run.begin()
    write_steps(run, range(1, 30_001), pause_before=20_007)
    run.begin(attempt=1, step=30_000)
    write_steps(run, range(30_001, 30_101))
    watcher = Watcher(tmp_path, now=lambda: run.now + silent)
    with run.live():
        watcher.poll(budget=float("inf"))
        assert watcher.runs()[0].stalled is is_stalled
    watcher.close()


def test_the_last_steps_of_a_long_run_are_laid_side_by_side(tmp_path: Path) -> None:
    run = GrowingRun(tmp_path, "1x4", steps=40_000, slowest=2)
    run.begin()
    run.steps(20_000)
    reader = RunReader(run.run)
    reader.look(all_ranks=True)
    parts = reader.parts()
    assert parts is not None and parts.steps == 32 and parts.slowest_rank == 2


def test_a_first_rank_that_begins_last_still_leads(tmp_path: Path) -> None:
    """Its file has the losses: also if another rank's was there first."""
    run = GrowingRun(tmp_path, "1x2")
    run.begin()
    later = run.run.events(0, 0).rename(tmp_path / "later")
    reader = RunReader(run.run)
    reader.look(all_ranks=True)
    assert reader.lead.rank == 1
    later.rename(run.run.events(0, 0))
    run.steps(20)
    reader.look(all_ranks=True)
    assert reader.lead.rank == 0 and reader.losses.steps == [10, 20]
    assert reader.lead is reader.ranks[0] and reader.ranks[1].last_step == 20


def test_a_loss_that_is_not_a_number_is_never_thinned_away() -> None:
    points = Points()
    for step in range(1, 40 * MAX_POINTS):
        points.add(step, None if step == 777 else 1.0)
    assert points.values.count(None) == 1 and points.steps[points.values.index(None)] == 777


def test_time_left_has_the_pauses_between_steps_in_it(tmp_path: Path) -> None:
    """A validation of 40 s after every 100 steps of 0.1 s: a step takes 0.5 s by the clock."""
    run = GrowingRun(tmp_path, "1x1", steps=2000, begin=1e9)
    run.begin()
    for begin in range(1, 1001, 100):
        write_steps(run, range(begin, begin + 100))
        run.now += 40
    watcher = Watcher(tmp_path, now=lambda: run.now)
    with run.live():
        watcher.poll(budget=float("inf"))
        left = watcher.runs()[0].seconds_left
    watcher.close()
    assert left == pytest.approx(1000 * 0.5, rel=0.15)


def parts_of(tmp_path: Path, ranks: int, wait: Callable[[int], float], steps: int = 32) -> int:
    """The rank that is called slowest, -1 for none; `wait` says how long each waits in a step."""
    run = GrowingRun(tmp_path, f"1x{ranks}")
    run.begin()
    lines: Sequence[list[str]] = [[] for _ in range(ranks)]
    for step in range(1, steps + 1):
        for rank in range(ranks):
            phases = {"data": 0.0, "forward": 0.03, "optimizer": 0.01, "other": 0.0}
            waits = wait(rank)
            phases |= {"wait": waits, "backward": 0.06 - waits, "seconds": 0.1}
            lines[rank].append(event_line(step, "step", step=step, **phases))
    for rank, of_rank in enumerate(lines):
        with run.run.events(0, rank).open("a") as file:
            file.writelines(of_rank)
    reader = RunReader(run.run)
    reader.look(all_ranks=True)
    parts = reader.parts()
    assert parts is not None and parts.steps == steps
    return -1 if parts.slowest_rank is None else parts.slowest_rank


@pytest.mark.parametrize("ranks", [2, 8, 64])
@pytest.mark.parametrize("seed", range(5))
def test_of_equal_ranks_none_is_the_slowest(tmp_path: Path, ranks: int, seed: int) -> None:
    """A tenth of a step of noise: somebody always comes last."""
    noise = random.Random(100 * seed + ranks)
    assert parts_of(tmp_path, ranks, lambda rank: 0.02 + abs(noise.gauss(0, 0.01))) == -1


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_a_rank_that_is_always_late_stands_out_of_the_noise(tmp_path: Path, ranks: int) -> None:
    noise = random.Random(ranks)

    def wait(rank: int) -> float:
        return (0.01 if rank == 1 else 0.02) + 0.2 * abs(noise.gauss(0, 0.01))

    assert parts_of(tmp_path, ranks, wait) == 1


def test_a_rank_that_is_late_by_nothing_that_matters_is_not_marked(tmp_path: Path) -> None:
    assert parts_of(tmp_path, 4, lambda rank: 0.0199 if rank == 1 else 0.02) == -1
