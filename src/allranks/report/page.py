"""report.html: one page that holds everything it shows and asks nobody for anything."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from allranks.run.events import to_json

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
        data=data_block(report),
        plotly=plotly,
        script=script,
        hashes=[script_hash(plotly), script_hash(script)],
    )


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
