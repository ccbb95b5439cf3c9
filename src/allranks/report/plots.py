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
    lines = scaling_lines(report)
    ranks = sorted({row["ranks"] for rows in lines.values() for row in rows})
    axes.plot(ranks, ranks, linestyle=(0, (4, 4)), color=QUIET, linewidth=1.2, label="ideal")
    highest = ranks[-1]
    for (name, rows), colour in zip(lines.items(), COLOURS * len(lines), strict=False):
        # Without a run of one rank, the line begins on the ideal, at the ranks of its baseline.
        scale = rows[0]["ranks"]
        x, y = [row["ranks"] for row in rows], [scale * row["speedup"] for row in rows]
        intervals = [row["speedup_ci95"] or (row["speedup"], row["speedup"]) for row in rows]
        below = [value - scale * low for value, (low, _) in zip(y, intervals, strict=True)]
        above = [scale * high - value for value, (_, high) in zip(y, intervals, strict=True)]
        style: dict[str, Any] = {"marker": "o", "markersize": 6, "linewidth": 2, "capsize": 4}
        label = name.replace("$", r"\$") if len(lines) > 1 else "measured"
        axes.errorbar(x, y, yerr=(below, above), color=colour, label=label, **style)
        highest = max(highest, *y)
        for row, value in zip(rows, y, strict=True) if len(lines) == 1 else ():
            axes.annotate(
                f"{row['efficiency']:.0%}",
                (row["ranks"], value),
                xytext=(7, -13),
                textcoords="offset points",
                fontsize=9,
                color=colour,
            )
    dress(axes, ranks, math.ceil(highest))
    figure.set_canvas(FigureCanvasAgg(figure))
    figure.savefig(path)


def scaling_lines(report: Mapping[str, Any]) -> dict[str, list[Mapping[str, Any]]]:
    """The rows of each job and device; of layouts with the same ranks, the fastest."""
    lines = {}
    for section in report["sections"]:
        for device in section["devices"]:
            rows = [row for row in section["rows"] if row["device"] == device and row["speedup"]]
            best = {row["ranks"]: row for row in sorted(rows, key=lambda row: row["speedup"])}
            if best:
                lines[f"{section['job']}, {device}"] = [best[ranks] for ranks in sorted(best)]
    return lines


def dress(axes: Any, ranks: Sequence[int], top: int) -> None:
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
