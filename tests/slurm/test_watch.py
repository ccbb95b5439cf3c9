"""A job that allranks did not start, looked at from inside its allocation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.commandline import run_allranks
from tests.slurm.live import Cluster

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(180)]

TRAIN = """
def stuck_in_a_collective():
    while True:
        sum(range(100_000))

open(f"begun-{__import__('os').environ['SLURM_PROCID']}", "w").close()
stuck_in_a_collective()
"""


def test_a_foreign_job_is_sampled_and_its_stacks_are_dumped(
    cluster: Cluster, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    script = "#!/bin/sh\nsrun python3 train.py\n"
    job = cluster.sbatch(
        "--nodes=2", "--ntasks=2", "--job-name=foreign", cwd=tmp_path, script=script
    )
    cluster.wait(lambda: len(list(tmp_path.glob("begun-*"))) == 2, 60, "both tasks")

    seen = json.loads(run_allranks("watch", job, "--json", cwd=tmp_path).stdout)
    assert seen["job"] == job and seen["name"] == "foreign"
    assert len({node["node"] for node in seen["nodes"]}) == 2
    tasks = [
        process
        for node in seen["nodes"]
        for process in node["processes"]
        if process["command"].endswith("python3 train.py") and process["cpu"] > 0.1
    ]
    assert sorted(task["rank"] for task in tasks) == ["0", "1"], seen

    dumped = run_allranks("watch", job, "--stacks", cwd=tmp_path)
    assert dumped.stdout.count("stuck_in_a_collective (train.py:4)") == 2, dumped
    # Looking leaves nothing behind in the job but steps that have ended.
    assert cluster.job(job)["JobState"] == "RUNNING"
    steps = cluster.read("squeue", "-h", "-s", "-j", job, "-o", "%i").split()
    assert [step for step in steps if step.rpartition(".")[2].isdigit()] == [f"{job}.0"]


def test_a_job_that_is_not_there_is_told_in_words(cluster: Cluster, tmp_path: Path) -> None:
    refused = run_allranks("watch", "424242", cwd=tmp_path)
    assert refused.returncode == 2
    assert "no job 424242 in the queue" in refused.stderr
