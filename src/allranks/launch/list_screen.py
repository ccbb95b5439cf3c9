"""The tables of `allranks ls` and of `--dry-run`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from allranks.show import tables
from allranks.show.numbers import NOTHING, duration, moment, progress
from allranks.show.tables import STATE_STYLES, Table
from allranks.show.text import clean

COLUMNS = ("run", "state", "layout", "job", "step", "left")


def show_runs(
    console: Console, runs: Sequence[Mapping[str, Any]], suggestions: Sequence[str]
) -> None:
    """One line per run, more if that is too wide; the reasons below."""
    if not runs:
        console.print("no runs here: allranks run job.yaml starts one, allranks submit queues one")
        return
    rows = [[Text(clean(run["run"])), *cells(run)] for run in runs]
    tables.show_table(console, Table("", COLUMNS, rows, texts=COLUMNS))
    for run in runs:
        name = f"{run['run']}: " if len(runs) > 1 else ""
        if run["reason"]:
            console.print(Text(clean(f"{name}{run['reason']}")), soft_wrap=True)
        if run["problem"]:
            console.print(Text(clean(f"{name}{run['problem']}"), style="yellow"), soft_wrap=True)
    for line in suggestions:
        console.print(Text(line, style="yellow"), soft_wrap=True)


def cells(run: Mapping[str, Any]) -> list[Text]:
    """The cells of a run after its name."""
    job = ",".join(run["jobs"]) if run["state"] == "queued" else run["job"]
    state = Text(run["state"], style=STATE_STYLES[run["state"]])
    said = (run["layout"], job, progress(run["step"], run["steps"]), left(run))
    return [state, *(Text(clean(text or NOTHING)) for text in said)]


def left(run: Mapping[str, Any]) -> str:
    if run["state"] == "queued" and run["expected_start"]:
        return f"starts {moment(run['expected_start'])}"
    return duration(run["seconds_left"], whole=True)


def show_table(console: Console, columns: Mapping[str, Mapping[str, Any]]) -> None:
    """What each layout asks for, one column per layout."""
    names = next(iter(columns.values()), {})
    rows = [(name, *(str(column[name]) for column in columns.values())) for name in names]
    tables.show_table(console, Table("", ("layout", *columns), rows, texts=tuple(columns)))
    console.print()
