"""The report on disk: report.md always; report.html and scaling.png with the extra `report`."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from allranks.errors import AllranksError
from allranks.report import tables
from allranks.report.plots import scaling_png
from allranks.run.events import to_json
from allranks.run.folder import write_atomically
from allranks.show import tables as show
from allranks.show.numbers import duration, percent, ratio
from allranks.show.tables import as_cells
from allranks.show.text import in_markdown
from allranks.timing.steps import PART_WORDS

PAGE, PICTURE, TEXT = "report.html", "scaling.png", "report.md"
NEEDS = {PAGE: "plotly", PICTURE: "matplotlib"}


def write_files(report: Mapping[str, Any], folder: Path) -> tuple[list[str], AllranksError | None]:
    """Write the files that can be written here; returns lines for people, and what went wrong."""
    missing = [file for file, package in NEEDS.items() if find_spec(package) is None]
    has_curve = any(row["speedup"] for section in report["sections"] for row in section["rows"])
    files = [file for file in (PAGE, TEXT, PICTURE) if file not in missing]
    if not has_curve and PICTURE in files:
        files.remove(PICTURE)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if PAGE in files:
            write_atomically(folder / PAGE, html(report))
        picture = PICTURE if PICTURE in files else None
        write_atomically(folder / TEXT, markdown(report, picture=picture))
        if picture:
            scaling_png(report, folder / picture)
    except OSError as error:
        return [], AllranksError(
            f"cannot write the report to {folder}: {error.strerror or error}",
            fix="choose another place: --out DIR",
            exit_code=1,
        )
    lines = [f"wrote {folder / file}" for file in files]
    if missing:
        lines.append(
            f"not written, without {' and '.join(NEEDS[file] for file in missing)}: "
            f"{', '.join(missing)}; to install them: pip install 'allranks[report]'"
        )
    return lines, None


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


FOLDER = Path(__file__).parent / "page"


def html(report: Mapping[str, Any]) -> str:
    """The page, with plotly.js in it. Needs plotly."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from plotly.offline import get_plotlyjs

    environment = Environment(
        loader=FileSystemLoader(FOLDER), autoescape=True, undefined=StrictUndefined
    )
    plotly = inside_script(get_plotlyjs())
    script = inside_script((FOLDER / "page.js").read_text())
    return environment.get_template("page.html.j2").render(
        style=(FOLDER / "page.css").read_text(),
        data=data_block(page_data(report)),
        plotly=plotly,
        script=script,
        hashes=[script_hash(plotly), script_hash(script)],
    )


def page_data(report: Mapping[str, Any]) -> dict[str, Any]:
    """The report's numbers, with every word and cell that the page shows."""
    prices = [f"Price of {line}" for line in tables.price_lines(report)]
    footer = [*prices, tables.target_line(report), tables.READING]
    return {**report, "footer": footer, "sections": [*map(page_section, report["sections"])]}


def page_section(section: Mapping[str, Any]) -> dict[str, Any]:
    shown = [as_cells(table) for table in tables.tables(section)]
    if section["rows"]:  # of a verdict, the page has its reason too
        at = shown[0]["columns"].index("verdict")
        for cells, row in zip(shown[0]["rows"], section["rows"], strict=True):
            cells[at] = [cells[at], row["verdict_text"]]
    return {
        **section,
        "subtitle": tables.subtitle(section),
        "choices": list(tables.recommendation(section)),
        "tables": shown,
        "parts": PART_WORDS,
        "rows": [row | row_words(row, section) for row in section["rows"]],
    }


def row_words(row: Mapping[str, Any], section: Mapping[str, Any]) -> dict[str, Any]:
    """The labels of a row's points and bars in the charts."""
    name, efficiency = tables.name_of(row, section), percent(row["efficiency"])
    parts = {part: duration(seconds) for part, seconds in (row["parts"] or {}).items()}
    return {
        "name": name,
        "point": f"{name}: {ratio(row['speedup'])} at {efficiency} efficiency",
        "efficiency_words": efficiency,
        "step_words": duration(row["step_seconds"]),
        "part_words": parts,
    }


def data_block(report: Mapping[str, Any]) -> str:
    """JSON that no HTML parser can mistake for anything else, whatever names are in it."""
    text = to_json(report, separators=(",", ":"))
    for letter in "<>&\u2028\u2029":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text


def inside_script(source: str) -> str:
    """A script element holds anything but its own end."""
    assert "</script" not in source.lower() and "<!--" not in source, "this would end the element"
    # HTML reads line ends as \n; the hash must be of what the browser sees.
    return source.replace("\r\n", "\n").replace("\r", "\n")


def script_hash(source: str) -> str:
    """As Content-Security-Policy wants it: scripts with another one do not run."""
    return "sha256-" + base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
