"""SLURM's queue as a place for runs: what the protocol's questions mean there."""

from __future__ import annotations

from dataclasses import replace

from allranks.launch import backends, prepare
from allranks.launch.backends import Draft, Options, Submitted
from allranks.launch.backends.slurm import jobs, submit
from allranks.launch.backends.slurm.sbatch import Racer, parse_race, racers_of
from allranks.launch.prepare import Prepared, Request

is_queue = True
look, stop = jobs.look, jobs.stop


def check(request: Request, options: Options) -> Prepared:
    """The run to send; one that runs may be moved, so it need not be free."""
    prepared = prepare.prepare(replace(request, leads=False))
    if prepared.run is not None and backends.of(prepared.run) != "slurm":
        prepared.remarks.append("this run was outside of SLURM so far")
    submit.check(prepared, racers(prepared, options))
    return prepared


def racers(prepared: Prepared, options: Options) -> list[Racer]:
    """The layouts that it may take: the job's own where none was named."""
    return racers_of(prepared.job, parse_race(options.race) if options.race else [])


def draft(prepared: Prepared, options: Options) -> Draft:
    return submit.draft(prepared, racers(prepared, options))


def start(prepared: Prepared, options: Options) -> Submitted:
    return submit.submit(prepared, racers(prepared, options))


def move(prepared: Prepared, options: Options) -> Submitted:
    return jobs.move(prepared, racers(prepared, options))
