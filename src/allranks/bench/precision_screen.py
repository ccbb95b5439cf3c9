"""`bench precision` for people, drawn from its JSON alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

WIDE = 90


def show(console: Console, found: Mapping[str, Any]) -> None:
    """What `as_json` made."""
    measured = [row for row in found["rows"] if row["samples_per_second"] is not None]
    if measured:
        console.print(table_of(found, measured, is_wide=console.width >= WIDE))
    for row in found["rows"]:
        if row["problem"]:
            console.print(Text(f"{row['precision']}: {row['problem']}"), soft_wrap=True)
    if any(row["memory_of"] == "host" for row in measured):
        line = "memory is the host's: all that a rank holds, Python and torch included"
        console.print(Text(line), soft_wrap=True)
    console.print(Text(found["verdict"], style="bold"), soft_wrap=True)


def table_of(found: Mapping[str, Any], rows: list[Mapping[str, Any]], *, is_wide: bool) -> Table:
    title = f"{found['steps']} steps each, measured"
    table = Table(box=box.SIMPLE_HEAD, title=title, padding=(0, 1, 0, 0))
    names = ["precision", "samples/s", *(["range"] if is_wide else []), "speedup", "memory"]
    for name in [*names, "loss", "differs\nby", *(["at most\non the way"] if is_wide else [])]:
        table.add_column(name, justify="left" if name == "precision" else "right")
    for row in rows:
        low, high = row["range"]
        cells = [row["precision"], f"{row['samples_per_second']:,.1f}"]
        cells += [f"{low:,.0f} - {high:,.0f}"] if is_wide else []
        cells += [f"{row['speedup']:.2f}x", memory(row["memory_bytes"]), loss(row["loss"])]
        is_base = row["precision"] == found["baseline"]
        cells += ["-" if is_base else difference(row["loss_difference"], "+")]
        if is_wide:
            cells += ["-" if is_base else difference(row["largest_loss_difference"], "")]
        table.add_row(*cells)
    return table


def memory(count: int | None) -> str:
    if count is None:
        return "-"
    return f"{count / 2**30:,.1f} GiB" if count >= 2**30 else f"{count / 2**20:,.0f} MiB"


def loss(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def difference(value: float | None, sign: str) -> str:
    return "-" if value is None else f"{value:{sign}.1e}"
