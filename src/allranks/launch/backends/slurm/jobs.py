"""The jobs of runs in SLURM's queue: look at them, stop them, race them, move them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress

from allranks.errors import AllranksError
from allranks.launch import checks, prepare
from allranks.launch.backends import Submitted, local
from allranks.launch.backends.local import comes_true, will_stop
from allranks.launch.backends.slurm import submit
from allranks.launch.backends.slurm.sbatch import Racer
from allranks.launch.prepare import Prepared
from allranks.machine import nodelist
from allranks.run import claims, run_state
from allranks.run.folder import RunDir
from allranks.run.run_state import EndedJob, Queue, QueuedJob, state_of
from allranks.slurm import commands as slurm
from allranks.slurm.reasons import RUNNING, end_reason, waiting_reason

QUEUE_FORMAT = "%i|%T|%r|%S|%N|%L|%l|%Q"
ENDED_FIELDS = "JobIDRaw,State,ExitCode,End,NodeList"


def look(runs: Sequence[RunDir]) -> Queue:
    """One squeue for all of the user's jobs, and one sacct for those that have left it."""
    wanted = {run.name: run.info().get("jobs", []) for run in runs}
    wanted = {name: jobs for name, jobs in wanted.items() if jobs}
    if not wanted:
        return Queue()
    queue = Queue(name="SLURM")
    try:
        printed = slurm.call("squeue", "-h", "-u", str(os.getuid()), "-o", QUEUE_FORMAT)
        queue.jobs = parse_queue(printed)
    except slurm.SlurmError as error:
        return Queue(silent=error.what, name="SLURM")
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
                waits=state not in RUNNING,
                why=waiting_reason(reason),
            )
    return found


def parse_ended(printed: str) -> dict[str, EndedJob]:
    """What `sacct -n -P -X -o ENDED_FIELDS` printed; the last line on a job counts."""
    found = {}
    for line in printed.splitlines():
        job, state, exit_code, _, nodes, *_ = [*line.split("|"), "", "", "", "", ""]
        if not job.isdigit():
            continue
        hosts: tuple[str, ...] = ()
        with suppress(AllranksError):  # "None assigned"
            hosts = tuple(nodelist.expand(nodes))
        why = None if "COMPLETED" in state else end_reason(state, exit_code)
        found[job] = EndedJob(job, state, exit_code, hosts, why)
    return found


def holder_of(run: RunDir, active: Sequence[QueuedJob]) -> str:
    """The job that trains a run, of those that SLURM has not ended yet."""
    holder = claims.newest(run.claims)
    jobs = [job.job for job in active]
    return holder.job if holder is not None and holder.job in jobs else jobs[-1]


def stop(run: RunDir, queue: Queue, *, now: bool) -> str:
    """Stop a run at a checkpoint (`now`: at once), or take it out of the queue."""
    if run.is_held:  # by `allranks run`: it is no job's any more
        return local.stop(run, queue, now=now)
    info = run.info()
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
        return will_stop(run)
    reason = "stopped by its user" + ("" if run.attempts() else " before it started")
    ended = {"state": "stopped", "reason": reason}
    run.update_info(lambda info: info.update(queued=False, ended=ended))
    if not active:
        return "taken out of the queue"
    if not comes_true(lambda: has_left(run, active)):
        return f"was cancelled, but SLURM has not ended job {', '.join(active)} yet"
    return "stopped at once"


def has_left(run: RunDir, jobs: Sequence[str]) -> bool:
    """Whether SLURM has ended all of these jobs; one that still cleans up its nodes has ended."""
    queue = look([run])
    left = [queue.jobs[job].state for job in jobs if job in queue.jobs]
    return not queue.silent and all(state == "COMPLETING" for state in left)


def cancel(jobs: Sequence[str]) -> None:
    """Take jobs out of the queue; those that have just left it are where they should be."""
    try:
        slurm.call("scancel", *jobs)
    except slurm.SlurmError as error:
        if not error.is_gone:
            raise


def signal_job(job: str) -> None:
    """Have the ranks of a job save and stop; through its batch process, which waits for them."""
    try:
        slurm.call("scancel", "--batch", "--signal=USR2", job)
    except slurm.SlurmError as error:
        if error.is_silence:  # otherwise it has left the queue, or reads what was left for it
            raise


def race(run: RunDir, racers: Sequence[Racer]) -> Submitted:
    """Queue a waiting run in further layouts."""
    prepare.check_owners(run)
    claim = claims.next_number(run.claims)  # before its state: see send_all
    job = prepare.load_resolved(run)
    state = run_state.describe(run, look([run]))["state"]
    if state != "queued":
        move = "move it" if state == "running" else "go on with it"
        raise AllranksError(
            f"run {run.name} does not wait in a queue: it is {state}",
            fix=f"{move}: allranks resume {run.name} --layout {racers[0].layout}",
        )
    for racer in racers:
        checks.check_supported(submit.with_layout(job, racer))
    sent = run.info().get("racers", {}).values()
    known = {record["layout"] for record in sent if record["claim"] == claim}
    wanted = [racer for racer in submit.resolve_types(racers, job)[0] if str(racer) not in known]
    if not wanted:
        raise AllranksError(
            f"run {run.name} waits in {' and '.join(sorted(known))} already",
            fix="name another layout, or wait",
        )
    done = submit.send_all(job, wanted, run, claim=claim)
    layouts = ",".join([*sorted(known), *(str(racer) for racer in wanted)])
    run.update_info(lambda info: info.update(layout=layouts) if info.get("queued") else None)
    return done


def move(prepared: Prepared, racers: Sequence[Racer]) -> Submitted:
    """Queue the run's next job; one that runs is first asked to save and make room."""
    run = prepared.run
    assert run is not None
    claim = claims.next_number(run.claims)  # before its state: see send_all
    queue = look([run])
    if queue.silent:
        raise AllranksError(queue.silent, fix="try again in a minute", exit_code=1)
    now = run_state.describe(run, queue)
    changes = [*run.info().get("changes", []), *prepared.changes]
    extends = any(change["key"] != "layout" for change in changes)
    if now["state"] == "finished" and not extends:
        return Submitted(run, [], [f"run {run.name} is finished already"])
    jobs = [queue.jobs[job] for job in run.info().get("jobs", []) if job in queue.jobs]
    if now["state"] == "queued":
        raise AllranksError(
            f"run {run.name} waits in the queue already (job {', '.join(now['jobs'])})",
            fix=f"add a layout with allranks race {run.name} 2x2, or stop it first",
        )
    active = [job for job in jobs if not job.waits]
    if now["state"] != "running":
        done = submit.resume(prepared, racers, claim=claim)
    elif not active:
        raise AllranksError(
            f"run {run.name} is running outside of SLURM", fix=f"allranks stop {run.name} first"
        )
    else:
        layouts = ",".join(str(racer) for racer in racers)
        if layouts == now["layout"]:
            raise AllranksError(
                f"run {run.name} is running in layout {layouts}",
                fix="name another one with --layout, or wait for it",
            )
        before = [job.job for job in jobs]
        holder = holder_of(run, active)
        # First the new job: if SLURM refuses it, the old one goes on undisturbed.
        done = submit.resume(prepared, racers, claim=claim, after=holder)
        run.ask_to_stop(f"moves to {layouts} (job {', '.join(done.jobs)})", before, moves=True)
        signal_job(holder)
        done.remarks.append(f"job {holder} saves a checkpoint and ends first")
    if not active:  # of a run that moves, the checkpoint to go on from is still to be written
        done.remarks = [*prepared.remarks, *done.remarks]
    return done
