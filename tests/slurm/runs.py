"""Runs sent to the live cluster, and what became of them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.commandline import run_allranks
from tests.slurm.live import Cluster

from allranks.events import read_events
from allranks.rundir import RunDir

# Real training that hardly needs a CPU, so that several runs do not slow each other down.
SLOW_TASK = """
import time
from dataclasses import dataclass
from allranks.tasks.spiral import Spiral

@dataclass
class Slow(Spiral):
    seconds: float = 0.05

    def loss(self, outputs, targets):
        time.sleep(self.seconds)
        return super().loss(outputs, targets)
"""


@dataclass(slots=True)
class Sent:
    """A run in the cluster's hands."""

    cluster: Cluster
    folder: Path
    run: RunDir
    jobs: list[str]

    def listed(self) -> dict[str, Any]:
        """The run as `allranks ls --json` shows it."""
        printed = json.loads(self.allranks("ls", self.run.name, "--json"))
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
