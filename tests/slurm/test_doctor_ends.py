"""Runs that SLURM, or the loss of a rank or a node, has ended: the doctor says which it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.commandline import run_allranks
from tests.scripts import hungry
from tests.slurm.live import Cluster
from tests.slurm.runs import Sent, send

from allranks.slurm.reasons import waiting_reason

pytestmark = pytest.mark.slurm

TASK = ["task=slow:Slow", "steps=100000", "log_every=1", "preflight=false", "slurm.requeue=false"]
# Trains for ever, and takes no notice of anyone who wants it to stop.
STUBBORN = """
import signal, time
for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT):
    signal.signal(number, signal.SIG_IGN)
while True:
    print("still here", flush=True)
    time.sleep(0.5)
"""


def diagnosis(folder: Path, *subjects: str | Path) -> list[dict[str, Any]]:
    done = run_allranks("doctor", *subjects, "--json", cwd=folder)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert isinstance(found, list)
    return found


def first(sent: Sent, *subjects: str | Path) -> tuple[str, int | None, str | None]:
    """Cause, rank and node of the first finding, of the run unless something else is named."""
    found = diagnosis(sent.folder, *(subjects or [sent.run.name]))
    assert found, sent.log()[-3000:]
    return found[0]["cause"], found[0]["rank"], found[0]["node"]


def job_log(sent: Sent) -> Path:
    """All that somebody has who only kept what the job printed."""
    return sent.run.path / f"slurm-{sent.jobs[-1]}.log"


def host(sent: Sent, rank: int) -> str:
    start = sent.run.start(0, rank)
    assert start is not None
    return str(start["host"])


def wait_for_state(sent: Sent, state: str, seconds: float) -> None:
    """What SLURM says of the job, in its accounting too, which comes later."""
    job = sent.jobs[-1]

    def has_it() -> bool:
        rows = sent.cluster.sacct(job)
        return bool(rows) and rows[-1]["State"].startswith(state)

    sent.cluster.wait(has_it, seconds, f"{state} of job {job}")


def test_a_job_that_does_not_start(cluster: Cluster, tmp_path: Path) -> None:
    cluster.read("scontrol", "update", "partitionname=debug", "state=DOWN")
    try:
        sent = send(cluster, tmp_path, "slurm.partition=debug")
        told = waiting_reason("PartitionDown")
        cluster.wait(lambda: told in str(sent.listed()["reason"]), 60, "a reason")
        assert first(sent) == ("slurm-pending", None, None)
        assert told in diagnosis(tmp_path, sent.run.name)[0]["title"]
    finally:
        cluster.read("scontrol", "update", "partitionname=debug", "state=UP")


def test_a_killed_rank_and_a_cancelled_job(cluster: Cluster, tmp_path: Path) -> None:
    """Both at once, since most of it is waiting."""
    killed = send(cluster, tmp_path, "--layout", "2x1", *TASK, "name=killed")
    cancelled = send(cluster, tmp_path, *TASK, "name=cancelled")
    for sent in (cancelled, killed):
        sent.wait_for_step(5)
    cluster.read("scancel", cancelled.jobs[0])
    start = killed.run.start(0, 1)
    assert start is not None
    cluster.exec(start["host"], "kill", "-9", str(start["pid"]))
    wait_for_state(killed, "FAILED", 120)
    wait_for_state(cancelled, "CANCELLED", 120)
    for sent in (killed, cancelled):
        sent.wait_for_end(60)
    assert first(killed) == ("rank-died", 1, host(killed, 1))
    assert host(killed, 1) != host(killed, 0)
    assert first(killed, job_log(killed))[:2] == ("rank-died", 1)
    assert first(cancelled) == ("job-cancelled", None, None)
    assert first(cancelled, job_log(cancelled))[0] == "job-cancelled"


@pytest.mark.soak
def test_a_job_that_takes_more_memory_than_it_asked_for(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(hungry(12, 0.1))
    settings = ["--layout", "1x2", "slurm.mem=2G", "preflight=false", "slurm.requeue=false"]
    sent = send(cluster, tmp_path, *settings, "--", "python", "train.py")
    sent.wait_for_end(90)
    assert first(sent) == ("host-out-of-memory", 1, host(sent, 1))
    assert first(sent, job_log(sent))[0] == "host-out-of-memory"
    found = diagnosis(tmp_path, sent.run.name)[0]
    assert "--mem=4G" in found["fix"]
    assert any("host memory of rank 1: " in line["text"] for line in found["evidence"])


@pytest.mark.soak
def test_a_job_that_another_one_takes_the_node_of(cluster: Cluster, tmp_path: Path) -> None:
    settings = [*TASK, "slurm.partition=spare", "slurm.exclusive=true"]
    sent = send(cluster, tmp_path, *settings)
    sent.wait_for_step(5)
    cluster.sbatch("--exclusive", "--nodes=4", script="#!/bin/bash\nsleep 30\n", cwd=tmp_path)
    wait_for_state(sent, "PREEMPTED", 60)
    sent.wait_for_end(30)
    assert first(sent) == ("slurm-preempted", None, None)
    assert first(sent, job_log(sent))[0] == "slurm-preempted"


@pytest.mark.soak
def test_jobs_that_reach_their_limit_or_lose_their_node(cluster: Cluster, tmp_path: Path) -> None:
    """All at once: SLURM looks at limits every 30 seconds, and misses a node after as long."""
    (tmp_path / "stubborn.py").write_text(STUBBORN)
    (tmp_path / "plain.py").write_text("import time\nwhile True: time.sleep(1)\n")
    limit = ["preflight=false", "slurm.time=1"]
    native = send(cluster, tmp_path, *TASK, "name=native", "slurm.time=1")
    stubborn = send(cluster, tmp_path, *limit, "name=stubborn", "--", "python", "stubborn.py")
    plain = send(cluster, tmp_path, *limit, "name=plain", "--", "python", "plain.py")
    lost = send(cluster, tmp_path, *TASK, "name=lost", "slurm.exclusive=true")
    part = send(cluster, tmp_path, *TASK, "--layout", "2x1", "name=part", "slurm.exclusive=true")
    lost.wait_for_step(5)
    (node,) = lost.listed()["nodes"]
    cluster.kill_slurmd(node)
    part.wait_for_step(5, 90)
    gone = host(part, 1)
    cluster.crash(gone)
    wait_for_state(lost, "NODE_FAIL", 90)
    wait_for_state(part, "NODE_FAIL", 90)
    for sent in (lost, part):
        sent.wait_for_end(30)
    assert first(lost) == ("slurm-node-failure", None, node)
    assert first(part) == ("slurm-node-failure", None, gone)
    assert first(part, job_log(part))[0] == "slurm-node-failure"
    for sent in (native, plain, stubborn):
        sent.wait_for_end(150)
    wait_for_state(stubborn, "TIMEOUT", 20)
    for sent in (native, plain, stubborn):
        assert first(sent) == ("slurm-time-limit", None, None)
        assert first(sent, job_log(sent))[0] == "slurm-time-limit"
