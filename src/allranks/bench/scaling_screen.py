"""`bench scaling` for people, drawn from its JSON alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from allranks.show.numbers import NOTHING, between, count, dollars, duration, number, percent, ratio
from allranks.show.tables import Table, show_table
from allranks.timing.steps import PART_WORDS, PARTS

PART_NAMES = tuple(PART_WORDS[part] for part in PARTS)


def show(console: Console, found: Mapping[str, Any]) -> None:
    """What `as_json` made."""
    rows = [row for row in found["rows"] if row["efficiency"] is not None]
    for table in tables(found, rows):
        console.print()
        show_table(console, table)
    if not rows:  # the reason is told with the error
        return
    console.print()
    law = fit_words(found, rows[-1]["ranks"])
    if law:
        console.print(Text(law, style="cyan"), soft_wrap=True)
    console.print(Text(found["verdict"], style="bold"), soft_wrap=True)
    for note in notes(found, rows):
        console.print(Text(f"note: {note}", style="yellow"), soft_wrap=True)


def tables(found: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> Iterator[Table]:
    """Speed and cost, where the time goes, what that costs: as far as they were measured."""
    if rows:
        yield speed_table(rows, found["mode"], found.get("unit", "rank"))
    if rows and all(row["parts"] for row in rows):
        yield parts_table(rows)
        if any(row["lost"] for row in rows[1:]):
            yield lost_table(rows[1:])


def speed_table(rows: Sequence[Mapping[str, Any]], mode: str, unit: str) -> Table:
    means = {"strong": "same global batch", "weak": "same batch a rank"}.get(mode, mode)
    title = f"{mode} scaling ({means}), measured" if means != mode else f"{mode}, measured"
    columns = (
        *("layout", "ranks", "samples/s", "95%", "speedup", "efficiency", "step"),
        *(f"{unit}-hours/epoch", "cost/epoch"),
    )
    cells = []
    for row in rows:
        hours, cost = row["hours_per_epoch"], row["cost_per_epoch"]
        cells.append(
            (
                name_of(row, rows),
                str(row["ranks"]),
                number(row["samples_per_second"]),
                between(row["ci95"]),
                ratio(row["speedup"]),
                percent(row["efficiency"]),
                duration(row["step_seconds"]),
                number(hours),
                dollars(cost),
            )
        )
    return Table(title, columns, tuple(cells))


def name_of(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """The layout, with its device where the queue gave several."""
    several = len({one["device"] for one in rows}) > 1
    return f"{row['layout']} {row['device']}" if several else str(row["layout"])


def notes(found: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What is odd in a row, and why a column has nothing in it."""
    told = [f"{row['layout']}: {remark}" for row in rows for remark in row.get("remarks", ())]
    if all(row["hours_per_epoch"] is None for row in rows):
        told.append("no hours and no cost: how many samples an epoch has is not known")
    elif all(row["cost_per_epoch"] is None for row in rows):
        device = str(found.get("device") or "the device")
        name = f"name one with --price '{device.lower()}=DOLLARS'"
        told.append(f"no price is known for {device}: {name}")
    return told


def parts_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    cells = []
    for row in rows:
        slowest = NOTHING if row["slowest_rank"] is None else f"rank {row['slowest_rank']}"
        cells.append((name_of(row, rows), *(duration(row["parts"][p]) for p in PARTS), slowest))
    return Table("where the time of a step goes", ("layout", *PART_NAMES, "slowest"), tuple(cells))


def lost_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    cells = [
        (name_of(row, rows), *(percent(row["lost"][part]) for part in PARTS))
        for row in rows
        if row["lost"]
    ]
    return Table("efficiency that each part costs", ("layout", *PART_NAMES), tuple(cells))


def fit_words(found: Mapping[str, Any], most_ranks: int) -> str:
    """The law, and what it says beyond the layouts that were measured; or why there is none."""
    fit = found["fit"]
    if fit is None:
        layouts = {row["ranks"] for row in found["rows"] if row["efficiency"] is not None}
        return f"no law fits: {found['fit_problem']}" if len(layouts) > 1 else ""
    if fit["serial_fraction"] is not None:
        error = fit["serial_fraction_error"]
        margin = f" ± {percent(error)}" if error else ""
        words = [f"serial fraction {percent(fit['serial_fraction'])}{margin} (Amdahl, fitted)"]
    else:
        words = [
            f"contention {percent(fit['contention'])}, coherence {percent(fit['coherence'], 2)} "
            "(Universal Scalability Law, fitted)"
        ]
    limits = {"fastest_at_ranks": "no faster than", "half_efficient_at_ranks": "half efficient"}
    for key, what in limits.items():
        if fit[key] is not None and fit[key] > most_ranks:  # else it was measured
            words.append(f"predicted: {what} at {count(fit[key])} ranks")
    return "; ".join(words)
