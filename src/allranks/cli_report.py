"""The command that compares runs: report."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from allranks.cli_words import AsJson, Debug, OwnPrice, Runs, app, people_console

if TYPE_CHECKING:
    from allranks.rundir import RunDir

ReportedRuns = Annotated[
    list[str] | None,
    typer.Argument(metavar="RUN...", help="Default: the newest, and all others of its job."),
]
Out = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Where to write. Default: the newest run's folder."),
]
Prices = Annotated[
    Path | None, typer.Option(metavar="FILE", help="The same from a YAML file: h100: 2.5")
]
Within = Annotated[
    float, typer.Option("--target", min=0.0, max=1.0, help="Efficiency within a node.")
]
Across = Annotated[
    float, typer.Option("--target-across", min=0.0, max=1.0, help="Efficiency across nodes.")
]
Doubling = Annotated[
    float, typer.Option("--max-extra", min=0.0, help="GPU-hours that a doubling may add.")
]


@app.command()
def report(
    run: ReportedRuns = None,
    out: Out = None,
    price: OwnPrice = None,
    prices: Prices = None,
    target: Within = 0.95,
    target_across: Across = 0.85,
    max_extra: Doubling = 0.10,
    runs: Runs = Path("runs"),
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Compare runs: speedup, efficiency, GPU-hours, cost, and which layout to take."""
    from allranks.events import to_json
    from allranks.prices import parse_price, read_prices
    from allranks.report.build import build
    from allranks.report.facts import read_run
    from allranks.report.files import write_files
    from allranks.report.terminal import show_report
    from allranks.report.verdicts import Targets

    own = [*map(parse_price, price or []), *(read_prices(prices) if prices else [])]
    found = chosen_runs(runs, run or [])
    targets = Targets(within_node=target, across_nodes=target_across, doubling=max_extra)
    facts = [read_run(one) for one in found]
    built: dict[str, Any] = build(facts, prices=own, targets=targets, created=time.time())
    console = people_console(as_json)
    # First what takes time and may fail: a reader who leaves early still finds the files.
    lines, trouble = write_files(built, out or found[0].path)
    show_report(console, built)
    for line in lines:
        console.print(line, soft_wrap=True, markup=False)
    if trouble is not None:
        raise trouble
    if as_json:
        print(to_json(built))


def chosen_runs(runs: Path, references: list[str]) -> list[RunDir]:
    """The named runs, newest first; else the newest, with those of its benchmark or its job."""
    from allranks.comparing import bench_of
    from allranks.rundir import find_run, list_runs

    if references:
        named = {found.path: found for one in references for found in [find_run(runs, one)]}
        return sorted(named.values(), key=lambda one: one.info().get("created", 0.0), reverse=True)
    newest = find_run(runs, "last")
    bench = bench_of(newest.info()).get("id")
    of_job = [one for one in list_runs(runs) if one.job_name == newest.job_name]
    return [one for one in of_job if bench in (None, bench_of(one.info()).get("id"))]
