"""Puts runs into SLURM's queue: new ones in one or more layouts, and the next jobs of old ones."""

from __future__ import annotations

import os
import re
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from allranks.errors import AllranksError
from allranks.job.job import Job
from allranks.job.task_source import find_task
from allranks.launch import checks, env_secrets, prepare
from allranks.launch.backends import Draft, Submitted
from allranks.launch.backends.slurm import ladder
from allranks.launch.backends.slurm.sbatch import Racer, sbatch_script, summary
from allranks.launch.prepare import Prepared
from allranks.layout import Layout
from allranks.machine.gpus import find_gpu
from allranks.run import claims
from allranks.run.events import read_events
from allranks.run.folder import RunDir, create_run, list_runs, write_atomically
from allranks.slurm import commands as slurm
from allranks.slurm.reasons import waiting_reason

# Reasons for waiting that time does not fix.
HOPELESS = r"Partition(Time|Node)Limit|PartitionConfig|BadConstraints|MaxWall|Invalid(Account|QOS)"


def check(prepared: Prepared, racers: Sequence[Racer]) -> None:
    """Refuse now what would only fail later, in the queue or on the nodes."""
    checks.check_supported(*(with_layout(prepared.job, racer) for racer in racers))


def with_layout(job: Job, racer: Racer) -> Job:
    return job.model_copy(update={"layout": racer.layout})


def draft(prepared: Prepared, racers: Sequence[Racer]) -> Draft:
    """Exactly what `send` would send. Writes nothing."""
    check(prepared, racers)
    run = prepared.run or RunDir(prepared.request.runs.absolute() / f"{prepared.job.name}-RUN")
    samples = samples_per_epoch(prepared.job, prepared.request.runs)
    return Draft(
        scripts={str(racer): script_of(prepared.job, racer, run) for racer in racers},
        table={str(racer): summary(prepared.job, racer, samples) for racer in racers},
        remarks=remarks_on(prepared.job, racers),
    )


def remarks_on(job: Job, racers: Sequence[Racer]) -> list[str]:
    return checks.warnings(*(with_layout(job, racer) for racer in racers))


def submit(
    prepared: Prepared,
    racers: Sequence[Racer],
    climb: ladder.Ladder | None = None,
    *,
    after: Sequence[str] = (),
) -> Submitted:
    """Queue a new run, in every layout that was asked for.

    `climb`: the ladder, if it starts on the first of several rungs. `after`: the jobs that must
    have ended before it starts.
    """
    slurm.call("sbatch", "--version")  # before a folder is made for a job that cannot be sent
    racers, remarks = resolve_types(racers, prepared.job)
    if climb is not None:
        rungs, _ = resolve_types([*map(Racer.parse, climb.layouts)], prepared.job)
        climb = replace(climb, layouts=tuple(map(str, rungs)))
    draft(prepared, racers)  # raises before anything is written
    run = create_run(prepared.request.runs, prepared.job.name)
    env_secrets.write_job(run, with_layout(prepared.job, racers[0]))

    def describe(info: dict[str, Any]) -> None:
        info |= prepare.describe_run(prepared, run, info)
        info |= {"backend": "slurm", "layout": ",".join(str(racer) for racer in racers)}

    run.update_info(describe)
    if climb is not None:
        ladder.write(run, climb)
    done = send_all(prepared.job, racers, run, claim=0, after=after)
    remarks += remarks_on(prepared.job, racers)
    done.remarks = [*dict.fromkeys(remarks), *done.remarks, *hopeless(done.jobs)]
    return done


def send_all(
    job: Job, racers: Sequence[Racer], run: RunDir, *, claim: int, after: Sequence[str] = ()
) -> Submitted:
    """Send one job for each racer, until one of them has started.

    `claim`: the one that they may take. It was the next one when the caller looked at the run's
    state: a job that has started since must not be robbed of the run.
    """
    done = Submitted(run)
    refused: list[slurm.SlurmError] = []
    for racer in racers:
        if claims.next_number(run.claims) > claim:
            done.remarks.append(f"{racer} was not sent: the run has started")
            break
        try:
            done.jobs.append(send(job, racer, run, claim=claim, after=after))
        except slurm.SlurmError as error:
            refused.append(error)
            done.remarks.append(f"{racer} was refused: {error.what}; {error.fix}")
    cancel_losers(run, done.jobs, claim)
    if refused and not done.jobs:
        if not run.attempts() and not run.info().get("jobs"):
            ended = {"state": "failed", "reason": f"never queued: {refused[0].what}"}
            run.update_info(lambda info: info.update(ended=ended))
            refused[0].fix += f"; send it again with {run.resume_command} key=value"
        raise refused[0]
    return done


def cancel_losers(run: RunDir, jobs: Sequence[str], claim: int) -> None:
    """One of these may have started, and missed the others, while they were being sent."""
    holder = claims.newest(run.claims)
    if holder is None or holder.number < claim:
        return
    with suppress(slurm.SlurmError):  # whoever starts too late ends by itself
        if losers := [job for job in jobs if job != holder.job]:
            slurm.call("scancel", "--state=PENDING", *losers)


def send(
    job: Job,
    racer: Racer,
    run: RunDir,
    *,
    claim: int,
    after: Sequence[str] = (),
    exclude: str = "",
    record: Mapping[str, Any] | None = None,
) -> str:
    """Send one job and record it; its id. The one place from which jobs are sent.

    `exclude`: nodes that it must not get. `record`: what else to note of a job's own successor.
    """
    script = run.path / script_name(run, racer)
    more = {"exclude": exclude, "dependency": f"afterany:{':'.join(after)}" if after else None}
    write_atomically(script, script_of(job, racer, run, claim=claim, **more))
    # A job's own successor may be sent again, where SLURM did not answer the first time.
    job_id = find_sent(run, script) if record else None
    try:
        job_id = job_id or slurm.parse_job_id(slurm.call("sbatch", "--parsable", str(script)))
    except slurm.SlurmError as error:
        job_id = find_sent(run, script) if error.is_silence else None
        if job_id is None:
            raise
    record_job(run, job_id, racer, claim, record)
    return job_id


def find_sent(run: RunDir, script: Path) -> str | None:
    """A job that SLURM has taken although its answer got lost."""
    try:
        printed = slurm.call("squeue", "-h", "-u", str(os.getuid()), "-o", "%i|%o")
    except slurm.SlurmError:
        return None
    known = run.info().get("jobs", [])
    sent = [line.partition("|") for line in printed.splitlines()]
    return next((job for job, _, what in sent if what == str(script) and job not in known), None)


def record_job(
    run: RunDir, job_id: str, racer: Racer, claim: int, more: Mapping[str, Any] | None = None
) -> None:
    """Note in run.json that a job may take a claim of the run."""

    def add(info: dict[str, Any]) -> None:
        info["backend"] = "slurm"
        if job_id not in info.setdefault("jobs", []):
            info["jobs"].append(job_id)
        record = {"layout": str(racer), "claim": claim, "submitted": time.time(), **(more or {})}
        info.setdefault("racers", {}).setdefault(job_id, record)
        holder = claims.newest(run.claims)
        if holder is None or holder.number < claim or holder.job == job_id:
            # It may have started before we came here.
            info["queued"] = holder is None or holder.number < claim
            info.pop("ended", None)

    run.update_info(add)


def script_name(run: RunDir, racer: Racer) -> str:
    """`submit.sbatch`; a further racer's beside it."""
    known = run.info().get("racers", {})
    others = {record["layout"] for record in known.values()} - {str(racer)}
    if not others:
        return "submit.sbatch"
    return f"submit-{str(racer).replace(':', '-').replace('=', '')}.sbatch"


def script_of(job: Job, racer: Racer, run: RunDir, **options: Any) -> str:
    """The script for a racer of this run; options as in `sbatch_script`."""
    return sbatch_script(
        job,
        racer,
        run_dir=run.path,
        folder=Path(run.info().get("cwd", os.getcwd())),
        **{"claim": claims.next_number(run.claims), "grace": grace_needed(run), **options},
    )


def grace_needed(run: RunDir) -> int:
    """Seconds that stopping may take: three times what checkpoints of the last attempt took."""
    attempts = run.attempts()
    path = run.events(attempts[-1] if attempts else 0, 0)
    seconds = [event["seconds"] for event in read_events(path, kind="checkpoint")]
    return round(3 * statistics.median(seconds)) if seconds else 0


def resume(
    prepared: Prepared, racers: Sequence[Racer], *, claim: int, after: Sequence[str] = ()
) -> Submitted:
    """The next job of an old run; `after`: the jobs that must have ended before it starts."""
    run = prepared.run
    assert run is not None
    check(prepared, racers)
    racers, _ = resolve_types(racers, prepared.job)
    before, earlier = run.job_file.read_text(), run.info()
    env_secrets.write_job(run, with_layout(prepared.job, racers[0]))
    overrides = prepare.typed_in_all(earlier.get("overrides", []), prepared.request)
    pending = earlier.get("changes", [])  # of a job that was sent, and never started
    changes = [*pending, *prepared.changes]
    run.update_info(lambda info: info.update(overrides=overrides, changes=changes))
    try:
        done = send_all(prepared.job, racers, run, claim=claim, after=after)
        if not done.jobs:
            raise AllranksError(
                f"a job of run {run.name} has just started", fix=f"see allranks ls {run.name}"
            )
        return done
    except AllranksError:  # what was not sent is not what the run is
        write_atomically(run.job_file, before)
        known = earlier.get("overrides", [])
        run.update_info(lambda info: info.update(overrides=known, changes=pending))
        raise


def gpu_types() -> list[str]:
    """Types of GPUs that this cluster has under SLURM's names; empty if it does not say."""
    try:
        printed = slurm.call("sinfo", "-h", "-o", "%G")
    except slurm.SlurmError:
        return []
    found = slurm.parse_gres(",".join(printed.split()))
    return list(dict.fromkeys(name for kind, name, _ in found if kind == "gpu" and name))


def resolve_types(racers: Sequence[Racer], job: Job) -> tuple[list[Racer], list[str]]:
    """Racers with the cluster's names for GPUs, and remarks.

    Types that it does not have are left out if they come from a list in the job.
    """
    types = gpu_types() if any(racer.gpu for racer in racers) else []
    found: dict[Racer, None] = {}
    missing: list[AllranksError] = []
    for racer in racers:
        try:
            found[resolve_type(racer, types)] = None
        except AllranksError as error:
            missing.append(error)
            if not (isinstance(job.slurm.gpu, tuple) and racer.gpu in job.slurm.gpu):
                raise
    if not found:
        raise missing[0]
    return list(found), list(dict.fromkeys(error.what for error in missing))


def hopeless(jobs: Sequence[str]) -> list[str]:
    """A line about each job that SLURM has taken, but will not start as it is."""
    try:
        printed = slurm.call("squeue", "-h", "-j", ",".join(jobs), "-o", "%i|%r") if jobs else ""
    except slurm.SlurmError:  # they have started and ended
        return []
    lines = [line.partition("|") for line in printed.splitlines()]
    return [
        f"job {job} will not start as it is: {waiting_reason(reason)}"
        for job, _, reason in lines
        if re.search(HOPELESS, reason)
    ]


def resolve_type(racer: Racer, types: Sequence[str]) -> Racer:
    """A racer with the cluster's own name for its GPU: a100-80gb may be a100_sxm4_80gb."""
    if racer.gpu is None or racer.gpu in types or not types:
        return racer
    wanted = find_gpu(racer.gpu)
    same = [name for name in types if wanted is not None and find_gpu(name) == wanted]
    similar = [name for name in types if name.lower() == racer.gpu.lower()]
    chosen = next(iter([*similar, *same]), None)
    if chosen is None:
        raise AllranksError(
            f"this cluster has no GPU of type {racer.gpu}; it has {', '.join(types)}",
            fix=f"write for example {racer.layout}@{types[0]}, or leave out the type",
        )
    return Racer(racer.layout, chosen)


def samples_per_epoch(job: Job, runs: Path) -> int | None:
    """What the task's source says, or else an earlier run on the same data."""
    if job.task is None:
        return None
    known = find_task(job.task).num_samples
    if known is not None:
        return known
    for run in list_runs(runs)[:50]:
        start = run.start(0)
        if start is None or "samples_per_epoch" not in start:
            continue
        earlier = prepare.load_resolved(run)
        if (earlier.task, earlier.options) == (job.task, job.options):
            return int(start["samples_per_epoch"])
    return None


def suggest_racers(run: RunDir, described: dict[str, Any]) -> list[str]:
    """Layouts of as many ranks that SLURM expects to start before any job of this waiting run."""
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
        start = expected_start(script_of(job, racer, run), run.path)
        if start is not None and start < expected:
            better.append(f"{racer} would start at {start}: allranks race {run.name} {racer}")
    return better


def expected_start(script: str, folder: Path) -> str | None:
    """When SLURM would start a script, by its own estimate; None if it does not say."""
    with tempfile.NamedTemporaryFile("w", dir=folder, prefix=".test-", suffix=".sbatch") as file:
        file.write(script)
        file.flush()
        try:
            said = slurm.call("sbatch", "--test-only", file.name, both=True)
        except slurm.SlurmError:
            return None
    match = re.search(r"to start at (\S+)", said)
    return match[1] if match else None
