"""The commands that measure one layout: bench data, bench precision."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from allranks.cli.bench import Repeats, Steps
from allranks.cli.commands import refuse
from allranks.cli.options import (
    AsJson,
    Debug,
    JobFile,
    LayoutText,
    Overrides,
    Runs,
    people_console,
    print_error,
    typed_request,
)

if TYPE_CHECKING:
    from rich.console import Console

    from allranks.bench.precision import Trial
    from allranks.errors import AllranksError
    from allranks.launch.node import Outcome
    from allranks.launch.prepare import Prepared
    from allranks.machine.processes import Signals


Workers = Annotated[
    str | None,
    typer.Option(
        "--workers", metavar="N,N", help="Numbers of workers to try. Default: by the CPUs."
    ),
]
SecondsEach = Annotated[
    float,
    typer.Option(
        "--seconds-each", metavar="SECONDS", min=0.1, help="Time that each measurement takes."
    ),
]
ScriptSteps = Annotated[
    int, typer.Option("--steps", metavar="N", min=1, help="With a script: steps to measure.")
]
Precisions = Annotated[
    str | None,
    typer.Option(
        "--precisions", metavar="NAMES", help="Some of fp32,tf32,fp16,bf16. Default: all."
    ),
]


def data(
    job: JobFile = None,
    overrides: Overrides = None,
    layout: LayoutText = None,
    workers: Workers = None,
    seconds_each: SecondsEach = 2.0,
    repeats: Repeats = 3,
    steps: ScriptSteps = 200,
    runs: Runs = Path("runs"),
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    from allranks.bench import data as measured
    from allranks.bench import data_screen
    from allranks.launch.prepare import prepare
    from allranks.machine.processes import listening

    def prepare_with(more: tuple[str, ...]) -> Prepared:
        return prepare(typed_request(job, [*(overrides or []), *more], layout=layout, runs=runs))

    asked = measured.read_workers(workers)
    is_script = prepare_with(()).job.command is not None
    if is_script:
        refuse(["workers", "seconds_each", "repeats"], "with a script")
        more: tuple[str, ...] = (f"env.ALLRANKS_MEASURE='{steps}'",)
    else:
        refuse(["steps"], "with a task")
        more = measured.overrides_of(workers=asked, seconds=seconds_each, repeats=repeats)
    console = people_console(as_json)
    prepared = prepare_with(more)
    check_room(prepared, console)
    with listening() as signals:
        outcome = run_muted(prepared, console, measured.new_record(), signals)
    found = found_in_script(outcome) if is_script else found_in_task(outcome)
    if not as_json:
        data_screen.show(console, found)
    error = None if is_script or signals.received else outcome.error
    finish(found, error, is_interrupted=bool(signals.received), as_json=as_json)


def finish(
    found: dict[str, Any], error: AllranksError | None, *, is_interrupted: bool, as_json: bool
) -> None:
    """Print what was found as JSON if that is asked for, and exit as it ended."""
    from allranks.run.events import to_json

    if error is not None:
        print_error(error, as_json=as_json, more=found)
        raise typer.Exit(1)
    if as_json:
        print(to_json(found))
    if is_interrupted:
        print("stopped: this is what had been measured by then", file=sys.stderr)
        raise typer.Exit(130)


def check_room(prepared: Prepared, console: Console) -> None:
    """Refuse more ranks than this machine can measure; say if they have to take turns."""
    from allranks.launch.checks import check_measurable

    for remark in check_measurable(prepared.layout):
        console.print(f"note: {remark}", highlight=False)


def run_muted(
    prepared: Prepared, console: Console, record: dict[str, Any], signals: Signals | None = None
) -> Outcome:
    """A run of a benchmark on this machine: what it says itself is in its logs."""
    from allranks.launch.backends.local import run_here
    from allranks.launch.node import Place
    from allranks.launch.screen import QuietScreen

    prepared.bench = record
    is_data = record["kind"] == "data" and prepared.job.command is None  # steps without events
    quiet = QuietScreen(console, makes_steps=not is_data)
    return run_here(prepared, Place(), quiet, signals)


def found_in_task(outcome: Outcome) -> dict[str, Any]:
    """What was measured, as far as it came; raises what went wrong if it came to nothing."""
    from allranks.bench import data as measured

    found = measured.read_found(outcome.run)
    if found is None:
        raise outcome.error or stopped_early()
    return measured.as_json(found, outcome.run)


def stopped_early() -> AllranksError:
    from allranks.errors import AllranksError

    return AllranksError(
        "stopped before anything was measured", fix="let it run longer", exit_code=130
    )


def found_in_script(outcome: Outcome) -> dict[str, Any]:
    from allranks.bench import data as measured
    from allranks.bench.scaling import nothing_measured
    from allranks.errors import AllranksError
    from allranks.machine.allotted import cpus_allotted
    from allranks.run.events import read_events
    from allranks.run.results import steps_by_rank
    from allranks.timing.steps import timing

    run = outcome.run
    timed = timing(run)
    if outcome.result["state"] == "stopped" and (timed is None or not timed.samples):
        raise stopped_early()
    if timed is None or not timed.samples:
        raise outcome.error or AllranksError(
            nothing_measured(run.state(), steps_by_rank(run)),
            fix=f"see {run.log(0, 0)}: the script must train, with torch's optimizers and loaders",
            exit_code=1,
        )
    events = read_events(run.events(max(run.attempts()), 0), kind="device")
    seen = [event.get("num_workers", 0) for event in events]
    cpus = max(1, cpus_allotted() // timed.ranks)
    return measured.script_as_json(run, timed, max(seen, default=None), cpus)


def precision(
    job: JobFile = None,
    overrides: Overrides = None,
    layout: LayoutText = None,
    precisions: Precisions = None,
    steps: Steps = 200,
    repeats: Repeats = 3,
    runs: Runs = Path("runs"),
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    from allranks.bench import precision as measured
    from allranks.bench import precision_screen
    from allranks.launch.prepare import prepare
    from allranks.machine.allotted import usable_instructions
    from allranks.machine.gpus import local_gpus
    from allranks.machine.processes import listening

    def prepare_in(wanted: str) -> Prepared:
        typed = [*(overrides or []), *measured.overrides_of(wanted, steps)]
        return prepare(typed_request(job, typed, layout=layout, runs=runs))

    names = measured.read_precisions(precisions)
    measured.check_job(prepare(typed_request(job, overrides, layout=layout, runs=runs)).job)
    refused = {
        name: measured.why_unsupported(
            name, local_gpus(), cpu_can=lambda: usable_instructions() is not None
        )
        for name in names
    }
    prepared = [(name, prepare_in(name)) for name in names if not refused[name]] * repeats
    console = people_console(as_json)
    trials = [
        measured.Trial(name, problem=why, is_refused=True) for name, why in refused.items() if why
    ]
    for _, one in prepared[:1]:
        check_room(one, console)
    with listening() as signals:
        trials += run_trials(prepared, console, signals)
    is_interrupted = bool(signals.received)
    found = measured.as_json(trials, steps=steps) | {"interrupted": is_interrupted}
    if not as_json:
        precision_screen.show(console, found)
    error = None if is_interrupted else measured.error_in(trials)
    finish(found, error, is_interrupted=is_interrupted, as_json=as_json)


def run_trials(
    prepared: list[tuple[str, Prepared]], console: Console, signals: Signals
) -> list[Trial]:
    """Run after run, round by round; what was measured before a Ctrl-C is kept."""
    from dataclasses import replace

    from allranks.bench import precision as measured
    from allranks.errors import AllranksError

    record = measured.new_record()
    done: list[Trial] = []
    for name, one in prepared:
        if any(trial.problem for trial in done if trial.precision == name):
            continue  # it would fail again
        try:
            outcome = run_muted(replace(one), console, record, signals)
        except AllranksError as error:
            if not done and error.exit_code == 2:  # what is wrong here is wrong with all of them
                raise
            done.append(measured.Trial(name, problem=error.what))
            if signals.received:
                break
            continue
        done.append(measured.trial_of(outcome.run, name))
        pace = done[-1].samples_per_second
        said = done[-1].problem if pace is None else f"{pace:,.1f} samples/s"
        console.print(f"{name}: {said}  ({outcome.run.name})", style="dim", soft_wrap=True)
        if signals.received:
            break
    return done
