"""The diagnosis of a run, from everything it has left."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from allranks import claims, standing
from allranks.doctor import layouts, left
from allranks.doctor.catalogue import load
from allranks.doctor.diagnose import read_logs
from allranks.doctor.facts import Facts, gather
from allranks.doctor.finding import Confidence, Evidence, Finding
from allranks.doctor.flight import flight_source
from allranks.doctor.judge import LEVELS, Candidate, judge, shown_path
from allranks.doctor.left import MemoryCurve, Starts, job_of
from allranks.doctor.scan import Source
from allranks.rundir import RunDir
from allranks.slurm_reasons import waiting_reason

FULL_SHARE = 0.85  # of the memory that was allotted: a kill at this height is the kernel's
SOFT = ("nan-loss", "loss-scale-underflow")
BY_USER = "stopped by its user"
STOPPERS = ("slurm-time-limit", "slurm-preempted", "slurm-node-failure", "job-cancelled")
KILLED = ("rank-died", "host-out-of-memory", "worker-killed")


def diagnose_run(run: RunDir) -> list[Finding]:
    """What is wrong with a run; nothing where it is running or finished well."""
    queue = standing.look_at_queue([run])
    row = standing.describe(run, queue)
    attempts = run.attempts()
    if row["state"] == "queued" and not attempts:
        return _waiting(run, row, queue)
    if not attempts:
        return _never_started(run)
    attempt = attempts[-1]
    facts, curves = read_attempt(run, attempt, queue)
    about_data = layouts.data_findings(run, attempt)
    if row["state"] == "stopped" and (by_slurm := _stopped_by_slurm(run, queue)):
        return [*by_slurm, *about_data]
    if row["state"] in ("finished", "running", "stopped"):
        # Words of errors in the log of a run that goes on, or went well, were not its end.
        return [*_soft_alone(facts), *about_data]
    extra = _memory_candidates(run, attempt, facts, curves)
    found = judge(facts, load(), extra)
    return [
        *(_with_memory(_of_hungriest(run, attempt, one, curves), curves) for one in found),
        *about_data,
    ]


def read_attempt(
    run: RunDir, attempt: int, queue: standing.Queue
) -> tuple[Facts, list[MemoryCurve]]:
    """All that an attempt left, put together."""
    starts = left.starts_of(run, attempt)
    sources = left.logs_of(run, attempt, starts)
    sources += [one for path in run.path.rglob("*trace_rank_*") if (one := flight_source(path))]
    sources += left.accounting(_of_last_job(run, queue))
    sources += left.kernel_messages(starts, *left.span_of(run, attempt))
    facts = gather(
        read_logs(sources),
        ends=left.ends_in_events(run, attempt, starts),
        known=_known(run, starts),
        situations=_situations(run),
        world=starts.world,
        pids=starts.pids,
    )
    return facts, list(left.memory_curves(run, attempt))


def _of_last_job(run: RunDir, queue: standing.Queue) -> dict[str, standing.EndedJob]:
    """How the job ended that trained the run last; all jobs where none is known to have."""
    holder = claims.newest(run.claims)
    if holder is not None and holder.job in queue.ended:
        return {holder.job: queue.ended[holder.job]}
    return queue.ended


def _stopped_by_slurm(run: RunDir, queue: standing.Queue) -> list[Finding]:
    """Of a run whose ranks stopped in order: why, unless its user wanted it."""
    ended = str((run.info().get("ended") or {}).get("reason", ""))
    if run.info().get("backend") != "slurm" or ended.startswith(BY_USER):
        return []
    sources = [*left.accounting(_of_last_job(run, queue)), *left.job_logs(run), *_reason(run)]
    facts = gather(read_logs(sources), known=_known(run, Starts({})), situations=_situations(run))
    facts.hits = [hit for hit in facts.hits if hit.cause.slug in STOPPERS]
    facts.raised, facts.ends = [], {}
    return judge(facts, load())


def _soft_alone(facts: Facts) -> list[Finding]:
    """Of a run that is not failed: a loss that is no number, and the like."""
    facts.hits = [hit for hit in facts.hits if hit.cause.slug in SOFT]
    facts.raised, facts.ends = [], {}
    return judge(facts, load())


def _situations(run: RunDir) -> tuple[str, ...]:
    slurm = ("slurm",) if run.info().get("backend") == "slurm" else ()
    return (*(("task",) if job_of(run).get("task") else ()), *slurm)


def _known(run: RunDir, starts: Starts) -> Mapping[str, str]:
    """Values of the job that a fix can be worked out from."""
    known = {}
    start = starts.events.get(min(starts.events, default=0), {})
    shares, accumulation = start.get("rank_batch"), start.get("accumulation")
    largest = max(shares) if isinstance(shares, list) and shares else shares
    if isinstance(largest, int) and isinstance(accumulation, int) and accumulation > 0:
        known["half_micro_batch"] = str(max(1, -(-largest // accumulation) // 2))
    rate = (job_of(run).get("optimizer") or {}).get("lr")
    if isinstance(rate, int | float):
        known["lower_lr"] = f"{rate / 10:g}"
    jobs = run.info().get("jobs") or []
    if jobs:
        known["job"] = str(jobs[-1])
    return known


def _waiting(run: RunDir, row: dict[str, Any], queue: standing.Queue) -> list[Finding]:
    cause = load()["slurm-pending"]
    jobs = [queue.jobs[job] for job in run.info().get("jobs", []) if job in queue.jobs]
    found = []
    for job in jobs[:1]:
        words = waiting_reason(job.reason)
        fields = {"reason": words}
        title = cause.words({"reason": f": {words}"})
        line = Evidence("squeue", 0, f"{job.job} {job.state} ({job.reason})")
        found.append(Finding(cause.slug, title, cause.advice(fields), None, None, "high", (line,)))
    return found


def _never_started(run: RunDir) -> list[Finding]:
    """A job that never ran a rank: what it said, or why it was refused."""
    jobs = [Path(path) for path in sorted(run.path.glob("slurm-*.log"))]
    sources = [*(Source(path, shown_path(path)) for path in jobs), *_reason(run)]
    return judge(gather(read_logs(sources), situations=("slurm",)), load())


def _reason(run: RunDir) -> list[Source]:
    """Why nobody goes on with it, as whoever gave it up wrote it into its folder."""
    ended, path = (run.info().get("ended") or {}).get("reason"), run.path / "run.json"
    return [Source(path, shown_path(path), content=str(ended).encode())] if ended else []


def _memory_candidates(
    run: RunDir, attempt: int, facts: Facts, curves: list[MemoryCurve]
) -> list[Candidate]:
    """A rank that the kernel killed for its memory, by its count; or killed when there was none."""
    killed = [end.rank for end in facts.ends.values() if end.signal == "SIGKILL"]
    counted = [rank for rank in facts.ends if left.memory_kills(run, attempt, rank)]
    suspects = killed or counted
    if not suspects:
        return []
    # Of several that were killed, the kernel took first the one that had most.
    at_last = {curve.rank: curve.last for curve in curves}
    rank = max(suspects, key=lambda one: at_last.get(one, 0))
    node = facts.ends[rank].node
    beside = {one for one in at_last if (run.start(attempt, one) or {}).get("host") == node}
    used = sum(at_last[one] for one in beside)
    hardware = run.info().get("hardware") or {}
    allotted = hardware.get("memory_allotted_bytes") or hardware.get("memory_bytes") or 0
    if not counted and (not beside or used < FULL_SHARE * allotted):
        return []
    words = f": the ranks had {used / 2**30:.1f} of {allotted / 2**30:.1f} GiB when last seen"
    fields = {"limit_words": words if beside and allotted else "", **facts.known}
    lines = [left.kill_evidence(run, attempt, one) for one in counted[:1]]
    lines += [Evidence(shown_path(one.path), 0, one.in_words) for one in curves if one.rank == rank]
    cause = load()["host-out-of-memory"]
    sure: Confidence = "high" if counted else "medium"
    return [Candidate(cause, [], rank, sure, fields, LEVELS["root"], tuple(lines))]


def _of_hungriest(run: RunDir, attempt: int, found: Finding, curves: list[MemoryCurve]) -> Finding:
    """Where SLURM ended all ranks for the memory of one: the one that grew most of all."""
    if found.cause != "host-out-of-memory" or found.rank is not None or not curves:
        return found
    hungriest = max(curves, key=lambda curve: curve.grown)
    if 2 * hungriest.grown <= sum(curve.grown for curve in curves):
        return found
    node = (run.start(attempt, hungriest.rank) or {}).get("host")
    return replace(found, rank=hungriest.rank, node=node)


def _with_memory(found: Finding, curves: list[MemoryCurve]) -> Finding:
    """The memory curve of the culprit, where memory may be the cause."""
    if found.cause not in KILLED or found.rank is None:
        return found
    for curve in curves:
        line = Evidence(shown_path(curve.path), 0, curve.in_words)
        if curve.rank == found.rank and line not in found.evidence:
            return found.with_evidence(line)
    return found
