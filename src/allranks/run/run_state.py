"""The state of runs, wherever they are: from their folders, and one look at the queue."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from allranks.run import claims
from allranks.run.failures import failure, failure_in_words
from allranks.run.folder import RunDir, State
from allranks.run.record import attempt_steps, final_step, read_leads, steps_in_all
from allranks.show.text import plain

KILLED, NEVER_STARTED = "killed (no end event)", "it never started"


@dataclass(frozen=True, slots=True)
class QueuedJob:
    """A job that is waiting or running."""

    job: str
    state: str  # in the queue's own word
    reason: str  # why it waits, in the queue's own word
    start: str | None  # when it started, or is expected to
    nodes: tuple[str, ...]
    waits: bool = True
    why: str = ""  # the reason in our words


@dataclass(frozen=True, slots=True)
class EndedJob:
    """A job that has left its queue."""

    job: str
    state: str  # in the queue's own word
    exit_code: str
    nodes: tuple[str, ...] = ()
    reason: str | None = None  # why it ended; None: it finished


@dataclass(slots=True)
class Queue:
    """What a queue says about jobs at one moment. `silent`: why it did not answer."""

    jobs: dict[str, QueuedJob] = field(default_factory=dict)
    ended: dict[str, EndedJob] = field(default_factory=dict)
    silent: str | None = None
    name: str = "the queue"


@dataclass(frozen=True, slots=True)
class RunState:
    """Whether a run waits, trains or has ended, why, and where."""

    state: State = "queued"
    reason: str | None = None
    layout: str = ""
    expected_start: str | None = None
    jobs: tuple[str, ...] = ()  # that train it, or wait to
    nodes: tuple[str, ...] = ()  # that it trains on


def look_at_run(run: RunDir, info: dict[str, Any], queue: Queue) -> RunState:
    """The state of a run by its folder, its run.json and one look at the queue."""
    jobs = [queue.jobs[job] for job in info.get("jobs", []) if job in queue.jobs]
    state = state_of(run, info, jobs, queue)
    holder = claims.newest(run.claims) if state == "running" else None
    active = [job for job in jobs if not job.waits]
    starts = [job.start for job in jobs if job.waits and job.start]
    return RunState(
        state=state,
        reason=reason_of(run, info, state, jobs, queue),
        layout=holder.layout if holder and holder.layout else info.get("layout", ""),
        expected_start=min(starts, default=None) if state == "queued" else None,
        jobs=tuple(job.job for job in active or jobs),
        nodes=tuple(sorted({node for job in active for node in job.nodes})),
    )


def describe(run: RunDir, queue: Queue) -> dict[str, Any]:
    """One run as `allranks ls --json` shows it; `problem`: what is wrong with its folder."""
    try:
        return _describe(run, queue) | {"problem": run.problem()}
    except Exception as error:  # an unforeseen problem must not hide the other runs
        nothing = dict.fromkeys(("reason", "step", "steps", "seconds_left", "expected_start"))
        return {
            **{"run": run.name, "run_dir": str(run.path), "state": "failed", "layout": ""},
            **{"jobs": [], **nothing, "job": None, "nodes": [], "attempt": None},
            "problem": unreadable(error),
        }


def unreadable(error: Exception) -> str:
    """The problem of a folder that no reader understands."""
    return f"its folder cannot be read ({type(error).__name__}: {plain(str(error))})"


def _describe(run: RunDir, queue: Queue) -> dict[str, Any]:
    info = run.info()
    now = look_at_run(run, info, queue)
    holder = claims.newest(run.claims)
    leads = read_leads(run)
    lead = leads[-1]
    is_measured = "bench" in info and lead.start
    steps = final_step(lead.start, info, run.window(run.attempts()[-1]) if is_measured else None)
    left = lead.clock.seconds_left(steps, time.time()) if now.state == "running" else None
    return {
        "run": run.name,
        "run_dir": str(run.path),
        "state": now.state,
        "layout": now.layout,
        "jobs": [*now.jobs] or info.get("jobs", []),
        "reason": now.reason,
        "step": steps_in_all(leads),
        **attempt_steps(leads),
        "steps": steps,
        "seconds_left": None if left is None else round(left, 1),
        "expected_start": now.expected_start,
        "job": holder.job or None if holder is not None else None,  # of the newest attempt
        "nodes": [*now.nodes],
        "attempt": max(run.attempts(), default=None),
    }


def state_of(run: RunDir, info: dict[str, Any], jobs: Sequence[QueuedJob], queue: Queue) -> State:
    """The state by the queue, if it knows: a folder cannot tell a lost job from a silent one."""
    if not is_of_jobs(run, info):
        return run.state()
    if queue.silent:
        # Without locks in the file system, the folder does not show whether a run is live.
        is_begun = claims.newest(run.claims) is not None and not _has_ended(run)
        return "running" if is_begun and not info.get("queued") else run.state()
    if any(not job.waits for job in jobs):
        if run.is_live():
            return "running"
        if _has_ended(run) and (info.get("ended") or run.ended_state() == "finished"):
            return run.ended_state()
        # A job that stopped early may be about to be requeued.
        return "queued" if info.get("queued") else "running"
    if jobs:
        return "queued"
    if run.is_live():
        return "running"
    return run.ended_state()


def is_of_jobs(run: RunDir, info: dict[str, Any]) -> bool:
    """Whether jobs in a queue have the run: they were sent after its last other holder."""
    jobs, holder = info.get("jobs"), claims.newest(run.claims)
    if not jobs or holder is None or holder.job:
        return bool(jobs)
    return any(one.get("claim", -1) > holder.number for one in info.get("racers", {}).values())


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
    if queue.silent and is_of_jobs(run, info) and state in ("queued", "running"):
        return f"{queue.name} does not answer: {queue.silent}"
    lost = [lost_words(run) or ""]
    if state == "queued":
        waiting = [job.why for job in jobs if job.waits]
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
    told = [job.reason for job in ended if job.reason is not None]
    failed = failure(run)
    if failed is None or failed["exit"] is None:
        if told or state == "stopped":
            return "; ".join(dict.fromkeys(told)) or None
        return KILLED if run.attempts() else NEVER_STARTED
    # If a rank failed by itself, the queue only knows that something failed.
    told = [text for text in told if not text.startswith("failed")]
    return "; ".join(dict.fromkeys([failure_in_words(failed), *told]))


def lost_words(run: RunDir) -> str | None:
    """What was lost in the attempt before this one, or in this one if it was the last."""
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
