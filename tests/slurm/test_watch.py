"""A job that allranks did not start, looked at from inside its allocation."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tests.commandline import run_allranks
from tests.slurm.live import Cluster
from tests.terminal.conftest import Terminal

pytestmark = pytest.mark.slurm

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
    cluster.wait(lambda: len(list(tmp_path.glob("begun-*"))) == 2, 120, "both tasks")

    seen = json.loads(run_allranks("watch", job, "--json", cwd=tmp_path).stdout)
    assert seen["job"] == job and seen["name"] == "foreign"
    assert len({node["node"] for node in seen["nodes"]}) == 2
    tasks = [
        process
        for node in seen["nodes"]
        for process in node["processes"]
        if process["command"].endswith("python3 train.py") and process["cpu"] > 0.02
    ]
    assert sorted(task["rank"] for task in tasks) == ["0", "1"], seen

    dumped = run_allranks("watch", job, "--stacks", cwd=tmp_path)
    assert dumped.stdout.count("stuck_in_a_collective (train.py:4)") == 2, dumped
    # Looking leaves nothing behind in the job but steps that have ended.
    assert cluster.job(job)["JobState"] == "RUNNING"

    def is_left_alone() -> bool:
        steps = cluster.read("squeue", "-h", "-s", "-j", job, "-o", "%i").split()
        return [step for step in steps if step.rpartition(".")[2].isdigit()] == [f"{job}.0"]

    cluster.wait(is_left_alone, 60, "the end of the steps that looked")


def test_a_foreign_job_is_watched_live(
    cluster: Cluster, terminal: Terminal, tmp_path: Path
) -> None:
    """In a real terminal: samples as they come, stacks when asked, and the job's end."""
    (tmp_path / "train.py").write_text(TRAIN)
    script = "#!/bin/sh\nsrun python3 train.py\n"
    options = ("--nodes=2", "--ntasks=2", "--job-name=foreign", "--time=10")
    job = cluster.sbatch(*options, cwd=tmp_path, script=script)
    cluster.wait(lambda: len(list(tmp_path.glob("begun-*"))) == 2, 120, "both tasks")

    terminal.start("watch", job)

    def shows_all(screen: str) -> bool:
        tasks = [line.split()[1] for line in screen.splitlines() if " runs " in line]
        return (
            screen.count("CPUs in use by the job") == 2
            and f"job {job} foreign  running for " in screen
            and "left of its time limit" in screen
            and sorted(tasks) == ["0", "1"]
        )

    screen = terminal.wait(shows_all)
    assert len(screen.splitlines()) == 24
    clock = re.compile(r"running for (\w+),")
    before = clock.search(screen)
    assert before is not None
    terminal.wait(lambda screen: clock.findall(screen) not in ([], [before[1]]))  # it goes on

    terminal.press("d")
    asks, answer = "collecting stack dumps", "stuck_in_a_collective (train.py:4)"
    terminal.wait(lambda screen: asks in screen or answer in screen)  # it asks for a moment only
    screen = terminal.wait(answer)
    assert "samples" not in screen  # the step that looks is not what is looked for
    terminal.press("q")
    terminal.wait("CPUs in use by the job")
    cluster.read("scancel", job)
    ended = ("! the job has ended", f"job {job} foreign  ended after ")
    terminal.wait(lambda screen: all(words in screen for words in ended))
    terminal.press("q")
    terminal.wait("left 0")
    terminal.check_sane()


def test_a_job_that_is_not_there_is_told_in_words(cluster: Cluster, tmp_path: Path) -> None:
    refused = run_allranks("watch", "424242", cwd=tmp_path)
    assert refused.returncode == 2
    assert "no job 424242 in the queue" in refused.stderr
