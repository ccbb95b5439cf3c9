"""comm.png: bus bandwidth and time by size, a line for each collective."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from allranks.bench.comm import SCOPES
from allranks.errors import AllranksError


def plot(found: Mapping[str, Any], path: Path) -> None:
    """Draw what was measured; one row of two pictures for each scope. Raises AllranksError."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise AllranksError(
            "comm.png was not drawn: matplotlib is not installed",
            fix="pip install 'allranks[report]', or pip install matplotlib",
        ) from None
    scopes = {row["scope"]: None for row in found["rows"]}
    if not scopes:
        return
    figure = Figure(figsize=(11, 4.2 * len(scopes)), layout="constrained")
    grid = figure.subplots(len(scopes), 2, squeeze=False)
    for (bandwidth, duration), scope in zip(grid, scopes, strict=True):
        rows = [row for row in found["rows"] if row["scope"] == scope]
        for name in dict.fromkeys(row["collective"] for row in rows):
            own = [row for row in rows if row["collective"] == name]
            sizes = [row["bytes"] for row in own]
            bandwidth.plot(sizes, [row["busbw_GBps"] for row in own], marker="o", label=name)
            duration.plot(sizes, [row["median_us"] for row in own], marker="o", label=name)
        peak = found["peak_GBps"].get(scope)
        if peak:
            bandwidth.axhline(peak, color="grey", linestyle="--", label="peak (datasheet)")
        title = f"{SCOPES[scope]}: {rows[0]['ranks']} ranks, {found['library']}"
        bandwidth.set(title=title, ylabel="bus bandwidth, GB/s", xscale="log", xlabel="bytes")
        duration.set(title="median time", ylabel="µs", xscale="log", yscale="log", xlabel="bytes")
        for axes in (bandwidth, duration):
            axes.set_xscale("log", base=2)
            axes.grid(alpha=0.3)
        bandwidth.legend(fontsize="small")
    figure.savefig(path, dpi=130)
