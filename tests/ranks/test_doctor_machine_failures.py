"""Runs that fail because the machine has too little of something: the doctor says of what."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.cgroup import kills_in, memory_cgroup
from tests.commandline import Allranks
from tests.slurm.live import unavailable

pytestmark = pytest.mark.ranks

LIMIT_BYTES = 1600 << 20
# Rank 1 takes 6 MB a step and keeps them.
HUNGRY = """
import os, time, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
kept = []
for step in range(2000):
    if os.environ["RANK"] == "1":
        kept.append(torch.ones(6 << 18))
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.02)
"""
ENTER = 'echo $$ > "$0/cgroup.procs" && exec "$@"'


def diagnosis(allranks: Allranks, *subject: str, env: dict[str, str] | None = None) -> Any:
    done = allranks("doctor", *subject, "--json", env=env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@contextmanager
def small_disk(path: Path, size: str) -> Iterator[Path]:
    """A disk of its own at a path, for this machine to see."""
    if os.geteuid() != 0:
        unavailable("mounting a small disk takes root")
    path.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", path], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", path], check=True)


def test_a_rank_that_eats_the_memory_of_its_cgroup(allranks: Allranks, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(HUNGRY)
    job = ["run", "--layout", "1x2", "--oversubscribe", "--", sys.executable, "train.py"]
    with memory_cgroup(LIMIT_BYTES) as folder:
        enter = ["sh", "-c", ENTER, str(folder), sys.executable, "-m", "allranks", *job]
        done = subprocess.run(enter, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert kills_in(folder) == 1, done.stderr
    assert done.returncode == 1 and "rank 1 was killed by SIGKILL" in done.stderr, done.stderr
    # Once with the kernel's messages, which only root may read, and once without.
    no_dmesg = tmp_path / "bin"
    no_dmesg.mkdir()
    (no_dmesg / "dmesg").write_text("#!/bin/sh\nexit 1\n")
    (no_dmesg / "dmesg").chmod(0o755)
    for env in ({}, {"PATH": f"{no_dmesg}:{os.environ['PATH']}"}):
        first, *others = diagnosis(allranks, "last", env=env)
        assert (first["cause"], first["rank"], others) == ("host-out-of-memory", 1, [])
        assert first["confidence"] == "high" and first["node"] == os.uname().nodename
        said = [line["text"] for line in first["evidence"]]
        assert any("the kernel killed one process of the run's cgroup" in text for text in said)
        assert any(text.startswith("host memory of rank 1: ") for text in said), said
        assert "num_workers" in first["fix"] or "workers" in first["fix"]


@pytest.mark.parametrize("layout", ["1x1", pytest.param("1x2", marks=pytest.mark.soak)])
def test_a_disk_that_a_task_fills_with_its_checkpoints(
    allranks: Allranks, tmp_path: Path, layout: str
) -> None:
    with small_disk(tmp_path / "disk", "160k") as disk:
        words = ["--runs", str(disk), "--layout", layout, "--oversubscribe"]
        task = ["task=spiral", "steps=600", "checkpoint.every=50", "checkpoint.keep=99"]
        done = allranks("run", *task, *words)
        assert done.returncode == 1, done.stderr
        (run,) = [path for path in disk.iterdir() if path.is_dir()]
        first, *_ = diagnosis(allranks, str(run))
        assert (first["cause"], first["confidence"]) == ("disk-full", "high"), first
        assert "checkpoint.keep=1" in first["fix"]


def test_a_loss_that_is_no_number_in_a_task(allranks: Allranks, tmp_path: Path) -> None:
    task = ["task=spiral", "steps=40", "optimizer.lr=1e30", "optimizer.clip=null", "log_every=1"]
    done = allranks("run", *task, "optimizer.warmup=0", "--json")
    assert done.returncode == 0, done.stderr
    first, *_ = diagnosis(allranks, "last")
    assert (first["cause"], first["rank"]) == ("nan-loss", None)
    line = first["evidence"][0]
    assert line["file"].endswith("rank-0.jsonl") and line["line"] > 1
    assert line["text"].startswith("step ") and "loss nan" in line["text"]
    assert "optimizer.lr=1e+29" in first["fix"]
