"""The commands that measure: bench scaling, comm, data, precision."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from allranks.cli.commands import never_with
from allranks.cli.options import (
    AsJson,
    Debug,
    Here,
    JobFile,
    Overrides,
    OwnPrice,
    Runs,
    print_error,
    typed_request,
)

if TYPE_CHECKING:
    from allranks.bench.scaling import Repeat
    from allranks.bench.scaling_screen import Progress
    from allranks.errors import AllranksError
    from allranks.launch.prepare import Prepared
    from allranks.layout import Layout
    from allranks.machine.prices import Price
    from allranks.machine.processes import Signals
    from allranks.run.folder import RunDir

Backend = Annotated[
    Literal["local", "slurm"],
    typer.Option(
        "--backend", metavar="local|slurm", help="Run on this machine, or through SLURM's queue."
    ),
]
Layouts = Annotated[
    str,
    typer.Option("--layouts", metavar="LAYOUTS", help="Layouts to compare, such as 1x1,1x2,1x4."),
]
StepsOrAll = Annotated[
    str,
    typer.Option(
        "--steps", metavar="N|all", help="Steps to measure, once they are steady; or all of them."
    ),
]
Steps = Annotated[int, typer.Option("--steps", metavar="N", min=1, help="Steps to measure.")]
Repeats = Annotated[
    int, typer.Option("--repeats", metavar="N", min=1, help="How often each is measured.")
]
NoBaseline = Annotated[
    bool, typer.Option("--no-baseline", help="Do not add a layout of one rank to compare with.")
]
Weak = Annotated[
    bool,
    typer.Option("--weak", help="Weak scaling: keep a task's batch per rank, not its total."),
]


@never_with("backend=slurm", "here")
def scaling(
    job: JobFile = None,
    overrides: Overrides = None,
    layouts: Layouts = "1x1,1x2",
    steps: StepsOrAll = "200",
    repeats: Repeats = 3,
    no_baseline: NoBaseline = False,
    weak: Weak = False,
    backend: Backend = "local",
    here: Here = False,
    price: OwnPrice = None,
    runs: Runs = Path("runs"),
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    from allranks.bench import scaling as measured
    from allranks.bench import scaling_screen
    from allranks.bench.plan_runs import PlannedRun, plan_runs
    from allranks.machine.prices import parse_price
    from allranks.timing.comparison import CPU

    def prepare_one(wanted: PlannedRun) -> Prepared:
        from allranks.launch.prepare import prepare

        typed = [*(overrides or []), *wanted.overrides]
        layout = str(wanted.layout)
        prepared = prepare(typed_request(job, typed, layout=layout, here=here, runs=runs))
        prepared.bench = plan.bench
        return prepared

    plan = plan_runs(layouts, steps=steps, repeats=repeats, weak=weak, may_add=not no_baseline)
    # Everything that can be refused is refused before anything runs.
    own = [*map(parse_price, price or [])]
    plan = plan.for_job(prepare_one(plan.runs[0]).job)
    prepared = [prepare_one(wanted) for wanted in plan.runs]
    screen = scaling_screen.Progress(as_json=as_json, total=len(prepared))
    if backend == "slurm":
        done = measure_in_slurm(prepared, screen, plan.added)
    else:
        done = measure_here(prepared, screen)
    device = next((one.device for one in done if one.timing is not None), None)
    found = measured.as_json(
        done,
        added=plan.added,
        price_of=lambda device, memory: price_of(device, memory, own),
        more={
            **{"steps": steps, "device": device, "unit": "rank" if device == CPU else "GPU"},
            "interrupted": screen.is_interrupted,
        },
    )
    tell(found, screen, as_json=as_json)


def tell(found: dict[str, Any], screen: Progress, *, as_json: bool) -> None:
    """Show what was found; exits with an error if any layout could not be measured."""
    from allranks.bench import scaling_screen
    from allranks.run.events import to_json

    if not as_json:
        scaling_screen.show(screen.console, found)
    for row in found["rows"]:
        if row["added"] and row["problem"]:
            note = f"note: {row['layout']}, added to compare with, could not be measured"
            print(f"{note}: {row['problem']}; --no-baseline leaves it out", file=sys.stderr)
    error = None if screen.is_interrupted else error_in(found)
    if error is not None:
        print_error(error, as_json=as_json, more=found)
        raise typer.Exit(error.exit_code)
    if as_json:
        print(to_json(found))
    if screen.is_interrupted:
        repeats = [one for row in found["rows"] for one in row["repeats"]]
        measured = sum(not one.get("problem") for one in repeats)
        print(f"stopped: {measured} of {screen.total} runs were measured", file=sys.stderr)
        raise typer.Exit(130)


def error_in(found: dict[str, Any]) -> AllranksError | None:
    """Why a layout that was asked for could not be measured."""
    from allranks.bench import scaling
    from allranks.errors import AllranksError

    failed = [row for row in found["rows"] if row["problem"] and not row["added"]]
    if not failed and any(row["samples_per_second"] for row in found["rows"]):
        return None
    fix = "let it run longer"
    if not failed:
        return AllranksError("nothing was measured", fix=fix, exit_code=1)
    problem = failed[0]["problem"]
    if problem != scaling.STOPPED:
        run = next((one["run"] for one in failed[0]["repeats"] if one.get("problem")), "")
        fix = f"what it said: allranks logs {run}" if run else "fix it, then measure again"
        if run and not problem.startswith(scaling.NOTHING_TO_MEASURE):
            fix = f"see allranks doctor {run}; {fix}"
    return AllranksError(f"{failed[0]['layout']}: {problem}", fix=fix, exit_code=1)


def measure_here(prepared: list[Prepared], screen: Any) -> list[Repeat]:
    """Run after run on this machine; what was measured before a Ctrl-C is kept."""
    from allranks.launch.backends.slurm.held_nodes import check_allocation
    from allranks.launch.checks import check_measurable
    from allranks.machine.processes import listening

    for one in prepared:
        check_allocation(one.layout, one.request, os.environ)
    remarks = [remark for one in prepared for remark in check_measurable(one.layout)]
    for remark in dict.fromkeys(remarks):
        screen.console.print(f"note: {remark}", highlight=False)
    with listening() as signals:  # for all runs: one that comes between two of them ends the next
        return run_in_turns(prepared, screen, signals)


def run_in_turns(prepared: list[Prepared], screen: Any, signals: Signals) -> list[Repeat]:
    from allranks.errors import AllranksError
    from allranks.launch.backends.local import run_here
    from allranks.launch.node import Place
    from allranks.launch.screen import QuietScreen

    done: list[Repeat] = []
    for one in prepared:
        if any(each.problem and each.layout == str(one.layout) for each in done):
            continue  # it would only fail again
        screen.begin(str(one.layout))
        try:
            outcome = run_here(one, Place(), QuietScreen(screen.console), signals)
            done.append(repeat_of(outcome.run, one.layout))
            screen.end(done[-1])
        except AllranksError as error:
            if not done and error.exit_code == 2:  # what is wrong here is wrong with all of them
                raise
            done.append(failed(one.layout, "; ".join(filter(None, (error.what, error.fix)))))
        if signals.received:
            screen.is_interrupted = True
            break
    return done


def measure_in_slurm(
    prepared: list[Prepared], screen: Any, added: Layout | None = None
) -> list[Repeat]:
    """All of them into the queue at once, in turns; then wait until they have left it."""
    import time

    from allranks.launch import backends
    from allranks.run import run_state

    done: list[Repeat] = []
    waiting: list[tuple[RunDir, Layout]] = []
    pause = 2.0
    try:
        send_in_turns(prepared, screen, waiting, done, added)
        while waiting:
            queue = backends.look([run for run, _ in waiting])
            for run, layout in list(waiting):
                if run_state.describe(run, queue)["state"] not in ("queued", "running"):
                    waiting.remove((run, layout))
                    done.append(repeat_of(run, layout))
                    screen.end(done[-1])
            time.sleep(pause if waiting else 0)
            pause = min(30.0, 1.2 * pause)
    except KeyboardInterrupt:
        screen.is_interrupted = True
        screen.left([run.name for run, _ in waiting])
    return done


def send_in_turns(
    prepared: list[Prepared],
    screen: Any,
    waiting: list[tuple[RunDir, Layout]],
    done: list[Repeat],
    added: Layout | None,
) -> None:
    """Send each run so that it starts when the one before has ended: beside it, it would disturb.

    Where one is refused, those before it are taken back; the one that was only added is left out.
    """
    from allranks.errors import AllranksError
    from allranks.launch.backends.slurm import submit
    from allranks.launch.backends.slurm.sbatch import racers_of

    before: list[str] = []
    for one in prepared:
        if any(each.layout == str(one.layout) for each in done):
            continue  # it would only be refused again
        # A task that was measured has stopped, as at a limit: it must not be sent again.
        slurm = one.job.slurm.model_copy(update={"requeue": False})
        one.job = one.job.model_copy(update={"slurm": slurm})
        options: dict[str, Any] = {"dependency": f"afterany:{':'.join(before)}"} if before else {}
        try:
            sent = submit.submit(one, racers_of(one.job, []), **options)
        except AllranksError as error:
            if one.layout != added:
                raise taken_back(error, one.layout, [run for run, _ in waiting]) from error
            done.append(failed(one.layout, "; ".join(filter(None, (error.what, error.fix)))))
            continue
        before = sent.jobs
        waiting.append((sent.run, one.layout))
        screen.queued(sent.run.name, str(one.layout))


def taken_back(error: AllranksError, layout: Layout, runs: list[RunDir]) -> AllranksError:
    """The error of a run that was refused, once those that were sent before it are stopped."""
    from allranks.errors import AllranksError
    from allranks.launch import backends

    what, fix = f"{layout}: {error.what}", error.fix
    names = " ".join(run.name for run in runs)
    try:
        done = [*dict.fromkeys(one["done"] for one in backends.stop(runs))] if runs else []
    except AllranksError as silent:
        done = [f"could not be stopped: {silent.what}"]
    if runs:
        what += f"; sent before it: {names} ({', '.join(done)})"
    if any("could not be stopped" in words for words in done):
        fix += f"; to stop what is still in the queue: allranks stop {names}"
    return AllranksError(what, fix=fix, exit_code=error.exit_code)


def price_of(device: str, memory: int | None, own: list[Price]) -> float | None:
    """Dollars for an hour of it."""
    from allranks.machine.prices import find_price

    found = find_price(device, memory, own)
    return found.usd_per_hour if found else None


def repeat_of(run: RunDir, layout: Layout) -> Repeat:
    """What a run of a benchmark has measured, or why it has not."""
    from allranks.bench.scaling import Repeat, nothing_measured
    from allranks.run.failures import failure, failure_in_words
    from allranks.run.results import samples_per_epoch, steps_by_rank
    from allranks.timing.comparison import device_name, gpu_memory
    from allranks.timing.samples_seen import remarks
    from allranks.timing.steps import timing

    measured = timing(run)
    broken = failure(run)
    problem = None
    if broken is not None:
        fix = broken.get("error", {}).get("fix") or f"see {broken['log']}"
        problem = f"{failure_in_words(broken)}: {fix}"
    elif measured is None or not measured.samples:
        problem = nothing_measured(run.state(), steps_by_rank(run))
    kept = measured if measured is not None and measured.samples else None
    info, attempts = run.info(), run.attempts()
    start = (run.start(attempts[-1]) if attempts else None) or {}
    device = device_name(start, info, uses_gpu=False)
    return Repeat(
        run=run.name,
        layout=str(layout),
        timing=kept,
        problem=problem,
        samples_per_epoch=samples_per_epoch(run),
        remarks=remarks(run, kept),
        state=run.state(),
        device=device,
        device_memory=gpu_memory(info).get(device),
    )


def failed(layout: Layout, what: str) -> Repeat:
    from allranks.bench.scaling import Repeat

    return Repeat("", str(layout), None, what, state="failed")
