"""Whose pace a run's is compared with: the rule of `comparing`, over the runs that are followed."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from allranks.timing.comparison import SCALING, Base, base_of, bench_of, device_name, is_comparable
from allranks.timing.steps import AFFORDABLE_BYTES, affordable_timing, event_bytes
from allranks.watch.summary import ranks_of

if TYPE_CHECKING:
    from allranks.watch.live import Followed

MIN_STEPS = 10  # of a run that goes on, before others are compared with it
# Of a run with more events than can be read, its first rank alone tells the pace.
LIVE_BYTES = 2 << 20  # on a screen that is waited for: keys are dead meanwhile
Key = tuple[str, str, str | None]  # what is trained, on what, in which benchmark


@dataclass(frozen=True, slots=True)
class Candidate:
    """A run, as `comparing` wants it."""

    run: str
    layout: str
    ranks: int
    state: str
    samples_per_second: float | None


class Bases:
    """The base of each set of runs, as they stand now; files are read until the deadline."""

    def __init__(self, followed: Iterable[Followed], deadline: float) -> None:
        self._deadline = deadline
        self._max_bytes = AFFORDABLE_BYTES if math.isinf(deadline) else LIVE_BYTES
        self.is_behind = False  # whether there is more to read
        self._sets: dict[Key, list[Followed]] = {}
        self._found: dict[Key, Base | None] = {}
        self._unread: set[str] = set()  # jobs with runs that nobody has looked at yet
        for one in followed:
            if not one.is_read:
                self._unread.add(one.run.job_name)
            for key in one.sets:
                self._sets.setdefault(key, []).append(one)

    def of(self, one: Followed) -> Base | None:
        """What its pace is compared with; None if nothing was measured, or not all is read yet."""
        key = next(iter(one.sets), None)
        if key is None or one.run.job_name in self._unread:
            return None
        if key not in self._found:
            self._found[key] = self._base(self._sets.get(key, []))
        return self._found[key]

    def _base(self, runs: list[Followed]) -> Base | None:
        """From few ranks to many: what is not needed is not read."""
        by_ranks: dict[int, list[Followed]] = {}
        for one in runs:
            ranks = ranks_of(layout_of(one))
            if ranks is not None:
                by_ranks.setdefault(ranks, []).append(one)
        for ranks in sorted(by_ranks):
            if not all([self.measure(one) for one in by_ranks[ranks]]):
                return None
            paced = [candidate(one, ranks) for one in by_ranks[ranks]]
            if (base := base_of(paced)) is not None:
                return base
        return None

    def measure(self, one: Followed) -> bool:
        """Read the pace of a run that has ended, if there is time; whether it is known."""
        if one.is_active or one.is_measured:
            return True
        if time.monotonic() > self._deadline:
            self.is_behind = True
            return False
        if one.reader.lead is None:
            one.reader.look(all_ranks=False)
        measure(one, self._max_bytes)
        return True


def sets_of(one: Followed) -> tuple[Key, ...]:
    """The sets that a run is in; it is compared within the first."""
    if not is_comparable(one.info) or not one.same:
        return ()
    lead = one.reader.lead
    uses_gpu = lead is not None and lead.device.get("utilization") is not None
    device = device_name(start_of(one), one.info, uses_gpu=uses_gpu)
    bench = bench_of(one.info)
    of_job: Key = (one.same, device, None)
    if bench.get("kind") != SCALING:
        return (of_job,)
    return (one.same, device, str(bench.get("id"))), of_job


def start_of(one: Followed) -> dict[str, Any]:
    """What its first rank said at its start, also where nothing more was read of it."""
    if one.reader.lead is not None:
        return one.reader.start
    if one.first_start is None:
        attempts = one.run.attempts()
        one.first_start = (one.run.start(attempts[-1]) if attempts else None) or {}
    return one.first_start


def layout_of(one: Followed) -> str:
    return str(start_of(one).get("layout") or one.info.get("layout", ""))


def candidate(one: Followed, ranks: int) -> Candidate:
    return Candidate(one.run.name, layout_of(one), ranks, one.status.state, pace_of(one, ranks))


def pace_of(one: Followed, ranks: int) -> float | None:
    """Over the steady steps of a run; of one that goes on, once there are some."""
    if one.is_measured:
        return one.pace
    lead = one.reader.lead
    return one.reader.steady_pace(ranks) if lead and (lead.last_step or 0) >= MIN_STEPS else None


def measure(one: Followed, max_bytes: int) -> None:
    """Take the pace of a run that has ended, over the same steps as every other command."""
    one.is_measured, one.measured = True, None
    if event_bytes(one.run) > max_bytes:
        one.pace = one.reader.steady_pace(ranks_of(layout_of(one)) or 1)
        return
    one.measured = affordable_timing(one.run, max_bytes)
    one.pace = one.measured.samples_per_second or None if one.measured else None
