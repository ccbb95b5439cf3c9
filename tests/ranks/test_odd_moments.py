"""What goes wrong once in a thousand runs, made to happen."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.commandline import Allranks
from tests.faults import start
from tests.forked import EXECUTED
from tests.slurm.runs import SLOW_TASK

from allranks.run.commits import commits
from allranks.run.events import read_events
from allranks.run.folder import RunDir, list_runs

pytestmark = pytest.mark.ranks

UNUSED = """
from dataclasses import dataclass
from torch import nn
from allranks.tasks.spiral import Spiral

class Net(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner, self.spare = inner, nn.Linear(4, 4)

    def forward(self, inputs):
        return self.inner(inputs)

@dataclass
class Spare(Spiral):
    def model(self):
        return Net(super().model())
"""


def only_run(folder: Path) -> RunDir:
    (run,) = list_runs(folder / "runs")
    return run


def test_of_two_resumes_at_the_same_instant_one_goes_on(tmp_path: Path, allranks: Allranks) -> None:
    live = start(tmp_path, "steps=400", "checkpoint.every=50")
    live.wait_until(lambda: bool(live.ranks()))
    live.process.send_signal(signal.SIGTERM)
    assert live.wait()[0] == 75
    both = [start(tmp_path, "--resume", "last") for _ in range(2)]
    codes = sorted(one.wait()[0] for one in both)
    assert codes in ([0, 2], [0, 0])  # the second may come when the first has finished
    run = only_run(tmp_path)
    assert run.state() == "finished" and run.attempts() == [0, 1]
    if codes == [0, 2]:
        assert "is live" in (tmp_path / "stderr.txt").read_text()


def test_a_reader_that_goes_away_does_not_end_the_training(tmp_path: Path) -> None:
    command = f"{sys.executable} -m allranks run steps=300 | head -n 1"
    done = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=200
    )
    assert done.stdout.count("\n") == 1 and "Traceback" not in done.stderr
    run = only_run(tmp_path)
    assert run.state() == "finished"
    assert (run.end(0, 0) or {})["step"] == 300


def test_a_terminal_that_is_closed_stops_the_run_at_a_checkpoint(tmp_path: Path) -> None:
    """Its processes get SIGHUP, and can write there no more."""
    master, slave = os.openpty()
    # `setsid --ctty`: the terminal is the run's, as of a shell in a window.
    command = ["setsid", "--ctty", sys.executable, "-m", "allranks", "run", "epochs=500"]
    process = subprocess.Popen(command, cwd=tmp_path, stdin=slave, stdout=slave, stderr=slave)
    os.close(slave)
    shown = b""
    while b"it/s" not in shown:
        shown += os.read(master, 4096)
    os.close(master)
    assert process.wait(200) == 75
    run = only_run(tmp_path)
    assert run.state() == "stopped"
    assert commits(run.checkpoints)[0].step == (run.end(0, 0) or {})["step"] > 0


def test_parameters_that_no_loss_depends_on_do_not_stop_the_ranks(
    tmp_path: Path, allranks: Allranks
) -> None:
    (tmp_path / "spare.py").write_text(UNUSED)
    done = allranks("run", "task=spare:Spare", "steps=30", "--layout", "1x2")
    assert done.returncode == 0, done.stderr


@pytest.mark.soak
def test_another_optimizer_goes_on_where_it_is_forced(allranks: Allranks) -> None:
    assert allranks("run", "steps=20").returncode == 0
    change = ["--resume", "last", "optimizer.name=sgd", "steps=40"]
    refused = allranks("run", *change)
    assert refused.returncode == 2 and "--force" in refused.stderr
    forced = allranks("run", *change, "--force")
    assert forced.returncode == 0, forced.stderr


@pytest.mark.parametrize("layout", [pytest.param("1x1", marks=pytest.mark.soak), "1x2"])
def test_a_checkpoint_by_the_clock_is_not_saved_twice(
    layout: str, tmp_path: Path, allranks: Allranks
) -> None:
    (tmp_path / "slow.py").write_text(SLOW_TASK)
    words = ["task=slow:Slow", "steps=100", "checkpoint.every=1s", "--layout", layout]
    done = allranks("run", *words)
    assert done.returncode == 0, done.stderr
    events = list(read_events(only_run(tmp_path).events(0, 0)))
    saved = [event for event in events if event["event"] == "checkpoint"]
    begun = [event["t"] - event["seconds"] for event in saved[:-1]]  # the writing takes its time
    apart = [after - before for before, after in itertools.pairwise(begun)]
    assert saved[-1]["step"] == 100 and len(saved) > 2
    # Ranks agree every third of a second: what is due twice would be saved that soon.
    assert all(seconds > 0.5 for seconds in apart), apart


def test_a_script_that_restarts_is_told_where_to_go_on(tmp_path: Path, allranks: Allranks) -> None:
    (tmp_path / "train.py").write_text(
        "import pathlib, sys\n"
        "print('arguments', sys.argv[1:])\n"
        "last = pathlib.Path('last.ckpt')\n"
        "first = not last.exists()\n"
        "last.touch()\n"
        "sys.exit(int(first))\n"
    )
    settings = ["last=last.ckpt", "resume=--from {last}", "--max-restarts", "1"]
    done = allranks("run", *settings, "--", "python", "train.py", env=EXECUTED)
    assert done.returncode == 0, done.stderr
    run = only_run(tmp_path)
    assert "arguments []" in run.log(0, 0).read_text()
    assert "arguments ['--from', 'last.ckpt']" in run.log(1, 0).read_text()
    said = " ".join(done.stdout.split())
    assert "note: rank 0 ended with code 1: arguments [] (train.py:6 in <module>): all" in said
    end = run.end(0, 0)
    assert end is not None and (end["state"], end["exit"]) == ("failed", 1)
