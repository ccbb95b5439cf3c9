"""report.html: one page that holds everything it shows and asks nobody for anything."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from allranks.report import tables
from allranks.run.events import to_json
from allranks.show.numbers import duration, percent, ratio
from allranks.show.tables import as_cells
from allranks.timing.steps import PART_WORDS

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
    """The report, and beside its numbers every word and cell that the page shows of them."""
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
    """What stands at a row's points and bars in the charts."""
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
