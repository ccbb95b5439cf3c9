"""The ways to watch: live in the terminal, in the browser, one look, or line by line.

A SLURM job that allranks did not start is watched through a step on its nodes.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from allranks.errors import AllranksError
from allranks.launch import backends
from allranks.run.events import to_json
from allranks.run.folder import RunDir, find_run, list_runs
from allranks.show.text import clean
from allranks.watch.cells import Mark, plain_line
from allranks.watch.draw import NO_RUNS, Scene, about_run, rank_lines, run_lines
from allranks.watch.live import Watcher
from allranks.watch.notify import Notifier
from allranks.watch.views import RunView


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """How the user wants to watch."""

    console: Console
    marks: Mapping[str, Mark] = field(default_factory=dict)
    web: bool = False
    port: int = 0
    once: bool = False
    ranks: bool = False  # show each run's ranks, with `once` or `as_json`
    interval: float = 10.0  # seconds between looks when lines are printed
    as_json: bool = False


def watch_runs(watcher: Watcher, notifier: Notifier | None, wanted: Wanted) -> None:
    """Watch in the requested way until the user leaves or, without a terminal, all runs end."""
    try:
        if wanted.web:
            serve_page(watcher, notifier, wanted)
        elif wanted.as_json or wanted.once:
            look_once(watcher, wanted)
        elif is_terminal():
            from allranks.watch.run_screen import RunScreen
            from allranks.watch.terminal import show

            show(RunScreen(watcher, wanted.marks, partial(stop_run, watcher), notifier))
        elif not follow(watcher, print_line, notifier, interval=wanted.interval):
            print(NO_RUNS, file=sys.stderr)
    finally:
        if notifier is not None:
            notifier.close()
            for problem in notifier.problems:
                print(f"note: {problem}", file=sys.stderr)
        watcher.close()


def is_terminal() -> bool:
    can_move = os.environ.get("TERM", "") not in ("", "dumb")
    return sys.stdin.isatty() and sys.stdout.isatty() and can_move


def find_watched(runs: Path, words: Sequence[str]) -> tuple[str | None, list[RunDir] | None]:
    """The id of a job that allranks did not start, or the named runs; None and None mean all."""
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
                    f"allranks did not start job {word}, so it can only be watched by itself",
                    fix=f"allranks watch {word}",
                ) from None
            return word, None
    return None, list({run.path: run for run in found}.values())


def stop_run(watcher: Watcher, name: str) -> str:
    """Stop a run by its name, and say what was done."""
    run = watcher.run_dir(name)
    return backends.stop([run])[0]["done"] if run is not None else "is gone"


def look_once(watcher: Watcher, wanted: Wanted) -> None:
    """Print all runs once, as a table or as JSON."""
    watcher.poll(budget=float("inf"))
    if wanted.ranks:
        watcher.poll([run.run for run in watcher.runs()], budget=float("inf"))
    if wanted.as_json or wanted.ranks:
        watcher.judge_all()
    if wanted.as_json:
        described = [run.as_json() for run in watcher.runs()]
        for run in described if wanted.ranks else ():
            run["ranks"] = [asdict(rank) for rank in watcher.ranks(run["run"])]
        print(to_json(described))
        return
    print_lines(wanted.console, run_tables(watcher, wanted))


def run_tables(watcher: Watcher, wanted: Wanted) -> list[Text]:
    """The table of runs, followed by a table of each run's ranks if those are wanted."""
    runs, now, width = watcher.runs(), time.time(), wanted.console.width
    if not runs:
        return [Text(NO_RUNS)]
    lines = run_lines(Scene(runs=runs, now=now), width, len(runs))
    for run in runs if wanted.ranks else ():
        ranks, parts = watcher.ranks(run.run), watcher.parts(run.run)
        scene = Scene(runs=runs, ranks=ranks, parts=parts, now=now, marks=wanted.marks)
        lines += [Text(), *about_run(run, scene, width)]
        lines += rank_lines(scene, width, len(ranks) + 1)
    return lines


def print_lines(console: Console, lines: Sequence[Text]) -> None:
    for line in lines:
        line.rstrip()
        console.print(line, soft_wrap=True)


def print_line(line: str) -> None:
    print(clean(line), flush=True)


def follow(
    watcher: Watcher,
    write: Callable[[str], None],
    notifier: Notifier | None,
    *,
    interval: float = 10.0,
    sleep: Callable[[float], None] = time.sleep,
    now: Callable[[], float] = time.time,
) -> Sequence[RunView]:
    """Write a line whenever a run changes, until no run is queued or running."""
    written: dict[str, str] = {}
    while True:
        watcher.poll(budget=float("inf"))
        runs = watcher.runs()
        if notifier is not None:
            notifier.look(runs)
        moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now()))
        for run in runs:
            line = plain_line(run, now())
            if written.get(run.run) != line:
                written[run.run] = line
                write(f"{moment}  {line}")
        if not any(run.is_active for run in runs):
            return runs
        sleep(interval)


def serve_page(watcher: Watcher, notifier: Notifier | None, wanted: Wanted) -> None:
    """Serve the page until Ctrl-C; prints its address once it can be opened."""
    from allranks.watch.server import Served, serve

    def announce(served: Served) -> None:
        words = to_json(asdict(served)) if wanted.as_json else "\n".join(served.lines())
        print(words, flush=True)

    serve(
        watcher,
        marks=wanted.marks,
        stop=partial(stop_run, watcher),
        notify=notifier.look if notifier else None,
        port=wanted.port,
        announce=announce,
        diagnose=patient_doctor(),
    )


def patient_doctor() -> Callable[[RunDir], list[dict[str, Any]]]:
    """A doctor that can be asked again and again, since a page may be left open for days.

    It reads each part of a log once, and does not signal ranks for their stacks.
    """
    from allranks.doctor.diagnose import diagnosis_of
    from allranks.doctor.finding import as_json
    from allranks.doctor.log_search import GrowingLogs

    logs = GrowingLogs()
    return lambda run: as_json(diagnosis_of(run, scan=logs.scan, takes_stacks=False))


def watch_job(job: str, wanted: Wanted, *, stacks: bool) -> None:
    """Watch a SLURM job that allranks did not start."""
    from allranks.watch import job_screen
    from allranks.watch.terminal import show

    facts = job_screen.find_job(job)
    if is_terminal() and not (wanted.once or stacks or wanted.as_json):
        show(job_screen.JobScreen(facts, wanted.marks))
        return
    samples = job_screen.collect(facts, "stacks" if stacks else "samples")
    if wanted.as_json:
        print(to_json({"job": job, "name": facts.name, "nodes": samples}))
    elif stacks:
        print("\n".join(job_screen.stack_lines(samples)))
    else:
        width = wanted.console.width
        print_lines(wanted.console, job_screen.job_lines(facts, samples, wanted.marks, width))
