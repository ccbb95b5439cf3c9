"""Notices a command that starts ranks itself: two processes record the same rank. Ends the run."""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from allranks.job.job import Job
from allranks.launch.launchers import launcher_in_script
from allranks.run.folder import RunDir
from allranks.run.stacks import PROC, rank_of

LOOK_SECONDS = 1.0


class OwnRanksWatch:
    """Looks for the file that a probe leaves when it finds its rank recorded by another process."""

    def __init__(self, run: RunDir, job: Job) -> None:
        self.run = run
        self.job = job
        self._next_look = 0.0

    def look(self, attempt: int) -> bool:
        """Whether the ranks must end now; if so, everything that they started is killed here."""
        now = time.monotonic()
        if now < self._next_look:
            return False
        self._next_look = now + LOOK_SECONDS
        if self._found(attempt) is None:
            return False
        kill_all(self.run, attempt)
        return True

    def end(self, attempt: int) -> dict[str, Any] | None:
        """The end event for every rank of such an attempt; None if nothing is wrong."""
        found = self._found(attempt)
        if found is not None:
            what = f"two processes recorded rank {found['rank']}"
            return end_of_own_ranks(what, self.job)
        layout = self.job.layout
        foreign = [rank for rank in self.run.ranks(attempt) if rank >= layout.ranks]
        if not foreign:
            return None
        what = f"rank {foreign[0]} was recorded, but layout {layout} does not have it"
        return end_of_own_ranks(what, self.job)

    def _found(self, attempt: int) -> dict[str, Any] | None:
        try:
            found: dict[str, Any] = json.loads(self.run.twice(attempt).read_bytes())
        except (OSError, ValueError):
            return None
        return found


def end_of_own_ranks(seen: str, job: Job) -> dict[str, Any]:
    """The end event of a rank whose command has started ranks itself."""
    inside = launcher_in_script(job.argv) if job.command is not None else None
    who = "the command starts ranks itself, in addition to those of allranks"
    fix = (
        "let only allranks start ranks: no torchrun, mpirun or mp.spawn in what it runs. "
        "If you want a second training, start it with ALLRANKS_PROBE=off in its environment"
    )
    if inside is not None:
        where, meant = inside
        who = f"the command starts ranks itself ({meant.launcher} in {where})"
        fix = (
            f"write {' '.join(meant.command)} in {where} in place of {meant.launcher}, "
            f"and start it with --layout {meant.layout(job.layout)}"
        )
    error = {"what": f"{seen}: {who}", "fix": fix, "own_ranks": True}
    return {"state": "failed", "exit": 1, "error": error}


def kill_all(run: RunDir, attempt: int, proc: Path = PROC) -> None:
    """Kill every process of an attempt on this machine: ranks of another launcher outlive it."""
    for folder in proc.glob("[0-9]*"):
        with suppress(OSError, ValueError, LookupError):
            if rank_of(folder / "environ", run.name, attempt) is not None:
                os.kill(int(folder.name), signal.SIGKILL)
