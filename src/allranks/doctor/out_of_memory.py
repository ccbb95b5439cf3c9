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
from allranks.run.events import read_events, read_last_events
from allranks.run.folder import RunDir
from allranks.run.stalls import ended_for
from allranks.show.numbers import duration, size

FULL_SHARE = 0.85  # of the allotted memory: above it, a SIGKILL is likely the kernel's
KILLED = ("rank-died", "host-out-of-memory", "worker-killed")
FULL = ("cuda-out-of-memory", "cuda-memory-fragmented")
CUT_OFF = re.compile(r"Connection(?:Reset|Refused)Error|EOFError|BrokenPipeError")
NAMES_IT = ("Killed process", "exceeded memory limit")  # what the kernel and SLURM print


@dataclass(frozen=True, slots=True)
class MemoryCurve:
    """A rank's host memory in bytes over time; in old runs, its peak."""

    rank: int
    path: Path
    points: Sequence[tuple[float, int]]
    shared: int = 0  # of the last point, what other ranks may use as well

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
        events = [
            {"host_memory_now": event.get("host_memory"), **event}
            for event in read_last_events(path, TAIL_BYTES, kind="device")
        ]
        known = [event for event in events if event["host_memory_now"] is not None]
        points = [(float(event["t"]), int(event["host_memory_now"])) for event in known]
        if points:
            yield MemoryCurve(rank, path, points, known[-1].get("host_memory_shared", 0))


def used_by(curves: Sequence[MemoryCurve]) -> int:
    """Memory that the ranks of a node used when last seen; shared memory is counted once."""
    shared = max((curve.shared for curve in curves), default=0)
    return sum(curve.last - curve.shared for curve in curves) + shared


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


def memory_candidates(
    run: RunDir, attempt: int, facts: FailureFacts, curves: Sequence[MemoryCurve], said: KernelLog
) -> list[Candidate]:
    """A rank that was killed while the kernel counted memory kills, or with memory nearly full."""
    if ended_for(run, attempt) is not None:
        return []
    ends = facts.ends.values()
    counted = [end.rank for end in ends if memory_kills(run, attempt, end.rank)]
    # A count covers the whole cgroup; if messages say which processes were killed, they decide.
    counted = [rank for rank in counted if not said.spares(facts.ends[rank].node, facts.processes)]
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
    used = used_by([curve for curve in curves if curve.rank in beside])
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


def _lost_workers(facts: FailureFacts) -> list[int]:
    """Ranks that report a loader worker as killed, or gone in the middle of a batch.

    In the latter case, torch does not say how the worker ended.
    """
    return [
        hit.rank
        for hit in facts.hits_of("worker-killed")
        if hit.fields.get("how", "").lower() == "killed" or CUT_OFF.search(hit.line.text)
        if hit.rank is not None
    ]


def what_filled(run: RunDir, attempt: int, rank: int) -> Evidence | None:
    """What was in a GPU's full memory, as its rank counted it."""
    path = run.events(attempt, rank)
    found = [one for one in read_last_events(path, TAIL_BYTES, kind="error") if one.get("filled")]
    if not found:
        return None
    sizes, lines = found[-1]["filled"], found[-1].get("filled_by", ())
    names = {"parameters": "parameters", "gradients": "gradients", "optimizer": "optimizer state"}
    parts = [f"{words} {size(sizes[name])}" for name, words in names.items() if name in sizes]
    rest = ", ".join(f"{line} {size(num_bytes)}" for line, num_bytes in lines) or "not recorded"
    kept = read_events(path, kind="kept", word=b'"kept"')
    if grew := [one["line"] for one in kept if one["where"] == "device"]:
        rest = f"it grew with every step, at {grew[-1]}"
    text = f"in the GPU's memory: {', '.join(parts)}; the rest {size(sizes.get('rest'))} ({rest})"
    return Evidence(shown_path(path), 0, text)


def with_usage(run: RunDir, attempt: int, found: Finding, curves: Sequence[MemoryCurve]) -> Finding:
    """A finding that memory may have caused, with its rank and that rank's memory usage."""
    if found.cause in FULL and found.rank is not None:
        filled = what_filled(run, attempt, found.rank)
        return found if filled is None else found.with_evidence(filled)
    if found.cause not in KILLED:
        return found
    is_memory = found.cause == "host-out-of-memory"
    if found.rank is None and is_memory and curves:
        # SLURM ended all ranks, perhaps for the memory of one: the one that grew most.
        most = max(curves, key=lambda curve: curve.grown)
        if 2 * most.grown > sum(curve.grown for curve in curves):
            node = (run.start(attempt, most.rank) or {}).get("host")
            found = replace(found, rank=most.rank, node=node)
    rank = found.rank
    own = [Evidence(shown_path(one.path), 0, one.in_words) for one in curves if one.rank == rank]
    if not is_memory:
        return found.with_evidence(*own)

    def is_weaker(line: Evidence) -> tuple[bool, bool]:
        is_count = line.file.endswith(".jsonl")
        return not is_count, not any(part in line.text for part in NAMES_IT)

    told = sorted(found.evidence, key=is_weaker)
    return replace(found, evidence=(*own, *told)[:MAX_EVIDENCE])
