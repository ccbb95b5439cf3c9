"""What the ranks of a run read, by the fingerprints of early batches, and what is wrong with it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from allranks.run.folder import RunDir
from allranks.run.record import EARLY_EVENTS, RankRecord, read_ranks
from allranks.timing.steps import Timing

FEWEST_BATCHES = 2  # that must be equal for it not to be chance
UNEVEN = 0.02  # of the samples of a step
LEAST_EXCHANGED = 1e-5  # of a step
APART = "no exchange between its ranks was seen"

Fingerprints = dict[tuple[int, int], dict[str, Any]]  # by epoch and batch


def fingerprints(record: RankRecord) -> Fingerprints:
    """The fingerprints of the loader that a rank trains on; none if it is not clear which."""
    seen = [event for event in record.others["batch"] if event.get("trained", True)]
    loader = min((e["loader"] for e in seen if "loader" in e), default=None)
    found: Fingerprints = {}
    for event in seen:
        if event.get("loader") == loader:
            key = (int(event["epoch"]), int(event["batch"]))
            if key in found:
                return {}
            found[key] = dict(event)
    return found


def same_samples(seen: Mapping[int, Fingerprints]) -> list[int]:
    """The ranks that begin with the same batches; empty if none do."""
    by_content: defaultdict[tuple[Any, ...], list[int]] = defaultdict(list)
    for rank, prints in seen.items():
        first = [prints.get((1, batch), {}).get("content") for batch in range(FEWEST_BATCHES)]
        if all(value is not None for value in first) and len(set(first)) == len(first):
            by_content[tuple(first)].append(rank)
    return next((ranks for ranks in by_content.values() if len(ranks) > 1), [])


def same_order(seen: Mapping[int, Fingerprints]) -> bool:
    """Whether two epochs have the same shuffled order on every one of several ranks."""
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
    return len(alike) > 1 and all(alike)


def samples_by_rank(records: Mapping[int, RankRecord]) -> dict[int, float]:
    """Average samples of a step, over the steps that all ranks have made."""
    steps = {
        rank: {event["step"]: event["samples"] for event in record.steps if "samples" in event}
        for rank, record in records.items()
    }
    common = set.intersection(*map(set, steps.values())) if steps else set()
    if not common:
        return {}
    return {rank: sum(own[step] for step in common) / len(common) for rank, own in steps.items()}


def exchanges(timing: Timing) -> bool:
    """Whether its ranks were seen to wait for each other at all."""
    if timing.ranks < 2 or timing.parts is None:
        return True
    return timing.parts["comm"] + timing.parts["straggler"] > LEAST_EXCHANGED * timing.step_seconds


def remarks(
    run: RunDir, timing: Timing | None, records: Mapping[int, RankRecord] | None = None
) -> list[str]:
    """Why a run's pace may not be that of all ranks training together.

    `records`: those of its last attempt, if they were read already.
    """
    attempts = run.attempts()
    if not attempts or timing is None or timing.ranks < 2:
        return []
    if records is None:
        records = read_ranks(run, attempts[-1], EARLY_EVENTS)
    seen = {rank: fingerprints(record) for rank, record in records.items()}
    found = []
    if not exchanges(timing):
        found.append(
            f"{APART}: if each trains alone, their speeds only add up (init_process_group and "
            "DistributedDataParallel join them)"
        )
    if alike := same_samples(seen):
        ranks = ", ".join(map(str, alike[:8])) + (" …" if len(alike) > 8 else "")
        found.append(f"ranks {ranks} read the same samples: give the loader a DistributedSampler")
    if same_order(seen):
        found.append("every epoch has the same order: call sampler.set_epoch(epoch)")
    samples = samples_by_rank(records)
    if samples:
        least, most = (choose(samples, key=lambda rank: samples[rank]) for choose in (min, max))
        if samples[most] - samples[least] > UNEVEN * samples[most]:
            found.append(
                f"rank {most} trains on {samples[most]:,.1f} samples a step, rank {least} on "
                f"{samples[least]:,.1f}"
            )
    return found
