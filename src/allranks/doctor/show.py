"""Findings for people: the first one large and clear, the others short."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from allranks.doctor.catalogue import Cause
from allranks.doctor.finding import Evidence, Finding
from allranks.show.text import plain

COLOURS = {"high": "red", "medium": "yellow", "low": "cyan"}
SURE = {"high": "sure", "medium": "likely", "low": "a guess"}
MAX_EVIDENCE = 3
MAX_SHOWN = 220  # characters of a line: the file has the rest


def show_findings(console: Console, findings: Sequence[Finding], subject: str) -> None:
    """All findings; of the first everything, of the others what they are and their fix."""
    if not findings:
        console.print(
            Text(f"{plain(subject)}: nothing is wrong that the doctor knows of", style="green")
        )
        return
    console.print(first_finding(findings[0]))
    if findings[1:]:
        console.print(Text("also found:", style="bold"))
    for found in findings[1:]:
        console.print(Text(plain(f"- {found.title}{whose(found)} ({SURE[found.confidence]})")))
        console.print(Padding(Text(plain(f"fix: {found.fix}")), (0, 0, 0, 2)))


def first_finding(found: Finding) -> RenderableType:
    culprit = whose(found).strip() or "no single rank"
    parts: list[RenderableType] = [Text(plain(found.title), style="bold")]
    parts.append(Text(f"{culprit}; {SURE[found.confidence]}", style="dim"))
    for line in found.evidence[:MAX_EVIDENCE]:
        parts += [Text(""), Text(place(line), style="cyan", overflow="fold"), _quoted(line)]
    parts += [Text(""), Text("fix", style="bold green"), Text(plain(found.fix))]
    return Panel(
        Group(*parts),
        title=Text(found.cause, style="bold"),
        title_align="left",
        border_style=COLOURS[found.confidence],
    )


def whose(found: Finding) -> str:
    """` rank 3 on node7`, as far as it is known."""
    rank = f" rank {found.rank}" if found.rank is not None else ""
    node = f" on {found.node}" if found.node else ""
    return plain(rank + node)


def place(line: Evidence) -> str:
    return plain(f"{line.file}:{line.line}" if line.line else line.file)


def _quoted(line: Evidence) -> RenderableType:
    text = plain(line.text)
    text = text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 1] + "…"
    return Padding(Text(text, style="dim"), (0, 0, 0, 2))


def show_causes(console: Console, causes: Sequence[Cause]) -> None:
    """What the doctor knows, by family."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    family = ""
    for cause in causes:
        if cause.family != family:
            family = cause.family
            table.add_row(Text(family, style="bold"), "")
        table.add_row(f"  {cause.slug}", Text(cause.words({})))
    console.print(table)
