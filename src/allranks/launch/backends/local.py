"""Runs on this machine: held by the process that the user started, which runs their ranks."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import Any

from allranks.errors import AllranksError
from allranks.launch import checks, prepare
from allranks.launch.backends import Draft, Options
from allranks.launch.backends.slurm.in_job import check_allocation
from allranks.launch.meeting import split_master
from allranks.launch.node import Launch, Outcome, Place
from allranks.launch.prepare import Prepared, Request
from allranks.launch.screen import Screen
from allranks.machine.processes import Signals, listening, output_of
from allranks.run.folder import RunDir
from allranks.run.run_state import Queue
from allranks.show.numbers import duration
from allranks.show.text import clean
from allranks.timing.result import result

is_queue = False
AT_ONCE_SECONDS = 30.0  # for a run that is to end at once


def check(request: Request, options: Options) -> Prepared:
    """The run to start, if this machine can hold its ranks."""
    prepared = prepare.prepare(request)
    place = place_of(prepared, options)
    here = ranks_here(prepared, place)
    checks.check_supported(prepared.job)
    checks.check_machine(prepared.layout, here=here, oversubscribe=place.oversubscribe)
    return prepared


def draft(prepared: Prepared, options: Options) -> Draft:
    """The command of each rank."""
    run = prepared.run or RunDir(prepared.request.runs.absolute() / f"{prepared.job.name}-RUN")
    words = [sys.executable, "-m", "allranks.launch.rank_env"]
    if prepared.job.command is not None:
        words = prepare.fill_command(prepared, run, prepared.attempt)
    layout = prepared.layout
    row = {"ranks": layout.ranks, "from": prepared.checkpoint or "step 0"}
    remarks = checks.warnings(prepared.job)
    return Draft({str(layout): shlex.join(words) + "\n"}, {str(layout): row}, remarks)


def start(prepared: Prepared, options: Options) -> Outcome:
    """Run it to its end."""
    assert options.screen is not None
    return run_here(prepared, place_of(prepared, options), options.screen, options.signals)


move = start  # `check` has refused a running one


def place_of(prepared: Prepared, options: Options) -> Place:
    """How to start it: as was typed, or else as the run's last attempt was started."""
    run = prepared.run
    if options.place is not None or run is None:
        return options.place or Place()
    for number in reversed(run.attempts()):
        with suppress(OSError, ValueError, TypeError):  # a restart, or an earlier version's
            last = prepare.read_attempt(run.attempt(number) / prepare.ATTEMPT_FILE)
            return Place(max_restarts=last.max_restarts, oversubscribe=last.oversubscribe)
    return Place()


def look(runs: Sequence[RunDir]) -> Queue:
    """Nothing: the folders of local runs say it all."""
    return Queue()


def suggestions(run: RunDir, described: dict[str, Any]) -> list[str]:
    """None: local runs never wait."""
    return []


def run_here(
    prepared: Prepared, place: Place, screen: Screen, signals: Signals | None = None
) -> Outcome:
    """Run a prepared job to its end on this machine. `signals`: to see those that came."""
    here = ranks_here(prepared, place)
    checks.check_supported(prepared.job)
    remarks = checks.check_machine(prepared.layout, here=here, oversubscribe=place.oversubscribe)
    if place.node_rank is None and prepared.layout.nodes > 1:
        remarks.append(
            f"all {prepared.layout.nodes} nodes of the layout are simulated on this machine"
        )
    remarks += checks.warnings(prepared.job)
    if (done := finished(prepared, screen)) is not None:
        return done
    checks.check_command(prepared.job)
    remarks += checks.settle_precision(prepared)
    with ExitStack() as held:
        signals = signals or held.enter_context(listening())
        if prepared.request.leads:
            prepared = prepare.hold_run(prepared, held)
            run = prepare.open_run(prepared)  # before the seconds that importing torch takes
            host, port = split_master(place.master)
            prepare.write_attempt(prepared, run, nodes=(host,), port=port, **place.kept)
        launch = Launch(prepared, place, here, signals, screen)
        for remark in [*remarks, *prepared.remarks]:
            screen.remark(remark)
        return launch.run_to_end()


def finished(prepared: Prepared, screen: Screen) -> Outcome | None:
    """The outcome of a run that is finished already; None if there is something to do."""
    extends = any(change["key"] != "layout" for change in prepared.changes)
    if prepared.run is None or prepared.run.state() != "finished" or extends:
        return None
    screen.remark(f"run {prepared.run.name} has already finished")
    return Outcome(prepared.run, result(prepared.run), 0)


def ranks_here(prepared: Prepared, place: Place) -> int:
    layout = prepared.layout
    if place.node_rank is None:
        if place.master is not None:
            raise AllranksError("--master is given without --node-rank", fix="add --node-rank N")
        check_allocation(layout, prepared.request, os.environ)
        return layout.ranks
    if place.master is None and layout.nodes > 1:
        raise AllranksError(
            "--node-rank is given without --master",
            fix="add --master HOST:29500, HOST being the machine of node 0",
        )
    if not 0 <= place.node_rank < layout.nodes:
        raise AllranksError(
            f"--node-rank {place.node_rank} is not a node of layout {layout}",
            fix=f"write --node-rank 0 to {layout.nodes - 1}, or a layout of more nodes",
        )
    return layout.gpus


def on_nodes(run: RunDir, words: Sequence[str], seconds: float) -> str:
    """What `python WORDS` prints on this machine."""
    return output_of([sys.executable, *words], seconds) or ""


def will_stop(run: RunDir) -> str:
    """What a run does when it is told to stop, in words."""
    with suppress(AllranksError):  # it is only about a word
        if prepare.load_resolved(run).command is not None:
            # The signal goes to the user's script, which may do anything with it.
            return "its script was asked to stop"
    return "saves a checkpoint and stops"


def stop(run: RunDir, queue: Queue, *, now: bool) -> str:
    """Signal the process that holds a run, on this machine."""
    if not run.is_live():
        return f"already {run.state()}"
    process, host = run.holder()
    if host != socket.gethostname():
        raise AllranksError(
            f"run {run.name} is on {clean(host)}, not on this machine",
            fix=f"run the same command on {clean(host)}",
        )
    if not _signal(run, process, signal.SIGINT if now else signal.SIGTERM):
        return f"already {run.ended_state()}"
    if not now:
        return will_stop(run)
    time.sleep(0.5)
    _signal(run, process, signal.SIGINT)  # a second one: at once
    if not comes_true(lambda: not run.is_live()):
        raise AllranksError(
            f"run {run.name} was told to stop at once, but process {process} still holds it after "
            f"{duration(AT_ONCE_SECONDS, whole=True)}",
            fix=f"kill -9 {process} ends it and its ranks",
            exit_code=1,
        )
    return "stopped at once"


def _signal(run: RunDir, process: int, number: signal.Signals) -> bool:
    """Signal the run's launcher; False if it has ended. Raises if that process is another one."""
    try:
        is_launcher = run.is_open_in(process)
        if is_launcher:
            os.kill(process, number)
    except ProcessLookupError:
        is_launcher = False
    except PermissionError:
        raise AllranksError(
            f"run {run.name} is another user's", fix="ask its user to stop it", exit_code=1
        ) from None
    if not is_launcher and run.is_live():
        raise AllranksError(
            f"run {run.name} is live, but process {process}, which its folder names, is not what "
            "runs it: nothing was stopped",
            fix=f"see who holds it: fuser -v {run.path}/.lock",
            exit_code=1,
        )
    return is_launcher


def comes_true(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + AT_ONCE_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True
