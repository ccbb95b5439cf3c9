"""The commands that train on this machine: init, run; and explain, which only says how."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer

from allranks.cli.commands import never_with, only_with, takes_script
from allranks.cli.options import (
    AsJson,
    Debug,
    Force,
    Here,
    Hosts,
    JobFile,
    LayoutText,
    Overrides,
    Oversubscribe,
    Run,
    Runs,
    people_console,
    print_error,
    print_json,
    typed_request,
)

if TYPE_CHECKING:
    from allranks.launch.backends import Options
    from allranks.launch.node import Outcome
    from allranks.launch.prepare import Prepared

Resume = Annotated[
    str | None, typer.Option(metavar="RUN", help="Continue this run: its name, or last.")
]
NodeRank = Annotated[
    int | None,
    typer.Option(metavar="N", min=0, help="This machine's number among the nodes, counted from 0."),
]
Master = Annotated[
    str | None, typer.Option(metavar="HOST:PORT", help="Where to reach node 0 of the layout.")
]
MaxRestarts = Annotated[
    int | None,
    typer.Option(metavar="N", min=0, help="Restart all ranks when one dies, up to N times."),
]
StallTimeout = Annotated[
    str | None,
    typer.Option(
        "--stall-timeout",
        "--idle-timeout",
        metavar="TIME",
        help="End the run after this long without a step: 90s, 10m. In a job file: stall_timeout.",
    ),
]
ProfileSteps = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="Trace N steps of every rank.")
]
Show = Annotated[
    str | None,
    typer.Option(metavar="RANKS", help="Show the output of these ranks: 1, or 0,2, or all."),
]

Format = Annotated[Literal["safetensors"], typer.Option("--to", help="The format to write.")]
Step = Annotated[
    int | None,
    typer.Option(metavar="N", min=0, help="Of the checkpoint of this step. Default: the newest."),
]


@takes_script
@only_with("node_rank", "master")
@never_with("hosts", "node_rank", "here")
@only_with("resume", "force")
def run(
    job: JobFile = None,
    overrides: Overrides = None,
    layout: LayoutText = None,
    resume: Resume = None,
    force: Force = False,
    runs: Runs = Path("runs"),
    hosts: Hosts = None,
    node_rank: NodeRank = None,
    master: Master = None,
    max_restarts: MaxRestarts = None,
    stall_timeout: StallTimeout = None,
    oversubscribe: Oversubscribe = False,
    here: Here = False,
    profile: ProfileSteps = None,
    show: Show = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    from allranks.job.values import Duration
    from allranks.launch import backends
    from allranks.launch.node import Place

    if stall_timeout is not None:
        overrides = [*(overrides or []), f"stall_timeout={Duration.parse(stall_timeout)}"]
    asked: dict[str, Any] = {"layout": layout, "resume": resume, "force": force, "here": here}
    request = typed_request(job, overrides, leads=not node_rank, runs=runs, **asked)
    place = Place(
        node_rank=node_rank,
        master=master,
        max_restarts=max_restarts,
        oversubscribe=oversubscribe,
    )
    named = tuple(hosts.split(",")) if hosts else ()
    backend = backends.named("ssh" if named else "local")
    options = backends.Options(place=place, hosts=named)
    prepared = backend.check(request, options)
    if profile is not None:
        from allranks.bench.profile import VARIABLE

        prepared.variables[VARIABLE] = str(profile)

    def add_profile(outcome: Outcome) -> None:
        if profile is not None:
            from allranks.bench.profile import show_profile

            found = show_profile(outcome.run, people_console(as_json))
            outcome.result["profile"] = found and str(outcome.run.path / "profile.json")

    train(
        backend.start, prepared, options, show=show, as_json=as_json, debug=debug, ended=add_profile
    )


@takes_script
def explain(
    job: JobFile = None,
    overrides: Overrides = None,
    layout: LayoutText = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Nothing is run or written: one step of one rank of each kind is tried without data."""
    from allranks.launch.prepare import prepare
    from allranks.plan import explain as plan

    found = plan.explain(prepare(typed_request(job, overrides, layout=layout)))
    if as_json:
        print_json(found)
    else:
        plan.show(people_console(), found)


def train(
    start: Callable[[Prepared, Options], Any],
    prepared: Prepared,
    options: Options,
    *,
    as_json: bool,
    debug: bool,
    show: str | None = None,
    ended: Callable[[Outcome], None] = lambda outcome: None,
) -> NoReturn:
    """Start a run on a screen of its own, follow it to its end, and exit with its code."""
    from allranks.launch.rank_output import read_ranks
    from allranks.launch.screen import Screen
    from allranks.machine.processes import listening

    layout = prepared.layout
    node = None if options.place is None else options.place.node_rank
    first, here = (0, layout.ranks) if node is None else (node * layout.gpus, layout.gpus)
    ranks = read_ranks(show, range(first, first + here))
    screen = Screen(people_console(as_json), debug=debug, show=ranks)
    with listening() as signals:  # one that comes after the ranks have ended changes nothing
        outcome: Outcome = start(prepared, replace(options, screen=screen, signals=signals))
        ended(outcome)
        if outcome.error is not None:
            print_error(outcome.error, as_json=as_json, more=outcome.result)
            raise typer.Exit(outcome.exit_code)
        screen.summary(outcome.result, can_go_on=outcome.can_go_on)
        if as_json:
            print_json(outcome.result)
        raise typer.Exit(outcome.exit_code)


def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where to write.")] = Path("."),
    force: Annotated[bool, typer.Option("--force", help="Overwrite what is there.")] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    from allranks.job.template import write_job

    written = write_job(folder, force=force)
    if as_json:
        print_json(written)
        return
    for path in written.values():
        print(f"wrote {path}")
    print(f"train it: allranks run {written['job']}")


def export(
    run: Run,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The file to write.")],
    to: Format = "safetensors",
    step: Step = None,
    runs: Runs = Path("runs"),
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    from allranks.run.folder import find_run
    from allranks.show.numbers import size
    from allranks.train.export import export

    written = export(find_run(runs, run), file, step)
    if as_json:
        print_json(written)
        return
    for line in written["remarks"]:
        print(line)
    what = f"{written['tensors']} tensors of step {written['step']}, {size(written['bytes'])}"
    print(f"wrote {file}: {what}")
