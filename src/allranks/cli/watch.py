"""The commands for looking at runs: watch, status."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from allranks.cli.commands import never_with, only_with, refuse
from allranks.cli.options import AsJson, Debug, Runs, Stalled, people_console, print_json

Watched = Annotated[
    list[str] | None,
    typer.Argument(metavar="RUN", help="Runs, or the id of one SLURM job of yours. Default: all."),
]
Web = Annotated[
    bool, typer.Option("--web", help="Show the runs in the browser, from a server on this machine.")
]
Port = Annotated[
    int,
    typer.Option(
        "--port",
        metavar="PORT",
        min=0,
        max=65535,
        help="With --web: the server's port; 0 picks a free one.",
    ),
]
Once = Annotated[bool, typer.Option("--once", help="Print the current state once, and exit.")]
All = Annotated[bool, typer.Option("--all", help="Include runs that ended more than a day ago.")]
Marks = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=LIMITS",
        envvar="ALLRANKS_MARKS",
        help="Limits at which a value changes colour, such as gpu_util=80,90. May be repeated.",
    ),
]
Notify = Annotated[
    str | None,
    typer.Option(
        metavar="COMMAND",
        envvar="ALLRANKS_NOTIFY",
        help="Run this command when a run has finished, failed, stopped or stalled.",
    ),
]
Interval = Annotated[
    float,
    typer.Option(
        metavar="SECONDS",
        min=0.1,
        help="Time between updates when printing to a file or a pipe.",
    ),
]
Stacks = Annotated[
    bool, typer.Option("--stacks", help="Print the Python stacks of a SLURM job's processes.")
]
RUNS_ALONE = ("web", "port", "show_all", "notify", "stalled", "interval")


@only_with("web", "port")
@never_with("web", "once", "interval", "stacks")
@never_with("once", "interval", "notify")
@never_with("as_json", "interval")
@never_with("run", "show_all")
def watch(
    run: Watched = None,
    web: Web = False,
    port: Port = 0,
    once: Once = False,
    show_all: All = False,
    mark: Marks = None,
    notify: Notify = None,
    stalled: Stalled = None,
    interval: Interval = 10.0,
    stacks: Stacks = False,
    runs: Runs = Path("runs"),
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    from allranks.watch import modes
    from allranks.watch.cells import parse_marks
    from allranks.watch.live import Watcher
    from allranks.watch.notify import Notifier

    job, chosen = modes.find_watched(runs, run or [])
    wanted = modes.Wanted(
        console=people_console(as_json),
        marks=parse_marks(mark or []),
        web=web,
        port=port,
        once=once,
        ranks=bool(run),
        interval=interval,
        as_json=as_json,
    )
    if job is not None:
        refuse(RUNS_ALONE, "with a job that allranks did not start")
        modes.watch_job(job, wanted, stacks=stacks)
        return
    refuse(["stacks"], "without a SLURM job's id", fix="name one: allranks watch 12345 --stacks")
    if as_json and not web:
        refuse(["notify", "mark"], "with --json")
    if modes.is_terminal():
        refuse(["interval"], "in a terminal, which is redrawn whenever something changes")
    watcher = Watcher(runs, chosen, old=show_all, stalled=stalled)
    modes.watch_runs(watcher, Notifier(notify) if notify else None, wanted)


@never_with("run", "show_all")
def status(
    run: Annotated[
        list[str] | None, typer.Argument(metavar="RUN", help="Only these runs. Default: all.")
    ] = None,
    md: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the page to this file. Default: to stdout."),
    ] = None,
    show_all: All = False,
    mark: Marks = None,
    runs: Runs = Path("runs"),
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    from allranks.run.folder import find_run
    from allranks.watch.cells import parse_marks
    from allranks.watch.status import make_status, write_page

    chosen = [find_run(runs, name) for name in run] if run else None
    page, found = make_status(runs, chosen, parse_marks(mark or []), old=show_all)
    file = None if md is None or str(md) == "-" else md
    if file is not None:
        write_page(file, page)
    if as_json:
        written = str(file.absolute()) if file is not None else None
        print_json({"md": written, "page": page, "runs": [one.as_json() for one in found]})
    else:
        print(page if file is None else f"wrote {file}", end="" if file is None else "\n")
