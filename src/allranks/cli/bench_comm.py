"""`allranks bench comm`: what the network between ranks does."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from allranks.cli.bench import Backend
from allranks.cli.commands import never_with
from allranks.cli.options import (
    AsJson,
    Debug,
    LayoutText,
    Oversubscribe,
    Runs,
    people_console,
)

if TYPE_CHECKING:
    from allranks.launch.node import Outcome
    from allranks.launch.prepare import Prepared
    from allranks.run.folder import RunDir

COMM = "comm"
Settings = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Keys of a job, such as slurm.partition=gpu"),
]
Sizes = Annotated[
    str,
    typer.Option(
        "--sizes", metavar="SIZE-SIZE", help="Smallest and largest message; each is 4x the last."
    ),
]
Collectives = Annotated[
    str | None,
    typer.Option(
        "--collectives", metavar="NAMES", help="Such as all_reduce,broadcast. Default: all."
    ),
]
Seconds = Annotated[
    float,
    typer.Option("--seconds", metavar="SECONDS", min=1, help="Time that all of it takes, about."),
]
Earlier = Annotated[
    str | None,
    typer.Option(
        "--from", metavar="RUN", help="Measure nothing: show what this run, or the last, measured."
    ),
]


@never_with(
    "earlier", "overrides", "layout", "sizes", "collectives", "seconds", "backend", "oversubscribe"
)
@never_with("backend=slurm", "oversubscribe")
def comm(
    overrides: Settings = None,
    layout: LayoutText = None,
    sizes: Sizes = "1KiB-1GiB",
    collectives: Collectives = None,
    seconds: Seconds = 120,
    backend: Backend = "local",
    earlier: Earlier = None,
    oversubscribe: Oversubscribe = False,
    runs: Runs = Path("runs"),
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    from allranks.launch.backends.local import run_here
    from allranks.launch.checks import check_measurable
    from allranks.launch.node import Place
    from allranks.launch.screen import Screen
    from allranks.machine.processes import listening

    if earlier is not None:
        show_comm(run_to_show(runs, earlier), as_json=as_json)
        return
    prepared = prepare_comm(overrides, layout, sizes, collectives, seconds, runs)
    if backend == "slurm":
        send_comm(prepared, as_json=as_json)
        return
    if not oversubscribe:
        check_measurable(prepared.layout)
    screen = Screen(people_console(as_json), debug=debug)
    screen.makes_steps = False
    with listening() as signals:
        outcome = run_here(prepared, Place(oversubscribe=oversubscribe), screen, signals)
    show_outcome(outcome, is_interrupted=bool(signals.received), as_json=as_json)


def show_outcome(outcome: Outcome, *, is_interrupted: bool, as_json: bool) -> None:
    """What was measured, also until a Ctrl-C; raises what went wrong."""
    from allranks.cli.bench_data import stopped_early

    if outcome.error is not None and not is_interrupted:
        raise again(outcome)
    if is_interrupted and comm_of(outcome.run) is None:
        raise stopped_early()
    show_comm(outcome.run, as_json=as_json)
    if is_interrupted:
        print("stopped: this is what had been measured by then", file=sys.stderr)
        raise typer.Exit(130)


def prepare_comm(
    overrides: list[str] | None,
    layout: str | None,
    sizes: str,
    collectives: str | None,
    seconds: float,
    runs: Path,
) -> Prepared:
    """The ranks' command as a job, once everything that was typed is right."""
    from allranks.bench.comm import parse_collectives, parse_sizes
    from allranks.errors import AllranksError
    from allranks.launch.prepare import Request, prepare
    from allranks.machine.gpus import local_gpus

    parse_sizes(sizes)
    names = parse_collectives(collectives)
    module = "allranks.bench.comm_ranks"
    command = [sys.executable, "-m", module, "--sizes", sizes, "--seconds", f"{seconds:g}", *names]
    # A measurement that was cut short is no use later: it is not sent again by itself.
    # Ranks that only communicate make no steps to be recorded.
    settings = ["name=comm", "slurm.requeue=false", "env.ALLRANKS_PROBE='off'", *(overrides or [])]
    typed = ["bench", "comm"]
    request = Request(overrides=settings, command=command, typed=typed, layout=layout, runs=runs)
    prepared = prepare(request)
    prepared.bench = {"kind": COMM}
    if prepared.layout.ranks == 1:
        raise AllranksError(
            f"layout {prepared.layout} has one rank: there is nothing to communicate",
            fix=f"write --layout 1x{max(2, len(local_gpus()))}",
        )
    return prepared


def send_comm(prepared: Prepared, *, as_json: bool) -> None:
    """Into the queue; the ranks write the result into the run's folder."""
    from allranks.cli.cluster import show_submitted
    from allranks.launch.backends.slurm import submit
    from allranks.launch.backends.slurm.sbatch import racers_of

    done = submit.submit(prepared, racers_of(prepared.job, []))
    show_submitted(done, as_json=as_json)
    if not as_json:
        print(f"then allranks bench comm --from {done.run.name}")


def run_to_show(runs: Path, reference: str) -> RunDir:
    """The run of bench comm that a reference stands for; `last` is the newest of them."""
    from allranks.errors import AllranksError
    from allranks.run.folder import find_run, list_runs
    from allranks.timing.comparison import bench_of

    def has_measured(run: RunDir) -> bool:
        return bench_of(run.info()).get("kind") == COMM or comm_of(run) is not None

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


def again(outcome: Outcome) -> Exception:
    """The error of a run that nobody would resume: it is measured again."""
    from allranks.errors import AllranksError
    from allranks.run.failures import failure

    error, failed = outcome.error, failure(outcome.run)
    assert error is not None
    if failed is None or failed.get("error", {}).get("fix"):
        return error
    kept = " (what was measured so far: comm.json beside it)" if comm_of(outcome.run) else ""
    fix = f"see {failed['log']}{kept}; then measure again"
    return AllranksError(
        error.what, fix=fix, exit_code=error.exit_code, lines=error.lines, facts=error.facts
    )


def comm_of(run: RunDir) -> dict[str, Any] | None:
    """The content of a run's comm.json, if there is one."""
    import json

    try:
        found = json.loads((run.path / "comm.json").read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def show_comm(run: RunDir, *, as_json: bool) -> None:
    """Tables for people, a plot in the run's folder, or JSON."""
    from allranks.bench import comm_plot, comm_screen
    from allranks.errors import AllranksError
    from allranks.run.events import to_json

    found = comm_of(run)
    if found is None:
        raise AllranksError(
            f"run {run.name} has measured no collectives (yet): it is {run.state()}",
            fix=f"see allranks ls {run.name}, or measure: allranks bench comm --layout 1x2",
        )
    console = people_console(as_json)
    comm_screen.show(console, found)
    picture = run.path / "comm.png"
    try:
        comm_plot.plot(found, picture)
        console.print(str(picture), soft_wrap=True)
    except AllranksError as error:
        console.print(f"note: {error.what}; {error.fix}", soft_wrap=True, markup=False)
    console.print(str(run.path / "comm.json"), soft_wrap=True)
    if as_json:
        print(to_json(found))
