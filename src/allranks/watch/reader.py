"""Reads one run's folder as it grows: everything that is shown of the run except its state."""

from __future__ import annotations

import math
import statistics
import time
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from allranks.layout import place_in_words
from allranks.run.folder import RunDir
from allranks.run.record import Event, RankRecord, read_counts
from allranks.timing.steps import LEAST_LATE, is_longer, mean_exchanges, split_waits
from allranks.timing.timeline import DATA, PHASES, WAIT
from allranks.watch.tail import EventTail
from allranks.watch.views import History, Parts, RankView

MAX_BUCKETS = 256
MAX_POINTS = 512
RECENT_STEPS = 32
EARLY_SECONDS = 5.0  # in which every rank writes what its first steps show
CURVES = ("seconds", DATA, WAIT, "samples", "utilization", "cpu")
DEVICE_KEYS = (
    *("utilization", "memory", "memory_total", "power", "power_limit", "temperature"),
    *("clock", "clock_max", "cpu", "workers_cpu", "num_workers"),
    *("host_memory", "host_memory_now", "host_memory_shared"),
)


@dataclass(slots=True)
class Series:
    """Means over equal ranges of steps; ranges double in width when there are too many."""

    width: int = 1  # steps per range
    sums: array[float] = field(default_factory=lambda: array("d"))
    counts: array[int] = field(default_factory=lambda: array("l"))

    def add(self, step: int, value: float) -> None:
        index = (step - 1) // self.width
        if index < 0:
            return
        if index >= len(self.sums):
            while index >= MAX_BUCKETS:
                self._double()
                index = (step - 1) // self.width
            missing = index + 1 - len(self.sums)
            if missing > 0:
                self.sums.extend([0.0] * missing)
                self.counts.extend([0] * missing)
        self.sums[index] += value
        self.counts[index] += 1

    def mean(self) -> float | None:
        """Mean over all steps."""
        return sum(self.sums) / sum(self.counts) if self.counts else None

    def means(self, width: int | None = None) -> list[float | None]:
        """Mean of each range of `width` steps, which is this width or a doubling of it."""
        factor = (width or self.width) // self.width
        if factor <= 1:
            return [s / c if c else None for s, c in zip(self.sums, self.counts, strict=True)]
        found: list[float | None] = []
        for begin in range(0, len(self.sums), factor):
            count = sum(self.counts[begin : begin + factor])
            found.append(sum(self.sums[begin : begin + factor]) / count if count else None)
        return found

    def _double(self) -> None:
        self.width *= 2
        for values in (self.sums, self.counts):
            if len(values) % 2:
                values.append(0)
        self.sums = array("d", map(sum, zip(self.sums[::2], self.sums[1::2], strict=True)))
        self.counts = array("l", map(sum, zip(self.counts[::2], self.counts[1::2], strict=True)))


@dataclass(slots=True)
class Points:
    """A curve's points in order of steps; every other one is dropped when there are too many."""

    steps: list[int] = field(default_factory=list)
    values: list[float | None] = field(default_factory=list)  # None: NaN or infinite
    _stride: int = 1
    _skipped: int = 0
    last: float | None = None  # the newest value, kept or not

    def add(self, step: int, value: float | None) -> None:
        self.last = value
        if self.steps and step <= self.steps[-1]:
            self.go_back(step - 1)
        self._skipped += 1
        # A loss that is not a number is what people look for: it is always kept.
        if self._skipped < self._stride and value is not None:
            return
        self._skipped = 0
        self.steps.append(step)
        self.values.append(value)
        if len(self.steps) > MAX_POINTS:
            self._thin()
            self._stride *= 2

    def _thin(self) -> None:
        """Keep one of every two points, preferring one that is not a number."""
        values = self.values
        kept = [
            at + 1 if at + 1 < len(values) and values[at + 1] is None else at
            for at in range(0, len(values), 2)
        ]
        self.steps, self.values = [self.steps[at] for at in kept], [values[at] for at in kept]

    def go_back(self, step: int) -> None:
        """Forget everything after `step`: a later attempt repeats those steps."""
        while self.steps and self.steps[-1] > step:
            self.steps.pop()
            self.values.pop()


class RankReader(RankRecord):
    """What one rank of one attempt has reported so far, in bounded memory."""

    def __init__(self, rank: int, tail: EventTail) -> None:
        super().__init__(rank, most=RECENT_STEPS)
        self.tail = tail
        self.losses_of_run: Points | None = None  # where the lead rank's losses go
        self.curves: dict[str, Series] = {}
        self.network: Mapping[str, float] = {}
        self.longest_pause = 0.0  # seconds between two steps
        self._past: Iterator[list[Event]] | None = None  # samples from before the first look

    def look(self) -> bool:
        """Read what is new; returns whether there was anything."""
        # The lead rank's file is read whole, for its losses; the others' last steps come first.
        if self.tail.offset == 0 and self.rank:
            events, self._past = self.tail.read_ends()
        else:
            events = self.tail.read()
        for event in events:
            self.take(event)
        return bool(events)

    def look_back(self, deadline: float) -> bool:
        """Read more of what came before the first look, until the deadline; returns whether any."""
        has_more = self._past is not None
        while self._past is not None and time.monotonic() < deadline:
            events = next(self._past, None)
            if events is None:
                self._past = None
            place = RankRecord(self.rank, events or ())
            for event in place.steps:
                self._draw(event["step"], event)
            for event in place.devices if place.last_step else ():
                self._draw(place.last_step or 1, event)  # at the last step found there
        return has_more

    @property
    def device(self) -> Event:
        """Its newest report about its device."""
        return self.devices[-1] if self.devices else {}

    def take_device(self, event: Event) -> None:
        super().take_device(event)
        self.network = event.get("network") or self.network
        self._draw(self.last_step or 1, event)

    def take_start(self, event: Event) -> None:
        super().take_start(event)
        if self.losses_of_run is not None and event.get("step") is not None:
            self.losses_of_run.go_back(event["step"])

    def take_step(self, event: Event) -> None:
        before = self.steps[-1] if self.steps else {}
        # Consecutive steps only: a thinned file has gaps. The time before the first step is not a
        # pause: it goes to imports and compilers.
        if event["step"] - before.get("step", event["step"]) == 1:
            self.longest_pause = max(self.longest_pause, event["t"] - before["t"])
        super().take_step(event)
        self._draw(event["step"], event)
        if self.losses_of_run is not None and "loss" in event:
            self.losses_of_run.add(event["step"], event["loss"])

    def _draw(self, step: int, event: Event) -> None:
        for key in CURVES:
            value = event.get(key)
            if isinstance(value, int | float):
                if key not in self.curves:
                    self.curves[key] = Series()
                self.curves[key].add(step, value)

    def view(self, *, slowest: bool) -> RankView:
        return RankView(
            rank=self.rank,
            node=self.start.get("host"),
            place=place_in_words(self.start.get("layout"), [self.rank]) or None,
            state=self.end.get("state") if self.end else None,
            step=self.last_step,
            step_seconds=self.mean("seconds"),
            data=self.mean(DATA),
            wait=self.mean(WAIT),
            **{key: self.device.get(key) for key in DEVICE_KEYS},
            sent=self.network.get("sent"),
            received=self.network.get("received"),
            link=self.network.get("link"),
            heartbeat=self.last_time,
            slowest=slowest,
        )


class RunReader:
    """The attempts of one run. The lead rank is always followed, the others only on request."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self.losses = Points()
        self.metrics: dict[str, float] = {}
        self.attempt: int | None = None
        self.attempts: list[int] = []
        self.ranks: dict[int, RankReader] = {}
        self.lead = self._nobody()
        self._past_hours = 0.0  # of earlier attempts
        self._past_pause = 0.0
        self._past_steps = 0  # of earlier attempts: a script counts from 1 in each
        self._past_epochs = 0
        self._past_checkpoint: int | None = None
        self._parts: Parts | None = None
        self._has_parts = False
        self._num_counting: int | None = None  # ranks whose samples count, once some are shared

    def look(self, *, all_ranks: bool, seconds: float = math.inf) -> bool:
        """Read what is new of the lead rank, or of all ranks; returns whether there was anything.

        What was written before the first look is read for `seconds`, and the rest at later looks.
        """
        is_new = False
        self.attempts = self.run.attempts()
        begun = [n for n in self.attempts if self.attempt is None or n >= self.attempt]
        for number in begun:
            if number != self.attempt:
                self._begin(number)
            is_new |= self._look_at_lead()
        if all_ranks and self.attempt is not None:
            for rank in self.run.ranks(self.attempt):
                if rank not in self.ranks:
                    self._add(rank)
            for reader in self.ranks.values():
                if reader is not self.lead:
                    is_new |= reader.look()
            deadline = time.monotonic() + seconds
            for reader in self.ranks.values():
                is_new |= reader.look_back(deadline)
        self._has_parts = self._has_parts and not is_new
        return is_new

    def _begin(self, number: int) -> None:
        self._past_hours, self._past_pause = self.rank_hours(None), self.longest_pause
        self._past_checkpoint = self.checkpoint
        self._past_steps = self.steps_made or 0
        self._past_epochs += 0 if self.lead.counts_on else self.lead.epochs_completed or 0
        self.attempt, self.ranks, self.lead = number, {}, self._nobody()
        self._num_counting = None

    def _nobody(self) -> RankReader:
        """The lead rank before there is one: it has reported nothing."""
        return RankReader(0, EventTail(self.run.path))

    def _add(self, rank: int) -> RankReader:
        assert self.attempt is not None
        self.ranks[rank] = RankReader(rank, EventTail(self.run.events(self.attempt, rank)))
        return self.ranks[rank]

    def _look_at_lead(self) -> bool:
        assert self.attempt is not None
        if self.lead not in self.ranks.values() or self.lead.rank > 0:
            ranks = self.run.ranks(self.attempt)
            if not ranks:
                return False
            # A smaller rank may begin later: it is read from its beginning, for its losses.
            if self.lead not in self.ranks.values() or ranks[0] < self.lead.rank:
                self.lead.losses_of_run = None
                self.lead = self._add(ranks[0])
                self.lead.losses_of_run, self.lead.metrics = self.losses, self.metrics
        return self.lead.look()

    @property
    def steps_made(self) -> int | None:
        """Steps made in all attempts, as `record.steps_in_all` counts them."""
        made = self.lead.steps_made
        is_all = self.lead.counts_on or not self._past_steps
        return made if is_all else self._past_steps + (made or 0)

    @property
    def epoch(self) -> int | None:
        """The epoch of the last step, counted over all attempts of a script."""
        epoch = self.lead.steps[-1].get("epoch") if self.lead.steps else None
        return epoch if epoch is None or self.lead.counts_on else int(epoch) + self._past_epochs

    @property
    def checkpoint(self) -> int | None:
        """Step of the last committed checkpoint."""
        if not self.lead.checkpoints:
            return self._past_checkpoint
        return int(self.lead.checkpoints[-1]["step"])

    @property
    def longest_pause(self) -> float:
        """Longest time between two steps in any attempt: a resumed run will pause as before."""
        return max(self._past_pause, self.lead.longest_pause)

    def rank_hours(self, now: float | None) -> float:
        """Hours of all ranks in all attempts; up to `now` if the last attempt still runs."""
        lead = self.lead
        if lead.first_time is None or lead.last_time is None:
            return self._past_hours
        until = lead.last_time if now is None else max(now, lead.last_time)
        world = lead.start.get("world_size") or len(self.run.ranks(self.attempt or 0)) or 1
        return self._past_hours + (until - lead.first_time) * world / 3600

    def samples_per_second(self, world_size: int | None) -> float | None:
        """Of all ranks: as reported at the end, else over the lead rank's last steps."""
        said = self._said_pace()
        return said if said is not None else self.lead.samples_per_second(self._shares(world_size))

    def _shares(self, world_size: int | None) -> int | None:
        """How many ranks count samples: all of them, unless some work on the same ones."""
        if world_size is None or self.attempt is None or not self.lead.others["divided"]:
            return world_size
        is_early = (self.lead.heard or 0.0) - (self.lead.began or 0.0) < EARLY_SECONDS
        if self._num_counting is None or is_early:
            records = read_counts(self.run, self.attempt, "counted")
            self._num_counting = sum(record.counts for record in records.values())
        return self._num_counting

    def steady_pace(self, world_size: int) -> float | None:
        """Samples per second of all ranks over the whole attempt except its beginning."""
        if (said := self._said_pace()) is not None:
            return said
        seconds, samples = map(self.lead.curves.get, ("seconds", "samples"))
        if seconds is None or samples is None:
            return None
        first = 1 if len(seconds.sums) > 1 else 0
        counting = self._shares(world_size) or world_size
        took, trained = sum(seconds.sums[first:]), sum(samples.sums[first:]) * counting
        if batch := self.lead.start.get("global_batch"):
            trained = batch * sum(seconds.counts[first:])
        return trained / took if took else None

    def _said_pace(self) -> float | None:
        said = (self.lead.end or {}).get("samples_per_second")
        return float(said) if said else None

    def longest_rank(self) -> int | None:
        """The rank whose steps clearly take longest, for runs that do not record waits."""
        means = {r: mean for r in self.ranks if (mean := self.ranks[r].mean("seconds"))}
        if len(means) < 2:
            return None
        longest = max(means, key=lambda rank: means[rank])
        usual = statistics.median(mean for rank, mean in means.items() if rank != longest)
        steps = [e["seconds"] for e in self.ranks[longest].steps if "seconds" in e]
        late = [took - usual for took in steps]
        return longest if is_longer(late, LEAST_LATE * usual) else None

    def parts(self) -> Parts | None:
        """Where the last steps' time went; None unless all ranks' phases are known."""
        if not self._has_parts:  # asked for more often than it changes
            self._parts, self._has_parts = self._split(), True
        return self._parts

    def _split(self) -> Parts | None:
        ranks = sorted(self.ranks)
        rows = common_rows([self.ranks[rank].steps for rank in ranks])
        if not rows or not all(key in event for row in rows for event in row for key in PHASES):
            return None
        split = split_waits(rows)
        last = split.slowest
        return Parts(
            seconds=split.parts,
            steps=len(rows),
            slowest_rank=None if last is None else ranks[last],
            slowest_share=split.slowest_share,
            slowest_part=split.slowest_part,
            layout=str(self.lead.start.get("layout", "")),
            exchanges=mean_exchanges([row[split.middle] for row in rows]),
        )

    def history(self) -> History:
        curves = {rank: self.ranks[rank].curves for rank in sorted(self.ranks)}
        every = [curve for of_rank in curves.values() for curve in of_rank.values()]
        width = max((curve.width for curve in every), default=1)
        rows = {
            key: {
                rank: tuple(known[key].means(width))
                for rank, known in curves.items()
                if key in known
            }
            for key in CURVES
        }
        samples, lead, start = rows.pop("samples"), self.lead.rank, self.lead.start
        batch, counting = start.get("global_batch"), self._shares(start.get("world_size")) or 1
        pairs = zip(samples.get(lead, ()), rows["seconds"].get(lead, ()), strict=False)
        return History(
            width=width,
            samples_per_second=tuple(
                (batch or (number or 0) * counting) / took or None if took else None
                for number, took in pairs
            ),
            ranks={key: of_ranks for key, of_ranks in rows.items() if of_ranks},
        )


def common_rows(ranks: Sequence[Sequence[Event]]) -> list[list[Event]]:
    """Recent steps that all ranks have made: one row per step, with every rank's event."""
    if len(ranks) < 1 or not all(ranks):
        return []
    by_step = [{event["step"]: event for event in events} for events in ranks]
    common = sorted(set(by_step[0]).intersection(*by_step[1:]))
    return [[steps[number] for steps in by_step] for number in common]
