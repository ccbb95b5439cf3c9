"""Whether memory was the cause: from the kernel's counts and messages, and the ranks' usage."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from allranks.doctor.culprit import LEVELS, Candidate
from allranks.doctor.failure_facts import FailureFacts
from allranks.doctor.finding import Confidence, Evidence, Finding, shown_path
from allranks.doctor.judge import MAX_EVIDENCE
from allranks.doctor.run_evidence import TAIL_BYTES, KernelLog
from allranks.run import files
from allranks.run.events import read_last_events
from allranks.run.folder import RunDir
from allranks.run.stalls import ended_for
from allranks.show.numbers import duration, size

FULL_SHARE = 0.85  # of the allotted memory: above it, a SIGKILL is likely the kernel's
KILLED = ("rank-died", "host-out-of-memory", "worker-killed")
CUT_OFF = re.compile(r"Connection(?:Reset|Refused)Error|EOFError|BrokenPipeError")
NAMES_IT = ("Killed process", "exceeded memory limit")  # what the kernel and SLURM print


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


def memory_kills(run: RunDir, attempt: int, rank: int) -> int:
    """How many processes the kernel killed for memory, as counted when a rank ended."""
    return int((run.end(attempt, rank) or {}).get("memory_kills", 0))


def kill_evidence(run: RunDir, attempt: int, rank: int) -> Evidence:
    """The line that has this count."""
    path, killed = run.events(attempt, rank), memory_kills(run, attempt, rank)
    with files.open_file(path) as file:
        lines = [number for number, line in enumerate(file, 1) if b'"memory_kills"' in line]
    processes = "one process" if killed == 1 else f"{killed} processes"
    text = f"the kernel killed {processes} in the run's cgroup, which was out of memory"
    return Evidence(shown_path(path), lines[-1] if lines else 0, text)


def candidates(
    run: RunDir,
    attempt: int,
    facts: FailureFacts,
    curves: Sequence[MemoryCurve],
    said: KernelLog,
) -> list[Candidate]:
    """A rank that was killed while the kernel counted memory kills, or with memory nearly full."""
    if ended_for(run, attempt) is not None:
        return []
    counted = _counted(run, attempt, facts, said)
    ends = facts.ends.values()
    killed = [end.rank for end in ends if end.signal == "SIGKILL" and not end.is_by_launcher]
    if not killed and counted:
        killed = _lost_workers(facts)
    if not killed:
        return []
    # Of several that were killed, the kernel took the one with most memory first.
    at_last = {curve.rank: curve.last for curve in curves}
    rank = max(killed, key=lambda one: at_last.get(one, 0))
    node = (run.start(attempt, rank) or {}).get("host")
    beside = {one for one in at_last if (run.start(attempt, one) or {}).get("host") == node}
    used = sum(at_last[one] for one in beside)
    hardware = run.info().get("hardware") or {}
    allotted = hardware.get("memory_allotted_bytes") or hardware.get("memory_bytes") or 0
    if not counted and (not beside or not allotted or used < FULL_SHARE * allotted):
        return []
    words = f": the ranks had {size(used)} of {size(allotted)} when last seen"
    fields = {"limit_words": words if beside and allotted else ""}
    lines = [kill_evidence(run, attempt, one) for one in counted[:1]]
    sure: Confidence = "high" if counted else "medium"
    root = LEVELS["root"]
    return [Candidate("host-out-of-memory", rank, sure, (), fields, root, tuple(lines))]


def _counted(run: RunDir, attempt: int, facts: FailureFacts, said: KernelLog) -> list[int]:
    """Ranks in whose cgroup the kernel killed something for memory.

    The count covers the whole cgroup; if messages say which processes were killed, they decide.
    """
    return [
        end.rank
        for end in facts.ends.values()
        if memory_kills(run, attempt, end.rank) and not said.spares(end.node, facts.processes)
    ]


def _lost_workers(facts: FailureFacts) -> list[int]:
    """Ranks that report a loader worker as killed, or gone in the middle of a batch.

    In the latter case, torch does not say how the worker ended.
    """
    hits = facts.of("worker-killed")
    told = [
        hit.rank
        for hit in hits
        if hit.fields.get("how", "").lower() == "killed" or CUT_OFF.search(hit.line.text)
    ]
    return [rank for rank in told if rank is not None]


def explained(run: RunDir, attempt: int, found: Finding, curves: Sequence[MemoryCurve]) -> Finding:
    """A finding that memory may have caused, with its rank and that rank's memory usage."""
    if found.cause not in KILLED:
        return found
    if found.rank is None and found.cause == "host-out-of-memory":
        found = _of_hungriest(run, attempt, found, curves)
    rank = found.rank
    own = [Evidence(shown_path(one.path), 0, one.in_words) for one in curves if one.rank == rank]
    if found.cause != "host-out-of-memory":
        return found.with_evidence(*own)
    told = sorted(found.evidence, key=lambda line: not any(part in line.text for part in NAMES_IT))
    counted = [line for line in told if line.file.endswith(".jsonl")]
    others = [line for line in told if line not in counted]
    return replace(found, evidence=tuple([*own, *counted, *others][:MAX_EVIDENCE]))


def _of_hungriest(
    run: RunDir, attempt: int, found: Finding, curves: Sequence[MemoryCurve]
) -> Finding:
    """If SLURM ended all ranks for the memory of one: the one that grew most."""
    if not curves:
        return found
    hungriest = max(curves, key=lambda curve: curve.grown)
    if 2 * hungriest.grown <= sum(curve.grown for curve in curves):
        return found
    node = (run.start(attempt, hungriest.rank) or {}).get("host")
    return replace(found, rank=hungriest.rank, node=node)
