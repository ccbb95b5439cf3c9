"""What the texts of a verdict are made from, and the thresholds above which a part is a limit."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from allranks.errors import AllranksError
from allranks.layout import with_place
from allranks.run.folder import RunDir
from allranks.run.record import RankRecord
from allranks.show.numbers import count, duration, percent
from allranks.show.secrets import redact
from allranks.timing.shares import Measured
from allranks.timing.steps import ENOUGH_STEPS

LEAST_GAIN = 1.1  # less is not worth a change
MOST_WORDS = 60  # characters: longer commands are not shown
MOST_CPU_WAIT = 20.0  # percent of the time: with more, other processes decide what is slow


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """The values above which something is a limit. Shares are of the time."""

    data: float = 1 - 1 / LEAST_GAIN
    straggler: float = 1 - 1 / LEAST_GAIN
    comm: float = 1 - 1 / LEAST_GAIN
    launches: float = 1 - 1 / LEAST_GAIN
    host: float = 1 - 1 / LEAST_GAIN
    copies: float = 1 - 1 / LEAST_GAIN
    pauses: float = 1 - 1 / LEAST_GAIN
    least_ms: float = 0.0  # of a step: a smaller cost is not worth a change
    least_seconds: float = 0.0  # of measured steps
    least_steps: float = ENOUGH_STEPS
    slowest: float = 0.6  # share of the steps in which the same rank comes last
    utilization: float = 80.0  # percent, where there is no trace
    temperature: float = 83.0  # degrees Celsius
    clock: float = 0.9  # of the GPU's fastest
    balance: float = 1.1  # a rank's samples over the mean
    busy: float = 0.7  # of a CPU, by each loader worker
    memory: float = 0.5  # of the GPU's memory

    @classmethod
    def parse(cls, words: Sequence[str]) -> Thresholds:
        """The defaults, changed by `key=value` words. Raises AllranksError."""
        known = {each.name for each in dataclasses.fields(cls)}
        changed: dict[str, float] = {}
        for word in words:
            key, _, value = word.partition("=")
            try:
                number = float(value)
            except ValueError:
                number = -1.0
            if key not in known or not number >= 0:
                raise AllranksError(
                    f"{word} is not a threshold",
                    fix=f"write KEY=NUMBER with one of {', '.join(sorted(known))}",
                )
            changed[key] = number
        return cls(**changed)

    def of(self, limit: str) -> float:
        return float(getattr(self, "comm" if limit == "communication" else limit))


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """The texts of a verdict."""

    why: str
    next: str | None
    cause: str | None
    evidence: str = ""
    rank: int | None = None
    line: str | None = None
    doubt: str | None = None  # why it is not sure, as far as these texts know


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What the texts are made from."""

    run: RunDir
    records: Mapping[int, RankRecord]
    found: Measured
    limits: Thresholds

    @property
    def attempt(self) -> int:
        return max(self.run.attempts())

    @cached_property
    def info(self) -> Mapping[str, Any]:
        return self.run.info()

    @cached_property
    def is_task(self) -> bool:
        """Whether it trains a task of allranks, whose settings are in the job file."""
        return any(record.counts_on for record in self.records.values())

    @cached_property
    def typed(self) -> str:
        """The script or job file, as it is typed after a command such as `allranks run`."""
        if self.is_task:
            return self._typed_job
        program, _, rest = str(self.run.job().get("command") or "").partition(" ")
        words = f"{Path(program).name} {rest}".strip()
        return f"-- {words}" if words and len(words) <= MOST_WORDS else "-- python …"

    @property
    def _typed_job(self) -> str:
        """The job file and what was changed in it; nothing for the bundled job as it is."""
        if "job_file" not in self.info:
            return "JOB.yaml"
        shown = self.info.get("overrides") or ()
        # One rank is the default; `bench scaling` has its own layouts.
        changed = [one for one in shown if one != "layout=1x1" and not one.startswith("env")]
        text = redact(shlex.join([*filter(None, [self.info["job_file"]]), *changed]))
        return text if len(text) <= MOST_WORDS else "JOB.yaml"

    @property
    def cpus(self) -> int | None:
        """The CPUs of the machine that started the run."""
        return (self.info.get("hardware") or {}).get("cpus_allotted")

    @property
    def is_alone(self) -> bool:
        return len(self.records) == 1

    @cached_property
    def nodes(self) -> dict[Any, list[int]]:
        """The ranks of each node."""
        found: dict[Any, list[int]] = {}
        for rank, record in sorted(self.records.items()):
            found.setdefault(record.start.get("host"), []).append(rank)
        return found

    @property
    def per_node(self) -> int:
        return max(map(len, self.nodes.values()))

    def node_of(self, rank: int) -> str | None:
        """The rank's node, if there are several."""
        host = self.records[rank].start.get("host")
        return host if len(self.nodes) > 1 else None

    def named(self, rank: int) -> str:
        """`rank 3`, with its place where the layout divides the model."""
        return with_place(f"rank {rank}", self.records[rank].start.get("layout"), [rank])

    @cached_property
    def crowding(self) -> str | None:
        """Why threads compete for CPUs; None if they do not, as far as is known."""
        waits = [one.mean("cpu_wait", of=one.devices) or 0.0 for one in self.records.values()]
        if max(waits) > MOST_CPU_WAIT:
            return f"a rank waits for a CPU {percent(max(waits) / 100, 0)} of the time"
        threads = self.per_node * max(1, *(threads_of(one) for one in self.records.values()))
        if self.cpus is None or self.found.is_gpu or threads <= self.cpus:
            return None
        return f"{count(threads, 'thread')} share {count(self.cpus, 'CPU')}"

    def share(self, part: str) -> str:
        return percent(self.found.shares[part], 0)

    def of_step(self, seconds: float) -> str:
        timing = self.found.timing
        return (
            f"{duration(seconds)} of {duration(self.found.step_seconds)} a step, "
            f"average of {timing.window}"
        )

    def seconds(self, part: str) -> float:
        return self.found.shares[part] * self.found.step_seconds


def threads_of(record: RankRecord) -> int:
    """Torch's threads in a rank; 1 if it does not say."""
    said = [one["threads"] for one in record.others["recorder"] if "threads" in one]
    return int(record.start.get("threads") or (said[-1] if said else 1))


def device_means(record: RankRecord) -> dict[str, float]:
    """Means over a rank's `device` events, of the fields that they have."""
    names = (
        *("cpu", "workers_cpu", "utilization", "temperature", "clock", "clock_max"),
        *("memory_peak", "memory_total", "power", "power_limit"),
    )
    found = {name: record.mean(name, of=record.devices) for name in names}
    return {name: mean for name, mean in found.items() if mean is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """Why one rank is slower than the others."""

    words: str  # what follows "the others wait 57% of the time for rank 1"
    cause: str
    fix: str
    line: str | None = None
    doubt: str | None = None  # why it is not sure


def hot(facts: Facts, rank: int) -> Reason | None:
    """A GPU that is hot and runs below its full clock rate."""
    means, node = device_means(facts.records[rank]), facts.node_of(rank)
    clock = means.get("clock", 1.0) / (means.get("clock_max") or 1.0)
    if means.get("temperature", 0.0) < facts.limits.temperature or clock >= facts.limits.clock:
        return None
    at = f"{count(means['temperature'])} °C, at {percent(clock, 0)} of its full clock"
    fix = "tell the site that its cooling is insufficient"
    fix += f"; until then #SBATCH --exclude={node}" if node else ""
    return Reason(words=f": its GPU is hot ({at})", cause="thermal-throttling", fix=fix)
