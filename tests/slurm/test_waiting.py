"""Commands that wait for a run end with its exit code; allocations are not mistaken for one."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.commandline import run_allranks
from tests.slurm.live import Cluster
from tests.slurm.runs import SLOW_TASK, Sent, send, steps_of_attempts

from allranks.run.folder import list_runs

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]

SLOW = ["task=slow:Slow", "log_every=1", "checkpoint.every=50", "preflight=false"]
# Ranks that need no torch, started by srun itself: so does nothing else of the job.
SCRIPT = ["preflight=false", "launcher=srun"]


@contextmanager
def waiting(folder: Path, *args: str) -> Iterator[subprocess.Popen[str]]:
    """`allranks ARGS` beside this process, ended with it."""
    (folder / "slow.py").write_text(SLOW_TASK)
    words = [sys.executable, "-m", "allranks", *args]
    with subprocess.Popen(
        words, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def sent_by(cluster: Cluster, folder: Path) -> Sent:
    """The run that another process has just sent from this folder."""
    runs = cluster.wait(
        lambda: [run for run in list_runs(folder / "runs") if run.info().get("jobs")], 60, "a run"
    )
    return Sent(cluster, folder, runs[0], runs[0].info()["jobs"])


@pytest.mark.soak
def test_a_run_is_waited_for_over_a_requeue_to_its_end(cluster: Cluster, tmp_path: Path) -> None:
    with waiting(tmp_path, "submit", "--wait", *SLOW, "steps=300") as process:
        sent = sent_by(cluster, tmp_path)
        sent.wait_for_step(50)
        cluster.run("scontrol", "requeue", sent.jobs[0])
        said, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors
    assert "attempt 0)" in said and "attempt 1)" in said
    assert said.count("queued as job") >= 2 and "finished\n" in said
    assert "resuming after" in sent.log()


def test_a_stopped_run_ends_the_wait_with_75_and_resume_waits_for_the_rest(
    cluster: Cluster, tmp_path: Path
) -> None:
    with waiting(tmp_path, "submit", "--wait", "--json", *SLOW, "steps=200") as process:
        sent = sent_by(cluster, tmp_path)
        sent.wait_for_step(20)
        followed = subprocess.Popen(
            [sys.executable, "-m", "allranks", "logs", "-f", sent.run.name],
            cwd=tmp_path,
            stdout=subprocess.DEVNULL,
        )
        assert "saves a checkpoint" in sent.allranks("stop", sent.run.name)
        said, errors = process.communicate(timeout=120)
        assert followed.wait(120) == 75
    assert process.returncode == 75, errors
    told = json.loads(said)
    assert (told["state"], told["reason"]) == ("stopped", "stopped by its user")
    assert told["jobs"] == sent.jobs and told["steps"] >= 20
    assert "continue with allranks resume" in sent.log()
    cluster.wait(lambda: not cluster.squeue(), 60, "an empty queue")
    time.sleep(3)
    assert cluster.squeue() == []  # it does not come back
    done = run_allranks("resume", "--wait", "last", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "finished" in done.stdout and "running on node" in done.stdout
    assert [*itertools.chain(*steps_of_attempts(sent))] == list(range(1, 201))
    again = run_allranks("resume", "--wait", "last", cwd=tmp_path)
    assert again.returncode == 0 and "already finished" in again.stderr
    assert run_allranks("logs", "-f", "last", cwd=tmp_path).returncode == 0


def test_a_failed_run_ends_the_wait_with_1(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("raise ValueError('no such data')")
    command = [*SCRIPT, "--json", "--", "python", "train.py"]
    done = run_allranks("submit", "--wait", *command, cwd=tmp_path)
    assert done.returncode == 1
    told = json.loads(done.stdout)
    assert told["state"] == "failed"
    assert "failed" in told["error"]["what"] and "allranks doctor" in told["error"]["fix"]
    done = run_allranks("logs", "-f", "last", cwd=tmp_path)
    assert done.returncode == 1 and "no such data" in done.stdout
    assert "failed" in done.stderr


def test_ctrl_c_ends_the_wait_and_not_the_run(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import time\ntime.sleep(1000)\n")
    command = [*SCRIPT, "--", "python", "train.py"]
    with waiting(tmp_path, "submit", "--wait", *command) as process:
        sent = sent_by(cluster, tmp_path)
        cluster.wait(lambda: sent.run.ranks(0), 120, "a rank")
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert f"continues. To stop it: allranks stop {sent.run.name}" in errors
    assert sent.listed()["state"] == "running"
    sent.allranks("stop", "--now", sent.run.name)


def test_the_log_of_a_stopped_script_tells_of_no_error(cluster: Cluster, tmp_path: Path) -> None:
    """Also where the ranks of one node end long before those of the other."""
    (tmp_path / "train.py").write_text("""
import os, signal, sys, time
def stop(*_):
    time.sleep(3 * int(os.environ["RANK"]))
    sys.exit(75)
signal.signal(signal.SIGUSR2, stop)
print("begun", flush=True)
time.sleep(1000)
""")
    command = ["--layout", "2x1", "preflight=false", "--", "python", "train.py"]
    sent = send(cluster, tmp_path, *command)
    logs = [sent.run.log(0, rank) for rank in range(2)]
    cluster.wait(lambda: all(log.exists() and log.read_text() for log in logs), 90, "both ranks")
    cluster.run("scancel", "--batch", "--signal=USR2", sent.jobs[0])
    cluster.wait(lambda: "continuing in the next attempt" in sent.log(), 90, "what comes next")
    said = sent.log().partition("continuing in the next attempt")[0]  # SLURM's own words follow
    assert "error:" not in said and "fix:" not in said and "TCPStore" not in said
    sent.allranks("stop", "--now", sent.run.name)


def test_an_allocation_of_several_nodes_is_not_played_on_one(
    cluster: Cluster, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text("print('trained')")
    run, script = (
        [sys.executable, "-m", "allranks", "run", "--layout", "2x1"],
        ["python", "train.py"],
    )
    same_nodes = ["salloc", "--nodelist=node[1-2]"]  # the first is in what it says to type
    typed = cluster.run(*same_nodes, *run, "--", *script, cwd=tmp_path)
    assert typed.returncode == 2 and "has 2 nodes" in typed.stderr
    tasks = cluster.run("srun", "-N", "2", *run, "--here", "--", *script, cwd=tmp_path)
    assert tasks.returncode == 2 and "one of 2 tasks" in tasks.stderr
    # What it says to type instead.
    line = typed.stderr.partition("each node: ")[2].partition("; or ")[0]
    assert line.startswith("srun --nodes=2")
    line = line.replace("allranks run", f"{sys.executable} -m allranks run")
    done = cluster.run(*same_nodes, "bash", "-c", line, cwd=tmp_path)
    assert "finished" in done.stdout
    (made,) = list_runs(tmp_path / "runs")
    hosts = {(made.start(0, rank) or {})["host"] for rank in range(2)}
    assert len(hosts) == 2


def test_a_file_that_one_node_does_not_have(cluster: Cluster, tmp_path: Path) -> None:
    if cluster.mode != "netns":
        pytest.skip("nodes have no disk of their own in mode ports")
    (tmp_path / "train.py").write_text("open('/dev/shm/only-here')")
    command = ["--layout", "2x1", *SCRIPT, "--json", "--", "python", "train.py"]
    cluster.exec("node2", "touch", "/dev/shm/only-here")
    try:
        options = "slurm.directives={nodelist: 'node[1-2]'}"
        done = run_allranks("submit", "--wait", options, *command, cwd=tmp_path)
    finally:
        cluster.exec("node2", "rm", "/dev/shm/only-here")
    assert done.returncode == 1, done.stderr
    told = json.loads(done.stdout)
    what = "/dev/shm/only-here is on node2 but not on node1"
    assert told["reason"] == f"rank 0 did not find a file: {what}"
    assert "stage: [SHARED/only-here]" in told["error"]["fix"]
    (run,) = list_runs(tmp_path / "runs")
    assert f"error: {what}" in Sent(cluster, tmp_path, run, []).log()
    assert what in run_allranks("ls", run.name, cwd=tmp_path).stdout
    (finding, *_) = json.loads(run_allranks("doctor", run.name, "--json", cwd=tmp_path).stdout)
    assert (finding["cause"], finding["title"]) == ("missing-file", what)
