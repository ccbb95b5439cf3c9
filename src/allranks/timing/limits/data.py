"""What is said about a run that waits for its data: what its loader has, and what it lacks."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from allranks.show.numbers import count, duration
from allranks.timing.limits.facts import Facts, Said, device_means

ONE_RANK = 0.05  # of a step: one rank is to blame if it waits this much more than twice any other
ALL_CPUS = 0.9  # of the machine's: if more are in use, none are left for more workers
MEASURES = "allranks bench data measures loading"
MANY_WORKERS = 32  # of a rank: more of them would hardly wait less
BURST = 0.8  # of the time for data: if a few steps take more, it is spent on starting workers


def data(facts: Facts) -> Said:
    seconds = facts.found.timing.data_seconds
    worst = max(seconds, key=lambda rank: seconds[rank])
    others = [took for rank, took in seconds.items() if rank != worst]
    least = ONE_RANK * facts.found.timing.step_seconds
    is_one = bool(others) and seconds[worst] > 2 * max(others) + least
    who = "training waits for its loader" if facts.is_alone else "ranks wait for their loaders"
    who = f"rank {worst} waits for its loader" if is_one else who
    because, cause, fix = loader_words(facts, worst, is_one=is_one)
    beside = f" on rank {worst}, at most {duration(max(others))} on others" if others else ""
    return Said(
        why=f"{who} {facts.share('data')} of the time ({because})",
        next=fix,
        cause=cause,
        evidence=f"data {duration(seconds[worst])}{beside}; {facts.of_step(facts.seconds('data'))}",
        rank=worst if is_one else None,
    )


def loader_of(facts: Facts, rank: int) -> Mapping[str, Any] | None:
    """The settings of a script's training loader."""
    said = facts.records[rank].others["loader"]
    return said[-1] if said else None


def workers_of(facts: Facts, rank: int) -> int | None:
    record = facts.records[rank]
    loader = loader_of(facts, rank) or record.start
    if loader.get("num_workers") is not None:
        return int(loader["num_workers"])
    seen = [int(one["num_workers"]) for one in record.devices if "num_workers" in one]
    return round(statistics.median(seen)) if seen else None


def loader_words(facts: Facts, rank: int, *, is_one: bool) -> tuple[str, str, str]:
    """Why a loader is slow, under which cause, and what to type."""
    workers, cpus, per_node = workers_of(facts, rank), facts.cpus, facts.per_node
    fair = max(2, (cpus or 4 * per_node) // per_node - 1)
    if workers is None:
        return "the number of workers is not known", "data-bound", staging(facts)
    is_full = cpus is not None and in_use(facts) > ALL_CPUS * cpus
    full = f"more CPUs per rank, or samples that load faster; {MEASURES}"
    if workers == 0:
        few = "too-few-workers" if not is_one else "data-bound"
        more = more_workers(facts, rank, fair, persistent_workers=True)
        return "no workers", few, full if is_full else more
    if cpus and workers * per_node > 2 * cpus and is_full:
        many = f"{workers * per_node} workers share {cpus} CPUs"
        return many, "too-many-workers", more_workers(facts, rank, fair)
    whose = "its" if is_one or facts.is_alone else "each rank's"
    known = f"{whose} {count(workers, 'worker')} {'is' if workers == 1 else 'are'}"
    loader, node = loader_of(facts, rank) or {}, facts.node_of(rank)
    if loader.get("persistent_workers") is False and facts.found.burst > BURST:
        again = f"{known} started again in every epoch"
        return again, "data-bound", "DataLoader(..., persistent_workers=True)"
    if is_one:
        there = f" of {node}" if node else ""
        fix = f"look at the disk and the CPUs{there} (iostat -x 1, top), and at the files it reads"
        return "the others hardly wait: its disk, CPUs or data must differ", "data-bound", fix
    busy = device_means(facts.records[rank]).get("workers_cpu", 0.0) / workers
    if busy < facts.limits.busy and not is_full:  # more of them can wait for the disk at once
        is_enough = workers >= MANY_WORKERS
        more = staging(facts) if is_enough else more_workers(facts, rank, max(fair, 2 * workers))
        return f"{known} often idle: the disk or the network may be slow", "data-bound", more
    if is_full:
        return f"{known} always busy, and so are all {cpus} CPUs", "too-few-workers", full
    return (
        f"{known} always busy",
        "too-few-workers",
        more_workers(facts, rank, max(fair, workers + 1)),
    )


def more_workers(facts: Facts, rank: int, workers: int, **settings: Any) -> str:
    if facts.is_task:
        return f"data.num_workers={workers}; allranks bench data finds how many are needed"
    more = "".join(f", {name}={value}" for name, value in settings.items())
    # Otherwise each worker would yield all samples.
    shares = ", and in the data set a share for each worker (torch.utils.data.get_worker_info)"
    is_iterable = bool((loader_of(facts, rank) or {}).get("iterable"))
    return f"DataLoader(..., num_workers={workers}{more})" + shares * is_iterable


def staging(facts: Facts) -> str:
    if facts.is_task:
        return "data.stage=local keeps the data on the node's own disk, or data.num_workers=…"
    return f"stage: in a job file for this script copies its data to the node's disk; {MEASURES}"


def in_use(facts: Facts) -> float:
    """CPUs that the ranks of a node and their workers use, on average over the nodes."""
    means = [device_means(one) for one in facts.records.values()]
    each = [one.get("cpu", 0.0) + one.get("workers_cpu", 0.0) for one in means]
    return sum(each) / max(1, len(facts.nodes))
