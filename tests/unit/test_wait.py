"""Waiting for a run: a line for every change, the end believed when it is seen twice."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from allranks.job.job import parse_job
from allranks.launch import agent, backends, follow, meeting, node
from allranks.launch.prepare import Prepared, Request
from allranks.machine.processes import Signals
from allranks.run import run_state
from allranks.run.events import append_event
from allranks.run.folder import RunDir


def line(state: str, **more: Any) -> dict[str, Any]:
    said = {"state": state, "reason": None, "jobs": ["7"], "job": "7", "layout": "2x1"}
    return {**said, "nodes": [], "attempt": None, **more}


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    (tmp_path / "run.json").write_text("{}")
    return RunDir(tmp_path)


def wait(run: RunDir, monkeypatch: pytest.MonkeyPatch, lines: Sequence[dict[str, Any]]) -> Any:
    """What was said, and how it ended."""
    coming = iter(lines)
    said: list[str] = []
    monkeypatch.setattr(backends, "look", lambda runs: None)
    monkeypatch.setattr(run_state, "describe", lambda run, queue: next(coming))
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    return follow.wait_for_end(run, said.append)["state"], said


def test_changes_are_told_once(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = line("running", nodes=["node1", "node2"])
    waits = line("queued", reason="next in line")
    lines = [waits, waits, line("queued"), runs, runs, line("queued", reason="begin"), runs]
    ended, said = wait(run, monkeypatch, [*lines, line("finished"), line("finished")])
    assert ended == "finished"
    starting = "starting on node1, node2 (layout 2x1, job 7)"
    queued = ["queued as job 7: next in line", starting, "queued as job 7: begin", starting]
    assert said == [*queued, "finished"]


def test_an_end_that_was_none_is_not_told(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    over = line("failed", reason="rank 1 ended with code 1")
    lines = [line("stopped"), line("queued"), line("failed"), line("running"), over, over]
    ended, said = wait(run, monkeypatch, lines)
    assert ended == "failed"
    assert said[-1] == "failed: rank 1 ended with code 1" and "stopped" not in said


def test_the_attempt_is_the_one_of_the_job(run: RunDir) -> None:
    assert follow.attempt_of_job(run) is None
    opened = [{"attempt": 0, "started": 1.0}, {"attempt": 3, "started": 2.0}]
    run.update_info(lambda info: info.update(attempts=opened))
    assert follow.attempt_of_job(run) == 3
    told = follow.in_words(line("running", attempt=3, reason="moves to 1x4"))
    assert told == "running (layout 2x1, job 7, attempt 3); moves to 1x4"


def test_all_ranks_are_waited_for(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    run.attempt(0).mkdir(parents=True)
    left = [1, 0]

    def sleep(seconds: float) -> None:
        if left:
            append_event(run.events(0, left.pop()), "end", state="stopped", exit=0)

    monkeypatch.setattr(time, "sleep", sleep)
    follow.wait_for_ranks(run, 0, 2, 60.0, lambda: False)
    assert all(run.end(0, rank) for rank in range(2))


def test_ranks_that_give_signs_of_life_are_waited_for(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.attempt(0).mkdir(parents=True)
    clock, lines = [0.0], [*range(5)]

    def sleep(seconds: float) -> None:
        clock[0] += 8.0
        if lines:
            with run.log(0, 1).open("a") as log:
                print(lines.pop(), file=log)

    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    append_event(run.events(0, 0), "end", state="finished", exit=0)
    follow.wait_for_ranks(run, 0, 2, 10.0, lambda: False, while_alive=True)
    assert not lines and 48 <= clock[0] <= 64  # ten seconds after the last line, and no longer


def test_ends_are_written_before_other_nodes_are_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch waits up to five minutes for them: a signal meanwhile has not stopped these ranks."""
    ended: list[tuple[dict[int, int | None], int]] = []
    made: Any = object.__new__(agent.Agent)
    group = SimpleNamespace(workers=[SimpleNamespace(global_rank=rank) for rank in (2, 3)])
    made._nodes, made._worker_group = SimpleNamespace(first_attempt=4, round=0), group
    made._codes, made._pcontext = {}, None
    made._ended = lambda codes, attempt: ended.append((codes, attempt))
    states = iter([WorkerState.HEALTHY, WorkerState.SUCCEEDED])
    monkeypatch.setattr(
        LocalElasticAgent, "_monitor_workers", lambda self, group: RunResult(state=next(states))
    )
    made._monitor_workers(group)
    assert ended == []
    made._monitor_workers(group)
    assert ended == [({2: 0, 3: 0}, 4)]


def test_a_rank_that_was_done_before_another_failed_was_not_ended_by_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: Any = object.__new__(agent.Agent)
    workers = [SimpleNamespace(global_rank=rank) for rank in range(3)]
    made._worker_group, made._codes = SimpleNamespace(workers=workers), {}
    made._kills_peers = False
    codes: list[int | None] = [None, 0, None]
    ranks = {
        rank: SimpleNamespace(proc=SimpleNamespace(poll=lambda rank=rank: codes[rank]))
        for rank in range(3)
    }
    made._pcontext = SimpleNamespace(subprocess_handlers=ranks)
    healthy = RunResult(state=WorkerState.HEALTHY)
    monkeypatch.setattr(LocalElasticAgent, "_monitor_workers", lambda self, group: healthy)
    made._monitor_workers(made._worker_group)
    assert made.failed() == {0: None, 1: None, 2: None}
    codes[0] = 1
    made._monitor_workers(made._worker_group)
    assert made.failed() == {0: 1, 1: 0, 2: None}  # rank 2 will be ended because of rank 0


@pytest.mark.parametrize(
    ("leads", "state", "seconds"),
    [
        (False, "finished", math.inf),  # SLURM's job ends this launcher if a node is lost
        (False, "stopped", math.inf),
        (False, "failed", follow.ENDING_SECONDS),
        (True, "finished", meeting.MEETING_SECONDS),  # without a sign of life
        (True, "failed", follow.ENDING_SECONDS),
    ],
)
def test_the_first_node_waits_for_others_as_long_as_somebody_knows_of_them(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, leads: bool, state: str, seconds: float
) -> None:
    waited: list[float] = []
    monkeypatch.setattr(node, "wait_for_ranks", lambda *args, **_: waited.append(args[3]))
    append_event(run.events(0, 0), "end", state=state, exit=0)
    launch = object.__new__(node.Launch)
    launch.run, launch.first_rank, launch.here = run, 0, 1
    launch.signals, launch.agent = Signals(), SimpleNamespace(attempt=0)  # type: ignore[assignment]
    job = parse_job({"layout": "2x1"})
    launch.prepared = Prepared(request=Request(leads=leads), job=job, run=run)
    launch.screen = SimpleNamespace(stalled=lambda line: None)  # type: ignore[assignment]
    launch._wait_for_other_nodes()
    assert waited == [seconds]


def test_the_fix_of_a_missing_file_is_told(run: RunDir) -> None:
    assert "doctor" in follow.why_failed(run, line("failed")).fix
    seen = {"attempt": 0, "path": "/x/a.pt", "on": ["a"], "not_on": ["b"]}
    run.update_info(lambda info: info.update(missing=seen))
    run.attempt(0).mkdir(parents=True)
    assert "stage: [SHARED/a.pt]" in follow.why_failed(run, line("failed")).fix
