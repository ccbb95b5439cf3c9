"""Which ranks of a script compute one copy of its model together, so that samples count once.

Ranks that exchange activations do, if they read the same samples: they divide tensors, a pipeline
or a sequence. Experts exchange activations of different samples, and ranks that read
the same samples without such exchanges do the same work twice, by mistake.
"""

from __future__ import annotations

from collections.abc import Mapping
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

    That one is the first with a loader. A task's ranks write their counts like this themselves.
    """
    prints = {rank: fingerprints(record) for rank, record in records.items()}
    share, unknown = shares(records, prints)
    for one in set(share.values()):
        members = [rank for rank in share if share[rank] == one]
        counting = next((rank for rank in members if prints[rank]), members[0])
        for rank in members if len(members) > 1 else ():
            records[rank].start = {**records[rank].start, "data_rank": one}
            if rank != counting:
                records[rank].count_nothing()
        before = records[counting].counted
        who = set[int]().union(*(unknown.get(rank, ()) for rank in members))
        if who and before.samples != "unknown":
            how = "once" if who <= {*members} else "for each rank"
            why = f"{ranks_in_words(who)} exchange activations, but may or may not work on "
            why += f"the same samples: counted {how}"
            doubt = {"samples": "about", "epochs": before.epochs, "why": why}
            records[counting].others["counted"].append(doubt)


def shares(
    records: Mapping[int, RankRecord], prints: Mapping[int, Fingerprints]
) -> tuple[dict[int, int], dict[int, set[int]]]:
    """For each rank, the first of those that share its samples; and for whom that is unknown.

    Activations are summed, or passed on, only for the same samples: a rank without a loader is
    taken to read what the others read. The first stage of a pipeline may read the inputs, and the
    last one the labels: then only their indices agree.
    """
    share, unknown = {rank: rank for rank in records}, dict[int, set[int]]()
    content, indices = (
        {rank: first_batches(each, key) for rank, each in prints.items()}
        for key in ("content", "indices")
    )
    for ranks in joined(groups(records, sums=True)):
        for key in (content, indices):
            join_equal(share, ranks, key)
        blind = {rank for rank in ranks if content[rank] is None and indices[rank] is None}
        copies = {share[rank] for rank in ranks - blind}
        if blind and len(copies) < 2:
            join(share, ranks)
        if (len(copies) != 1 and blind) or any(prints[rank] for rank in blind):
            unknown |= dict.fromkeys(ranks, ranks)
    for ranks in groups(records, sums=False):
        key = {rank: indices[rank] if content[rank] is None else content[rank] for rank in ranks}
        join_equal(share, ranks, key)
        known = {share[rank] for rank in ranks if key[rank] is not None}
        if not {share[rank] for rank in ranks} <= known and len({share[r] for r in ranks}) > 1:
            unknown |= dict.fromkeys(ranks, ranks)
    return share, unknown


def groups(records: Mapping[int, RankRecord], *, sums: bool) -> list[set[int]]:
    """The groups of ranks that exchange activations: those that sum or pass them on, or others."""
    events = (event for record in records.values() for event in record.others["divided"])
    found = {frozenset(each["ranks"]) for each in events if bool(each.get("sums")) == sums}
    return [{*ranks} & {*records} for ranks in sorted(found, key=sorted)]


def joined(found: list[set[int]]) -> list[set[int]]:
    """The groups, with those that have ranks in common as one."""
    whole: list[set[int]] = []
    for ranks in found:
        near = [one for one in whole if one & ranks]
        whole = [one for one in whole if one not in near] + [ranks.union(*near)]
    return whole


def join_equal(share: dict[int, int], ranks: set[int], key: Mapping[int, Any]) -> None:
    """Let the ranks with equal keys share their samples."""
    equal: dict[Any, set[int]] = {}
    for rank in ranks:
        if key[rank] is not None:
            equal.setdefault(key[rank], set()).add(rank)
    for same in equal.values():
        join(share, same)


def join(share: dict[int, int], ranks: set[int]) -> None:
    """Let these ranks share their samples."""
    gone = {share[rank] for rank in ranks}
    if len(gone) > 1:
        share |= {rank: min(gone) for rank, of in share.items() if of in gone}
