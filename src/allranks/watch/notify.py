"""Telling the user's own command what has become of a run, once for each change."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Iterable
from dataclasses import dataclass

from allranks.run.events import to_json
from allranks.watch.views import RunView

TIMEOUT_SECONDS = 60
TOLD = ("finished", "failed", "stopped")


@dataclass(frozen=True, slots=True)
class News:
    """One run, and what has become of it: finished, failed, stopped or stalled."""

    run: RunView
    state: str

    def environment(self) -> dict[str, str]:
        return {
            "ALLRANKS_RUN": self.run.run,
            "ALLRANKS_RUN_DIR": self.run.run_dir,
            "ALLRANKS_STATE": self.state,
            "ALLRANKS_REASON": self.run.reason or "",
        }

    def as_json(self) -> str:
        kept = self.run.as_json()
        for curve in ("losses", "loss_steps"):
            del kept[curve]
        return to_json({**kept, "state": self.state})


class Changes:
    """Remembers how runs stood. What had ended before it was first looked at is no news."""

    def __init__(self) -> None:
        self._before: dict[str, str] = {}

    def since(self, runs: Iterable[RunView]) -> list[News]:
        """What has changed since the last call."""
        news = []
        for run in runs:
            word = "stalled" if run.stalled else run.state
            before = self._before.get(run.run)
            self._before[run.run] = word
            was_going = before in ("queued", "running", "stalled")
            if was_going and word != before and word in (*TOLD, "stalled"):
                news.append(News(run, word))
        return news


class Notifier:
    """Calls the command in the background; what goes wrong with it is kept to be shown."""

    def __init__(self, command: str) -> None:
        self.command = command
        self.problems: list[str] = []
        self._changes = Changes()
        self._threads: list[threading.Thread] = []

    def look(self, runs: Iterable[RunView]) -> list[News]:
        news = self._changes.since(runs)
        for one in news:
            thread = threading.Thread(target=self._tell, args=(one,), name="notify", daemon=True)
            thread.start()
            self._threads.append(thread)
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        return news

    def close(self) -> None:
        """What was begun is finished: the last run's end is what most wait for."""
        for thread in self._threads:
            thread.join()

    def _tell(self, news: News) -> None:
        problem = call(self.command, news)
        if problem:
            self.problems.append(problem)


def call(command: str, news: News) -> str | None:
    """Run the user's command for one piece of news; what went wrong, in a line."""
    try:
        done = subprocess.run(
            command,
            shell=True,  # it is the user's own line, as typed
            input=news.as_json(),
            env={**os.environ, **news.environment()},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"--notify: {error}"
    if done.returncode == 0:
        return None
    said = (done.stderr or done.stdout).strip().splitlines()
    return f"--notify ended with code {done.returncode}" + (f": {said[-1]}" if said else "")
