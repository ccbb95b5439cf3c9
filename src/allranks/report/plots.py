"""scaling.png: speedup by ranks against the ideal, for slides and README files."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

INK, QUIET, GRID = "#1c2330", "#6b7486", "#e4e8ee"
LARGE = 16  # times the fewest ranks
COLOURS = ("#2f6fde", "#d9822b", "#2a9d6f", "#a05bc4", "#c8455b", "#5b7186")


def scaling_png(report: Mapping[str, Any], path: Path) -> None:
    """One line for each job and device that has a speedup. Needs matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.6), dpi=150, layout="constrained", facecolor="white")
    axes = figure.add_subplot()
    lines = list(scaling_lines(report))
    ranks = sorted({rank for line in lines for rank in line["ranks"]})
    several = len(lines) > 1
    axes.plot(ranks, ranks, linestyle=(0, (4, 4)), color=QUIET, linewidth=1.2, label="ideal")
    for line, colour in zip(lines, COLOURS * len(lines), strict=False):
        below, above = zip(*line["errors"], strict=True)
        axes.errorbar(
            line["ranks"],
            line["speedup"],
            yerr=(below, above),
            color=colour,
            marker="o",
            markersize=6,
            linewidth=2,
            capsize=4,
            label=line["name"] if several else "measured",
        )
        if not several:
            annotate(axes, line, colour)
    dress(axes, ranks)
    top = math.ceil(max([*ranks, *(value for line in lines for value in line["speedup"])]))
    if ranks[-1] > LARGE * ranks[0]:  # on a straight scale the small layouts would be one blot
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_xticks(ranks, [str(rank) for rank in ranks])
        powers = [2**power for power in range(top.bit_length() + 1)]
        axes.set_yticks(powers, [str(power) for power in powers])
        axes.set_ylim(0.8, top * 1.3)
        axes.set_xlim(ranks[0] / 1.2, ranks[-1] * 1.4)
    else:
        axes.set_ylim(0, top * 1.12)
    figure.set_canvas(FigureCanvasAgg(figure))
    figure.savefig(path)


def scaling_lines(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Layouts with the same number of ranks: the fastest is on the line."""
    lines = []
    for section in report["sections"]:
        for device in section["devices"]:
            rows = [row for row in section["rows"] if row["device"] == device and row["speedup"]]
            if rows:
                lines.append(line_of(f"{section['job']}, {device}", best_by_ranks(rows)))
    return lines


def best_by_ranks(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    best: dict[int, Mapping[str, Any]] = {}
    for row in rows:
        known = best.get(row["ranks"])
        if known is None or row["speedup"] > known["speedup"]:
            best[row["ranks"]] = row
    return [best[ranks] for ranks in sorted(best)]


def line_of(name: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Where one rank is missing, the line begins at the ranks of its baseline: on the ideal."""
    scale = rows[0]["ranks"]
    errors = []
    for row in rows:
        low, high = row["speedup_ci95"] or (row["speedup"], row["speedup"])
        errors.append((scale * (row["speedup"] - low), scale * (high - row["speedup"])))
    return {
        "name": name.replace("$", r"\$"),
        "ranks": [row["ranks"] for row in rows],
        "speedup": [row["speedup"] * scale for row in rows],
        "efficiency": [row["efficiency"] for row in rows],
        "errors": errors,
    }


def annotate(axes: Any, line: Mapping[str, Any], colour: str) -> None:
    for x, y, efficiency in zip(line["ranks"], line["speedup"], line["efficiency"], strict=True):
        axes.annotate(
            f"{efficiency:.0%}",
            (x, y),
            xytext=(7, -13),
            textcoords="offset points",
            fontsize=9,
            color=colour,
        )


def dress(axes: Any, ranks: Sequence[int]) -> None:
    axes.set_xlabel("ranks", color=INK)
    axes.set_ylabel("speedup", color=INK)
    axes.set_xticks(ranks, [str(rank) for rank in ranks])
    axes.set_xlim(ranks[0] - 0.05 * ranks[-1], ranks[-1] * 1.08)
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(GRID)
    axes.tick_params(colors=QUIET, length=0)
    axes.legend(frameon=False, loc="upper left", labelcolor=INK)
