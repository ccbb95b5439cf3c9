"""How runs stand, wherever they are: one look at the queue, the rest from their folders."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from allranks.errors import AllranksError
from allranks.run import claims
from allranks.run.events import read_last_events
from allranks.run.failures import failure, failure_in_words
from allranks.run.folder import RunDir, State
from allranks.run.record import final_step
from allranks.show.text import plain
from allranks.slurm import commands as slurm
from allranks.slurm import nodelist
from allranks.slurm.reasons import end_reason, waiting_reason

QUEUE_FORMAT = "%i|%T|%r|%S|%N|%L|%l|%Q"
ENDED_FIELDS = "JobIDRaw,State,ExitCode,End,NodeList"
# States of a job on its nodes; squeue lists those in any other because they wait.
RUNNING = ("RUNNING", "COMPLETING", "CONFIGURING", "STAGE_OUT", "SIGNALING", "SUSPENDED", "STOPPED")
RECENT_STEPS_BYTES = 1 << 15


@dataclass(frozen=True, slots=True)
class QueuedJob:
    """One line of squeue."""

    job: str
    state: str
    reason: str
    start: str | None  # when it began, or is expected to
    nodes: tuple[str, ...]

    @property
    def waits(self) -> bool:
        return self.state not in RUNNING


@dataclass(frozen=True, slots=True)
class EndedJob:
    """What sacct remembers of a job."""

    job: str
    state: str
    exit_code: str
    nodes: tuple[str, ...] = ()


@dataclass(slots=True)
class Queue:
    """All of the user's jobs at one moment. `silent`: why SLURM could not be asked."""

    jobs: dict[str, QueuedJob] = field(default_factory=dict)
    ended: dict[str, EndedJob] = field(default_factory=dict)
    silent: str | None = None


def parse_queue(printed: str) -> dict[str, QueuedJob]:
    """What `squeue -h -o QUEUE_FORMAT` printed."""
    found = {}
    for line in printed.splitlines():
        job, state, reason, start, nodes, *_ = [*line.split("|"), "", "", "", "", ""]
        if not job.strip().isdigit():
            continue  # an array's, or a message of the site's
        with suppress(AllranksError):
            found[job] = QueuedJob(
                job,
                state,
                reason,
                None if start in ("", "N/A", "Unknown") else start,
                tuple(nodelist.expand(nodes)),
            )
    return found


def parse_ended(printed: str) -> dict[str, EndedJob]:
    """What `sacct -n -P -X -o ENDED_FIELDS` printed; the last line on a job counts."""
    found = {}
    for line in printed.splitlines():
        job, state, exit_code, _, nodes, *_ = [*line.split("|"), "", "", "", "", ""]
        if not job.isdigit():
            continue
        found[job] = EndedJob(job, state, exit_code)
        with suppress(AllranksError):  # "None assigned"
            found[job] = EndedJob(job, state, exit_code, tuple(nodelist.expand(nodes)))
    return found


def look_at_queue(runs: Sequence[RunDir]) -> Queue:
    """One squeue for all of the user's jobs, and one sacct for those that have left it."""
    wanted = {run.name: run.info().get("jobs", []) for run in runs}
    wanted = {name: jobs for name, jobs in wanted.items() if jobs}
    if not wanted:
        return Queue()
    queue = Queue()
    try:
        printed = slurm.call("squeue", "-h", "-u", str(os.getuid()), "-o", QUEUE_FORMAT)
        queue.jobs = parse_queue(printed)
    except slurm.SlurmError as error:
        return Queue(silent=error.what)
    gone = [
        job
        for run in runs
        if run.name in wanted and run.info().get("ended") is None
        for job in wanted[run.name]
        if job not in queue.jobs
    ]
    if gone:
        with suppress(slurm.SlurmError):  # there is no sacct without a database
            queue.ended = parse_ended(
                slurm.call("sacct", "-n", "-P", "-X", "-j", ",".join(gone), "-o", ENDED_FIELDS)
            )
    return queue


def describe(run: RunDir, queue: Queue) -> dict[str, Any]:
    """One run as `allranks ls --json` shows it; `problem`: what is wrong with its folder."""
    try:
        return _describe(run, queue) | {"problem": run.problem()}
    except Exception as error:  # what nobody foresaw costs this run its line, not others theirs
        nothing = dict.fromkeys(("reason", "step", "steps", "seconds_left", "expected_start"))
        return {
            **{"run": run.name, "run_dir": str(run.path), "state": "failed", "layout": ""},
            **{"jobs": [], **nothing, "job": None, "nodes": [], "attempt": None},
            "problem": unreadable(error),
        }


def unreadable(error: Exception) -> str:
    """That a folder holds something that no reader can make sense of."""
    return f"its folder cannot be read ({type(error).__name__}: {plain(str(error))})"


def _describe(run: RunDir, queue: Queue) -> dict[str, Any]:
    info = run.info()
    jobs = [queue.jobs[job] for job in info.get("jobs", []) if job in queue.jobs]
    state = state_of(run, info, jobs, queue)
    active = [job for job in jobs if job.state in RUNNING]
    holder = claims.newest(run.claims)
    layout = info.get("layout", "")
    if state == "running" and holder is not None and holder.layout:
        layout = holder.layout
    step, steps = _last_step(run), _last_step_to_come(run, info)
    return {
        "run": run.name,
        "run_dir": str(run.path),
        "state": state,
        "layout": layout,
        "jobs": [job.job for job in (active or jobs)] or info.get("jobs", []),
        "reason": reason_of(run, info, state, jobs, queue),
        "step": step,
        "steps": steps,
        "seconds_left": seconds_left(run, state, step, steps),
        "expected_start": min((job.start for job in jobs if job.waits and job.start), default=None)
        if state == "queued"
        else None,
        "job": holder.job or None if holder is not None else None,  # of the newest attempt
        "nodes": sorted({node for job in active for node in job.nodes}),
        "attempt": max(run.attempts(), default=None),
    }


def state_of(run: RunDir, info: dict[str, Any], jobs: Sequence[QueuedJob], queue: Queue) -> State:
    """SLURM's word where it has one: a folder cannot tell a lost job from a silent one."""
    if info.get("backend") != "slurm":
        return run.state()
    if queue.silent:
        # The folder shows no sign of life where the file system has no locks.
        is_begun = claims.newest(run.claims) is not None and not _has_ended(run)
        return "running" if is_begun and not info.get("queued") else run.state()
    if any(job.state in RUNNING for job in jobs):
        if run.is_live():
            return "running"
        if _has_ended(run) and (info.get("ended") or run.ended_state() == "finished"):
            return run.ended_state()
        # One that has stopped short may be about to be requeued: SLURM has not said yet.
        return "queued" if info.get("queued") else "running"
    if jobs:
        return "queued"
    if run.is_live():
        return "running"
    return run.ended_state()


def _has_ended(run: RunDir) -> bool:
    if run.info().get("ended"):
        return True
    attempts = run.attempts()
    ranks = run.ranks(attempts[-1]) if attempts else []
    return bool(ranks) and all(run.end(attempts[-1], rank) for rank in ranks)


def reason_of(
    run: RunDir, info: dict[str, Any], state: State, jobs: Sequence[QueuedJob], queue: Queue
) -> str | None:
    """Why it waits, or why it ended, in words."""
    if queue.silent and info.get("backend") == "slurm" and state in ("queued", "running"):
        return f"SLURM does not answer: {queue.silent}"
    lost = [lost_words(run) or ""]
    if state == "queued":
        waiting = [waiting_reason(job.reason) for job in jobs if job.waits]
        return "; ".join(filter(None, dict.fromkeys(lost + waiting))) or None
    if state == "running":
        return "; ".join(filter(None, [*lost, _will_stop(run)])) or None
    if state == "finished":
        return None
    given_up = info.get("ended")
    if given_up:
        return str(given_up["reason"])
    holder = claims.newest(run.claims)
    concerned = [holder.job] if holder is not None else info.get("jobs", [])
    ended = [queue.ended[job] for job in concerned if job in queue.ended]
    told = [end_reason(job.state, job.exit_code) for job in ended if "COMPLETED" not in job.state]
    failed = failure(run)
    if failed is None or failed["exit"] is None:
        return "; ".join(dict.fromkeys(told)) or None
    # Of a rank that failed by itself, SLURM only knows that something did.
    told = [text for text in told if not text.startswith("failed")]
    return "; ".join(dict.fromkeys([failure_in_words(failed), *told]))


def lost_words(run: RunDir) -> str | None:
    """What was killed in the attempt before this one, or in this one if it was the last."""
    lost = run.info().get("lost")
    if not lost or max(run.attempts(), default=0) > lost["attempt"] + 1:
        return None
    return f"attempt {lost['attempt']} was lost: {lost['what']}"


def _will_stop(run: RunDir) -> str | None:
    """What the job that trains a run was asked to do next."""
    holder = claims.newest(run.claims)
    stop = run.asked_to_stop(holder.job) if holder is not None else None
    if stop is None:
        return None
    return f"{stop['why']} after a checkpoint" if stop["moves"] else "was asked to stop"


def _last_step_to_come(run: RunDir, info: dict[str, Any]) -> int | None:
    attempts = run.attempts()
    start = run.start(attempts[-1]) if attempts else None
    if start is None:
        return None
    steps = final_step(start, info, None)
    if steps is None and start.get("steps"):  # one that is measured
        steps = final_step(start, info, run.window(attempts[-1]))
    return steps


def _last_step(run: RunDir) -> int | None:
    for attempt in reversed(run.attempts()):
        events = read_last_events(run.events(attempt, 0))
        steps = [event["step"] for event in events if event["event"] == "step"]
        if steps:
            return int(steps[-1])
    return None


def seconds_left(run: RunDir, state: State, step: int | None, steps: int | None) -> float | None:
    """Steps that are left, at the pace of the last ones; measured, so only of a run that runs."""
    if state != "running" or step is None or steps is None:
        return None
    events = read_last_events(run.events(run.attempts()[-1], 0), RECENT_STEPS_BYTES)
    recent = [e["seconds"] for e in events if e["event"] == "step" and "seconds" in e]
    return round((steps - step) * statistics.fmean(recent), 1) if recent else None
