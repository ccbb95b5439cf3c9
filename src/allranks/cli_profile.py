"""`--profile`: what `run` does before and after a run that is to be traced."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from allranks.rundir import RunDir

VARIABLE = "ALLRANKS_PROFILE"  # read by the probe of every rank


def ask_for_profile(steps: int | None) -> None:
    """Have the ranks of this process trace so many steps."""
    if steps is not None:
        os.environ[VARIABLE] = str(steps)


def show_profile(run: RunDir, console: Console) -> dict[str, Any] | None:
    """Summarise the traces of the run's last attempt; None, and why, if there are none."""
    from allranks.measure import profile, profile_screen

    found = profile.summarise(run)
    if found is None:
        console.print(f"note: no profile: {why_none(run)}", style="yellow", soft_wrap=True)
        return None
    profile.write(run, found, profile_screen.markdown(found))
    profile_screen.show(console, found)
    return found


def why_none(run: RunDir) -> str:
    from allranks.events import read_events

    attempt = max(run.attempts(), default=0)
    for rank in run.ranks(attempt):
        for event in read_events(run.events(attempt, rank)):
            if event["event"] == "profile" and "problem" in event:
                return str(event["problem"])
    return "no optimizer step was seen"
