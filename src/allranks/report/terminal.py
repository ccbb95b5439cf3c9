"""The report in a terminal: tables that fit its width, then what to take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from allranks.report import tables
from allranks.show.tables import show_table, without_empty
from allranks.show.text import printable

COLOURS = {"good": "green", "baseline": "dim", "below": "yellow", "diminishing": "yellow"}
STATES = {"failed": "red", "running": "green", "stopped": "magenta", "queued": "yellow"}


def show_report(console: Console, report: Mapping[str, Any]) -> None:
    if report["chosen"]:
        console.print(Text(printable(report["chosen"]), style="dim"))
        console.print()
    for section in report["sections"]:
        console.print(Text(tables.title(section), style="bold"), soft_wrap=True)
        console.print(Text("; ".join(tables.subtitle(section)), style="dim"))
        if section["headline"]:
            console.print(Text(printable(section["headline"])))
        for table in tables.tables(section):
            # A column that says nothing anywhere is not worth its width.
            told = without_empty(table)
            if len(told.columns) > 1:
                console.print()
                show_table(console, told, styled=styled)
        console.print()
        show_choices(console, section)
        for note in section["notes"]:
            console.print(Text(f"note: {printable(note)}", style="yellow"), soft_wrap=True)
        console.print()
    for line in tables.price_lines(report):
        console.print(Text(f"price of {line}", style="dim"), soft_wrap=True)
    for note in report["notes"]:
        console.print(Text(f"note: {printable(note)}", style="yellow"), soft_wrap=True)


def show_choices(console: Console, section: Mapping[str, Any]) -> None:
    choices = list(tables.recommendation(section))
    if not choices:
        console.print(Text("nothing to recommend: it takes two layouts that were measured"))
    for name, layout, why in choices:
        line = Text(f"{name}: ") + Text(layout, style="bold") + Text(f"  {why}", style="dim")
        console.print(line, soft_wrap=console.width >= 100)


def styled(cell: str) -> Text:
    style = STATES.get(cell) or COLOURS.get(cell.split()[0] if cell else "", "")
    return Text(cell, style=style)
