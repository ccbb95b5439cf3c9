"""The backend for SLURM's queue: sends runs; looks at, stops, races and moves their jobs."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from allranks.errors import AllranksError
from allranks.launch import backends, checks, prepare
from allranks.launch.backends import Draft, Options, Submitted, local
from allranks.launch.backends.slurm import ladder, submit
from allranks.launch.backends.slurm.sbatch import Racer, parse_race, racers_of
from allranks.launch.prepare import Prepared, Request
from allranks.machine import nodelist
from allranks.run import claims, run_state
from allranks.run.folder import RunDir
from allranks.run.run_state import EndedJob, Queue, QueuedJob
from allranks.slurm import commands as slurm
from allranks.slurm.reasons import RUNNING, end_reason, waiting_reason

is_queue = True
suggestions = submit.suggest_racers
QUEUE_FORMAT = "%i|%T|%r|%S|%N"
ENDED_FIELDS = "JobIDRaw,State,ExitCode,NodeList"


def check(request: Request, options: Options) -> Prepared:
    """The run to send; it may be running, since a running one can be moved."""
    if first := typed_racers(options)[:1]:
        request = replace(request, layout=str(first[0].layout))
    prepared = prepare.prepare(replace(request, leads=False))
    if prepared.run is not None and backends.of(prepared.run) != "slurm":
        prepared.remarks.append("until now, this run was outside SLURM")
    rungs = parse_race(options.ladder) if options.ladder is not None else []
    submit.check(prepared, rungs or racers(prepared, options))
    return prepared


def racers(prepared: Prepared, options: Options) -> list[Racer]:
    """The layouts to queue it in: by default the job's own."""
    return racers_of(prepared.job, typed_racers(options))


def typed_racers(options: Options) -> list[Racer]:
    climb = typed_ladder(options)
    text = climb.rung if climb else options.race
    return parse_race(text) if text else []


def typed_ladder(options: Options) -> ladder.Ladder | None:
    if options.ladder is None:
        return None
    steps, efficiency = options.ladder_steps, options.min_efficiency
    return ladder.of(parse_race(options.ladder), min_efficiency=efficiency, steps=steps)


def draft(prepared: Prepared, options: Options) -> Draft:
    return submit.draft(prepared, racers(prepared, options))


def start(prepared: Prepared, options: Options) -> Submitted:
    found, climb = racers(prepared, options), typed_ladder(options)
    return submit.submit(prepared, found, climb, after=options.after)


def on_nodes(run: RunDir, words: Sequence[str], seconds: float) -> str:
    """What `python WORDS` prints on every node of the job that trains the run."""
    holder = claims.newest(run.claims)
    if holder is None or not holder.job:
        return ""
    num_nodes = len(holder.nodes)
    srun = ["srun", f"--jobid={holder.job}", "--overlap", "--quiet", f"--nodes={num_nodes}"]
    srun += [f"--ntasks={num_nodes}", "--ntasks-per-node=1"]
    try:
        return slurm.call(*srun, sys.executable, *words, seconds=seconds)
    except slurm.SlurmError:
        return ""


def look(runs: Sequence[RunDir]) -> Queue:
    """One squeue for all of the user's jobs, and one sacct for those that have left it."""
    infos = [info for run in runs if (info := run.info()).get("jobs")]
    if not infos:
        return Queue()
    try:
        printed = slurm.call("squeue", "-h", "-u", str(os.getuid()), "-o", QUEUE_FORMAT)
    except slurm.SlurmError as error:
        return Queue(silent=error.what, name="SLURM")
    queue = Queue(parse_jobs(printed), name="SLURM")
    recent = [job for info in infos if info.get("ended") is None for job in info["jobs"]]
    if gone := [job for job in recent if job not in queue.jobs]:
        with suppress(slurm.SlurmError):  # there is no sacct without a database
            words = ["sacct", "-n", "-P", "-X", "-j", ",".join(gone), "-o", ENDED_FIELDS]
            queue.ended = parse_ended(slurm.call(*words))
    return queue


def parse_jobs(printed: str) -> dict[str, QueuedJob]:
    """What `squeue -h -o QUEUE_FORMAT` printed."""
    found = {}
    for line in printed.splitlines():
        job, state, reason, start, nodes, *_ = [*line.split("|"), "", "", "", ""]
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
        job, state, exit_code, nodes, *_ = [*line.split("|"), "", "", ""]
        if not job.isdigit():
            continue
        hosts: tuple[str, ...] = ()
        with suppress(AllranksError):  # "None assigned"
            hosts = tuple(nodelist.expand(nodes))
        why = None if "COMPLETED" in state else end_reason(state, exit_code)
        found[job] = EndedJob(job, state, exit_code, hosts, why)
    return found


def jobs_of(run: RunDir, queue: Queue) -> tuple[list[str], list[str]]:
    """The run's jobs that wait, and those on their nodes. Raises if SLURM does not answer."""
    if queue.silent:
        raise AllranksError(queue.silent, fix="try again in a minute", exit_code=1)
    jobs = [queue.jobs[job] for job in run.info().get("jobs", []) if job in queue.jobs]
    return [job.job for job in jobs if job.waits], [job.job for job in jobs if not job.waits]


def holder_of(run: RunDir, active: Sequence[str]) -> str:
    """The job that trains a run, of those on their nodes."""
    holder = claims.newest(run.claims)
    return holder.job if holder is not None and holder.job in active else active[-1]


def stop(run: RunDir, queue: Queue, *, now: bool) -> str:
    """Stop a run at a checkpoint (`now`: at once), or take it out of the queue."""
    if run.is_held:  # by `allranks run`: no job has it any more
        return local.stop(run, queue, now=now)
    waiting, active = jobs_of(run, queue)
    if not waiting and not active:
        return f"already {run_state.state_of(run, run.info(), [], queue)}"
    run.ask_to_stop("stopped by its user", run.info().get("jobs", []))
    if waiting:
        cancel(waiting)
    if active and not now:
        signal_job(holder_of(run, active))
        return local.will_stop(run)
    if active:
        cancel(active)
    reason = "stopped by its user" + ("" if run.attempts() else " before it started")
    ended = {"state": "stopped", "reason": reason}
    run.update_info(lambda info: info.update(queued=False, ended=ended))
    if not active:
        return "taken out of the queue"
    if not local.comes_true(lambda: has_left(run, active)):
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
        if error.is_silence:  # otherwise it has left the queue, or will find the request to stop
            raise


def race(run: RunDir, layouts: str) -> Submitted:
    """Queue a waiting run in further layouts, typed as for `--race`."""
    typed = parse_race(layouts)
    prepare.check_owners(run)
    claim = claims.next_number(run.claims)  # before its state: see send_all
    job = prepare.load_resolved(run)
    state = run_state.describe(run, look([run]))["state"]
    if state != "queued":
        move = "move it" if state == "running" else "continue it"
        raise AllranksError(
            f"run {run.name} is not waiting in a queue: it is {state}",
            fix=f"{move}: allranks resume {run.name} --layout {typed[0].layout}",
        )
    checks.check_supported(*(submit.with_layout(job, racer) for racer in typed))
    sent = run.info().get("racers", {}).values()
    known = {record["layout"] for record in sent if record["claim"] == claim}
    wanted = [racer for racer in submit.resolve_types(typed, job)[0] if str(racer) not in known]
    if not wanted:
        raise AllranksError(
            f"run {run.name} is already waiting in layout {' and '.join(sorted(known))}",
            fix="name another layout, or wait",
        )
    done = submit.send_all(job, wanted, run, claim=claim)
    shown = ",".join([*sorted(known), *(str(racer) for racer in wanted)])
    run.update_info(lambda info: info.update(layout=shown) if info.get("queued") else None)
    return done


def move(prepared: Prepared, options: Options) -> Submitted:
    """Queue the run's next job; one that runs is first asked to save and make room."""
    run, wanted = prepared.run, racers(prepared, options)
    assert run is not None
    claim = claims.next_number(run.claims)  # before its state: see send_all
    queue = look([run])
    waiting, active = jobs_of(run, queue)
    now = run_state.describe(run, queue)
    changes = [*run.info().get("changes", []), *prepared.changes]
    extends = any(change["key"] != "layout" for change in changes)
    if now["state"] == "finished" and not extends:
        return Submitted(run, [], [f"run {run.name} has already finished"])
    if now["state"] == "queued":
        raise AllranksError(
            f"run {run.name} is already waiting in the queue (job {', '.join(now['jobs'])})",
            fix=f"add a layout with allranks race {run.name} 2x2, or stop it first",
        )
    if now["state"] != "running":
        done = submit.resume(prepared, wanted, claim=claim)
    elif not active:
        raise AllranksError(
            f"run {run.name} is running outside of SLURM", fix=f"allranks stop {run.name} first"
        )
    else:
        layouts = ",".join(str(racer) for racer in wanted)
        if layouts == now["layout"]:
            raise AllranksError(
                f"run {run.name} is running in layout {layouts}",
                fix="name another one with --layout, or wait for it",
            )
        holder = holder_of(run, active)
        # First the new job: if SLURM refuses it, the old one goes on undisturbed.
        done = submit.resume(prepared, wanted, claim=claim, after=[holder])
        why = f"moves to {layouts} (job {', '.join(done.jobs)})"
        run.ask_to_stop(why, [*waiting, *active], moves=True)
        signal_job(holder)
        done.remarks.append(f"job {holder} saves a checkpoint and ends first")
    if not active:  # of a run that moves, the checkpoint to go on from is still to be written
        done.remarks = [*prepared.remarks, *done.remarks]
    return done
