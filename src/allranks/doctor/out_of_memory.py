"""Whether memory was the cause: from the kernel's counts and messages, and the ranks' usage."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from allranks.doctor import run_evidence
from allranks.doctor.catalogue import load
from allranks.doctor.failure_facts import FailureFacts
from allranks.doctor.finding import Confidence, Evidence, Finding, shown_path
from allranks.doctor.judge import LEVELS, MAX_EVIDENCE, Candidate
from allranks.doctor.kernel_messages import Kernel
from allranks.doctor.run_evidence import MemoryCurve
from allranks.run.folder import RunDir
from allranks.run.stalls import ended_for
from allranks.show.numbers import size

FULL_SHARE = 0.85  # of the allotted memory: above it, a SIGKILL is likely the kernel's
KILLED = ("rank-died", "host-out-of-memory", "worker-killed")
CUT_OFF = re.compile(r"Connection(?:Reset|Refused)Error|EOFError|BrokenPipeError")
NAMES_IT = ("Killed process", "exceeded memory limit")  # what the kernel and SLURM print


def candidates(
    run: RunDir, attempt: int, facts: FailureFacts, curves: Sequence[MemoryCurve], said: Kernel
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
    fields = {"limit_words": words if beside and allotted else "", **facts.known}
    lines = [run_evidence.kill_evidence(run, attempt, one) for one in counted[:1]]
    cause = load()["host-out-of-memory"]
    sure: Confidence = "high" if counted else "medium"
    return [Candidate(cause, [], rank, sure, fields, LEVELS["root"], tuple(lines))]


def _counted(run: RunDir, attempt: int, facts: FailureFacts, said: Kernel) -> list[int]:
    """Ranks in whose cgroup the kernel killed something for memory.

    The count covers the whole cgroup; if messages say which processes were killed, they decide.
    """
    return [
        end.rank
        for end in facts.ends.values()
        if run_evidence.memory_kills(run, attempt, end.rank)
        and not said.spares(end.node, facts.processes)
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
