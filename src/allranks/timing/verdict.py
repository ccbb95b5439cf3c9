"""What limited a run, on what evidence, and what to type next: all commands show this verdict."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal

from allranks.run.folder import RunDir
from allranks.run.record import RankRecord, read_both_ends, read_ranks
from allranks.run.shares import count_once
from allranks.show.numbers import count, duration, percent
from allranks.timing.limits import SAYING
from allranks.timing.limits.facts import LEAST_GAIN, Facts, Thresholds
from allranks.timing.limits.ranks import is_jitter
from allranks.timing.memory import growing_memory
from allranks.timing.mfu import utilisation
from allranks.timing.shares import (
    LIMITS,
    LOCAL,
    Measured,
    Shares,
    measure,
    normalised,
    rare_pauses,
)
from allranks.timing.since import Earlier, comparable_before
from allranks.timing.steps import (
    ENOUGH_STEPS,
    STOPPED_EARLY,
    SURE,
    TOO_FEW,
    Timing,
    event_bytes,
    timing,
    why_no_pace,
)

Limit = Literal[
    "compute",
    "launches",
    "host",
    "copies",
    "data",
    "communication",
    "straggler",
    "pauses",
    "too-short",
    "unknown",
]
MOST_BYTES = 3 << 20  # of all ranks' events: reading them takes a second on a busy machine
LEAST_BYTES = 1 << 14  # of a rank
TRACE_BYTES = 1 << 16  # by which a rank has written its first trace
RUN_ERROR = 0.15  # of a share: how much it may differ in another run, or in steps not traced
MOST_GAIN = 1000.0
JITTER = 2.0  # times the threshold: on busy machines, ranks usually take turns at being last
MOST_EARLIER = 5  # runs that are judged to find one to compare with: some are too short
EARLIER_BYTES = MOST_BYTES // 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The part of a run's time whose removal would gain most."""

    limit: Limit
    why: str
    share: float | None = None  # of the time from the first steady step to the last, 0 to 1
    rank: int | None = None  # if it is about a single one
    sure: bool = False
    doubt: str | None = None  # why it is not sure
    next: str | None = None  # what to type
    gain: float | None = None  # without it, a run is at most this many times as fast
    line: str | None = None  # of the user's code, such as train.py:52
    shares: Mapping[str, float] = field(default_factory=dict)  # of all parts; they sum to 1
    cause: str | None = None  # the doctor's name for it, if it has one
    evidence: str = ""  # the numbers behind it

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Warning:
    """Something that will go wrong if the run goes on."""

    kind: str
    text: str
    line: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """Everything that is concluded about a run."""

    verdict: Verdict
    warnings: tuple[Warning, ...] = ()
    mfu: float | None = None  # model FLOPs utilisation, 0 to 1
    since: Mapping[str, Any] | None = None  # what changed since the last comparable run; `text`

    def as_json(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict.as_json(),
            "warnings": [asdict(warning) for warning in self.warnings],
            "mfu": self.mfu,
            "since": self.since,
        }


def judge(
    run: RunDir,
    measured: Timing | None = None,
    records: Mapping[int, RankRecord] | None = None,
    thresholds: Thresholds | None = None,
) -> Judgement:
    """What limited a run. Takes at most two seconds, however long the run was.

    `measured`, `records`: if the caller has read them already.
    """
    try:
        if records is None and thresholds is None and event_bytes(run) <= EARLIER_BYTES:
            found, measured = _judge_briefly(run)
        else:
            found, measured = _judge(run, measured, records, thresholds or Thresholds())
        is_long_enough = found.verdict.shares and found.verdict.limit != "too-short"
        if is_long_enough and (before := _earlier(run.path)) is not None:
            since = before.until(found.verdict.shares, measured.pace if measured else None)
            return dataclasses.replace(found, since=since)
    except Exception:  # odd files: a run must end, and be shown, without a verdict
        return Judgement(verdict=unknown("its event files could not be understood"))
    return found


def _judge(
    run: RunDir,
    measured: Timing | None,
    records: Mapping[int, RankRecord] | None,
    thresholds: Thresholds,
    most: int = MOST_BYTES,
) -> tuple[Judgement, Timing | None]:
    """Judges a run by itself; also returns what was measured. `most`: bytes of events to read."""
    attempts = run.attempts()
    if not attempts:
        return Judgement(verdict=unknown("it has not started yet")), None
    rare = 0.0
    if event_bytes(run) > most:  # all commands judge by the same events
        records, measured = read_ends_within(run, attempts[-1], most), None
        rare = rare_pauses(run.events(attempts[-1], min(records)))
    elif records is None:
        records = read_ranks(run, attempts[-1])
    if measured is None:
        measured = timing(run, records=records)
    found = Judgement(
        verdict=verdict_of(run, measured, records, thresholds, rare),
        warnings=tuple(
            Warning(kind="memory-grows", text=growth.text, line=growth.line)
            for growth in growing_memory(records, run.info())
        ),
        mfu=utilisation(records.values(), measured, run.info()),
    )
    return found, measured


def _judge_briefly(run: RunDir) -> tuple[Judgement, Timing | None]:
    """Judges a run by at most `EARLIER_BYTES` of events; once, as the next is compared with it."""
    attempt = max(run.attempts(), default=0)
    return _judge_once(run.path, run.state(), attempt, event_bytes(run))


@lru_cache(maxsize=64)
def _judge_once(
    path: Path, state: str, attempt: int, num_bytes: int
) -> tuple[Judgement, Timing | None]:
    return _judge(RunDir(path), None, None, Thresholds(), EARLIER_BYTES)


@lru_cache(maxsize=256)  # what has ended before a run began does not change
def _earlier(path: Path) -> Earlier | None:
    """What was concluded about the last run that is like this one."""
    for run in itertools.islice(comparable_before(RunDir(path)), MOST_EARLIER):
        with suppress(Exception):  # as above
            found, measured = _judge_briefly(run)
            verdict = found.verdict
            if verdict.limit not in ("too-short", "unknown") and verdict.share is not None:
                pace = measured.pace if measured else None
                return Earlier(run.name, verdict.limit, verdict.share, pace)
    return None


def unknown(why: str) -> Verdict:
    return Verdict(limit="unknown", why=why)


def verdict_of(
    run: RunDir,
    measured: Timing | None,
    records: Mapping[int, RankRecord],
    limits: Thresholds,
    rare: float = 0.0,
) -> Verdict:
    """What limited a run. `rare`: seconds of pauses per step that these records do not show."""
    if measured is None:
        return not_measured(run, records)
    is_one_clock = str(run.info().get("layout", "")).startswith("1x")
    found = measure(records, measured, is_one_clock=is_one_clock, rare=rare)
    if found is None:
        return unknown("its steps do not say where their time went: the probe was off")
    facts = Facts(run=run, records=records, found=found, limits=limits)
    limit = limit_of(facts)
    said = SAYING[limit](facts)
    doubt = facts.crowding or doubt_of(limit, found, limits) or said.doubt
    verdict = Verdict(
        limit=limit,
        why=said.why,
        share=round(found.shares[limit], 4),
        rank=said.rank,
        sure=doubt is None,
        doubt=doubt,
        next=said.next,
        gain=gain_of(limit, found) if limit != "compute" else None,
        line=said.line,
        shares={part: round(share, 4) for part, share in found.shares.items()},
        cause=said.cause,
        evidence=said.evidence,
    )
    is_short = found.num_steps < limits.least_steps or measured.seconds < limits.least_seconds
    return too_short(verdict, found) if is_short else verdict


def read_ends_within(run: RunDir, attempt: int, most: int) -> dict[int, RankRecord]:
    """The first and the last events of all ranks, `most` bytes of them in all.

    Even with many ranks, at least one rank's trace is read.
    """
    ranks = run.ranks(attempt)
    each = max(LEAST_BYTES, most // len(ranks))
    # Not the first rank, of the run or of a node: it often does more than the others.
    leasts = {sorted(ranks)[len(ranks) // 2 - 1]: TRACE_BYTES}
    records = {
        rank: read_both_ends(run, attempt, rank, each, least=leasts.get(rank, 0)) for rank in ranks
    }
    count_once(records)
    return records


def not_measured(run: RunDir, records: Mapping[int, RankRecord]) -> Verdict:
    """Why a run has no verdict, though it has begun."""
    ends = [record.end or {} for record in records.values()]
    if any((end.get("error") or {}).get("own_ranks") for end in ends):
        return unknown("the script started its ranks itself, and only it knows what they train")
    why = why_no_pace(run, None) or TOO_FEW
    if why in (TOO_FEW, STOPPED_EARLY):
        return Verdict(limit="too-short", why=why)
    return unknown(why)


def too_short(likely: Verdict, found: Measured) -> Verdict:
    """What a run looks like so far, if it was not measured long enough to be sure."""
    only = f"only {count(found.num_steps, 'steady step')} in {duration(found.timing.seconds)}"
    return dataclasses.replace(
        likely,
        limit="too-short",
        why=f"{only}, which look limited by {likely.limit}: {likely.why}",
        sure=False,
        doubt=None,
        next=f"let it run for at least {ENOUGH_STEPS} steady steps",
        gain=None,
        cause=likely.cause and "too-short-to-judge",
    )


# --- Which part, and how sure --------------------------------------------------------------------


def gain_of(limit: Limit, found: Measured) -> float:
    """How many times as fast a run can be, at most, without what limits it.

    A bound, so what else a step takes is that of the block of steps in which it took least.
    """
    rest = min(seconds_without(limit, parts, found) for parts in found.blocks)
    return round(min(MOST_GAIN, found.step_seconds / max(1e-9, rest)), 3)


def seconds_without(limit: Limit, parts: Shares, found: Measured) -> float:
    """What a step would take without one of its parts.

    If the host no longer keeps a GPU waiting, it launches ahead: what else it does then overlaps
    with the rest of the step, and only the longer of the two counts. So does the wait for a loader,
    unless it is so long that its workers may be the next limit.
    """
    left = {part: took for part, took in parts.items() if part != limit}
    if not found.is_gpu or limit not in ("launches", "host", "copies"):
        return math.fsum(left.values())
    overlaps = ["launches", "host"]
    if found.shares["data"] < Thresholds().data:
        overlaps.append("data")
    hidden = math.fsum(left.pop(part, 0.0) for part in overlaps)
    return max(math.fsum(left.values()), hidden)


def limit_of(facts: Facts) -> Limit:
    """The part whose removal gains most; compute if none gains enough."""
    shares, limits = facts.found.shares, facts.limits
    rest = partial(seconds_without, parts=shares, found=facts.found)
    least = limits.least_ms / 1e3 / facts.found.step_seconds
    borders = {part: max(limits.of(part), least) for part in LIMITS[1:]}
    if shares["straggler"] >= borders["straggler"] and is_jitter(facts):
        borders["straggler"] *= JITTER
    enough: list[Any] = [one for one in borders if shares[one] and shares[one] >= borders[one]]
    best: Limit = min(enough, key=rest, default="compute")
    return best


def doubt_of(limit: Limit, found: Measured, limits: Thresholds) -> str | None:
    """Which other part could be the limit, judging by how much the shares vary in the run."""
    untraced = "no step was traced" + (f" ({found.problem})" if found.problem else "")
    if found.typical is not None:
        untraced = "the traced steps are not like the others"
    if limit in LOCAL and not found.has_trace:
        return untraced
    shares = found.shares
    rivals = [part for part in LIMITS[1:] if part != limit]
    if not found.has_trace:
        # Any of these may be hidden in the local work.
        rivals = [part for part in rivals if part not in LOCAL]
        hidden = math.fsum(shares[part] for part in LOCAL)
        if shares[limit] <= hidden:
            return f"{untraced}, and the ranks' own work takes {percent(hidden, 0)} of the time"
    borders = {part: limits.of(part) for part in LIMITS[1:]}
    if limit != "compute" and not is_positive(found, {limit: 1.0}, -borders[limit]):
        return f"a gain of {LEAST_GAIN:g}x is not certain: its share varies"
    for part in sorted(rivals, key=lambda part: -shares[part]):
        if limit == "compute":
            is_less = is_positive(found, {part: -1.0}, borders[part])
        else:
            is_less = is_positive(found, {limit: 1.0, part: -1.0})
        if not is_less:
            return (
                f"{part} takes {percent(shares[part], 0)} of the time, varies, and may matter more"
            )
    return None


def is_positive(found: Measured, weights: Mapping[str, float], more: float = 0.0) -> bool:
    """Whether a weighted sum of shares, plus `more`, is positive by more than chance explains."""

    def total(shares: Shares) -> float:
        return more + math.fsum(weight * shares[part] for part, weight in weights.items())

    each = [total(normalised(parts)) for parts in found.blocks]
    error = statistics.stdev(each) / math.sqrt(len(each)) if len(each) > 1 else math.inf
    least = RUN_ERROR * max(found.shares[part] for part in weights)
    least += found.doubt * len(weights.keys() & {"host", "launches", "copies"})
    return total(found.shares) > SURE * error + least
