"""Who did not come? In a hang the ranks that print are the ones that wait."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from allranks.doctor.facts import Facts
from allranks.doctor.finding import Confidence
from allranks.doctor.scan import Hit

ECHOES = ("collective-timeout", "peer-closed", "store-lost")


@dataclass(frozen=True, slots=True)
class Suspect:
    """What follows from echoes: the cause, the rank, and the lines that tell."""

    slug: str
    rank: int | None
    confidence: Confidence
    hits: Sequence[Hit]
    fields: dict[str, str]


def suspect(facts: Facts) -> Suspect | None:
    """The cause behind the ranks' complaints about each other; None if nobody complains."""
    echoes = [hit for slug in ECHOES for hit in facts.of(slug) if not hit.line.is_warning]
    if not echoes or not any(facts.is_final(hit) for hit in echoes):
        return None
    timeouts = [hit for hit in echoes if hit.cause.slug == "collective-timeout"]
    died = _died(facts, echoes)
    if died is not None and (not timeouts or facts.ends[died].is_crash):
        end = facts.ends[died]
        hits = [end.hit, *echoes] if end.hit is not None else echoes
        how = {"how": f" {end.in_words}"}
        return Suspect("rank-died", died, "high" if end.is_crash else "medium", hits, how)
    if timeouts:
        return _missing(facts, timeouts, echoes)
    return _left(facts, echoes)


def _died(facts: Facts, echoes: Sequence[Hit]) -> int | None:
    """The rank that ended by itself and said nothing of its own."""
    spoke = {hit.rank for hit in echoes} | {one.rank for one in facts.raised}
    own = [
        end
        for end in facts.ends.values()
        if not end.is_by_launcher and (end.signal or end.code) and end.rank not in spoke
    ]
    # NCCL's watchdog aborts ranks that have waited too long: an abort after a timeout is an echo.
    own.sort(key=lambda end: (not end.is_crash, not end.is_first, end.rank))
    return own[0].rank if own else None


def _missing(facts: Facts, timeouts: Sequence[Hit], echoes: Sequence[Hit]) -> Suspect:
    """Some waited until their time was over."""
    progress = _progress(facts)
    ops = {hit.fields["op"] for hit in timeouts if "op" in hit.fields}
    fields = {"op_words": f" ({', '.join(sorted(ops))})"} if ops else {}
    tellers = [*timeouts[:3], *facts.of("collective-progress")[:4]]
    if len(progress) > 1 and min(progress.values()) < max(progress.values()):
        rank = min(progress, key=lambda one: (progress[one], one))
        return Suspect("rank-missing-from-collective", rank, "high", tellers, fields)
    sequences = {
        (hit.fields["seq"], hit.fields["op"], hit.fields.get("numel"))
        for hit in timeouts
        if "seq" in hit.fields
    }
    if len({one[0] for one in sequences}) == 1 and len(sequences) > 1:
        return Suspect("collective-mismatch", None, "high", tellers, fields)
    silent = _silent(facts, echoes)
    left = [rank for rank in silent if facts.ends and rank not in facts.ends]
    if left and len(left) == len(silent):  # it ended well, while the others still had work
        return Suspect("uneven-inputs", left[0], "medium", tellers, fields)
    rank = silent[0] if len(silent) == 1 or (silent and facts.ends) else None
    sure: Confidence = "high" if len(silent) == 1 else "medium"
    return Suspect("rank-missing-from-collective", rank, sure, tellers, fields)


def _left(facts: Facts, echoes: Sequence[Hit]) -> Suspect:
    """Connections broke, and nobody says why."""
    silent = _silent(facts, echoes)
    left = [rank for rank in silent if facts.ends and rank not in facts.ends]
    if left and len(left) == len(silent):
        return Suspect("uneven-inputs", left[0], "medium", echoes[:4], {})
    rank = silent[0] if len(silent) == 1 else None
    return Suspect("rank-died", rank, "medium", echoes[:4], {"how": " without a message"})


def _silent(facts: Facts, echoes: Sequence[Hit]) -> list[int]:
    spoke = {hit.rank for hit in echoes}
    return sorted(rank for rank in facts.ranks if rank not in spoke) if spoke - {None} else []


def _progress(facts: Facts) -> dict[int, int]:
    """The last collective that each rank has begun."""
    found: dict[int, int] = {}
    for hit in facts.of("collective-progress"):
        if hit.rank is not None:
            found[hit.rank] = max(found.get(hit.rank, -1), int(hit.fields["enqueued"]))
    return found
