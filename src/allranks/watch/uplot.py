"""Where uPlot is, which draws the page's plots: two files of the package uplot-python."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

# By the names that the page asks for. The package itself, a wrapper for notebooks, is not imported.
FILES = {"uplot.js": "uPlot.iife.js", "uplot.css": "uPlot.min.css"}


def find(name: str) -> Path | None:
    """A file of uPlot's by its name on the page; None where the package is not installed."""
    spec = find_spec("uplot")
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).with_name("static") / FILES[name]
    return path if path.is_file() else None  # another package has the same name
