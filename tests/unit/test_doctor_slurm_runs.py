"""The diagnosis of runs that SLURM ended, from their folder and what SLURM answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.fake_slurm import FakeSlurm
from tests.unit.test_doctor_runs import STEP, failed, make_run, write_rank

from allranks.doctor.diagnose import diagnose_logs, diagnose_run
from allranks.doctor.run_evidence import job_logs
from allranks.run import claims
from allranks.run.claims import Claim
from allranks.run.folder import RunDir

STOPPED = {"event": "end", "state": "stopped", "exit": 0, "signal": "SIGTERM"}


def answering(monkeypatch: pytest.MonkeyPatch, **answers: str) -> None:
    """SLURM's commands by name, with what each prints."""

    FakeSlurm(**answers).install(monkeypatch)


def job_run(
    folder: Path, log: str = "", nodes: tuple[str, ...] = ("node1",), **info: Any
) -> RunDir:
    run = make_run(folder, **{"backend": "slurm", "jobs": ["7"], **info})
    claims.take(run.claims, Claim(number=0, job="7", layout="1x2", nodes=nodes))
    (run.path / "slurm-7.log").write_text(log)
    return run


def ends(run: RunDir, event: dict[str, Any]) -> None:
    for rank in range(2):
        write_rank(run, rank, [STEP, event])


def test_the_log_of_a_requeued_job_counts_from_its_last_beginning(tmp_path: Path) -> None:
    begin = "allranks: digits-20261115-142301-3f9a: job 7 on node1 (layout 1x2, restart {})\n"
    old = "slurmstepd-node1: error: *** JOB 7 ON node1 CANCELLED AT 1 DUE TO NODE FAILURE ***\n"
    run = job_run(tmp_path, begin.format(0) + old + begin.format(1) + "allranks: more\n")
    (source,) = job_logs(run)
    assert source.first_line == 3
    assert source.content is not None and b"NODE FAILURE" not in source.content


@pytest.mark.parametrize(
    ("state", "cause"),
    [
        ("CANCELLED by 0", "job-cancelled"),
        ("PREEMPTED", "slurm-preempted"),
        ("TIMEOUT", "slurm-time-limit"),
    ],
)
def test_a_run_whose_ranks_stopped_because_slurm_ended_their_job(
    state: str, cause: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = job_run(tmp_path)
    ends(run, STOPPED)
    answering(monkeypatch, sacct=f"7|{state}|0:15|node1\n")
    (found,) = diagnose_run(run)
    assert (found.cause, found.rank) == (cause, None)
    assert found.evidence[0].file == "sacct"


def test_a_run_that_its_user_stopped_has_no_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = "slurmstepd-node1: error: *** JOB 7 ON node1 CANCELLED AT 2026-11-15T01:00:00 ***\n"
    ended = {"state": "stopped", "reason": "stopped by its user"}
    run = job_run(tmp_path, log, ended=ended)
    ends(run, STOPPED)
    answering(monkeypatch)
    assert diagnose_run(run) == []


def test_a_run_that_was_given_up_at_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reason = "the job reached its time limit; stopped short of its end, and slurm.requeue is false"
    run = job_run(tmp_path, ended={"state": "stopped", "reason": reason})
    ends(run, STOPPED)
    answering(monkeypatch)
    (found,) = diagnose_run(run)
    assert (found.cause, found.evidence[0].file.rpartition("/")[2]) == (
        "slurm-time-limit",
        "run.json",
    )


@pytest.mark.parametrize(
    ("nodes", "sinfo", "node"),
    [
        (("node1",), "node1 idle none\n", "node1"),  # it is back already
        (("node1", "node2"), "node1 idle none\nnode2 down* Not responding\n", "node2"),
    ],
)
def test_a_lost_node_is_named(
    nodes: tuple[str, ...],
    sinfo: str,
    node: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = job_run(tmp_path, nodes=nodes)
    ends(run, failed(None))
    listed = "node1" if len(nodes) == 1 else "node[1-2]"
    answering(monkeypatch, sacct=f"7|NODE_FAIL|0:0|{listed}\n", sinfo=sinfo)
    found = diagnose_run(run)[0]
    assert (found.cause, found.rank, found.node) == ("slurm-node-failure", None, node)


def test_a_rank_that_the_kernel_killed_by_its_own_count(tmp_path: Path) -> None:
    run = make_run(tmp_path, hardware={"memory_bytes": 320 << 30})
    write_rank(run, 0, [STEP, failed(None, error={"what": "", "fix": "", "echo": True})])
    grows = [{"event": "device", "host_memory": size << 30} for size in (1, 5)]
    write_rank(run, 1, [STEP, *grows, failed(-9, signal="SIGKILL", memory_kills=1)])
    (found,) = diagnose_run(run)
    assert (found.cause, found.rank, found.node) == ("host-out-of-memory", 1, "node1")
    assert found.confidence == "high"
    assert found.evidence[0].text.startswith("host memory of rank 1: 1 GiB to 5 GiB")
    assert (found.evidence[1].line, found.evidence[1].text) == (
        5,
        "the kernel killed one process in the run's cgroup, which was out of memory",
    )


TASK_GONE = "srun: error: node2: task 1: Exited with exit code 3"
STEP_GONE = "slurmstepd-node1: error: *** STEP 4.0 ON node1 CANCELLED AT 2026-11-15T16:08:45 ***"
JOB_GONE = "slurmstepd-node1: error: *** JOB 4 ON node1 CANCELLED AT 2026-11-15T16:08:45 ***"
TOLD = "srun: error: node1: task 0: Terminated"
BEGUN = "allranks: digits-20261115-142301-3f9a: job 4 on node1, node2 (layout 2x2, restart 0)"
LAUNCHER = "srun: error: node1: task 0: Exited with exit code 1"
TWO = BEGUN.replace("2x2", "2x1")
LOST = "error: rank 0 failed: RuntimeError: [transport/tcp/pair.cc:534] Connection closed by peer"


@pytest.mark.parametrize(
    ("lines", "cause", "rank", "node"),
    [
        ([TASK_GONE, STEP_GONE, TOLD], "rank-died", 1, "node2"),  # srun --kill-on-bad-exit
        ([JOB_GONE, STEP_GONE, TOLD], "job-cancelled", None, None),
        ([STEP_GONE, TOLD], "job-cancelled", None, None),  # scancel 4.0
        ([BEGUN, "error: rank 3 was killed by SIGKILL", LAUNCHER], "rank-died", 3, "node2"),
        ([BEGUN, "error: rank 1 ended with code 3", LAUNCHER], "rank-died", 1, "node1"),
        # The other node's launcher was ended before it had a word to say of its rank.
        ([TWO, LOST, LAUNCHER], "rank-died", 1, None),
        (
            [BEGUN, "error: rank 2 failed: ValueError: no label (train.py:9)", LAUNCHER],
            "rank-raised",
            2,
            "node2",
        ),
        (
            [BEGUN, "error: rank 3: /scratch/runs: No space left on device", LAUNCHER],
            "disk-full",
            3,
            "node2",
        ),
    ],
)
def test_the_log_of_a_job_alone(
    lines: list[str], cause: str, rank: int | None, node: str | None, tmp_path: Path
) -> None:
    log = tmp_path / "slurm-4.log"
    log.write_text("\n".join(["training", *lines]) + "\n")
    found = diagnose_logs([log])[0]
    assert (found.cause, found.rank, found.node) == (cause, rank, node)
