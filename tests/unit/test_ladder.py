"""Climbing from layout to layout while it pays."""

from __future__ import annotations

from pathlib import Path

import pytest

from allranks.launch.backends.slurm import ladder
from allranks.launch.backends.slurm.sbatch import Racer
from allranks.run.events import append_event
from allranks.run.folder import RunDir
from allranks.timing.timeline import PHASES

LAYOUTS = [Racer.parse(text) for text in ("2x2", "1x1", "1x2", "1x1")]

FIRST = Racer.parse("1x1@a100")  # slurm.gpu named the type


def climb(*speeds: float, min_efficiency: float = 0.85) -> ladder.Ladder:
    now = ladder.of(LAYOUTS, min_efficiency=min_efficiency)
    for speed in speeds:
        now = now.after(speed)
    return now


def test_the_smallest_layout_comes_first_and_each_once() -> None:
    assert climb().layouts == ("1x1", "1x2", "2x2")
    assert climb().rung == "1x1"


@pytest.mark.parametrize(
    ("speeds", "rung", "chosen"),
    [
        ((100,), "1x2", None),
        ((100, 170), "2x2", None),  # exactly 85%
        ((100, 169), "1x1", "1x1"),
        ((100, 180, 339), "1x2", "1x2"),
        ((100, 180, 341), "2x2", "2x2"),
        ((0,), "1x1", "1x1"),  # nothing can be compared: it climbs no higher
        ((100, 0), "1x1", "1x1"),
    ],
)
def test_it_climbs_while_the_efficiency_holds(
    speeds: tuple[float, ...], rung: str, chosen: str | None
) -> None:
    now = climb(*speeds)
    assert (now.rung, now.chosen) == (rung, chosen)
    last = [*now.speeds][-1]
    said = now.in_words(last)
    assert ("samples could not be counted" in said) == (not speeds[-1]) and last in said


def test_where_nothing_can_be_compared_it_climbs_no_higher() -> None:
    alone = climb(100).after(200, "no communication between its ranks was seen")
    assert alone.chosen == "1x1"
    assert "cannot be compared (1x2: no communication between its ranks" in alone.in_words("1x2")
    slowed = climb(100, 342)
    assert slowed.chosen == "1x2"
    assert "171.0% efficient against 1x1, too good to be true" in slowed.in_words("1x2")


def test_a_rung_keeps_its_type_of_gpu() -> None:
    racers = [Racer.parse(text) for text in ("1x2@a100", "1x1@a100", "1x1@a40")]
    now = ladder.of(racers, min_efficiency=0.85)
    assert now.layouts == ("1x1@a100", "1x1@a40", "1x2@a100")
    now = now.after(100).after(90)
    assert now.rung == "1x2@a100" and now.after(180).chosen == "1x2@a100"


def make_run(folder: Path) -> RunDir:
    run = RunDir(folder / "job-20261115-120000-aaaa")
    run.path.mkdir()
    run.write_info({"run": run.name})
    return run


def write_steps(run: RunDir, attempt: int, last_step: int) -> None:
    for step in range(1, last_step + 1):
        phases = dict.fromkeys(PHASES, 0.01)
        append_event(run.events(attempt, 0), "step", step=step, samples=6, seconds=0.06, **phases)


def test_a_rung_is_measured_when_its_last_step_was_made(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    assert ladder.measured(run, FIRST) is None  # it has no ladder
    ladder.write(run, ladder.of(LAYOUTS, min_efficiency=0.85, steps=50))
    assert ladder.measured(run, FIRST) is None
    write_steps(run, 0, 60)
    append_event(run.events(0, 0), "window", first=21, last=70, steady=True)
    assert ladder.measured(run, FIRST) is None  # it was stopped before
    assert ladder.ended_on_rung(run)
    write_steps(run, 1, 70)
    assert not ladder.ended_on_rung(run)
    append_event(run.events(1, 0), "window", first=21, last=70, steady=True)
    assert ladder.measured(run, Racer.parse("2x1")) is None  # somebody has moved the run
    measured = ladder.measured(run, FIRST)
    assert measured is not None
    rung, climbed = measured
    assert rung == "1x1" and climbed == ladder.read(run)
    assert climbed.speeds == {"1x1": pytest.approx(100.0)} and climbed.rung == "1x2"
    assert climbed.steps == 50


def test_of_rungs_with_as_many_ranks_the_fastest_is_trained_on() -> None:
    rungs = [Racer.parse(text) for text in ("1x1", "1x4", "1x4:fsdp=4")]
    climbed = ladder.of(rungs, min_efficiency=0.5).after(100).after(300).after(280)
    assert climbed.layouts == ("1x1", "1x4", "1x4:fsdp=4") and climbed.chosen == "1x4"
    assert ladder.of(rungs, min_efficiency=0.5).after(100).after(300).after(320).chosen == (
        "1x4:fsdp=4"
    )
