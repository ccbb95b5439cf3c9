"""Runs end once, and rightly: with nodes that are late at the end, and after kills of what is no rank.

`make test` runs a sample of the trials; `make soak` runs them all.
"""

from __future__ import annotations

import json
import random
import re
import time
from pathlib import Path

import pytest
from tests.commandline import run_allranks
from tests.faults import sample_of
from tests.slurm.live import Cluster
from tests.slurm.runs import Sent, send

from allranks import claims
from allranks.events import read_events

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]

# Its ranks meet at the end, tell that they are there, and take a moment to leave.
MEETING = """
import os, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
for step in range(20):
    dist.all_reduce(total)
rank = dist.get_rank()
with open("trained", "a") as file:
    file.write(f"{rank} {os.environ['ALLRANKS_ATTEMPT']} {os.getppid()} {os.getpid()}\\n")
time.sleep(2)
dist.destroy_process_group()
"""
# Counts to a hundred in small steps, and goes on from where it was.
COUNTING = """
import os, sys, time
last = sys.argv[1]
begin = int(open(last).read()) if len(sys.argv) > 2 and os.path.exists(last) else 0
rank, attempt = os.environ["RANK"], os.environ["ALLRANKS_ATTEMPT"]
for step in range(begin + 1, 101):
    time.sleep(0.1)
    if rank == "0" and step % 10 == 0:
        with open(last + ".new", "w") as file:
            file.write(str(step))
        os.rename(last + ".new", last)
    with open(f"steps-{rank}", "a") as file:
        file.write(f"{attempt} {step}\\n")
"""
STEP = "^[^ ]*python[^ ]* -m allranks.launch.cluster.step"  # srun has these words, too


def processes(cluster: Cluster, node: str, *words: str) -> list[str]:
    return cluster.exec(node, "pgrep", *words).stdout.split()


@pytest.mark.parametrize("number", sample_of(60, 0))
def test_a_node_that_is_late_at_the_end_changes_nothing(
    number: int, cluster: Cluster, tmp_path: Path
) -> None:
    """One launcher or rank is suspended when all is done, and wakes up when others have left."""
    chance = random.Random(number)
    launcher = ("torchrun", "srun")[number % 2]
    layout = chance.choice(["2x1", "2x2", "3x1"]) if number else "2x1"
    (tmp_path / "train.py").write_text(MEETING)
    sent = send(
        cluster,
        tmp_path,
        *("--layout", layout, f"launcher={launcher}", "preflight=false"),
        *("--", "python", "train.py"),
    )
    nodes, gpus = (int(size) for size in layout.split("x"))
    trained = tmp_path / "trained"

    def entries() -> list[list[str]]:
        lines = trained.read_text().splitlines() if trained.exists() else []
        return [line.split() for line in lines]

    cluster.wait(lambda: len(entries()) == nodes * gpus, 200, "the ranks' last moment")
    rank, _, parent, own = chance.choice(entries())
    process = chance.choice([parent, own]) if number else parent
    start = sent.run.start(0, int(rank))
    assert start is not None
    cluster.exec(start["host"], "kill", "-STOP", process)
    time.sleep(chance.choice([3, 10, 25]) if number else 5)
    assert sent.listed()["state"] == "running", sent.log()
    cluster.exec(start["host"], "kill", "-CONT", process)
    line = sent.wait_for_end(120)
    assert line["state"] == "finished", (line, sent.log())
    cluster.wait(lambda: not cluster.squeue(), 60, "an empty queue")
    assert not re.search(r"(?i)fail|error|killed|lost", sent.log()), sent.log()
    assert f"attempt 0 is finished (srun: 0)" in sent.log()
    assert sent.run.attempts() == [0]
    assert sorted(int(entry[0]) for entry in entries()) == list(range(nodes * gpus))
    cluster.wait(lambda: cluster.sacct(sent.jobs[0])[-1]["State"] == "COMPLETED", 20, "its record")
    assert len(cluster.sacct(sent.jobs[0])) == 1


def kill(sent: Sent, what: str, chance: random.Random) -> None:
    """Kill srun, the job's first process, or the launcher of a node, as somebody's clean-up would."""
    cluster, holder = sent.cluster, claims.newest(sent.run.claims)
    assert holder is not None
    node = holder.nodes[0] if what != "launcher" else chance.choice(holder.nodes)
    found = [str(holder.pid)] if what == "job" else []
    if what == "srun":  # its second process, which would end the step, too or not
        found = processes(cluster, node, "-x", "srun")[: chance.choice([1, 2])]
    if what == "launcher":
        found = processes(cluster, node, "-f", STEP)[:1]
    assert found
    cluster.exec(node, "kill", "-9", *found)


def check_words(sent: Sent, words: str) -> None:
    """What was killed is named wherever one looks."""
    assert re.search(rf"allranks: attempt 0 was lost: {words}", sent.log()), sent.log()
    done = run_allranks("doctor", sent.run.name, "--json", cwd=sent.folder)
    assert "launcher-killed" in [one["cause"] for one in json.loads(done.stdout)], done.stdout


WORDS = {
    "srun": "srun was killed by SIGKILL on node",
    "job": "the job's first process was killed on node",
    "launcher": "the launcher on node. was killed, with rank",
}


def test_runs_go_on_after_kills_of_what_is_no_rank(cluster: Cluster, tmp_path: Path) -> None:
    """All three at once, since most of it is waiting."""
    task = ["task=slow:Slow", "steps=200", "log_every=1", "checkpoint.every=20", "preflight=false"]
    sent = {what: send(cluster, tmp_path, *task, f"name={what}", "slurm.exclusive=true") for what in WORDS}
    for what, one in sent.items():
        one.wait_for_step(45)
        kill(one, what, random.Random(0))
        cluster.wait(lambda one=one: "was lost" in str(one.listed()["reason"]), 60, f"{what} in ls")
    for what, one in sent.items():
        line = one.wait_for_end(300)
        assert line["state"] == "finished", (line, one.log())
        assert one.run.attempts() == [0, 1] and line["jobs"] == one.jobs
        steps = [e["step"] for e in read_events(one.run.events(1, 0)) if e["event"] == "step"]
        assert 40 < steps[0] and steps[-1] == 200
        check_words(one, WORDS[what])


@pytest.mark.soak
@pytest.mark.parametrize("number", range(20))
@pytest.mark.parametrize("what", list(WORDS))
def test_a_kill_costs_what_a_lost_node_costs(
    what: str, number: int, cluster: Cluster, tmp_path: Path
) -> None:
    """Tasks and scripts on several nodes, killed at any moment after their first checkpoint."""
    chance = random.Random(f"{what} {number}")
    kind = ("task", "torchrun", "srun")[number % 3]
    settings = ["--layout", chance.choice(["2x1", "2x2", "3x1"]), "preflight=false"]
    if kind == "task":
        task = ["task=slow:Slow", "steps=100", "log_every=1", "checkpoint.every=10"]
        sent = send(cluster, tmp_path, *settings, *task, "options.seconds=0.1")
        saved = sent.run.checkpoints / "step-10"
    else:
        (tmp_path / "train.py").write_text(COUNTING)
        saved = tmp_path / "last"
        settings += [f"launcher={kind}", f"last={saved}", "resume=--from {last}"]
        sent = send(cluster, tmp_path, *settings, "--", "python", "train.py", str(saved))
    cluster.wait(saved.exists, 200, "a checkpoint")
    time.sleep(5 * chance.random())
    kill(sent, what, chance)
    line = sent.wait_for_end(400)
    assert line["state"] == "finished", (line, sent.log())
    assert sent.run.attempts() == [0, 1] and line["jobs"] == sent.jobs, sent.log()
    check_words(sent, WORDS[what])
    if kind == "task":
        assert sorted(sent.losses()) == list(range(1, 101))
        again = [e["step"] for e in read_events(sent.run.events(1, 0)) if e["event"] == "step"]
    else:
        lines = [entry.split() for entry in (tmp_path / "steps-0").read_text().splitlines()]
        assert {int(step) for _, step in lines} == set(range(1, 101))
        again = [int(step) for attempt, step in lines if attempt == "1"]
    assert again[0] > 10 and again[-1] == 100
