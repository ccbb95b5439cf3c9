"""What the user sees: banner, batch as a product, times, progress without a terminal."""

from __future__ import annotations

import io
import re
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from allranks.job.job import Job, parse_job
from allranks.launch.screen import Bar, Screen, batch_product
from allranks.run.events import append_event
from allranks.run.folder import RunDir

START: dict[str, Any] = {
    "rank": 0,
    "world_size": 4,
    "host": "node1",
    "link": "the loopback interface",
    "layout": "1x4",
    "backend": "gloo",
    "device": "CPU",
    "threads": 2,
    "precision": "fp32",
    "compile": False,
    "parameters": 2834,
    "global_batch": 128,
    "rank_batch": [32],
    "accumulation": 1,
    "samples_per_epoch": 7000,
    "steps_per_epoch": 55,
    "step": 0,
    "steps": 1100,
    "epoch": 0,
}
RESULT: dict[str, Any] = {
    "run": "job-20261101-120000-aaaa",
    "run_dir": "/very/long/path/" + "x" * 200 + "/job-20261101-120000-aaaa",
    "state": "finished",
    "layout": "1x4",
    "steps": 1100,
    "epochs": 20,
    "seconds": 75.0,
    "samples_per_second": 12345.6,
    "metrics": {"loss": 0.1234567, "val_accuracy": 0.9876},
}


def summary(result: dict[str, Any], width: int = 100) -> str:
    text = io.StringIO()
    Screen(Console(file=text, width=width)).summary(result)
    return text.getvalue()


def job(**keys: Any) -> Job:
    return parse_job({"task": "spiral", **keys})


# --- Banner -------------------------------------------------------------------------------------


def banner(folder: Path, start: dict[str, Any], job: Job) -> str:
    """What is shown of a run that has just started."""
    run = RunDir(folder / "job-20261101-120000-aaaa")
    append_event(run.events(0, 0), "start", **start)
    text = io.StringIO()
    screen = Screen(Console(file=text, width=100))
    screen.follow(run, job, 0)
    screen.finish(0)
    return text.getvalue()


def test_the_banner_says_all_that_is_asked_for(tmp_path: Path) -> None:
    text = banner(tmp_path, START, job(epochs=20))
    for words in (
        *("job-20261101-120000-aaaa", "1x4", "4 ranks", "gloo over the loopback", "CPU"),
        *("fp32", "2,834 parameters", "32 x 4 x 1 = 128"),
        "20 epochs: 1,100 steps, 55 per epoch",
    ):
        assert words in text


def test_one_rank_is_alone_and_steps_may_be_the_length(tmp_path: Path) -> None:
    start = {**START, "world_size": 1, "layout": "1x1", "rank_batch": [128]}
    text = banner(tmp_path, start, job(steps=1100))
    assert "(1 rank)" in text
    assert "alone" in text
    assert "1,100 steps" in text
    assert "128 x 1 x 1 = 128" in text


# --- The batch ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world_size", "global_batch", "rank_batch", "accumulation", "words"),
    [
        (4, 128, [32], 1, "32 x 4 x 1 = 128"),
        (2, 128, [64], 4, "16 x 2 x 4 = 128"),
        (2, 97, [48, 49], 1, "48-49 x 2 x 1 ~ 97"),
        (4, 2, [0, 1], 1, "0-1 x 4 x 1 ~ 2"),
        (1, 7, [7], 2, "4 x 1 x 2 ~ 7"),
    ],
)
def test_the_batch_is_a_product_that_is_equal_only_if_it_is(
    world_size: int, global_batch: int, rank_batch: list[int], accumulation: int, words: str
) -> None:
    start = {
        "world_size": world_size,
        "layout": f"1x{world_size}",
        "global_batch": global_batch,
        "rank_batch": rank_batch,
        "accumulation": accumulation,
    }
    assert batch_product(start).startswith(words)


# --- Times --------------------------------------------------------------------------------------


# --- Summary ------------------------------------------------------------------------------------


def test_the_summary_ends_with_the_run_folder_whole_and_the_accuracy() -> None:
    lines = summary(RESULT, width=80).splitlines()
    assert lines[-2] == RESULT["run_dir"]
    assert lines[-1] == "validation accuracy 98.8%"


JUDGED: dict[str, Any] = {
    "verdict": {
        **{"limit": "data", "share": 0.74, "rank": 1, "sure": True, "gain": 3.84, "line": None},
        "why": "rank 1 waits for its loader 74% of the time (no workers)",
        "next": "DataLoader(..., num_workers=4, persistent_workers=True)",
    },
    "mfu": 0.041,
    "since": {"text": "train-20261118-120000-369e: data 74% -> 2%, 1,293 -> 4,870 samples/s"},
    "warnings": [
        {
            "kind": "memory",
            "text": "device memory grows by 114 MiB a step: full in about 9 minutes",
            "line": "train.py:52",
        }
    ],
}


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_summary_ends_with_what_limited_the_run_and_what_to_type(width: int) -> None:
    lines = summary(RESULT | JUDGED, width).splitlines()
    assert all(len(line) <= width for line in lines if line != RESULT["run_dir"])
    (begin,) = [at for at, line in enumerate(lines) if line.startswith("throughput")]
    said = lines[begin : lines.index(RESULT["run_dir"])]
    labels = [line.split("  ")[0] for line in said if line[0] != " "]
    assert labels == ["throughput", "limited by", "next", "since", "warning"]
    if width < 120:
        return
    assert " ".join(" ".join(said).split()) == (
        "throughput 12,346 samples/s (measured), 4.1% MFU "
        "limited by data: rank 1 waits for its loader 74% of the time (no workers) sure "
        "next DataLoader(..., num_workers=4, persistent_workers=True) up to 3.8x "
        "since train-20261118-120000-369e: data 74% -> 2%, 1,293 -> 4,870 samples/s "
        "warning device memory grows by 114 MiB a step: full in about 9 minutes (train.py:52)"
    )


def test_a_limit_that_is_not_sure_or_not_known_says_so() -> None:
    verdict = JUDGED["verdict"]
    assert " not sure" in summary(RESULT | {"verdict": verdict | {"sure": False}})
    unknown = RESULT | {"verdict": {**verdict, "limit": "unknown", "why": "no step", "next": None}}
    assert "not known: no step\n" in re.sub(" +\n", "\n", summary(unknown))
    for state in ("failed", "stopped"):  # which says enough
        assert "limited by" not in summary(unknown | {"state": state}) + summary(RESULT)


def test_the_summary_has_what_there_is() -> None:
    text = summary(RESULT)
    for words in (
        "finished",
        "1,100",
        "12,346 samples/s (measured)",
        "1m15s",
        "0.12346",
        "0.98760",
    ):
        assert words in text
    bare = {**RESULT, "state": "failed", "steps": None, "samples_per_second": None, "metrics": {}}
    assert "failed" in summary(bare)
    lost = {**RESULT, "metrics": {"loss": None}, "nonfinite_since": 13}
    assert f"loss nan since step 13: allranks doctor {RESULT['run_dir']} shows why" in summary(lost)


# --- Following a run ----------------------------------------------------------------------------


def test_a_run_is_followed_from_its_folder(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "job-20261101-120000-aaaa")
    text = io.StringIO()
    screen = Screen(Console(file=text, width=100))
    screen.follow(run, job(epochs=20), 0)
    screen.update(0)  # nothing is there yet
    append_event(run.events(0, 0), "start", **START)
    run.log(0, 0).write_text("a line of the task's own\n")
    append_event(run.events(0, 0), "step", step=1, epoch=1, samples=32, seconds=0.1, loss=0.5)
    screen.finish(0)
    assert "a line of the task's own" in text.getvalue()
    assert "32 x 4 x 1 = 128" in text.getvalue()


def test_lines_of_progress_count_down_through_slow_evaluations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A line every ten seconds; 55 steps of 50 ms, then 8 s of evaluation: 5.1 steps a second."""
    now, text = 1000.0, io.StringIO()
    clock = SimpleNamespace(monotonic=lambda: now, time=lambda: now)
    monkeypatch.setattr("allranks.launch.screen.time", clock)
    start = {"v": 1, "t": now, "event": "start", **START}
    bar = Bar(Console(file=text, width=100), start, job(epochs=20))
    events: list[dict[str, Any]] = []
    moment = now
    for step in range(1, 1101):
        moment += 0.05
        made = {"step": step, "epoch": 1 + (step - 1) // 55, "seconds": 0.05, "loss": 0.5}
        events.append({"v": 1, "t": moment, "event": "step", **made})
        moment += 8.0 if step % 55 == 0 else 0.0
    while now < moment:
        now += 0.5
        bar.show([event for event in events if event["t"] <= now][-130:])
    lines = text.getvalue().splitlines()[2:]
    assert len(lines) == 19
    assert all("5.12 it/s  2,560 samples/s while training" in line for line in lines[-10:])
    minutes = (re.search(r"(?:(\d+)m)?(\d+)s left$", line) for line in lines)
    left = [60 * int(found[1] or 0) + int(found[2]) for found in minutes if found]
    assert [before - after for before, after in pairwise(left)] == pytest.approx([10] * 18, abs=2)


def test_a_restart_is_remarked_on_and_shown_anew(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "job-20261101-120000-aaaa")
    text = io.StringIO()
    screen = Screen(Console(file=text, width=100))
    screen.follow(run, job(epochs=20), 0)
    for attempt in range(2):
        append_event(run.events(attempt, 0), "start", **START)
        screen.update(attempt)
    screen.finish(1)
    assert text.getvalue().count("32 x 4 x 1 = 128") == 2
    assert "attempt 1" in text.getvalue()


@pytest.mark.parametrize("debug", [False, True])
def test_a_traceback_of_a_task_is_shown_only_when_asked_for(tmp_path: Path, debug: bool) -> None:
    run = RunDir(tmp_path / "job-20261101-120000-aaaa")
    text = io.StringIO()
    screen = Screen(Console(file=text, width=100), debug=debug)
    screen.follow(run, job(epochs=20), 0)
    append_event(run.events(0, 0), "end", state="failed", exit=1)
    run.log(0, 0).write_text("before\nTraceback (most recent call last):\n  ValueError\n")
    screen.finish(0)
    assert "before" in text.getvalue()
    assert ("Traceback" in text.getvalue()) == debug


def test_a_stop_is_said_once() -> None:
    text = io.StringIO()
    screen = Screen(Console(file=text, width=100))
    for _ in range(2):
        screen.stopping("SIGTERM")
    assert text.getvalue().count("SIGTERM") == 1


@pytest.mark.parametrize("can_go_on", [True, False])
def test_a_stopped_run_is_gone_on_with_where_that_can_be(can_go_on: bool) -> None:
    text = io.StringIO()
    stopped = {**RESULT, "state": "stopped"}
    Screen(Console(file=text, width=100)).summary(stopped, can_go_on=can_go_on)
    assert ("continue with: allranks resume" in text.getvalue()) == can_go_on
