"""What a run's own records tell besides its logs: that it hangs, has hung, or is slow. No torch."""

from __future__ import annotations

from allranks.doctor.finding import Finding
from allranks.doctor.hang import hang, hung
from allranks.doctor.slow import Thresholds, slow
from allranks.doctor.slow_facts import read_slow_facts
from allranks.rundir import RunDir, State


def stalled(run: RunDir, state: State, *, after: float | None = None) -> list[Finding]:
    """Why no rank gets on: before anything that the logs tell, which is what came of it.

    `after`: seconds without a step that are too many; by default the run's own steps tell.
    """
    if state == "running":
        return hang(run, after=after)
    return hung(run) if state == "failed" else []


def slowed(run: RunDir, state: State, limits: Thresholds | None = None) -> list[Finding]:
    """Why a run that trains, or has trained, is slow: after everything else there is to say."""
    if state not in ("running", "finished", "stopped"):
        return []
    facts = read_slow_facts(run)
    return slow(facts, limits) if facts is not None else []
