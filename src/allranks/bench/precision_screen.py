"""`bench precision` for people, drawn from its JSON alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from allranks.show.numbers import NOTHING, between, metric, number, ratio, size
from allranks.show.tables import Table, show_table


def show(console: Console, found: Mapping[str, Any]) -> None:
    """What `as_json` made."""
    measured = [row for row in found["rows"] if row["samples_per_second"] is not None]
    if measured:
        show_table(console, table_of(found, measured))
    for row in found["rows"]:
        if row["problem"]:
            console.print(Text(f"{row['precision']}: {row['problem']}"), soft_wrap=True)
    if any(row["memory_of"] == "host" for row in measured):
        line = "memory is the host's: all that a rank holds, Python and torch included"
        console.print(Text(line), soft_wrap=True)
    console.print(Text(found["verdict"], style="bold"), soft_wrap=True)


def table_of(found: Mapping[str, Any], rows: list[Mapping[str, Any]]) -> Table:
    cells = []
    for row in rows:
        differs = (
            number(row["loss_difference"], 2, signed=True),
            number(row["largest_loss_difference"], 2),
        )
        is_base = row["precision"] == found["baseline"]
        cells.append(
            (
                row["precision"],
                number(row["samples_per_second"]),
                between(row["range"]),
                ratio(row["speedup"]),
                size(row["memory_bytes"]),
                metric(row["loss"]),
                *((NOTHING, NOTHING) if is_base else differs),
            )
        )
    columns = (
        *("precision", "samples/s", "range", "speedup", "memory", "loss"),
        *("differs by", "at most on the way"),
    )
    return Table(f"{found['steps']} steps each, measured", columns, cells)
