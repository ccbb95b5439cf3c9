"""Two processes that record the same rank, and what becomes of their run."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from allranks.job.job import load_job
from allranks.launch.launchers import OwnRanksWatch
from allranks.probe import recorder
from allranks.probe.recorder import STARTED_AS, claim_rank
from allranks.run.events import append_event, read_events
from allranks.run.folder import RunDir


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    (tmp_path / "run.json").write_text("{}")
    return RunDir(tmp_path)


def earlier(run: RunDir, pid: int, of: str | None) -> None:
    run.attempt(0).mkdir(parents=True, exist_ok=True)
    append_event(run.events(0, 0), "recorder", pid=pid, host=os.uname().nodename, of=of)


def test_a_rank_is_recorded_by_who_comes_first(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(STARTED_AS, "0")
    with claim_rank(run.events(0, 0), 0):
        (event,) = read_events(run.events(0, 0))
        assert (event["event"], event["pid"], event["of"]) == ("recorder", os.getpid(), "0")
        monkeypatch.setattr(os, "getpid", lambda: 1 << 30)
        with pytest.raises(RuntimeError, match="is already recording rank 0"):
            claim_rank(run.events(0, 0), 0)
    assert json.loads(run.twice(0).read_text())["rank"] == 0


def test_one_after_another_of_the_same_rank_is_fine(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(STARTED_AS, "0")
    earlier(run, 1 << 30, "0")
    claim_rank(run.events(0, 0), 0).close()
    assert not run.twice(0).exists()


def test_of_two_that_were_started_as_different_ranks_one_is_too_many(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the first has ended by then."""
    monkeypatch.setenv(STARTED_AS, "1")
    earlier(run, 1 << 30, "0")
    with pytest.raises(RuntimeError):
        claim_rank(run.events(0, 0), 0)
    assert run.twice(0).exists()


def test_what_a_recorded_process_has_started_is_let_be(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(STARTED_AS, "0")
    parent = os.getpid()
    with claim_rank(run.events(0, 0), 0):
        monkeypatch.setattr(os, "getpid", lambda: 1 << 30)
        monkeypatch.setattr(recorder, "ancestors", lambda: [parent])
        with pytest.raises(RuntimeError):
            claim_rank(run.events(0, 0), 0)
    assert not run.twice(0).exists()


def test_ancestors() -> None:
    found = recorder.ancestors()
    assert found[0] == os.getppid() and len(found) == len(set(found))


def test_every_rank_of_such_a_run_has_failed(run: RunDir, tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text("torchrun --nproc-per-node 2 a.py\n")
    job = load_job(None, command=["bash", str(script)], layout="1x2")
    watch = OwnRanksWatch(run, job)
    run.attempt(0).mkdir(parents=True)
    assert not watch.must_end(0) and watch.end(0) is None
    run.twice(0).write_text('{"rank": 1}')
    assert OwnRanksWatch(run, job).must_end(0)
    end = watch.end(0)
    assert end is not None and (end["state"], end["exit"]) == ("failed", 1)
    told = f"two processes recorded rank 1: the command starts ranks itself (torchrun in {script})"
    assert end["error"]["what"] == told
    assert f"write python a.py in {script}" in end["error"]["fix"]
    assert watch.end(1) is None


def test_ranks_that_a_layout_does_not_have_are_told(run: RunDir) -> None:
    run.attempt(0).mkdir(parents=True)
    append_event(run.events(0, 1), "recorder", pid=1, host="a", of="0")
    end = OwnRanksWatch(run, load_job(None, command=["python", "a.py"], layout="1x1")).end(0)
    assert end is not None
    assert end["error"]["what"].startswith("rank 1 was recorded, but layout 1x1 does not have it")
    assert "ALLRANKS_PROBE=off" in end["error"]["fix"]
