"""The doctor within a SLURM job, and beside one that hangs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.slurm.live import Cluster
from tests.slurm.runs import send

from allranks.doctor.hang import hang
from allranks.launch import backends
from allranks.run import stacks
from allranks.run.events import read_last_events

pytestmark = [pytest.mark.slurm, pytest.mark.soak]

STUCK_TASK = """
import os, time
from dataclasses import dataclass
from allranks.tasks.spiral import Spiral

def gone_astray():
    time.sleep(1000)

@dataclass
class Stuck(Spiral):
    calls: int = 0

    def loss(self, outputs, targets):
        self.calls += 1
        time.sleep(0.02)
        if self.calls == 40 and os.environ["RANK"] == "1":
            gone_astray()
        return super().loss(outputs, targets)
"""
DOCTOR = (sys.executable, "-m", "allranks", "doctor")


def test_the_nodes_of_an_allocation_are_checked_together(cluster: Cluster, tmp_path: Path) -> None:
    done = subprocess.run(
        ["salloc", "--nodes=2", "--ntasks-per-node=1", *DOCTOR, "--json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    checks = {check["check"]: check for check in json.loads(done.stdout)["checks"]}
    assert checks["nodes"]["status"] == "pass", (checks["nodes"], done.stderr)
    assert checks["nodes"]["value"].startswith("2 checked, reach each other")
    assert not list((tmp_path / "runs").glob(".doctor*"))


def test_stacks_of_other_nodes_come_through_srun(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "stuck.py").write_text(STUCK_TASK)
    words = ["task=stuck:Stuck", "steps=3000", "log_every=1"]
    sent = send(cluster, tmp_path, "--layout", "2x1", *words)
    run = sent.run

    def hangs() -> bool:
        beats = [
            event.get("doing_seconds", 0.0)
            for rank in run.ranks(0)
            for event in read_last_events(run.events(0, rank))[-1:]
        ]
        return len(beats) == 2 and min(beats) > 3

    cluster.wait(lambda: run.attempts() and hangs(), 60, "the hang")
    words = ["-m", "allranks.run.stacks", str(run.path), "0"]
    found = stacks.from_lines(backends.named("slurm").on_nodes(run, words, 60.0))
    assert sorted(found) == [0, 1], found
    place = found[1].place
    assert place is not None and (Path(place.file).name, place.function) == (
        "stuck.py",
        "gone_astray",
    )
    (finding,) = hang(run, after=1.0)
    assert finding.rank == 1 and "gone_astray" in finding.title
    assert finding.node == sent.listed()["nodes"][1]
