"""The backend for SLURM's queue."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

from allranks.launch import backends, prepare
from allranks.launch.backends import Draft, Options, Submitted
from allranks.launch.backends.slurm import jobs, ladder, submit
from allranks.launch.backends.slurm.sbatch import Racer, parse_race, racers_of
from allranks.launch.prepare import Prepared, Request
from allranks.run import claims
from allranks.run.folder import RunDir
from allranks.slurm import commands as slurm

is_queue = True
look, stop = jobs.look, jobs.stop


def check(request: Request, options: Options) -> Prepared:
    """The run to send; it may be running, since a running one can be moved."""
    if first := typed_racers(options)[:1]:
        request = replace(request, layout=str(first[0].layout))
    prepared = prepare.prepare(replace(request, leads=False))
    if prepared.run is not None and backends.of(prepared.run) != "slurm":
        prepared.remarks.append("this run was outside of SLURM so far")
    submit.check(prepared, racers(prepared, options))
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
    return ladder.of(
        parse_race(options.ladder),
        min_efficiency=options.min_efficiency,
        steps=options.ladder_steps,
    )


def draft(prepared: Prepared, options: Options) -> Draft:
    return submit.draft(prepared, racers(prepared, options))


def start(prepared: Prepared, options: Options) -> Submitted:
    return submit.submit(prepared, racers(prepared, options), typed_ladder(options))


def move(prepared: Prepared, options: Options) -> Submitted:
    return jobs.move(prepared, racers(prepared, options))


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
