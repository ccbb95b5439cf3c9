"""Tables of runs, and of what would be sent, for people."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from allranks.show.text import clean

COLUMNS = ("run", "state", "layout", "job", "step", "left")
NAMED = ("job", "step", "left")  # cells that need their column's name to be understood
COLOURS = {
    "running": "green",
    "finished": "blue",
    "queued": "yellow",
    "failed": "red",
    "stopped": "magenta",
}


def show_runs(
    console: Console, runs: Sequence[Mapping[str, Any]], suggestions: Sequence[str]
) -> None:
    """One line a run, two where that is too wide; the reasons below."""
    if not runs:
        console.print("no runs here: allranks run job.yaml starts one, allranks submit queues one")
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in COLUMNS:
        table.add_column(name, overflow="fold")
    for run in runs:
        table.add_row(Text(clean(run["run"])), *cells(run))
    if console.measure(table, options=console.options.update(width=10_000)).maximum > console.width:
        for run in runs:
            named = zip(COLUMNS[1:], cells(run), strict=True)
            words = [Text(f"{n} ") + c if n in NAMED else c for n, c in named if c.plain != "-"]
            console.print(Text(clean(run["run"]), style="bold"), soft_wrap=True)
            console.print(Text("  ") + Text("  ").join(words), soft_wrap=True)
    else:
        console.print(table)
    for run in runs:
        name = f"{run['run']}: " if len(runs) > 1 else ""
        if run["reason"]:
            console.print(Text(clean(f"{name}{run['reason']}")), soft_wrap=True)
        if run["problem"]:
            console.print(Text(clean(f"{name}{run['problem']}"), style="yellow"), soft_wrap=True)
    for line in suggestions:
        console.print(Text(line, style="yellow"), soft_wrap=True)


def cells(run: Mapping[str, Any]) -> list[Text]:
    """What the columns after the name say."""
    job = ",".join(run["jobs"]) if run["state"] == "queued" else run["job"]
    state = Text(run["state"], style=COLOURS[run["state"]])
    said = (run["layout"], job, progress(run), left(run))
    return [state, *(Text(clean(text or "-")) for text in said)]


def progress(run: Mapping[str, Any]) -> str:
    if run["step"] is None:
        return "-"
    if not run["steps"]:
        return str(run["step"])
    return f"{run['step']}/{run['steps']}"


def left(run: Mapping[str, Any]) -> str:
    if run["state"] == "queued" and run["expected_start"]:
        day, _, clock = run["expected_start"].partition("T")
        day = "" if day == time.strftime("%Y-%m-%d") else day[5:] + " "
        return f"starts {day}{clock[:5]}"
    if run["seconds_left"] is None:
        return "-"
    minutes, seconds = divmod(round(run["seconds_left"]), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"


def show_table(console: Console, columns: Mapping[str, Mapping[str, Any]]) -> None:
    """What each layout asks for, one column each."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("layout")
    for racer in columns:
        table.add_column(Text(racer), overflow="fold")
    for name in next(iter(columns.values()), {}):
        table.add_row(name, *(str(column[name]) for column in columns.values()))
    console.print(table)
    console.print()
