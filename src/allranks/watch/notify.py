"""Runs the user's `--notify` command once for each change of a run's state."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Iterable

from allranks.run.events import to_json
from allranks.watch.views import RunView

TIMEOUT_SECONDS = 60
REPORTED = ("finished", "failed", "stopped", "stalled")


class Notifier:
    """Runs the command in the background; problems with it are kept to be shown."""

    def __init__(self, command: str) -> None:
        self.command = command
        self.problems: list[str] = []
        self._states: dict[str, str] = {}
        self._threads: list[threading.Thread] = []

    def look(self, runs: Iterable[RunView]) -> dict[str, str]:
        """Report the runs whose state has changed since the last look, and return these states.

        What had ended before the first look is not news.
        """
        news = {}
        for run in runs:
            state = "stalled" if run.stalled else run.state
            before = self._states.get(run.run)
            self._states[run.run] = state
            was_active = before in ("queued", "running", "stalled")
            if was_active and state != before and state in REPORTED:
                news[run.run] = state
                thread = threading.Thread(
                    target=self._report, args=(run, state), name="notify", daemon=True
                )
                thread.start()
                self._threads.append(thread)
        return news

    def close(self) -> None:
        """Wait for commands that are running: most users wait for the end of the last run."""
        for thread in self._threads:
            thread.join()

    def _report(self, run: RunView, state: str) -> None:
        content = run.as_json() | {"state": state}
        for curve in ("losses", "loss_steps"):
            del content[curve]
        variables = {
            "ALLRANKS_RUN": run.run,
            "ALLRANKS_RUN_DIR": run.run_dir,
            "ALLRANKS_STATE": state,
            "ALLRANKS_REASON": run.reason or "",
        }
        try:
            done = subprocess.run(
                self.command,
                shell=True,  # it is the user's own command line
                input=to_json(content),
                env=os.environ | variables,
                capture_output=True,
                text=True,
                timeout=TIMEOUT_SECONDS,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            self.problems.append(f"--notify: {error}")
            return
        if done.returncode:
            said = (done.stderr or done.stdout).strip().splitlines()
            last = f": {said[-1]}" if said else ""
            self.problems.append(f"--notify ended with code {done.returncode}{last}")
