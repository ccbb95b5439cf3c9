"""Everything that a run has left behind: logs, events, error files, SLURM's accounting."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from allranks.doctor.failure_facts import End
from allranks.doctor.finding import Evidence, shown_path
from allranks.doctor.flight_recorder import is_ours
from allranks.doctor.log_search import Source
from allranks.run import claims, files
from allranks.run.events import read_last_events
from allranks.run.failures import failed_ranks, is_echo
from allranks.run.folder import RunDir
from allranks.run.record import read_ends
from allranks.run.run_state import EndedJob
from allranks.show.numbers import duration, size
from allranks.slurm import commands as slurm

TAIL_BYTES = 1 << 18  # of a rank's events: what happened last
NONFINITE = b'"nonfinite"'
FIRST_NONFINITE = b'"event":"nonfinite"'
MAX_JOB_LOGS = 3
MAX_JOB_LOG_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Starts:
    """The start events of an attempt's ranks."""

    events: dict[int, dict[str, Any]]

    @property
    def world(self) -> int | None:
        sizes = [start["world_size"] for start in self.events.values() if "world_size" in start]
        return int(sizes[0]) if sizes else None

    def node(self, rank: int) -> str | None:
        return self.events.get(rank, {}).get("host")


def starts_of(run: RunDir, attempt: int) -> Starts:
    found = ((rank, run.start(attempt, rank)) for rank in run.ranks(attempt))
    return Starts({rank: start for rank, start in found if start is not None})


def logs_of(run: RunDir, attempt: int, starts: Starts) -> list[Source]:
    """What every rank of an attempt printed and recorded, and what its job printed."""
    sources = []
    for rank in run.logs(attempt):
        path = run.log(attempt, rank)
        sources.append(Source(path, shown_path(path), rank, starts.node(rank)))
    tails = [
        tail
        for rank in run.ranks(attempt)
        for tail in _tail(run.events(attempt, rank), rank, starts.node(rank))
    ]
    sources += [*_first_nonfinite(tails), *tails, *job_logs(run)]
    sources += [error for path in run.path.rglob("error.json") if (error := error_file(path))]
    return sources


def job_logs(run: RunDir) -> list[Source]:
    """What the job that last trained the run has printed since it last started."""
    holder = claims.newest(run.claims)
    job = holder.job if holder is not None else ""
    own = run.path / f"slurm-{job}.log"
    if own not in run.job_logs():  # no job got that far
        return [Source(path, shown_path(path)) for path in run.job_logs()[-MAX_JOB_LOGS:]]
    try:
        # A requeued job goes on in the same file: why it was requeued no longer matters.
        content = files.read_bytes(own, MAX_JOB_LOG_BYTES)
    except OSError:
        return [Source(own, shown_path(own))]
    start = max(0, content.rfind(f"allranks: {run.name}: job {job} on ".encode()))
    first = content.count(b"\n", 0, start) + 1
    return [Source(own, shown_path(own), None, None, content[start:], first)]


def _tail(path: Path, rank: int, node: str | None) -> list[Source]:
    """The end of a rank's events, as lines to search."""
    with suppress(OSError), files.open_file(path) as file:
        size = file.seek(0, os.SEEK_END)
        start = max(0, size - TAIL_BYTES)
        file.seek(0)
        before = _newlines(file, start)
        content = file.read()
        if start:  # start at the next whole line
            cut = content.find(b"\n") + 1
            content, before = content[cut:], before + 1
        return [Source(path, shown_path(path), rank, node, content, before + 1)]
    return []


def _first_nonfinite(tails: Sequence[Source]) -> list[Source]:
    """The lines that say since when losses are not numbers, however far back."""
    if not any(NONFINITE in (tail.content or b"") for tail in tails):
        return []
    found = []
    for tail in tails:
        with suppress(OSError), files.open_file(tail.path) as file:
            for number, line in enumerate(file, 1):
                if number >= tail.first_line:
                    break
                if FIRST_NONFINITE in line:
                    found.append(replace(tail, content=line, first_line=number))
                    break
    return found


def _newlines(file: Any, num_bytes: int) -> int:
    count = 0
    while num_bytes > 0 and (chunk := file.read(min(num_bytes, 1 << 20))):
        count += chunk.count(b"\n")
        num_bytes -= len(chunk)
    return count


MAX_ERROR_BYTES = 16 << 20


def error_file(path: Path) -> Source | None:
    """torchelastic's error file: a rank's traceback as JSON."""
    if not is_ours(path):
        return None  # a log from elsewhere may name any path
    with suppress(OSError, ValueError, AttributeError, TypeError, LookupError):
        message = files.parse_json(files.read_bytes(path, MAX_ERROR_BYTES))["message"]
        text = message if isinstance(message, str) else message["extraInfo"]["py_callstack"]
        rank = re.search(r"(?:^|/)(\d+)/error\.json$", str(path))
        content = text.encode(errors="replace")
        return Source(path, shown_path(path), int(rank[1]) if rank else None, None, content)
    return None


def ends_in_events(run: RunDir, attempt: int, starts: Starts) -> dict[int, End]:
    """How each rank ended, according to itself or the launcher."""
    found = {}
    for one in failed_ranks(run, attempt):
        rank, code = one["rank"], one.get("exit")
        by_launcher = is_echo(one) or code is None
        found[rank] = End(
            rank, code, one.get("signal"), starts.node(rank), is_by_launcher=by_launcher
        )
    return dict(sorted(found.items()))


def memory_kills(run: RunDir, attempt: int, rank: int) -> int:
    """How many processes the kernel killed for memory, as counted when a rank ended."""
    return int((run.end(attempt, rank) or {}).get("memory_kills", 0))


def kill_evidence(run: RunDir, attempt: int, rank: int) -> Evidence:
    """The line that has this count."""
    path, count = run.events(attempt, rank), memory_kills(run, attempt, rank)
    with files.open_file(path) as file:
        lines = [number for number, line in enumerate(file, 1) if b'"memory_kills"' in line]
    processes = "one process" if count == 1 else f"{count} processes"
    text = f"the kernel killed {processes} in the run's cgroup, which was out of memory"
    return Evidence(shown_path(path), lines[-1] if lines else 0, text)


def accounting(ended: Mapping[str, EndedJob]) -> list[Source]:
    """What SLURM remembers about the run's jobs, and about nodes that it lost."""
    sources, lost = [], set()
    for job in ended.values():
        state = job.state.split()[0] if job.state else "UNKNOWN"
        text = f"JobID={job.job} State={state} ExitCode={job.exit_code}"
        is_lost = state == "NODE_FAIL"
        lost |= set(job.nodes if is_lost else ())
        node = job.nodes[0] if is_lost and len(job.nodes) == 1 else None
        sources.append(Source(Path("sacct"), "sacct", None, node, text.encode()))
    return [*node_states(sorted(lost)), *sources]


def node_states(nodes: Sequence[str]) -> list[Source]:
    """What SLURM now says about nodes, one of which it lost."""
    if not nodes:
        return []
    with suppress(slurm.SlurmError):
        said = slurm.call("sinfo", "-h", "-N", "-n", ",".join(nodes), "-o", "%N %T %E")
        content = "\n".join(dict.fromkeys(said.splitlines())).encode()
        return [Source(Path("sinfo"), "sinfo", None, None, content)]
    return []


def span_of(run: RunDir, attempt: int) -> tuple[float, float]:
    """When an attempt began and when it last recorded anything."""
    records = [read_ends(run, attempt, rank) for rank in run.ranks(attempt)]
    now = time.time()
    first = min((each.first_time for each in records if each.first_time), default=now)
    return first, max((each.last_time for each in records if each.last_time), default=now)


@dataclass(frozen=True, slots=True)
class MemoryCurve:
    """A rank's peak host memory in bytes over time."""

    rank: int
    path: Path
    points: Sequence[tuple[float, int]]

    @property
    def last(self) -> int:
        return self.points[-1][1]

    @property
    def grown(self) -> int:
        return self.last - self.points[0][1]

    @property
    def in_words(self) -> str:
        span = duration(self.points[-1][0] - self.points[0][0], whole=True)
        sizes = f"{size(self.points[0][1])} to {size(self.last)}"
        return f"host memory of rank {self.rank}: {sizes} in the last {span}"


def memory_curves(run: RunDir, attempt: int) -> Iterator[MemoryCurve]:
    """Every rank's recent memory, if the probe recorded it."""
    for rank in run.ranks(attempt):
        path = run.events(attempt, rank)
        points = [
            (float(event["t"]), int(event["host_memory"]))
            for event in read_last_events(path, TAIL_BYTES, kind="device")
            if event.get("host_memory") is not None
        ]
        if points:
            yield MemoryCurve(rank, path, points)
