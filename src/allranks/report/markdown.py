"""report.md: the tables, the recommendation, the notes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from allranks.report import tables
from allranks.show import tables as show
from allranks.show.text import in_markdown


def markdown(report: Mapping[str, Any], *, picture: str | None = None) -> str:
    """The report as Markdown; `picture` is the file name of the scaling curve, if there is one."""
    lines = ["# Scaling report", "", report["date"], ""]
    lines += [in_markdown(report["chosen"]), ""] if report["chosen"] else []
    lines += [f"- {in_markdown(note)}" for note in report["notes"]]
    lines += [""] if report["notes"] else []
    if picture:
        lines += [f"![Speedup by ranks]({picture})", ""]
    for section in report["sections"]:
        lines += section_lines(section)
    if report["prices"]:
        lines += ["## Prices", ""]
        lines += [*(f"- {in_markdown(line)}" for line in tables.price_lines(report)), ""]
    return "\n".join([*lines, tables.target_line(report), "", tables.READING, ""])


def section_lines(section: Mapping[str, Any]) -> Iterator[str]:
    yield from (
        f"## {in_markdown(tables.title(section))}",
        "",
        in_markdown("; ".join(tables.subtitle(section))),
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
        yield from show.markdown(table)
    for note in section["notes"]:
        yield f"- {in_markdown(note)}"
    if section["notes"]:
        yield ""
