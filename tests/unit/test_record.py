"""The record of a run: the same whichever way it is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from allranks.run.events import append_event, format_event
from allranks.run.folder import RunDir
from allranks.run.record import (
    RankRecord,
    lead_rank,
    newest_window,
    outcome,
    read_ends,
    read_lead,
    read_rank,
)
from allranks.run.run_state import Queue, describe
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
    assert read_lead(run).steps_made == outcome(run)["steps"] == expected
    assert describe(run, Queue())["step"] == expected
    assert reader.lead.steps_made == expected


def test_a_node_s_part_of_a_run_has_a_lead_too(run: RunDir) -> None:
    write(run, step(3), rank=4)
    write(run, step(4), rank=5)
    assert lead_rank(run, 0) == 4
    assert read_lead(run).last_step == outcome(run)["steps"] == 3


def test_of_ranks_that_never_meet_the_last_window_counts() -> None:
    windows = [{"event": "window", "t": 1.0, "first": n, "steady": True} for n in (9, 12, 10)]
    records = [RankRecord(rank, [window]) for rank, window in enumerate(windows)]
    assert newest_window(records) == windows[1]
    assert newest_window([RankRecord(0)]) is None


def test_where_a_rank_was_last_seen(run: RunDir) -> None:
    append_event(run.events(0, 0), "place", step=0, at=["train.py", 3, "main"])
    append_event(run.events(0, 0), "device", step=1, at=["train.py", 9, "f"])
    assert read_ends(run, 0, 0).place == ["train.py", 9, "f"]
