"""The commands cluster, submit, race, resume, stop, ls and logs: runs wherever they are."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from allranks.cli.commands import never_with, only_with, refuse, takes_script
from allranks.cli.options import (
    AsJson,
    Debug,
    Force,
    Hosts,
    JobFile,
    LayoutText,
    Overrides,
    Run,
    Runs,
    people_console,
    print_error,
    print_json,
    typed_request,
)
from allranks.errors import STOPPED_AT_CHECKPOINT, STOPPED_AT_ONCE
from allranks.launch.backends import TABLE as BACKENDS

if TYPE_CHECKING:
    from allranks.run.folder import RunDir

Race = Annotated[
    str | None,
    typer.Option(
        metavar="LAYOUTS",
        help="Queue it in several layouts, such as 1x4,4x1@a40: the first to start wins.",
    ),
]
Ladder = Annotated[
    str | None,
    typer.Option(
        metavar="LAYOUTS",
        help="Move up through these layouts as long as it pays off, such as 1x1,1x2,2x2.",
    ),
]
MinEfficiency = Annotated[
    float,
    typer.Option(
        metavar="FRACTION",
        min=0,
        max=1,
        help="With --ladder: the efficiency that a layout must reach.",
    ),
]
LadderSteps = Annotated[
    int, typer.Option(metavar="N", min=1, help="With --ladder: steps to measure.")
]
Wait = Annotated[
    bool, typer.Option("--wait", help="Wait until the run has ended; exit with its code.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what would be sent, and stop.")]
To = Annotated[
    str | None,
    typer.Option(
        metavar="|".join(BACKENDS),
        help="Where to continue: this machine, SLURM's queue, or the run's hosts. "
        "Default: as before.",
    ),
]


def cluster(
    partition: Annotated[
        str | None, typer.Argument(metavar="PARTITION", help="Only this partition.")
    ] = None,
    queue: Annotated[
        bool, typer.Option("--queue", help="Show who is waiting, and where your jobs stand.")
    ] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    from allranks.slurm import cluster_screen
    from allranks.slurm.cluster import describe_cluster
    from allranks.slurm.queue import queue as look_at_queue

    described = look_at_queue(partition) if queue else describe_cluster(partition)
    if as_json:
        print_json(described)
        return
    show = cluster_screen.show_queue if queue else cluster_screen.show_cluster
    show(people_console(), described)


@takes_script
@only_with("ladder", "min_efficiency", "steps")
@never_with("ladder", "race", "layout")
@never_with("race", "layout")
@never_with("dry_run", "wait")
def submit(
    job: JobFile = None,
    overrides: Overrides = None,
    layout: LayoutText = None,
    race: Race = None,
    ladder: Ladder = None,
    min_efficiency: MinEfficiency = 0.85,
    steps: LadderSteps = 200,
    wait: Wait = False,
    dry_run: DryRun = False,
    runs: Runs = Path("runs"),
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    from allranks.launch import backends

    queue = backends.named("slurm")
    options = backends.Options(
        race=race, ladder=ladder, min_efficiency=min_efficiency, ladder_steps=steps
    )
    prepared = queue.check(typed_request(job, overrides, layout=layout, runs=runs), options)
    if dry_run:
        show_draft(queue.draft(prepared, options), as_json=as_json)
        return
    show_submitted(queue.start(prepared, options), as_json=as_json, wait=wait)


def race(
    run: Run,
    layouts: Annotated[
        str, typer.Argument(metavar="LAYOUTS", help="The layouts to add: 2x2, or 2x2,4x1@a40")
    ],
    runs: Runs = Path("runs"),
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    from allranks.launch.backends.slurm import jobs  # no other queue has races
    from allranks.run.folder import find_run

    show_submitted(jobs.race(find_run(runs, run), layouts), as_json=as_json)


@never_with("race", "layout")
@never_with("backend=local", "race", "wait", "hosts")
@never_with("backend=ssh", "race", "wait")
@never_with("backend=slurm", "hosts")
@never_with("hosts", "race", "wait")
@never_with("dry_run", "wait")
def resume(
    run: Run,
    overrides: Overrides = None,
    layout: LayoutText = None,
    race: Race = None,
    backend: To = None,
    hosts: Hosts = None,
    force: Force = False,
    wait: Wait = False,
    dry_run: DryRun = False,
    runs: Runs = Path("runs"),
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """It continues where it last ran, unless you name another place; a live run is moved there."""
    from allranks.cli.train import train
    from allranks.launch import backends
    from allranks.run.folder import find_run

    request = typed_request(None, overrides, layout=layout, resume=run, force=force, runs=runs)
    named = tuple(hosts.split(",")) if hosts else ()
    typed = "slurm" if race else "ssh" if named else None
    place = backends.named(backend or typed or backends.of(find_run(runs, run)))
    options = backends.Options(race=race, hosts=named)
    prepared = place.check(request, options)
    if dry_run:
        show_draft(place.draft(prepared, options), as_json=as_json)
        return
    if place.is_queue:
        show_submitted(place.move(prepared, options), as_json=as_json, wait=wait)
        return
    refuse(["wait"], "with a run on this machine")
    train(place.move, prepared, options, as_json=as_json, debug=debug)


def ls(
    run: Annotated[str | None, typer.Argument(metavar="RUN", help="Only this run.")] = None,
    runs: Runs = Path("runs"),
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    from allranks.launch import backends
    from allranks.launch.screen import show_runs
    from allranks.run import run_state
    from allranks.run.folder import find_run, list_runs

    found = [find_run(runs, run)] if run else list_runs(runs)
    queue = backends.look(found)
    described = [run_state.describe(one, queue) for one in found]
    if as_json:
        print_json(described)
        return
    place = backends.named(backends.of(found[0])) if run else None
    suggestions = place.suggestions(found[0], described[0]) if place else []
    console = people_console()
    aside = console if console.is_terminal else people_console(as_json=True)  # stderr
    show_runs(console, aside, described[::-1], suggestions)  # the newest last: in sight


@never_with("as_json", "raw")
def logs(
    run: Run,
    follow: Annotated[
        bool, typer.Option("-f", "--follow", help="Keep printing until the run has ended.")
    ] = False,
    rank: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=-1, help="Only rank N, or -1 for the output of the job itself."
        ),
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Print every byte as it is, even on a terminal.")
    ] = False,
    runs: Runs = Path("runs"),
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    from allranks.launch.follow import show_logs
    from allranks.run.folder import find_run

    found = find_run(runs, run)
    lines: list[str] = []
    write = lines.append if as_json else partial(print_line, raw=raw, flush=follow)
    exit_code, remarks = show_logs(found, rank, follow=follow, write=write, say=print_remark)
    if as_json:
        print_json({"run": found.name, "lines": lines})
    for remark in remarks:
        print_remark(remark)
    raise typer.Exit(exit_code)


def print_remark(text: str) -> None:
    from allranks.show.text import clean

    print(clean(text), file=sys.stderr)


def print_line(line: str, *, raw: bool, flush: bool) -> None:
    """A line of a log; on a terminal nothing that it would obey, but colours."""
    from allranks.show.text import coloured

    print(coloured(line) if sys.stdout.isatty() and not raw else line, flush=flush)


@never_with("all_", "run")
def stop(
    run: Annotated[
        list[str] | None, typer.Argument(metavar="RUN", help="The runs to stop.")
    ] = None,
    all_: Annotated[
        bool, typer.Option("--all", help="Stop every run that is queued or running.")
    ] = False,
    now: Annotated[bool, typer.Option("--now", help="Stop at once, without a checkpoint.")] = False,
    runs: Runs = Path("runs"),
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    from allranks.errors import AllranksError
    from allranks.launch import backends
    from allranks.run.folder import find_run
    from allranks.show.text import clean

    if not run and not all_:
        raise AllranksError(
            "no run is named", fix="write allranks stop RUN, or allranks stop --all"
        )
    found = backends.active_runs(runs) if all_ else [find_run(runs, name) for name in run or []]
    done = backends.stop(found, now=now)
    if as_json:
        print_json(done)
        return
    for one in done:
        print(clean(f"{one['run']}: {one['done']}"))
    if not done:
        print("no run is queued or running")


def show_submitted(done: Any, *, as_json: bool, wait: bool = False) -> None:
    """What was sent, and where to look; `wait`: also what came of it."""

    for remark in done.remarks:
        print(f"note: {remark}", file=sys.stderr)
    if as_json and not wait:
        jobs = {"run": done.run.name, "run_dir": str(done.run.path), "jobs": done.jobs}
        print_json(jobs)
        return
    if done.jobs and not as_json:
        print(f"run  {done.run.name}")
        print(f"job  {', '.join(done.jobs)}")
        print(f"see  allranks ls {done.run.name}   allranks logs {done.run.name} -f")
    if wait:
        wait_and_tell(done.run, as_json=as_json)


def wait_and_tell(run: RunDir, *, as_json: bool) -> NoReturn:
    """Wait for the end of a run, and exit with its code."""
    import time

    from allranks.launch.follow import exit_code_of, wait_for_result
    from allranks.launch.screen import Screen

    def say(text: str) -> None:
        out = sys.stderr if as_json else sys.stdout
        print(f"{time.strftime('%H:%M:%S')}  {text}", file=out, flush=True)

    try:
        result, error = wait_for_result(run, say)
    except KeyboardInterrupt:
        print(
            f"no longer waiting; run {run.name} continues. To stop it: "
            f"allranks stop {run.reference}; to wait again: allranks logs {run.reference} -f",
            file=sys.stderr,
        )
        raise typer.Exit(STOPPED_AT_ONCE) from None
    code = exit_code_of(run, result["state"])
    if error is not None:
        print_error(error, as_json=as_json, more=result)
    elif as_json:
        print_json(result)
    else:
        Screen(people_console()).summary(result, can_go_on=code == STOPPED_AT_CHECKPOINT)
    raise typer.Exit(code)


def show_draft(drafted: Any, *, as_json: bool) -> None:
    from allranks.launch.screen import show_draft as show_drafted

    for remark in drafted.remarks:
        print(f"note: {remark}", file=sys.stderr)
    if as_json:
        print_json({"table": drafted.table, "scripts": drafted.scripts})
        return
    show_drafted(people_console(), drafted.table)
    for racer, script in drafted.scripts.items():
        if len(drafted.scripts) > 1:
            print(f"# --- {racer} ---")
        print(script, end="")
