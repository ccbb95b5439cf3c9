"""Why a run is slower than its machine could be: the run's verdict, as a finding."""

from __future__ import annotations

from dataclasses import replace

from allranks.doctor.catalogue import finding
from allranks.doctor.finding import Confidence, Evidence, Finding
from allranks.doctor.log_search import num_lines
from allranks.run.folder import RunDir
from allranks.timing.limits.facts import Thresholds
from allranks.timing.limits.ranks import nccl_lines
from allranks.timing.verdict import Verdict, Warning, judge

SOCKETS = "sockets-instead-of-infiniband"
MOST_LINES = 4  # of a log, as evidence


def slow(run: RunDir, limits: Thresholds | None = None) -> list[Finding]:
    """What limits a run, if that can be changed, and memory that grows; empty if computing does."""
    found = judge(run, thresholds=limits)
    verdict = found.verdict
    limit = [] if verdict.cause is None else [finding_of(verdict, verdict.cause, run)]
    return [*limit, *(warned_of(warning, run) for warning in found.warnings)]


def warned_of(warning: Warning, run: RunDir) -> Finding:
    """What will go wrong if the run goes on; its kind is the name of the cause."""
    attempt = run.attempts()[-1]
    path = run.events(attempt, min(run.ranks(attempt)))
    known = finding(warning.kind, [Evidence(str(path), num_lines(path), warning.text)])
    return replace(known, title=warning.text[0].upper() + warning.text[1:])


def finding_of(verdict: Verdict, cause: str, run: RunDir) -> Finding:
    attempt = run.attempts()[-1]
    shown = verdict.rank if verdict.rank is not None else min(run.ranks(attempt))
    start = run.start(attempt, shown) or {}
    known = finding(cause, evidence_of(verdict, run, attempt, shown))
    unsure: Confidence = "medium" if known.confidence == "high" else known.confidence
    title = verdict.why if verdict.limit != "too-short" else f"too short to judge: {verdict.why}"
    return replace(
        known,
        title=title[0].upper() + title[1:],
        fix=verdict.next or known.fix,
        rank=verdict.rank,
        node=start.get("host") if verdict.rank is not None else None,
        confidence="high" if verdict.sure else unsure,
    )


def evidence_of(verdict: Verdict, run: RunDir, attempt: int, rank: int) -> list[Evidence]:
    """The numbers, placed at the last of the rank's events; and what NCCL says."""
    path = run.events(attempt, rank)
    measured = Evidence(str(path), num_lines(path), verdict.evidence)
    if verdict.cause != SOCKETS:
        return [measured]
    said = nccl_lines(run.log(attempt, one) for one in run.ranks(attempt))
    return [*(Evidence(*line) for line in said[:MOST_LINES]), measured]
