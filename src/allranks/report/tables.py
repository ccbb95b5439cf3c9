"""The report's words and tables, and the report in a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from allranks.report.costs import MEASURED
from allranks.show.numbers import (
    NOTHING,
    between,
    count,
    dollars,
    duration,
    metric,
    number,
    percent,
    ratio,
)
from allranks.show.tables import STATE_STYLES, Table, show_table, without_empty
from allranks.show.text import printable
from allranks.timing.comparison import MODES
from allranks.timing.result import (
    NEXT,
    WARNING,
    VerdictLine,
    shown_exchanges,
    shown_parts,
    slowest_words,
    verdict_lines,
    verdict_table,
)

Record = Mapping[str, Any]
GOALS = (("both", "best of both"), ("time", "by time"), ("cost", "by cost"))
READING = (
    "Speedup and efficiency follow from the samples/s of steady steps. Time to finish is from the "
    "first step to the last; if it was measured, it includes evaluations and saves. Hours and "
    "costs are for that time. Predicted times, hours and costs count steps alone."
)


def tables(section: Record) -> Iterator[Table]:
    """The tables on speed, cost, where the time goes, metrics and runs that have rows."""
    rows = section["rows"]
    if rows:
        yield speed(section)
        yield hours(section)
    if any(row["parts"] for row in rows):
        yield parts(rows, section)
    if len((waits := exchanges(rows, section)).columns) > 1:
        yield waits
    if any(row["metrics"] for row in rows):
        yield metrics(rows, section)
    yield runs(section["runs"])


def name_of(row: Record, section: Record) -> str:
    """The layout, with its device if several are compared."""
    several = len(section["devices"]) > 1
    return printable(f"{row['layout']} {row['device']}" if several else row["layout"])


def about(figure: str, of: Record) -> str:
    """A figure that depends on samples, marked if they are an estimate."""
    return f"about {figure}" if of["is_guess"] and figure != NOTHING else figure


def speed(section: Record) -> Table:
    cells = []
    for row in section["rows"]:
        pace = row["samples_per_second"] or {}
        cells.append(
            (
                name_of(row, section),
                count(row["ranks"]),
                about(number(pace.get("median")), row),
                ratio(row["speedup"]),
                percent(row["efficiency"]),
                row["verdict"],
                between(pace.get("ci95")),
                between((pace["min"], pace["max"]) if pace.get("n", 0) > 1 else None),
                count(row["num_counted"]),
            )
        )
    against = {row["baseline"] for row in section["rows"] if row["speedup"]}
    is_one = all(row["ranks"] == 1 for row in section["rows"] if row["layout"] in against)
    speedup = "speedup" if is_one or len(against) > 1 else f"speedup vs {against.pop()}"
    columns = (
        *("layout", "ranks", "samples/s", speedup, "efficiency", "verdict"),
        *("95% interval", "range", "runs"),
    )
    return Table("Speed", columns, cells, texts=("verdict",))


def hours(section: Record) -> Table:
    unit = f"{section['unit']}-hours"
    cells = []
    for row in section["rows"]:
        extra = percent(row["extra_share"], signed=True)
        if row["extra_gpu_hours"] is not None:
            extra = f"{number(row['extra_gpu_hours'], signed=True)} ({extra})"
        cells.append(
            (
                name_of(row, section),
                duration(row["seconds"]),
                row["seconds_kind"] or NOTHING,
                number(row["gpu_hours"]),
                number(row["gpu_hours_per_epoch"]),
                NOTHING if row["layout"] == row["baseline"] else extra,
                percent(row["doubling_share"], signed=True),
                dollars(row["usd"]),
                about(dollars(row["usd_per_million_samples"]), row),
            )
        )
    kinds = {row["seconds_kind"] for row in section["rows"] if row["usd_per_million_samples"]}
    of = ", with evaluation" if kinds == {MEASURED} else ", steps alone" if len(kinds) == 1 else ""
    columns = (
        *("layout", "time to finish", "", unit, f"{unit}/epoch", f"extra {unit}"),
        *("last doubling", "cost", f"per M samples{of}"),
    )
    return Table("Time and cost", columns, cells, texts=("",))


def parts(rows: Sequence[Record], section: Record) -> Table:
    shown = shown_parts(row["divided"] for row in rows if row["divided"])
    columns = ("layout", "batch", "step", *shown.values(), "slowest rank", "limited by")
    cells = [
        (
            name_of(row, section),
            count(row["batch"]),
            duration(row["step_seconds"]),
            *(percent(row["divided"][part] / row["step_seconds"]) for part in shown),
            slowest_words(row["slowest_rank"], row["layout"]),
            row["limit"] or NOTHING,
        )
        for row in rows
        if row["parts"]
    ]
    return Table("Where a step's time goes", columns, cells, texts=("limited by",))


def exchanges(rows: Sequence[Record], section: Record) -> Table:
    """How long a rank waits in each kind of exchange, for bytes and for other ranks."""
    those = [row for row in rows if row["exchanges"]]
    names = shown_exchanges((row["exchanges"], row["step_seconds"]) for row in those)
    cells = [
        (name_of(row, section), *(duration(row["exchanges"].get(name)) for name in names))
        for row in those
    ]
    return Table("Waiting in a step, by exchange", ("layout", *names), cells)


def metrics(rows: Sequence[Record], section: Record) -> Table:
    names = list(dict.fromkeys(name for row in rows for name in row["metrics"] or {}))
    cells = []
    for row in rows:
        known = row["metrics"] or {}
        values = (metric(known[n]["median"] if n in known else None) for n in names)
        cells.append((name_of(row, section), *values, row["metrics_kind"] or NOTHING))
    return Table("Metrics", ("layout", *map(printable, names), ""), cells, texts=("",))


def runs(found: Sequence[Record]) -> Table:
    has_mfu = any(run["mfu"] is not None for run in found)
    cells = [
        (
            printable(run["run"]),
            printable(run["layout"] or NOTHING),
            run["state"],
            count(run["steps"]),
            about(number(run["samples_per_second"]), run),
            duration(run["seconds"]),
            *([percent(run["mfu"])] if has_mfu else []),
        )
        for run in found
    ]
    columns = ("run", "layout", "state", "steps", "samples/s", "training time")
    more = ("MFU",) if has_mfu else ()
    return Table("Runs", (*columns, *more), cells, texts=("layout", "state"))


def subtitle(section: Record) -> list[str]:
    """What was compared, as a list of short phrases."""
    words = [MODES[section["mode"]], ", ".join(section["devices"])]
    guessed = {"is_guess": any(row["is_guess"] for row in section["rows"])}
    if section["batch"]:
        words.append(f"batch {about(count(section['batch']), guessed)}")
    if section["samples"]:
        words.append(f"{about(count(section['samples']), guessed)} samples to train")
    differs = section["differs"].items()
    words += [f"{key}: {'null' if value is None else value}" for key, value in differs]
    return [printable(word) for word in words if word]


def lines_after(section: Record) -> list[VerdictLine]:
    """What follows from the limit in the headline; what changed since, the tables show."""
    found = [run for run in section["runs"] if run["run"] == section["headline_run"]]
    return [one for run in found for one in verdict_lines(run) if one.label in (NEXT, WARNING)]


def recommendation(section: Record) -> Iterator[tuple[str, str, str]]:
    """For each goal: its name, the layout, and why."""
    for key, name in GOALS:
        choice = section["recommended"][key]
        if choice:
            yield name, name_of(choice, section), choice["why"]


def price_lines(report: Record) -> Iterator[str]:
    """The price of an hour of each device, and where it comes from."""
    for price in report["prices"]:
        read = f", read {price['date']}" if price["date"] else ""
        cost = dollars(price["usd_per_hour"])
        yield printable(f"{price['device']}: {cost} an hour ({price['source']}{read})")


def target_line(report: Record) -> str:
    """The targets that the verdicts apply."""
    targets = report["targets"]
    return (
        f"Targets: {percent(targets['within_node'])} efficiency within a node, "
        f"{percent(targets['across_nodes'])} across nodes; diminishing returns where a "
        f"doubling of ranks adds more than {percent(targets['doubling'])} hours. "
        f"Best of both: {targets['both']}."
    )


COLOURS = {"good": "green", "baseline": "dim", "below": "yellow", "diminishing": "yellow"}


def show_report(console: Console, report: Mapping[str, Any]) -> None:
    if report["chosen"]:
        console.print(Text(printable(report["chosen"]), style="dim"))
        console.print()
    for section in report["sections"]:
        console.print(Text(printable(section["job"]), style="bold"), soft_wrap=True)
        console.print(Text("; ".join(subtitle(section)), style="dim"))
        if section["headline"]:
            console.print(Text(printable(section["headline"])))
        if lines := lines_after(section):
            show_table(console, verdict_table((), lines))
        for table in tables(section):
            told = without_empty(table)
            if len(told.columns) > 1:
                console.print()
                show_table(console, told, styled=styled)
        console.print()
        show_choices(console, section)
        for note in section["notes"]:
            console.print(Text(f"note: {printable(note)}", style="yellow"), soft_wrap=True)
        console.print()
    for line in price_lines(report):
        console.print(Text(f"price of {line}", style="dim"), soft_wrap=True)
    for note in report["notes"]:
        console.print(Text(f"note: {printable(note)}", style="yellow"), soft_wrap=True)


def show_choices(console: Console, section: Mapping[str, Any]) -> None:
    choices = list(recommendation(section))
    if not choices:
        console.print(Text("nothing to recommend: it takes two layouts that can be compared"))
    for name, layout, why in choices:
        line = Text(f"{name}: ") + Text(layout, style="bold") + Text(f"  {why}", style="dim")
        console.print(line, soft_wrap=console.width >= 100)


def styled(cell: str) -> Text:
    style = STATE_STYLES.get(cell) or COLOURS.get(cell.split()[0] if cell else "", "")
    return Text(cell, style=style)
