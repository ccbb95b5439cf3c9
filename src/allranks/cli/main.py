"""The table of commands, and the console script: what was typed goes to one command."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from allranks.cli.commands import Commands, Row, keep_typed
from allranks.errors import STOPPED_AT_ONCE

if TYPE_CHECKING:
    from allranks.errors import AllranksError

BENCH = {
    "Measure": (
        Row("scaling", "bench", "Measure a job, or your script after `--`, on several layouts."),
        Row("comm", "bench", "Measure the network between ranks: latency and bandwidth by size."),
        Row(
            "data",
            "bench",
            "Measure data loading: how many workers it needs, what limits it.",
        ),
        Row("precision", "bench", "Measure a task in fp32, tf32, fp16, bf16: speed, memory, loss."),
        Row("comm-opt", "bench", "Measure ways of sending less between ranks: bytes, speed, loss."),
    )
}

# In the order in which people use them.
COMMANDS = {
    "Train": (
        Row("init", "train", "Write a commented job.yaml and its JSON schema."),
        Row("run", "train", "Train a job, or your own script after `--`, here or over ssh."),
        Row("explain", "train", "Show what the ranks of a layout would hold and send."),
        Row("resume", "cluster", "Continue a run, on another layout if you like."),
        Row("stop", "cluster", "Stop runs at a checkpoint, from which `resume` continues."),
        Row("export", "train", "Write a run's weights to a file that needs no allranks."),
    ),
    "Cluster": (
        Row("cluster", "cluster", "Show what this cluster, or this machine, has."),
        Row("submit", "cluster", "Send a job, or your own script after `--`, to SLURM."),
        Row("race", "cluster", "Add layouts to a queued run: the first to start wins."),
    ),
    "Look": (
        Row("ls", "cluster", "List runs: state, progress, time left, why they wait or ended."),
        Row("watch", "watch", "Follow runs live, and every rank of the selected one."),
        Row("logs", "cluster", "Print the output of a run's ranks, each line with its rank."),
        Row("status", "watch", "Write a Markdown page to share: runs, speed, next steps."),
    ),
    "Measure": (
        Row("bench", "", "Measure how a job scales, and what holds it back.", BENCH),
        Row(
            "report", "report", "Compare runs: speedup, efficiency, cost, and which layout to use."
        ),
    ),
    "Diagnose": (
        Row("doctor", "doctor", "Diagnose a run, a log or this machine, and say how to fix it."),
    ),
}


class AllCommands(Commands):
    """What can follow `allranks`."""

    panels = COMMANDS


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
        sys.exit(STOPPED_AT_ONCE)
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
