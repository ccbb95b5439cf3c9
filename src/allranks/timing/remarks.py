"""What makes the numbers of a run doubtful: the one place that says so, for every command.

`remarks` says it of one run; what makes a comparison of runs doubtful is in `comparison.py`. Every
remark names the conclusions that it forbids, so that no command needs a rule of its own.
"""

from __future__ import annotations

import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from allranks.run.folder import RunDir, State
from allranks.run.record import (
    EARLY_EVENTS,
    RankRecord,
    attempt_steps,
    newest_window,
    outcome,
    read_leads,
    read_ranks,
    samples_trained,
    steps_in_all,
)
from allranks.show.numbers import count, duration, number, percent, ranks_in_words
from allranks.timing.steps import (
    AFFORDABLE_BYTES,
    STOPPED_EARLY,
    TOO_FEW,
    Timing,
    affordable_timing,
    timing,
    why_no_pace,
)
from allranks.timing.timeline import DATA

Conclusion = Literal["pace", "speedup", "cause"]
PACE: Conclusion = "pace"  # no samples/s is shown
SPEEDUP: Conclusion = "speedup"  # it is not compared with other runs
CAUSE: Conclusion = "cause"  # nothing is said to limit it, and not that nothing is wrong

MOST_EVENTS = 32_000  # that are read, of all ranks together: a second
MOST_BYTES = 8 << 20  # of events that are read whole, to see where the time goes: a second
FEWEST_BATCHES = 2  # that must be equal for it not to be chance
UNEVEN = 0.02  # of the samples of a step
LEAST_EXCHANGED = 1e-5  # of a step
JUDGED_STEPS, JUDGED_SECONDS = 10, 10.0  # with fewer steps in less time, nothing is compared
LATE = 0.1  # of a step, in which the others wait for one rank
# The pace over everything is lower than the steady one by this share, and slow steps took as long.
WARM_UP, WARM_UP_SECONDS = 0.1, 1.0
WARM_UP_UNTIL = 2 / 3  # of its steps: slow ones are seen later if they are not of a warm-up
SLOW = 1.5  # times the usual step
ABOUT_SAMPLES = "about-samples"
APART = "no exchange between its ranks was seen"

OF_A_WHOLE_RUN = ("too-short", "warm-up", "early-end")  # kinds of remarks
# The worst first; before all others come those that forbid a speedup.
ORDER = (
    *("unknown-samples", "alone", "same-samples", "too-short", "idle-rank", "uneven-ranks"),
    *("warm-up", "early-end", "resumed-script", ABOUT_SAMPLES, "same-order"),
)

Fingerprints = dict[tuple[int, int], dict[str, Any]]  # by epoch and batch


@dataclass(frozen=True, slots=True)
class Remark:
    """Something that makes the numbers of a run doubtful, in a sentence with what to do."""

    kind: str
    text: str
    forbids: tuple[Conclusion, ...] = ()

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def forbidding(what: Conclusion, said: Iterable[Remark]) -> Remark | None:
    """The first remark that forbids a conclusion."""
    return next((remark for remark in said if what in remark.forbids), None)


def is_guess(said: Iterable[Remark]) -> bool:
    """Whether samples/s are only about right."""
    return any(remark.kind == ABOUT_SAMPLES for remark in said)


def on_comparison(said: Iterable[Remark]) -> list[Remark]:
    """Those that matter where runs are compared, and nobody asks what limits one of them."""
    return [remark for remark in said if remark.forbids != (CAUSE,)]


def remarks(
    run: RunDir,
    measured: Timing | None = None,
    records: Mapping[int, RankRecord] | None = None,
    *,
    so_far: bool = False,
) -> list[Remark]:
    """Everything that makes a run's numbers doubtful, the worst first. Takes two seconds at most.

    `measured`: as the caller shows it; by default that of the whole run, or of its first steps if
    they are many. `records`: of its last attempt, from the first event on, if they were read.
    `so_far`: only what its first steps show, of a run that goes on.
    """
    try:
        found = [*found_in(run, measured, records)]
    except (KeyError, TypeError, ValueError, OSError):  # files that no rank has written
        return []
    if so_far:
        found = [remark for remark in found if remark.kind not in OF_A_WHOLE_RUN]
    return sorted(found, key=lambda r: (SPEEDUP not in r.forbids, ORDER.index(r.kind)))


def found_in(
    run: RunDir, measured: Timing | None, records: Mapping[int, RankRecord] | None
) -> Iterable[Remark]:
    attempts = run.attempts()
    if not attempts:
        return
    ranks = run.ranks(attempts[-1])
    if records is None:
        most = min(EARLY_EVENTS, MOST_EVENTS // max(1, len(ranks)))
        records = read_ranks(run, attempts[-1], most)
    if measured is None:
        measured = affordable_timing(run, MOST_BYTES) or timing(run, records=records)
    window = newest_window(records.values())  # a benchmark has warmed it up, and ends it
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
    """What is not known about its samples, or not exactly."""
    counted, why = timing.counted.samples, timing.counted.why
    if timing.pace is None:
        why = why or "no samples were seen, as the batches have no length"
        yield Remark("unknown-samples", f"samples/s are not known: {why}", (PACE, SPEEDUP))
    elif counted == "about":
        yield Remark(ABOUT_SAMPLES, f"samples/s are a guess: {why}", (SPEEDUP,))


def of_ranks(records: Mapping[int, RankRecord], timing: Timing) -> Iterable[Remark]:
    """What the ranks read, and whether they train together."""
    seen = {rank: fingerprints(record) for rank, record in records.items()}
    if not exchanges(timing):
        yield Remark(
            "alone",
            f"{APART}: each trains a copy of its own, and their samples/s only add up; to train "
            "one model, wrap it in DistributedDataParallel after init_process_group",
            (SPEEDUP,),
        )
    if alike := same_samples(seen):
        yield Remark(
            "same-samples",
            f"{ranks_in_words(alike)} read the same samples, and samples/s counts each of "
            "them: give the loader a DistributedSampler",
            (SPEEDUP,),
        )
    if same_order(seen):
        said = "every epoch has the same order: call sampler.set_epoch(epoch)"
        yield Remark("same-order", said)
    yield from [*of_shares(samples_by_rank(records), records), *of_slow_rank(timing)][:1]


def of_shares(samples: Mapping[int, float], records: Mapping[int, RankRecord]) -> Iterable[Remark]:
    """Ranks without samples, or with fewer than others."""
    if not samples or not max(samples.values()):
        return
    idle = sorted(rank for rank in samples if not samples[rank])
    if idle:
        batch = records[min(records)].start.get("global_batch")
        who = f"{ranks_in_words(idle)} {'has' if len(idle) == 1 else 'have'}"
        why = "the others do all the work; give every rank a share of the data"
        if batch is not None and batch < len(samples):
            why = (
                f"the batch of {count(batch, 'sample')} is smaller than {len(samples)} ranks; use "
                f"{count(batch, 'rank')} at most, or a larger batch_size"
            )
        yield Remark("idle-rank", f"{who} no samples: {why}")
        return
    least, most = (choose(samples, key=lambda rank: samples[rank]) for choose in (min, max))
    if samples[most] - samples[least] > UNEVEN * samples[most]:
        yield Remark(
            "uneven-ranks",
            f"rank {most} trains on {samples[most]:,.1f} samples a step, rank {least} on "
            f"{samples[least]:,.1f}: give every rank as many",
        )


def of_slow_rank(timing: Timing) -> Iterable[Remark]:
    """A rank that the others wait for."""
    if timing.slowest_rank is None or timing.late_seconds < LATE * timing.step_seconds:
        return
    look = "look for other work on its node"
    if timing.slowest_part == DATA:
        own = timing.data_seconds[timing.slowest_rank]
        others = [took for rank, took in timing.data_seconds.items() if rank != timing.slowest_rank]
        look = (
            f"it waits {duration(own)} for its data, the others up to {duration(max(others))}: "
            "look at its node's disk, its CPUs and its part of the data"
        )
    yield Remark(
        "uneven-ranks",
        f"the others wait {duration(timing.late_seconds)} of each step of "
        f"{duration(timing.step_seconds)} for {timing.slowest_words}; {look}",
    )


def of_length(timing: Timing) -> Iterable[Remark]:
    """A run that is too short to judge, and what it looks like so far."""
    if timing.seconds >= JUDGED_SECONDS:
        return
    said = f"{count(timing.num_steps, 'step')} in {duration(timing.seconds)} count"
    looks = ""
    if timing.parts is not None and timing.step_seconds:
        part = max(WAITING, key=lambda name: (timing.parts or {})[name])
        share = timing.parts[part] / timing.step_seconds
        looks = f"; it looks like {percent(share, 0)} {WAITING[part]}" if share >= LATE else ""
    if timing.num_steps < JUDGED_STEPS:
        text = f"too short to judge: only {said}{looks}; let it run longer"
        yield Remark("too-short", text, (SPEEDUP, CAUSE))
        return
    text = f"too short to judge what limits it: {said}{looks}; let it run for 10 s or more"
    yield Remark("too-short", text, (CAUSE,))


WAITING = {
    "comm": "communication",
    "straggler": "waiting for slower ranks",
    "data": "waiting for data",
    "other": "outside of training",
}


def of_warm_up(records: Mapping[int, RankRecord], timing: Timing) -> Iterable[Remark]:
    """Slow steps at the beginning, as while compiling: two paces, after them and over everything.

    Steps that are slow until the end belong to its pace, as where a loader falls behind.
    """
    if timing.pace is None:
        return
    steps = {rank: record.timed_steps for rank, record in records.items()}
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
        f"{number(pace)} samples/s after its slow steps, {number(overall)} over everything: "
        f"{count(len(slow), 'step')} took {duration(sum(slow.values()))}, as while compiling",
        (SPEEDUP,) if timing.pace < (1 - 2 * WARM_UP) * pace else (),
    )


def of_end(run: RunDir) -> Iterable[Remark]:
    """A run that ended before its last step."""
    state, leads = run.state(), read_leads(run)
    made, planned = steps_in_all(leads), leads[-1].start.get("steps")
    if state in ("stopped", "failed") and made and made != planned:
        of = f" of {count(planned)}" if planned else ""
        ended = "was stopped" if state == "stopped" else "failed"
        text = f"it {ended} after {count(made, 'step')}{of}: its numbers are of that part"
        yield Remark("early-end", text)


def of_attempts(run: RunDir) -> Iterable[Remark]:
    """A script that was resumed: its ranks count from 1 in every attempt."""
    leads = read_leads(run)
    made, found = steps_in_all(leads), attempt_steps(leads)
    if found and made != found["attempt_steps"]:
        yield Remark(
            "resumed-script",
            f"its {found['attempts']} attempts made {count(made)} steps, the last one "
            f"{count(found['attempt_steps'])}; only the script knows whether they went on from "
            "each other, and its pace is the last one's",
        )


def fingerprints(record: RankRecord) -> Fingerprints:
    """The fingerprints of the loader that a rank trains on; none if it is not clear which."""
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


def same_samples(seen: Mapping[int, Fingerprints]) -> list[int]:
    """The ranks that begin with the same batches; empty if none do."""
    by_content: defaultdict[tuple[Any, ...], list[int]] = defaultdict(list)
    for rank, prints in seen.items():
        first = [prints.get((1, batch), {}).get("content") for batch in range(FEWEST_BATCHES)]
        if all(value is not None for value in first) and len(set(first)) == len(first):
            by_content[tuple(first)].append(rank)
    return next((ranks for ranks in by_content.values() if len(ranks) > 1), [])


def same_order(seen: Mapping[int, Fingerprints]) -> bool:
    """Whether two epochs have the same shuffled order on every one of several ranks."""
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


def samples_by_rank(records: Mapping[int, RankRecord]) -> dict[int, float]:
    """Average samples of a step, over the steps that all ranks have made."""
    steps = {
        rank: {event["step"]: event["samples"] for event in record.steps if "samples" in event}
        for rank, record in records.items()
    }
    common = set.intersection(*map(set, steps.values())) if steps else set()
    if not common:
        return {}
    return {rank: sum(own[step] for step in common) / len(common) for rank, own in steps.items()}


def exchanges(timing: Timing) -> bool:
    """Whether its ranks were seen to wait for each other at all."""
    if timing.ranks < 2 or timing.parts is None:
        return True
    return timing.parts["comm"] + timing.parts["straggler"] > LEAST_EXCHANGED * timing.step_seconds


def result(run: RunDir, state: State | None = None) -> dict[str, Any]:
    """A run in one object: what `allranks run --json` prints. `state`: if the caller knows it."""
    found = outcome(run, state)
    is_told = found["samples_per_second"] is not None  # only a task reports it itself
    measured = affordable_timing(run, AFFORDABLE_BYTES if is_told else sys.maxsize)
    if found["counted"]["samples"] == "unknown":
        found["samples_per_second"] = None
    elif measured is not None and measured.samples:
        # Of the same steps as in every other command: a task itself counts all of its steps.
        found["samples_per_second"] = round(measured.samples_per_second, 3)
        found["evaluation_seconds"] = round(measured.evaluation_seconds, 3)
        whole = measured.samples_per_second_with_evaluation
        found["samples_per_second_with_evaluation"] = round(whole, 3)
    if found["samples"] is None and found["counted"]["samples"] != "unknown":
        found["samples"] = samples_trained(run)
    found["remarks"] = [remark.as_json() for remark in remarks(run, measured)]
    return found
