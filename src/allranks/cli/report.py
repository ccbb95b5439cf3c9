"""The command that compares runs: report."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from allranks.cli.options import AsJson, Debug, OwnPrice, Runs, people_console

if TYPE_CHECKING:
    from allranks.errors import AllranksError
    from allranks.run.folder import RunDir

ReportedRuns = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="RUN...",
        help="Names of runs or of jobs. Default: the newest benchmark of scaling, or job.",
    ),
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
    from allranks.report.build import build
    from allranks.report.facts import read_run
    from allranks.report.files import write_files
    from allranks.report.terminal import show_report
    from allranks.report.verdicts import Targets
    from allranks.run.events import to_json
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
        print(to_json(built))


def chosen_runs(runs: Path, references: list[str]) -> tuple[list[RunDir], str | None]:
    """The runs to compare, newest first, and in words which they are where that was not typed."""
    from allranks.run.folder import find_run, list_runs
    from allranks.timing import comparison as comparing

    if references:
        return named_runs(runs, references)
    known = [one for one in list_runs(runs) if one.job_file.exists()]
    infos = {one.name: one.info() for one in known}
    newest = next((one for one in known if comparing.is_comparable(infos[one.name])), None)
    if newest is None:
        find_run(runs, "last")  # says so, if there is none at all
        raise nothing_to_compare(runs, [comparing.bench_of(info) for info in infos.values()])
    mine = infos[newest.name]
    those = [
        one
        for one in known
        if one.job_name == newest.job_name and comparing.is_compared(mine, infos[one.name])
    ]
    others = [one.job_name for one in known if comparing.is_comparable(infos[one.name])]
    is_bench = bool(comparing.bench_of(mine))
    return those, chosen_words(newest.job_name, len(those), is_bench=is_bench, jobs=others)


def named_runs(runs: Path, references: list[str]) -> tuple[list[RunDir], str | None]:
    """Every run that was named; of several that one word stands for, those that train."""
    from allranks.run.folder import find_runs
    from allranks.timing.comparison import is_comparable

    named: dict[Path, RunDir] = {}
    num_left = 0
    for reference in references:
        found = find_runs(runs, reference)
        those = [one for one in found if is_comparable(one.info())] or found
        num_left += len(found) - len(those)
        named |= {one.path: one for one in those}
    ordered = sorted(named.values(), key=lambda one: one.info().get("created", 0.0), reverse=True)
    if not num_left:
        return ordered, None
    what, are = ("run", "is") if num_left == 1 else ("runs", "are")
    return ordered, f"{num_left} {what} of other benchmarks than bench scaling {are} left out."


def chosen_words(job: str, number: int, *, is_bench: bool, jobs: list[str]) -> str:
    """Which runs are compared where none was named, and how to compare others."""
    count = f"{number} run{'s' if number > 1 else ''}"
    if is_bench:
        more = f"; all of {job}: allranks report {job}" if jobs.count(job) > number else ""
        words = f"Compared: the {count} of the newest bench scaling, of {job}{more}."
    else:
        words = f"Compared: the {count} of {job}, the newest job."
    others = [name for name in dict.fromkeys(jobs) if name != job]
    if others:
        names = ", ".join(others[:3]) + (", …" if len(others) > 3 else "")
        words += f" Other jobs: {names} (allranks report NAME)."
    return words


def nothing_to_compare(runs: Path, benches: list[dict[str, Any]]) -> AllranksError:
    from allranks.errors import AllranksError

    kinds = " and ".join(sorted({f"bench {bench.get('kind')}" for bench in benches}))
    what = f"what is there is of {kinds}" if kinds else "none has the job.yaml of a run"
    return AllranksError(
        f"no run in {runs} is there to be compared: {what}",
        fix="measure layouts: allranks bench scaling job.yaml; or name runs: allranks report RUN",
    )
