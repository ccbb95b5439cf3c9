"""The record of a run: the events of its ranks, sorted by kind.

Everything that shows a run (its result, its state, reports, the watcher, the doctor) reads them
here: all of them, or both ends of long files, or as they are written.
"""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from typing import Any

from allranks.run.events import read_events, read_last_events
from allranks.run.folder import HEAD_BYTES, RunDir

Event = dict[str, Any]

LAST_BYTES = 1 << 15
MIN_CLOCK_SECONDS = 20.0  # in less, the steps' own times are more accurate
EARLY_EVENTS = 4000  # of a rank: its first batches and steps
# Events that show progress.
PROGRESS = ("start", "step", "metric", "checkpoint")


class RankRecord:
    """The events of one rank in one attempt, as far as they were read.

    `most`: how many events of each kind are kept; by default all of them.
    """

    def __init__(self, rank: int, events: Iterable[Event] = (), *, most: int | None = None) -> None:
        self.rank = rank
        self.start: Event = {}
        self.end: Event | None = None
        self.window: Event | None = None  # the steps that a benchmark counts
        self.steps: deque[Event] = deque(maxlen=most)
        self.devices: deque[Event] = deque(maxlen=most)
        self.checkpoints: deque[Event] = deque(maxlen=most)
        self.metrics: dict[str, float] = {}  # the last value of each
        self.others: defaultdict[str, deque[Event]] = defaultdict(lambda: deque(maxlen=most))
        # In UNIX time:
        self.moves: deque[float] = deque(maxlen=most)  # when it made progress
        self.began: float | None = None  # its first step
        self.first_time: float | None = None  # of all events
        self.heard: float | None = None  # the last one, except its end, which others may write
        for event in events:
            self.take(event)

    def take(self, event: Event) -> None:
        """Add the next event, as `read_events` returns it."""
        kind, when = event["event"], event["t"]
        if self.first_time is None:
            self.first_time = when
        if kind != "end":
            self.heard = max(self.heard or 0.0, when)
        if kind in PROGRESS:
            self.moves.append(when)
        if kind == "step":
            self.take_step(event)
        elif kind == "device":
            self.take_device(event)
        elif kind == "start":
            self.take_start(event)
        elif kind == "end":
            self.end = event
            self._take_metrics(event.get("metrics", {}))
        elif kind == "metric":
            self._take_metrics({event["name"]: event.get("value")})
        elif kind == "checkpoint":
            self.checkpoints.append(event)
        elif kind == "window":
            self.window = event
        else:
            self.others[kind].append(event)

    # A reader that draws curves extends these three.

    def take_start(self, event: Event) -> None:
        self.start = event

    def take_step(self, event: Event) -> None:
        if self.began is None:
            self.began = event["t"] - event.get("seconds", 0.0)
        self.steps.append(event)

    def take_device(self, event: Event) -> None:
        self.devices.append(event)

    def _take_metrics(self, values: Mapping[str, float | None]) -> None:
        self.metrics |= {name: value for name, value in values.items() if value is not None}

    @property
    def last_time(self) -> float | None:
        """When its last event was written."""
        times = [self.heard, self.end["t"] if self.end else None]
        return max((when for when in times if when is not None), default=None)

    @property
    def last_step(self) -> int | None:
        """The last step that it wrote; None before the first."""
        return int(self.steps[-1]["step"]) if self.steps else None

    @property
    def steps_made(self) -> int | None:
        """Steps made by now, in all attempts: by its end, its last step or its start.

        None for a script that has made none.
        """
        if self.end is not None and "step" in self.end:
            return int(self.end["step"])
        return self.start.get("step") if self.last_step is None else self.last_step

    @property
    def place(self) -> list[Any] | None:
        """Where in the user's code it was last seen: file, line, function."""
        seen = [event for event in (*self.others["place"], *self.devices) if "at" in event]
        return max(seen, key=lambda event: float(event["t"]))["at"] if seen else None

    @property
    def losses(self) -> dict[int, float | None]:
        """The loss by step; None if it was not a number. In a task, rank 0 has them."""
        return {event["step"]: event["loss"] for event in self.steps if "loss" in event}

    @property
    def timed_steps(self) -> dict[int, Event]:
        """The steps whose time is known, by number."""
        return {event["step"]: event for event in self.steps if "seconds" in event}

    def mean(self, field: str, *, of: Iterable[Event] | None = None) -> float | None:
        """The mean of a field over its steps, or other events; None if none has it."""
        events = self.steps if of is None else of
        values = [event[field] for event in events if event.get(field) is not None]
        return statistics.fmean(values) if values else None

    def clock_seconds(self, since: tuple[float, int] | None = None) -> float | None:
        """Seconds of a step by the clock, including what happens between steps, as validation does.

        `since`: a time and the step made then; by default those of the first step that is kept.
        """
        if not self.steps:
            return None
        begin, first = since or (self.steps[0]["t"], self.steps[0]["step"])
        passed, made = self.steps[-1]["t"] - begin, self.steps[-1]["step"] - first
        enough = made > 0 and passed >= MIN_CLOCK_SECONDS
        return passed / made if enough else self.mean("seconds")

    @property
    def seconds(self) -> float:
        """Seconds of training, as a task measured it, or from its first step to its last."""
        if self.end is not None and "seconds" in self.end:
            return float(self.end["seconds"])
        return self.steps[-1]["t"] - self.began if self.steps and self.began is not None else 0.0


def read_rank(run: RunDir, attempt: int, rank: int, most: int | None = None) -> RankRecord:
    """All events of a rank, or the first `most`."""
    events = read_events(run.events(attempt, rank))
    return RankRecord(rank, itertools.islice(events, most))


def read_ranks(run: RunDir, attempt: int, most: int | None = None) -> dict[int, RankRecord]:
    """The records of all ranks of an attempt."""
    return {rank: read_rank(run, attempt, rank, most) for rank in run.ranks(attempt)}


def read_ends(run: RunDir, attempt: int, rank: int, num_bytes: int = LAST_BYTES) -> RankRecord:
    """A rank's start, when its steps began, its end, and the events in the last bytes of its file.

    Takes the same time for a file of any size.
    """
    path = run.events(attempt, rank)
    head = RankRecord(rank)
    for event in read_events(path, HEAD_BYTES):
        head.take(event)
        if head.steps:
            break
    record = RankRecord(rank, [head.start] if head.start else [])
    record.first_time, record.began = head.first_time, head.began
    for event in read_last_events(path, num_bytes):
        record.take(event)
    if record.end is None:  # a long error may be in the way
        record.end = run.end(attempt, rank)
    return record


def lead_rank(run: RunDir, attempt: int) -> int:
    """The rank that speaks for all: usually 0; in a node's part of a run, the first one."""
    return min(run.ranks(attempt), default=0)


def read_lead(run: RunDir) -> RankRecord:
    """Both ends of the lead rank's events, in the last attempt that has any."""
    for attempt in reversed(run.attempts()):
        record = read_ends(run, attempt, lead_rank(run, attempt))
        if record.first_time is not None:
            return record
    return RankRecord(0)


def newest_window(records: Iterable[RankRecord]) -> Event | None:
    """The steps that a benchmark counts; ranks that never meet have one window each."""
    windows = [record.window for record in records if record.window is not None]
    return max(windows, key=lambda window: int(window["first"]), default=None)


def final_step(
    start: Mapping[str, Any], info: Mapping[str, Any], window: Mapping[str, Any] | None
) -> int | None:
    """The step that a run will end with, if known.

    A benchmark gives a task more steps than it will make: the probe ends it after the last step of
    the window that it has chosen.
    """
    if "job" not in info.get("bench", {}):
        return start.get("steps")
    return window.get("last") if window else None
