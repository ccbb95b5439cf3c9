"""The diagnosis of a run, from everything it has left."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from allranks.doctor import kernel, layouts, memory, run_evidence
from allranks.doctor.catalogue import load
from allranks.doctor.diagnose import read_logs
from allranks.doctor.facts import Facts, gather
from allranks.doctor.finding import Evidence, Finding
from allranks.doctor.flight import flight_source
from allranks.doctor.judge import judge, shown_path
from allranks.doctor.kernel import Kernel
from allranks.doctor.run_evidence import Starts
from allranks.doctor.scan import Source
from allranks.run import claims, missing, run_state
from allranks.run.events import to_json
from allranks.run.folder import RunDir
from allranks.slurm.reasons import waiting_reason

SOFT = ("nan-loss", "loss-scale-underflow", "launcher-killed")
MISSING = "missing-file"
BY_USER = "stopped by its user"
STOPPERS = ("slurm-time-limit", "slurm-preempted", "slurm-node-failure", "job-cancelled")


def diagnose_run(run: RunDir) -> list[Finding]:
    """What is wrong with a run; nothing where it is running or finished well."""
    queue = run_state.look_at_queue([run])
    row = run_state.describe(run, queue)
    attempts = run.attempts()
    if row["state"] == "queued" and not attempts:
        return _waiting(run, row, queue)
    if not attempts:
        return _never_started(run)
    attempt = attempts[-1]
    facts, said = read_attempt(run, attempt, queue)
    about_data = layouts.data_findings(run, attempt)
    if row["state"] == "stopped" and (by_slurm := _stopped_by_slurm(run, queue)):
        return [*by_slurm, *about_data]
    if row["state"] in ("finished", "running", "stopped"):
        # Words of errors in the log of a run that goes on, or went well, were not its end.
        return [*_soft_alone(facts), *about_data]
    curves = list(run_evidence.memory_curves(run, attempt))
    extra = memory.candidates(run, attempt, facts, curves, said)
    found = on_which_nodes(run, attempt, judge(facts, load(), extra))
    return [*(memory.explained(run, attempt, one, curves) for one in found), *about_data]


def on_which_nodes(run: RunDir, attempt: int, found: list[Finding]) -> list[Finding]:
    """Of a file that was not found, which nodes have it, where the job has looked."""
    seen = run.info().get("missing") or {}
    if seen.get("attempt") != attempt:
        return found
    title, fix = missing.in_words(seen, is_task=bool(run.job().get("task")))
    line = Evidence(shown_path(run.path / "run.json"), 0, f"missing: {to_json(seen)}")
    name = Path(seen["path"]).name
    same = [one for one in found if any(name in each.text for each in one.evidence)]
    told = same[0] if same else Finding(MISSING, title, fix)
    told = replace(told, cause=MISSING, title=title, fix=fix, confidence="high")
    return [told.with_evidence(line), *(one for one in found if one not in same)]


def read_attempt(run: RunDir, attempt: int, queue: run_state.Queue) -> tuple[Facts, Kernel]:
    """All that an attempt left, put together."""
    starts = run_evidence.starts_of(run, attempt)
    sources = run_evidence.logs_of(run, attempt, starts)
    sources += [one for path in run.path.rglob("*trace_rank_*") if (one := flight_source(path))]
    sources += run_evidence.accounting(_of_last_job(run, queue))
    scanned = read_logs(sources)
    processes = kernel.processes_of(run, attempt, starts, scanned)
    said = kernel.messages(starts, *run_evidence.span_of(run, attempt), processes)
    facts = gather(
        [*scanned, *read_logs(said.sources)],
        ends=run_evidence.ends_in_events(run, attempt, starts),
        known=_known(run, starts),
        situations=_situations(run),
        world=starts.world,
        processes=processes,
    )
    return facts, said


def _of_last_job(run: RunDir, queue: run_state.Queue) -> dict[str, run_state.EndedJob]:
    """How the job ended that trained the run last; all jobs where none is known to have."""
    holder = claims.newest(run.claims)
    if holder is not None and holder.job in queue.ended:
        return {holder.job: queue.ended[holder.job]}
    return queue.ended


def _stopped_by_slurm(run: RunDir, queue: run_state.Queue) -> list[Finding]:
    """Of a run whose ranks stopped in order: why, unless its user wanted it."""
    ended = str((run.info().get("ended") or {}).get("reason", ""))
    if run.info().get("backend") != "slurm" or ended.startswith(BY_USER):
        return []
    sources = [
        *run_evidence.accounting(_of_last_job(run, queue)),
        *run_evidence.job_logs(run),
        *_reason(run),
    ]
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
    return (*(("task",) if run.job().get("task") else ()), *slurm)


def _known(run: RunDir, starts: Starts) -> Mapping[str, str]:
    """Values of the job that a fix can be worked out from."""
    known = {}
    start = starts.events.get(min(starts.events, default=0), {})
    shares, accumulation = start.get("rank_batch"), start.get("accumulation")
    largest = max(shares) if isinstance(shares, list) and shares else shares
    if isinstance(largest, int) and isinstance(accumulation, int) and accumulation > 0:
        known["half_micro_batch"] = str(max(1, -(-largest // accumulation) // 2))
    rate = (run.job().get("optimizer") or {}).get("lr")
    if isinstance(rate, int | float):
        known["lower_lr"] = f"{rate / 10:g}"
    jobs = run.info().get("jobs") or []
    if jobs:
        known["job"] = str(jobs[-1])
    return known


def _waiting(run: RunDir, row: dict[str, Any], queue: run_state.Queue) -> list[Finding]:
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
    sources = [*(Source(path, shown_path(path)) for path in run.job_logs()), *_reason(run)]
    return judge(gather(read_logs(sources), situations=("slurm",)), load())


def _reason(run: RunDir) -> list[Source]:
    """Why nobody goes on with it, as whoever gave it up wrote it into its folder."""
    ended, path = (run.info().get("ended") or {}).get("reason"), run.path / "run.json"
    return [Source(path, shown_path(path), content=str(ended).encode())] if ended else []
