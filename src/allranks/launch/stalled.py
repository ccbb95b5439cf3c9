"""Ranks that make no more steps: their stacks go into their logs, and the run ends if it shall."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from allranks import stacks
from allranks.events import read_last_events
from allranks.job import Job
from allranks.job_types import Duration
from allranks.rundir import RunDir
from allranks.stacks import Stack
from allranks.stalls import PROGRESS, Blame, RankState, blame, read_states

LOOK_SECONDS = 5.0
FIRST_STEP_SECONDS = 300.0  # at least, for what comes before: imports, data, compiling
SCRIPT_FIRST_SECONDS = 3600.0  # a script may prepare its data first
LIFE_SECONDS = 60.0  # many times the pause between two heartbeats
GRACE_SECONDS = 5.0  # for the launchers of other nodes, which see the same, to print their stacks
MOST_FRAMES = 30


class StallWatch:
    """The ranks of one node, looked at every few seconds by their events.

    Without `stall_timeout` their stacks are printed once, at half of the job's `timeout`, and
    nothing ends: torch itself ends ranks that wait longer than that for the others.
    """

    def __init__(self, run: RunDir, job: Job, first_rank: int) -> None:
        self.run = run
        self.first_rank = first_rank
        self.ends = job.stall_timeout is not None and os.environ.get("ALLRANKS_PROBE") != "off"
        self._is_script = job.command is not None
        self.limit = float((job.stall_timeout or Duration(job.timeout.seconds // 2 or 1)).seconds)
        self.pause = min(LOOK_SECONDS, self.limit / 4)
        self._looked = self._moved = time.monotonic()
        self._newest: dict[int, tuple[int, float]] = {}  # rank -> attempt, time of its last move
        self._stepped: int | None = None  # the attempt that has made a step
        self._printed: float | None = None  # when the stacks of this stall were
        self._states: list[RankState] = []  # at that time
        self._ends: dict[int, dict[str, Any]] = {}

    def look(self, attempt: int, processes: Sequence[int]) -> bool:
        """Whether these ranks are to be ended now. Cheap: most calls only read a clock."""
        now = time.monotonic()
        if now - self._looked < self.pause or self._ends:
            return False
        # This process was stopped for a while, and so were the ranks: that is not their doing.
        was_away = now - self._looked > 4 * self.pause + 5
        self._looked = now
        if was_away or not processes or self._has_moved(attempt, len(processes)):
            self._moved, self._printed = now, None
            return False
        limit = self.limit
        if self._stepped != attempt:
            limit = max(limit, SCRIPT_FIRST_SECONDS if self._is_script else FIRST_STEP_SECONDS)
        if now - self._moved < limit:
            return False
        if self._printed is None:
            self._printed = now
            self._states = self._print_stacks(attempt, processes, Duration(int(limit)))
        has_others = len(self._states) > len(processes)
        # A probe that was switched off gives no sign of life: it cannot tell that steps are made.
        lives = time.time() - max((state.heard for state in self._states), default=0.0)
        if self._stepped == attempt and lives > LIFE_SECONDS:
            return False
        if not self.ends or (has_others and now - self._printed < GRACE_SECONDS):
            return False
        found = blame(self._states)
        self._ends = ends_of(self._states, found, Duration(int(limit)), self.run.name)
        return True

    def end_of(self, rank: int) -> dict[str, Any] | None:
        """The end event of a rank that was ended here."""
        return self._ends.get(rank)

    def _has_moved(self, attempt: int, num_ranks: int) -> bool:
        newest = dict(self._newest)
        for rank in range(self.first_rank, self.first_rank + num_ranks):
            events = read_last_events(self.run.events(attempt, rank))
            times = [float(event["t"]) for event in events if event["event"] in PROGRESS]
            if any(event["event"] == "step" for event in events):
                self._stepped = attempt
            if times:  # a long silence fills the end of the file with signs of life
                newest[rank] = (attempt, max(times))
        has_moved = newest != self._newest
        self._newest = newest
        return has_moved

    def _print_stacks(
        self, attempt: int, processes: Sequence[int], limit: Duration
    ) -> list[RankState]:
        here = dict(enumerate(processes, start=self.first_rank))
        logs = {rank: self.run.log(attempt, rank) for rank in here}
        for log in logs.values():
            now = datetime.now(UTC).isoformat(timespec="milliseconds")
            _say(log, f"{now}: no step for {limit}{stacks.FOLLOW}")
        found = stacks.by_signal(here, logs)
        rest = {rank: process for rank, process in here.items() if rank not in found}
        for rank, stack in stacks.take(rest, {}).items():
            found[rank] = stack
            _say(logs[rank], frames_in_words(stack))
        states = read_states(self.run, attempt)
        return [replace(state, stack=found.get(state.rank)) for state in states]


def ends_of(
    states: Sequence[RankState], found: Blame | None, limit: Duration, run_name: str
) -> dict[int, dict[str, Any]]:
    """The end events of a run that is ended for making no steps, by rank."""
    culprits = found.ranks if found is not None else ()
    ends: dict[int, dict[str, Any]] = {}
    for state in states:
        is_echo = bool(culprits) and state.rank not in culprits
        if is_echo:
            ranks = ", ".join(map(str, culprits))
            what, fix = f"ended because rank {ranks} kept the others waiting for {limit}", ""
        else:
            where = state.stack.place if state.stack is not None else None
            place = f" at {where}" if where is not None else ""
            reason = f"it {found.why}" if found is not None else "no rank is told from the others"
            what = f"made no step for {limit}{place}; {reason}"
            fix = f"allranks doctor {run_name}: it reads the stacks at the end of the ranks' logs"
        ends[state.rank] = {
            "state": "failed",
            "exit": None if is_echo else 1,
            "error": {"what": what, "fix": fix, "echo": is_echo, "stall": True},
        }
    return ends


def frames_in_words(stack: Stack) -> str:
    """As faulthandler prints them, which others may know to read."""
    lines = [
        f'  File "{frame.file}", line {frame.line} in {frame.function}'
        for frame in stack.frames[:MOST_FRAMES]
    ]
    return "\n".join([f"stack of process {stack.process} (most recent call first):", *lines])


def _say(log: Path, text: str) -> None:
    with log.open("a") as file:
        file.write(f"allranks: {text}\n")
