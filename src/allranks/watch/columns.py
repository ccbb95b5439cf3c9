"""Tables in any width: columns that do not fit go, the least needed first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.text import Text

GAP = 1
EMPTY = Text()


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column; the smaller `rank`, the longer it stays."""

    key: str
    title: str
    rank: int
    width: int = 1  # at least: so that a table does not dance with its numbers
    right: bool = True
    most: int = 0  # how wide it may grow, beyond what its cells need


def fit(columns: Sequence[Column], rows: Sequence[dict[str, Text]], room: int) -> dict[str, int]:
    """The columns that fit into so many cells, in their order, each with its width."""
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
        if column.key in chosen and column.most:  # what is left makes these wider
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
    space = 0  # that is to come: written once, since every cell on the screen passes here
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


def shortened(name: str, width: int) -> str:
    """A run's name without its middle, where it is too long: its ends tell it apart."""
    if len(name) <= width or width < 8:
        return name[:width]
    tail = min(11, width // 2)  # of the time and the four digits behind it
    return f"{name[: width - tail - 1]}…{name[-tail:]}"
