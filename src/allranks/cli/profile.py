"""`--profile`: what `run` does before and after a run that is to be traced."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from allranks.launch.prepare import Prepared
    from allranks.run.folder import RunDir

VARIABLE = "ALLRANKS_PROFILE"  # read by the probe of every rank
LOUDNESS = "KINETO_LOG_LEVEL"  # of torch's profiler; see probe/inject


def ask_for_profile(prepared: Prepared, steps: int | None) -> None:
    """Have the ranks of this attempt trace so many steps."""
    if steps is not None:
        prepared.variables[VARIABLE] = str(steps)


def show_profile(run: RunDir, console: Console) -> dict[str, Any] | None:
    """Summarise the traces of the run's last attempt; None, and why, if there are none."""
    from allranks.bench import profile, profile_screen

    found = profile.summarise(run)
    if found is None:
        console.print(f"note: no profile: {why_none(run)}", style="yellow", soft_wrap=True)
        return None
    profile.write(run, found, profile_screen.markdown(found))
    profile_screen.show(console, found)
    if found["device"] == "cpu" and any(one.get("with_device") for one in told(run)):
        note = f"note: nothing was recorded of the GPU: {LOUDNESS}=0 has torch's profiler say why"
        console.print(note, style="yellow", soft_wrap=True)
    return found


def told(run: RunDir) -> Iterator[dict[str, Any]]:
    """What the ranks of its last attempt said of their traces."""
    from allranks.run.events import read_events

    attempt = max(run.attempts(), default=0)
    for rank in run.ranks(attempt):
        yield from read_events(run.events(attempt, rank), kind="profile")


def why_none(run: RunDir) -> str:
    problems = (str(one["problem"]) for one in told(run) if "problem" in one)
    return next(problems, "no optimizer step was seen")
