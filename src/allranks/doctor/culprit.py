"""Which rank is to blame, from what all ranks print: which did not join, or whose call differs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence, Set
from dataclasses import dataclass, field

from allranks.doctor.failure_facts import MAX_RANKS, End, FailureFacts
from allranks.doctor.finding import Confidence, Evidence
from allranks.doctor.log_search import Hit
from allranks.doctor.tracebacks import Raised

# [PG ID 1 PG GUID 3(tp) Rank 0], [PG 1 Rank 0]
GROUP = re.compile(r"\[PG (?:ID )?(?:(?P<id>\d+) ?)?(?:PG )?(?:GUID (?P<guid>[^\s\]()]+))?")
ECHOES = ("collective-timeout", "collective-dumped", "peer-closed", "store-lost")
# Ranks may pass different numbers of elements to these.
UNEQUAL = ("ALLTOALL", "GATHER", "SCATTER", "SEND", "RECV")
Call = tuple[str, str, str | None]  # number, kind and elements of a collective


LEVELS = {"root": 0, "soft": 1, "generic": 2}
# Among causes that say little, those that say more come first.
GENERIC = (
    *("uneven-inputs", "rank-raised", "rank-died", "kernel-segfault", "nccl-connect-failed"),
    "terminated-by-signal",
)


@dataclass(slots=True)
class Candidate:
    """A possible cause, the rank to blame, and the lines that show it."""

    slug: str
    rank: int | None
    confidence: Confidence
    hits: Sequence[Hit] = ()
    fields: dict[str, str] = field(default_factory=dict)
    level: int = LEVELS["generic"]
    extra: tuple[Evidence, ...] = ()
    order: int = 0
    is_passed: bool = False  # the work continued after it

    @property
    def key(self) -> tuple[int, int, int]:
        """Candidates are sorted by this, the most likely first cause first."""
        is_generic = self.slug in GENERIC and self.level == LEVELS["generic"]
        place = GENERIC.index(self.slug) if is_generic else len(GENERIC)
        return self.level, place, self.order


def suspect(facts: FailureFacts) -> Candidate | None:
    """The cause behind the ranks' complaints about each other; None if nobody complains."""
    echoes = echoes_of(facts)
    if not echoes or not any(facts.is_final(hit) for hit in echoes):
        return None
    timeouts = [hit for hit in echoes if hit.cause.slug == "collective-timeout"]
    if not any(hit.cause.slug == "peer-closed" for hit in echoes):
        timeouts += [hit for hit in echoes if hit.cause.slug == "collective-dumped"]
    spoke = {hit.rank for hit in echoes} | {one.rank for one in facts.raised}
    own = [
        end
        for end in own_ends(facts, spoke)
        if end.rank not in _gave_up_waiting(facts, timeouts)
        # A line without a rank may have been printed by this one before it ended.
        and (end.is_crash or all(hit.rank is not None for hit in echoes))
    ]
    for end in own[:1]:
        hits = [end.hit, *echoes] if end.hit is not None else echoes
        sure: Confidence = "high" if end.is_certain else "medium"
        return Candidate(end.cause, end.rank, sure, hits, {"how": end.in_words})
    if timeouts:
        return _missing(facts, timeouts, echoes)
    return _left(facts, echoes)


def echoes_of(facts: FailureFacts) -> list[Hit]:
    """What ranks print because another rank is in trouble."""
    return [hit for slug in ECHOES for hit in facts.hits_of(slug) if not hit.line.is_warning]


def own_ends(facts: FailureFacts, spoke: Set[int | None]) -> list[End]:
    """The ranks that failed by themselves and said nothing, the most telling end first."""
    own = [end for end in facts.ends.values() if end.is_own and end.rank not in spoke]
    return sorted(own, key=lambda end: (not end.is_crash, not end.is_first, end.rank))


def _gave_up_waiting(facts: FailureFacts, timeouts: Sequence[Hit]) -> set[int]:
    """Ranks that aborted after a collective timed out, as torch's watchdog makes them do."""
    ends = [(end.rank, end.hit) for end in facts.ends.values() if end.signal == "SIGABRT"]
    return {
        rank
        for rank, hit in ends
        if hit is not None
        and any(one.source is hit.source and one.number < hit.number for one in timeouts)
    }


def _missing(facts: FailureFacts, timeouts: Sequence[Hit], echoes: Sequence[Hit]) -> Candidate:
    """The suspect if some ranks waited until they timed out."""
    ops = {hit.fields["op"] for hit in timeouts if "op" in hit.fields}
    fields = {"ops": ", ".join(sorted(ops))} if ops else {}
    tellers = [*timeouts[:3], *facts.hits_of("collective-progress")[:4]]
    if _is_stuck(facts, timeouts):
        return Candidate("collective-mismatch", None, "medium", tellers, fields)
    behind = _behind(facts, timeouts)
    if behind is not None:
        slowest, sure = behind
        return Candidate("rank-missing-from-collective", slowest, sure, tellers, fields)
    late = _late(facts, timeouts, echoes)
    if late is not None:
        return Candidate("rank-missing-from-collective", late, "medium", tellers, fields)
    differs = _differs(timeouts)
    if differs is not None:
        return Candidate("collective-mismatch", None, differs, tellers, fields)
    apart = _apart(facts, echoes, tellers)
    if apart is not None:
        return apart
    waited = _gave_up_waiting(facts, timeouts)
    silent = [rank for rank in _silent(facts, echoes) if rank not in waited]
    left = _ended_well(facts, silent, echoes)
    if left is not None:
        return Candidate("uneven-inputs", left, "medium", tellers, fields)
    rank = silent[0] if len(silent) == 1 or (silent and facts.ends) else None
    return Candidate("rank-missing-from-collective", rank, "medium", tellers, fields)


def _late(facts: FailureFacts, timeouts: Sequence[Hit], echoes: Sequence[Hit]) -> int | None:
    """The one rank that arrived after those that waited for it had gone."""
    waited = {hit.rank for hit in timeouts}
    came = {hit.rank for hit in echoes if hit.cause.slug == "peer-closed"} - waited
    # If yet another is silent, all may have waited for that one, and this one less long.
    if None in waited | came or len(came) != 1 or facts.ranks - waited - came:
        return None
    calls = collectives_of(facts)
    at, then = ({calls[rank] for rank in calls if rank in some} for some in (waited, came))
    if at and then and not at & then:
        return None  # it arrived at another call than the one they waited in
    last = {id(hit.source): hit.number for hit in sorted(timeouts, key=lambda hit: hit.number)}
    closed = [hit for hit in echoes if hit.cause.slug == "peer-closed" and hit.rank in came]
    is_after = any(hit.number > last.get(id(hit.source), 0) for hit in closed)
    return came.pop() if is_after else None


def _left(facts: FailureFacts, echoes: Sequence[Hit]) -> Candidate | None:
    """The suspect if connections broke and no rank says why."""
    silent = _silent(facts, echoes)
    left = _ended_well(facts, silent, echoes)
    if left is None and len(silent) == 1 and _is_gone(facts):
        left = silent[0]
    if left is not None:
        return Candidate("uneven-inputs", left, "medium", echoes[:4], {})
    if facts.hits_of("nccl-connect-failed"):
        return None  # there is no sign that any rank died
    rank = silent[0] if len(silent) == 1 else None
    return Candidate("rank-died", rank, "medium", echoes[:4], {"how": "without a message"})


def _is_gone(facts: FailureFacts) -> bool:
    """Whether a launcher that was told to stop had fewer ranks left than it started."""
    closed = {hit.fields["pid"] for hit in facts.hits_of("agent-block") if "closing" in hit.fields}
    stopped = bool(facts.hits_of("terminated-by-signal"))
    # A failed rank would have stopped it earlier: those that are gone ended well.
    return stopped and not facts.ends and 0 < len(closed) < len(facts.ranks | {1})


def _ended_well(facts: FailureFacts, silent: Sequence[int], echoes: Sequence[Hit]) -> int | None:
    """A rank that was done and left while those that complain still had work.

    A launcher lists every rank that failed or that it had to end: one that is not in its list
    ended well. If all known ranks complain, there must be one more that they complain about.
    """
    if not facts.ends or _num_closed(facts):  # a rank that is not in the list was still running
        return None
    # Our own launchers, one per node, name only their first failure, or are ended before that.
    own = facts.hits_of("allranks-end") if len(facts.ranks) > 2 else []
    if own or any("," in hit.fields["nodes"] for hit in facts.hits_of("allranks-job")):
        return None
    left = [rank for rank in silent if rank not in facts.ends]
    if left:
        return left[0]
    if any(end.is_by_launcher for end in facts.ends.values()):
        return None
    spoke = {hit.rank for hit in echoes}
    if not silent and set(facts.ends) <= spoke and None not in spoke and facts.world is None:
        return max(facts.ends) + 1
    return None


def _apart(facts: FailureFacts, echoes: Sequence[Hit], tellers: Sequence[Hit]) -> Candidate | None:
    """The suspect if every rank came to a collective, but not to the same one."""
    spoke = {hit.rank for hit in echoes if hit.rank is not None}
    last = {one.rank: one for one in facts.raised if one.rank in spoke}
    if len(last) < 2 or facts.ranks - spoke or len({_call(one) for one in last.values()}) < 2:
        return None
    training = {rank: _is_training(one) for rank, one in last.items()}
    done = [rank for rank, is_training in training.items() if not is_training]
    if done and any(training.values()):
        return Candidate("uneven-inputs", done[0], "medium", tellers, {})
    places = [f"rank {rank} at {_call(last[rank])}" for rank in sorted(spoke)[:4] if rank in last]
    where = ", ".join(places)
    return Candidate("collective-mismatch", None, "medium", tellers, {"difference": f": {where}"})


def _call(raised: Raised) -> str:
    """The script's line, and torch's collective that it calls there."""
    name = _collective(raised)
    return f"{raised.where} in {name}" if name is not None else raised.where


def _collective(raised: Raised) -> str | None:
    """The function of torch.distributed that raised."""
    is_torch = bool(raised.frames) and "distributed_c10d" in raised.frames[-1]
    return raised.frames[-1].rpartition(" ")[2] if is_torch else None


def _is_training(raised: Raised) -> bool:
    """Whether it was raised in a forward or backward pass, where DDP communicates."""
    return any(re.search(r"backward$|parallel/distributed\.py", one) for one in raised.frames)


def collectives_of(facts: FailureFacts) -> dict[int, str]:
    """The collective that each rank was in when it raised, if its traceback shows it."""
    told = ((one.rank, "a pass" if _is_training(one) else _collective(one)) for one in facts.raised)
    return {rank: name for rank, name in told if rank is not None and name is not None}


def _silent(facts: FailureFacts, echoes: Sequence[Hit]) -> list[int]:
    """Ranks that do not complain; if all that a launcher mentions do, there must be one more."""
    spoke = {hit.rank for hit in echoes if hit.rank is not None}
    has_launcher = bool(facts.ends or facts.hits_of("agent-block"))
    # One rank's own log does not show how many others there are.
    if not spoke or (len(facts.heard) == 1 and facts.world is None and not has_launcher):
        return []
    silent = sorted(rank for rank in facts.ranks if rank not in spoke)
    is_one_more = has_launcher and (not facts.ends or _num_closed(facts) == 1)
    return [max(spoke) + 1] if not silent and facts.world is None and is_one_more else silent


def _num_closed(facts: FailureFacts) -> int:
    """How many processes torchrun had to end without saying more about them."""
    marks = facts.hits_of("agent-block")
    told = {hit.fields.get("pid") for hit in marks if "code" in hit.fields}
    return len({hit.fields["pid"] for hit in marks if "closing" in hit.fields} - told)


def _behind(facts: FailureFacts, timeouts: Sequence[Hit]) -> tuple[int, Confidence] | None:
    """The rank that began fewer collectives than the others of the group that timed out.

    Each process group counts its own: numbers of two groups cannot be compared.
    """
    progress = _progress(facts, "enqueued")
    caught = [hit for hit in timeouts if "seq" in hit.fields]
    waiting = {hit.rank for hit in caught}
    caught += [hit for hit in facts.hits_of("collective-progress") if "watchdog" in hit.line.text]
    timed_out = {group_of(hit) for hit in caught} - {None}
    found: list[tuple[bool, int]] = []
    for group in timed_out or set(progress):
        ranks = progress.get(group, {})
        if len(set(ranks.values())) > 1:
            # A rank that waits in one group is late in another, but is not to blame.
            _, *blamed = min((number, rank in waiting, rank) for rank, number in ranks.items())
            found.append((bool(blamed[0]), int(blamed[1])))
    if not found:
        return None
    return min(found)[1], "high" if timed_out else "medium"


def _is_stuck(facts: FailureFacts, timeouts: Sequence[Hit]) -> bool:
    """Whether a rank waits in a call that another rank of its group has already completed.

    That rank got every rank's part, so the two must have made different calls.
    """
    waits: dict[str | None, dict[int | None, int]] = {}
    for hit in timeouts:
        if "seq" in hit.fields:  # each group counts its own calls
            waits.setdefault(group_of(hit), {})[hit.rank] = int(hit.fields["seq"])
    return any(
        rank in waiting and done_by[rank] < waiting[rank] <= other
        for group, done_by in _progress(facts, "completed").items()
        for waiting in [waits.get(group) or waits.get(None, {})]
        for rank in done_by
        for each, other in done_by.items()
        if each != rank and each in waiting
    )


def _differs(timeouts: Sequence[Hit]) -> Confidence | None:
    """How sure it is that ranks of a group made different calls at the same point."""
    groups: dict[str | None, set[Call]] = {}
    for hit in timeouts:
        if "seq" in hit.fields:
            groups.setdefault(group_of(hit), set()).add(_timed_out_call(hit))
    apart = [
        group
        for group, calls in groups.items()
        if len(calls) > 1 and len({call[0] for call in calls}) == 1
    ]
    if not apart:
        return None
    return "medium" if apart == [None] else "high"


def _timed_out_call(hit: Hit) -> Call:
    op = hit.fields["op"]
    is_unequal = any(word in op for word in UNEQUAL)
    return hit.fields["seq"], op, None if is_unequal else hit.fields.get("numel")


def group_of(hit: Hit) -> str | None:
    """The process group that a line from NCCL is about, by a name that all its ranks share."""
    named = GROUP.search(hit.line.text)
    if named is None:
        return None
    # Otherwise there is only a rank's own number; 0 is the group of all ranks everywhere.
    return named["guid"] or (named["id"] if named["id"] == "0" else None)


def _progress(facts: FailureFacts, what: str) -> dict[str | None, dict[int, int]]:
    """The last collective that each rank has `enqueued` or `completed`, by process group."""
    found: dict[str | None, dict[int, int]] = {}
    for hit in facts.hits_of("collective-progress"):
        if hit.rank is not None and what in hit.fields:
            ranks = found.setdefault(group_of(hit), {})
            ranks[hit.rank] = max(ranks.get(hit.rank, -1), int(hit.fields[what]))
    return found


# What ProcessGroupWrapper (TORCH_DISTRIBUTED_DEBUG=DETAIL) prints about a rank's call.
FINGERPRINT = re.compile(
    r"Rank (?P<rank>\d+) is running collective: "
    r"CollectiveFingerPrint\((?P<call>.{0,400}?)(?:, TensorDeviceTypes|\))"
)
MAX_TOLD = 4
SHAPE = re.compile(r"TensorShape=\[[^\]]*\]")
# A rank that checks the tensors of its own call reports only itself.
OWN = re.compile(r"ProcessGroup\w+::\w+: invalid tensor (?:size|type) at index")


def odd_one(values: Mapping[int, Hashable], num_ranks: int) -> int | None:
    """The rank whose value differs while all others agree.

    None if enough unknown ranks could agree with it to be as many.
    """
    counts = Counter(values.values())
    if len(counts) != 2 or 1 not in counts.values():
        return None
    unknown = max(0, num_ranks - len(values))
    if max(counts.values()) <= 1 + unknown:
        return None
    return next(rank for rank, value in values.items() if counts[value] == 1)


def other_call(facts: FailureFacts) -> tuple[int | None, str]:
    """The one rank whose call differs, if there is one; and what differs, in words."""
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


def _fingerprints(facts: FailureFacts) -> dict[int, str]:
    """What each rank called, as ranks report of themselves and one other."""
    calls: dict[int, str] = {}
    for hit in facts.hits_of("collective-mismatch"):
        for index, found in enumerate(FINGERPRINT.finditer(hit.line.text)):
            number = int(found["rank"])
            if index == 0 and hit.rank is not None and hit.rank != number:
                return {}  # a group of some ranks, which numbers them anew
            calls[number] = found["call"]
    return calls


def _short(call: str) -> str:
    kind = re.search(r"OpType=(\w+)", call)
    shape = SHAPE.search(call)
    return f"{kind[1] if kind else 'a call'} {shape[0].partition('=')[2] if shape else ''}".strip()


def _own_fault(facts: FailureFacts) -> int | None:
    told = [hit for hit in facts.hits_of("collective-mismatch") if OWN.search(hit.line.text)]
    ranks = {hit.rank for hit in told}
    return ranks.pop() if len(ranks) == 1 and len(facts.ranks) > 1 else None


def _watched(facts: FailureFacts) -> dict[str | None, dict[int, Hashable]]:
    """The call that each rank waited in, by process group, according to NCCL's watchdog."""
    groups: dict[str | None, dict[int, Hashable]] = {}
    for hit in facts.hits_of("collective-timeout"):
        if "seq" in hit.fields and hit.rank is not None:
            groups.setdefault(group_of(hit), {}).setdefault(hit.rank, _timed_out_call(hit))
    return groups


def first_nonfinite(facts: FailureFacts) -> tuple[int, list[int]] | None:
    """The first step at which a rank's own loss was not a number, and the ranks concerned."""
    steps = {
        hit.rank: int(hit.fields["step"])
        for hit in facts.hits_of("nan-loss")
        if hit.rank is not None and '"event":"nonfinite"' in hit.line.text and "step" in hit.fields
    }
    if not steps:
        return None
    first = min(steps.values())
    return first, sorted(rank for rank, step in steps.items() if step == first)


def absent(facts: FailureFacts, num_ranks: int | None) -> int | None:
    """The one rank that never came to the rendezvous, if that is certain."""
    hits = facts.hits_of("rendezvous-timeout")
    is_served = any("joined" in hit.fields and "clients" in hit.line.text for hit in hits)
    awaited = {int(hit.fields["awaited"]) for hit in hits if "awaited" in hit.fields}
    # Rank 0, which serves the store, reports that nobody comes; before that it waits itself.
    if is_served or not facts.hits_of("agent-block"):
        awaited.discard(0)
    if len(awaited) == 1:
        return awaited.pop()
    came = {hit.rank for hit in [*hits, *facts.hits_of("store-lost")]}
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


def _gave_up(facts: FailureFacts, num_joined: int) -> set[int | None]:
    """Ranks that a launcher saw fail, if as many as joined and as report a timeout."""
    failed = {end.rank for end in facts.ends.values() if end.is_own and not end.is_crash}
    told = {(id(hit.source), hit.number) for hit in facts.hits_of("rendezvous-timeout")}
    return {*failed} if len(failed) == len(told) == num_joined else set()
