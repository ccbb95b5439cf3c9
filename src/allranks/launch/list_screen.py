"""Tables of runs, and of what would be sent, for people."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

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
    """One line a run, its reason below it."""
    if not runs:
        console.print("no runs here: allranks run job.yaml starts one")
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("run", "state", "layout", "job", "step", "left"):
        table.add_column(name, overflow="fold")
    for run in runs:
        table.add_row(
            run["run"],
            Text(run["state"], style=COLOURS[run["state"]]),
            Text(run["layout"] or ""),
            (",".join(run["jobs"]) if run["state"] == "queued" else run["job"]) or "-",
            progress(run),
            left(run),
        )
    console.print(table)
    for run in runs:
        if run["reason"]:
            name = f"{run['run']}: " if len(runs) > 1 else ""
            console.print(Text(f"{name}{run['reason']}"), soft_wrap=True)
    for line in suggestions:
        console.print(Text(line, style="yellow"), soft_wrap=True)


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
