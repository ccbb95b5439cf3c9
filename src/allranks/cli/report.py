"""The command that compares runs: report."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from allranks.cli.options import AsJson, Debug, OwnPrice, Runs, people_console, print_json

ReportedRuns = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="RUN",
        help="Runs, or names of jobs. Default: the newest bench scaling, else the newest job.",
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Where to write. Default: the folder of the newest run."),
]
Prices = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Prices from a YAML file, such as h100: 2.5")
]
Within = Annotated[
    float, typer.Option(metavar="FRACTION", min=0, max=1, help="Efficiency to reach within a node.")
]
Across = Annotated[
    float, typer.Option(metavar="FRACTION", min=0, max=1, help="Efficiency to reach across nodes.")
]
Doubling = Annotated[
    float,
    typer.Option(metavar="FRACTION", min=0, help="Extra GPU-hours allowed for doubling the GPUs."),
]


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
    from allranks.machine.prices import parse_price, read_prices
    from allranks.report.build import build, chosen_runs
    from allranks.report.costs import Targets
    from allranks.report.facts import read_run
    from allranks.report.files import write_files
    from allranks.report.tables import show_report
    from allranks.show.text import clean

    own = [*map(parse_price, price or []), *(read_prices(prices) if prices else [])]
    found, chosen = chosen_runs(runs, run or [])
    targets = Targets(within_node=target, across_nodes=target_across, doubling=max_extra)
    facts = [read_run(one) for one in found]
    built: dict[str, Any] = build(
        facts, prices=own, targets=targets, created=time.time(), chosen=chosen
    )
    console = people_console(as_json)
    # First what takes time and may fail: a reader who leaves early still finds the files.
    lines, trouble = write_files(built, out or found[0].path)
    show_report(console, built)
    for line in lines:
        console.print(clean(line), soft_wrap=True)
    if trouble is not None:
        raise trouble
    if as_json:
        print_json(built)
