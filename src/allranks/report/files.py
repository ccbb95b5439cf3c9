"""The report on disk: report.md always; report.html and scaling.png with the extra `report`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from allranks.errors import AllranksError
from allranks.report import tables
from allranks.report.page import html
from allranks.report.plots import scaling_png
from allranks.run.folder import write_atomically
from allranks.show import tables as show
from allranks.show.text import in_markdown

PAGE, PICTURE, TEXT = "report.html", "scaling.png", "report.md"
NEEDS = {PAGE: "plotly", PICTURE: "matplotlib"}


def write_files(report: Mapping[str, Any], folder: Path) -> tuple[list[str], AllranksError | None]:
    """Write what can be written here; what was, in lines for people, and what went wrong."""
    missing = [file for file, package in NEEDS.items() if find_spec(package) is None]
    has_curve = any(row["speedup"] for section in report["sections"] for row in section["rows"])
    files = [file for file in (PAGE, TEXT, PICTURE) if file not in missing]
    if not has_curve and PICTURE in files:
        files.remove(PICTURE)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file in files:
            write_file(report, folder / file, picture=PICTURE if PICTURE in files else None)
    except OSError as error:
        return [], AllranksError(
            f"cannot write the report to {folder}: {error.strerror or error}",
            fix="choose another place: --out DIR",
            exit_code=1,
        )
    lines = [f"wrote {folder / file}" for file in files]
    if missing:
        lines.append(
            f"not written, for want of {' and '.join(NEEDS[file] for file in missing)}: "
            f"{', '.join(missing)}; pip install 'allranks[report]' brings them"
        )
    return lines, None


def write_file(report: Mapping[str, Any], path: Path, *, picture: str | None) -> None:
    if path.name == PAGE:
        write_atomically(path, html(report))
    elif path.name == TEXT:
        write_atomically(path, markdown(report, picture=picture))
    else:
        scaling_png(report, path)


def markdown(report: Mapping[str, Any], *, picture: str | None = None) -> str:
    """report.md; `picture` is the file name of the scaling curve, if there is one."""
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
