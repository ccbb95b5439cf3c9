"""Questions about runs that take long to answer: asked rarely, and by a thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from allranks.run.folder import RunDir
from allranks.watch.views import RunView

TIMES_ITS_ANSWER = 50  # so many times as long as the last answer took, it is not asked again
CLOSE_SECONDS = 0.5

Answer = TypeVar("Answer")


class Questions(Generic[Answer]):
    """The newest answer about each run. A thread asks, about one run at a time.

    Asked when a run begins, stalls or ends; while it runs, every `seconds` at most.
    """

    def __init__(self, ask: Callable[[RunDir], Answer], seconds: float) -> None:
        self._ask = ask  # must not raise
        self._seconds = seconds
        self._known: dict[str, Answer] = {}
        self._asked: dict[str, object] = {}  # what the run looked like then
        self._due: dict[str, float] = {}
        self._thread: threading.Thread | None = None
        self._has_news = False

    def of(self, run: str) -> Answer | None:
        """The newest answer about a run; None until there is one."""
        return self._known.get(run)

    def look(self, runs: Iterable[tuple[RunDir, RunView]]) -> bool:
        """Ask about one of these if it is time to; returns whether an answer has come."""
        if self._thread is None or not self._thread.is_alive():
            due = next((run for run, view in runs if self._is_due(view)), None)
            if due is not None:
                self._thread = threading.Thread(
                    target=self._find, args=(due,), name="question", daemon=True
                )
                self._thread.start()
        has_news, self._has_news = self._has_news, False
        return has_news

    def close(self) -> None:
        """Wait only briefly: an open question ends with the process."""
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS)

    def _is_due(self, view: RunView) -> bool:
        sign = (view.state, view.attempt, view.stalled)
        is_due = view.state == "running" and time.monotonic() >= self._due.get(view.run, 0.0)
        if sign == self._asked.get(view.run) and not is_due:
            return False
        self._asked[view.run] = sign
        return True

    def _find(self, run: RunDir) -> None:
        begin = time.monotonic()
        answer = self._ask(run)
        now = time.monotonic()
        self._due[run.name] = now + max(self._seconds, TIMES_ITS_ANSWER * (now - begin))
        self._known[run.name] = answer
        self._has_news = True
