"""Runs sent to the live cluster, and what became of them."""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.commandline import ask_allranks, run_allranks
from tests.slurm.live import Cluster

from allranks.run import claims
from allranks.run.events import read_events
from allranks.run.folder import RunDir

# Real training that hardly needs a CPU, so that several runs do not slow each other down.
SLOW_TASK = """
import time
from dataclasses import dataclass
import torch
from allranks.tasks.language import Language
from allranks.tasks.spiral import Spiral

@dataclass
class Slowly:
    seconds: float = 0.05

    def loss(self, outputs, targets):
        if torch.is_grad_enabled():  # evaluation is quick
            time.sleep(self.seconds)
        return super().loss(outputs, targets)

@dataclass
class Slow(Slowly, Spiral):
    pass

@dataclass
class SlowLanguage(Slowly, Language):
    pass
"""

STEP = "^[^ ]*python[^ ]* -m allranks.launch.backends.slurm.step"  # srun has these words, too
# What is said of kills, by what `kill` is told to kill.
LOST = {
    "srun": "srun was killed by SIGKILL on node",
    "job": "the job's first process was killed on node",
    "launcher": "the launcher on node. was killed, with rank",
}


@dataclass(slots=True)
class Sent:
    """A run in the cluster's hands."""

    cluster: Cluster
    folder: Path
    run: RunDir
    jobs: list[str]

    def listed(self) -> dict[str, Any]:
        """The run as `allranks ls --json` shows it."""
        printed = json.loads(ask_allranks("ls", self.run.name, "--json", cwd=self.folder))
        assert len(printed) == 1
        return dict(printed[0])

    def allranks(self, *args: str) -> str:
        done = run_allranks(*args, cwd=self.folder)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def wait_for_step(self, step: int, seconds: float = 150) -> None:
        self.cluster.wait(lambda: self.last_step() >= step, seconds, f"step {step} of {self.run}")

    def last_step(self) -> int:
        return max(self.losses(), default=0)

    def wait_for_end(self, seconds: float) -> dict[str, Any]:
        """Wait until it neither waits nor runs; its line in the list."""

        def has_ended() -> dict[str, Any] | None:
            line = self.listed()
            return None if line["state"] in ("queued", "running") else line

        return self.cluster.wait(has_ended, seconds, f"the end of {self.run.name}") or {}

    def losses(self) -> dict[int, float]:
        """Loss by step, as rank 0 of all attempts wrote it; a step that was redone counts last."""
        return {
            event["step"]: event["loss"]
            for attempt in self.run.attempts()
            for event in read_events(self.run.events(attempt, 0))
            if event["event"] == "step" and "loss" in event
        }

    def log(self) -> str:
        logs = sorted(self.run.path.glob("slurm-*.log"), key=lambda log: int(log.stem[6:]))
        return "".join(log.read_text() for log in logs)


def send(cluster: Cluster, folder: Path, *args: str) -> Sent:
    """`allranks submit ARGS` in a folder."""
    (folder / "slow.py").write_text(SLOW_TASK)
    done = run_allranks("submit", "--json", *args, cwd=folder)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told.keys() == {"run", "run_dir", "jobs"}
    return Sent(cluster, folder, RunDir(Path(told["run_dir"])), told["jobs"])


def steps_of_attempts(sent: Sent) -> list[list[int]]:
    return [
        [e["step"] for e in read_events(sent.run.events(attempt, 0)) if e["event"] == "step"]
        for attempt in sent.run.attempts()
    ]


def kill(sent: Sent, what: str, chance: random.Random) -> None:
    """Kill srun, the job's first process, or the launcher of a node."""
    cluster, holder = sent.cluster, claims.newest(sent.run.claims)
    assert holder is not None
    node = holder.nodes[0] if what != "launcher" else chance.choice(holder.nodes)
    found = [str(holder.pid)] if what == "job" else []
    if what == "srun":  # its second process, which would end the step, too or not
        found = cluster.exec(node, "pgrep", "-x", "srun").stdout.split()[: chance.choice([1, 2])]
    if what == "launcher":
        found = cluster.exec(node, "pgrep", "-f", STEP).stdout.split()[:1]
    assert found
    cluster.exec(node, "kill", "-9", *found)


def check_words(sent: Sent, words: str) -> None:
    """What was killed is named wherever one looks."""
    assert re.search(rf"allranks: attempt 0 was lost: {words}", sent.log()), sent.log()
    done = run_allranks("doctor", sent.run.name, "--json", cwd=sent.folder)
    assert "launcher-killed" in [one["cause"] for one in json.loads(done.stdout)], done.stdout
