"""The report on disk: report.md always; report.html and scaling.png with the extra `report`."""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from allranks.errors import AllranksError
from allranks.report import tables
from allranks.run.events import to_json
from allranks.run.folder import write_atomically
from allranks.show import PALETTE
from allranks.show import tables as show
from allranks.show.numbers import duration, listed, percent, ratio
from allranks.show.tables import as_cells
from allranks.show.text import in_markdown, printable
from allranks.timing.result import shown_parts

PAGE, PICTURE, TEXT = "report.html", "scaling.png", "report.md"
INK, QUIET, GRID = "#1c2330", "#6b7486", "#e4e8ee"
LARGE = 16  # times the fewest ranks
COLOURS = ("#2f6fde", "#d9822b", "#2a9d6f", "#a05bc4", "#c8455b", "#5b7186")
MARKERS = ("s", "D", "^", "v", "P", "X")  # of layouts beside the line
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
            f"not written, for lack of {' and '.join(NEEDS[file] for file in missing)}: "
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
        f"## {in_markdown(printable(section['job']))}",
        "",
        in_markdown("; ".join(tables.subtitle(section))),
        "",
    )
    if section["headline"]:
        yield from (in_markdown(section["headline"]), "")
    if lines := tables.lines_after(section):
        yield from (*(f"- {one.markdown}" for one in lines), "")
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
        style=PALETTE.read_text() + (FOLDER / "page.css").read_text(),
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
        "next": [[one.label, one.text, one.aside] for one in tables.lines_after(section)],
        "choices": list(tables.recommendation(section)),
        "tables": shown,
        "parts": shown_parts(row["divided"] for row in section["rows"] if row["divided"]),
        "rows": [row | row_words(row, section) for row in section["rows"]],
    }


def row_words(row: Mapping[str, Any], section: Mapping[str, Any]) -> dict[str, Any]:
    """The labels of a row's points and bars in the charts."""
    name, efficiency = tables.name_of(row, section), percent(row["efficiency"])
    parts = {part: duration(seconds) for part, seconds in (row["divided"] or {}).items()}
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


# --- scaling.png: speedup by ranks against the ideal, for slides and README files


def scaling_png(report: Mapping[str, Any], path: Path) -> None:
    """One line for each job and device that has a speedup. Needs matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.6), dpi=150, layout="constrained", facecolor="white")
    axes = figure.add_subplot()
    lines = scaling_lines(report)
    ranks = sorted({row["ranks"] for rows, _ in lines.values() for row in rows})
    bases = {rows[0]["layout"]: rows[0]["ranks"] for rows, _ in lines.values()}
    first = ranks[0] if len({*bases.values()}) == 1 else 1
    ideal = [number / first for number in ranks]
    axes.plot(ranks, ideal, linestyle=(0, (4, 4)), color=QUIET, linewidth=1.2, label="ideal")
    highest = ideal[-1]
    for (name, (rows, rest)), colour in zip(lines.items(), COLOURS * len(lines), strict=False):
        # Lines whose baselines have different numbers of ranks begin on the ideal, each at its own.
        scale = rows[0]["ranks"] / first
        x, y = [row["ranks"] for row in rows], [scale * row["speedup"] for row in rows]
        intervals = [row["speedup_ci95"] or (row["speedup"], row["speedup"]) for row in rows]
        below = [value - scale * low for value, (low, _) in zip(y, intervals, strict=True)]
        above = [scale * high - value for value, (_, high) in zip(y, intervals, strict=True)]
        style: dict[str, Any] = {"marker": "o", "markersize": 6, "linewidth": 2}
        style |= {"capsize": 4, "elinewidth": 1}
        label = name.replace("$", r"\$") if len(lines) > 1 else "measured"
        if rest and len(lines) == 1:
            label = f"the fastest: {', '.join(row['layout'] for row in rows)}"
        axes.errorbar(x, y, yerr=(below, above), color=colour, label=label, **style)
        highest = max(highest, *(scale * high for _, high in intervals))
        for row, value in zip(rows, y, strict=True) if len(lines) == 1 else ():
            axes.annotate(
                percent(row["efficiency"]),
                (row["ranks"], value),
                xytext=(7, -13),
                textcoords="offset points",
                fontsize=9,
                color=colour,
            )
        for row, marker in zip(rest, MARKERS * len(rest), strict=False):
            said = f"{row['layout']} ({percent(row['efficiency'])})"
            style = {"linestyle": "", "marker": marker, "color": colour, "markerfacecolor": "none"}
            axes.plot([row["ranks"]], [scale * row["speedup"]], label=said, **style)
    style_axes(axes, ranks, math.ceil(highest))
    if first > 1:
        axes.set_ylabel(f"speedup relative to {listed(bases)}", color=INK)
    if doubtful := doubtful_names(report):
        said = f"not shown, as their numbers are doubtful: {listed(doubtful)}"
        axes.set_title(said.replace("$", r"\$"), fontsize=9, color=QUIET, loc="left")
    figure.set_canvas(FigureCanvasAgg(figure))
    figure.savefig(path)


Rows = list[Mapping[str, Any]]


def scaling_lines(report: Mapping[str, Any]) -> dict[str, tuple[Rows, Rows]]:
    """The rows of each job and device: of layouts with the same ranks the fastest; and the rest."""
    lines = {}
    for section in report["sections"]:
        for device in section["devices"]:
            rows = [row for row in section["rows"] if row["device"] == device and row["speedup"]]
            best = {row["ranks"]: row for row in sorted(rows, key=lambda row: row["speedup"])}
            if best:
                line = [best[ranks] for ranks in sorted(best)]
                rest = [row for row in rows if row not in line]
                lines[f"{section['job']}, {device}"] = line, rest
    return lines


def doubtful_names(report: Mapping[str, Any]) -> list[str]:
    """The layouts that have a pace and no speedup."""
    return [
        tables.name_of(row, section)
        for section in report["sections"]
        for row in section["rows"]
        if row["doubt"]
    ]


def style_axes(axes: Any, ranks: Sequence[int], top: int) -> None:
    axes.set_xlabel("ranks", color=INK)
    axes.set_ylabel("speedup", color=INK)
    if ranks[-1] > LARGE * ranks[0]:  # on a linear scale the small layouts would be one blot
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        powers = [2**power for power in range(top.bit_length() + 1)]
        axes.set_yticks(powers, [str(power) for power in powers])
        axes.set_ylim(0.8, top * 1.3)
        axes.set_xlim(ranks[0] / 1.2, ranks[-1] * 1.4)
    else:
        axes.set_ylim(0, top * 1.12)
        axes.set_xlim(ranks[0] - 0.05 * ranks[-1], ranks[-1] * 1.08)
    axes.set_xticks(ranks, [str(rank) for rank in ranks])
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GRID)
    axes.tick_params(colors=QUIET, length=0)
    axes.legend(frameon=False, loc="upper left", labelcolor=INK)
