"""Findings and checks on the screen; of several findings the first is shown in full."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from itertools import groupby

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.text import Text

from allranks.doctor.catalogue import Cause
from allranks.doctor.finding import WELL, Check, Finding, Status
from allranks.show.numbers import duration
from allranks.show.tables import Table, show_table
from allranks.show.text import plain

COLOURS = {"high": "red", "medium": "yellow", "low": "cyan"}
SURE = {"high": "sure", "medium": "likely", "low": "a guess"}
STYLES: dict[Status, str] = {"pass": "green", "warn": "yellow", "fail": "red", "not here": "dim"}
NAME_WIDTH = 14  # of a check
MAX_EVIDENCE = 3
MAX_SHOWN = 220  # characters of a line: the file has the rest


def show_findings(
    console: Console,
    findings: Sequence[Finding],
    without: Mapping[str, str],
    doubts: Sequence[str] = (),
) -> None:
    """Everything about the first finding; title and fix of the others; what is doubtful.

    `without`: what to say of each log or run if there is no finding.
    """
    for doubt in doubts:
        console.print(Text(plain(f"note: {doubt}"), style="yellow"), soft_wrap=True)
    if not findings:
        for name, said in without.items():
            is_well = said == WELL and not doubts
            words = "the doctor found nothing else" if said == WELL and doubts else said
            style = "green" if is_well else ""
            console.print(Text(plain(f"{name}: {words}"), style=style), soft_wrap=True)
        return
    console.print(first_finding(findings[0]))
    if findings[1:]:
        console.print(Text("also found:", style="bold"))
    for found in findings[1:]:
        console.print(Text(plain(f"- {found.title}{culprit_of(found)} ({SURE[found.confidence]})")))
        console.print(Padding(Text(plain(f"fix: {found.fix}")), (0, 0, 0, 2)))


def first_finding(found: Finding) -> RenderableType:
    culprit = culprit_of(found).strip() or "no single rank"
    parts: list[RenderableType] = [Text(plain(found.title), style="bold")]
    parts.append(Text(f"{culprit}; {SURE[found.confidence]}", style="dim"))
    for line in found.evidence[:MAX_EVIDENCE]:
        place = plain(f"{line.file}:{line.line}" if line.line else line.file)
        text = plain(line.text)
        text = text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 1] + "…"
        parts += [Text(""), Text(place, style="cyan", overflow="fold")]
        parts.append(Padding(Text(text, style="dim"), (0, 0, 0, 2)))
    parts += [Text(""), Text("fix", style="bold green"), Text(plain(found.fix))]
    return Panel(
        Group(*parts),
        title=Text(found.cause, style="bold"),
        title_align="left",
        border_style=COLOURS[found.confidence],
        expand=False,
    )


def culprit_of(found: Finding) -> str:
    """` rank 3 on node7`, as far as known."""
    rank = f" rank {found.rank}" if found.rank is not None else ""
    rank += f" ({found.place})" if found.place else ""
    node = f" on {found.node}" if found.node else ""
    return plain(rank + node)


def show_causes(console: Console, causes: Sequence[Cause]) -> None:
    """Every cause the doctor knows, by family."""
    width = max(len(cause.slug) for cause in causes)
    for family, some in groupby(causes, lambda cause: cause.family):
        rows = [(f"  {cause.slug:<{width}}", cause.words({})) for cause in some]
        columns = ("cause", "title")
        show_table(console, Table(family, columns, rows, texts=columns, has_head=False))


def show_checks(checks: Sequence[Check], host: str, seconds: float, console: Console) -> None:
    """One line per check, and its fix below it."""
    indent = " " * (10 + NAME_WIDTH)
    room = max(20, max(40, console.width) - len(indent))

    def wrapped(text: str) -> list[str]:
        return textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False) or [""]

    for check in checks:
        first, *more = wrapped(check.value)
        line = Text(f"{check.status:<9}", style=STYLES[check.status])
        line.append(f"{check.name:<{NAME_WIDTH}} ", style="bold")
        line.append(first, style="dim" if check.status == "not here" else "")
        console.print(line, soft_wrap=True)
        for rest in more:
            console.print(Text(indent + rest), soft_wrap=True)
        word = "use" if check.status == "pass" else "fix"
        for rest in wrapped(f"{word}: {check.fix}") if check.fix else []:
            console.print(Text(indent + rest, style="cyan"), soft_wrap=True)
    counts = {status: sum(check.status == status for check in checks) for status in STYLES}
    words = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    console.print(Text(f"{host}: {words} ({duration(seconds)})"), soft_wrap=True)
