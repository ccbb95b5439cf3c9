"""Compares a followed run with others, by the rules of `timing/comparison.py`."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from allranks.timing.comparison import (
    SCALING,
    Compared,
    Pace,
    bench_of,
    compare,
    device_name,
    is_comparable,
)
from allranks.timing.steps import AFFORDABLE_BYTES, affordable_timing, event_bytes
from allranks.watch.views import ranks_of

if TYPE_CHECKING:
    from allranks.watch.live import Followed

MIN_STEPS = 10  # a running run must have made before others are compared with it
# If a run has more events than this, its pace is taken from its first rank alone. Small, because a
# live screen takes no keys while it reads.
LIVE_BYTES = 2 << 20
Key = tuple[str, str, str | None]  # the job, the device, the benchmark


@dataclass(frozen=True, slots=True)
class Comparison:
    """A run's layout and the baseline it is compared with."""

    row: Compared
    base: Compared


class ComparableRuns:
    """Sets of comparable runs as of now. Reads their files until the deadline."""

    def __init__(self, followed: Iterable[Followed], deadline: float) -> None:
        self._deadline = deadline
        self._max_bytes = AFFORDABLE_BYTES if math.isinf(deadline) else LIVE_BYTES
        self.is_behind = False  # the deadline passed before everything was read
        self._sets: dict[Key, dict[str, list[Followed]]] = {}  # by layout
        self._found: dict[tuple[Key, str], Comparison | None] = {}
        self._unread: set[str] = set()  # jobs with runs that have not been read yet
        for one in followed:
            if not one.is_read:
                self._unread.add(one.run.job_name)
            for key in one.sets:
                self._sets.setdefault(key, {}).setdefault(layout_of(one), []).append(one)

    def of(self, one: Followed) -> Comparison | None:
        """How its layout compares; None if nothing was measured or not everything is read yet."""
        key, layout = next(iter(one.sets), None), layout_of(one)
        if key is None or one.run.job_name in self._unread or ranks_of(layout) is None:
            return None
        if (key, layout) not in self._found:
            self._found[key, layout] = self._compare(self._sets.get(key, {}), layout)
        return self._found[key, layout]

    def _compare(self, layouts: dict[str, list[Followed]], wanted: str) -> Comparison | None:
        """Search for a baseline from few ranks to many, so that nothing is read needlessly."""
        known = {name: ranks for name in layouts if (ranks := ranks_of(name)) is not None}
        for ranks in sorted(set(known.values())):
            rows = self._rows(layouts, [name for name in known if known[name] == ranks])
            if rows is None:
                return None
            base = next((row for row in rows if row.layout == row.baseline), None)
            if base is not None:
                rows = self._rows(layouts, [base.layout, wanted])
                row = next((row for row in rows or () if row.layout == wanted), None)
                return Comparison(row, base) if row is not None else None
        return None

    def _rows(self, layouts: dict[str, list[Followed]], names: list[str]) -> list[Compared] | None:
        """Compare these layouts; None if not all of their runs could be read in time."""
        runs = [one for name in dict.fromkeys(names) for one in layouts[name]]
        if not all([self.measure(one) for one in runs]):
            return None
        return compare(
            Pace(one.run.name, layout_of(one), pace_of(one), one.status.state, timing=one.measured)
            for one in runs
        )

    def measure(self, one: Followed) -> bool:
        """Measure an ended run over the same steps as every other command, if there is time."""
        if one.is_active or one.is_measured:
            return True
        if time.monotonic() > self._deadline:
            self.is_behind = True
            return False
        if one.reader.lead is None:
            one.reader.look(all_ranks=False)
        one.is_measured, one.measured = True, None
        if event_bytes(one.run) > self._max_bytes:
            one.pace = one.reader.steady_pace(ranks_of(layout_of(one)) or 1)
            return True
        one.measured = affordable_timing(one.run, self._max_bytes)
        one.pace = one.measured.samples_per_second or None if one.measured else None
        return True


def sets_of(one: Followed) -> tuple[Key, ...]:
    """The sets that a run belongs to; it is compared within the first."""
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
    """Its first rank's start event, even if nothing else of the run was read."""
    if one.reader.lead is not None:
        return one.reader.start
    if one.first_start is None:
        attempts = one.run.attempts()
        one.first_start = (one.run.start(attempts[-1]) if attempts else None) or {}
    return one.first_start


def layout_of(one: Followed) -> str:
    return str(start_of(one).get("layout") or one.info.get("layout", ""))


def pace_of(one: Followed) -> float | None:
    """Pace over a run's steady steps; None while a running run has too few of them."""
    if one.is_measured:
        return one.pace
    lead, ranks = one.reader.lead, ranks_of(layout_of(one)) or 1
    return one.reader.steady_pace(ranks) if lead and (lead.last_step or 0) >= MIN_STEPS else None
