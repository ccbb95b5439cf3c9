"""Why results differ between layouts: batches, seeds and order, from the events of runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from allranks.doctor.catalogue import finding
from allranks.doctor.finding import Evidence, Finding, shown_path
from allranks.run.folder import RunDir
from allranks.run.record import EARLY_EVENTS, read_ranks
from allranks.timing.samples_seen import (
    Fingerprints,
    fingerprints,
    same_order,
    same_samples,
)


def data_findings(run: RunDir, attempt: int) -> list[Finding]:
    """Ranks or epochs that read the same samples."""
    records = read_ranks(run, attempt, EARLY_EVENTS)
    seen = {rank: fingerprints(record) for rank, record in records.items()}
    return [*_same_data(run, attempt, seen), *_same_order(run, attempt, seen)]


def _same_data(run: RunDir, attempt: int, seen: dict[int, Fingerprints]) -> list[Finding]:
    alike = same_samples(seen)
    if not alike:
        return []
    lines = [
        Evidence(shown_path(run.events(attempt, rank)), 0, _in_words(seen[rank][1, 0]))
        for rank in alike[:2]
    ]
    return [finding("ranks-read-same-data", lines, ranks=", ".join(map(str, alike)))]


def _same_order(run: RunDir, attempt: int, seen: dict[int, Fingerprints]) -> list[Finding]:
    if not same_order(seen):
        return []
    rank = min(seen)
    line = Evidence(shown_path(run.events(attempt, rank)), 0, _in_words(seen[rank][2, 0]))
    return [finding("missing-set-epoch", [line])]


def _in_words(event: dict[str, Any]) -> str:
    shown = {key: event[key] for key in ("epoch", "batch", "indices", "content") if key in event}
    return ", ".join(f"{key} {value}" for key, value in shown.items())


def compare(runs: Sequence[RunDir]) -> list[Finding]:
    """Why the results of runs of one job may differ: batch and seed."""
    known = [(run, facts) for run in runs if (facts := _step_facts(run))]
    if len(known) < 2:
        return []
    (first, before), (last, now) = known[0], known[-1]
    found = []
    lines = []
    for run, facts in ((first, before), (last, now)):
        words = f"{facts['samples']} samples per step on {facts['ranks']} ranks"
        lines.append(Evidence(shown_path(run.path / "job.yaml"), 0, words))
    if before["samples"] != now["samples"] and before["rate"] == now["rate"]:
        fields = {"before": str(before["samples"]), "now": str(now["samples"])}
        factor = f"{now['samples'] / before['samples']:g}"
        found.append(finding("effective-batch-grew", lines, **fields, factor=factor))
    if before["seed"] is not None and before["seed"] != now["seed"]:
        seeds = f"is {before['seed']} in one and {now['seed']} in the other"
        found.append(finding("seeds-differ", lines, seeds=seeds))
    return found


def _step_facts(run: RunDir) -> dict[str, Any] | None:
    """Samples per step, learning rate and seed of a run's last attempt."""
    attempts = run.attempts()
    if not attempts:
        return None
    samples = ranks = 0
    for record in read_ranks(run, attempts[-1], EARLY_EVENTS).values():
        if record.steps:
            samples, ranks = samples + int(record.steps[0].get("samples") or 0), ranks + 1
    job = run.job()
    rate = (job.get("optimizer") or {}).get("lr")
    seed = job.get("seed") if job.get("task") else None
    return {"samples": samples, "ranks": ranks, "rate": rate, "seed": seed} if samples else None
