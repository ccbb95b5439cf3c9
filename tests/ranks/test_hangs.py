"""Ranks that hang for real: the one that did not come is named, with the line it is in."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.commandline import run_allranks
from tests.forked import EXECUTED, Forked, run_forked

from allranks.doctor.finding import Finding
from allranks.doctor.hang import hang, hung
from allranks.run import stacks
from allranks.run.folder import RunDir, list_runs

pytestmark = pytest.mark.ranks

SCRIPT = """
import sys, time, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def gone_astray():
    while True:
        time.sleep(1000)

for step in range(100000):
    if step == 20 and dist.get_rank() == 1:
        gone_astray()
    time.sleep(0.01)
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
LINE = 1 + SCRIPT[: SCRIPT.index("time.sleep(1000)")].count("\n")


@contextmanager
def running(tmp_path: Path, *options: str) -> Iterator[Forked]:
    """`allranks run` of the script that hangs after 20 steps."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    words = ["run", "--layout", "1x2", "--json", *options, "--", sys.executable, str(script)]
    process = Forked(words, tmp_path, EXECUTED)  # their stacks are asked for
    try:
        yield process
    finally:
        for _ in range(2):  # at once
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                time.sleep(0.3)
        process.communicate(timeout=60)


def wait_for_hang(tmp_path: Path) -> RunDir:
    """Until both ranks have made their last step, and have shown twice that they stand still."""
    until = time.monotonic() + 240
    while time.monotonic() < until:
        for run in list_runs(tmp_path / "runs"):
            texts = [p.read_text() for p in run.path.glob("attempts/0/rank-*.jsonl")]
            if len(texts) == 2 and all(text.count('"step":20,"doing"') > 1 for text in texts):
                return run
        time.sleep(0.1)
    raise AssertionError("the ranks never came to the place where they hang")


@contextmanager
def frozen(process: Forked) -> Iterator[None]:
    """The launcher stands still, and so does its patience: looking may take as long as it takes."""
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)


def test_the_rank_that_did_not_come_is_named_and_the_run_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(tmp_path, "--stall-timeout", "20s") as process:
        run = wait_for_hang(tmp_path)
        with frozen(process):
            assert hang(run, after=3600) == []  # it may be patient
            if stacks.find_py_spy() is not None:
                check_finding(asked(run))
            monkeypatch.setattr(stacks, "find_py_spy", lambda: None)
            check_finding(asked(run))
            # They were asked, not ended.
            assert len(stacks.processes_of(run, 0)) == 2
        out, errors = process.communicate(timeout=120)
    assert process.wait() == 1, errors
    assert "Current thread" not in errors  # the stacks are in the logs
    error = json.loads(out)["error"]
    words = f"is at train.py:{LINE} in gone_astray; rank 0 waits for it in backward"
    assert error["what"] == f"rank 1: made no step for 20s, {words}"
    assert f"rank 1 {words}" in errors  # it was said before, by itself
    assert run.state() == "failed" and not stacks.processes_of(run, 0)
    for rank, word in enumerate(("backward", "gone_astray")):
        after = run.log(0, rank).read_text().partition(stacks.FOLLOW)[2]
        assert word in after
    (found,) = hung(run)
    check_finding(found)
    told = run_allranks("doctor", run.path, "--json", cwd=tmp_path)
    assert told.returncode == 0, told.stderr
    (first, *_) = json.loads(told.stdout)
    assert (first["cause"], first["rank"]) == ("rank-missing-from-collective", 1)


def asked(run: RunDir) -> Finding:
    started = time.monotonic()
    (found,) = hang(run, after=1.0)
    assert time.monotonic() - started < 20  # each way of asking has its limit
    return found


def check_finding(found: Finding) -> None:
    assert (found.cause, found.rank) == ("rank-missing-from-collective", 1)
    # Sure only after a minute, or when the run was ended for it.
    assert found.confidence in ("medium", "high") and found.node == os.uname().nodename
    assert f"train.py:{LINE} in gone_astray" in found.title
    first, second, *rest = found.evidence
    assert (Path(first.file).name, first.line) == ("train.py", LINE)
    assert "time.sleep(1000)" in first.text
    assert "collectives" in second.text and rest


def test_a_hang_is_told_while_it_lasts_and_the_logs_are_left_alone(tmp_path: Path) -> None:
    """Without py-spy, which not everybody has."""
    script = tmp_path / "train.py"
    naps = SCRIPT.replace("while True:", "while not os.path.exists('wake'):").replace(
        "1000)", "0.2)"
    )
    script.write_text("import os" + naps.replace("range(100000)", "range(400)"))
    output, wake = tmp_path / "output", tmp_path / "wake"
    code = (
        "from allranks.cli.main import main; from allranks.run import stacks; "
        "stacks.find_py_spy = lambda: None; "
    )
    words = [sys.executable, str(script)]
    with output.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-c", f"{code} main()", *["run", "--layout", "1x2", "--"], *words],
            cwd=tmp_path,
            stdout=file,
            stderr=file,
        )
    try:
        place = f"rank 1 is at train.py:{LINE} in gone_astray; rank 0 waits for it in backward"
        wait_for(output, place)
        (run,) = list_runs(tmp_path / "runs")
        assert all(run.log(0, rank).read_text() == "" for rank in (0, 1))
        assert "moves on" not in output.read_text()
        wake.touch()
        wait_for(output, "note: makes progress again after ")
        assert process.wait(timeout=120) == 0
    finally:
        process.kill()
        process.wait()


def wait_for(path: Path, words: str) -> None:
    until = time.monotonic() + 240
    while words not in path.read_text():
        assert time.monotonic() < until, path.read_text()
        time.sleep(0.1)


TASK = """
import os, time, torch
from allranks.tasks import Task
from torch.utils.data import Dataset

class Points(Dataset):
    seen = 0
    def __len__(self):
        return 8000
    def __getitem__(self, index):
        self.seen += 1
        while self.seen >= 1000 and os.environ["RANK"] == "1" and not os.path.exists("wake"):
            time.sleep(2)
        return torch.tensor([index % 7 - 3.0]), torch.tensor([index % 2 - 0.5])

class Nap(Task):
    defaults = {"batch_size": 8, "epochs": 1}
    num_samples = 8000
    def model(self):
        return torch.nn.Linear(1, 1)
    def datasets(self):
        return {"train": Points()}
    def loss(self, outputs, targets):
        return (outputs - targets).square().mean(1)
"""


def test_a_hang_is_ended_at_its_checkpoint_and_goes_on_from_there(tmp_path: Path) -> None:
    (tmp_path / "nap.py").write_text(TASK)
    keys = ("task=nap:Nap", "data.num_workers=0", "checkpoint.every=50")
    ended = run_forked(
        "run", *keys, "--layout", "1x2", "--stall-timeout", "10s", "--json", cwd=tmp_path
    )
    assert ended.returncode == 75, ended.stderr
    result = json.loads(ended.stdout)
    assert result["state"] == "stopped"
    assert result["reason"].startswith("rank 1: made no step for 10s, is at nap.py:13 in ")
    assert "continue with: allranks resume" in ended.stderr
    (found,) = hung(RunDir(Path(result["run_dir"])))
    assert (found.cause, found.rank) == ("rank-missing-from-collective", 1)
    (tmp_path / "wake").touch()
    done = run_forked("run", "--resume", "last", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["steps"] == 1000 and "resuming after step" in done.stderr
