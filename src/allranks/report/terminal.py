"""The report in a terminal: tables that fit its width, then what to take."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from allranks.report import tables
from allranks.report.words import NOTHING, printable, show

PADDING = 2  # between columns
COLOURS = {"good": "green", "baseline": "dim", "below": "yellow", "diminishing": "yellow"}
STATES = {"failed": "red", "running": "green", "stopped": "magenta", "queued": "yellow"}


def show_report(console: Console, report: Mapping[str, Any]) -> None:
    for section in report["sections"]:
        console.print(Text(tables.title(section), style="bold"), soft_wrap=True)
        console.print(Text(tables.subtitle(section), style="dim"))
        if section["headline"]:
            console.print(Text(printable(section["headline"])))
        for table in tables.tables(section):
            console.print()
            show_table(console, table)
        console.print()
        show_choices(console, section)
        for note in section["notes"]:
            console.print(Text(f"note: {printable(note)}", style="yellow"), soft_wrap=True)
        console.print()
    for price in report["prices"]:
        read = f", read {price['date']}" if price["date"] else ""
        dollars = show("dollars", price["usd_per_hour"])
        text = f"price of {price['device']}: {dollars} an hour ({price['source']}{read})"
        console.print(Text(printable(text), style="dim"), soft_wrap=True)
    for note in report["notes"]:
        console.print(Text(f"note: {printable(note)}", style="yellow"), soft_wrap=True)


def show_choices(console: Console, section: Mapping[str, Any]) -> None:
    choices = list(tables.recommendation(section))
    if not choices:
        console.print(Text("nothing to recommend: it takes two layouts that were measured"))
    for name, layout, why in choices:
        line = Text(f"{name}: ") + Text(layout, style="bold") + Text(f"  {why}", style="dim")
        console.print(line, soft_wrap=console.width >= 100)


def show_table(console: Console, table: tables.Table) -> None:
    """In bands of columns where it is wider than the terminal, each with the first column."""
    # A column that says nothing anywhere is not worth its width.
    kept = [i for i in range(len(table.columns)) if any(row[i] != NOTHING for row in table.rows)]
    console.print(Text(table.title, style="bold"))
    for band in bands(table, kept, console.width):
        console.print(draw(table, band))


def bands(table: tables.Table, columns: Sequence[int], width: int) -> Iterator[list[int]]:
    def taken(column: int) -> int:
        cells = (table.columns[column], *(row[column] for row in table.rows))
        return max(map(cell_len, cells)) + PADDING

    first, *rest = columns
    band = [first]
    for column in rest:
        if len(band) > 1 and sum(map(taken, [*band, column])) - PADDING > width:
            yield band
            band = [first]
        band.append(column)
    yield band


def draw(table: tables.Table, columns: Sequence[int]) -> RichTable:
    drawn = RichTable(
        box=None, pad_edge=False, padding=(0, PADDING, 0, 0), header_style="dim", expand=False
    )
    for i in columns:
        is_text = i == 0 or table.columns[i] in table.texts
        justify: Literal["left", "right"] = "left" if is_text else "right"
        drawn.add_column(Text(table.columns[i]), justify=justify, overflow="fold")
    for row in table.rows:
        drawn.add_row(*(styled(row[i]) for i in columns))
    return drawn


def styled(cell: str) -> Text:
    style = STATES.get(cell) or COLOURS.get(cell.split()[0] if cell else "", "")
    return Text(cell, style=style)
