"""The gate at which launchers wait: when the job opens it, and what is done before."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest
from tests.unit.test_checks import check, record

from allranks.launch.backends.slurm.node_checks import ENDED, OPEN, Gate, Verdict

NODES = ["a", "b"]


class Job:
    """The process that judges, with a gate of its own."""

    def __init__(self, folder: Path, seconds: float = 1000.0) -> None:
        self.folder = folder
        self.signals: list[signal.Signals] = []
        self.opened: list[Verdict] = []
        until = time.monotonic() + seconds
        self.gate = Gate(folder, NODES, until, self.signals, self.before_it_opens)

    def before_it_opens(self, verdict: Verdict) -> None:
        assert not (self.folder / OPEN).exists()
        self.opened.append(verdict)

    def end_checks(self, *failed: str) -> None:
        for node in NODES:
            special = [check("write", False, "cannot write")] if node in failed else []
            (self.folder / f"{node}.json").write_text(json.dumps(record(node, *special)))
        (self.folder / ENDED).touch()


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def test_ranks_wait_while_nodes_are_checked_and_start_when_all_is_well(job: Job) -> None:
    assert job.gate.judge() is None and job.gate.is_open is None
    job.end_checks()
    assert job.gate.judge() is True and (job.folder / OPEN).exists()
    assert job.gate.judge() is True and len(job.opened) == 1  # once, however often it is asked


def test_ranks_do_not_start_where_a_node_failed_or_did_not_answer(job: Job) -> None:
    job.end_checks("b")
    assert job.gate.judge() is False
    job.end_checks()  # too late: its step is being ended
    assert job.gate.judge() is False
    assert not job.opened and not (job.folder / OPEN).exists()


def test_checks_that_do_not_end_are_not_waited_for_for_ever(tmp_path: Path) -> None:
    late = Job(tmp_path, seconds=-1.0)
    assert late.gate.judge() is False and not (tmp_path / OPEN).exists()


def test_a_job_that_must_stop_judges_nobody(job: Job) -> None:
    job.signals.append(signal.SIGUSR2)
    assert job.gate.judge() is True and (job.folder / OPEN).exists()
