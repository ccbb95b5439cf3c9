"""Makes the runs of a benchmark, one after another, here or in a queue.

After a Ctrl-C, what was measured so far is kept and shown, and the exit code is 130.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from rich.console import Console
from rich.text import Text

from allranks.errors import STOPPED_AT_ONCE, AllranksError
from allranks.launch import backends, checks, node, screen
from allranks.launch.backends import Backend, Options, Submitted, local
from allranks.launch.prepare import Prepared
from allranks.machine.processes import listening
from allranks.run import run_state
from allranks.run.failures import failure, failure_in_words, lacked_memory
from allranks.run.folder import RunDir
from allranks.timing.steps import Timing, why_no_pace

T = TypeVar("T")
LOOK_SECONDS, MOST_LOOK_SECONDS = 2.0, 30.0  # between looks at the queue


@dataclass(frozen=True, slots=True)
class Result:
    """How a benchmark ended; `found` is what `--json` prints."""

    found: dict[str, Any]
    error: AllranksError | None = None  # why something that was asked for is not in it
    is_interrupted: bool = False
    how_far: str = "this is what had been measured by then"
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Ended:
    """A run that was to be measured; `run` is None if it could not be started."""

    name: str  # a layout or a precision; repeats have the same one
    run: RunDir | None
    error: AllranksError | None = None

    @property
    def lacked_memory(self) -> bool:
        """Whether it did not fit: its ranks ran out of memory."""
        broken = failure(self.run) if self.run is not None else None
        return broken is not None and lacked_memory(broken)

    def problem(self, measured: Timing | None) -> str | None:
        """Why it has no samples a second, with the fix; None if `measured` has them."""
        if self.run is None:
            return "; ".join(filter(None, (self.error.what, self.error.fix))) if self.error else ""
        broken = failure(self.run)
        if broken is None:
            return why_no_pace(self.run, measured)
        fix = broken.get("error", {}).get("fix") or f"see {broken['log']}"
        return f"{failure_in_words(broken)}: {fix}"


@dataclass(slots=True)
class Series:
    """Runs to measure, by name. If one fails, its reader may leave out the repeats."""

    planned: Sequence[tuple[str, Prepared]]
    console: Console
    record: dict[str, Any]  # in every run's folder: the benchmark that it belongs to
    left_out: set[str] = field(default_factory=set)
    is_interrupted: bool = False  # by a Ctrl-C

    def here(
        self,
        read: Callable[[Ended], T],
        shown: screen.Screen | None = None,
        *,
        makes_steps: bool = True,
        oversubscribe: bool = False,
    ) -> list[T]:
        """Run after run on this machine, on a quiet screen unless another is given.

        `read` is called with each run that ended. `makes_steps`: whether to expect step events.
        """
        for _, one in self.planned:
            local.ranks_here(one, node.Place())  # refuses all before the first has run
        checks.check_supported(*(one.job for _, one in self.planned))
        remarks = checks.warnings(*(one.job for _, one in self.planned))
        if not oversubscribe:
            for _, one in self.planned:
                remarks += checks.check_machine(one.layout, here=one.layout.ranks, is_measured=True)
        for remark in dict.fromkeys(remarks) if shown is None else ():
            self.console.print(f"note: {remark}", highlight=False)
        place = node.Place(oversubscribe=oversubscribe)
        done: list[T] = []
        with listening() as signals:  # a signal between two runs ends the next one
            for number, (name, prepared) in enumerate(self.planned, start=1):
                if name in self.left_out:
                    continue
                self._begin(number, name)
                quiet = shown or screen.QuietScreen(self.console, makes_steps=makes_steps)
                try:
                    # A repeat is a new run: it must not share what an earlier one decided.
                    one = replace(prepared, bench=self.record)
                    outcome = local.run_here(one, place, quiet, signals)
                    ended = Ended(name, outcome.run, outcome.error)
                except AllranksError as error:
                    if not done and error.exit_code == 2:  # the command is wrong: all would fail
                        raise
                    ended = Ended(name, None, error)
                done.append(read(ended))
                self.is_interrupted = bool(signals.received)
                if self.is_interrupted:
                    break
        return done

    def how_far(self, problems: Iterable[str | None]) -> str:
        measured = sum(not problem for problem in problems)
        return f"{measured} of {len(self.planned)} runs were measured"

    def _begin(self, number: int, name: str) -> None:
        if self.console.is_terminal and len(self.planned) > 1:
            text = f"{number}/{len(self.planned)}  {name} …"
            self.console.print(Text(text, style="dim"), end="\r")

    def in_queue(
        self, queue: Backend, read: Callable[[Ended], T], optional: str | None = None
    ) -> list[T]:
        """Submit all at once, to run one after another; then wait until they have left the queue.

        `optional`: the name that is left out if the queue refuses it.
        """
        done: list[T] = []
        waiting: list[tuple[str, RunDir]] = []
        pause = LOOK_SECONDS
        try:
            done += map(read, self._send(queue, waiting, optional))
            while waiting:
                found = queue.look([run for _, run in waiting])
                for name, run in list(waiting):
                    if run_state.describe(run, found)["state"] not in ("queued", "running"):
                        waiting.remove((name, run))
                        done.append(read(Ended(name, run)))
                time.sleep(pause if waiting else 0)
                pause = min(MOST_LOOK_SECONDS, 1.2 * pause)
        except KeyboardInterrupt:
            self.is_interrupted = True
            names = " ".join(run.name for _, run in waiting)
            words = f"{len(waiting)} runs stay queued or running; to stop them: allranks stop"
            self.console.print(Text(f"{words} {names}", style="yellow"), soft_wrap=True)
        return done

    def _send(
        self, queue: Backend, waiting: list[tuple[str, RunDir]], optional: str | None
    ) -> list[Ended]:
        """Submit each to start when the one before has ended: together they would disturb.

        If one is refused, those before it are stopped. Returns what was left out.
        """
        checks.check_supported(*(one.job for _, one in self.planned))
        before: list[str] = []
        refused: list[Ended] = []
        for name, prepared in self.planned:
            if name in self.left_out:
                continue
            # A measured task stops as at a time limit: it must not be submitted again.
            slurm = prepared.job.slurm.model_copy(update={"requeue": False})
            job = prepared.job.model_copy(update={"slurm": slurm})
            try:
                one = replace(prepared, job=job, bench=self.record)
                sent = queue.start(one, Options(after=tuple(before)))
                assert isinstance(sent, Submitted)
            except AllranksError as error:
                if name != optional:
                    raise taken_back(error, name, [run for _, run in waiting]) from error
                self.left_out.add(name)
                refused.append(Ended(name, None, error))
                continue
            before = sent.jobs
            waiting.append((name, sent.run))
            said = Text(f"queued {name}: {sent.run.name}", style="dim")
            self.console.print(said, soft_wrap=True)
        return refused


def taken_back(error: AllranksError, name: str, runs: list[RunDir]) -> AllranksError:
    """The error of a refused run, after stopping those that were submitted before it."""
    what, fix = f"{name}: {error.what}", error.fix
    names = " ".join(run.name for run in runs)
    try:
        done = [*dict.fromkeys(one["done"] for one in backends.stop(runs))] if runs else []
    except AllranksError as silent:
        done = [f"could not be stopped: {silent.what}"]
    if runs:
        what += f"; submitted before it: {names} ({', '.join(done)})"
    if any("could not be stopped" in words for words in done):
        fix += f"; to stop what is still in the queue: allranks stop {names}"
    return AllranksError(what, fix=fix, exit_code=error.exit_code)


def stopped_early() -> AllranksError:
    return AllranksError(
        "stopped before anything was measured", fix="let it run longer", exit_code=STOPPED_AT_ONCE
    )
