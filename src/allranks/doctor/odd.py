"""The one rank that is unlike the others: whose call differs, or who did not come."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Mapping

from allranks.doctor.facts import MAX_RANKS, Facts
from allranks.doctor.silence import UNEQUAL, collectives_of, group_of

# What ProcessGroupWrapper (TORCH_DISTRIBUTED_DEBUG=DETAIL) says of a rank's call.
FINGERPRINT = re.compile(
    r"Rank (?P<rank>\d+) is running collective: "
    r"CollectiveFingerPrint\((?P<call>.{0,400}?)(?:, TensorDeviceTypes|\))"
)
MAX_TOLD = 4
SHAPE = re.compile(r"TensorShape=\[[^\]]*\]")
# A rank that compares the tensors of its own call tells of itself alone.
OWN = re.compile(r"ProcessGroup\w+::\w+: invalid tensor (?:size|type) at index")


def odd_one(values: Mapping[int, Hashable], num_ranks: int) -> int | None:
    """The rank whose value no other has, where all others agree.

    None if those that are not known could be on its side, and be as many.
    """
    counts = Counter(values.values())
    if len(counts) != 2 or 1 not in counts.values():
        return None
    unknown = max(0, num_ranks - len(values))
    if max(counts.values()) <= 1 + unknown:
        return None
    return next(rank for rank, value in values.items() if counts[value] == 1)


def other_call(facts: Facts) -> tuple[int | None, str]:
    """The rank whose call no other has, if there is one; and what differs, in words."""
    calls = _fingerprints(facts)
    rank = odd_one(calls, len(facts.ranks))
    if rank is not None:
        usual = next(call for one, call in calls.items() if one != rank)
        return rank, f": {_short(calls[rank])} on rank {rank}, {_short(usual)} on the others"
    if len(set(calls.values())) > 1:
        told = [f"{_short(calls[rank])} on rank {rank}" for rank in sorted(calls)[:MAX_TOLD]]
        return None, f": {', '.join(told)}"
    rank = _own_fault(facts)
    if rank is not None:
        return rank, ""
    of_groups: list[Mapping[int, Hashable]] = [*_watched(facts).values(), collectives_of(facts)]
    for of_group in of_groups:
        rank = odd_one(of_group, len(facts.ranks))
        if rank is not None:
            return rank, ""
    return None, ""


def _fingerprints(facts: Facts) -> dict[int, str]:
    """What each rank called, as ranks say of themselves and of one other."""
    calls: dict[int, str] = {}
    for hit in facts.of("collective-mismatch"):
        for index, found in enumerate(FINGERPRINT.finditer(hit.line.text)):
            number = int(found["rank"])
            if index == 0 and hit.rank is not None and hit.rank != number:
                return {}  # of a group of some ranks, which counts them anew
            calls[number] = found["call"]
    return calls


def _short(call: str) -> str:
    kind = re.search(r"OpType=(\w+)", call)
    shape = SHAPE.search(call)
    return f"{kind[1] if kind else 'a call'} {shape[0].partition('=')[2] if shape else ''}".strip()


def _own_fault(facts: Facts) -> int | None:
    told = [hit for hit in facts.of("collective-mismatch") if OWN.search(hit.line.text)]
    ranks = {hit.rank for hit in told}
    return ranks.pop() if len(ranks) == 1 and len(facts.ranks) > 1 else None


def _watched(facts: Facts) -> dict[str | None, dict[int, Hashable]]:
    """The call that each rank waited in, by process group, as NCCL's watchdog tells it."""
    groups: dict[str | None, dict[int, Hashable]] = {}
    for hit in facts.of("collective-timeout"):
        if "seq" in hit.fields and hit.rank is not None:
            op = hit.fields["op"]
            size = None if any(word in op for word in UNEQUAL) else hit.fields.get("numel")
            calls = groups.setdefault(group_of(hit), {})
            calls.setdefault(hit.rank, (hit.fields["seq"], op, size))
    return groups


def first_nonfinite(facts: Facts) -> tuple[int, list[int]] | None:
    """The first step at which a rank's own loss was no number, and of which ranks it was none."""
    steps = {
        hit.rank: int(hit.fields["step"])
        for hit in facts.of("nan-loss")
        if hit.rank is not None and '"event":"nonfinite"' in hit.line.text and "step" in hit.fields
    }
    if not steps:
        return None
    first = min(steps.values())
    return first, sorted(rank for rank, step in steps.items() if step == first)


def absent(facts: Facts, num_ranks: int | None) -> int | None:
    """The one rank that never came to the rendezvous, where that is certain."""
    hits = facts.of("rendezvous-timeout")
    is_served = any("joined" in hit.fields and "clients" in hit.line.text for hit in hits)
    awaited = {int(hit.fields["awaited"]) for hit in hits if "awaited" in hit.fields}
    # Rank 0 that serves the store says so when nobody comes, and before that it waits itself.
    if is_served or not facts.of("agent-block"):
        awaited.discard(0)
    if len(awaited) == 1:
        return awaited.pop()
    came = {hit.rank for hit in [*hits, *facts.of("store-lost")]}
    came |= {int(hit.fields["reporter"]) for hit in hits if "reporter" in hit.fields}
    came |= {0} if is_served else set()
    joined = {int(hit.fields["joined"]) for hit in hits if hit.fields.get("joined", "").isdigit()}
    num_joined = max(joined, default=None)
    if num_joined is not None:
        came |= _gave_up(facts, num_joined)
    if not num_ranks or num_ranks > MAX_RANKS:
        return None
    missing = set(range(num_ranks)) - came
    if len(missing) != 1 or num_joined not in (None, len(came - {None})):
        return None
    return missing.pop()


def _gave_up(facts: Facts, num_joined: int) -> set[int | None]:
    """Ranks that a launcher saw fail, if they are as many as came and as say that they waited."""
    failed = {end.rank for end in facts.ends.values() if end.is_own and not end.is_crash}
    told = {(id(hit.source), hit.number) for hit in facts.of("rendezvous-timeout")}
    return {*failed} if len(failed) == len(told) == num_joined else set()
