"""The report's tables as plain text cells, for the terminal and for Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from allranks.report.words import show
from allranks.show.bands import NOTHING, Table
from allranks.show.plain import printable
from allranks.timing.steps import PART_WORDS, PARTS

Record = Mapping[str, Any]
MODES = {
    "strong": "strong scaling (the same batch on every layout)",
    "weak": "weak scaling (the same batch on every rank)",
    "mixed": "scaling with batches that differ",
    "one size": "one size",
}


def tables(section: Record) -> Iterator[Table]:
    """Speed, cost, where the time goes, metrics, runs: those that have something to say."""
    rows = section["rows"]
    if rows:
        yield speed(section)
        yield hours(section)
    if any(row["parts"] for row in rows):
        yield parts(rows, section)
    if any(row["metrics"] for row in rows):
        yield metrics(rows, section)
    yield runs(section["runs"])


def name_of(row: Record, section: Record) -> str:
    """The layout, with its device where several are compared."""
    several = len(section["devices"]) > 1
    return printable(f"{row['layout']} {row['device']}" if several else row["layout"])


def speed(section: Record) -> Table:
    cells = []
    for row in section["rows"]:
        pace = row["samples_per_second"] or {}
        bounds = (pace["min"], pace["max"]) if pace.get("n", 0) > 1 else None
        cells.append(
            (
                name_of(row, section),
                show("count", row["ranks"]),
                show("number", pace.get("median")),
                show("ratio", row["speedup"]),
                show("percent", row["efficiency"]),
                row["verdict"],
                between(pace.get("ci95")),
                between(bounds),
            )
        )
    against = {row["baseline"] for row in section["rows"] if row["speedup"]}
    is_one = all(row["ranks"] == 1 for row in section["rows"] if row["layout"] in against)
    speedup = "speedup" if is_one or len(against) > 1 else f"speedup vs {against.pop()}"
    columns = (
        *("layout", "ranks", "samples/s", speedup, "efficiency", "verdict"),
        *("95% interval", "range"),
    )
    return Table("Speed", columns, tuple(cells), texts=("verdict",))


def between(bounds: Sequence[float] | None) -> str:
    return f"{show('number', bounds[0])}{NOTHING}{show('number', bounds[1])}" if bounds else NOTHING


def hours(section: Record) -> Table:
    unit = f"{section['unit']}-hours"
    cells = []
    for row in section["rows"]:
        extra = show("signed_percent", row["extra_share"])
        if row["extra_gpu_hours"] is not None:
            extra = f"{show('signed', row['extra_gpu_hours'])} ({extra})"
        cells.append(
            (
                name_of(row, section),
                show("duration", row["seconds"]),
                row["seconds_kind"] or NOTHING,
                show("number", row["gpu_hours"]),
                show("number", row["gpu_hours_per_epoch"]),
                NOTHING if row["layout"] == row["baseline"] else extra,
                show("dollars", row["usd"]),
                show("dollars", row["usd_per_million_samples"]),
            )
        )
    columns = (
        *("layout", "time to finish", "", unit, f"{unit}/epoch", f"extra {unit}"),
        *("cost", "per M samples"),
    )
    return Table("Time and cost", columns, tuple(cells), texts=("",))


def parts(rows: Sequence[Record], section: Record) -> Table:
    columns = ("layout", "step", *PART_WORDS.values(), "slowest rank")
    cells = []
    for row in rows:
        if row["parts"]:
            shares = [row["parts"][part] / row["step_seconds"] for part in PARTS]
            slowest = NOTHING if row["slowest_rank"] is None else str(row["slowest_rank"])
            step = show("milliseconds", row["step_seconds"])
            shown = (show("percent", share) for share in shares)
            cells.append((name_of(row, section), step, *shown, slowest))
    return Table("Where a step's time goes", columns, tuple(cells))


def metrics(rows: Sequence[Record], section: Record) -> Table:
    names = list(dict.fromkeys(name for row in rows for name in row["metrics"] or {}))
    cells = []
    for row in rows:
        known = row["metrics"] or {}
        values = (show("metric", known[n]["median"] if n in known else None) for n in names)
        cells.append((name_of(row, section), *values, row["metrics_kind"] or NOTHING))
    columns = ("layout", *map(printable, names), "")
    return Table("Metrics", columns, tuple(cells), texts=("",))


def runs(found: Sequence[Record]) -> Table:
    cells = tuple(
        (
            printable(run["run"]),
            printable(run["layout"] or NOTHING),
            run["state"],
            show("count", run["steps"]),
            show("number", run["samples_per_second"]),
        )
        for run in found
    )
    columns = ("run", "layout", "state", "steps", "samples/s")
    return Table("Runs", columns, cells, texts=("layout", "state"))


def title(section: Record) -> str:
    return printable(section["job"])


def subtitle(section: Record) -> str:
    """What was compared, in a line."""
    words = [MODES[section["mode"]], ", ".join(section["devices"])]
    if section["batch"]:
        words.append(f"batch {show('count', section['batch'])}")
    if section["samples"]:
        words.append(f"{show('count', section['samples'])} samples to train")
    words += [f"{key}: {value}" for key, value in section["differs"].items()]
    return printable("; ".join(word for word in words if word))


def recommendation(section: Record) -> Iterator[tuple[str, str, str]]:
    """For each goal: its name, the layout, and why."""
    for key, name in (("time", "by time"), ("cost", "by cost"), ("both", "best of both")):
        choice = section["recommended"][key]
        if choice:
            yield name, name_of(choice, section), choice["why"]
