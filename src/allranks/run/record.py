"""The record of a run: the events of its ranks, sorted by kind, and the result that they give.

Everything that shows a run (its result, its state, reports, the watcher, the doctor) reads them
here: all of them, or both ends of long files, or as they are written.
"""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from allranks.run.events import read_events, read_last_events
from allranks.run.folder import HEAD_BYTES, RunDir, State
from allranks.run.shares import EARLY_KINDS, count_once
from allranks.run.time_left import StepClock

Event = dict[str, Any]
Certainty = Literal["measured", "about", "unknown"]

LAST_BYTES = 1 << 15
EARLY_EVENTS = 4000  # of a rank: its first batches and steps
FIRST_EVENTS = 200  # of a rank: everything that is written once
EARLY_BYTES = 1 << 16  # which hold these events
EPOCH_ENDED = b'"event":"epoch"'  # every step has an epoch
LOSS_BYTES = 1 << 20  # enough for any log_every that people set
COUNTED_BYTES = 1 << 20  # enough for a hundred steps, and for an hour after the last one
# Events that show progress.
PROGRESS = ("start", "step", "metric", "checkpoint")


@dataclass(frozen=True, slots=True)
class Counted:
    """How reliable the counts of samples and epochs are, and why they were not all measured."""

    samples: Certainty = "measured"
    epochs: Certainty = "measured"
    why: str | None = None

    @classmethod
    def worst(cls, records: Iterable[RankRecord]) -> Counted:
        """What is known about the counts of all these ranks together."""
        found = [MEASURED, *(record.counted for record in records)]
        samples = max((one.samples for one in found), key=_CERTAINTIES.index)
        epochs = max((one.epochs for one in found), key=_CERTAINTIES.index)
        found.sort(key=lambda one: _CERTAINTIES.index(one.samples), reverse=True)
        return cls(samples, epochs, next((one.why for one in found if one.why), None))

    def words(self, figure: str) -> str:
        """A figure that depends on samples, as people read it, or why it is unknown."""
        if self.samples == "measured":
            return f"{figure} (measured)"
        is_known = self.samples == "about"
        return f"about {figure} ({self.why})" if is_known else f"unknown: {self.why}"


MEASURED = Counted()
_CERTAINTIES: tuple[Certainty, ...] = ("measured", "about", "unknown")


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
        self.clock = StepClock()
        self.devices: deque[Event] = deque(maxlen=most)
        self.checkpoints: deque[Event] = deque(maxlen=most)
        self.metrics: dict[str, float] = {}  # the last value of each
        self.counts = True  # its samples; False if another rank counts them, see `count_once`
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
        # Evaluations come at the ends of epochs, so the first one of a resumed run comes early.
        made = event.get("step", 0)
        self.clock = StepClock(made - made % event.get("steps_per_epoch", 1))

    def take_step(self, event: Event) -> None:
        if self.began is None:
            took = event.get("seconds", 0.0) + event.get("evaluation", 0.0)
            self.began = event["t"] - took
        self.clock.take(event["step"], event["t"], event.get("seconds"))
        self.steps.append(event)

    def take_device(self, event: Event) -> None:
        self.devices.append(event)

    def _take_metrics(self, values: Mapping[str, float | None]) -> None:
        self.metrics |= {name: value for name, value in values.items() if value is not None}

    def count_nothing(self) -> None:
        """Leave its samples to the rank that works on the same ones."""
        self.counts = False
        for event in (*self.steps, *self.others["epoch"]):
            if "samples" in event:
                event["samples"] = 0
        for kind in ("counted", "dataset"):
            self.others[kind].clear()

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
        """Steps made so far, from its end, its last step or its start; None for a script without.

        A task continues to count from its checkpoint; a script starts from 1 in every attempt.
        """
        if self.end is not None and "step" in self.end:
            return int(self.end["step"])
        return self.start.get("step") if self.last_step is None else self.last_step

    @property
    def counts_on(self) -> bool:
        """Whether its step numbers include those of earlier attempts, as a task's do."""
        return "step" in self.start

    @property
    def counted(self) -> Counted:
        """How reliable its counts are, by its last word on it."""
        if not self.others["counted"]:
            return Counted()
        said = self.others["counted"][-1]
        return Counted(said["samples"], said["epochs"], said.get("why"))

    @property
    def epochs_completed(self) -> int | None:
        """Epochs that a script has completed; None if it has reported none."""
        ended = [event["epoch"] for event in self.others["epoch"]]
        under_way = self.steps[-1].get("epoch") if self.steps else None
        return max([*ended, *([] if not under_way else [under_way - 1])], default=None)

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
        """The steps whose time is known, by number; without those that tracing has slowed."""
        timed = (event for event in self.steps if "seconds" in event and not event.get("traced"))
        return {event["step"]: event for event in timed}

    def mean(self, field: str, *, of: Iterable[Event] | None = None) -> float | None:
        """The mean of a field over its steps, or other events; None if none has it."""
        events = self.steps if of is None else of
        values = [event[field] for event in events if event.get(field) is not None]
        return statistics.fmean(values) if values else None

    def samples_per_second(self, world_size: int | None) -> float | None:
        """Of all ranks, over its last steps, without evaluations and saves."""
        # The first step compiles, opens files and fills caches: it counts only if it is alone.
        is_alone = len(self.steps) == 1
        counted = [e for e in self.steps if "seconds" in e and (e["step"] > 1 or is_alone)]
        seconds = sum(event["seconds"] for event in counted)
        if not seconds:
            return None
        if batch := self.start.get("global_batch"):
            return float(batch * len(counted) / seconds)
        samples = sum(event.get("samples", 0) for event in counted)
        return samples * world_size / seconds if samples and world_size else None

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
    """The records of all ranks of an attempt, in which no samples count twice."""
    records = {rank: read_rank(run, attempt, rank, most) for rank in run.ranks(attempt)}
    count_once(records)
    return records


def read_counts(run: RunDir, attempt: int, kind: str) -> dict[int, RankRecord]:
    """How ranks share samples, and their last events of a kind, in the same time for any files."""
    records = {}
    for rank in run.ranks(attempt):
        path = run.events(attempt, rank)
        early = (read_events(path, EARLY_BYTES, kind=one) for one in EARLY_KINDS)
        last = read_last_events(path, COUNTED_BYTES, kind=kind)
        records[rank] = RankRecord(rank, itertools.chain(*early, last))
    count_once(records)
    return records


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
    record.first_time, record.began, record.clock = head.first_time, head.began, head.clock
    for event in read_last_events(path, num_bytes):
        record.take(event)
    if record.end is None:  # a long error may be in the way
        record.end = run.end(attempt, rank)
    return record


def read_both_ends(
    run: RunDir, attempt: int, rank: int, num_bytes: int, *, least: int = 0
) -> RankRecord:
    """What a rank writes once or rarely, at the beginning of its file, and its last events.

    Takes the same time for a file of any size: of so many bytes, a quarter at the beginning, or
    `least`.
    """
    path, first = run.events(attempt, rank), num_bytes // 4
    early = read_events(path, max(first, least))
    record = RankRecord(rank, (one for one in early if one["event"] not in ("step", "device")))
    for event in read_last_events(path, num_bytes - first):
        record.take(event)
    if record.end is None:  # a long error may be in the way
        record.end = run.end(attempt, rank)
    return record


def lead_rank(run: RunDir, attempt: int) -> int:
    """The rank that speaks for all: usually 0; in a node's part of a run, the first one."""
    return min(run.ranks(attempt), default=0)


def read_leads(run: RunDir) -> list[RankRecord]:
    """The first and last events of the lead rank, in the attempts whose steps add up, in order.

    For a script these are all attempts, for a task only the last one that began to train.
    """
    found: list[RankRecord] = []
    for attempt in reversed(run.attempts()):
        record = read_ends(run, attempt, lead_rank(run, attempt))
        if record.first_time is not None:
            found.insert(0, record)
        if record.counts_on:
            break
    return found or [RankRecord(0)]


def steps_in_all(leads: Iterable[RankRecord]) -> int | None:
    """Steps made in all attempts; None if none is known.

    Only the script knows whether it continued from its last attempt or started over, so all the
    steps that it made are counted.
    """
    made = [lead.steps_made for lead in leads if lead.steps_made is not None]
    return sum(made) if made else None


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


# --- The result of a run -------------------------------------------------------------------------


def outcome(run: RunDir, state: State | None = None) -> dict[str, Any]:
    """A run's result as one mapping; `state`: if the caller knows it.

    Its speed is what its first rank says; `timing.remarks.result` measures it.
    """
    state = state or run.state()
    attempts = run.attempts()
    leads = read_leads(run)
    lead, steps = leads[-1], steps_in_all(leads)
    start, end = lead.start, lead.end or {}
    counted = counted_of(run)
    has_loss, loss = _last_loss(run, attempts, steps)
    is_lost = has_loss and loss is None
    return {
        "run": run.name,
        "run_dir": str(run.path),
        "state": state,
        "layout": start.get("layout", run.info().get("layout")),
        "world_size": start.get("world_size"),
        "attempt": attempts[-1] if attempts else 0,
        "steps": steps,
        **attempt_steps(leads),
        "epochs": None if counted.epochs == "unknown" else end.get("epoch", _epochs(leads)),
        "samples": end.get("samples", _samples(lead)),
        "counted": asdict(counted),
        "seconds": round(seconds_of(run), 3),
        "samples_per_second": end.get("samples_per_second"),
        "global_batch": start.get("global_batch"),
        "metrics": {**({"loss": loss} if has_loss else {}), **end.get("metrics", {})},
        **({"nonfinite_since": _nonfinite_since(run, attempts, steps or 0)} if is_lost else {}),
    }


def samples_by_rank(records: Mapping[int, RankRecord]) -> dict[int, float]:
    """Average samples per step, over the steps that all ranks have made.

    Ranks that work on the same samples, which one of them counts, all have that number.
    """
    steps = {
        rank: {event["step"]: event["samples"] for event in record.steps if "samples" in event}
        for rank, record in records.items()
    }
    common = set.intersection(*map(set, steps.values())) if steps else set()
    if not common:
        return {}
    shares = {rank: record.start.get("data_rank", rank) for rank, record in records.items()}
    samples: defaultdict[int, float] = defaultdict(float)
    for rank, own in steps.items():
        samples[shares[rank]] += sum(own[step] for step in common)
    return {rank: samples[share] / len(common) for rank, share in shares.items()}


def attempt_steps(leads: Sequence[RankRecord]) -> dict[str, int]:
    """A script's attempts, and the steps of the last one; empty unless there are several."""
    is_script = len(leads) > 1 and not any(lead.counts_on for lead in leads)
    return {"attempts": len(leads), "attempt_steps": leads[-1].last_step or 0} if is_script else {}


def samples_trained(run: RunDir, last: Mapping[int, RankRecord]) -> int | None:
    """Samples in the steps of all ranks and attempts; None if there are none.

    `last`: the last attempt. Reads all of the others.
    """
    earlier = (read_ranks(run, attempt) for attempt in run.attempts()[:-1])
    records = (one for of in itertools.chain(earlier, [last]) for one in of.values())
    return sum(event.get("samples", 0) for one in records for event in one.steps) or None


def seconds_of(run: RunDir) -> float:
    """Seconds of training, in all attempts."""
    return sum(read_ends(run, n, lead_rank(run, n)).seconds for n in run.attempts())


def steps_by_rank(run: RunDir) -> dict[int, int]:
    """How many steps each rank of the last attempt has made."""
    attempt = max(run.attempts(), default=0)
    return {rank: read_ends(run, attempt, rank).last_step or 0 for rank in run.ranks(attempt)}


def counted_of(run: RunDir) -> Counted:
    """How reliable the counts of the last attempt are, by the last events of all its ranks."""
    attempt = max(run.attempts(), default=0)
    return Counted.worst(read_counts(run, attempt, "counted").values())


def samples_per_epoch(run: RunDir) -> int | None:
    """Samples that all ranks read in an epoch; None if a script's ranks have not reported it."""
    attempt = max(run.attempts(), default=0)
    lead = read_rank(run, attempt, lead_rank(run, attempt), FIRST_EVENTS)
    if "samples_per_epoch" in lead.start:
        return int(lead.start["samples_per_epoch"])
    counting = [rank for rank, one in read_counts(run, attempt, "counted").items() if one.counts]
    of_ranks = [_samples_in_epoch(run, attempt, rank) for rank in counting]
    known = [samples for samples in of_ranks if samples]
    if known:
        return sum(known) if len(known) == len(of_ranks) else None
    said = lead.others["dataset"][-1] if lead.others["dataset"] else {}
    return said.get("samples_per_epoch")


def _samples_in_epoch(run: RunDir, attempt: int, rank: int) -> int | None:
    """Samples that a script's rank read in its last epoch, or that its loader promises."""
    path = run.events(attempt, rank)
    ended = deque(read_events(path, kind="epoch", word=EPOCH_ENDED), maxlen=1)
    if ended:
        return int(ended[0].get("samples", 0)) or None
    said = next(read_events(path, EARLY_BYTES, kind="dataset"), {})
    return said.get("rank_samples")


def _last_loss(run: RunDir, attempts: list[int], steps: int | None) -> tuple[bool, float | None]:
    """Whether a loss is known, and the newest one; None if it is not a number.

    Losses of later steps do not count: the next attempt may have started from an earlier one.
    """
    for attempt in reversed(attempts):
        events = read_events(run.events(attempt, 0), last=LOSS_BYTES, word=b'"loss"')
        found = {s: loss for s, loss in RankRecord(0, events).losses.items() if s <= (steps or 0)}
        if found:
            return True, found[max(found)]
    return False, None


def _nonfinite_since(run: RunDir, attempts: list[int], steps: int) -> int:
    """The first step after which the loss was never a number again."""
    losses: dict[int, float | None] = {}
    told: list[int] = []
    for attempt in attempts:
        found = RankRecord(0, read_events(run.events(attempt, 0), word=b'"loss"')).losses
        losses |= {step: loss for step, loss in found.items() if step <= steps}
        for rank in run.ranks(attempt):  # each reports its own samples, also between logged steps
            events = read_events(run.events(attempt, rank), kind="nonfinite")
            told += [event["step"] for event in events]
    good = max((step for step, loss in losses.items() if loss is not None), default=0)
    bad = min(step for step in losses if step > good)
    return min([bad, *(step for step in told if good < step < bad)])


def _epochs(leads: Sequence[RankRecord]) -> int | None:
    """Epochs completed by now, in all attempts."""
    steps = steps_in_all(leads)
    if steps is not None and leads[0].start.get("steps_per_epoch"):
        return steps // int(leads[0].start["steps_per_epoch"])
    each = [one.epochs_completed for one in leads if one.epochs_completed is not None]
    return sum(each) if each else None


def _samples(lead: RankRecord) -> int | None:
    """Samples seen by now, for a run without an end event."""
    start, steps = lead.start, lead.steps_made
    size, batch = start.get("samples_per_epoch"), start.get("global_batch")
    if steps is None or size is None or batch is None or not start.get("steps_per_epoch"):
        return None
    epochs, rest = divmod(steps, int(start["steps_per_epoch"]))
    return int(epochs * size + min(rest * batch, size))
