"""What a run's events and logs tell of its speed, gathered for doctor/slow.py. No torch."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from allranks.doctor.finding import Evidence
from allranks.doctor.log_lines import num_lines
from allranks.run import files
from allranks.run.events import read_last_events
from allranks.run.folder import RunDir
from allranks.timing.steps import Timing, timing_of
from allranks.timing.timeline import DATA

RECENT_BYTES = 1 << 20  # of each rank's events: some thousand steps
LOG_BYTES = 1 << 18  # of the beginning of a log, where NCCL says how it talks
NCCL_LINES = re.compile(
    r"NCCL INFO .*(?:Using network|NET/Socket|NET/IB|NCCL_IB_DISABLE|NCCL_NET\b|No device found)"
)
NUMBERS = (
    *("utilization", "temperature", "clock", "clock_max", "memory_peak", "memory_total"),
    *("cpu", "workers_cpu", "num_workers", "power", "power_limit"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFacts:
    """One rank: what it is, and means over its last steps and samples."""

    rank: int
    node: str | None = None
    events: str = ""  # the file
    last_line: int = 0  # of the last step in it
    step_samples: float = 0.0
    data_seconds: float = 0.0
    # Means of its `device` events; absent where it has none.
    means: Mapping[str, float] = field(default_factory=dict)
    num_workers: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowFacts:
    """A run, as far as its speed goes."""

    timing: Timing
    ranks: tuple[RankFacts, ...]
    cpus_allotted: int | None = None  # of the machine that started it
    is_task: bool = False  # of allranks, whose job file has the settings
    nccl: tuple[Evidence, ...] = ()  # lines in which NCCL says how it talks

    @property
    def num_nodes(self) -> int:
        return len({rank.node for rank in self.ranks})

    def of(self, rank: int) -> RankFacts:
        return next(each for each in self.ranks if each.rank == rank)


def read_slow_facts(run: RunDir) -> SlowFacts | None:
    """From the run's last attempt; None where too little was measured."""
    attempts = run.attempts()
    if not attempts:
        return None
    attempt = attempts[-1]
    events = {
        rank: read_last_events(run.events(attempt, rank), RECENT_BYTES)
        for rank in run.ranks(attempt)
    }
    steps = {
        rank: {e["step"]: e for e in of_rank if e["event"] == "step" and "seconds" in e}
        for rank, of_rank in events.items()
    }
    windows = [e for of_rank in events.values() for e in of_rank if e["event"] == "window"]
    measured = timing_of(steps, windows[-1] if windows else None)
    if measured is None:
        return None
    starts = {rank: run.start(attempt, rank) or {} for rank in events}
    ranks = [
        rank_facts(
            rank,
            events[rank],
            [steps[rank][n] for n in steps[rank] if measured.first_step <= n],
            starts[rank],
            run.events(attempt, rank),
        )
        for rank in sorted(events)
    ]
    return SlowFacts(
        timing=measured,
        ranks=tuple(ranks),
        cpus_allotted=(run.info().get("hardware") or {}).get("cpus_allotted"),
        is_task=any("rank_batch" in start for start in starts.values()),
        nccl=tuple(nccl_lines(run.log(attempt, rank) for rank in events)),
    )


def rank_facts(
    rank: int,
    events: Sequence[Mapping[str, Any]],
    steps: Sequence[Mapping[str, Any]],
    start: Mapping[str, Any],
    path: Path,
) -> RankFacts:
    devices = [event for event in events if event["event"] == "device"]
    means = {}
    for name in NUMBERS:
        values = [float(e[name]) for e in devices if isinstance(e.get(name), int | float)]
        if values:
            means[name] = statistics.fmean(values)
    workers = start.get("num_workers")
    if workers is None and devices:
        # A script's: the processes that it has started, most of the time.
        workers = round(statistics.median(int(e.get("num_workers", 0)) for e in devices))
    return RankFacts(
        rank=rank,
        node=start.get("host"),
        events=str(path),
        last_line=num_lines(path),
        step_samples=statistics.fmean(e.get("samples", 0) for e in steps) if steps else 0.0,
        data_seconds=statistics.fmean(e.get(DATA, 0.0) for e in steps) if steps else 0.0,
        means=means,
        num_workers=workers,
    )


def nccl_lines(logs: Iterable[Path]) -> list[Evidence]:
    """NCCL's own words about its network, from the first log that has any."""
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
