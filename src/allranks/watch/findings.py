"""What the doctor says of the runs that are looked at, asked beside the reading."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from allranks.run.folder import RunDir
from allranks.show.secrets import redact, redact_all
from allranks.watch.live import Watcher
from allranks.watch.views import RunView

DIAGNOSE_SECONDS = 60.0
DIAGNOSE_STALLED_SECONDS = 600.0

Diagnose = Callable[[RunDir], list[dict[str, Any]]]


class Findings:
    """Its answers, by run. One thread asks, of one run at a time."""

    def __init__(self, diagnose: Diagnose | None) -> None:
        self._diagnose = diagnose
        self._known: dict[str, dict[str, Any]] = {}
        self._asked: dict[str, tuple[object, float]] = {}
        self._thread: threading.Thread | None = None
        self._has_news = False

    def of(self, run: str) -> dict[str, Any] | None:
        """None: there is no doctor. `list` is null until it has answered."""
        if self._diagnose is None:
            return None
        return self._known.get(run, {"list": None, "problem": None})

    def look(self, watcher: Watcher, names: set[str]) -> bool:
        """Ask where it is due, one run at a time; whether an answer has come."""
        if self._diagnose is None:
            return False
        if self._thread is None or not self._thread.is_alive():
            for view in watcher.runs():
                run = watcher.run_dir(view.run)
                if view.run in names and run is not None and self._is_due(view.run, view):
                    self._thread = threading.Thread(
                        target=self._ask, args=(run,), name="findings", daemon=True
                    )
                    self._thread.start()
                    break
        has_news, self._has_news = self._has_news, False
        return has_news

    def _is_due(self, name: str, view: RunView) -> bool:
        sign = (view.state, view.attempt, view.stalled)
        before, asked = self._asked.get(name, (None, 0.0))
        now = time.monotonic()
        # One that stands still is looked at with stack dumps, on its nodes: seldom.
        pause = DIAGNOSE_STALLED_SECONDS if view.stalled else DIAGNOSE_SECONDS
        if sign == before and (view.state != "running" or now - asked < pause):
            return False
        self._asked[name] = (sign, now)
        return True

    def _ask(self, run: RunDir) -> None:
        assert self._diagnose is not None
        try:
            found = {"list": redact_all(self._diagnose(run)), "problem": None}
        except Exception as error:  # the page goes on without it, and says so
            found = {"list": [], "problem": redact(f"{type(error).__name__}: {error}")}
        self._known[run.name] = found
        self._has_news = True
