"""Notices ranks that make no more steps: says who is where, and ends the run if asked to."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from allranks.job.job import Job
from allranks.job.values import Duration
from allranks.run import stacks
from allranks.run.events import read_last_events
from allranks.run.folder import RunDir
from allranks.run.record import RankRecord
from allranks.run.stacks import Stack
from allranks.run.stalls import (
    LEAST_SECONDS,
    Blame,
    RankState,
    blame,
    is_stalled,
    patience_to_end,
    patience_with,
    read_states,
    silence,
    who_is_where,
    with_stacks,
)
from allranks.show.numbers import duration, ranks_in_words

LOOK_SECONDS, SOON_SECONDS = 5.0, 1.0  # the second while something is shown that may be over
LIFE_SECONDS = 60.0  # many times the pause between two heartbeats
GRACE_SECONDS = 5.0  # for the launchers of other nodes, which see the same, to print their stacks
MOST_FRAMES = 30
AGAIN_SECONDS, SELDOM_SECONDS = 10.0, 120.0  # between two looks at the stacks: ever longer


class StallWatch:
    """The ranks of one node, looked at every few seconds by their events.

    Ranks that make no step for longer than is usual for the run are described by `line`. Without
    `stall_timeout` their stacks are printed once, at half of the job's `timeout`, and nothing ends:
    torch itself ends ranks that wait longer than that for the others.
    """

    def __init__(
        self,
        run: RunDir,
        job: Job,
        first_rank: int,
        *,
        makes_steps: bool = True,
        has_checkpoint: Callable[[], bool] = lambda: False,
    ) -> None:
        self.run = run
        self.first_rank = first_rank
        probe = {**os.environ, **job.env}.get("ALLRANKS_PROBE")  # as the ranks have it
        self.ends = job.stall_timeout is not None and probe != "off"
        self._makes_steps = makes_steps
        self._has_checkpoint = has_checkpoint
        self._is_script = job.command is not None
        self.limit = float((job.stall_timeout or Duration(job.timeout.seconds // 2 or 1)).seconds)
        self._looked = self._moved = time.monotonic()
        self._newest: dict[int, tuple[int, float]] = {}  # rank -> attempt, time of its last move
        self._stepped: int | None = None  # the attempt that has made a step
        self._printed: float | None = None  # when the stacks of this stall were
        self._states: list[RankState] = []  # at that time
        self._ends: dict[int, dict[str, Any]] = {}
        self._said: tuple[float, str] | None = None  # when the last step was, and who is where
        self._due, self._again = 0.0, AGAIN_SECONDS  # when to look at the stacks next, and then
        self._thread: threading.Thread | None = None
        self._shall_end = False

    @property
    def pause(self) -> float:
        """Seconds between two looks."""
        return min(LOOK_SECONDS if self._said is None else SOON_SECONDS, self.limit / 4)

    def line(self) -> tuple[str, float] | None:
        """What to say about stuck ranks, and how long they have been stuck, in seconds."""
        if (said := self._said) is None:
            return None
        seconds = time.monotonic() - said[0]
        begin = "no step for" if self._stepped is not None else "no first step after"
        return f"{begin} {duration(seconds, whole=True)}: {said[1]}", seconds

    def check_beside(self, attempt: int, processes: Sequence[int], *, may_end: bool = True) -> bool:
        """`check` in a separate thread, so that a disk that does not answer holds nobody up."""
        is_checking = self._thread is not None and self._thread.is_alive()
        if not is_checking and time.monotonic() - self._looked >= self.pause:

            def check() -> None:
                with suppress(Exception):  # what cannot be read now is read the next time
                    if self.check(attempt, processes, may_end=may_end):
                        self._shall_end = True

            self._thread = threading.Thread(target=check, name="stalled", daemon=True)
            self._thread.start()
        return may_end and self._shall_end

    def check(self, attempt: int, processes: Sequence[int], *, may_end: bool = True) -> bool:
        """Whether to end these ranks now. Cheap: most calls only read a clock."""
        now = time.monotonic()
        if now - self._looked < self.pause or self._ends:
            return False
        # This process was stopped for a while, and so were the ranks: that is not their doing.
        was_away = now - self._looked > 4 * self.pause + 5
        self._looked = now
        try:
            if was_away or not processes:
                self._moved, self._printed = now, None
                return False
            if self._has_moved(attempt, len(processes)):
                self._moved, self._printed = now, None
                self._said, self._due, self._again = None, 0.0, AGAIN_SECONDS
                return False
            if self._makes_steps and now >= max(self._due, self._moved + LEAST_SECONDS):
                self._find_words(now, attempt, processes)
            return may_end and self._is_over(now, attempt, processes)
        finally:
            self._looked = time.monotonic()  # stacks may take as long as they like

    def _is_over(self, now: float, attempt: int, processes: Sequence[int]) -> bool:
        has_stepped = self._stepped == attempt
        limit = patience_to_end(self.limit, has_stepped=has_stepped, is_script=self._is_script)
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
        self._ends = ends_of(
            self._states,
            blame(self._states),
            Duration(int(limit)),
            self.run,
            can_go_on=self._has_checkpoint(),
        )
        return True

    def _find_words(self, now: float, attempt: int, processes: Sequence[int]) -> None:
        """Describe who is where, if a step takes longer than is usual for the run."""
        states = read_states(self.run, attempt)
        usual, seconds = patience_with(states), silence(states, time.time())
        if seconds < usual or any(state.ended == "failed" for state in states):
            self._due = now + max(usual - seconds, self.pause)
            return
        here = dict(enumerate(processes, start=self.first_rank))
        # The end of a rank that leaves early is written with that of the others.
        gone = {rank for rank, process in here.items() if stacks.is_gone(process)}
        states = [
            replace(state, ended="finished") if state.rank in gone else state
            for state in with_stacks(states, here)
        ]
        found = blame(states)
        if found is None and self._stepped != attempt:
            # A rank that still prints is preparing something: it may never make a step at all.
            logs = (self.run.log(attempt, state.rank) for state in states)
            written = max((log.stat().st_mtime for log in logs if log.exists()), default=0.0)
            seconds = min(seconds, time.time() - written)
        if is_stalled(states, found, seconds):
            self._said = (now - seconds, who_is_where(states, found))
            self._due, self._again = now + self._again, min(2 * self._again, SELDOM_SECONDS)
        else:
            self._said, self._due = None, now + AGAIN_SECONDS

    def end_of(self, rank: int) -> dict[str, Any] | None:
        """The end event of a rank that was ended here."""
        return self._ends.get(rank)

    def _has_moved(self, attempt: int, num_ranks: int) -> bool:
        newest = dict(self._newest)
        for rank in range(self.first_rank, self.first_rank + num_ranks):
            record = RankRecord(rank, read_last_events(self.run.events(attempt, rank)))
            if record.steps:
                self._stepped = attempt
            if record.moves:  # a long silence fills the end of the file with signs of life
                newest[rank] = (attempt, max(record.moves))
        has_moved = newest != self._newest
        self._newest = newest
        return has_moved

    def _print_stacks(
        self, attempt: int, processes: Sequence[int], limit: Duration
    ) -> list[RankState]:
        here = dict(enumerate(processes, start=self.first_rank))
        states = with_stacks(read_states(self.run, attempt), here)
        # All threads of a rank, as it writes them itself; else what is known of its first.
        texts = {state.rank: frames_in_words(state.stack) for state in states if state.stack}
        texts |= stacks.dumps({rank: process for rank, process in here.items() if rank in texts})
        for rank in here:
            now = datetime.now(UTC).isoformat(timespec="milliseconds")
            log = self.run.log(attempt, rank)
            begin = f"allranks: {now}: no step for {limit}{stacks.FOLLOW}"
            with log.open("a") as file:
                file.write(f"{begin}\n{texts.get(rank, '')}\n{stacks.END}\n")
        return states


def ends_of(
    states: Sequence[RankState],
    found: Blame | None,
    limit: Duration,
    run: RunDir,
    *,
    can_go_on: bool = False,
) -> dict[int, dict[str, Any]]:
    """The end events, by rank, of a run that is ended because it makes no steps.

    `can_go_on`: it has a checkpoint, so it counts as stopped rather than failed.
    """
    culprits = found.ranks if found is not None else ()
    words = who_is_where(states, found)
    ends: dict[int, dict[str, Any]] = {}
    for state in states:
        is_echo = bool(culprits) and state.rank not in culprits
        if is_echo:
            what, fix = f"ended because {ranks_in_words(culprits)} kept it waiting for {limit}", ""
        else:
            own = words.removeprefix(f"rank {state.rank} ")
            what = f"made no step for {limit}" + (f", {own}" if own != words else f": {words}")
            fix = f"allranks doctor {run.reference} reads the stacks at the end of the logs"
        ends[state.rank] = {
            "state": "stopped" if can_go_on else "failed",
            "exit": None if is_echo or can_go_on else 1,
            "error": {"what": what, "fix": fix, "echo": is_echo, "stall": True},
        }
    return ends


def frames_in_words(stack: Stack) -> str:
    """Frames in the form that faulthandler prints, which other tools can read."""
    lines = [
        f'  File "{frame.file}", line {frame.line} in {frame.function}'
        for frame in stack.frames[:MOST_FRAMES]
    ]
    return "\n".join([f"stack of process {stack.process} (most recent call first):", *lines])
