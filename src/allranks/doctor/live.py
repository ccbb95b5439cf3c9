"""What a run's own records tell besides its logs: that it hangs, has hung, or is slow. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from allranks.doctor.catalogue import load
from allranks.doctor.finding import Evidence, Finding
from allranks.doctor.hang import hang, hung
from allranks.doctor.judge import shown_path
from allranks.doctor.slow import Thresholds, slow
from allranks.doctor.slow_facts import read_slow_facts
from allranks.run.folder import ODD, RunDir, State


def stalled(run: RunDir, state: State, *, after: float | None = None) -> list[Finding]:
    """Why no rank gets on: before anything that the logs tell, which is what came of it.

    `after`: seconds without a step that are too many; by default the run's own steps tell.
    """
    if state == "running":
        return hang(run, after=after)
    return hung(run) if state in ("failed", "stopped") else []


def slowed(run: RunDir, state: State, limits: Thresholds | None = None) -> list[Finding]:
    """Why a run that trains, or has trained, is slow: after everything else there is to say."""
    if state not in ("running", "finished", "stopped"):
        return []
    facts = read_slow_facts(run)
    return slow(facts, limits) if facts is not None else []


def odd_folder(run: RunDir) -> list[Finding]:
    """A finding if a folder holds what it should not: other findings may be wrong because of it."""
    problem = run.problem()
    if problem is None:
        return []
    cause, fields = load()["odd-run-folder"], {"problem": problem.removeprefix(ODD)}
    line = Evidence(shown_path(run.path), 0, problem)
    title, fix = cause.words(fields), cause.advice(fields)
    return [Finding(cause.slug, title, fix, None, None, cause.confidence, (line,))]


# What logs say of a run that has hung: ranks that waited, or were ended for it.
ECHOES = ("rank-missing-from-collective", "rank-died", "terminated-by-signal", "rank-raised")


def together(
    by_logs: Sequence[Finding], stalls: Sequence[Finding], slowness: Sequence[Finding]
) -> list[Finding]:
    """All findings in order: a hang before its echoes in the logs, slowness after everything."""
    rest = list(by_logs)
    if stalls:
        ranks = {None, *(one.rank for one in stalls)}
        rest = [one for one in rest if one.cause not in ECHOES or one.rank not in ranks]
    # Something else that a rank said for certain may be why it did not get on.
    is_echo = not rest or rest[0].cause in ECHOES or rest[0].confidence != "high"
    return [*stalls, *rest, *slowness] if is_echo else [*rest, *stalls, *slowness]
