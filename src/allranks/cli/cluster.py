"""The commands for clusters: cluster, submit, race, resume, ls, logs, stop."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer

from allranks.cli.options import (
    AsJson,
    Debug,
    Force,
    JobFile,
    LayoutText,
    Overrides,
    Runs,
    people_console,
    typed_request,
)

if TYPE_CHECKING:
    from allranks.launch.backends.slurm.ladder import Ladder
    from allranks.launch.backends.slurm.sbatch import Racer
    from allranks.run.folder import RunDir

Race = Annotated[
    str | None,
    typer.Option(metavar="LAYOUTS", help="Layouts, such as 1x4,4x1@a40: the first to start wins."),
]
Wait = Annotated[
    bool, typer.Option("--wait", help="Wait until the run has ended; exit with its code.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what would be sent.")]
To = Annotated[
    Literal["local", "slurm"] | None,
    typer.Option("--backend", help="Where to go on; else where it was last."),
]
Run = Annotated[str, typer.Argument(metavar="RUN", help="A run's name, its beginning, or last.")]


def cluster(
    partition: Annotated[
        str | None, typer.Argument(metavar="PARTITION", help="Only this one.")
    ] = None,
    queue: Annotated[bool, typer.Option("--queue", help="Who is waiting, and where I stand.")] = (
        False
    ),
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    from allranks.run.events import to_json
    from allranks.slurm import screen as cluster_screen
    from allranks.slurm.cluster import describe_cluster
    from allranks.slurm.queue import queue as look_at_queue

    described = look_at_queue(partition) if queue else describe_cluster(partition)
    if as_json:
        print(to_json(described))
        return
    show = cluster_screen.show_queue if queue else cluster_screen.show_cluster
    show(people_console(False), described)


def submit(
    job: JobFile = None,
    overrides: Overrides = None,
    layout: LayoutText = None,
    race: Race = None,
    ladder: Annotated[
        str | None,
        typer.Option(metavar="LAYOUTS", help="Climb these while it pays, e.g. 1x1,1x2,2x2."),
    ] = None,
    min_efficiency: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Of --ladder: what a layout must reach.")
    ] = 0.85,
    steps: Annotated[int, typer.Option(min=1, help="Of --ladder: steps to measure.")] = 200,
    wait: Wait = False,
    dry_run: DryRun = False,
    runs: Runs = Path("runs"),
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    from allranks.launch.backends.slurm import submit as sending
    from allranks.launch.backends.slurm.sbatch import racers_of
    from allranks.launch.prepare import prepare

    climb = read_ladder(ladder, race, layout, min_efficiency=min_efficiency, steps=steps)
    rivals, first = read_layouts(climb.rung if climb else race, layout)
    prepared = prepare(typed_request(job, overrides, layout=first, runs=runs))
    racers = racers_of(prepared.job, rivals)
    if dry_run:
        show_draft(sending.draft(prepared, racers), as_json=as_json)
        return
    show_submitted(sending.submit(prepared, racers, climb), as_json=as_json, wait=wait)


def read_ladder(
    ladder: str | None, race: str | None, layout: str | None, **options: Any
) -> Ladder | None:
    """The layouts to climb, if any."""
    from allranks.errors import AllranksError
    from allranks.launch.backends.slurm import ladder as ladders
    from allranks.launch.backends.slurm.sbatch import parse_race

    if ladder is None:
        return None
    if race is not None or layout is not None:
        raise AllranksError(
            "--ladder is given with --race or --layout", fix=f"write --ladder {ladder} alone"
        )
    return ladders.of(parse_race(ladder), **options)


def read_layouts(race: str | None, layout: str | None) -> tuple[list[Racer], str | None]:
    """The racers, and the layout to check the job with: the first of them, or the typed one."""
    from allranks.errors import AllranksError
    from allranks.launch.backends.slurm.sbatch import parse_race

    if race is None:
        return [], layout
    if layout is not None:
        raise AllranksError(
            f"--race {race} and --layout {layout} are both given",
            fix=f"write --race {layout},{race}, or one of the two",
        )
    racers = parse_race(race)
    return racers, str(racers[0].layout)


def race(
    run: Run,
    layouts: Annotated[str, typer.Argument(metavar="LAYOUTS", help="e.g. 2x2 or 2x2,4x1@a40")],
    runs: Runs = Path("runs"),
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    from allranks.launch.backends.slurm import jobs
    from allranks.launch.backends.slurm.sbatch import parse_race
    from allranks.run.folder import find_run

    show_submitted(jobs.race(find_run(runs, run), parse_race(layouts)), as_json=as_json)


def resume(
    run: Run,
    overrides: Overrides = None,
    layout: LayoutText = None,
    race: Race = None,
    backend: To = None,
    force: Force = False,
    wait: Wait = False,
    dry_run: DryRun = False,
    runs: Runs = Path("runs"),
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    from allranks.cli.train import train
    from allranks.launch import backends
    from allranks.launch.backends import Options
    from allranks.run.folder import find_run

    _, first = read_layouts(race, layout)
    request = typed_request(None, overrides, layout=first, resume=run, force=force, runs=runs)
    name = backend or ("slurm" if race else backends.of(find_run(runs, run)))
    place, options = backends.named(name), Options(race=race)
    prepared = place.check(request, options)
    if dry_run:
        show_draft(place.draft(prepared, options), as_json=as_json)
        return
    if place.is_queue:
        show_submitted(place.move(prepared, options), as_json=as_json, wait=wait)
        return
    train(place.move, prepared, options, as_json=as_json, debug=debug)


def list_(
    run: Annotated[str | None, typer.Argument(metavar="RUN", help="Only this one.")] = None,
    runs: Runs = Path("runs"),
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    from allranks.launch import backends
    from allranks.launch.list_screen import show_runs
    from allranks.run import run_state
    from allranks.run.events import to_json
    from allranks.run.folder import find_run, list_runs

    found = [find_run(runs, run)] if run else list_runs(runs)
    queue = backends.look(found)
    described = [run_state.describe(one, queue) for one in found]
    if as_json:
        print(to_json(described))
        return
    from allranks.launch.backends.slurm.submit import suggest_racers

    suggestions = suggest_racers(found[0], described[0]) if run else []
    show_runs(people_console(False), described, suggestions)


def logs(
    run: Run,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on until it ends.")] = False,
    rank: Annotated[
        int | None, typer.Option(min=-1, help="Only this rank; -1: what the job itself says.")
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Print every byte unchanged, even on a terminal.")
    ] = False,
    runs: Runs = Path("runs"),
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    from allranks.launch import backends
    from allranks.launch.logs import show
    from allranks.launch.waiting import EXIT_CODES, in_words
    from allranks.run import run_state
    from allranks.run.events import to_json
    from allranks.run.failures import failure, failure_in_words
    from allranks.run.folder import find_run
    from allranks.show.text import clean

    found = find_run(runs, run)
    lines: list[str] = []

    told: list[str] = []
    now: dict[str, Any] = {"state": "running"}

    def has_ended() -> bool:
        now.update(run_state.describe(found, backends.look([found])))
        waits = clean(f"{found.name} waits: {now['reason'] or 'not started yet'}")
        if now["state"] == "queued" and told[-1:] != [waits]:
            told.append(waits)
            print(waits, file=sys.stderr)
        return now["state"] not in ("queued", "running")

    is_interrupted = False
    try:
        show(
            found,
            rank,
            follow=follow,
            write=lines.append if as_json else partial(print_line, raw=raw, flush=follow),
            has_ended=has_ended,
        )
    except KeyboardInterrupt:
        is_interrupted = True
    failed = None if is_interrupted or found.is_live() else failure(found)
    if as_json:
        print(to_json({"run": found.name, "lines": lines}))
    elif failed is not None:
        print(clean(failure_in_words(failed)), file=sys.stderr)
    if is_interrupted:
        raise typer.Exit(130)
    if follow:
        if now["state"] != "finished":
            print(clean(f"{found.name} {in_words(now)}"), file=sys.stderr)
        raise typer.Exit(EXIT_CODES[now["state"]])


def print_line(line: str, *, raw: bool, flush: bool) -> None:
    """A line of a log; on a terminal nothing that it would obey, but colours."""
    from allranks.show.text import coloured

    print(coloured(line) if sys.stdout.isatty() and not raw else line, flush=flush)


def stop(
    run: Annotated[list[str] | None, typer.Argument(metavar="RUN...")] = None,
    all_: Annotated[bool, typer.Option("--all", help="Every run that waits or runs.")] = False,
    now: Annotated[bool, typer.Option("--now", help="At once, without a checkpoint.")] = False,
    runs: Runs = Path("runs"),
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    from allranks.errors import AllranksError
    from allranks.launch import backends
    from allranks.run import run_state
    from allranks.run.events import to_json
    from allranks.run.folder import find_run, list_runs
    from allranks.show.text import clean

    if bool(run) == all_:
        raise AllranksError(
            "both runs and --all are given" if all_ else "no run is named",
            fix="write allranks stop RUN, or allranks stop --all",
        )
    found = [find_run(runs, name) for name in run or []]
    if all_:
        known = list_runs(runs)
        queue = backends.look(known)
        active = ("queued", "running")
        found = [one for one in known if run_state.describe(one, queue)["state"] in active]
    done = backends.stop(found, now=now)
    if as_json:
        print(to_json(done))
        return
    for one in done:
        print(clean(f"{one['run']}: {one['done']}"))
    if not done:
        print("no run waits or runs")


def show_submitted(done: Any, *, as_json: bool, wait: bool = False) -> None:
    """What was sent, and where to look; `wait`: also what came of it."""
    from allranks.run.events import to_json

    for remark in done.remarks:
        print(f"note: {remark}", file=sys.stderr)
    if as_json and not wait:
        jobs = {"run": done.run.name, "run_dir": str(done.run.path), "jobs": done.jobs}
        print(to_json(jobs))
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

    from allranks.launch.screen import Screen
    from allranks.launch.waiting import EXIT_CODES, wait_for_end, why_failed
    from allranks.run.events import to_json
    from allranks.timing.steps import result

    def say(text: str) -> None:
        print(f"{time.strftime('%H:%M:%S')}  {text}", file=sys.stderr if as_json else None)
        (sys.stderr if as_json else sys.stdout).flush()

    try:
        now = wait_for_end(run, say)
    except KeyboardInterrupt:
        print(
            f"no longer waiting; run {run.name} goes on. To stop it: "
            f"allranks stop {run.reference}; to wait again: allranks logs {run.reference} -f",
            file=sys.stderr,
        )
        raise typer.Exit(130) from None
    found = {**result(run, now["state"]), "jobs": run.info().get("jobs", [])}
    found["reason"] = now["reason"]
    if now["state"] == "failed":
        error = why_failed(run, now)
        found["error"] = {"what": error.what, "fix": error.fix}
        print(f"error: {error.what}\n  fix: {error.fix}", file=sys.stderr)
    elif not as_json:
        Screen(people_console(False)).summary(found)
    if as_json:
        print(to_json(found))
    raise typer.Exit(EXIT_CODES[now["state"]])


def show_draft(drafted: Any, *, as_json: bool) -> None:
    from allranks.launch.list_screen import show_table
    from allranks.run.events import to_json

    if as_json:
        print(to_json({"table": drafted.table, "scripts": drafted.scripts}))
        return
    show_table(people_console(False), drafted.table)
    for racer, script in drafted.scripts.items():
        if len(drafted.scripts) > 1:
            print(f"# --- {racer} ---")
        print(script, end="")
