"""The report on disk: report.md always; report.html and scaling.png with the extra `report`."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from allranks.errors import AllranksError
from allranks.report.markdown import markdown
from allranks.report.page import html
from allranks.report.plots import scaling_png
from allranks.run.folder import write_atomically

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
