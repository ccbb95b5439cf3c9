"""The table of commands, and the console script: what was typed goes to one command."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from allranks.cli.commands import Commands, Row, keep_typed

if TYPE_CHECKING:
    from allranks.errors import AllranksError

BENCH = (
    Row(
        "scaling",
        "Measure",
        "Measure a job, or your own script after `--`, on several layouts.",
        "bench:scaling",
        takes_script=True,
    ),
    Row(
        "comm",
        "Measure",
        "Measure the network between ranks: latency and bandwidth of collectives by size.",
        "bench:comm",
    ),
    Row(
        "data",
        "Measure",
        "Measure data loading: how many workers a job needs, and how fast it can get.",
        "bench:data",
        takes_script=True,
    ),
    Row(
        "precision",
        "Measure",
        "Measure a task in fp32, tf32, fp16 and bf16: speed, memory and loss.",
        "bench:precision",
        takes_script=True,
    ),
)

# In the order in which people use them.
COMMANDS = (
    Row("init", "Train", "Write a commented job.yaml and its JSON schema.", "train:init"),
    Row(
        "run",
        "Train",
        "Train a job, or run your own script after `--`, on this machine or over ssh.",
        "train:run",
        takes_script=True,
    ),
    Row(
        "resume",
        "Train",
        "Continue a run where it was last, in another layout if you like; moves a running one.",
        "cluster:resume",
    ),
    Row(
        "stop",
        "Train",
        "Stop runs at a checkpoint, from which `resume` continues.",
        "cluster:stop",
    ),
    Row("cluster", "Cluster", "Show what this cluster, or this machine, has.", "cluster:cluster"),
    Row(
        "submit",
        "Cluster",
        "Send a job, or your own script after `--`, to SLURM.",
        "cluster:submit",
        takes_script=True,
    ),
    Row(
        "race",
        "Cluster",
        "Add layouts to a run that is still queued: the first to start wins.",
        "cluster:race",
    ),
    Row(
        "ls",
        "Look",
        "List runs: state, progress, time left, and why they wait or ended.",
        "cluster:list_",
    ),
    Row(
        "watch",
        "Look",
        "Follow runs live: one line for each run, and every rank of the selected one.",
        "watch:watch",
    ),
    Row(
        "logs",
        "Look",
        "Print the output of a run's ranks, each line with its rank.",
        "cluster:logs",
    ),
    Row(
        "status",
        "Look",
        "Write one page to share, in Markdown: resources, runs, performance, next steps.",
        "watch:status",
    ),
    Row("bench", "Measure", "Measure how a job scales, and what holds it back.", rows=BENCH),
    Row(
        "report",
        "Measure",
        "Compare runs: speedup, efficiency, GPU-hours, cost, and which layout to take.",
        "report:report",
    ),
    Row(
        "doctor",
        "Diagnose",
        "Say what is wrong with a run, a log or this machine, and what to type.",
        "doctor:doctor",
    ),
)


class AllCommands(Commands):
    """What can follow `allranks`."""

    table = COMMANDS


app = typer.Typer(
    name="allranks",
    cls=AllCommands,
    help="From one GPU to many, with the speedup measured, not guessed.",
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def _allranks(
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    if version:
        from allranks import __version__

        print(__version__)
        raise typer.Exit


def main() -> NoReturn:
    """The console script, and `python -m allranks`."""
    from allranks.machine.processes import outlive_terminal

    arguments = sys.argv[1:]
    script = None
    if "--" in arguments:
        cut = arguments.index("--")
        arguments, script = arguments[:cut], arguments[cut + 1 :]
    keep_typed(arguments, script)
    outlive_terminal()
    try:
        sys.exit(app(arguments, prog_name="allranks", standalone_mode=False))
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # `allranks ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception as error:
        known = as_user_error(error)
        if known is None or "--debug" in arguments:
            raise
        from allranks.cli.options import print_error

        print_error(known, as_json="--json" in arguments)
        sys.exit(known.exit_code)


def as_user_error(error: Exception) -> AllranksError | None:
    """An error that its user can fix: ours, one of a file, or typer's about the arguments."""
    from allranks.errors import FULL, AllranksError, file_error

    if isinstance(error, AllranksError):
        return error
    if isinstance(error, OSError) and (error.filename or error.errno in FULL):
        return file_error(error)
    if hasattr(error, "format_message"):
        ctx = getattr(error, "ctx", None)
        command = ctx.command_path if ctx is not None else "allranks"
        return AllranksError(error.format_message(), fix=f"see {command} --help")
    return None
