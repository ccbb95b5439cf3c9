"""Where the launchers of a job wait until their nodes are checked; after that they start ranks.

A launcher imports torch anyway, and so do the checks: each launcher forks those of its node. The
job's first process (allocation.py) judges. It opens the gate if all is well; if not, it ends the
step and has the nodes checked in a separate step, which finds out where the fault lies.
"""

from __future__ import annotations

import os
import runpy
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from allranks.errors import AllranksError
from allranks.launch.backends.slurm import node_checks
from allranks.launch.backends.slurm.node_checks import Verdict
from allranks.machine.processes import die_with_parent, quick_imports

# In the folder of the checks. Only the first node uses them: no network disk shows them late.
ENDED = "ended"  # its launcher: the checks are over
OPEN = "open"  # the job's first process: ranks may start
POLL_SECONDS = 0.02
MOST_SECONDS = 600.0  # that a launcher waits; a job that does not open the gate ends the step


class Gate:
    """The job's side. `opens` is called with what was found, just before ranks may start.

    `signals`: received by the job. If any, there is no time to judge: ranks must save at once.
    """

    def __init__(
        self,
        folder: Path,
        nodes: Sequence[str],
        *,
        seconds: float,
        signals: Sequence[object],
        opens: Callable[[Verdict], object],
    ) -> None:
        self.is_open: bool | None = None  # None: not judged yet
        self._folder = folder
        self._nodes = nodes
        self._until = time.monotonic() + seconds
        self._signals = signals
        self._opens = opens

    def judge(self) -> bool | None:
        """Whether ranks may start; None while that is not known."""
        if self.is_open is None and self._is_time():
            verdict = node_checks.verdict(self._folder, self._nodes)
            self.is_open = verdict.ok or bool(self._signals)
            if self.is_open:
                self._opens(verdict)
                (self._folder / OPEN).touch()
        return self.is_open

    def _is_time(self) -> bool:
        is_over = (self._folder / ENDED).exists()
        return is_over or bool(self._signals) or time.monotonic() > self._until


def pass_gate(
    words: Sequence[str], variables: Mapping[str, str], *, node_rank: int, num_nodes: int
) -> None:
    """The launcher's side: check this node, and wait until ranks may start. Before any thread.

    `words`: arguments of doctor/preflight.py; `variables`: what its environment has besides ours.
    """
    folder, launcher = Path(words[words.index("--folder") + 1]), os.getpid()
    if num_nodes > 1:  # one node on its own is checked without it
        _import_torch()
    checking = os.fork()
    if checking == 0:
        os.environ.update(variables)  # of this child alone
        _check(words, launcher)
    _import_torch()
    os.waitpid(checking, 0)  # it may hold a GPU; its time is limited
    if node_rank:
        return  # in rendezvous.py the others wait for the first node
    (folder / ENDED).touch()
    until = time.monotonic() + MOST_SECONDS
    while not (folder / OPEN).exists():
        if time.monotonic() > until:
            what = f"the checks of the nodes were not judged within {MOST_SECONDS:.0f} seconds"
            raise AllranksError(what, fix="send the job again", exit_code=1)
        time.sleep(POLL_SECONDS)


def _import_torch() -> None:
    with suppress(Exception), quick_imports():  # the checks say what is wrong
        from allranks.launch import agent  # noqa: F401


def _check(words: Sequence[str], launcher: int) -> NoReturn:
    """Run the node's checks and exit, which also frees whatever they hold on a GPU."""
    try:
        die_with_parent(launcher)
        sys.argv = ["allranks.doctor.preflight", *words]
        runpy.run_module("allranks.doctor.preflight", run_name="__main__")
    finally:
        os._exit(1)
