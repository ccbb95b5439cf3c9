"""SLURM's commands without SLURM: the jobs that they know, what they were asked, what they say."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from allranks.run import claims
from allranks.run.folder import RunDir
from allranks.slurm import commands
from allranks.slurm.commands import SlurmError

QUEUED = ("PENDING", "RUNNING", "COMPLETING", "RESV_DEL_HOLD")
QOS = SlurmError("sbatch", "sbatch: error: Batch job submission failed: Invalid qos specification")
DENIED = SlurmError("scancel", "scancel: error: Kill job error on job id 1: Permission denied")
SENDING = "sbatch --parsable"
Answer = str | SlurmError | None


def silence(program: str) -> SlurmError:
    return SlurmError(program, "Unable to contact slurm controller (connect failure)")


class FakeSlurm:
    """In place of `commands.call`. `said` comes first: answers by words of the command.

    A list of them is used up one by one; None stands for what follows from the jobs.
    """

    def __init__(self, **said: Answer) -> None:
        self.calls: list[tuple[str, ...]] = []
        self.said: dict[str, Answer | list[Answer]] = {**said}
        self.jobs: dict[str, dict[str, str]] = {}
        self.starts: dict[str, str] = {}  # when a job of so many nodes would start
        self.winners: dict[str, str] = {}  # of a job that is sent: the one that starts meanwhile
        self.loses_answers = False  # jobs are taken, but sbatch is not told
        self._locks = ExitStack()

    def install(self, patch: Any) -> FakeSlurm:
        """With a pytest.MonkeyPatch, or whatever has its `setattr`."""
        patch.setattr(commands, "call", self)
        patch.setattr(commands, "is_here", lambda: True)
        return self

    def __call__(self, *words: str, **options: Any) -> str:
        self.calls.append(words)
        line = " ".join(words)
        found: Answer = None
        if known := [part for part in self.said if part in line]:
            said = self.said[max(known, key=len)]
            found = (said.pop(0) if said else None) if isinstance(said, list) else said
        if isinstance(found, SlurmError):
            raise SlurmError(words[0], found.words)  # a new one: callers add to it
        answer = getattr(self, f"_{words[0]}", lambda *_: "")
        return found if found is not None else str(answer(*words[1:]))

    def of(self, *programs: str) -> list[tuple[str, ...]]:
        return [words for words in self.calls if words[0] in programs]

    def change(self, job: str, **values: str) -> None:
        self.jobs[job] |= values

    def states(self) -> dict[str, str]:
        return {job: row["state"] for job, row in self.jobs.items()}

    def script(self, job: str) -> str:
        return self.jobs[job]["script"]

    def hold(self, run: RunDir, number: int) -> None:
        """As a job does that has the claim and lives."""
        self._locks.enter_context(claims.locked(run.claims, number))

    def let_go(self) -> None:
        self._locks.close()

    def _queued(self) -> list[str]:
        return [job for job, row in self.jobs.items() if row["state"] in QUEUED]

    def _sbatch(self, *words: str) -> str:
        if words == ("--version",):
            return "slurm-wlm 22.05.8"
        text = Path(words[-1]).read_text()
        if words[0] == "--test-only":
            nodes = text.partition("--nodes=")[2].split()[0]
            if nodes not in self.starts:
                raise SlurmError("sbatch", "allocation failure")
            return f"sbatch: Job 9 to start at {self.starts[nodes]} using 4"
        job = str(100 + len(self.jobs))
        self.jobs[job] = {"state": "PENDING", "reason": "Priority", "script": text}
        self.jobs[job]["path"] = words[-1]
        if winner := self.winners.get(job):
            folder = Path(words[-1]).parent / "claims"
            folder.mkdir(exist_ok=True)
            claim: dict[str, Any] = {"number": 0, "job": winner, "restart": 0, "layout": ""}
            claim |= {"nodes": [], "host": "n", "pid": 1, "time": 0}
            (folder / "0").write_text(json.dumps(claim))
            self.change(winner, state="RUNNING")
        if self.loses_answers:
            raise SlurmError("sbatch", "Batch job submission failed: Socket timed out")
        return job

    def _squeue(self, *words: str) -> str:
        rows = [(job, self.jobs[job]) for job in self._queued()]
        if words[-1] == "%i|%o":
            return "\n".join(f"{job}|{row['path']}" for job, row in rows)
        return "\n".join(
            f"{job}|{row['state']}|{row['reason']}|{row.get('start', 'N/A')}|{row.get('nodes', '')}"
            for job, row in rows
        )

    def _sacct(self, *words: str) -> str:
        asked: Sequence[str] = words[words.index("-j") + 1].split(",")
        return "\n".join(
            f"{job}|{self.jobs[job]['state']}|{self.jobs[job].get('code', '0:0')}|n1"
            for job in asked
            if job in self.jobs and job not in self._queued()
        )

    def _scancel(self, *words: str) -> str:
        only_waiting = "--state=PENDING" in words
        for job in [word for word in words if word in self.jobs and "--batch" not in words]:
            if self.jobs[job]["state"] == "PENDING" or not only_waiting:
                self.jobs[job]["state"] = "CANCELLED by 1000"
        return ""
