"""Memory that grows with every step: of a rank's process, and of its GPU.

Healthy runs grow too, for a while: caches fill, allocators take memory in large pieces, a data set
keeps what it has read. So growth counts only if it does not slow down, if the memory is never given
back, and if it would be full before long.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from allranks.run.record import RankRecord
from allranks.show.numbers import size

LEAST_POINTS, LEAST_STEPS = 14, 20
WARM_UP = 1 / 3  # of the steps
BLOCKS = 6
STEADY = 0.5  # growth in the block that grows least, over that in the one that grows most
STEADY_AT_LINE = 0.2  # likewise, if a line is known to keep something of every step
LEAST_BYTES = 16 << 20  # in all blocks together
FULL_WITHIN = 3 * 86400.0  # seconds: what takes longer does no harm
# In its first epoch, a rank may keep the data that it reads, or results until the epoch ends.
FIRST_EPOCH_FULL_WITHIN = 3600.0

Where = Literal["host", "device"]


class Point(NamedTuple):
    """Memory in use at some moment."""

    step: int
    time: float
    num_bytes: float


@dataclass(frozen=True, slots=True)
class Growth:
    """Memory of a rank that grows with every step."""

    where: Where
    rank: int
    bytes_per_step: float
    bytes_per_second: float
    full_in: float | None  # seconds; None if the size of the memory is not known
    line: str | None = None  # of the user's code that keeps it

    @property
    def text(self) -> str:
        per_step = f"{self.where} memory grows by {size(self.bytes_per_step)} a step"
        full = f": full in about {in_words(self.full_in)}" if self.full_in is not None else ""
        return f"{per_step}{full}{f' ({self.line})' if self.line else ''}"


def in_words(seconds: float) -> str:
    """A time that is only roughly known."""
    for unit, length in (("day", 86400.0), ("hour", 3600.0), ("minute", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}s"
    return f"{max(1, round(seconds))} seconds"


def growing_memory(records: Mapping[int, RankRecord], info: Mapping[str, Any]) -> list[Growth]:
    """The memory that grows most, of all hosts and of all devices: at most one of each."""
    found = [*_host_growths(records, info), *_device_growths(records)]
    by_place = [[one for one in found if one.where == where] for where in ("device", "host")]
    return [max(ones, key=lambda one: one.bytes_per_step) for ones in by_place if ones]


def points_of(record: RankRecord, where: Where) -> list[Point]:
    """A rank's memory over time: at the ends of early steps, later whenever it was sampled."""
    points: list[Point] = []
    for event in itertools.chain(record.others["memory"], record.devices):
        if event["event"] == "memory":
            value = event.get(where)
        elif where == "device":
            value = event.get("memory_allocated")
        else:
            resident, shared = event.get("host_memory_now"), event.get("host_memory_shared", 0)
            value = None if resident is None else resident - shared
        if value is not None and "step" in event:
            points.append(Point(event["step"], event["t"], value))
    return sorted(points, key=lambda point: point.time)


def growth_of(record: RankRecord, where: Where) -> tuple[float, float] | None:
    """A rank's `steady_growth`, less strict if a line is known to keep memory of every step."""
    is_kept = line_of(record, where) is not None
    growth = steady_growth(points_of(record, where), STEADY_AT_LINE if is_kept else STEADY)
    seconds = usual_seconds(record)
    return growth if growth is None or not seconds else (growth[0], growth[0] / seconds)


def usual_seconds(record: RankRecord) -> float | None:
    """Seconds from one step to the next, without those that were slowed to be traced."""
    steps = [event for event in record.steps if "seconds" in event]
    if len(steps) < 2:
        return None
    traced = [event["seconds"] for event in steps[1:] if event.get("traced")]
    number = steps[-1]["step"] - steps[0]["step"] - len(traced)
    left = steps[-1]["t"] - steps[0]["t"] - math.fsum(traced)
    return left / number if number > 0 and left > 0 else None


def steady_growth(points: Sequence[Point], steady: float = STEADY) -> tuple[float, float] | None:
    """Bytes per step and per second by which memory grows, if it grows steadily; else None."""
    if len(points) < 2:
        return None
    first, last = points[0].step, points[-1].step
    points = [point for point in points if point.step >= first + WARM_UP * (last - first)]
    if len(points) < LEAST_POINTS or points[-1].step - points[0].step < LEAST_STEPS:
        return None
    # What is given back later is not growth: evaluations, results that are kept for an epoch.
    lowest = [*itertools.accumulate((point.num_bytes for point in reversed(points)), min)][::-1]
    edges = [points[0].step + n * (last - points[0].step) / BLOCKS for n in range(BLOCKS + 1)]
    steps = [point.step for point in points]
    at_edges = [_value_at(edge, steps, lowest) for edge in edges]
    gains = [after - before for before, after in itertools.pairwise(at_edges)]
    total = at_edges[-1] - at_edges[0]
    if total < LEAST_BYTES or min(gains) < steady * max(gains):
        return None
    if min(gains) < STEADY * max(gains) and gains == sorted(gains, reverse=True):
        return None  # it grows less and less, as a cache does
    seconds = points[-1].time - points[0].time
    return total / (last - points[0].step), total / seconds if seconds > 0 else 0.0


def _value_at(step: float, steps: Sequence[int], values: Sequence[float]) -> float:
    """The value at a step, interpolated between two points."""
    for (low, before), (high, after) in itertools.pairwise(zip(steps, values, strict=True)):
        if low <= step <= high:
            return before + (after - before) * ((step - low) / (high - low) if high > low else 1.0)
    return values[-1]


def _host_growths(records: Mapping[int, RankRecord], info: Mapping[str, Any]) -> Iterable[Growth]:
    hardware = info.get("hardware") or {}
    limit = hardware.get("memory_allotted_bytes") or hardware.get("memory_bytes")
    nodes: dict[Any, list[RankRecord]] = {}
    for record in records.values():
        nodes.setdefault(record.start.get("host"), []).append(record)
    for of_node in nodes.values():
        growths = {one.rank: growth_of(one, "host") for one in of_node}
        rate = sum(growth[1] for growth in growths.values() if growth is not None)
        used = sum(points[-1].num_bytes for one in of_node if (points := points_of(one, "host")))
        full_in = max(0.0, limit - used) / rate if limit and rate else None
        for record in of_node:
            growth = growths[record.rank]
            if growth is not None and is_harmful(record, full_in):
                yield Growth("host", record.rank, *growth, full_in, line_of(record, "host"))


def _device_growths(records: Mapping[int, RankRecord]) -> Iterable[Growth]:
    for record in records.values():
        points = points_of(record, "device")
        growth = growth_of(record, "device")
        if growth is None:
            continue
        totals = [event["memory_total"] for event in record.devices if event.get("memory_total")]
        free = max(0.0, totals[-1] - points[-1].num_bytes) if totals else None
        full_in = None if free is None or not growth[1] else free / growth[1]
        if full_in is None or full_in < FULL_WITHIN:
            line = line_of(record, "device")
            yield Growth("device", record.rank, *growth, full_in, line)


def is_harmful(record: RankRecord, full_in: float | None) -> bool:
    """Whether a rank's growing memory will fill the host's, as far as can be known."""
    if has_read_all(record):
        return full_in is None or full_in < FULL_WITHIN
    kept = [event for event in record.others["kept"] if event["where"] == "host"]
    is_soon = full_in is not None and full_in < FIRST_EPOCH_FULL_WITHIN
    return is_soon and bool(kept) and not kept[-1].get("loading")


def has_read_all(record: RankRecord) -> bool:
    """Whether a rank has read all of its data at least once, or has none to read."""
    if record.others["epoch"] or (record.epochs_completed or 0) >= 1:
        return True
    return not record.others["dataset"] and "samples_per_epoch" not in record.start


def line_of(record: RankRecord, where: Where) -> str | None:
    """The line that keeps memory which is never given back, if the rank has found one."""
    found = [event["line"] for event in record.others["kept"] if event["where"] == where]
    return str(found[-1]) if found else None
