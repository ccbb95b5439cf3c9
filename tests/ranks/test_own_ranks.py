"""Commands that start ranks themselves, beside those of allranks: refused, or ended as failed."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from tests.commandline import Allranks

from allranks.run.folder import list_runs

pytestmark = pytest.mark.ranks

TRAIN = """
import subprocess, sys, time
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(int(sys.argv[1])):
    model(torch.randn(8, 4)).sum().backward()
    optimizer.step()
    time.sleep(0.01)
dist.destroy_process_group()
"""
INSIDE = """
unset MASTER_ADDR MASTER_PORT
{torchrun} --standalone --nproc-per-node {ranks} train.py {steps}
"""


def write(folder: Path, steps: int, ranks: int = 2) -> Path:
    (folder / "train.py").write_text(TRAIN)
    torchrun = f"{sys.executable} -m torch.distributed.run"
    (folder / "train.sh").write_text(INSIDE.format(torchrun=torchrun, ranks=ranks, steps=steps))
    return folder


@pytest.mark.parametrize("command", [("run", "--layout", "1x2"), ("submit", "--layout", "1x2")])
def test_a_launcher_is_refused_with_the_line_that_is_meant(
    command: tuple[str, ...], allranks: Allranks, tmp_path: Path
) -> None:
    done = allranks(*command, "--", "torchrun", "--nproc-per-node", "2", "train.py", "--lr", "1")
    assert done.returncode == 2
    assert "torchrun starts ranks, and so does allranks" in done.stderr
    assert f"fix: allranks {' '.join(command)} -- python train.py --lr 1\n" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_a_launcher_in_a_job_file_is_refused(allranks: Allranks, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("command: accelerate launch --num_processes 2 a{ranks}.py")
    for words in (["run"], ["submit", "--dry-run"], ["bench", "scaling"]):
        done = allranks(*words, "job.yaml")
        assert done.returncode == 2
        # A bench chooses its layouts itself.
        also = "" if words[0] == "bench" else " and layout: 1x2"
        assert f"fix: write command: python a{{ranks}}.py{also} in job.yaml\n" in done.stderr


@pytest.mark.parametrize("steps", [pytest.param(100_000, marks=pytest.mark.soak), 3])
def test_two_trainings_as_the_same_ranks_fail_the_run(
    steps: int, allranks: Allranks, tmp_path: Path
) -> None:
    """However short: the first may be over before the second begins. No process stays behind."""
    write(tmp_path, steps, ranks=1)
    done = allranks("run", "--layout", "1x2", "--json", "--", "bash", "train.sh")
    assert done.returncode == 1
    said = json.loads(done.stdout)
    assert said["state"] == "failed"
    assert "two processes recorded rank" in said["error"]["what"]
    assert "torch.distributed.run in train.sh" in said["error"]["what"]
    assert f"write {sys.executable} train.py {steps} in train.sh" in said["error"]["fix"]
    assert said["error"]["fix"].endswith("--layout 1x1")


@pytest.mark.soak
def test_they_are_not_measured(allranks: Allranks, tmp_path: Path) -> None:
    write(tmp_path, 100_000)
    options = ("--layouts", "1x2", "--steps", "20", "--repeats", "1")
    done = allranks("bench", "scaling", *options, "--", "bash", "train.sh")
    assert done.returncode == 1
    # The first layout is 1x1: what it starts has a rank more than that.
    assert "the command starts ranks itself" in done.stdout
    assert "samples/s" not in done.stdout


def test_a_small_training_inside_a_large_one_is_none_of_it(
    allranks: Allranks, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text("""
import subprocess, sys
import torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(20):
    model(torch.randn(8, 4)).sum().backward()
    optimizer.step()
    if step == 10 and len(sys.argv) == 1:
        subprocess.run([sys.executable, __file__, "child"], check=True)
""")
    done = allranks("run", "--json", "--", "python", "train.py")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["steps"] == 20


def test_one_training_after_another_is_no_second_one(allranks: Allranks, tmp_path: Path) -> None:
    write(tmp_path, 3)
    words = f"{sys.executable} train.py 3 && {sys.executable} train.py 3"
    done = allranks("run", "--json", "--", "bash", "-c", words, env={"PATH": os.environ["PATH"]})
    assert done.returncode == 0, done.stderr
    (run,) = list_runs(tmp_path / "runs")
    assert not run.twice(0).exists()
