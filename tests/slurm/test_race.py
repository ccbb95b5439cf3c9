"""Layouts that race for one run: exactly one trains, whatever starts when.

`make test` runs a sample of the trials; `make soak` runs them all.
"""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
from tests.commandline import run_allranks
from tests.faults import sample_of
from tests.slurm.live import Cluster
from tests.slurm.runs import send

pytestmark = pytest.mark.slurm

SCRIPT = """
import os, time
with open("trained", "a") as file:
    file.write(f"{os.environ['SLURM_JOB_ID']} {os.environ['RANK']} {os.environ['WORLD_SIZE']}\\n")
time.sleep(3)
"""


@pytest.mark.parametrize("number", sample_of(40, 1))
def test_one_of_them_trains_and_the_others_are_gone(
    number: int, cluster: Cluster, tmp_path: Path
) -> None:
    chance = random.Random(number)
    restarts_controller = number % 4 == 0
    launcher = "torchrun" if number % 5 == 0 else "srun"  # which is a second quicker: no torch
    (tmp_path / "train.py").write_text(SCRIPT)
    blocker = cluster.sbatch("--exclusive", "-N4", "-o", "/dev/null", "--wrap", "sleep 600")
    cluster.wait(lambda: cluster.job(blocker)["JobState"] == "RUNNING", 60, "the blocker")
    layouts = chance.sample(["1x1", "1x2", "2x1", "3x1", "2x2", "4x1"], k=chance.choice([2, 3]))
    delays = [f"slurm.directives.begin=now+{chance.randrange(6)}"] if chance.random() < 0.4 else []
    sent = send(
        cluster,
        tmp_path,
        *("--race", ",".join(layouts), "preflight=false", f"launcher={launcher}", *delays),
        *("--", "python", "train.py"),
    )
    assert len(sent.jobs) == len(layouts)
    assert sent.listed()["state"] == "queued"
    cluster.run("scancel", blocker)  # whatever fits starts in the same second
    time.sleep(2 * chance.random())
    if restarts_controller:
        cluster.stop_controller()
        time.sleep(3 * chance.random())
        cluster.start_controller()
    line = sent.wait_for_end(120)
    assert line["state"] == "finished", (line, sent.log())
    cluster.wait(lambda: not cluster.squeue(), 90, "an empty queue")
    trained = [entry.split() for entry in (tmp_path / "trained").read_text().splitlines()]
    assert len({job for job, _, _ in trained}) == 1
    (size,) = {int(size) for _, _, size in trained}
    assert sorted(int(rank) for _, rank, _ in trained) == list(range(size))
    assert [path.name for path in (tmp_path / "runs").iterdir()] == [sent.run.name]
    assert sent.run.attempts() == [0] and sent.run.ranks(0) == list(range(size))


def test_a_further_layout_can_join_while_the_run_waits(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    blocker = cluster.sbatch("-N3", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 600")
    cluster.wait(lambda: cluster.job(blocker)["JobState"] == "RUNNING", 60, "the blocker")
    options = ["slurm.time=10m", "preflight=false", "launcher=srun"]
    sent = send(cluster, tmp_path, "--layout", "2x1", *options, "--", "python", "train.py")
    cluster.wait(lambda: sent.listed()["reason"], 60, "a reason of waiting")
    told = run_allranks("ls", sent.run.name, cwd=tmp_path).stderr
    assert f"allranks race {sent.run.name} 1x2" in told
    sent.allranks("race", sent.run.name, "1x2")
    line = sent.wait_for_end(150)
    assert (line["state"], line["layout"]) == ("finished", "1x2")

    def is_alone() -> bool:
        return [job["id"] for job in cluster.squeue()] == [blocker]

    cluster.wait(is_alone, 60, "a queue with nothing of the run")
    late = run_allranks("race", sent.run.name, "4x1", cwd=tmp_path)
    assert late.returncode == 2
    assert "is not waiting" in late.stderr and "resume" in late.stderr
