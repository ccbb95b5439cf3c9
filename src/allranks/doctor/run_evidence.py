"""What a run has left behind: logs, events, error files, SLURM's accounting, kernel messages."""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from allranks.doctor.failure_facts import End, Processes
from allranks.doctor.finding import shown_path
from allranks.doctor.flight_recorder import is_ours
from allranks.doctor.log_search import Scanned, Source, num_lines
from allranks.machine.processes import output_of
from allranks.run import claims, files
from allranks.run.events import read_last_events
from allranks.run.failures import failed_ranks, is_echo
from allranks.run.folder import RunDir
from allranks.run.record import read_ends
from allranks.run.run_state import EndedJob
from allranks.run.tracebacks import in_a_line
from allranks.show.numbers import duration, metric
from allranks.slurm import commands as slurm

TAIL_BYTES = 1 << 18  # of a rank's events: what happened last
NONFINITE = b'"nonfinite"'
FIRST_NONFINITE = b'"event":"nonfinite"'
MAX_JOB_LOGS = 3
MAX_JOB_LOG_BYTES = 64 << 20
MAX_ERROR_BYTES = 16 << 20
DMESG_SECONDS = 5.0
SAMPLES_BYTES = 4 << 20  # of a rank's events: with short steps the samples are far apart
FIRST_NAMESPACE = 0xEFFFFFFC  # inode of the namespace with the kernel's own process numbers
OF_MEMORY = re.compile(r"(?i)\boom|out of memory|kill(?:ed)? process")
VICTIM = re.compile(r"(?i)kill(?:ed)? process (\d+)|oom-kill:.{0,2000}?\bpid=(\d+)")

Event = Mapping[str, Any]
Starts = Mapping[int, Event]


def starts_of(run: RunDir, attempt: int) -> Starts:
    """The start events of an attempt's ranks."""
    found = ((rank, run.start(attempt, rank)) for rank in run.ranks(attempt))
    return {rank: start for rank, start in found if start is not None}


def node_of(starts: Starts, rank: int) -> str | None:
    return starts.get(rank, {}).get("host")


def logs_of(run: RunDir, attempt: int, starts: Starts) -> list[Source]:
    """What every rank of an attempt printed and recorded, and what its job printed."""
    sources = []
    for rank in run.logs(attempt):
        path = run.log(attempt, rank)
        sources.append(Source(path, shown_path(path), rank, node_of(starts, rank)))
    tails = [
        tail
        for rank in run.ranks(attempt)
        for tail in _tail(run.events(attempt, rank), rank, node_of(starts, rank))
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
        start = max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES)
        file.seek(start)
        content = file.read()
        cut = content.find(b"\n") + 1 if start else 0  # begin with a whole line
        first = num_lines(path, start + cut) + 1
        return [Source(path, shown_path(path), rank, node, content[cut:], first)]
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
        node = node_of(starts, rank)
        found[rank] = End(rank, code, one.get("signal"), node, is_by_launcher=by_launcher)
    return dict(sorted(found.items()))


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
    if lost:  # which of the nodes it was, sinfo may show
        with suppress(slurm.SlurmError):
            nodes = ",".join(sorted(lost))
            said = slurm.call("sinfo", "-h", "-N", "-n", nodes, "-o", "%N %T %E")
            content = "\n".join(dict.fromkeys(said.splitlines())).encode()
            sources.insert(0, Source(Path("sinfo"), "sinfo", None, None, content))
    return sources


def span_of(run: RunDir, attempt: int) -> tuple[float, float]:
    """When an attempt began and when it last recorded anything."""
    records = [read_ends(run, attempt, rank) for rank in run.ranks(attempt)]
    now = time.time()
    first = min((each.first_time for each in records if each.first_time), default=now)
    return first, max((each.last_time for each in records if each.last_time), default=now)


# --- The kernel's messages --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class KernelLog:
    """The kernel's messages on this machine from the time of an attempt, if readable."""

    sources: Sequence[Source] = ()
    node: str | None = None
    victims: frozenset[int] = frozenset()  # all processes that it killed for memory

    def spares(self, node: str | None, processes: Processes) -> bool:
        """Whether it killed processes there, but none of the run."""
        if node is None or node != self.node or not self.victims:
            return False
        return not any((node, pid) in processes for pid in self.victims)


def processes_of(
    run: RunDir, attempt: int, starts: Starts, scanned: Iterable[Scanned]
) -> Processes:
    """Ranks by their processes, and by those that they started, such as loader workers."""
    found: Processes = {}
    with suppress(OSError):
        launcher, its_node = run.holder()
        found[its_node, launcher] = None
    for rank, start in starts.items():
        node = start.get("host")
        path = run.events(attempt, rank)
        for event in read_last_events(path, SAMPLES_BYTES, word=b'"processes"'):
            numbers = event.get("processes")
            for pid in numbers if isinstance(numbers, list) else ():
                found[node, pid] = rank
        if isinstance(start.get("pid"), int):
            found[node, start["pid"]] = rank
    # A worker may live for less than the time between two samples: torch names it when it dies.
    for hit in (hit for one in scanned for hit in one.hits):
        if hit.cause.slug == "worker-killed" and hit.rank is not None:
            for pid in re.findall(r"\d+", hit.fields.get("pids", "")):
                found.setdefault((node_of(starts, hit.rank), int(pid)), hit.rank)
    return found


def kernel_log(starts: Starts, since: float, until: float, processes: Processes) -> KernelLog:
    """The kernel's lines from the time of an attempt, if it ran here and they can be read.

    Those about memory are kept only if they name a process of the run: others are about other
    programs.
    """
    node = socket.gethostname()
    if node not in {node_of(starts, rank) for rank in starts}:
        return KernelLog()
    victims: set[int] = set()
    kept = []
    lines = (output_of(["dmesg", "--time-format", "iso"], DMESG_SECONDS) or "").split("\n")
    for line in (line for line in lines if _is_between(line, since, until)):
        if OF_MEMORY.search(line) is None:
            kept.append(line)
        elif (victim := VICTIM.search(line)) is not None and _counts_as_kernel():
            pid = int(victim[1] or victim[2])
            victims.add(pid)
            if (node, pid) in processes:
                kept.append(line)
    content = "\n".join(kept).encode()
    sources = [Source(Path("dmesg"), "dmesg", None, node, content)] if kept else []
    return KernelLog(sources, node, frozenset(victims))


def _counts_as_kernel() -> bool:
    """Whether processes have the same numbers here as in the kernel's messages."""
    with suppress(OSError):
        return os.stat("/proc/self/ns/pid").st_ino == FIRST_NAMESPACE
    return False


def _is_between(line: str, since: float, until: float) -> bool:
    stamp = line.partition(" ")[0].replace(",", ".")
    with suppress(ValueError):
        return since - 5 <= datetime.fromisoformat(stamp).timestamp() <= until + 60
    return False


# --- Events in words ---------------------------------------------------------------------------


def event_in_words(line: str) -> str:
    """What one line of a rank's events says; the line itself if it is not a whole event."""
    try:
        event = json.loads(line)
        return _SAY.get(event["event"], _others)(event)
    except (ValueError, KeyError, TypeError, AttributeError):
        return line


def _step(event: Event) -> str:
    values = {key: _number(event, key) for key in ("loss", "grad_norm") if key in event}
    odd = event.get("nonfinite") or {}
    values |= {key: f"{value} (not a number)" for key, value in odd.items()}
    words = [f"{key} {value}" for key, value in values.items()]
    words = words or [f"took {duration(event['seconds'])}"]
    return f"step {event['step']}: {', '.join(words)}"


def _nonfinite(event: Event) -> str:
    return f"step {event['step']}: the rank's own loss is {event['loss']}, for the first time"


def _metric(event: Event) -> str:
    return f"step {event['step']}: {event['name']} {_number(event, 'value')}"


def _end(event: Event) -> str:
    how = [f"by {event['signal']}"] if event.get("signal") else []
    if not how and event.get("exit") is not None:
        how = [f"with exit code {event['exit']}"]
    text = " ".join([f"the rank's end: {event['state']}", *how])
    error = event.get("error") or {}
    return f"{text}: {error['what']}" if error.get("what") else text


def _error(event: Event) -> str:
    """An error as failures report it; a rank that only exited has no message."""
    return f"what ended it: {in_a_line(dict(event)) or event.get('signal')}"


def _others(event: Event) -> str:
    said = {key: value for key, value in event.items() if key not in ("v", "t", "event")}
    words = [f"{key} {value}" for key, value in said.items() if not isinstance(value, dict | list)]
    return f"{event['event']}: {', '.join(words)}" if words else str(event["event"])


def _number(event: Event, key: str) -> str:
    """A number, or the word for one that JSON cannot hold."""
    odd = event.get("nonfinite") or {}
    return str(odd[key]) if key in odd else metric(event[key])


_SAY: Mapping[str, Callable[[Event], str]] = {
    "step": _step,
    "nonfinite": _nonfinite,
    "metric": _metric,
    "end": _end,
    "error": _error,
}
