"""Runs end once: with nodes that are late at the end, and after kills of what is no rank.

`make test` runs a sample of the trials; `make soak` runs them all.
"""

from __future__ import annotations

import random
import re
import time
from pathlib import Path

import pytest
from tests.faults import sample_of
from tests.slurm.live import Cluster
from tests.slurm.runs import LOST, check_words, kill, send

from allranks.run.events import read_events

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]

# Its ranks meet at the end, tell that they are there, and leave when they may.
MEETING = """
import os, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
for step in range(20):
    dist.all_reduce(total)
rank = dist.get_rank()
with open("trained", "a") as file:
    file.write(f"{rank} {os.environ['ALLRANKS_ATTEMPT']} {os.getppid()} {os.getpid()}\\n")
while not os.path.exists("leave"):
    time.sleep(0.1)
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
    assert cluster.exec(start["host"], "kill", "-STOP", process).returncode == 0
    (tmp_path / "leave").touch()
    time.sleep(chance.choice([3, 10, 25]) if number else 5)
    assert sent.listed()["state"] == "running", sent.log()
    cluster.exec(start["host"], "kill", "-CONT", process)
    line = sent.wait_for_end(120)
    assert line["state"] == "finished", (line, sent.log())
    cluster.wait(lambda: not cluster.squeue(), 60, "an empty queue")
    assert not re.search(r"(?i)fail|error|killed|lost", sent.log()), sent.log()
    assert "attempt 0 is finished (srun: 0)" in sent.log()
    assert sent.run.attempts() == [0]
    assert sorted(int(entry[0]) for entry in entries()) == list(range(nodes * gpus))
    cluster.wait(lambda: cluster.sacct(sent.jobs[0])[-1]["State"] == "COMPLETED", 20, "its record")
    assert len(cluster.sacct(sent.jobs[0])) == 1


@pytest.mark.soak
@pytest.mark.parametrize("number", range(20))
@pytest.mark.parametrize("what", list(LOST))
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
    check_words(sent, LOST[what])
    if kind == "task":
        assert sorted(sent.losses()) == list(range(1, 101))
        again = [e["step"] for e in read_events(sent.run.events(1, 0)) if e["event"] == "step"]
    else:
        lines = [entry.split() for entry in (tmp_path / "steps-0").read_text().splitlines()]
        assert {int(step) for _, step in lines} == set(range(1, 101))
        again = [int(step) for attempt, step in lines if attempt == "1"]
    assert all(step > 10 for step in again)  # none where a busy machine was done before the kill
