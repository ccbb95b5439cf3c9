"""Why one rank is slower than the others, from what its machine says about itself."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from allranks.run.record import RankRecord
from allranks.show.numbers import count, percent

LOWER_CLOCK = 0.95  # of the others' clock: chips of one kind differ by less
MOSTLY = 0.5  # of a rank's samples
HOT = 83.0  # degrees Celsius; used where the driver does not say what slows a GPU
AT_LIMIT = 0.97  # of the power limit
FEWER_CPUS = 0.8  # of the others'
WAITS_FOR_CPU, WAITS_MORE = 10.0, 2.0  # percent of the time, and times the others' percentage
# A GPU that has little to do lowers its clock for that reason alone.
BUSY = 50.0  # percent

Kind = Literal["neighbour", "temperature", "power", "clock", "cores", "load"]
FIXES: Mapping[Kind, str] = {
    "neighbour": "nvidia-smi shows whose process it is: end it, or ask for GPUs of your own",
    "temperature": "tell the site that its cooling is insufficient",
    "power": "ask for the same power limit on all GPUs (nvidia-smi -q -d POWER shows it)",
    "clock": "nvidia-smi -q -d PERFORMANCE,CLOCK shows what slows it; tell the site",
    "cores": "give all ranks the same number of CPUs (slurm.cpus_per_gpu, --cpus-per-task)",
    "load": "look for other processes on its CPUs (top)",
}


@dataclass(frozen=True, slots=True)
class Reason:
    """What is different about a slow rank. `text` continues a sentence about it."""

    kind: Kind
    text: str

    @property
    def fix(self) -> str:
        """What to type, or to tell the site."""
        return FIXES[self.kind]


class _Samples:
    """The means of a rank's samples of its device, and of those of other ranks."""

    def __init__(self, rank: RankRecord, others: Sequence[RankRecord]) -> None:
        self.rank, self.others = rank, others

    def own(self, name: str) -> float | None:
        return self.rank.mean(name, of=self.rank.devices)

    def usual(self, name: str) -> float | None:
        """The median of the other ranks."""
        means = [one.mean(name, of=one.devices) for one in self.others]
        known = [mean for mean in means if mean is not None]
        return statistics.median(known) if known else None

    def both(self, name: str) -> tuple[float, float] | None:
        own, usual = self.own(name), self.usual(name)
        return None if own is None or usual is None else (own, usual)

    def slowed(self, word: str) -> bool:
        """Whether this slows the rank's GPU most of the time, and not the others'."""
        own = _share(self.rank, word)
        return own >= MOSTLY and own >= 2 * statistics.median(_share(r, word) for r in self.others)


def _share(record: RankRecord, word: str) -> float:
    seen = [event["slowed_by"] for event in record.devices if "slowed_by" in event]
    return sum(any(word in one for one in words) for words in seen) / len(seen) if seen else 0.0


def slow_rank_reason(records: Mapping[int, RankRecord], rank: int) -> Reason | None:
    """Why this rank is slower than the others; None if its machine shows no reason."""
    others = [record for number, record in records.items() if number != rank]
    if rank not in records or not others:
        return None
    samples = _Samples(records[rank], others)
    found = (rule(samples) for rule in (_neighbour, _clock, _cores, _load))
    return next((reason for reason in found if reason is not None), None)


def _neighbour(samples: _Samples) -> Reason | None:
    beside = samples.both("neighbours")
    if beside is None or beside[0] < MOSTLY or beside[0] < beside[1] + MOSTLY:
        return None
    many = round(beside[0] - beside[1])
    words = "another process computes" if many <= 1 else f"{many} other processes compute"
    return Reason("neighbour", f"{words} on its GPU")


def _clock(samples: _Samples) -> Reason | None:
    """A clock below the others', and what keeps it there."""
    clock, busy = samples.both("clock"), samples.own("utilization")
    if clock is None or clock[0] > LOWER_CLOCK * clock[1] or (busy is not None and busy < BUSY):
        return None
    runs = f"its GPU runs at {count(clock[0])} MHz, the others at {count(clock[1])}"
    degrees, power = samples.own("temperature") or 0.0, samples.own("power") or 0.0
    limit = samples.both("power_limit")
    if samples.slowed("thermal") or degrees >= HOT:
        return Reason("temperature", f"{runs}: it is hot ({count(degrees)} °C)")
    if limit and limit[0] < LOWER_CLOCK * limit[1] and power >= AT_LIMIT * limit[0]:
        watts = f"{count(limit[0])} W, that of the others {count(limit[1])} W"
        return Reason("power", f"{runs}: its power limit is {watts}")
    if samples.slowed("power cap") or samples.slowed("power brake"):
        return Reason("power", f"{runs}: it is at its power limit ({count(power)} W)")
    if samples.slowed("hardware slowdown"):
        return Reason("clock", f"{runs}: its hardware slows it down (nvidia-smi -q -d PERFORMANCE)")
    return Reason("clock", runs)


def _cores(samples: _Samples) -> Reason | None:
    cpus = samples.both("cpus_allotted")
    if cpus is None or cpus[0] > FEWER_CPUS * cpus[1]:
        return None
    return Reason("cores", f"it may use {count(cpus[0])} CPUs, the others {count(cpus[1])}")


def _load(samples: _Samples) -> Reason | None:
    waits = samples.both("cpu_wait")
    if waits is None or waits[0] < WAITS_FOR_CPU or waits[0] < WAITS_MORE * waits[1]:
        return None
    used = samples.both("cpu")
    # A rank that computes longer than the others also waits longer, if the machine is busy.
    if used is not None and waits[0] * used[1] < WAITS_MORE * waits[1] * used[0]:
        return None
    shares = f"{percent(waits[0] / 100, 0)} of the time, the others {percent(waits[1] / 100, 0)}"
    return Reason("load", f"it waits for a CPU {shares}: other processes use its CPUs")
