"""`bench comm`: measure the network between ranks, and show what they wrote to comm.json."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from allranks.bench.comm_counts import FAR, SCOPES, fits, on_no_line, parse_collectives, parse_sizes
from allranks.bench.measure import Ended, Result, Series, stopped_early
from allranks.errors import AllranksError
from allranks.launch.prepare import Prepared, Request, prepare
from allranks.launch.screen import Screen
from allranks.machine.gpus import local_gpus
from allranks.run.failures import failure
from allranks.run.files import read_mapping
from allranks.run.folder import RunDir, find_run, list_runs
from allranks.show.numbers import NOTHING, duration, number, percent, size
from allranks.show.tables import Table, show_table, without_empty
from allranks.timing.comparison import bench_of

RECORD = {"kind": "comm"}


def measure(
    prepared: Prepared, console: Console, *, oversubscribe: bool = False, debug: bool = False
) -> Result:
    """Measure on this machine. Raises an error if nothing was measured."""
    screen = Screen(console, debug=debug)
    screen.makes_steps = False
    series = Series([("comm", prepared)], console, RECORD)
    (ended,) = series.here(lambda ended: ended, screen, oversubscribe=oversubscribe)
    return result_of(ended, is_interrupted=series.is_interrupted)


def result_of(ended: Ended, *, is_interrupted: bool) -> Result:
    if ended.run is None or (ended.error is not None and not is_interrupted):
        raise again(ended)
    if is_interrupted and not comm_of(ended.run):
        raise stopped_early()
    return Result(found_in(ended.run), is_interrupted=is_interrupted)


def prepare_comm(
    overrides: Sequence[str],
    *,
    layout: str | None,
    sizes: str,
    collectives: str | None,
    seconds: float,
    runs: Path,
) -> Prepared:
    """The ranks' command as a job. Raises AllranksError if an option is wrong."""
    parse_sizes(sizes)
    names = parse_collectives(collectives)
    module = "allranks.bench.comm_ranks"
    command = [sys.executable, "-m", module, "--sizes", sizes, "--seconds", f"{seconds:g}", *names]
    # An interrupted measurement is useless later: SLURM must not requeue it. There are no steps
    # for a probe to record.
    settings = ["name=comm", "slurm.requeue=false", "env.ALLRANKS_PROBE='off'", *overrides]
    typed = ["bench", "comm"]
    request = Request(overrides=settings, command=command, typed=typed, layout=layout, runs=runs)
    prepared = prepare(request)
    prepared.bench = RECORD
    if prepared.layout.ranks == 1:
        raise AllranksError(
            f"layout {prepared.layout} has one rank: there is nothing to communicate",
            fix=f"write --layout 1x{max(2, len(local_gpus()))}",
        )
    return prepared


def run_to_show(runs: Path, reference: str) -> RunDir:
    """The run of bench comm that a reference means; `last` is the newest of them."""

    def has_measured(run: RunDir) -> bool:
        return bench_of(run.info()).get("kind") == RECORD["kind"] or bool(comm_of(run))

    measure = "measure: allranks bench comm --layout 1x2"
    newest = next(filter(has_measured, list_runs(runs)), None)
    if reference == "last":
        if newest is None:
            raise AllranksError(f"no run of bench comm in {runs}", fix=measure)
        return newest
    run = find_run(runs, reference)
    if not has_measured(run):
        instead = f"write --from {newest.name}, the newest one" if newest else measure
        raise AllranksError(f"run {run.name} is not a run of bench comm", fix=instead)
    return run


def again(ended: Ended) -> AllranksError:
    """The error of a run that nobody would resume: its fix is to measure again."""
    error, failed = ended.error, failure(ended.run) if ended.run else None
    assert error is not None
    if ended.run is None or failed is None or failed.get("error", {}).get("fix"):
        return error
    kept = " (what was measured so far: comm.json beside it)" if comm_of(ended.run) else ""
    fix = f"see {failed['log']}{kept}; then measure again"
    return AllranksError(
        error.what, fix=fix, exit_code=error.exit_code, lines=error.lines, facts=error.facts
    )


def comm_of(run: RunDir) -> dict[str, Any]:
    """The content of a run's comm.json; empty if there is none."""
    return read_mapping(run.path / "comm.json", {})


def found_in(run: RunDir) -> dict[str, Any]:
    """What a run has measured. Raises AllranksError if there is nothing."""
    found = comm_of(run)
    if not found:
        raise AllranksError(
            f"run {run.name} has measured no collectives (yet): it is {run.state()}",
            fix=f"see allranks ls {run.name}, or measure: allranks bench comm --layout 1x2",
        )
    fitted = fits(found["rows"], found["peak_GBps"])  # older versions fitted them differently
    return found | {"run_dir": str(run.path), "fits": fitted}  # it may have been copied


def show(console: Console, found: Mapping[str, Any]) -> None:
    """A table for every collective of every scope, then the fits, remarks and files."""
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
        fitted = [fit for fit in found["fits"] if fit["scope"] == scope]
        console.print()
        if fitted:
            table = fits_table(fitted, rows)
            show_table(console, table)
            if any("*" in cell for row in table.rows for cell in row):
                console.print("* extrapolated: higher than was measured at any size")
        for name, sizes in on_no_line(rows, fitted).items():
            console.print(Text(f"no line fits {name} at {', '.join(map(size, sizes))}"))
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


def fits_table(fitted: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]]) -> Table:
    """The fits of time = latency + size / bandwidth, each with its range of sizes.

    The latency is shown if it dominates at the smallest of these sizes, the bandwidth if it
    dominates at the largest, unless measurements at other sizes contradict it.
    """
    times = {row["collective"]: row["median_us"] for row in reversed(rows)}  # of the smallest size
    largest = {row["collective"]: row["bytes"] for row in rows}
    cells = []
    for fit in fitted:
        name, latency = fit["collective"], fit["latency_us"]
        bandwidth: str | None = number(fit["busbw_GBps"])
        per_byte = 1e-3 / fit["algbw_GBps"] if fit["algbw_GBps"] else 0.0  # µs
        if fit["extrapolated"]:
            is_most = per_byte * fit["last_bytes"] > latency
            bandwidth = f"{bandwidth}*" if is_most and fit["last_bytes"] == largest[name] else None
        is_most = latency >= per_byte * fit["first_bytes"]
        has_latency = is_most and latency <= (1 + FAR) * times[name]
        cells.append(
            (
                name,
                f"{size(fit['first_bytes'])} to {size(fit['last_bytes'])}",
                duration(latency / 1e6) if has_latency else NOTHING,
                bandwidth or NOTHING,
                number(fit["measured_busbw_GBps"]),
                percent(fit["error"], 0),
                percent(fit["of_peak"], 0),
            )
        )
    columns = ("fit", "sizes", "latency", "bus GB/s", "measured", "off by up to", "peak")
    return without_empty(Table("", columns, cells))


def remarks(found: Mapping[str, Any]) -> Iterator[str]:
    """What a reader must know about the numbers."""
    yield f"time: {found['timing']}; sizes and bandwidths as nccl-tests counts them"
    if found["played"]:
        yield f"one machine played the {found['nodes']} nodes: no network was measured"
    peaks = {scope: peak for scope, peak in found["peak_GBps"].items() if peak}
    for scope, peak in peaks.items():
        yield f"peak {SCOPES[scope]}: {number(peak)} GB/s per rank, by the datasheets"
    for each in found["not_supported"]:
        yield f"{each['collective']}: not supported by {found['library']} ({each['why']})"
    limit = duration(found["seconds"], whole=True)
    for why, text in STOPPED.items():
        for where, names in _where_stopped(found, why).items():
            yield f"{text.format(seconds=limit)} {where}: {', '.join(names)}"
    if not found["complete"]:
        yield "incomplete: a rank ended before everything was measured"


STOPPED = {
    "time": "not measured, so as to end within {seconds} (--seconds):",
    "memory": "not measured, for lack of memory:",
}


def _where_stopped(found: Mapping[str, Any], why: str) -> dict[str, list[str]]:
    """Collectives whose largest sizes are missing, by where they ended."""
    ended: dict[str, list[str]] = {}
    for each in found["stopped"]:
        if each["why"] == why:
            last = each["after_bytes"]
            end = f"above {size(last)}" if last else "all sizes"
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
