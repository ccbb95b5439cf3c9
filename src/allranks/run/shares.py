"""Which ranks of a script compute one copy of its model together, so that samples count once.

Ranks that exchange activations do, if they read the same samples: those of a tensor, a pipeline or
a sequence that is divided. Experts exchange activations of different samples, and ranks that read
the same samples without such exchanges do the same work twice, by mistake.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from typing import TYPE_CHECKING, Any

from allranks.show.numbers import ranks_in_words

if TYPE_CHECKING:
    from allranks.run.record import RankRecord

FEWEST_BATCHES = 2  # that must be equal to rule out chance
EARLY_KINDS = ("batch", "divided")  # events that are read here; written in the first steps

Fingerprints = dict[tuple[int, int], dict[str, Any]]  # by epoch and batch


def fingerprints(record: RankRecord) -> Fingerprints:
    """The fingerprints of the loader that a rank trains on; empty if it is not clear which."""
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


def counted_prints(records: Mapping[int, RankRecord]) -> dict[int, Fingerprints]:
    """The fingerprints of all ranks whose samples are counted."""
    return {rank: fingerprints(record) for rank, record in records.items() if record.counts}


def first_batches(prints: Fingerprints, key: str) -> tuple[Any, ...] | None:
    """The first batches by their `content` or `indices`; None if these do not tell them apart."""
    first = tuple(prints.get((1, batch), {}).get(key) for batch in range(FEWEST_BATCHES))
    return first if None not in first and len(set(first)) == len(first) else None


def count_once(records: Mapping[int, RankRecord]) -> None:
    """Leave the samples of ranks that compute one copy of the model to one of them.

    It is the one whose samples were seen in a loader. A task's ranks write their counts like that.
    """
    prints = {rank: fingerprints(record) for rank, record in records.items()}
    share, doubts = shares(records, prints)
    if all(rank == of for rank, of in share.items()) and not doubts:
        return
    for one in set(share.values()):
        members = [rank for rank in share if share[rank] == one]
        counts = next((rank for rank in members if prints[rank]), members[0])
        for rank in members:
            records[rank].start = {**records[rank].start, "data_rank": one}
            if rank != counts:
                records[rank].count_nothing()
        if doubt := next((doubts[rank] for rank in members if rank in doubts), None):
            records[counts].others["counted"].append(doubt | {"epochs": "measured"})


def shares(
    records: Mapping[int, RankRecord], prints: Mapping[int, Fingerprints]
) -> tuple[dict[int, int], dict[int, dict[str, Any]]]:
    """The first rank of those that each one shares its samples with; and doubts about that."""
    share = {rank: rank for rank in records}
    doubts: dict[int, dict[str, Any]] = {}
    for (one, other), sums in sorted(links(records).items()):
        is_same = are_same(prints[one], prints[other], sums)
        if is_same is None:
            # A rank without a loader is given what the other reads; without any, nobody knows.
            if not sums or bool(prints[one]) == bool(prints[other]):
                who = f"{ranks_in_words([one, other])} exchange activations, and whether they work "
                assumed = ": they are taken to" if sums else ", so these may count twice"
                why = f"{who}on the same samples was not seen{assumed}"
                doubts[one] = doubts[other] = {"samples": "about", "why": why}
            is_same = sums
        if is_same:
            kept, gone = sorted((share[one], share[other]))
            share = {rank: kept if of == gone else of for rank, of in share.items()}
    return share, doubts


def links(records: Mapping[int, RankRecord]) -> dict[tuple[int, int], bool]:
    """The pairs of ranks that exchange activations; whether these are summed or passed on."""
    found: dict[tuple[int, int], bool] = {}
    for record in records.values():
        for event in record.others["divided"]:
            ranks = sorted(rank for rank in event["ranks"] if rank in records)
            for pair in combinations(ranks, 2):
                found[pair] = found.get(pair, False) or bool(event.get("sums"))
    return found


def are_same(one: Fingerprints, other: Fingerprints, sums: bool) -> bool | None:
    """Whether two ranks that exchange activations read the same samples; None if not known.

    The first stage of a pipeline may read the inputs, and the last one the labels: then only their
    indices agree.
    """
    found = []
    for key in ("content", "indices"):
        mine, theirs = first_batches(one, key), first_batches(other, key)
        if mine is not None and theirs is not None:
            found.append(mine == theirs)
    return (any(found) if sums else found[0]) if found else None
