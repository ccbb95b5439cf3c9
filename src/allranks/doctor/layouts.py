"""Results that differ between layouts: what the events of runs tell of batches, seeds and order."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from allranks.doctor.catalogue import load
from allranks.doctor.finding import Evidence, Finding
from allranks.doctor.judge import shown_path
from allranks.doctor.left import job_of
from allranks.events import read_events
from allranks.rundir import RunDir

MAX_EVENTS = 4000  # of a rank: the first batches and steps
FEWEST_BATCHES = 2  # that must be alike before it is no chance

Fingerprints = dict[tuple[int, int], dict[str, Any]]


def data_findings(run: RunDir, attempt: int) -> list[Finding]:
    """Ranks or epochs that read the same samples."""
    seen = {rank: _fingerprints(run, attempt, rank) for rank in run.ranks(attempt)}
    return [*_same_data(run, attempt, seen), *_same_order(run, attempt, seen)]


def _first_events(run: RunDir, attempt: int, rank: int) -> list[dict[str, Any]]:
    found = []
    for event in read_events(run.events(attempt, rank)):
        found.append(event)
        if len(found) >= MAX_EVENTS:
            break
    return found


def _fingerprints(run: RunDir, attempt: int, rank: int) -> Fingerprints:
    """By epoch and batch; where a script has several loaders, none: they cannot be told apart."""
    found: Fingerprints = {}
    for event in _first_events(run, attempt, rank):
        if event["event"] == "batch":
            key = (int(event["epoch"]), int(event["batch"]))
            if key in found:
                return {}
            found[key] = event
    return found


def _same_data(run: RunDir, attempt: int, seen: dict[int, Fingerprints]) -> list[Finding]:
    by_content: defaultdict[tuple[Any, ...], list[int]] = defaultdict(list)
    for rank, prints in seen.items():
        first = [prints.get((1, batch), {}).get("content") for batch in range(FEWEST_BATCHES)]
        if all(value is not None for value in first) and len(set(first)) == len(first):
            by_content[tuple(first)].append(rank)
    alike = [ranks for ranks in by_content.values() if len(ranks) > 1]
    if not alike:
        return []
    ranks = ", ".join(map(str, alike[0]))
    lines = [
        Evidence(shown_path(run.events(attempt, rank)), 0, _in_words(seen[rank][1, 0]))
        for rank in alike[0][:2]
    ]
    return [_finding("ranks-read-same-data", {"ranks": ranks}, lines)]


def _same_order(run: RunDir, attempt: int, seen: dict[int, Fingerprints]) -> list[Finding]:
    """Both epochs alike on every rank, and not simply from the first sample to the last."""
    alike = []
    for prints in seen.values():
        pairs = [
            (prints[1, batch], prints[2, batch])
            for batch in range(64)
            if (1, batch) in prints and (2, batch) in prints
        ]
        same = [
            one
            for one, other in pairs
            if one.get("indices") is not None and one["indices"] == other.get("indices")
        ]
        shuffled = any(one.get("sorted") is False for one in same)
        alike.append(len(pairs) >= FEWEST_BATCHES and len(same) == len(pairs) and shuffled)
    if len(alike) < 2 or not all(alike):
        return []
    rank = min(seen)
    line = Evidence(shown_path(run.events(attempt, rank)), 0, _in_words(seen[rank][2, 0]))
    return [_finding("missing-set-epoch", {}, [line])]


def _in_words(event: dict[str, Any]) -> str:
    shown = {key: event[key] for key in ("epoch", "batch", "indices", "content") if key in event}
    return ", ".join(f"{key} {value}" for key, value in shown.items())


def _finding(slug: str, fields: dict[str, str], lines: Sequence[Evidence]) -> Finding:
    cause = load()[slug]
    title, fix = cause.words(fields), cause.advice(fields)
    return Finding(slug, title, fix, None, None, cause.confidence, tuple(lines))


def compare(runs: Sequence[RunDir]) -> list[Finding]:
    """Why the results of runs of one job may differ: batch and seed."""
    known = [(run, facts) for run in runs if (facts := _step_facts(run))]
    if len(known) < 2:
        return []
    (first, before), (last, now) = known[0], known[-1]
    found = []
    lines = []
    for run, facts in ((first, before), (last, now)):
        words = f"{facts['samples']} samples a step on {facts['ranks']} ranks"
        lines.append(Evidence(shown_path(run.path / "job.yaml"), 0, words))
    if before["samples"] != now["samples"] and before["rate"] == now["rate"]:
        factor = now["samples"] / before["samples"]
        fields = {
            "before": str(before["samples"]),
            "now": str(now["samples"]),
            "factor": f"{factor:g}",
        }
        found.append(_finding("effective-batch-grew", fields, lines))
    if before["seed"] is not None and before["seed"] != now["seed"]:
        fields = {"seeds": f" is {before['seed']} in one and {now['seed']} in the other"}
        found.append(_finding("seeds-differ", fields, lines))
    return found


def _step_facts(run: RunDir) -> dict[str, Any] | None:
    """Samples of a whole step, learning rate and seed of a run's last attempt."""
    attempts = run.attempts()
    if not attempts:
        return None
    samples = ranks = 0
    for rank in run.ranks(attempts[-1]):
        steps = [one for one in _first_events(run, attempts[-1], rank) if one["event"] == "step"]
        if steps:
            samples, ranks = samples + int(steps[0].get("samples") or 0), ranks + 1
    job = job_of(run)
    rate = (job.get("optimizer") or {}).get("lr")
    seed = job.get("seed") if job.get("task") else None
    return {"samples": samples, "ranks": ranks, "rate": rate, "seed": seed} if samples else None
