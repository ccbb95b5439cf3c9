"""Time left: at every moment of made-up runs it is near the truth, and falls as time passes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.watch_runs import GrowingRun, event_line

from allranks.run.record import LAST_BYTES, RankRecord, read_leads
from allranks.run.time_left import StepClock

LOOK_SECONDS = 0.5
Pause = Callable[[int], float]  # seconds after a step


def steps_of(
    num_steps: int, pause: Pause, *, first: int = 1, slow: tuple[float, ...] = ()
) -> list[dict[str, Any]]:
    """Step events with noise in them; `slow`: seconds of the first steps."""
    noise, now, events = random.Random(0), 1000.0, []
    for step in range(first, num_steps + 1):
        made = step - first
        took = slow[made] if made < len(slow) else 0.015 * noise.uniform(0.8, 1.4)
        now += took
        events.append({"event": "step", "t": now, "step": step, "seconds": took})
        now += pause(step)
    return events


def looks(
    events: list[dict[str, Any]], end: float, **start: int
) -> Iterator[tuple[float, float, float]]:
    """Moment, estimate and truth at each look of somebody who follows a run to its end."""
    record = RankRecord(0, [{"event": "start", "t": 999.0, **start}])
    last, left, now = events[-1]["step"], list(events), 1000.0
    while now < end:
        while left and left[0]["t"] <= now:
            record.take(left.pop(0))
        if (said := record.clock.seconds_left(last, now)) is not None:
            yield now, said, end - now
        now += LOOK_SECONDS


def every(steps: int, seconds: float) -> Pause:
    return lambda step: seconds if step % steps == 0 else 0.0


def evaluations_and_saves(step: int) -> float:
    return every(200, 9.0)(step) + every(130, 1.5)(step)


@pytest.mark.parametrize(
    ("num_steps", "pause", "first", "slow", "settled"),
    [
        pytest.param(1000, every(50, 11.5), 1, (), 60, id="slow evaluations"),
        pytest.param(1000, every(50, 11.5), 326, (), 60, id="slow evaluations, resumed"),
        pytest.param(3000, every(400, 2.0), 1, (30.0, 9.0, 4.0), 820, id="slow first steps"),
        pytest.param(3000, evaluations_and_saves, 1, (5.0,), 420, id="evaluations and saves"),
        pytest.param(4000, every(9999, 0.0), 1, (20.0,), 10, id="nothing but steps"),
    ],
)
def test_time_left_is_near_the_truth_and_falls_as_time_passes(
    num_steps: int, pause: Pause, first: int, slow: tuple[float, ...], settled: int
) -> None:
    """Once pauses were seen: within a fifth of the truth, and so is what passes between looks."""
    events = steps_of(num_steps, pause, first=first, slow=slow)
    end = events[-1]["t"] + pause(num_steps)
    begin = next(event["t"] for event in events if event["step"] >= first + settled)
    before = None
    start = {"step": first - 1, "steps_per_epoch": 50}
    for now, said, truth in looks(events, end, **start):
        if now < begin:
            continue
        assert said == pytest.approx(truth, rel=0.2, abs=2.0), f"{end - now:.0f} s before its end"
        if before is not None:
            assert abs(before - said - LOOK_SECONDS) < 0.1 * truth + 1.0
        before = said


def test_evaluations_count_in_the_steps_of_a_second() -> None:
    """Steps of 15 ms and an evaluation of 11.5 s after every 50: about 4 steps a second."""
    clock = RankRecord(0, steps_of(160, every(50, 11.5))).clock
    assert clock.step_seconds == pytest.approx(0.0165, rel=0.1)
    assert 1 / (clock.seconds_per_step or 0) == pytest.approx(4.0, rel=0.05)


def test_a_single_long_pause_is_forgotten() -> None:
    clock = RankRecord(0, steps_of(5000, every(4999, 0.0))).clock
    paused = RankRecord(0, steps_of(5000, lambda step: 60.0 if step == 50 else 0.0)).clock
    plain, after = clock.seconds_per_step, paused.seconds_per_step
    assert plain is not None and after is not None
    assert after == pytest.approx(plain + 60 / 4950, rel=0.01)


def test_before_the_second_step_its_own_time_counts_and_before_the_first_nothing() -> None:
    clock = StepClock()
    assert clock.seconds_left(100, 0.0) is clock.seconds_per_step is None
    clock.take(1, 1000.0, 2.0)
    assert clock.seconds_left(100, 1000.0) == 198.0
    assert clock.seconds_left(None, 1000.0) is None
    clock.take(1, 1001.0, 3.0)  # written twice
    clock.take(2, 990.0, 3.0)  # the clock was set back
    assert clock.seconds_left(100, 1000.0) == 198.0


def test_both_ends_of_a_long_file_are_enough(tmp_path: Path) -> None:
    """`ls` reads no more of a run than that, `watch` reads all of it."""
    run = GrowingRun(tmp_path, "1x1", steps=6000)
    run.begin()
    events = steps_of(3000, every(500, 20.0))
    with run.run.events(0, 0).open("a") as file:
        for event in events:
            fields = {key: value for key, value in event.items() if key not in ("event", "t")}
            file.write(event_line(event["t"], "step", **fields))
    assert run.run.events(0, 0).stat().st_size > 4 * LAST_BYTES
    left = read_leads(run.run)[-1].clock.seconds_left(6000, events[-1]["t"])
    assert left == pytest.approx(3000 * 0.0165 + 7 * 20, rel=0.25)
