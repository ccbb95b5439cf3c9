"""`bench scaling` for people: a line for each run, then tables drawn from its JSON alone."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from allranks.measure.scaling import WORDS, Repeat
from allranks.timing import PART_WORDS, PARTS

NARROW = 92


class Progress:
    """What is being measured, and what came of it."""

    def __init__(self, *, as_json: bool, total: int) -> None:
        self.console = Console(
            stderr=as_json, highlight=False, file=sys.stderr if as_json else None
        )
        self._total = total
        self._number = 0

    def begin(self, layout: str) -> None:
        self._number += 1
        if self.console.is_terminal:
            text = f"{self._number}/{self._total}  {layout} …"
            self.console.print(Text(text, style="dim"), end="\r")

    def queued(self, run: str, layout: str) -> None:
        self.console.print(Text(f"queued {layout}: {run}", style="dim"), soft_wrap=True)

    def end(self, repeat: Repeat) -> None:
        if repeat.timing is None:
            words = Text(f"{repeat.layout}: {repeat.problem}", style="red")
        else:
            timing = repeat.timing
            steady = "" if timing.steady else ", not steady"
            words = Text(
                f"{repeat.layout}: {timing.samples_per_second:,.1f} samples/s "
                f"over {timing.num_steps} steps{steady}  ({repeat.run})"
            )
        self.console.print(words, soft_wrap=True)


def show(console: Console, found: Mapping[str, Any]) -> None:
    """What `as_json` made."""
    rows = [row for row in found["rows"] if row["efficiency"] is not None]
    if rows:
        console.print(speed_table(rows, found["mode"], wide=console.width >= NARROW))
        if all(row["parts"] for row in rows):
            console.print(parts_table(rows))
            if any(row["lost"] for row in rows[1:]):
                console.print(lost_table(rows))
    if found["fit"] is not None:
        console.print(Text(fit_words(found["fit"]), style="cyan"), soft_wrap=True)
    if rows:  # else the reason is told with the error
        console.print(Text(found["verdict"], style="bold"), soft_wrap=True)


def speed_table(rows: list[Mapping[str, Any]], mode: str, *, wide: bool) -> Table:
    means = {"strong": "same global batch", "weak": "same batch a rank"}.get(mode, mode)
    title = f"{mode} scaling ({means}), measured" if means != mode else f"{mode}, measured"
    table = Table(box=box.SIMPLE_HEAD, title=title)
    for name in ("layout", "samples/s", "95%", "speedup", "efficiency"):
        table.add_column(name, justify="left" if name == "layout" else "right")
    if wide:
        table.add_column("step", justify="right")
        table.add_column("rank-hours\nan epoch", justify="right")
        if rows[0]["cost_per_epoch"] is not None:
            table.add_column("cost of\nan epoch", justify="right")
    for row in rows:
        between = "-" if row["ci95"] is None else "{:,.0f}-{:,.0f}".format(*row["ci95"])
        cells = [
            row["layout"],
            f"{row['samples_per_second']:,.1f}",
            between,
            f"{row['speedup']:.2f}x",
            f"{row['efficiency']:.0%}",
        ]
        if wide:
            hours = row["hours_per_epoch"]
            cells += [milliseconds(row["step_seconds"]), "-" if hours is None else f"{hours:.4f}"]
            if row["cost_per_epoch"] is not None:
                cells.append(f"${row['cost_per_epoch']:.4f}")
        table.add_row(*cells)
    return table


def parts_table(rows: list[Mapping[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title="where the time of a step goes")
    table.add_column("layout")
    for part in PARTS:
        table.add_column(PART_WORDS[part], justify="right")
    table.add_column("slowest", justify="right")
    for row in rows:
        slowest = "-" if row["slowest_rank"] is None else f"rank {row['slowest_rank']}"
        table.add_row(row["layout"], *(milliseconds(row["parts"][p]) for p in PARTS), slowest)
    return table


def lost_table(rows: list[Mapping[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title="efficiency that each part costs")
    table.add_column("layout")
    for part in PARTS:
        table.add_column(PART_WORDS[part], justify="right")
    for row in rows[1:]:
        if row["lost"]:
            table.add_row(row["layout"], *(f"{row['lost'][part]:.1%}" for part in PARTS))
    return table


def fit_words(fit: Mapping[str, Any]) -> str:
    words = f"serial fraction {fit['serial_fraction']:.1%} (Amdahl, fitted)"
    if fit["fastest_at_ranks"] is not None:
        words += f"; predicted: no faster than at {fit['fastest_at_ranks']:.0f} ranks"
    if fit["half_efficient_at_ranks"] is not None:
        words += f"; predicted: half efficient at {fit['half_efficient_at_ranks']:.0f} ranks"
    return words


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.2f} ms" if seconds < 1 else f"{seconds:,.2f} s"


__all__ = ["WORDS", "Progress", "show"]
