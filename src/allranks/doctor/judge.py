"""From facts to findings: which cause came first, which rank is to blame, and how sure it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from allranks.doctor.catalogue import Catalogue, Cause
from allranks.doctor.culprit import Suspect, echoes_of, suspect
from allranks.doctor.event_words import event_in_words
from allranks.doctor.failure_facts import OUTSIDE, End, FailureFacts, is_near
from allranks.doctor.finding import MAX_TEXT, Confidence, Evidence, Finding
from allranks.doctor.finding_fields import more_fields
from allranks.doctor.log_search import Hit
from allranks.doctor.tracebacks import Raised
from allranks.show.secrets import redact
from allranks.show.text import plain

LEVELS = {"root": 0, "soft": 1, "generic": 2}
# Among causes that say little, those that say more come first.
GENERIC = (
    *("uneven-inputs", "rank-raised", "rank-died", "kernel-segfault", "nccl-connect-failed"),
    "terminated-by-signal",
)
AROUND = ("cause-in-another-log", "terminated-by-signal")  # they do not explain an exception
MAX_FINDINGS = 5
MAX_EVIDENCE = 4


@dataclass(slots=True)
class Candidate:
    """A possible cause, with the lines that support it."""

    cause: Cause
    hits: Sequence[Hit]
    rank: int | None
    confidence: Confidence
    fields: dict[str, str] = field(default_factory=dict)
    level: int = 0
    extra: tuple[Evidence, ...] = ()
    order: int = 0

    @property
    def key(self) -> tuple[int, int, int]:
        slug = self.cause.slug
        place = GENERIC.index(slug) if slug in GENERIC else len(GENERIC)
        return self.level, place if self.level == LEVELS["generic"] else 0, self.order


def judge(
    facts: FailureFacts, catalogue: Catalogue, extra: Sequence[Candidate] = ()
) -> list[Finding]:
    """All findings, the first cause first. Reads nothing: `gather` has."""
    found = [*_told(facts, catalogue), *_derived(facts, catalogue), *extra]
    found = _joined(found)
    explained = _explained(found)
    left = [one for one in found if one.cause.slug not in explained]
    left.sort(key=lambda one: one.key)
    roots = [one for one in left if one.level == LEVELS["root"]]
    if len(roots) > 1 and roots[0].confidence == "high":
        roots[0].confidence = "medium"  # the first of several is likely, not certain
    if left and left[0].confidence == "high" and _has_other_crash(left[0], facts):
        left[0].confidence = "medium"
    # What is true of many failures is reported once, and only if nothing better is known.
    left = [one for one in left if one.level < LEVELS["generic"]] or left[:1]
    return [finding_of(one, facts) for one in left[:MAX_FINDINGS]]


def _has_other_crash(first: Candidate, facts: FailureFacts) -> bool:
    """Whether another rank crashed silently, so that this finding may only follow from it."""
    said = {hit.rank for hit in facts.hits if hit.cause.kind != "mark"}
    said |= {one.rank for one in facts.raised}
    return first.rank is not None and any(
        end.is_crash and end.rank != first.rank and end.rank not in said
        for end in facts.ends.values()
    )


def _told(facts: FailureFacts, catalogue: Catalogue) -> list[Candidate]:
    """Causes that a line states outright."""
    places = {id(hit): index for index, hit in enumerate(facts.hits)}
    found = []
    for slug in dict.fromkeys(hit.cause.slug for hit in facts.hits if hit.cause.is_finding):
        cause = catalogue[slug]
        hits = [hit for hit in facts.of(slug) if facts.is_final(hit) and not _is_sruns(hit, facts)]
        plain = [hit for hit in hits if cause.on_warning or not hit.line.is_warning]
        if not plain and not (hits and facts.has_failed):
            continue
        shown = plain or hits
        sure = cause.confidence_of([hit.line.text for hit in shown]) if plain else "low"
        level = LEVELS[cause.kind] if plain else LEVELS["generic"]
        if cause.kind == "soft" and any(_is_raised(hit, facts) for hit in shown):
            level = LEVELS["root"]  # it ended the rank
        order = min(places[id(hit)] for hit in shown)
        rank = culprit(cause, shown, facts)
        fields = {**_merged(shown), **facts.known}
        found.append(Candidate(cause, shown, rank, sure, fields, level, order=order))
    return found


def _is_sruns(hit: Hit, facts: FailureFacts) -> bool:
    """Whether srun cancelled the step itself, because one of its tasks had failed."""
    if hit.cause.slug != "job-cancelled" or " STEP " not in hit.line.text:
        return False
    own = [end.hit for end in facts.ends.values() if end.is_own]
    return any(end is None or (end.source is hit.source and end.number < hit.number) for end in own)


def _is_raised(hit: Hit, facts: FailureFacts) -> bool:
    return any(
        hit.source is one.mark.source and 0 <= hit.number - one.number <= 2 for one in facts.raised
    )


def _merged(hits: Sequence[Hit]) -> dict[str, str]:
    fields: dict[str, str] = {}
    for hit in reversed(hits):  # the first line wins
        fields.update(hit.fields)
    return fields


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


def _derived(facts: FailureFacts, catalogue: Catalogue) -> list[Candidate]:
    """Causes that follow from several lines together."""
    found = [_candidate_of_exception(one, facts, catalogue) for one in _unknown(facts)[:1]]
    guess = suspect(facts)
    if guess is not None and not (_is_wait(guess) and _raised_alone(facts)):
        end = facts.ends.get(guess.rank) if guess.rank is not None else None
        cause = _cause_of_end(guess.slug, end, catalogue)
        is_hang = guess.slug in ("rank-missing-from-collective", "collective-mismatch")
        order = facts.hits.index(guess.hits[0]) if guess.hits else 0
        level = LEVELS["root" if is_hang else "generic"]
        fields = {**guess.fields, **facts.known}
        found.append(
            Candidate(cause, guess.hits, guess.rank, guess.confidence, fields, level, order=order)
        )
    mismatch = _count_mismatch(facts, catalogue)
    if mismatch is not None:
        found.append(mismatch)
    if guess is None:
        found += _crashes(facts, catalogue)
    return found or _cancelled_step(facts, catalogue)


def _cancelled_step(facts: FailureFacts, catalogue: Catalogue) -> list[Candidate]:
    """A step that was cancelled from outside: srun cancels one only after a task has failed."""
    hits = [hit for hit in facts.of("step-ended") if "CANCELLED AT" in hit.line.text]
    if not hits or any(end.is_own for end in facts.ends.values()):
        return []
    cause = catalogue["job-cancelled"]
    return [Candidate(cause, hits, None, "medium", dict(facts.known), LEVELS["generic"])]


def _is_wait(guess: Suspect) -> bool:
    """Whether it only says that ranks waited for or lost each other."""
    return guess.slug in ("rank-missing-from-collective", "uneven-inputs") or (
        guess.slug == "rank-died" and guess.confidence != "high"
    )


def _raised_alone(facts: FailureFacts) -> bool:
    """Whether an exception ended a rank that complains about no other: the rest follows from it."""
    echoes = echoes_of(facts)
    complain = {hit.rank for hit in echoes}
    return any(
        one.rank is not None and one.rank not in complain
        for one in facts.raised
        if not one.is_launchers and facts.is_final(one.mark)
    )


def _unknown(facts: FailureFacts) -> list[Raised]:
    """Tracebacks that no cause or echo explains, nor the exceptions they were raised from."""
    told = [hit for hit in facts.hits if hit.cause.kind != "mark" and hit.cause.slug not in AROUND]
    stopped = facts.of("terminated-by-signal")  # exceptions after it follow from it
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


def _candidate_of_exception(one: Raised, facts: FailureFacts, catalogue: Catalogue) -> Candidate:
    alike = {each.rank for each in facts.raised if each.text == one.text}
    rank = one.rank
    if rank is None:
        rank = _only_failed(facts, sum(each.text == one.text for each in facts.raised))
    elif len(alike) > 1 and alike >= facts.ranks:
        rank = None
    fields = {
        "exception": redact(plain(one.text))[:200],
        "where": one.where or "the line in the evidence",
        **facts.known,
    }
    line = Evidence(one.mark.source.name, one.number, _shown(one.text))
    frames = [Evidence(one.mark.source.name, one.mark.number, f"at {one.where}")]
    # A library raises because of its input; what the user's own code raises is the cause itself.
    sure: Confidence = "high" if facts.has_failed and one.is_own_code else "medium"
    return Candidate(
        catalogue["rank-raised"],
        [],
        rank,
        sure,
        fields,
        LEVELS["generic"],
        (line, *(frames if one.where else [])),
    )


def _crashes(facts: FailureFacts, catalogue: Catalogue) -> list[Candidate]:
    """The rank that failed by itself, if no rank complains about another."""
    raised = {one.rank for one in facts.raised if not one.is_launchers}
    own = [end for end in facts.ends.values() if end.is_own and end.rank not in raised]
    own.sort(key=lambda end: (not end.is_crash, not end.is_first, end.rank))
    has_words = any(not one.is_launchers for one in facts.raised)
    if not own or (has_words and not own[0].is_crash):
        return []
    end = own[0]
    sure: Confidence = "high" if end.is_crash else "medium"
    hits = [end.hit] if end.hit is not None else []
    fields = {"how": end.in_words, "node": end.node or "", **facts.known}
    cause = _cause_of_end("rank-died", end, catalogue)
    return [Candidate(cause, hits, end.rank, sure, fields, LEVELS[cause.kind])]


def _cause_of_end(slug: str, end: End | None, catalogue: Catalogue) -> Cause:
    """The cause that the signal which ended a rank points to."""
    is_illegal = slug == "rank-died" and end is not None and end.signal == "SIGILL"
    return catalogue["illegal-instruction" if is_illegal else slug]


def _count_mismatch(facts: FailureFacts, catalogue: Catalogue) -> Candidate | None:
    """A rendezvous that failed because WORLD_SIZE is not the number of tasks."""
    waiting = facts.of("rendezvous-timeout")
    said = facts.of("world-said")
    tasks = {int(hit.fields["tasks"]) for hit in said if "tasks" in hit.fields}
    wanted = {int(hit.fields["wanted"]) for hit in [*said, *waiting] if "wanted" in hit.fields}
    if not waiting or len(tasks) != 1 or not wanted or wanted == tasks:
        return None
    number, world = tasks.pop(), max(wanted)
    fields = {
        "wanted": str(world),
        "tasks": str(number),
        "joined_words": f": WORLD_SIZE is {world}, {number} tasks were started",
        **facts.known,
    }
    cause = catalogue["rank-count-mismatch"]
    return Candidate(cause, [*said[:2], *waiting[:2]], None, "high", fields, LEVELS["root"])


def _joined(found: list[Candidate]) -> list[Candidate]:
    """One candidate per cause: what is stated counts more than what is derived."""
    joined: dict[str, Candidate] = {}
    for one in found:
        known = joined.get(one.cause.slug)
        if known is None:
            joined[one.cause.slug] = one
            continue
        known.level = min(known.level, one.level)
        known.fields = {**one.fields, **known.fields}
        known.hits = [*known.hits, *one.hits]
        known.extra += one.extra
        if known.rank is None and known.cause.culprit == "line":
            known.rank = one.rank
    return list(joined.values())


def _explained(found: Sequence[Candidate]) -> set[str]:
    """Causes that follow from another one that was found with some confidence."""
    explained: set[str] = set()
    for one in sorted(found, key=lambda each: each.key):
        if one.cause.slug not in explained and one.confidence != "low":
            explained |= set(one.cause.explains)
    return explained


def finding_of(one: Candidate, facts: FailureFacts) -> Finding:
    """The candidate in words, with file and line of its evidence."""
    fields = more_fields(one.cause.slug, one.fields, facts)
    rank, told = one.rank, fields.get("rank", "")
    if told == "none":
        rank = None
    elif told.isdigit() and (rank is None or told != one.fields.get("rank")):
        rank = int(told)
    hits = one.hits if rank == one.rank else sorted(one.hits, key=lambda hit: hit.rank != rank)
    fields["rank"] = "" if rank is None else str(rank)
    fields["rank_word"] = "" if rank is None else f"Rank {rank}"
    node = _node(one, rank, facts)
    fields["node"] = node or fields.get("node", "")
    evidence: dict[tuple[str, int], Evidence] = {}
    for hit in hits:
        line = Evidence(plain(hit.source.name), hit.number, _shown_hit(hit))
        evidence.setdefault((line.file, line.line), line)
    for line in one.extra:
        evidence.setdefault((line.file, line.line), line)
    return Finding(
        one.cause.slug,
        redact(plain(one.cause.words(fields))),
        redact(plain(one.cause.advice(fields, facts.situations))),
        rank,
        node,
        one.confidence,
        tuple(evidence.values())[:MAX_EVIDENCE],
    )


def _node(one: Candidate, rank: int | None, facts: FailureFacts) -> str | None:
    named = [hit.fields["node"] for hit in one.hits if hit.fields.get("node")]
    if named:
        return named[0]
    if rank is not None and rank in facts.ends and facts.ends[rank].node:
        return facts.ends[rank].node
    if one.cause.culprit == "none":
        return None  # where the line was printed means nothing
    of_rank = [hit.node for hit in one.hits if hit.node and hit.rank == rank]
    return of_rank[0] if of_rank else None


def _shown_hit(hit: Hit) -> str:
    text = hit.line.text
    return _shown(event_in_words(text) if hit.source.path.suffix == ".jsonl" else text)


def _shown(text: str) -> str:
    text = " ".join(redact(plain(text)).split())
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 1] + "…"
