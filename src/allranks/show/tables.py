"""One table for every screen: in a terminal of any width, in Markdown, and as cells for a page.

A table that is too wide for its terminal is folded: texts wrap between words, then columns that do
not fit move below, and no column is left out. A live screen has no room below: there, columns that
do not fit are dropped, the least important first (`fit` and `join`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from allranks.show.numbers import NOTHING
from allranks.show.text import in_markdown

PADDING = 2  # between columns
LEAST_TEXT = 24  # cells: a narrower column of text is hard to read
GAP = 1  # between the columns of a live screen
EMPTY = Text()
# The colour of a run's state, on every screen.
STATE_STYLES = {
    "running": "green",
    "finished": "blue",
    "queued": "yellow",
    "failed": "red",
    "stopped": "magenta",
    "stalled": "bold red",
}

Cell = str | Text


@dataclass(frozen=True, slots=True)
class Table:
    """The first column is text, as are those in `texts`; the others are numbers.

    A cell may have several lines. A title of `""` is not shown; `has_head`: the columns' names are.
    """

    title: str
    columns: tuple[str, ...]
    rows: Sequence[Sequence[Cell]]
    texts: tuple[str, ...] = ()
    has_head: bool = True

    def is_text(self, column: int) -> bool:
        return column == 0 or self.columns[column] in self.texts


def facts(rows: Sequence[tuple[str, Cell]]) -> Table:
    """A table of names and facts, without a head."""
    return Table("", ("name", "fact"), rows, texts=("fact",), has_head=False)


def without_empty(table: Table) -> Table:
    """The table without columns that are empty in every row."""
    kept = [i for i in range(len(table.columns)) if any(str(r[i]) != NOTHING for r in table.rows)]
    columns = tuple(table.columns[i] for i in kept)
    return replace(table, columns=columns, rows=[[row[i] for i in kept] for row in table.rows])


def as_cells(table: Table) -> dict[str, Any]:
    """The table for a page, which only has to draw it."""
    return {
        "title": table.title,
        "columns": list(table.columns),
        "texts": [table.is_text(i) for i in range(len(table.columns))],
        "rows": [[str(cell) for cell in row] for row in table.rows],
    }


def markdown(table: Table, heading: str = "###") -> list[str]:
    """The table's lines in Markdown, ending with an empty one."""
    left = [table.is_text(i) for i in range(len(table.columns))]
    return [
        *([f"{heading} {in_markdown(table.title)}", ""] if table.title else []),
        _markdown_row(table.columns),
        "|" + "|".join("---" if is_left else "---:" for is_left in left) + "|",
        *(_markdown_row([str(cell) or NOTHING for cell in row]) for row in table.rows),
        "",
    ]


def _markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(in_markdown(cell.replace("\n", "; ")) for cell in cells) + " |"


def aligned(table: Table) -> list[str]:
    """The header and the rows, one line each however wide, for other programs to read."""
    widths = [_width(table, i) for i in range(len(table.columns))]
    rows = [table.columns, *table.rows]
    return [
        (" " * PADDING)
        .join(
            str(cell) + " " * (width - cell_len(str(cell)))
            for cell, width in zip(row, widths, strict=True)
        )
        .rstrip()
        for row in rows
    ]


def show_table(console: Console, table: Table, *, styled: Callable[[str], Text] = Text) -> None:
    """Print it, folded where it is wider than the terminal; `styled` colours cells of plain text.

    Columns that do not fit move below, beside the first column again. If the first one takes most
    of the width, each row becomes a paragraph: its first cell, and the others below it.
    """
    if table.title:
        console.print(Text(table.title, style="bold"))
    found = column_groups(table, console.width)
    first = _width(table, 0)
    if len(found) > 1 and table.has_head and 3 * first > console.width:
        for row in table.rows:
            _show_paragraph(console, table, row, styled)
        return
    for group in found:
        console.print(_draw(table, group, console.width, styled))


def _show_paragraph(
    console: Console, table: Table, row: Sequence[Cell], styled: Callable[[str], Text]
) -> None:
    console.print(Text(str(row[0]), style="bold"), soft_wrap=True)
    line = Text("  ")
    for name, cell in zip(table.columns[1:], row[1:], strict=True):
        text = cell if isinstance(cell, Text) else styled(cell)
        if str(cell) in (NOTHING, ""):
            continue
        said = Text(f"{name} ", style="dim") + text
        if line.plain.strip() and line.cell_len + PADDING + said.cell_len > console.width:
            console.print(line, soft_wrap=True)
            line = Text("  ")
        line += Text("  ") + said if line.plain.strip() else said
    if line.plain.strip():
        console.print(line, soft_wrap=True)


def column_groups(table: Table, width: int) -> list[list[int]]:
    """The columns, in groups that fit one below another: as few as possible, of similar width."""
    least = [_least(table, i) for i in range(len(table.columns))]
    found = _groups(least, width)
    while width > 1 and len(narrower := _groups(least, width - 1)) == len(found) > 1:
        found, width = narrower, width - 1
    return found


def _groups(least: Sequence[int], width: int) -> list[list[int]]:
    found = [[0]]
    for column in range(1, len(least)):
        needed = [least[i] for i in [*found[-1], column]]
        if len(needed) > 2 and sum(needed) + PADDING * (len(needed) - 1) > width:
            found.append([0])
        found[-1].append(column)
    return found


def _lines(table: Table, column: int) -> Iterator[str]:
    if table.has_head:
        yield from table.columns[column].split("\n")
    for row in table.rows:
        yield from str(row[column]).split("\n")


def _width(table: Table, column: int) -> int:
    return max(map(cell_len, _lines(table, column)), default=0)


def _least(table: Table, column: int) -> int:
    """How narrow a column may get without breaking a word or wrapping a number."""
    whole = _width(table, column)
    if not table.is_text(column) or column == 0:
        return whole
    words = (cell_len(word) for line in _lines(table, column) for word in line.split())
    return min(whole, max(LEAST_TEXT, *words, 0))


def _draw(
    table: Table, columns: Sequence[int], width: int, styled: Callable[[str], Text]
) -> RichTable:
    widths = {i: _width(table, i) for i in columns}
    over = sum(widths.values()) + PADDING * (len(columns) - 1) - width
    for i in sorted(columns, key=lambda i: -widths[i]):  # the longest texts wrap first
        if over > 0:
            less = min(over, widths[i] - _least(table, i))
            widths[i], over = widths[i] - less, over - less
    if over > 0:  # a word is longer than the terminal is wide
        widest = max(columns, key=lambda i: widths[i])
        widths[widest] = max(1, widths[widest] - over)
    drawn = RichTable(
        box=None,
        pad_edge=False,
        padding=(0, PADDING, 0, 0),
        header_style="dim",
        show_header=table.has_head,
    )
    for i in columns:
        drawn.add_column(
            Text(table.columns[i]),
            justify="left" if table.is_text(i) else "right",
            overflow="fold",
            width=widths[i],
            style="" if table.has_head or i else "dim",
        )
    for row in table.rows:
        drawn.add_row(*(c if isinstance(c := row[i], Text) else styled(c) for i in columns))
    return drawn


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column of a live screen; the smaller `rank`, the longer it stays."""

    key: str
    title: str
    rank: int
    width: int = 1  # at least, so that columns do not move with their numbers
    right: bool = True
    most: int = 0  # how wide it may grow, beyond what its cells need


def fit(columns: Sequence[Column], rows: Sequence[dict[str, Text]], room: int) -> dict[str, int]:
    """The columns that fit into `room` cells, in their order, each with its width."""
    longest = {
        column.key: max((row[column.key].cell_len for row in rows if column.key in row), default=0)
        for column in columns
    }
    needed = {
        column.key: max(
            column.width, cell_len(column.title), 0 if column.most else longest[column.key]
        )
        for column in columns
        if longest[column.key] or not rows
    }
    chosen: dict[str, int] = {}
    left = room
    for column in sorted(columns, key=lambda column: column.rank):
        width = needed.get(column.key)
        if width is not None and width + (GAP if chosen else 0) <= left:
            left -= width + (GAP if chosen else 0)
            chosen[column.key] = width
    for column in sorted(columns, key=lambda column: column.rank):
        if column.key in chosen and column.most:  # these may use what is left
            wanted = min(column.most, longest[column.key])
            more = min(left, max(0, wanted - chosen[column.key]))
            chosen[column.key] += more
            left -= more
    return {column.key: chosen[column.key] for column in columns if column.key in chosen}


def header(columns: Sequence[Column], widths: dict[str, int]) -> Text:
    titles = {column.key: Text(column.title) for column in columns}
    line = join(columns, widths, titles)
    line.stylize("bold")
    return line


def join(columns: Sequence[Column], widths: dict[str, int], row: dict[str, Text]) -> Text:
    """One row, each cell cut or filled to its width."""
    line = Text(no_wrap=True)
    space = 0  # still to be written: collected, since every cell on the screen passes here
    for column in columns:
        if column.key not in widths:
            continue
        width, text = widths[column.key], row.get(column.key, EMPTY)
        if text.cell_len > width:
            text = text.copy()
            text.truncate(width, overflow="ellipsis")
        filling = width - text.cell_len
        space += filling if column.right else 0
        if text:
            line.append(" " * space)
            line.append_text(text)
            space = 0
        space += GAP + (0 if column.right else filling)
    line.append(" " * (space - GAP))
    return line
