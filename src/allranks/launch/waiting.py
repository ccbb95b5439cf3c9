"""Waiting for a run wherever it is: across requeues and moves, a line for every change."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allranks.errors import AllranksError
from allranks.launch import backends
from allranks.run import claims, run_state
from allranks.run.failures import missing_in_words
from allranks.run.folder import RunDir
from allranks.timing.steps import result

FIRST_PAUSE, LAST_PAUSE = 1.0, 20.0  # seconds between questions to a queue
SAVING_SECONDS = 300.0  # for ranks of other nodes that were told to stop as well
ENDING_SECONDS = 15.0  # for what other nodes' launchers write at the end
EXIT_CODES = {"finished": 0, "failed": 1, "stopped": 75}


def wait_for_end(run: RunDir, say: Callable[[str], None]) -> dict[str, Any]:
    """The run as `allranks ls --json` shows it, once it neither waits nor runs."""
    told, pause = "", FIRST_PAUSE
    had_ended = False
    while True:
        now = run_state.describe(run, backends.look([run]))
        now["attempt"] = attempt_of_job(run)
        words = in_words(now)
        is_over = now["state"] in EXIT_CODES
        if not told.startswith(words) and (not is_over or had_ended):
            say(words)
            told, pause = words, FIRST_PAUSE
        if is_over and had_ended:
            return now
        # Asked once more before it is believed: a job may be leaving the queue for the next one.
        had_ended = is_over
        time.sleep(FIRST_PAUSE if had_ended else pause)
        pause = min(LAST_PAUSE, 1.3 * pause)


@dataclass(frozen=True, slots=True)
class Waited:
    """What became of a run that was waited for."""

    result: dict[str, Any]
    exit_code: int
    error: AllranksError | None = None


def wait_for_result(run: RunDir, say: Callable[[str], None]) -> Waited:
    """What became of a run, once it has ended; `say` is told of every change."""
    now = wait_for_end(run, say)
    found = {**result(run, now["state"]), "jobs": run.info().get("jobs", [])}
    found["reason"] = now["reason"]
    error = why_failed(run, now) if now["state"] == "failed" else None
    return Waited(found, EXIT_CODES[now["state"]], error)


def attempt_of_job(run: RunDir) -> int | None:
    """The attempt that the job which holds a run has begun; None while it checks its nodes."""
    holder = claims.newest(run.claims)
    opened = run.info().get("attempts", [])[-1:]
    begun = [one["attempt"] for one in opened if holder is None or one["started"] >= holder.time]
    return int(begun[0]) if begun else None


def wait_for_ranks(
    run: RunDir,
    attempt: int,
    num_ranks: int,
    seconds: float,
    is_enough: Callable[[], bool],
    *,
    while_alive: bool = False,
) -> None:
    """Wait until all ranks of an attempt have ended, on other nodes too, or it `is_enough`.

    `seconds`: in all, or (`while_alive`) without a line or an event of the ranks that are left.

    The first node's launcher says what became of the run, and other nodes write their ranks' ends a
    moment later. The others meet there, too: without it they would fill their logs with errors.
    """
    deadline = time.monotonic() + seconds
    left = set(range(num_ranks))
    seen: dict[Path, int] = {}
    while left and time.monotonic() < deadline and not is_enough():
        left = {rank for rank in left if run.end(attempt, rank) is None}
        files = [file(attempt, rank) for rank in left for file in (run.events, run.log)]
        now = {path: path.stat().st_size for path in files if while_alive and path.exists()}
        if now != seen:
            deadline, seen = time.monotonic() + seconds, now
        time.sleep(0.2 if left else 0)


def in_words(now: Mapping[str, Any]) -> str:
    """The state of a run, in a line that differs only if something has changed."""
    state, reason = now["state"], now["reason"]
    if state == "queued":
        jobs = f" as job {', '.join(now['jobs'])}" if now["jobs"] else ""
        return f"queued{jobs}{f': {reason}' if reason else ''}"
    if state == "running":
        begun = now["attempt"] is not None
        nodes = f" on {', '.join(now['nodes'])}" if now["nodes"] else ""
        also = f"; {reason}" if reason else ""
        named = f"layout {now['layout']}, job {now['job']}"
        if not begun:
            return f"starting{nodes} ({named}){also}"
        return f"running{nodes} ({named}, attempt {now['attempt']}){also}"
    return f"{state}{f': {reason}' if reason else ''}"


def why_failed(run: RunDir, now: Mapping[str, Any]) -> AllranksError:
    """The error that ends a command which has waited for a run that failed."""
    name, seen = run.reference, run.info().get("missing") or {}
    fix = f"allranks doctor {name} shows why; allranks logs {name} shows its output"
    if seen.get("attempt") == max(run.attempts(), default=0):
        _, fix = missing_in_words(seen)
    what = f"run {run.name} failed{': ' + now['reason'] if now['reason'] else ''}"
    return AllranksError(what, fix=fix, exit_code=EXIT_CODES["failed"])
