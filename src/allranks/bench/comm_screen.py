"""What `allranks bench comm` shows people, from comm.json alone: tables, and a picture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from allranks.bench.comm_counts import SCOPES
from allranks.errors import AllranksError
from allranks.show.numbers import duration, number, percent, size
from allranks.show.tables import Table, show_table, without_empty


def show(console: Console, found: Mapping[str, Any]) -> None:
    """A table for every collective of every scope, then the fits, then what to know of them."""
    for scope, words in SCOPES.items():
        rows = [row for row in found["rows"] if row["scope"] == scope]
        if not rows:
            continue
        console.print()
        console.print(Text(f"{words}: {rows[0]['ranks']} ranks", style="bold"))
        if scope in found["transport"]:
            route = found["transport"][scope]["words"]
            console.print(Text(f"{found['library']}, {route}", style="dim"))
        for name in dict.fromkeys(row["collective"] for row in rows):
            console.print()
            show_table(console, sizes_table([r for r in rows if r["collective"] == name]))
        fits = [fit for fit in found["fits"] if fit["scope"] == scope]
        if fits:
            console.print()
            show_table(console, fits_table(fits))
    console.print()
    for line in remarks(found):
        console.print(Text(line, style="dim"))


def show_files(console: Console, found: Mapping[str, Any]) -> None:
    """Draw the picture, and say where it and the numbers are."""
    folder = Path(found["run_dir"])
    try:
        plot(found, folder / "comm.png")
        console.print(str(folder / "comm.png"), soft_wrap=True)
    except AllranksError as error:
        console.print(f"note: {error.what}; {error.fix}", soft_wrap=True, markup=False)
    console.print(str(folder / "comm.json"), soft_wrap=True)


def sizes_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Measured times and bandwidths of one collective by size."""
    cells = [
        (
            size(row["bytes"]),
            duration(row["median_us"] / 1e6),
            duration(row["p99_us"] / 1e6),
            number(row["algbw_GBps"]),
            number(row["busbw_GBps"]),
            percent(row["of_peak"], 0),
        )
        for row in rows
    ]
    columns = (f"{rows[0]['collective']:<14}", "median", "p99", "alg GB/s", "bus GB/s", "peak")
    return without_empty(Table("", columns, cells))


def fits_table(fits: Sequence[Mapping[str, Any]]) -> Table:
    """time = latency + size / bandwidth, fitted to what was measured."""
    cells = [
        (
            fit["collective"],
            duration(fit["latency_us"] / 1e6),
            number(fit["busbw_GBps"]),
            percent(fit["error"], 0),
            percent(fit["of_peak"], 0),
        )
        for fit in fits
    ]
    columns = ("fit of all sizes", "latency", "bus GB/s", "off by", "peak")
    return without_empty(Table("", columns, cells))


def remarks(found: Mapping[str, Any]) -> Iterator[str]:
    """What a reader must know of the numbers."""
    yield f"time: {found['timing']}; sizes and bandwidths as nccl-tests counts them"
    if found["played"]:
        yield f"one machine played the {found['nodes']} nodes: no network was measured"
    peaks = {scope: peak for scope, peak in found["peak_GBps"].items() if peak}
    for scope, peak in peaks.items():
        yield f"peak {SCOPES[scope]}: {number(peak)} GB/s a rank, by the datasheets"
    for each in found["not_supported"]:
        yield f"{each['collective']}: not supported by {found['library']} ({each['why']})"
    limit = duration(found["seconds"], whole=True)
    for why, text in STOPPED.items():
        for where, names in _where_stopped(found, why).items():
            yield f"{text.format(seconds=limit)} {where}: {', '.join(names)}"
    if not found["complete"]:
        yield "not all was measured: a rank ended before"


STOPPED = {
    "time": "to end within {seconds} (--seconds), nothing",
    "memory": "for lack of memory, nothing",
}


def _where_stopped(found: Mapping[str, Any], why: str) -> dict[str, list[str]]:
    """Collectives whose largest sizes are missing, by where they ended."""
    ended: dict[str, list[str]] = {}
    for each in found["stopped"]:
        if each["why"] == why:
            last = each["after_bytes"]
            end = f"above {size(last)}" if last else "at all"
            scope = f", {SCOPES[each['scope']]}" if len(found["transport"]) > 1 else ""
            ended.setdefault(end + scope, []).append(each["collective"])
    return ended


def plot(found: Mapping[str, Any], path: Path) -> None:
    """comm.png: bus bandwidth and time by size; a row for each scope. Raises AllranksError."""
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
    for (bandwidth, times), scope in zip(grid, scopes, strict=True):
        rows = [row for row in found["rows"] if row["scope"] == scope]
        for name in dict.fromkeys(row["collective"] for row in rows):
            own = [row for row in rows if row["collective"] == name]
            sizes = [row["bytes"] for row in own]
            bandwidth.plot(sizes, [row["busbw_GBps"] for row in own], marker="o", label=name)
            times.plot(sizes, [row["median_us"] for row in own], marker="o", label=name)
        peak = found["peak_GBps"].get(scope)
        if peak:
            bandwidth.axhline(peak, color="grey", linestyle="--", label="peak (datasheet)")
        title = f"{SCOPES[scope]}: {rows[0]['ranks']} ranks, {found['library']}"
        bandwidth.set(title=title, ylabel="bus bandwidth, GB/s", xscale="log", xlabel="bytes")
        times.set(title="median time", ylabel="µs", xscale="log", yscale="log", xlabel="bytes")
        for axes in (bandwidth, times):
            axes.set_xscale("log", base=2)
            axes.grid(alpha=0.3)
        bandwidth.legend(fontsize="small")
    figure.savefig(path, dpi=130)
