"""A run's next job: after an end, or in another layout while it still runs. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from allranks.errors import AllranksError
from allranks.launch import follow
from allranks.launch.backends.slurm import submit
from allranks.launch.backends.slurm.sbatch import Racer
from allranks.launch.backends.slurm.submit import Submitted
from allranks.launch.prepare import Prepared
from allranks.run import claims, run_state


def resume(prepared: Prepared, racers: Sequence[Racer]) -> Submitted:
    """Queue the run's next job; one that runs is first asked to save and make room."""
    run = prepared.run
    assert run is not None
    claim = claims.next_number(run.claims)  # before its state: see send_all
    queue = run_state.look_at_queue([run])
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
        holder = follow.holder_of(run, active)
        # First the new job: if SLURM refuses it, the old one goes on undisturbed.
        done = submit.resume(prepared, racers, claim=claim, after=holder)
        run.ask_to_stop(f"moves to {layouts} (job {', '.join(done.jobs)})", before, moves=True)
        follow.signal_job(holder)
        done.remarks.append(f"job {holder} saves a checkpoint and ends first")
    if not active:  # of a run that moves, the checkpoint to go on from is still to be written
        done.remarks = [*prepared.remarks, *done.remarks]
    return done
