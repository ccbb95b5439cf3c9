"""Stopping runs wherever they are, and layouts that would start earlier."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from allranks.errors import AllranksError
from allranks.run import claims
from allranks.run.folder import RunDir
from allranks.run.run_state import Queue, QueuedJob, look_at_queue, state_of
from allranks.show.text import clean
from allranks.slurm import commands as slurm

AT_ONCE_SECONDS = 30.0  # for a run that is to end at once


def stop(runs: Iterable[RunDir], *, now: bool = False) -> list[dict[str, str]]:
    """Stop runs at a checkpoint (`now`: at once), wherever they are; what was done to each."""
    runs = list(runs)
    queue = look_at_queue(runs)
    done = []
    for run in runs:
        try:
            done.append({"run": run.name, "done": _stop_one(run, queue, now=now)})
        except AllranksError as error:
            if len(runs) == 1:
                raise
            done.append({"run": run.name, "done": f"could not be stopped: {error.what}"})
    return done


def holder_of(run: RunDir, active: Sequence[QueuedJob]) -> str:
    """The job that trains a run, of those that SLURM has not ended yet."""
    holder = claims.newest(run.claims)
    jobs = [job.job for job in active]
    return holder.job if holder is not None and holder.job in jobs else jobs[-1]


def _stop_one(run: RunDir, queue: Queue, *, now: bool) -> str:
    info = run.info()
    # A script of the user's is sent the signal: what it makes of it is its own affair.
    will_stop = (
        "its script was asked to stop" if _is_script(run) else "saves a checkpoint and stops"
    )
    if run.is_held or info.get("backend") != "slurm":
        return _stop_local(run, will_stop, now=now)
    if queue.silent:
        raise AllranksError(queue.silent, fix="try again in a minute", exit_code=1)
    jobs = [queue.jobs[job] for job in info.get("jobs", []) if job in queue.jobs]
    if not jobs:
        return f"is {state_of(run, info, jobs, queue)} already"
    run.ask_to_stop("stopped by its user", info.get("jobs", []))
    waiting = [job.job for job in jobs if job.waits]
    active = [job.job for job in jobs if not job.waits]
    if waiting:
        cancel(waiting)
    if active and now:
        cancel(active)
    elif active:
        signal_job(holder_of(run, [job for job in jobs if not job.waits]))
        return will_stop
    reason = "stopped by its user" + ("" if run.attempts() else " before it started")
    ended = {"state": "stopped", "reason": reason}
    run.update_info(lambda info: info.update(queued=False, ended=ended))
    if not active:
        return "taken out of the queue"
    if not _comes_true(lambda: _has_left(run, active)):
        return f"was cancelled, but SLURM has not ended job {', '.join(active)} yet"
    return "stopped at once"


def _has_left(run: RunDir, jobs: Sequence[str]) -> bool:
    """Whether SLURM has ended all of these jobs; one that still cleans up its nodes has ended."""
    queue = look_at_queue([run])
    left = [queue.jobs[job].state for job in jobs if job in queue.jobs]
    return not queue.silent and all(state == "COMPLETING" for state in left)


def _is_script(run: RunDir) -> bool:
    from allranks.launch import prepare

    with suppress(AllranksError):  # it is only about a word
        return prepare.load_resolved(run).command is not None
    return False


def cancel(jobs: Sequence[str]) -> None:
    """Take jobs out of the queue; those that have just left it are where they should be."""
    try:
        slurm.call("scancel", *jobs)
    except slurm.SlurmError as error:
        if "invalid job id" not in error.words.lower():
            raise


def signal_job(job: str) -> None:
    """Have the ranks of a job save and stop; through its batch process, which waits for them."""
    try:
        slurm.call("scancel", "--batch", "--signal=USR2", job)
    except slurm.SlurmError as error:
        if error.is_silence:  # otherwise it has left the queue, or reads what was left for it
            raise


def _stop_local(run: RunDir, will_stop: str, *, now: bool) -> str:
    if not run.is_live():
        return f"is {run.state()} already"
    process, host = run.holder()
    if host != socket.gethostname():
        raise AllranksError(
            f"run {run.name} is on {clean(host)}, not on this machine",
            fix=f"run the same command on {clean(host)}",
        )
    if not _signal(run, process, signal.SIGINT if now else signal.SIGTERM):
        return f"is {run.ended_state()} already"
    if not now:
        return will_stop
    time.sleep(0.5)
    _signal(run, process, signal.SIGINT)  # a second one: at once
    if not _comes_true(lambda: not run.is_live()):
        raise AllranksError(
            f"run {run.name} was told to stop at once, but process {process} still holds it after "
            f"{AT_ONCE_SECONDS:.0f} s",
            fix=f"kill -9 {process} ends it and its ranks",
            exit_code=1,
        )
    return "stopped at once"


def _signal(run: RunDir, process: int, number: signal.Signals) -> bool:
    """Signal the run's launcher; False if it has ended. Raises if that process is another one."""
    try:
        is_launcher = run.is_open_in(process)
        if is_launcher:
            os.kill(process, number)
    except ProcessLookupError:
        is_launcher = False
    except PermissionError:
        raise AllranksError(
            f"run {run.name} is another user's", fix="ask its user to stop it", exit_code=1
        ) from None
    if not is_launcher and run.is_live():
        raise AllranksError(
            f"run {run.name} is live, but not through process {process}, which its folder names: "
            "nothing was stopped",
            fix=f"see who holds it: fuser -v {run.path}/.lock",
            exit_code=1,
        )
    return is_launcher


def _comes_true(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + AT_ONCE_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def suggest_racers(run: RunDir, described: dict[str, Any]) -> list[str]:
    """Layouts of as many ranks that SLURM expects to start earlier than any of this run's jobs."""
    from allranks.launch import prepare
    from allranks.launch.backends.slurm import submit
    from allranks.launch.backends.slurm.sbatch import Racer
    from allranks.layout import Layout

    if described["state"] != "queued":
        return []
    known = {record["layout"] for record in run.info().get("racers", {}).values()}
    job = prepare.load_resolved(run)
    ranks = job.layout.ranks
    expected = described["expected_start"] or "9999"
    better = []
    for nodes in (number for number in range(1, ranks + 1) if ranks % number == 0):
        racer = Racer(Layout(nodes, ranks // nodes))
        if str(racer) in known or job.layout.ranks != job.layout.dp:
            continue
        start = expected_start(submit.script_of(job, racer, run), run.path)
        if start is not None and start < expected:
            better.append(f"{racer} would start at {start}: allranks race {run.name} {racer}")
    return better


def expected_start(script: str, folder: Path) -> str | None:
    """When SLURM would start this, by its own estimate; None if it does not say."""
    import re
    import tempfile

    with tempfile.NamedTemporaryFile("w", dir=folder, prefix=".test-", suffix=".sbatch") as file:
        file.write(script)
        file.flush()
        try:
            said = slurm.call("sbatch", "--test-only", file.name, both=True)
        except slurm.SlurmError:
            return None
    match = re.search(r"to start at (\S+)", said)
    return match[1] if match else None
