"""From facts to findings: which cause came first, which rank is to blame, and how sure it is."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from allranks.doctor.catalogue import Cause, load
from allranks.doctor.culprit import (
    LEVELS,
    Candidate,
    absent,
    echoes_of,
    first_nonfinite,
    other_call,
    own_ends,
    suspect,
)
from allranks.doctor.failure_facts import OUTSIDE, FailureFacts, signal_name
from allranks.doctor.finding import Confidence, Evidence, Finding
from allranks.doctor.log_search import Hit
from allranks.doctor.run_evidence import event_in_words
from allranks.doctor.speakers import is_near
from allranks.doctor.tracebacks import Raised
from allranks.show.numbers import size
from allranks.show.secrets import redact
from allranks.show.text import plain

AROUND = (
    "cause-in-another-log",
    "terminated-by-signal",
    "rank-died",
)  # they do not explain an exception
MAX_FINDINGS = 5
LAST_LINES = 3
END_LINES = 60  # the most that a log has after the error that ended it
MAX_EVIDENCE = 4
MAX_TEXT = 400  # characters of a line of evidence


def judge(facts: FailureFacts, extra: Sequence[Candidate] = ()) -> list[Finding]:
    """All findings, the first cause first. Reads nothing: `gather` has."""
    found = _joined([*_stated(facts), *_derived(facts), *extra])
    found = [one for one in found if not one.is_passed] or found
    explained = _explained(found)
    left = [one for one in found if one.slug not in explained]
    left.sort(key=lambda one: one.key)
    roots = [one for one in left if one.level == LEVELS["root"]]
    if len(roots) > 1 and roots[0].confidence == "high":
        roots[0].confidence = "medium"  # the first of several is likely, not certain
    if left and left[0].confidence == "high" and _has_rival(left[0], facts):
        left[0].confidence = "medium"
    # What is true of many failures is reported once, and only if nothing better is known.
    left = [one for one in left if one.level < LEVELS["generic"]] or left[:1]
    return [finding_of(one, facts) for one in left[:MAX_FINDINGS]]


def _has_rival(first: Candidate, facts: FailureFacts) -> bool:
    """Whether this finding may only follow from something else that went wrong.

    Another rank crashed silently, or there is an exception that no cause explains.
    """
    if first.slug != "rank-raised" and _unexplained(facts):
        return True
    said = {hit.rank for hit in facts.hits if hit.cause.kind != "mark"}
    said |= {one.rank for one in facts.raised}
    return first.rank is not None and any(
        end.is_crash and end.rank != first.rank and end.rank not in said
        for end in facts.ends.values()
    )


def _stated(facts: FailureFacts) -> list[Candidate]:
    """Causes that a line states outright."""
    places = {id(hit): index for index, hit in enumerate(facts.hits)}
    found = []
    for slug in dict.fromkeys(hit.cause.slug for hit in facts.hits if hit.cause.is_finding):
        cause = load()[slug]
        final = [hit for hit in facts.hits_of(slug) if facts.is_final(hit)]
        hits = [hit for hit in final if not _is_sruns(hit, facts)]
        plain = [hit for hit in hits if cause.on_warning or not hit.line.is_warning]
        if not plain and not (hits and (facts.has_failed or _is_last(hits, facts))):
            continue
        shown = plain or hits
        sure = cause.confidence_of([hit.line.text for hit in shown]) if plain else "low"
        if sure == "high" and not any(_is_earned(hit, facts) for hit in shown):
            sure = "medium"
        level = LEVELS[cause.kind] if plain else LEVELS["generic"]
        if cause.kind == "soft" and any(_is_raised(hit, facts) for hit in shown):
            level = LEVELS["root"]  # it ended the rank
        order = min(places[id(hit)] for hit in shown)
        rank = culprit(cause, shown, facts)
        # Of two lines with the same field, the first wins.
        fields = {key: value for hit in reversed(shown) for key, value in hit.fields.items()}
        is_passed = all(facts.is_passed(hit) for hit in shown)
        found.append(
            Candidate(slug, rank, sure, shown, fields, level, order=order, is_passed=is_passed)
        )
    return found


def _is_last(hits: Sequence[Hit], facts: FailureFacts) -> bool:
    """Whether a warning is repeated up to the end of the log, or is all there is."""
    last = hits[-1]
    lines = next(one.num_lines for one in facts.scanned if one.source is last.source)
    is_all = lines <= LAST_LINES
    return (len(hits) > 1 or is_all) and lines - last.number <= LAST_LINES


# An error as the failing program prints it, rather than a mention of one.
_ERROR = re.compile(
    r"^(?:\w+\.)*\w*(?:Error|Exception)\b: | NCCL WARN |^\[?[EF]\d{3,4} |^\[E \w|^ERROR\b|\berror: "
    r"|^terminate called|^\s+what\(\): "
)


def _is_earned(hit: Hit, facts: FailureFacts) -> bool:
    """Whether a line may make a finding certain: an error at which a rank or the log ended."""
    if hit.source.is_told:
        return True
    if facts.is_passed(hit) or "ranks" in hit.cause.speakers(hit.line.text):
        return False
    within = [one for one in facts.raised if is_near(hit, one)]
    # An exception that another one was raised from, or during, was caught.
    caught = {id(one.before) for one in facts.raised}
    if within:
        return any(not one.goes_on and id(one) not in caught for one in within)
    lines = next(one.num_lines for one in facts.scanned if one.source is hit.source)
    is_end = facts.has_failed or lines - hit.number <= END_LINES
    is_error = hit.cause.family in OUTSIDE or _ERROR.search(hit.line.text) is not None
    return is_end and is_error


_OF_STEP = re.compile(" STEP |Force Terminated")
_FAILED_TASK = re.compile(r"\btasks? [\d,-]+: Exited with exit code [1-9]")


def _is_sruns(hit: Hit, facts: FailureFacts) -> bool:
    """Whether srun cancelled the step itself, because one of its tasks had failed."""
    if hit.cause.slug != "job-cancelled" or not _OF_STEP.search(hit.line.text):
        return False
    ends = [end.hit for end in facts.ends.values() if end.is_own]
    ends += [one for one in facts.hits if _FAILED_TASK.search(one.line.text)]
    return any(
        end is None or (end.source is hit.source and end.number < hit.number) for end in ends
    )


def _is_raised(hit: Hit, facts: FailureFacts) -> bool:
    return any(
        hit.source is one.mark.source and 0 <= hit.number - one.number <= 2 for one in facts.raised
    )


def culprit(cause: Cause, hits: Sequence[Hit], facts: FailureFacts) -> int | None:
    """The rank that a stated cause belongs to; None if all, none, or unknown."""
    if cause.culprit == "none":
        return None
    if isinstance(cause.culprit, int):
        return cause.culprit
    named = [int(hit.fields["rank"]) for hit in hits if "rank" in hit.fields]
    if named:
        return named[0]
    of_processes = (facts.rank_of_process(hit) for hit in hits)
    if (rank := next((rank for rank in of_processes if rank is not None), None)) is not None:
        return rank
    ranks = {hit.rank for hit in hits if hit.rank is not None}
    if ranks:
        everybody = len(ranks) > 1 and ranks >= facts.ranks
        first = next(hit.rank for hit in hits if hit.rank is not None)
        return None if everybody else first
    if cause.family not in OUTSIDE and set(facts.ends) == facts.ranks == {0}:
        return 0  # the only rank
    return _only_failed(facts, len({hit.number for hit in hits if _is_raised(hit, facts)}))


def _only_failed(facts: FailureFacts, times: int) -> int | None:
    """The one rank that failed by itself, for lines that do not name their rank."""
    own = [end for end in facts.ends.values() if end.is_own]
    if len(own) == 1 and (times <= 1 or len(facts.ends) == 1):
        return own[0].rank
    return None


def _derived(facts: FailureFacts) -> list[Candidate]:
    """Causes that follow from several lines together."""
    found = [_of_exception(one, facts) for one in _unexplained(facts)[:1]]
    guess = suspect(facts)
    if guess is not None and not (_is_wait(guess) and _raised_alone(facts)):
        if guess.slug in ("rank-missing-from-collective", "collective-mismatch"):
            guess.level = LEVELS["root"]
        guess.order = facts.hits.index(guess.hits[0]) if guess.hits else 0
        found.append(guess)
    mismatch = _count_mismatch(facts)
    if mismatch is not None:
        found.append(mismatch)
    if guess is None:
        found += _crashes(facts)
    return found or _cancelled_step(facts)


def _cancelled_step(facts: FailureFacts) -> list[Candidate]:
    """A step that was cancelled from outside: srun cancels one only after a task has failed."""
    hits = [hit for hit in facts.hits_of("step-ended") if "CANCELLED AT" in hit.line.text]
    if not hits or any(end.is_own for end in facts.ends.values()):
        return []
    return [Candidate("job-cancelled", None, "medium", hits)]


def _is_wait(guess: Candidate) -> bool:
    """Whether it only says that ranks waited for or lost each other."""
    return guess.slug in ("rank-missing-from-collective", "uneven-inputs") or (
        guess.slug == "rank-died" and guess.confidence != "high"
    )


def _raised_alone(facts: FailureFacts) -> bool:
    """Whether an exception ended a rank that complains about no other: the rest follows from it."""
    complain = {hit.rank for hit in echoes_of(facts)}
    return any(
        one.rank is not None and one.rank not in complain
        for one in facts.raised
        if not one.is_launchers and facts.is_final(one.mark)
    )


def _unexplained(facts: FailureFacts) -> list[Raised]:
    """Tracebacks that no cause or echo explains, nor the exceptions they were raised from."""
    told = [hit for hit in facts.hits if hit.cause.kind != "mark" and hit.cause.slug not in AROUND]
    told = [hit for hit in told if hit.cause.family not in OUTSIDE]
    stopped = facts.hits_of("terminated-by-signal")  # exceptions after it follow from it
    found = [
        one.chain[0]
        for one in facts.raised
        if not one.is_launchers
        and facts.is_final(one.mark)
        and not one.goes_on
        and not any(is_near(hit, each) for each in one.chain for hit in told)
        and not any(hit.source is one.mark.source and hit.number < one.number for hit in stopped)
    ]
    complain = {hit.rank for hit in echoes_of(facts)}
    # An exception did not end a rank that later waits for others.
    return sorted(found, key=lambda one: one.rank is not None and one.rank in complain)


def _of_exception(one: Raised, facts: FailureFacts) -> Candidate:
    alike = [each.rank for each in facts.raised if each.text == one.text]
    rank = one.rank
    if rank is None:
        rank = _only_failed(facts, len(alike))
    elif len(set(alike)) > 1 and facts.ranks.issubset(alike):
        rank = None
    fields = {
        "exception": redact(plain(one.text))[:200],
        "where": one.where or "the line in the evidence",
    }
    name = one.mark.source.name
    lines = [Evidence(name, one.number, _shown(one.text))]
    if one.where:
        lines.append(Evidence(name, one.mark.number, f"at {one.where}"))
    # A library raises because of its input; what the user's own code raises is the cause itself.
    # Its launcher says so too, or other ranks that lost it.
    is_told = any(end.is_own and end.rank == rank for end in facts.ends.values())
    is_told |= any(hit.rank != rank for hit in echoes_of(facts))
    sure: Confidence = "high" if is_told and one.is_own_code else "medium"
    return Candidate("rank-raised", rank, sure, fields=fields, extra=tuple(lines))


def _crashes(facts: FailureFacts) -> list[Candidate]:
    """The rank that failed by itself, if no rank complains about another."""
    raised = {one.rank for one in facts.raised if not one.is_launchers}
    own = own_ends(facts, raised)
    if not own or ((raised or echoes_of(facts)) and not own[0].is_crash):
        return []
    end = own[0]
    sure: Confidence = "high" if end.is_certain else "medium"
    hits = [end.hit] if end.hit is not None else []
    fields = {"how": end.in_words, "node": end.node or ""}
    level = LEVELS[load()[end.cause].kind]
    return [Candidate(end.cause, end.rank, sure, hits, fields, level)]


def _count_mismatch(facts: FailureFacts) -> Candidate | None:
    """A rendezvous that failed because WORLD_SIZE is not the number of tasks."""
    waiting = facts.hits_of("rendezvous-timeout")
    said = facts.hits_of("world-said")
    tasks = {int(hit.fields["tasks"]) for hit in said if "tasks" in hit.fields}
    wanted = {int(hit.fields["wanted"]) for hit in [*said, *waiting] if "wanted" in hit.fields}
    came = max((int(hit.fields["joined"]) for hit in waiting if "joined" in hit.fields), default=0)
    if came > max(wanted, default=came):  # more than were expected, so nobody is missing
        tasks.add(came)
    if not waiting or len(tasks) != 1 or not wanted or wanted == tasks:
        return None
    number, world = tasks.pop(), max(wanted)
    fields = {
        "wanted": str(world),
        "tasks": str(number),
        "joined_words": f": WORLD_SIZE is {world}, {number} tasks were started",
    }
    hits = [*said[:2], *waiting[:2]]
    return Candidate("rank-count-mismatch", None, "high", hits, fields, LEVELS["root"])


def _joined(found: list[Candidate]) -> list[Candidate]:
    """One candidate per cause: what is stated counts more than what is derived."""
    joined: dict[str, Candidate] = {}
    for one in found:
        known = joined.setdefault(one.slug, one)
        if known is one:
            continue
        known.level = min(known.level, one.level)
        known.fields = {**one.fields, **known.fields}
        known.hits = [*known.hits, *one.hits]
        known.extra += one.extra
        if known.rank is None and load()[one.slug].culprit == "line":
            known.rank = one.rank
    return list(joined.values())


def _explained(found: Sequence[Candidate]) -> set[str]:
    """Causes that follow from another one that was found with some confidence."""
    explained: set[str] = set()
    for one in sorted(found, key=lambda each: each.key):
        if one.slug not in explained and one.confidence != "low":
            explained |= set(load()[one.slug].explains)
    return explained


def finding_of(one: Candidate, facts: FailureFacts) -> Finding:
    """The candidate in words, with file and line of its evidence."""
    cause = load()[one.slug]
    fields = {**one.fields, **facts.known}
    if one.slug in _MORE_FIELDS:
        fields |= _MORE_FIELDS[one.slug](fields, facts)
    rank, told = one.rank, fields.get("rank", "")
    if told == "none":
        rank = None
    elif told.isdigit() and (rank is None or told != one.fields.get("rank")):
        rank = int(told)
    hits = one.hits if rank == one.rank else sorted(one.hits, key=lambda hit: hit.rank != rank)
    fields["rank"] = "" if rank is None else str(rank)
    fields["rank_word"] = "" if rank is None else f"Rank {rank}"
    node = _node(one, cause, rank, facts)
    fields["node"] = node or fields.get("node", "")
    evidence: dict[tuple[str, int], Evidence] = {}
    for hit in hits:
        line = Evidence(plain(hit.source.name), hit.number, _shown_hit(hit))
        evidence.setdefault((line.file, line.line), line)
    for line in one.extra:
        evidence.setdefault((line.file, line.line), line)
    return Finding(
        one.slug,
        redact(plain(cause.words(fields))),
        redact(plain(cause.advice(fields, facts.situations))),
        rank,
        node,
        one.confidence,
        tuple(evidence.values())[:MAX_EVIDENCE],
    )


def _node(one: Candidate, cause: Cause, rank: int | None, facts: FailureFacts) -> str | None:
    named = [hit.fields["node"] for hit in one.hits if hit.fields.get("node")]
    if named:
        return named[0]
    if rank is not None and rank in facts.ends and facts.ends[rank].node:
        return facts.ends[rank].node
    if cause.culprit == "none":
        return None  # where the line was printed means nothing
    of_rank = [hit.node for hit in one.hits if hit.node and hit.rank == rank]
    return of_rank[0] if of_rank else None


def _shown_hit(hit: Hit) -> str:
    text = hit.line.text
    return _shown(event_in_words(text) if hit.source.path.suffix == ".jsonl" else text)


def _shown(text: str) -> str:
    text = " ".join(redact(plain(text)).split())
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 1] + "…"


# --- Fields of a title or a fix that are worked out from several facts ---------------------------

Fields = dict[str, str]  # `rank` is "none" if no rank is to blame


def _rendezvous(fields: Fields, facts: FailureFacts) -> Fields:
    joined, wanted = fields.get("joined"), fields.get("wanted")
    rank = absent(facts, int(wanted) if wanted else facts.world)
    more = {"rank": str(rank)} if rank is not None else {}
    if joined and wanted:
        more["joined_words"] = f": {joined} of {wanted} did"
        if (joined, wanted) == ("1", "2"):  # the one that reports it is there, so the other is not
            more["rank"] = "0" if fields.get("reporter") == "1" else "1"
    elif rank is not None:
        more["joined_words"] = f": rank {rank} did not"
    return more


def _master(fields: Fields, facts: FailureFacts) -> Fields:
    words = re.compile(r"gai ?error|not known|name resolution|route to host|unreachable", re.I)
    is_network = any(words.search(hit.line.text) for hit in facts.hits_of("master-unreachable"))
    return {"rank": "none"} if is_network else {}  # the address or the route to it, not rank 0


def _port(fields: Fields, facts: FailureFacts) -> Fields:
    port = fields.get("port", "")
    return {"other_port": str(int(port) + 1)} if port.isdigit() else {}


def _interface(fields: Fields, facts: FailureFacts) -> Fields:
    name = fields.get("interface", "").rstrip(".,;")
    more = {"interface": name} if name else {}
    seen = [
        match[1]
        for hit in facts.hits
        if (match := re.search(r"(?:Using|OOB) (?:\[\d\])?([a-z]\w+):\d", hit.line.text))
    ]
    seen += [one for one in facts.interfaces if not re.match("lo|docker|veth|br-", one)]
    return {**more, "suggested": seen[0]} if seen else more


def _memory(fields: Fields, facts: FailureFacts) -> Fields:
    if not fields.get("limit"):
        return {}
    used, allowed = int(fields["used"]), int(fields["limit"])
    limit = allowed / 2**30
    more = max(1, round(2 * limit)) if limit >= 1 else 0
    return {
        "limit_words": f": {size(used)} where {size(allowed)} were requested",
        "more_memory": f"{more}G" if more else f"{round(4 * limit * 1024)}M",
    }


def _worker(fields: Fields, facts: FailureFacts) -> Fields:
    paths = [hit.fields["path"] for hit in facts.hits_of("missing-file") if "path" in hit.fields]
    return {"path": paths[0]} if paths else {}


def _signal(fields: Fields, facts: FailureFacts) -> Fields:
    number = fields.get("number", "")
    return {"signal": signal_name(int(number))} if number.isdigit() else {}


def _nan(fields: Fields, facts: FailureFacts) -> Fields:
    first = first_nonfinite(facts)
    if first is not None:
        step, ranks = first
        rank = str(ranks[0]) if len(ranks) == 1 and len(facts.ranks) > 1 else "none"
        return {"step": str(step), "rank": rank}
    # In most scripts one rank prints the loss of all: only an exception is a rank's own.
    told = {(id(hit.source), hit.number) for hit in facts.hits_of("nan-loss")}
    own = any((id(one.mark.source), one.number) in told for one in facts.raised)
    return {} if own else {"rank": "none"}


def _died(fields: Fields, facts: FailureFacts) -> Fields:
    how = fields.get("how", "")
    return {"how": how if not how or how.startswith(("by ", "with")) else f"({how})"}


def _mismatch(fields: Fields, facts: FailureFacts) -> Fields:
    rank, words = other_call(facts)
    words = words or fields.get("difference", "")
    if rank is None:
        return {"difference": words} if words else {}
    return {"rank": str(rank), "difference": words or f": rank {rank} unlike the others"}


_MORE_FIELDS: Mapping[str, Callable[[Fields, FailureFacts], Fields]] = {
    "rendezvous-timeout": _rendezvous,
    "master-unreachable": _master,
    "port-in-use": _port,
    "wrong-network-interface": _interface,
    "gloo-connect-failed": _interface,
    "nccl-connect-failed": _interface,
    "host-out-of-memory": _memory,
    "worker-raised": _worker,
    "terminated-by-signal": _signal,
    "nan-loss": _nan,
    "rank-died": _died,
    "collective-mismatch": _mismatch,
}
