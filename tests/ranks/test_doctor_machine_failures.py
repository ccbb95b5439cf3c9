"""Runs that fail because the machine has too little of something: the doctor says of what."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.cgroup import kills_in, memory_cgroup
from tests.commandline import Allranks
from tests.scripts import hungry
from tests.slurm.live import unavailable

from allranks.run.events import read_events
from allranks.run.folder import find_run

pytestmark = pytest.mark.ranks

LIMIT_BYTES = 1600 << 20
# While one process goes, the kernel may look for the next: only those that ask for it are killed.
SPARED = "echo -1000 > /proc/self/oom_score_adj"
ASK_TO_BE_KILLED = "open('/proc/self/oom_score_adj', 'w').write('0')"
ENTER = f'echo $$ > "$0/cgroup.procs" && {SPARED}; exec "$@"'


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


def without_dmesg(folder: Path) -> dict[str, str]:
    """As for most users: the kernel's messages are root's to read."""
    (folder / "bin").mkdir()
    (folder / "bin" / "dmesg").write_text("#!/bin/sh\nexit 1\n")
    (folder / "bin" / "dmesg").chmod(0o755)
    return {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}


def inside(cgroup: Path, *command: str) -> list[str]:
    return ["sh", "-c", ENTER, str(cgroup), *command]


RUN = [sys.executable, "-m", "allranks", "run", "--layout", "1x2", "--oversubscribe", "--"]
RUN += [sys.executable, "train.py"]


def test_a_rank_that_eats_the_memory_of_its_cgroup(allranks: Allranks, tmp_path: Path) -> None:
    rank_1_asks = f"import os\nif os.environ['RANK'] == '1': {ASK_TO_BE_KILLED}\n"
    (tmp_path / "train.py").write_text(rank_1_asks + hungry(12, 0.02))
    with memory_cgroup(LIMIT_BYTES) as folder:
        enter = inside(folder, *RUN)
        done = subprocess.run(enter, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert kills_in(folder) == 1, done.stderr
    assert done.returncode == 1 and "rank 1 was killed by SIGKILL" in done.stderr, done.stderr
    for env in ({}, without_dmesg(tmp_path)):
        first, *others = diagnosis(allranks, "last", env=env)
        assert (first["cause"], first["rank"], others) == ("host-out-of-memory", 1, [])
        assert first["confidence"] == "high" and first["node"] == os.uname().nodename
        said = [line["text"] for line in first["evidence"]]
        assert any("the kernel killed one process in the run's cgroup" in text for text in said)
        assert any(text.startswith("host memory of rank 1: ") for text in said), said
        assert "num_workers" in first["fix"] or "workers" in first["fix"]


# The worker of rank 1's loader keeps 24 MB of every batch, once the rank has written down that it
# has this worker, as it does every two seconds.
HUNGRY_WORKER = """
import json, os, pathlib, time, torch, torch.distributed as dist
from torch.utils.data import DataLoader, Dataset
dist.init_process_group("gloo")
kept = []
events = pathlib.Path(os.environ["ALLRANKS_RUN_DIR"], "attempts", "0", "rank-1.jsonl")
def is_known():
    lines = events.read_text().split("\\n")[:-1] if events.exists() else []
    return any(os.getpid() in json.loads(line).get("processes", ()) for line in lines)
class Data(Dataset):
    def __len__(self):
        return 10000
    def __getitem__(self, index):
        if os.environ["RANK"] == "1" and (kept or is_known()):
            kept.append(torch.ones(6 << 20))
        return torch.zeros(8)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x in DataLoader(Data(), num_workers=1, worker_init_fn=lambda _: ASKS):
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.02)
"""


def test_a_loader_worker_that_eats_the_memory(allranks: Allranks, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(HUNGRY_WORKER.replace("ASKS", ASK_TO_BE_KILLED))
    with memory_cgroup(LIMIT_BYTES) as folder:
        enter = inside(folder, *RUN)
        done = subprocess.run(enter, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert kills_in(folder) == 1, done.stderr
    assert done.returncode == 1
    for env in ({}, without_dmesg(tmp_path)):
        first, *others = diagnosis(allranks, "last", env=env)
        assert (first["cause"], first["rank"], others) == ("host-out-of-memory", 1, [])
        assert first["confidence"] == "high"


# Rank 1 ends itself, once somebody else was killed for memory.
BEREFT = """
import os, pathlib, signal, time
pathlib.Path("up").touch()
while not pathlib.Path("done").exists():
    time.sleep(0.05)
time.sleep(0.2)
if os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(20)
"""
HOG = f"{ASK_TO_BE_KILLED}\nkept = []\nwhile True: kept.append(bytearray(1 << 24))"


def test_a_rank_killed_beside_somebody_who_ate_the_memory(
    allranks: Allranks, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(BEREFT)
    if subprocess.run(["dmesg"], capture_output=True, check=False).returncode:
        unavailable("reading the kernel's messages takes root")
    with memory_cgroup(LIMIT_BYTES) as folder:
        run = subprocess.Popen(inside(folder, *RUN), cwd=tmp_path, stderr=subprocess.PIPE)
        try:
            deadline = time.monotonic() + 120
            while not (tmp_path / "up").exists():
                assert run.poll() is None and time.monotonic() < deadline
                time.sleep(0.05)
            hog = inside(folder, sys.executable, "-c", HOG)
            assert subprocess.run(hog, check=False).returncode == -9
            (tmp_path / "done").touch()
            _, said = run.communicate(timeout=120)
        finally:
            run.kill()
            run.wait()
        assert kills_in(folder) == 1
    assert b"rank 1 was killed by SIGKILL" in said
    first, *others = diagnosis(allranks, "last")
    assert (first["cause"], first["rank"], others) == ("rank-died", 1, [])


@pytest.mark.parametrize("layout", ["1x1", pytest.param("1x2", marks=pytest.mark.soak)])
def test_a_disk_that_a_task_fills_with_its_checkpoints(
    allranks: Allranks, tmp_path: Path, layout: str
) -> None:
    with small_disk(tmp_path / "disk", "176k") as disk:
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
    assert line["text"].startswith("step ") and "loss is nan" in line["text"]
    assert "optimizer.lr=1e+29" in first["fix"]


# Its rank 1 meets a sample without a number, between two steps whose loss is logged.
ONE_BAD = """
import os
from dataclasses import dataclass
from allranks.tasks.spiral import Spiral

calls = 0

@dataclass
class OneBad(Spiral):
    def loss(self, outputs, targets):
        global calls
        calls += outputs.requires_grad
        bad = calls == 13 and outputs.requires_grad and os.environ["RANK"] == "1"
        return super().loss(outputs * float("nan") if bad else outputs, targets)
"""


def test_the_rank_whose_loss_was_no_number_first(allranks: Allranks, tmp_path: Path) -> None:
    (tmp_path / "one_bad.py").write_text(ONE_BAD)
    task = ["task=one_bad:OneBad", "steps=40", "log_every=10", "compile=false"]
    done = allranks("run", *task, "--layout", "1x2", "--oversubscribe", "--json")
    assert done.returncode == 0, done.stderr
    first, *_ = diagnosis(allranks, "last")
    assert (first["cause"], first["rank"]) == ("nan-loss", 1)
    run = find_run(tmp_path / "runs", "last")
    told = json.loads(done.stdout)
    assert told["metrics"]["loss"] is None
    since = f"loss nan since step {told['nonfinite_since']}: allranks doctor {run.name}"
    assert since in done.stderr
    events = [list(read_events(run.events(0, rank))) for rank in range(2)]
    at = [[e["step"] for e in each if e["event"] == "nonfinite"] for each in events]
    step = at[1][0]
    assert told["nonfinite_since"] == step
    assert at == [[step + 1], [step]] and 10 < step < 20  # not one that is logged
    assert f"at step {step}" in first["title"]
    line = first["evidence"][0]
    assert line["file"].endswith("rank-1.jsonl")
    assert f"step {step}: the rank's own loss is nan" in line["text"]
