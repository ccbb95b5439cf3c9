"""Where runs execute: one protocol and one table. A new backend is a module and a row here.

A backend is a module with the functions of `Backend`. `of(run)` names the backend of a run; `look`
and `stop` take runs of any backend.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from allranks.errors import AllranksError
from allranks.run.folder import RunDir, list_runs
from allranks.run.run_state import Queue, describe

if TYPE_CHECKING:
    from allranks.launch.node import Outcome, Place
    from allranks.launch.prepare import Prepared, Request
    from allranks.launch.screen import Screen
    from allranks.machine.processes import Signals

TABLE = {
    "local": "allranks.launch.backends.local",
    "slurm": "allranks.launch.backends.slurm.jobs",
    "ssh": "allranks.launch.backends.ssh",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to start a run, besides its job; each backend uses the options that it knows."""

    place: Place | None = None  # which node this is, where the user starts each one
    hosts: tuple[str, ...] = ()
    race: str | None = None  # layouts of which the first to start wins, as typed
    ladder: str | None = None  # layouts to climb while that pays, as typed
    min_efficiency: float = 0.85  # of a rung of the ladder
    ladder_steps: int = 200  # to measure on each rung
    after: tuple[str, ...] = ()  # jobs that must have ended before it starts
    screen: Screen | None = None  # None: nothing is shown
    signals: Signals | None = None


@dataclass(frozen=True, slots=True)
class Draft:
    """What would be started: a text for each layout, and a table of what they ask for."""

    scripts: dict[str, str]
    table: dict[str, dict[str, Any]]
    remarks: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Submitted:
    """A run in a queue, and the jobs that may start it."""

    run: RunDir
    jobs: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


class Backend(Protocol):
    """Where runs execute: handed to a queue (`is_queue`), or held by the user's own process."""

    is_queue: bool

    def check(self, request: Request, options: Options) -> Prepared:
        """The run to start; raises for everything that can be refused by now. Writes nothing."""

    def draft(self, prepared: Prepared, options: Options) -> Draft:
        """What `start` would start. Writes nothing."""

    def start(self, prepared: Prepared, options: Options) -> Outcome | Submitted:
        """Run it to its end, or put it into the queue."""

    def move(self, prepared: Prepared, options: Options) -> Outcome | Submitted:
        """Resume a run, in another layout if one was asked for; a running one is moved."""

    def look(self, runs: Sequence[RunDir]) -> Queue:
        """What is known about these runs besides what their folders say."""

    def stop(self, run: RunDir, queue: Queue, *, now: bool) -> str:
        """Stop a run at a checkpoint (`now`: at once); what was done, in words."""

    def on_nodes(self, run: RunDir, words: Sequence[str], seconds: float) -> str:
        """What `python WORDS` prints on every node of a running run; empty if nobody answers."""

    def suggestions(self, run: RunDir, described: dict[str, Any]) -> list[str]:
        """How a waiting run could start earlier: lines with what to type."""


def named(name: str) -> Backend:
    """The backend of this name; raises AllranksError if there is none."""
    if name not in TABLE:
        raise AllranksError(f"there is no backend {name}", fix=f"write one of {', '.join(TABLE)}")
    return cast(Backend, import_module(TABLE[name]))


def of(run: RunDir) -> str:
    """The name of a run's backend."""
    name = run.info().get("backend")
    return name if name in TABLE else "local"


def look(runs: Iterable[RunDir]) -> Queue:
    """What the backends of these runs know about them; each is asked once for all of its runs."""
    places: dict[str, list[RunDir]] = {}
    for run in runs:
        places.setdefault(of(run), []).append(run)
    found = Queue()
    for name, those in places.items():
        one = named(name).look(those)
        silent, says = (one.silent, one.name) if one.silent else (found.silent, found.name)
        found = Queue(found.jobs | one.jobs, found.ended | one.ended, silent, says)
    return found


def active_runs(folder: Path) -> list[RunDir]:
    """The runs of a folder that are queued or running."""
    known = list_runs(folder)
    queue = look(known)
    return [run for run in known if describe(run, queue)["state"] in ("queued", "running")]


def stop(runs: Iterable[RunDir], *, now: bool = False) -> list[dict[str, str]]:
    """Stop runs at a checkpoint (`now`: at once), wherever they are; what was done to each."""
    runs = list(runs)
    queue = look(runs)
    done = []
    for run in runs:
        try:
            said = named(of(run)).stop(run, queue, now=now)
        except AllranksError as error:
            if len(runs) == 1:
                raise
            said = f"could not be stopped: {error.what}"
        done.append({"run": run.name, "done": said})
    return done
