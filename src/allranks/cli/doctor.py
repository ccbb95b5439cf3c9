"""The command that says what is wrong: with this machine, with a run, or with any log."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from allranks.cli.commands import never_with, only_with
from allranks.cli.options import AsJson, Debug, Runs, Stalled, people_console, print_json

if TYPE_CHECKING:
    from allranks.doctor.finding import Check

Subjects = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="RUN|LOG", help="Runs, or log files of any program. Default: check this machine."
    ),
]
ListCauses = Annotated[bool, typer.Option("--list", help="List all known causes.")]
Listen = Annotated[
    bool,
    typer.Option("--listen", help="Wait for --connect from another machine; a port may follow."),
]
Connect = Annotated[
    str | None,
    typer.Option(metavar="HOST:PORT", help="Test the network to a machine that runs --listen."),
]
DataFolders = Annotated[
    list[Path] | None,
    typer.Option(metavar="DIR", help="Also check the disk that this folder is on."),
]
Threshold = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY=NUMBER", help="When a run counts as slow, such as data=0.2. May be repeated."
    ),
]


@only_with("subject", "stalled", "threshold")
@never_with("list_causes", "subject", "listen", "connect", "data", "stalled", "threshold", "runs")
@never_with("listen", "connect", "data", "stalled", "threshold", "runs")
@never_with("connect", "subject", "data", "runs")
@never_with("subject", "data")
def doctor(
    subject: Subjects = None,
    list_causes: ListCauses = False,
    listen: Listen = False,
    connect: Connect = None,
    data: DataFolders = None,
    stalled: Stalled = None,
    threshold: Threshold = None,
    runs: Runs = Path("runs"),
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    started = time.monotonic()
    if list_causes:
        print_causes(as_json)
    elif connect is not None:
        from allranks.doctor.pair.talk import check_connection

        print_checks(check_connection(connect), connect, started, as_json=as_json)
    elif listen:
        from allranks.doctor.pair.talk import check_as_listener, read_port

        checks, host = check_as_listener(read_port(subject or []), teller(as_json))
        print_checks(checks, host, started, as_json=as_json)
    elif subject:
        print_diagnosis(runs, subject, threshold or [], stalled, as_json=as_json)
    else:
        from allranks.doctor.machine.here import check_here

        checks, host = check_here(runs, data or [])
        print_checks(checks, host, started, as_json=as_json)


def print_causes(as_json: bool) -> None:
    from allranks.doctor import catalogue
    from allranks.doctor.show import show_causes

    if as_json:
        print_json(catalogue.as_json())
    else:
        show_causes(people_console(), catalogue.known_findings())


def print_diagnosis(
    runs: Path, subject: list[str], limits: list[str], stalled: float | None, *, as_json: bool
) -> None:
    from allranks.doctor.diagnose import diagnosis, doubts, without_findings
    from allranks.doctor.finding import as_json as to_objects
    from allranks.doctor.show import show_findings
    from allranks.timing.limits.facts import Thresholds

    found = diagnosis(runs, subject, Thresholds.parse(limits), stalled)
    if as_json:
        print_json(to_objects(found))
    else:
        without = without_findings(runs, subject) if not found else {}
        show_findings(people_console(), found, without, doubts(runs, subject, found))


def print_checks(checks: Sequence[Check], host: str, started: float, *, as_json: bool) -> None:
    """Check by check; exits with 1 if one failed."""
    from allranks.doctor.finding import report
    from allranks.doctor.show import show_checks

    seconds = time.monotonic() - started
    show_checks(checks, host, seconds, people_console(as_json))
    found = report(checks, host, seconds)
    if as_json:
        print_json(found)
    raise typer.Exit(0 if found["ok"] else 1)


def teller(as_json: bool) -> Callable[[str], None]:
    """What prints a line for people, who may read what a stranger has said."""
    from allranks.show.text import clean

    console = people_console(as_json)

    def tell(text: str) -> None:
        console.print(clean(text), markup=False, soft_wrap=True)

    return tell
