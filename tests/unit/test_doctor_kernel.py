"""The kernel's messages beside a run: whose process each is about decides what it tells."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from tests.unit.test_doctor_runs import ECHO, failed, make_run

from allranks.doctor import run_evidence
from allranks.doctor.diagnose import diagnose_run
from allranks.doctor.finding import Finding
from allranks.probe.device_sampler import children, descendants
from allranks.run.events import append_event
from allranks.run.folder import RunDir

RANKS = {0: 4100, 1: 4101}  # their processes
WORKER = 4177
STRANGER = 5000
HERE = socket.gethostname()
REPORT = """\
{t} java invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=0
{t} CPU: 3 PID: {invoker} Comm: java Not tainted 6.1.0-18-amd64
{t} oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,task={name},pid={pid},uid=0
{t} Memory cgroup out of memory: Killed process {pid} ({name}) total-vm:9012kB, anon-rss:8012kB
{t} oom_reaper: reaped process {pid} ({name}), now anon-rss:0kB
"""


def report(pid: int, name: str = "python", invoker: int = STRANGER) -> str:
    now = datetime.fromtimestamp(time.time(), UTC).strftime("%Y-%m-%dT%H:%M:%S,%f+00:00")
    return REPORT.format(t=now, pid=pid, name=name, invoker=invoker)


@pytest.fixture
def says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Have `dmesg` print something, to a doctor that counts processes as the kernel does."""
    monkeypatch.setattr(run_evidence, "_counts_as_kernel", lambda: True)

    def say(text: str) -> None:
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        (folder / "said").write_text(text)
        (folder / "dmesg").write_text(f"#!/bin/sh\ncat '{folder}/said'\n")
        (folder / "dmesg").chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    return say


def write(run: RunDir, ends: dict[int, dict[str, Any]], logs: dict[int, str], **more: str) -> None:
    """Two ranks that have just ended; `more`: hosts by rank."""
    for rank, pid in RANKS.items():
        path = run.events(0, rank)
        host = more.get(f"host{rank}", HERE)
        append_event(path, "start", rank=rank, world_size=2, host=host, pid=pid)
        append_event(path, "step", step=1, samples=64, seconds=0.1)
        sampled = [pid, WORKER] if rank == 1 else [pid, 4190]
        append_event(path, "device", host_memory=1 << 30, processes=sampled)
        append_event(path, **ends[rank])
        run.log(0, rank).write_text(logs.get(rank, ""))


KILLED = {0: ECHO, 1: failed(-9, signal="SIGKILL")}
COUNTED = {0: ECHO, 1: failed(-9, signal="SIGKILL", memory_kills=1)}
STALLED = {
    rank: failed(None, error={"what": "no step", "fix": "", "stall": True, "echo": False})
    for rank in RANKS
}
RAISED = {0: ECHO, 1: failed(1)}
WORKER_DIED = """\
Traceback (most recent call last):
  File "train.py", line 7, in <module>
    for batch in loader:
RuntimeError: DataLoader worker (pid {}) is killed by signal: Killed.
"""


WORKER_GONE = """\
Traceback (most recent call last):
  File "train.py", line 7, in <module>
    for batch in loader:
  File "/env/lib/python3.11/site-packages/torch/multiprocessing/reductions.py", line 541, in f
    fd = df.detach()
  File "/usr/lib/python3.11/multiprocessing/resource_sharer.py", line 57, in detach
    with _resource_sharer.get_connection(self._id) as conn:
ConnectionResetError: [Errno 104] Connection reset by peer
"""


def first(run: RunDir) -> Finding:
    return diagnose_run(run)[0]


def test_a_message_about_a_rank_names_it(tmp_path: Path, says: Any) -> None:
    run = make_run(tmp_path)
    write(run, KILLED, {})
    says(report(RANKS[1]))
    found = first(run)
    assert (found.cause, found.rank, found.confidence) == ("host-out-of-memory", 1, "high")
    assert found.node == HERE
    assert [line.text for line in found.evidence if "Killed process 4101" in line.text]


@pytest.mark.parametrize("ends", [KILLED, COUNTED], ids=["killed", "counted"])
def test_one_about_another_process_is_not_the_cause(
    ends: dict[int, dict[str, Any]], tmp_path: Path, says: Any
) -> None:
    """Not even where the rank asked for the memory that the other one was killed for."""
    run = make_run(tmp_path)
    write(run, ends, {})
    says(report(STRANGER, invoker=RANKS[1]))
    assert [(one.cause, one.rank) for one in diagnose_run(run)] == [("rank-died", 1)]


def test_of_several_the_one_about_the_run_counts(tmp_path: Path, says: Any) -> None:
    run = make_run(tmp_path)
    write(run, COUNTED, {})
    says(report(STRANGER) + report(RANKS[1]))
    found = first(run)
    assert (found.cause, found.rank) == ("host-out-of-memory", 1)
    assert not [line for line in found.evidence if str(STRANGER) in line.text]


@pytest.mark.parametrize("ends", [RAISED, STALLED], ids=["raised", "stalled"])
def test_one_about_a_loader_worker_names_its_rank(
    ends: dict[int, dict[str, Any]], tmp_path: Path, says: Any
) -> None:
    run = make_run(tmp_path)
    write(run, ends, {})
    says(report(WORKER, "pt_data_worker"))
    found = first(run)
    assert (found.cause, found.rank) == ("host-out-of-memory", 1)


def test_a_worker_that_no_sample_has_seen(tmp_path: Path, says: Any) -> None:
    run = make_run(tmp_path)
    write(run, RAISED, {1: WORKER_DIED.format(4321)})
    says(report(4321, "pt_data_worker"))
    found = first(run)
    assert (found.cause, found.rank, found.confidence) == ("host-out-of-memory", 1, "high")


@pytest.mark.parametrize("log", [WORKER_DIED, WORKER_GONE], ids=["killed", "gone"])
def test_a_worker_is_counted_where_no_message_can_be_read(
    log: str, tmp_path: Path, says: Any
) -> None:
    run = make_run(tmp_path)
    says("")
    write(run, {0: ECHO, 1: failed(1, memory_kills=1)}, {1: log.format(4321)})
    found = first(run)
    assert (found.cause, found.rank, found.confidence) == ("host-out-of-memory", 1, "high")


def test_a_worker_that_the_kernel_did_not_kill(tmp_path: Path, says: Any) -> None:
    run = make_run(tmp_path)
    write(run, RAISED, {1: WORKER_DIED.format(4321)})
    says(report(STRANGER))
    assert [(one.cause, one.rank) for one in diagnose_run(run)] == [("worker-killed", 1)]


def test_the_same_number_on_another_node_is_another_process(tmp_path: Path, says: Any) -> None:
    run = make_run(tmp_path)
    write(run, KILLED, {}, host1="elsewhere")
    says(report(RANKS[1]))
    found = first(run)
    assert (found.cause, found.rank, found.node) == ("rank-died", 1, "elsewhere")


def test_numbers_of_a_container_say_nothing(
    tmp_path: Path, says: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path)
    write(run, KILLED, {})
    says(report(RANKS[1]))
    monkeypatch.setattr(run_evidence, "_counts_as_kernel", lambda: False)
    assert first(run).cause == "rank-died"


def test_a_process_of_a_process_is_a_rank_s_too() -> None:
    """As workers are that a fork server starts."""
    inner = "import time; time.sleep(30)"
    outer = (
        "import subprocess, sys\n"
        f"child = subprocess.Popen([sys.executable, '-c', '{inner}'])\n"
        "print(child.pid, flush=True)\nsys.stdin.read()\nchild.kill()\nchild.wait()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", outer], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        grandchild = int(child.stdout.readline())
        assert {child.pid, grandchild} <= set(descendants(children()))
        child.communicate("")
