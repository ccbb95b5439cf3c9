"""The commands that look on: watch, status."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from allranks.cli.options import AsJson, Debug, Runs, people_console

if TYPE_CHECKING:
    from rich.console import Console

    from allranks.run.folder import RunDir
    from allranks.watch.live import Watcher
    from allranks.watch.marks import Mark
    from allranks.watch.notify import Notifier

LEAST_WIDTH = 20  # characters: nobody means less
Watched = Annotated[
    list[str] | None,
    typer.Argument(metavar="RUN...", help="Runs, or the id of any job of yours. Default: all."),
]
Web = Annotated[bool, typer.Option("--web", help="In the browser, by a server on this machine.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="Of --web. 0: any that is free.")]
Once = Annotated[bool, typer.Option("--once", help="Look once, print, and end.")]
All = Annotated[bool, typer.Option("--all", help="Also what ended more than a day ago.")]
Marks = Annotated[
    list[str] | None,
    typer.Option(
        "--mark",
        metavar="NAME=LIMITS",
        envvar="ALLRANKS_MARKS",
        help="What is good or asks for a look, such as gpu_util=80,90.",
    ),
]
Notify = Annotated[
    str | None,
    typer.Option(
        metavar="COMMAND",
        envvar="ALLRANKS_NOTIFY",
        help="Called when a run has finished, failed, stopped or stalled.",
    ),
]
Stalled = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS",
        min=1.0,
        help="Without a step: it is stalled. Default: by the run's own steps.",
    ),
]
Interval = Annotated[
    float, typer.Option(metavar="SECONDS", min=0.1, help="Between looks, where lines are printed.")
]
Stacks = Annotated[
    bool, typer.Option("--stacks", help="Of a job: where its Python processes are, and end.")
]


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
    from allranks.watch.live import Watcher
    from allranks.watch.marks import parse_marks
    from allranks.watch.notify import Notifier

    marks = parse_marks(mark or [])
    job, chosen = watched(runs, run or [])
    if job is not None:
        watch_job(job, marks, once=once or not is_terminal(), stacks=stacks, as_json=as_json)
        return
    if stacks:
        refuse_stacks()
    watcher = Watcher(runs, chosen, old=show_all, stalled=stalled)
    notifier = Notifier(notify) if notify else None
    try:
        if web:
            serve(watcher, marks, notifier, port=port, as_json=as_json)
        elif as_json or once:
            look_once(watcher, marks, ranks=bool(run), as_json=as_json)
        elif is_terminal():
            watch_in_terminal(watcher, marks, notifier)
        else:
            follow_in_lines(watcher, notifier, interval)
    finally:
        if notifier is not None:
            notifier.close()
        watcher.close()


def status(
    run: Watched = None,
    md: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write it there; - is stdout, the default.")
    ] = None,
    show_all: All = False,
    mark: Marks = None,
    runs: Runs = Path("runs"),
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    from allranks.run.events import to_json
    from allranks.run.folder import find_run
    from allranks.watch.live import Watcher
    from allranks.watch.marks import parse_marks
    from allranks.watch.status import gather, status_page

    marks = parse_marks(mark or [])
    chosen = [find_run(runs, name) for name in run] if run else None
    watcher = Watcher(runs, chosen, old=show_all)
    try:
        found = gather(watcher)
    finally:
        watcher.close()
    page = status_page(found, resources(), marks, time.time(), runs.absolute())
    is_file = md is not None and str(md) != "-"
    if is_file and md is not None:
        write_page(md, page)
    if as_json:
        written = str(md.absolute()) if is_file and md is not None else None
        described = [one.view.as_json() for one in found]
        print(to_json({"md": written, "page": page, "runs": described}))
    else:
        print(f"wrote {md}" if is_file else page, end="\n" if is_file else "")


def write_page(path: Path, page: str) -> None:
    """Whole or not at all; into a device or a pipe as into any other."""
    from allranks.errors import AllranksError
    from allranks.run.folder import write_atomically

    try:
        if path.exists() and not path.is_file():
            path.write_text(page)  # a file renamed onto a device would take its place
        else:
            write_atomically(path, page)
    except OSError as error:
        why = error.strerror or str(error)
        raise AllranksError(
            f"cannot write {path}: {why}", fix="name another file after --md", exit_code=1
        ) from error


def resources() -> dict[str, Any]:
    """The cluster and this machine; this machine alone where SLURM is silent."""
    from allranks.errors import AllranksError
    from allranks.machine.inventory import describe_machine
    from allranks.slurm.cluster import describe_cluster
    from allranks.slurm.commands import SlurmError

    try:
        return describe_cluster()
    except AllranksError as error:
        meaning = error.meaning if isinstance(error, SlurmError) else ""
        cluster = "SLURM" if isinstance(error, SlurmError) else "No SLURM cluster"
        note = f"{cluster}: {meaning or error.what}."
        return {"slurm": None, "machine": describe_machine(), "notes": [note]}


def is_terminal() -> bool:
    can_move = os.environ.get("TERM", "") not in ("", "dumb")
    return sys.stdin.isatty() and sys.stdout.isatty() and can_move


def watched(runs: Path, words: list[str]) -> tuple[str | None, list[RunDir] | None]:
    """A job that allranks did not start, or the runs that are named; None and None: all."""
    from allranks.errors import AllranksError
    from allranks.run.folder import find_run, list_runs

    if not words:
        return None, None
    found = []
    for word in words:
        try:
            found.append(find_run(runs, word))
        except AllranksError:
            if not word.isdigit():
                raise
            own = [run for run in list_runs(runs) if word in run.info().get("jobs", [])]
            found += own
            if own:
                continue
            if len(words) > 1:
                raise AllranksError(
                    f"{word} is a job that allranks did not start, among other words",
                    fix=f"watch it alone: allranks watch {word}",
                ) from None
            return word, None
    return None, list({run.path: run for run in found}.values())


def refuse_stacks() -> None:
    from allranks.errors import AllranksError

    raise AllranksError(
        "--stacks is for a job of SLURM's", fix="write its id: allranks watch 12345 --stacks"
    )


def look_once(watcher: Watcher, marks: dict[str, Mark], *, ranks: bool, as_json: bool) -> None:
    from allranks.run.events import to_json
    from allranks.watch.plain_lines import snapshot

    watcher.poll(budget=float("inf"))
    names = [run.run for run in watcher.runs()]
    if ranks:
        watcher.poll(names, budget=float("inf"))
    if as_json:
        described = []
        for run in watcher.runs():
            of_ranks = [rank.as_json() for rank in watcher.ranks(run.run)] if ranks else None
            described.append(run.as_json() | ({"ranks": of_ranks} if ranks else {}))
        print(to_json(described))
        return
    console = people_console(False)
    for line in snapshot(watcher, marks, width_of(console), time.time(), ranks=ranks):
        line.rstrip()
        console.print(line, soft_wrap=True)


def width_of(console: Console) -> int:
    """Of the terminal, or as COLUMNS says; a file has room."""
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns) >= LEAST_WIDTH:
        return int(columns)
    return console.width if console.is_terminal else 160


def watch_in_terminal(watcher: Watcher, marks: dict[str, Mark], notifier: Notifier | None) -> None:
    from allranks.watch.screen import show
    from allranks.watch.terminal import View

    show(View(watcher, marks, stopper(watcher), notifier))


def stopper(watcher: Watcher) -> Any:
    """What stops a run by its name, and says what was done."""

    def stop(name: str) -> str:
        from allranks.launch import backends

        run = watcher.run_dir(name)
        return backends.stop([run])[0]["done"] if run is not None else "is gone"

    return stop


def follow_in_lines(watcher: Watcher, notifier: Notifier | None, interval: float) -> None:
    from allranks.show.text import clean
    from allranks.watch.plain_lines import follow

    def write(line: str) -> None:
        print(clean(line), flush=True)

    if not follow(watcher, write, notifier, interval=interval):
        from allranks.watch.draw import NO_RUNS

        print(NO_RUNS, file=sys.stderr)
    for problem in notifier.problems if notifier else []:
        print(f"note: {problem}", file=sys.stderr)


def serve(
    watcher: Watcher,
    marks: dict[str, Mark],
    notifier: Notifier | None,
    *,
    port: int,
    as_json: bool,
) -> None:
    from allranks.cli.doctor import diagnosis_of
    from allranks.doctor.finding import as_json as to_objects
    from allranks.watch.server import Served, serve

    def diagnose(run: RunDir) -> list[dict[str, Any]]:
        return to_objects(diagnosis_of(run))

    def announce(served: Served) -> None:
        print(json.dumps(served.as_json()) if as_json else "\n".join(served.lines()), flush=True)

    notify = notifier.look if notifier else None
    stop = stopper(watcher)
    serve(
        watcher,
        marks=marks,
        stop=stop,
        notify=notify,
        port=port,
        announce=announce,
        diagnose=diagnose,
    )
    for problem in notifier.problems if notifier else []:
        print(f"note: {problem}", file=sys.stderr)


def watch_job(job: str, marks: dict[str, Mark], *, once: bool, stacks: bool, as_json: bool) -> None:
    """A job that allranks did not start, through a step on its nodes."""
    from allranks.run.events import to_json
    from allranks.watch import jobs
    from allranks.watch.job_screen import JobView, job_lines
    from allranks.watch.screen import show

    facts = jobs.find_job(job)
    if not (once or stacks or as_json):
        show(JobView(facts, marks))
        return
    samples = jobs.collect(facts, "stacks" if stacks else "samples")
    console = people_console(as_json)
    if as_json:
        print(to_json({"job": job, "name": facts.name, "nodes": samples}))
    elif stacks:
        print("\n".join(jobs.stack_lines(samples)))
    else:
        for line in job_lines(facts, samples, marks, width_of(console)):
            line.rstrip()
            console.print(line, soft_wrap=True)
