"""What a run's events and logs say about its speed, for doctor/slow.py."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from allranks.doctor.finding import Evidence
from allranks.doctor.log_lines import num_lines
from allranks.run import files
from allranks.run.folder import RunDir
from allranks.run.record import RankRecord, newest_window, read_ends
from allranks.timing.steps import Timing, timing_of
from allranks.timing.timeline import DATA

RECENT_BYTES = 1 << 20  # of each rank's events: some thousand steps
LOG_BYTES = 1 << 18  # of the beginning of a log, where NCCL names its network
NCCL_LINES = re.compile(
    r"NCCL INFO .*(?:Using network|NET/Socket|NET/IB|NCCL_IB_DISABLE|NCCL_NET\b|No device found)"
)
NUMBERS = (
    *("utilization", "temperature", "clock", "clock_max", "memory_peak", "memory_total"),
    "workers_cpu",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFacts:
    """One rank, with means over its last steps and samples."""

    rank: int
    node: str | None = None
    events: str = ""  # the file
    last_line: int = 0  # of the last step in it
    step_samples: float = 0.0
    data_seconds: float = 0.0
    # Means over its `device` events; without those that they lack.
    means: Mapping[str, float] = field(default_factory=dict)
    num_workers: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowFacts:
    """What is known about a run's speed."""

    timing: Timing
    ranks: tuple[RankFacts, ...]
    cpus_allotted: int | None = None  # of the machine that started it
    is_task: bool = False  # of allranks: the job file has the settings
    nccl: tuple[Evidence, ...] = ()  # lines in which NCCL names its network

    @property
    def num_nodes(self) -> int:
        return len({rank.node for rank in self.ranks})

    def of(self, rank: int) -> RankFacts:
        return next(each for each in self.ranks if each.rank == rank)


def read_slow_facts(run: RunDir) -> SlowFacts | None:
    """From the run's last attempt; None if too little was measured."""
    attempts = run.attempts()
    if not attempts:
        return None
    attempt = attempts[-1]
    records = {rank: read_ends(run, attempt, rank, RECENT_BYTES) for rank in run.ranks(attempt)}
    steps = {rank: record.timed_steps for rank, record in records.items()}
    measured = timing_of(steps, newest_window(records.values()))
    if measured is None:
        return None
    first = measured.first_step
    ranks = [rank_facts(records[n], first, run.events(attempt, n)) for n in sorted(records)]
    return SlowFacts(
        timing=measured,
        ranks=tuple(ranks),
        cpus_allotted=(run.info().get("hardware") or {}).get("cpus_allotted"),
        is_task=any("rank_batch" in record.start for record in records.values()),
        nccl=tuple(nccl_lines(run.log(attempt, rank) for rank in records)),
    )


def rank_facts(record: RankRecord, first_step: int, path: Path) -> RankFacts:
    """One rank, from this step on."""
    steps = [event for number, event in record.timed_steps.items() if number >= first_step]
    devices = record.devices
    found = {name: record.mean(name, of=devices) for name in NUMBERS}
    workers = record.start.get("num_workers")
    if workers is None and devices:
        # A script: the processes that it had started most of the time.
        workers = round(statistics.median(int(e.get("num_workers", 0)) for e in devices))
    return RankFacts(
        rank=record.rank,
        node=record.start.get("host"),
        events=str(path),
        last_line=num_lines(path),
        step_samples=record.mean("samples", of=steps) or 0.0,
        data_seconds=record.mean(DATA, of=steps) or 0.0,
        means={name: mean for name, mean in found.items() if mean is not None},
        num_workers=workers,
    )


def nccl_lines(logs: Iterable[Path]) -> list[Evidence]:
    """What NCCL prints about its network, from the first log that has any of it."""
    for log in logs:
        try:
            with files.open_file(log) as file:
                text = file.read(LOG_BYTES).decode(errors="replace")
        except OSError:
            continue
        found = [
            Evidence(str(log), number, line.strip()[:400])
            for number, line in enumerate(text.splitlines(), start=1)
            if NCCL_LINES.search(line)
        ]
        if found:
            return found
    return []
