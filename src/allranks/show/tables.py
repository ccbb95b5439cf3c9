"""Tables in terminals of any width: columns that do not fit stand below, and none is left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

PADDING = 2  # between columns
NOTHING = "–"  # noqa: RUF001  # a dash in a table


@dataclass(frozen=True, slots=True)
class Table:
    """The first column is text, as are those in `texts`; the others are numbers."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    texts: tuple[str, ...] = ()


def without_empty(table: Table) -> Table:
    """The same without columns that say nothing in any row."""
    kept = [i for i in range(len(table.columns)) if any(row[i] != NOTHING for row in table.rows)]
    return Table(
        table.title,
        tuple(table.columns[i] for i in kept),
        tuple(tuple(row[i] for i in kept) for row in table.rows),
        table.texts,
    )


def show_table(
    console: Console,
    table: Table,
    *,
    styled: Callable[[str], Text] = Text,
) -> None:
    """In bands of columns where it is wider than the terminal, each with the first column."""
    console.print(Text(table.title, style="bold"))
    for band in bands(table, console.width):
        console.print(draw(table, band, styled))


def bands(table: Table, width: int) -> Iterator[list[int]]:
    """The columns of each band, by their numbers."""

    def taken(column: int) -> int:
        cells = (table.columns[column], *(row[column] for row in table.rows))
        return max(map(cell_len, cells)) + PADDING

    first, *rest = range(len(table.columns))
    band = [first]
    for column in rest:
        if len(band) > 1 and sum(map(taken, [*band, column])) - PADDING > width:
            yield band
            band = [first]
        band.append(column)
    yield band


def draw(table: Table, columns: Sequence[int], styled: Callable[[str], Text] = Text) -> RichTable:
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
