"""The ways to watch runs: in the terminal, in the browser, once, or line by line.

A job that allranks did not start is watched through a step on its nodes.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from allranks.errors import AllranksError
from allranks.run.events import to_json
from allranks.run.folder import RunDir, find_run, list_runs
from allranks.show.text import clean
from allranks.watch.live import Watcher
from allranks.watch.marks import Mark
from allranks.watch.notify import Notifier

LEAST_WIDTH = 20  # characters: nobody means less


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """How somebody wants to watch."""

    console: Console
    marks: Mapping[str, Mark] = field(default_factory=dict)
    web: bool = False
    port: int = 0
    once: bool = False
    ranks: bool = False  # of each run, where it is looked at once
    interval: float = 10.0  # seconds between looks, where lines are printed
    as_json: bool = False


def watch_runs(watcher: Watcher, notifier: Notifier | None, wanted: Wanted) -> None:
    """Watch in the way that is wanted, until that ends."""
    try:
        if wanted.web:
            serve_page(watcher, notifier, wanted)
        elif wanted.as_json or wanted.once:
            look_once(watcher, wanted)
        elif is_terminal():
            from allranks.watch.screen import show
            from allranks.watch.terminal import View

            show(View(watcher, wanted.marks, partial(stop_run, watcher), notifier))
        else:
            follow_in_lines(watcher, notifier, wanted.interval)
    finally:
        if notifier is not None:
            notifier.close()
        watcher.close()


def is_terminal() -> bool:
    can_move = os.environ.get("TERM", "") not in ("", "dumb")
    return sys.stdin.isatty() and sys.stdout.isatty() and can_move


def find_watched(runs: Path, words: Sequence[str]) -> tuple[str | None, list[RunDir] | None]:
    """A job that allranks did not start, or the runs that are named; None and None: all."""
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
                    f"{word} is a job that allranks did not start, and must be watched alone",
                    fix=f"allranks watch {word}",
                ) from None
            return word, None
    return None, list({run.path: run for run in found}.values())


def stop_run(watcher: Watcher, name: str) -> str:
    """Stop a run by its name, and say what was done."""
    from allranks.launch import backends

    run = watcher.run_dir(name)
    return backends.stop([run])[0]["done"] if run is not None else "is gone"


def look_once(watcher: Watcher, wanted: Wanted) -> None:
    """Print what there is to see, for people or as JSON."""
    from allranks.watch.plain_lines import snapshot

    watcher.poll(budget=float("inf"))
    if wanted.ranks:
        watcher.poll([run.run for run in watcher.runs()], budget=float("inf"))
    if wanted.as_json:
        described = []
        for run in watcher.runs():
            ranks = [rank.as_json() for rank in watcher.ranks(run.run)] if wanted.ranks else []
            described.append(run.as_json() | ({"ranks": ranks} if wanted.ranks else {}))
        print(to_json(described))
        return
    width = width_of(wanted.console)
    for line in snapshot(watcher, wanted.marks, width, time.time(), ranks=wanted.ranks):
        line.rstrip()
        wanted.console.print(line, soft_wrap=True)


def width_of(console: Console) -> int:
    """Of the terminal, or as COLUMNS says; a file has room."""
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns) >= LEAST_WIDTH:
        return int(columns)
    return console.width if console.is_terminal else 160


def follow_in_lines(watcher: Watcher, notifier: Notifier | None, interval: float) -> None:
    """Print a line for each run that changes, until none waits or runs."""
    from allranks.watch.draw import NO_RUNS
    from allranks.watch.plain_lines import follow

    def write(line: str) -> None:
        print(clean(line), flush=True)

    if not follow(watcher, write, notifier, interval=interval):
        print(NO_RUNS, file=sys.stderr)
    print_problems(notifier)


def serve_page(watcher: Watcher, notifier: Notifier | None, wanted: Wanted) -> None:
    """Serve the page until Ctrl-C; its address is printed once it can be opened."""
    from allranks.doctor.diagnose import diagnosis_of
    from allranks.doctor.finding import as_json
    from allranks.watch.server import Served, serve

    def diagnose(run: RunDir) -> list[dict[str, Any]]:
        return as_json(diagnosis_of(run))

    def announce(served: Served) -> None:
        words = to_json(served.as_json()) if wanted.as_json else "\n".join(served.lines())
        print(words, flush=True)

    serve(
        watcher,
        marks=wanted.marks,
        stop=partial(stop_run, watcher),
        notify=notifier.look if notifier else None,
        port=wanted.port,
        announce=announce,
        diagnose=diagnose,
    )
    print_problems(notifier)


def print_problems(notifier: Notifier | None) -> None:
    for problem in notifier.problems if notifier else []:
        print(f"note: {problem}", file=sys.stderr)


def watch_job(job: str, wanted: Wanted, *, stacks: bool) -> None:
    """Watch a job that allranks did not start."""
    from allranks.watch import jobs
    from allranks.watch.job_screen import JobView, job_lines
    from allranks.watch.screen import show

    facts = jobs.find_job(job)
    if is_terminal() and not (wanted.once or stacks or wanted.as_json):
        show(JobView(facts, wanted.marks))
        return
    samples = jobs.collect(facts, "stacks" if stacks else "samples")
    if wanted.as_json:
        print(to_json({"job": job, "name": facts.name, "nodes": samples}))
    elif stacks:
        print("\n".join(jobs.stack_lines(samples)))
    else:
        for line in job_lines(facts, samples, wanted.marks, width_of(wanted.console)):
            line.rstrip()
            wanted.console.print(line, soft_wrap=True)
