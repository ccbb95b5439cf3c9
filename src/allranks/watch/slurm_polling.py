"""Asking SLURM how jobs stand: for all runs at once, seldom, and never in anyone's way."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from allranks.launch.backends import look
from allranks.run.folder import RunDir
from allranks.run.run_state import Queue

ASK_SECONDS = 10.0
MAX_SECONDS = 120.0
TIMES_ITS_ANSWER = 20  # a SLURM that takes long to answer is asked less often
CLOSE_SECONDS = 0.5
FIRST_SECONDS = 3.0  # what a first screen may wait for it

Ask = Callable[[Sequence[RunDir]], Queue]


class Asking:
    """The newest answer of SLURM. One thread asks; whoever wants to know never waits for it."""

    def __init__(self, ask: Ask = look, clock: Callable[[], float] = time.monotonic):
        self.answer = Queue()
        self.has_answered = False
        self._ask = ask
        self._clock = clock
        self._pause = ASK_SECONDS
        self._due = 0.0
        self._thread: threading.Thread | None = None

    def ask(self, runs: Sequence[RunDir], *, wait: float = 0.0) -> bool:
        """Ask if it is time to, and wait so long for the answer; whether one has come."""
        before = self.answer
        if runs and self._thread is None and self._clock() >= self._due:
            self._thread = threading.Thread(
                target=self._run, args=(list(runs),), name="slurm", daemon=True
            )
            self._thread.start()
        if self._thread is not None:
            self._thread.join(wait)
            if not self._thread.is_alive():
                self._thread = None
            elif not self.has_answered:
                self.answer = Queue(silent="it has not answered yet")
        return self.answer is not before

    def hurry(self) -> None:
        """Something was changed by the user: ask at the next occasion."""
        self._due = 0.0

    def _run(self, runs: list[RunDir]) -> None:
        begin = self._clock()
        answer = self._ask(runs)
        took = self._clock() - begin
        if answer.silent:
            self._pause = min(MAX_SECONDS, 2 * self._pause)
        else:
            self._pause = min(MAX_SECONDS, max(ASK_SECONDS, TIMES_ITS_ANSWER * took))
        self._due = self._clock() + self._pause
        self.has_answered = True
        self.answer = answer

    def close(self) -> None:
        """Nobody who leaves waits for SLURM: an open question ends with the process."""
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS)
