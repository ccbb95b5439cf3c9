"""Runs as plain lines: for a pipe, a log, and who wants to look once."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from rich.text import Text

from allranks.watch.draw import NO_RUNS, Scene, about_run, rank_lines, run_lines
from allranks.watch.live import Watcher
from allranks.watch.marks import Mark
from allranks.watch.notify import Notifier
from allranks.watch.table_cells import reason, run_cells, state_word
from allranks.watch.views import RunView

PLAIN_SECONDS = 10.0
NAMED = {"epoch": "epoch", "step": "step", "loss": "loss"}


def plain_line(run: RunView, now: float) -> str:
    """One run in one line, each number with its name."""
    cells = {key: cell.plain for key, cell in run_cells(run, now).items()}
    said = [run.run, state_word(run), cells["layout"]]
    said += [f"{name} {cells[key]}" for key, name in NAMED.items() if cells[key]]
    if cells["pace"]:
        said.append(f"{cells['pace']} samples/s")
    if cells["efficiency"]:
        said.append(f"{cells['efficiency']} efficiency")
    if cells["left"]:
        said.append(f"{cells['left']} left")
    if cells["hours"]:
        said.append(f"{cells['hours']} {'GPU' if run.is_gpu else 'rank'}-hours")
    if why := reason(run, now):
        said.append(f"({why})")
    return "  ".join(said)


def snapshot(
    watcher: Watcher, marks: Mapping[str, Mark], width: int, now: float, *, ranks: bool
) -> list[Text]:
    """One look: the table of runs, and of each its ranks if that is asked for."""
    runs = watcher.runs()
    if not runs:
        return [Text(NO_RUNS)]
    lines = run_lines(Scene(runs=runs, now=now), width, len(runs))
    for run in runs if ranks else ():
        scene = Scene(
            runs=runs,
            ranks=watcher.ranks(run.run),
            parts=watcher.parts(run.run),
            now=now,
            marks=marks,
        )
        lines += [Text(), *about_run(run, scene, width)]
        lines += rank_lines(scene, width, len(scene.ranks) + 1)
    return lines


def follow(
    watcher: Watcher,
    write: Callable[[str], None],
    notifier: Notifier | None,
    *,
    interval: float = PLAIN_SECONDS,
    sleep: Callable[[float], None] = time.sleep,
    now: Callable[[], float] = time.time,
) -> Sequence[RunView]:
    """A line for each run that has changed, until none waits or runs any more."""
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
