"""The record of a run: the same whichever way it is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from allranks.report.facts import read_run
from allranks.run.events import append_event, format_event
from allranks.run.folder import RunDir
from allranks.run.record import (
    RankRecord,
    lead_rank,
    newest_window,
    outcome,
    read_ends,
    read_leads,
    read_rank,
    steps_in_all,
)
from allranks.run.run_state import Queue, describe
from allranks.timing.result import result
from allranks.watch.reader import RunReader

BEGIN = 1e9


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path / "job-20261101-120000-aaaa")
    made.path.mkdir()
    made.write_info({"layout": "1x2"})
    return made


def write(run: RunDir, *events: dict[str, Any], attempt: int = 0, rank: int = 0) -> None:
    path = run.events(attempt, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(format_event({"v": 1, "t": BEGIN, **event}) for event in events)


def step(number: int, **fields: Any) -> dict[str, Any]:
    return {"event": "step", "t": BEGIN + number, "step": number, "seconds": 0.5, **fields}


def test_both_ends_of_a_long_file_tell_what_the_whole_does(run: RunDir) -> None:
    write(run, {"event": "start", "step": 0, "steps": 5000}, *map(step, range(1, 5001)))
    write(run, {"event": "end", "t": BEGIN + 5001, "state": "failed"})
    whole, ends = read_rank(run, 0, 0), read_ends(run, 0, 0)
    assert len(ends.steps) < len(whole.steps) == 5000
    for name in ("start", "end", "last_step", "steps_made", "seconds", "began", "first_time"):
        assert getattr(ends, name) == getattr(whole, name), name
    assert (ends.last_step, ends.seconds, ends.last_time) == (5000, 4999.5, BEGIN + 5001)
    assert ends.heard == BEGIN + 5000  # its end may have been written by the launcher


@pytest.mark.parametrize("resumed", [False, True])
def test_every_view_says_the_same_of_steps_made(run: RunDir, resumed: bool) -> None:
    """Killed at step 7; then resumed at 5, where it has made no step yet."""
    write(run, {"event": "start", "step": 0, "steps": 20}, *map(step, range(1, 8)))
    if resumed:
        write(run, {"event": "start", "step": 5, "steps": 20}, attempt=1)
    run.attempt(2).mkdir(parents=True)  # it was prepared, and has not begun
    reader = RunReader(run)
    reader.look(all_ranks=False)
    expected = 5 if resumed else 7
    assert steps_in_all(read_leads(run)) == outcome(run)["steps"] == expected
    assert describe(run, Queue())["step"] == expected
    assert reader.steps_made == expected


def test_every_view_counts_what_all_attempts_of_a_script_made(run: RunDir) -> None:
    """On two ranks, with epochs of 4 steps: 10 steps; none, as it failed at once; then 6."""
    (run.path / "job.yaml").write_text("command: python train.py\n")
    failed = {"event": "end", "state": "failed", "exit": 1}
    for attempt, made in enumerate((10, 0, 6)):
        for rank in range(2):
            steps = [step(n, epoch=(n + 3) // 4, samples=8) for n in range(1, made + 1)]
            for ended in (8, 4):  # where the loader was seen to end
                if ended <= made:
                    steps.insert(ended, {"event": "epoch", "epoch": ended // 4, "samples": 32})
            events = [{"event": "start", "world_size": 2}, *steps] if made else []
            write(run, *events, failed | {"t": BEGIN + made}, attempt=attempt, rank=rank)
    found, listed, facts = result(run), describe(run, Queue()), read_run(run)
    reader = RunReader(run)
    reader.look(all_ranks=False)
    assert found["steps"] == listed["step"] == facts.steps == reader.steps_made == 16
    for one in (found, listed):
        assert (one["attempts"], one["attempt_steps"], one["attempt"]) == (3, 6, 2)
    assert found["epochs"] == 3  # two, none and one are complete
    assert reader.epoch == 4
    assert found["samples"] == facts.samples == 2 * 8 * 16
    assert found["seconds"] == facts.seconds == 9.5 + 5.5
    said = {remark["kind"]: remark["text"] for remark in found["remarks"]}
    assert "its 3 attempts made 16 steps, the last one 6" in said["resumed-script"]
    assert "after 16 steps" in said["early-end"]


def test_a_task_that_failed_before_it_began_again_has_made_its_earlier_steps(run: RunDir) -> None:
    write(run, {"event": "start", "step": 0, "steps": 20, "steps_per_epoch": 3})
    write(run, *map(step, range(1, 8)))
    write(run, {"event": "end", "state": "failed", "exit": 1}, attempt=1)
    found = outcome(run)
    assert (found["steps"], found["epochs"]) == (7, 2)
    assert "attempt_steps" not in found


def test_a_node_s_part_of_a_run_has_a_lead_too(run: RunDir) -> None:
    write(run, step(3), rank=4)
    write(run, step(4), rank=5)
    assert lead_rank(run, 0) == 4
    assert read_leads(run)[-1].last_step == outcome(run)["steps"] == 3


def test_of_ranks_that_never_meet_the_last_window_counts() -> None:
    windows = [{"event": "window", "t": 1.0, "first": n, "steady": True} for n in (9, 12, 10)]
    records = [RankRecord(rank, [window]) for rank, window in enumerate(windows)]
    assert newest_window(records) == windows[1]
    assert newest_window([RankRecord(0)]) is None


def test_where_a_rank_was_last_seen(run: RunDir) -> None:
    append_event(run.events(0, 0), "place", step=0, at=["train.py", 3, "main"])
    append_event(run.events(0, 0), "device", step=1, at=["train.py", 9, "f"])
    assert read_ends(run, 0, 0).place == ["train.py", 9, "f"]
