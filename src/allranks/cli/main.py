"""The command line: one short function per command. Imports nothing heavy before it must."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from allranks.cli import bench as cli_bench
from allranks.cli import bench_comm as cli_comm
from allranks.cli import bench_data as cli_bench_data
from allranks.cli import cluster as cli_slurm
from allranks.cli import doctor as cli_doctor
from allranks.cli import report as cli_report
from allranks.cli import watch as cli_watch
from allranks.cli.options import (
    AsJson,
    Debug,
    Force,
    Here,
    JobFile,
    LayoutText,
    Overrides,
    Oversubscribe,
    Resume,
    Runs,
    app,
    keep_typed,
    people_console,
    print_error,
    typed_request,
)

if TYPE_CHECKING:
    from allranks.errors import AllranksError

# Importing these adds their commands to the app.
__all__ = [
    "app",
    "cli_bench",
    "cli_bench_data",
    "cli_comm",
    "cli_doctor",
    "cli_report",
    "cli_slurm",
    "cli_watch",
    "main",
]

NodeRank = Annotated[int | None, typer.Option(help="Which node of the layout this machine is.")]
Master = Annotated[
    str | None, typer.Option(metavar="HOST:PORT", help="Where node 0 can be reached.")
]
MaxRestarts = Annotated[
    int | None, typer.Option(min=0, help="Restart all ranks when one dies, so often.")
]
IdleTimeout = Annotated[
    str | None,
    typer.Option(
        metavar="10m", help="End a run that makes no step for this long (in a job: stall_timeout)."
    ),
]
ProfileSteps = Annotated[
    int | None,
    typer.Option("--profile", metavar="STEPS", min=1, help="Trace so many steps of every rank."),
]
Show = Annotated[
    str | None,
    typer.Option(metavar="RANKS", help="Show the output of these ranks: 1, or 0,2, or all."),
]
Version = Annotated[bool, typer.Option("--version", help="Show the version and exit.")]


@app.callback(invoke_without_command=True)
def _allranks(version: Version = False) -> None:
    if version:
        from allranks import __version__

        print(__version__)
        raise typer.Exit


@app.command()
def run(
    job: JobFile = None,
    overrides: Overrides = None,
    layout: LayoutText = None,
    resume: Resume = None,
    force: Force = False,
    runs: Runs = Path("runs"),
    node_rank: NodeRank = None,
    master: Master = None,
    max_restarts: MaxRestarts = None,
    idle_timeout: IdleTimeout = None,
    oversubscribe: Oversubscribe = False,
    here: Here = False,
    profile: ProfileSteps = None,
    show: Show = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Train a job, or run your own script after `--`, on this machine."""
    from allranks.cli.profile import ask_for_profile, show_profile
    from allranks.job.values import Duration
    from allranks.launch.echo import read_ranks
    from allranks.launch.node import Place, ranks_here, run_here
    from allranks.launch.prepare import prepare
    from allranks.launch.screen import Screen
    from allranks.machine.processes import listening
    from allranks.run.events import to_json

    if idle_timeout is not None:
        overrides = [*(overrides or []), f"stall_timeout={Duration.parse(idle_timeout)}"]
    asked: dict[str, Any] = {"layout": layout, "resume": resume, "force": force, "here": here}
    request = typed_request(job, overrides, leads=not node_rank, runs=runs, **asked)
    place = Place(
        node_rank=node_rank,
        master=master,
        max_restarts=max_restarts,
        oversubscribe=oversubscribe,
    )
    prepared = prepare(request)
    first, num_ranks = (node_rank or 0) * prepared.layout.gpus, ranks_here(prepared, place)
    console = people_console(as_json)
    screen = Screen(console, debug=debug, show=read_ranks(show, range(first, first + num_ranks)))
    ask_for_profile(prepared, profile)
    with listening() as signals:  # one that comes after the ranks have ended changes nothing
        outcome = run_here(prepared, place, screen, signals)
        if profile is not None:
            found = show_profile(outcome.run, console)
            outcome.result["profile"] = found and str(outcome.run.path / "profile.json")
        if outcome.error is not None:
            print_error(outcome.error, as_json=as_json, more=outcome.result)
            raise typer.Exit(outcome.exit_code)
        screen.summary(outcome.result, can_go_on=outcome.can_go_on)
        if as_json:
            print(to_json(outcome.result))
        raise typer.Exit(outcome.exit_code)


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(help="Where to write.")] = Path("."),
    force: Annotated[bool, typer.Option("--force", help="Overwrite what is there.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write a commented job.yaml and its JSON schema."""
    from allranks.job.template import write_job

    written = write_job(folder, force=force)
    if as_json:
        print(json.dumps(written))
        return
    for path in written.values():
        print(f"wrote {path}")
    print(f"train it: allranks run {written['job']}")


def main() -> NoReturn:
    """The console script, and `python -m allranks`."""
    from allranks.machine.processes import outlive_terminal

    arguments = sys.argv[1:]
    command = None
    if "--" in arguments:
        cut = arguments.index("--")
        arguments, command = arguments[:cut], arguments[cut + 1 :]
    keep_typed(arguments, command)
    as_json = "--json" in arguments
    outlive_terminal()
    try:
        # On its own typer prints what is wrong with the arguments, for people, and exits.
        sys.exit(app(arguments, standalone_mode=not as_json))
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # `allranks ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception as error:
        mended = as_user_error(error)
        if mended is None or "--debug" in arguments:
            raise
        print_error(mended, as_json=as_json)
        sys.exit(mended.exit_code)


def as_user_error(error: Exception) -> AllranksError | None:
    """An error that is the user's to mend: ours, or typer's about the arguments."""
    from allranks.errors import FULL, AllranksError, file_error

    if isinstance(error, AllranksError):
        return error
    if isinstance(error, OSError) and (error.filename or error.errno in FULL):
        return file_error(error)
    if hasattr(error, "format_message"):
        return AllranksError(error.format_message(), fix="see allranks --help")
    return None
