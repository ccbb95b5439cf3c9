"""What came of a run, from files that a run may have left in any state."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from allranks.launch.screen import throughput
from allranks.run.events import append_event
from allranks.run.failures import failure
from allranks.run.folder import RunDir
from allranks.run.record import outcome, samples_per_epoch, steps_by_rank
from allranks.timing.result import compile_words, result
from allranks.timing.steps import timing

START = {
    "rank": 0,
    "world_size": 2,
    "layout": "1x2",
    "global_batch": 97,
    "samples_per_epoch": 1000,
    "steps_per_epoch": 11,
    "step": 0,
    "steps": 22,
}
KEYS = {
    *("run", "run_dir", "state", "layout", "world_size", "steps", "epochs", "samples", "seconds"),
    *("samples_per_second", "global_batch", "metrics"),
}


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "job-20261101-120000-aaaa")


def start(run: RunDir, attempt: int = 0, ranks: int = 2, **fields: Any) -> None:
    for rank in range(ranks):
        append_event(run.events(attempt, rank), "start", **{**START, "rank": rank, **fields})


def step(run: RunDir, number: int, attempt: int = 0, **fields: Any) -> None:
    append_event(
        run.events(attempt, 0), "step", step=number, epoch=1, samples=49, seconds=0.1, **fields
    )


def test_a_finished_run(run: RunDir) -> None:
    start(run)
    step(run, 21)
    step(run, 22, loss=0.5)
    end = {"step": 22, "epoch": 2, "samples": 2000, "seconds": 4.0, "samples_per_second": 500.0}
    for rank in range(2):
        metrics = {"val_accuracy": 0.9}
        append_event(run.events(0, rank), "end", state="finished", metrics=metrics, **end)
    found = result(run)
    assert set(found) >= KEYS
    assert found["run"] == run.name
    assert found["run_dir"] == str(run.path)
    assert found["state"] == "finished"
    assert (found["layout"], found["world_size"], found["global_batch"]) == ("1x2", 2, 97)
    assert (found["steps"], found["epochs"], found["samples"]) == (22, 2, 2000)
    assert (found["seconds"], found["samples_per_second"]) == (4.0, 500.0)
    assert found["metrics"] == {"loss": 0.5, "val_accuracy": 0.9}
    json.dumps(found, allow_nan=False)


@pytest.mark.parametrize(("last", "pace"), [(100, 1000.0), (45, None)])
def test_the_pace_is_that_of_the_form_that_was_chosen(
    run: RunDir, last: int, pace: float | None
) -> None:
    start(run, ranks=1, world_size=1, layout="1x1")
    for number in range(1, last + 1):
        took = 0.5 if number <= 40 else 0.1
        append_event(run.events(0, 0), "step", step=number, samples=100, seconds=took)
        if number == 40:
            times = {"eager": 0.5, "compiled": 0.1}
            chosen = {"step": 41, "form": "compiled", "lost": 3.0, "times": times}
            append_event(run.events(0, 0), "compile", **chosen)
    append_event(run.events(0, 0), "end", state="finished", step=last, seconds=30.0)
    measured, found = timing(run), result(run)
    assert measured is not None
    if pace is None:  # five steps of it say too little
        assert measured.first_step < 41
    else:
        assert measured.first_step >= 41
        assert found["samples_per_second"] == pytest.approx(pace)
    words = "compiled from step 41 on: 100ms a step instead of 500ms (5.0x), 3.00s waiting for it"
    assert compile_words(found["compile"]) == words


def test_the_pace_is_that_of_the_steps_that_every_command_measures(run: RunDir) -> None:
    start(run)
    for rank in range(2):
        for number in range(1, 41):  # the first one takes long, as first ones do
            took = 10.0 if number == 1 else 0.1
            append_event(run.events(0, rank), "step", step=number, samples=50, seconds=took)
        end = {"step": 40, "samples": 4000, "seconds": 14.0, "samples_per_second": 287.8}
        append_event(run.events(0, rank), "end", state="finished", **end)
    measured = timing(run)
    assert measured is not None
    assert result(run)["samples_per_second"] == pytest.approx(1000.0)
    assert result(run)["samples_per_second"] == pytest.approx(measured.samples_per_second)
    assert outcome(run)["samples_per_second"] == 287.8


def test_epochs_of_a_script_are_those_that_it_has_completed(run: RunDir) -> None:
    append_event(run.events(0, 0), "step", step=80, epoch=2, samples=16, seconds=0.1)
    assert result(run)["epochs"] == 1  # it may be in the middle of the second
    append_event(run.events(0, 0), "epoch", epoch=2, step=80, samples=640)
    append_event(run.events(0, 0), "end", state="finished", exit=0)
    assert result(run)["epochs"] == 2
    with run.held():  # by who has seen it end
        assert result(run)["state"] == "running"
        known = result(run, "finished")
    assert (known["state"], known["epochs"]) == ("finished", 2)


def test_what_is_not_known_is_not_shown(run: RunDir) -> None:
    """The least that any rank knows is what is known about the run."""
    for rank in range(2):
        for number in range(1, 41):
            fields = {"samples": 50, "seconds": 0.1, "epoch": 1, "evaluation": 1.0 * (number > 39)}
            append_event(run.events(0, rank), "step", step=number, **fields)
    found = result(run)
    assert found["counted"] == {"samples": "measured", "epochs": "measured", "why": None}
    assert throughput(found) == "1,000 samples/s (measured), 744 with evaluation (26% of the time)"
    append_event(run.events(0, 0), "counted", samples="measured", epochs="unknown", why="left")
    assert (result(run)["epochs"], result(run)["samples_per_second"]) == (None, 1000.0)
    append_event(run.events(0, 1), "counted", samples="about", epochs="measured", why="a guess")
    about = result(run)
    assert about["counted"] == {"samples": "about", "epochs": "unknown", "why": "a guess"}
    assert (throughput(about) or "").startswith("about 1,000 samples/s (a guess), 744 with")
    append_event(run.events(0, 1), "counted", samples="unknown", epochs="unknown", why="no loader")
    unknown = result(run)
    assert unknown["samples_per_second"] is None
    assert throughput(unknown) == "unknown: no loader"
    for _ in range(300):  # a long evaluation after the last step
        append_event(run.events(0, 1), "device", cpu=1.0, processes=[*range(100, 140)])
    assert result(run)["counted"] == unknown["counted"]


def test_an_epoch_is_what_all_ranks_read_in_it(run: RunDir) -> None:
    for rank, (said, read) in enumerate(((40, 20), (40, 17))):
        append_event(run.events(0, rank), "dataset", rank_samples=said)
        append_event(run.events(0, rank), "step", step=1, samples=4, seconds=0.1, epoch=1)
        if rank:
            assert samples_per_epoch(run) == 49  # one has read its part, one says what it has
        append_event(run.events(0, rank), "epoch", epoch=1, step=1, samples=read)
        append_event(run.events(0, rank), "epoch", epoch=2, step=2, samples=9)
    assert samples_per_epoch(run) == 18
    append_event(run.events(0, 2), "step", step=1, samples=4, seconds=0.1)
    assert samples_per_epoch(run) is None


@pytest.mark.parametrize(("steps", "samples"), [(0, 0), (1, 97), (10, 970), (11, 1000), (12, 1097)])
def test_a_killed_run_is_counted_from_its_last_step(run: RunDir, steps: int, samples: int) -> None:
    start(run)
    if steps:
        step(run, steps)
    found = result(run)
    assert found["state"] == "failed"
    assert (found["steps"], found["samples"]) == (steps, samples)


def test_seconds_add_up_over_attempts(run: RunDir) -> None:
    start(run)
    append_event(run.events(0, 0), "end", state="stopped", seconds=2.5)
    start(run, attempt=1)
    append_event(run.events(1, 0), "end", state="finished", seconds=1.5)
    found = result(run)
    assert found["seconds"] == 4.0
    assert found["attempt"] == 1


def test_the_loss_may_come_from_an_earlier_attempt(run: RunDir) -> None:
    start(run)
    step(run, 10, loss=0.7)
    start(run, attempt=1)
    step(run, 11, attempt=1)
    assert result(run)["metrics"] == {"loss": 0.7}


def test_a_run_that_never_started(run: RunDir) -> None:
    run.path.mkdir()
    run.write_info({"layout": "1x4"})
    found = result(run)
    assert set(found) >= KEYS
    assert (found["state"], found["layout"], found["steps"]) == ("failed", "1x4", None)
    assert failure(run) is None


def test_steps_of_each_rank(run: RunDir) -> None:
    assert steps_by_rank(run) == {}
    start(run)
    step(run, 1)
    step(run, 2)
    assert steps_by_rank(run) == {0: 2, 1: 0}


def test_a_loss_that_is_no_number_is_null_and_says_since_when(run: RunDir) -> None:
    """Of several ranks one tells it of its own samples, between the steps that are logged."""
    start(run)
    for number, loss in ((10, 0.5), (20, float("nan")), (22, float("nan"))):
        step(run, number, loss=loss)
    append_event(run.events(0, 0), "nonfinite", step=14, loss="nan")
    append_event(run.events(0, 1), "nonfinite", step=13, loss="nan")
    found = result(run, "finished")
    assert found["metrics"]["loss"] is None
    assert found["nonfinite_since"] == 13
    assert '"nan"' not in json.dumps(found, allow_nan=False)
    start(run, attempt=1, step=10)  # the next one goes back, and gets over it
    step(run, 20, attempt=1, loss=0.4)
    step(run, 22, attempt=1, loss=0.3)
    found = result(run, "finished")
    assert found["metrics"]["loss"] == 0.3 and "nonfinite_since" not in found
