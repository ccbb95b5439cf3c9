"""What makes the numbers of a run doubtful. Every command shows what is decided here.

`remarks` is about one run; what makes a comparison of runs doubtful is in `comparison.py`. Each
remark names the conclusions that it forbids, so no command needs a rule of its own.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from allranks.run.folder import RunDir
from allranks.run.record import (
    EARLY_EVENTS,
    RankRecord,
    attempt_steps,
    counted_of,
    newest_window,
    read_leads,
    read_ranks,
    samples_by_rank,
    steps_in_all,
)
from allranks.run.shares import FEWEST_BATCHES, Fingerprints, counted_prints, first_batches
from allranks.show.numbers import count, duration, number, ranks_in_words
from allranks.timing.steps import (
    STOPPED_EARLY,
    TOO_FEW,
    Timing,
    event_bytes,
    steps_of_one_form,
    timing,
    why_no_pace,
)

Conclusion = Literal["pace", "speedup", "cause"]
PACE: Conclusion = "pace"  # no samples/s is shown
SPEEDUP: Conclusion = "speedup"  # it is not compared with other runs
CAUSE: Conclusion = "cause"  # neither what limits it nor that nothing does

MOST_BYTES = 8 << 20  # of events that are read in full: takes a second
MOST_EVENTS = 32_000  # the first ones, read from all ranks together if there are more
UNEVEN = 0.02  # of the samples of a step
LEAST_EXCHANGED = 1e-5  # of a step
JUDGED_STEPS, JUDGED_SECONDS = 10, 10.0  # with fewer steps in less time, nothing is compared
LATE = 0.1  # share of a step that the others spend waiting for one rank
# By how much the pace over the whole run is below the steady one, and how long slow steps took.
WARM_UP, WARM_UP_SECONDS = 0.1, 1.0
WARM_UP_UNTIL = 2 / 3  # of its steps: slow ones after that are not warm-up
SLOW = 1.5  # times the usual step
ABOUT_SAMPLES = "about-samples"
APART = "no communication between its ranks was seen"

OF_A_WHOLE_RUN = ("too-short", "warm-up")  # kinds of remarks that first steps cannot show
# The worst first, after those that forbid a speedup.
ORDER = (
    *("unknown-samples", "alone", "same-samples", "too-short", "idle-rank", "uneven-ranks"),
    *("warm-up", "early-end", "resumed-script", ABOUT_SAMPLES, "same-order"),
)


@dataclass(frozen=True, slots=True)
class Remark:
    """What makes the numbers of a run doubtful, and what to do about it, in one sentence."""

    kind: str
    text: str
    forbids: tuple[Conclusion, ...] = ()

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def forbidding(what: Conclusion, said: Iterable[Remark]) -> Remark | None:
    """The first remark that forbids a conclusion."""
    return next((remark for remark in said if what in remark.forbids), None)


def is_guess(said: Iterable[Remark]) -> bool:
    """Whether samples/s is only an estimate."""
    return any(remark.kind == ABOUT_SAMPLES for remark in said)


def remarks(
    run: RunDir,
    measured: Timing | None = None,
    records: Mapping[int, RankRecord] | None = None,
    *,
    so_far: bool = False,
) -> list[Remark]:
    """Everything that makes a run's numbers doubtful, the worst first. Takes two seconds at most.

    `measured`: the timing that the caller shows; by default that of the whole run, or of its first
    steps if there are many. `records`: its last attempt, if already read. `so_far`: they are only
    its first events, as of a run that is still going.
    """
    try:
        found = [*found_in(run, measured, records, so_far=so_far)]
    except (KeyError, TypeError, ValueError, OSError):  # files that no rank has written
        return []
    return sorted(found, key=lambda r: (SPEEDUP not in r.forbids, ORDER.index(r.kind)))


def found_in(
    run: RunDir,
    measured: Timing | None,
    records: Mapping[int, RankRecord] | None,
    *,
    so_far: bool,
) -> Iterable[Remark]:
    attempts = run.attempts()
    if not attempts:
        return
    if records is None:
        is_long = event_bytes(run) > MOST_BYTES
        most = min(EARLY_EVENTS, MOST_EVENTS // max(1, len(run.ranks(attempts[-1]))))
        records = read_ranks(run, attempts[-1], most if is_long else None)
        so_far = is_long and measured is None
    if measured is None:
        measured = timing(run, records=records)
    if measured is not None and so_far:  # what is known of its counts may have changed since
        measured = replace(measured, counted=counted_of(run))
    found = of_run(run, measured, records)
    yield from (one for one in found if not (so_far and one.kind in OF_A_WHOLE_RUN))


def of_run(
    run: RunDir, measured: Timing | None, records: Mapping[int, RankRecord]
) -> Iterable[Remark]:
    window = newest_window(records.values())  # of a benchmark, which warms a run up and ends it
    if measured is not None:
        yield from of_samples(measured)
        yield from of_length(measured)
        if len(records) > 1:
            yield from of_ranks(records, measured)
        if window is None:
            yield from of_warm_up(records, measured)
    elif (why := why_no_pace(run, None)) in (TOO_FEW, STOPPED_EARLY):
        yield Remark("too-short", f"too short to judge: {why}", (PACE, SPEEDUP, CAUSE))
    if window is None:
        yield from of_end(run)
    yield from of_attempts(run)


def of_samples(timing: Timing) -> Iterable[Remark]:
    """Samples that could not be counted, or only estimated."""
    counted, why = timing.counted.samples, timing.counted.why
    if timing.pace is None:
        why = why or "its batches have no length"
        yield Remark("unknown-samples", f"samples/s is unknown: {why}", (PACE, SPEEDUP))
    elif counted == "about":
        yield Remark(ABOUT_SAMPLES, f"samples/s is an estimate: {why}", (SPEEDUP,))


def of_ranks(records: Mapping[int, RankRecord], timing: Timing) -> Iterable[Remark]:
    """What the ranks read, and whether they train together."""
    seen = counted_prints(records)
    if not exchanges(timing):
        yield Remark(
            "alone",
            f"{APART}: each trains its own copy of the model, and samples/s adds them up; to train "
            "one model, wrap it in DistributedDataParallel after init_process_group",
            (SPEEDUP,),
        )
    if alike := same_samples(seen):
        yield Remark(
            "same-samples",
            f"{ranks_in_words(alike)} read the same samples, and samples/s counts them once for "
            "each rank; give the loader a DistributedSampler, unless these ranks divide a model in "
            "a way that was not seen",
            (SPEEDUP,),
        )
    if same_order(seen):
        said = "every epoch reads its samples in the same order; call sampler.set_epoch(epoch)"
        yield Remark("same-order", said)
    yield from of_shares(samples_by_rank(records), records)


def of_shares(samples: Mapping[int, float], records: Mapping[int, RankRecord]) -> Iterable[Remark]:
    """Ranks that get no samples, or fewer than others."""
    if not samples or not max(samples.values()):
        return
    idle = sorted(rank for rank in samples if not samples[rank])
    if idle:
        batch = records[min(records)].start.get("global_batch")
        who = f"{ranks_in_words(idle)} {'gets' if len(idle) == 1 else 'get'}"
        why = "so the others do all the work; give every rank a share of the data"
        if batch is not None and batch < len(samples):
            why = (
                f"as a batch has only {count(batch, 'sample')} for {len(samples)} ranks; use at "
                f"most {count(batch, 'rank')}, or a larger batch_size"
            )
        yield Remark("idle-rank", f"{who} no samples, {why}")
        return
    least, most = (choose(samples, key=lambda rank: samples[rank]) for choose in (min, max))
    if samples[most] - samples[least] > UNEVEN * samples[most]:
        yield Remark(
            "uneven-ranks",
            f"rank {most} trains on {samples[most]:,.1f} samples a step, rank {least} on "
            f"{samples[least]:,.1f}; give every rank the same number",
        )


def of_length(timing: Timing) -> Iterable[Remark]:
    """A run that is too short to compare. If it is too short to judge, its verdict says so."""
    if timing.num_steps < JUDGED_STEPS and timing.seconds < JUDGED_SECONDS:
        only = f"measured for only {count(timing.num_steps, 'step')} ({duration(timing.seconds)})"
        text = f"too short to judge: {only}; let it run longer"
        yield Remark("too-short", text, (SPEEDUP, CAUSE))


def of_warm_up(records: Mapping[int, RankRecord], timing: Timing) -> Iterable[Remark]:
    """Slow steps at the beginning, such as compiling: the pace after them, and over the whole run.

    Steps that are slow until the end, as when a loader falls behind, belong to the pace.
    """
    if timing.pace is None:
        return
    steps = steps_of_one_form(records)
    lead = {number: event["seconds"] for number, event in steps[min(steps)].items()}
    counted = {number: took for number, took in lead.items() if number >= timing.first_step}
    usual = statistics.median([*counted.values()] or [timing.step_seconds])
    slow = {number: took for number, took in lead.items() if took > SLOW * usual}
    last = max(slow, default=0)
    if last > WARM_UP_UNTIL * timing.last_step or sum(slow.values()) < WARM_UP_SECONDS:
        return
    pace, after = timing.pace, [took for number, took in counted.items() if number > last]
    if last >= timing.first_step and after:
        pace = timing.samples_per_step / statistics.fmean(after)
    before = [event for of in steps.values() for n, event in of.items() if n < timing.first_step]
    early = sum(took for number, took in lead.items() if number < timing.first_step)
    overall = sum(event.get("samples", 0) for event in before) + timing.samples
    overall /= early + timing.seconds
    if overall >= (1 - WARM_UP) * pace:
        return
    yield Remark(
        "warm-up",
        f"{number(pace)} samples/s after warm-up, {number(overall)} over the whole run: "
        f"{count(len(slow), 'slow step')}, perhaps compiling, took {duration(sum(slow.values()))}",
        (SPEEDUP,) if timing.pace < (1 - 2 * WARM_UP) * pace else (),
    )


def of_end(run: RunDir) -> Iterable[Remark]:
    """A run that ended before its last step."""
    state, leads = run.state(), read_leads(run)
    made, planned = steps_in_all(leads), leads[-1].start.get("steps")
    if state in ("stopped", "failed") and made and made != planned:
        steps = f"{count(made)} of {count(planned, 'step')}" if planned else count(made, "step")
        ended = "was stopped" if state == "stopped" else "failed"
        text = f"it {ended} after {steps}, and its numbers cover only that part"
        yield Remark("early-end", text)


def of_attempts(run: RunDir) -> Iterable[Remark]:
    """A script that was resumed: its steps are counted from 1 in every attempt."""
    leads = read_leads(run)
    made, found = steps_in_all(leads), attempt_steps(leads)
    if found and made and made != found["attempt_steps"]:
        yield Remark(
            "resumed-script",
            f"its {found['attempts']} attempts made {count(made)} steps, the last one "
            f"{count(found['attempt_steps'])}; its pace is that of the last one, and only the "
            "script knows whether each continued the one before",
        )


def same_samples(seen: Mapping[int, Fingerprints]) -> list[int]:
    """The ranks that begin with the same batches; empty if none do."""
    by_content: defaultdict[tuple[Any, ...], list[int]] = defaultdict(list)
    for rank, prints in seen.items():
        if (first := first_batches(prints, "content")) is not None:
            by_content[first].append(rank)
    return next((ranks for ranks in by_content.values() if len(ranks) > 1), [])


def same_order(seen: Mapping[int, Fingerprints]) -> bool:
    """Whether two epochs have the same shuffled order, on all of several ranks."""
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


def exchanges(timing: Timing) -> bool:
    """Whether its ranks were ever seen to wait for each other."""
    if timing.ranks < 2 or timing.parts is None:
        return True
    return timing.parts["comm"] + timing.parts["straggler"] > LEAST_EXCHANGED * timing.step_seconds
