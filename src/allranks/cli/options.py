"""The arguments that several commands share, and what they print."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from allranks.cli.commands import typed_script, typed_words

if TYPE_CHECKING:
    from rich.console import Console

    from allranks.errors import AllranksError
    from allranks.launch.prepare import Request

JobFile = Annotated[
    str | None,
    typer.Argument(metavar="JOB.yaml", help="The job file. Default: a small bundled job."),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Override keys of the job: optimizer.lr=3e-4"),
]
LayoutText = Annotated[
    str | None, typer.Option("--layout", metavar="LAYOUT", help="Nodes x GPUs, such as 1x4.")
]
Force = Annotated[
    bool, typer.Option("--force", help="Resume even if a change alters the mathematics.")
]
Hosts = Annotated[
    str | None,
    typer.Option(metavar="HOSTS", help="Run on these hosts over ssh, one per node: a,b."),
]
Oversubscribe = Annotated[
    bool,
    typer.Option(
        "--oversubscribe", help="For tests: let ranks share GPUs, or outnumber the CPU cores."
    ),
]
Here = Annotated[
    bool, typer.Option("--here", help="Inside a SLURM allocation: run all ranks on this machine.")
]
Runs = Annotated[
    Path, typer.Option(metavar="DIR", envvar="ALLRANKS_RUNS", help="The folder of all runs.")
]
Run = Annotated[
    str, typer.Argument(metavar="RUN", help="A run's name, the beginning of it, or last.")
]
OwnPrice = Annotated[
    list[str] | None,
    typer.Option(
        metavar="GPU=DOLLARS",
        help="Price per hour, such as h100=2.5 or cpu=0.05. May be repeated.",
    ),
]
Stalled = Annotated[
    float | None,
    typer.Option(
        "--stalled",
        "--stalled-after",
        metavar="SECONDS",
        min=1,
        help="Call a run stalled after this long without a step. Default: judged by its steps.",
    ),
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON value, and nothing else, on stdout.")
]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


def split_job(job: str | None, overrides: list[str]) -> tuple[Path | None, list[str]]:
    """The first word is the job file, unless it is an override of the bundled job."""
    if job is None:
        return None, overrides
    if "=" in job and not Path(job).exists():
        return None, [job, *overrides]
    return Path(job), overrides


def typed_request(job: str | None, overrides: list[str] | None, **rest: Any) -> Request:
    """What the words on the command line ask for."""
    from allranks.launch.prepare import Request

    file, pairs = split_job(job, overrides or [])
    script = typed_script()
    return Request(job_file=file, overrides=pairs, command=script, typed=typed_words(), **rest)


def print_error(error: AllranksError, *, as_json: bool, more: dict[str, Any] | None = None) -> None:
    """Tell people, and with `--json` programs too; `more`: what there is besides the error."""
    from allranks.show.text import plain

    print(plain(error.shown), file=sys.stderr)
    if as_json:
        print_json({"error": error.fields, **(more or {})})


def print_json(value: Any) -> None:
    """The one JSON value of `--json`."""
    from allranks.run.events import to_json

    print(to_json(value))


def people_console(as_json: bool = False) -> Console:
    """What people read: on stderr where stdout is for JSON."""
    from allranks.show.console import PeopleConsole

    return PeopleConsole(stderr=as_json, highlight=False)
