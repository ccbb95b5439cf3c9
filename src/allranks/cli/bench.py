"""The commands that measure: bench scaling, comm, data, precision, comm-opt."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from allranks.cli.commands import never_with, refuse, takes_script
from allranks.cli.options import (
    AsJson,
    Debug,
    Here,
    JobFile,
    LayoutText,
    Overrides,
    Oversubscribe,
    OwnPrice,
    Runs,
    people_console,
    print_error,
    print_json,
    typed_request,
)
from allranks.errors import STOPPED_AT_ONCE

if TYPE_CHECKING:
    from rich.console import Console

    from allranks.bench.measure import Result
    from allranks.launch.prepare import Prepared

Backend = Annotated[
    Literal["local", "slurm"],
    typer.Option(metavar="local|slurm", help="Run on this machine, or through SLURM's queue."),
]
Layouts = Annotated[
    str, typer.Option(metavar="LAYOUTS", help="Layouts to compare, such as 1x1,1x2,1x4.")
]
StepsOrAll = Annotated[
    str, typer.Option(metavar="N|all", help="Steps to measure once they are steady, or all.")
]
Steps = Annotated[int, typer.Option(metavar="N", min=1, help="Steps to measure.")]
Repeats = Annotated[
    int, typer.Option(metavar="N", min=1, help="How many times to make each measurement.")
]
NoBaseline = Annotated[
    bool, typer.Option("--no-baseline", help="Do not add a one-rank layout for comparison.")
]
Weak = Annotated[
    bool,
    typer.Option(
        "--weak", help="Weak scaling: keep a task's batch per rank constant, not its total."
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Keys of a job, such as slurm.partition=gpu"),
]
Sizes = Annotated[
    str,
    typer.Option(
        metavar="SIZE-SIZE", help="Smallest and largest message; each size is 4x the previous one."
    ),
]
Collectives = Annotated[
    str | None,
    typer.Option(
        metavar="NAMES", help="Collectives to measure, such as all_reduce,broadcast. Default: all."
    ),
]
Seconds = Annotated[
    float,
    typer.Option(metavar="SECONDS", min=1, help="Roughly how long the whole measurement may take."),
]
Earlier = Annotated[
    str | None,
    typer.Option(
        "--from",
        "--show",
        metavar="RUN",
        help="Show what an earlier run measured: its name, or last.",
    ),
]
Workers = Annotated[
    str | None,
    typer.Option(
        metavar="N,N", help="Numbers of workers to try. Default: chosen to suit the CPUs."
    ),
]
SecondsEach = Annotated[
    float,
    typer.Option(
        "--seconds-each",
        "--seconds",
        metavar="SECONDS",
        min=0.1,
        help="How long each measurement takes.",
    ),
]
ScriptSteps = Annotated[
    int, typer.Option(metavar="N", min=1, help="With a script: steps to measure.")
]
Precisions = Annotated[
    str | None, typer.Option(metavar="NAMES", help="Any of fp32,tf32,fp16,bf16. Default: all.")
]
Methods = Annotated[
    str | None,
    typer.Option(
        metavar="NAMES",
        help="Any of bf16,fp16,powersgd,topk,local-sgd,diloco, beside plain. Default: all.",
    ),
]
BatchSizes = Annotated[
    str | None,
    typer.Option(
        metavar="N,N", help="More batch sizes, to see how much of a step is communication."
    ),
]


@takes_script
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
    from allranks.bench.scaling import measure, plan_runs, show
    from allranks.machine.prices import parse_price

    plan = plan_runs(layouts, steps=steps, repeats=repeats, weak=weak, may_add=not no_baseline)
    prices = [*map(parse_price, price or [])]
    console = people_console(as_json)
    prepare_with = preparer(job, overrides, here=here, runs=runs)
    found = measure(plan, prepare_with, console, backend=backend, prices=prices)
    finish(found, show, console, as_json=as_json)


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
    from allranks.bench.comm import (
        found_in,
        measure,
        prepare_comm,
        run_to_show,
        show,
        show_files,
    )
    from allranks.bench.measure import Result
    from allranks.cli.cluster import show_submitted
    from allranks.launch.backends import Options, named

    console = people_console(as_json)
    if earlier is not None:
        found = Result(found_in(run_to_show(runs, earlier)))
    else:
        prepared = prepare_comm(
            overrides or [],
            layout=layout,
            sizes=sizes,
            collectives=collectives,
            seconds=seconds,
            runs=runs,
        )
        if named(backend).is_queue:
            queued = named(backend).start(prepared, Options())
            show_submitted(queued, as_json=as_json)
            if not as_json:
                print(f"then allranks bench comm --from {queued.run.name}")
            return
        found = measure(prepared, console, oversubscribe=oversubscribe, debug=debug)
    show(console, found.found)
    show_files(console, found.found)
    finish(found, None, console, as_json=as_json)


@takes_script
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
    from allranks.bench.data import measure, read_workers, show

    prepare_with = preparer(job, overrides, layout=layout, runs=runs)
    if prepare_with(()).job.command is not None:
        refuse(["workers", "seconds_each", "repeats"], "with a script")
    else:
        refuse(["steps"], "with a task")
    console = people_console(as_json)
    found = measure(
        prepare_with,
        console,
        workers=read_workers(workers),
        seconds=seconds_each,
        repeats=repeats,
        steps=steps,
    )
    finish(found, show, console, as_json=as_json)


@takes_script
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
    from allranks.bench.precision import measure, read_precisions, show

    prepare_with = preparer(job, overrides, layout=layout, runs=runs)
    console = people_console(as_json)
    names = read_precisions(precisions)
    found = measure(names, prepare_with, console, steps=steps, repeats=repeats)
    finish(found, show, console, as_json=as_json)


@takes_script
def comm_opt(
    job: JobFile = None,
    overrides: Overrides = None,
    layout: LayoutText = None,
    methods: Methods = None,
    batch_sizes: BatchSizes = None,
    steps: Steps = 200,
    runs: Runs = Path("runs"),
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    from allranks.bench.comm_opt import measure, read_batch_sizes, read_methods, show

    prepare_with = preparer(job, overrides, layout=layout, runs=runs)
    console = people_console(as_json)
    names, sizes = read_methods(methods), read_batch_sizes(batch_sizes)
    found = measure(names, sizes, prepare_with, console, steps=steps)
    finish(found, show, console, as_json=as_json)


def preparer(job: str | None, overrides: list[str] | None, **asked: Any) -> Callable[..., Prepared]:
    """What prepares the job that was typed, with more overrides and maybe in another layout."""
    from allranks.launch.prepare import prepare

    def prepare_with(more: Sequence[str], layout: str | None = None) -> Prepared:
        rest = asked if layout is None else {**asked, "layout": layout}
        return prepare(typed_request(job, [*(overrides or []), *more], **rest))

    return prepare_with


def finish(
    result: Result,
    show: Callable[[Console, dict[str, Any]], None] | None,
    console: Console,
    *,
    as_json: bool,
) -> None:
    """Show what a benchmark found, also until a Ctrl-C, and exit as it ended."""

    if show is not None and not as_json:
        show(console, result.found)
    for note in result.notes:
        print(f"note: {note}", file=sys.stderr)
    if result.error is not None:
        print_error(result.error, as_json=as_json, more=result.found)
        raise typer.Exit(result.error.exit_code)
    if as_json:
        print_json(result.found)
    if result.is_interrupted:
        print(f"stopped: {result.how_far}", file=sys.stderr)
        raise typer.Exit(STOPPED_AT_ONCE)
