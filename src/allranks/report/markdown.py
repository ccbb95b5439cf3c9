"""report.md: the tables, the recommendation, the notes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from allranks.report import tables
from allranks.report.words import show
from allranks.show.tables import Table
from allranks.show.text import in_markdown

READING = (
    "Speedup and efficiency are by the samples/s of steady steps. Time to finish is from the first "
    "step to the last, with evaluations and saves."
)


def markdown(report: Mapping[str, Any], *, picture: str | None = None) -> str:
    """The report as Markdown; `picture` is the file name of the scaling curve, if there is one."""
    lines = ["# Scaling report", "", report["date"], ""]
    lines += [in_markdown(report["chosen"]), ""] if report["chosen"] else []
    lines += [f"- {in_markdown(note)}" for note in report["notes"]]
    lines += [""] if report["notes"] else []
    if picture:
        lines += [f"![Speedup by ranks]({picture})", ""]
    for section in report["sections"]:
        lines += [*section_lines(section)]
    lines += [*price_lines(report)]
    targets = report["targets"]
    lines += [
        f"Targets: {show('percent', targets['within_node'])} efficiency within a node, "
        f"{show('percent', targets['across_nodes'])} across nodes; diminishing returns where a "
        f"doubling of ranks adds more than {show('percent', targets['doubling'])} hours. "
        f"Best of both: {targets['both']}.",
        "",
        READING,
        "",
    ]
    return "\n".join(lines)


def section_lines(section: Mapping[str, Any]) -> Iterator[str]:
    yield from (
        f"## {in_markdown(tables.title(section))}",
        "",
        in_markdown(tables.subtitle(section)),
        "",
    )
    if section["headline"]:
        yield from (in_markdown(section["headline"]), "")
    choices = list(tables.recommendation(section))
    for name, layout, why in choices:
        yield f"- **{name}: {in_markdown(layout)}**. {in_markdown(why)}"
    if choices:
        yield ""
    for table in tables.tables(section):
        yield from table_lines(table)
    for note in section["notes"]:
        yield f"- {in_markdown(note)}"
    if section["notes"]:
        yield ""


def table_lines(table: Table) -> Iterator[str]:
    yield from (f"### {table.title}", "")
    yield "| " + " | ".join(in_markdown(name) for name in table.columns) + " |"
    left = [i == 0 or name in table.texts for i, name in enumerate(table.columns)]
    yield "|" + "|".join("---" if is_left else "---:" for is_left in left) + "|"
    for row in table.rows:
        yield "| " + " | ".join(in_markdown(cell) for cell in row) + " |"
    yield ""


def price_lines(report: Mapping[str, Any]) -> Iterator[str]:
    if not report["prices"]:
        return
    yield from ("## Prices", "")
    for price in report["prices"]:
        read = f", read {price['date']}" if price["date"] else ""
        dollars = show("dollars", price["usd_per_hour"])
        device, source = in_markdown(price["device"]), in_markdown(price["source"])
        yield f"- {device}: {dollars} an hour ({source}{read})"
    yield ""
