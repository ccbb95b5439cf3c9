"""`bench comm`: what the network between ranks does, from the comm.json that they write."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from allranks.bench.comm_counts import parse_collectives, parse_sizes
from allranks.bench.measure import Ended, Result, Series, stopped_early
from allranks.errors import AllranksError
from allranks.launch.prepare import Prepared, Request, prepare
from allranks.launch.screen import Screen
from allranks.machine.gpus import local_gpus
from allranks.run.failures import failure
from allranks.run.folder import RunDir, find_run, list_runs
from allranks.timing.comparison import bench_of

RECORD = {"kind": "comm"}


def measure(
    prepared: Prepared, console: Console, *, oversubscribe: bool = False, debug: bool = False
) -> Result:
    """Measure on this machine; raises what went wrong."""
    screen = Screen(console, debug=debug)
    screen.makes_steps = False
    series = Series([("comm", prepared)], console, RECORD)
    (ended,) = series.here(lambda ended: ended, screen, oversubscribe=oversubscribe)
    return result_of(ended, is_interrupted=series.is_interrupted)


def result_of(ended: Ended, *, is_interrupted: bool) -> Result:
    if ended.run is None or (ended.error is not None and not is_interrupted):
        raise again(ended)
    if is_interrupted and comm_of(ended.run) is None:
        raise stopped_early()
    return Result(found_in(ended.run), is_interrupted=is_interrupted)


def prepare_comm(
    overrides: Sequence[str],
    *,
    layout: str | None,
    sizes: str,
    collectives: str | None,
    seconds: float,
    runs: Path,
) -> Prepared:
    """The ranks' command as a job, once everything that was typed is right."""
    parse_sizes(sizes)
    names = parse_collectives(collectives)
    module = "allranks.bench.comm_ranks"
    command = [sys.executable, "-m", module, "--sizes", sizes, "--seconds", f"{seconds:g}", *names]
    # A measurement that was cut short is no use later: it is not sent again by itself.
    # Ranks that only communicate make no steps to be recorded.
    settings = ["name=comm", "slurm.requeue=false", "env.ALLRANKS_PROBE='off'", *overrides]
    typed = ["bench", "comm"]
    request = Request(overrides=settings, command=command, typed=typed, layout=layout, runs=runs)
    prepared = prepare(request)
    prepared.bench = RECORD
    if prepared.layout.ranks == 1:
        raise AllranksError(
            f"layout {prepared.layout} has one rank: there is nothing to communicate",
            fix=f"write --layout 1x{max(2, len(local_gpus()))}",
        )
    return prepared


def run_to_show(runs: Path, reference: str) -> RunDir:
    """The run of bench comm that a reference stands for; `last` is the newest of them."""

    def has_measured(run: RunDir) -> bool:
        return bench_of(run.info()).get("kind") == RECORD["kind"] or comm_of(run) is not None

    measure = "measure: allranks bench comm --layout 1x2"
    newest = next(filter(has_measured, list_runs(runs)), None)
    if reference == "last":
        if newest is None:
            raise AllranksError(f"no run of bench comm in {runs}", fix=measure)
        return newest
    run = find_run(runs, reference)
    if not has_measured(run):
        instead = f"--from {newest.name}, the last of those" if newest else measure
        raise AllranksError(f"run {run.name} is not a run of bench comm", fix=instead)
    return run


def again(ended: Ended) -> AllranksError:
    """The error of a run that nobody would resume: it is measured again."""
    error, failed = ended.error, failure(ended.run) if ended.run else None
    assert error is not None
    if ended.run is None or failed is None or failed.get("error", {}).get("fix"):
        return error
    kept = " (what was measured so far: comm.json beside it)" if comm_of(ended.run) else ""
    fix = f"see {failed['log']}{kept}; then measure again"
    return AllranksError(
        error.what, fix=fix, exit_code=error.exit_code, lines=error.lines, facts=error.facts
    )


def comm_of(run: RunDir) -> dict[str, Any] | None:
    """The content of a run's comm.json, if there is one."""
    try:
        found = json.loads((run.path / "comm.json").read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def found_in(run: RunDir) -> dict[str, Any]:
    """What a run has measured; raises AllranksError if that is nothing."""
    found = comm_of(run)
    if found is None:
        raise AllranksError(
            f"run {run.name} has measured no collectives (yet): it is {run.state()}",
            fix=f"see allranks ls {run.name}, or measure: allranks bench comm --layout 1x2",
        )
    return found | {"run_dir": str(run.path)}  # it may have been copied
