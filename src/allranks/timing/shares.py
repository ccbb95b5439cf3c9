"""Where a run's time goes, from its first steady step to its last: shares that sum to 1.

The steps say how long a rank waits for data and for other ranks. What it does between steps, or
only in a few of them, is a pause. The rest is local work, which a trace divides: the device's times
come from the trace, the length of a step from the steps that were not traced.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allranks.run.events import read_events
from allranks.run.record import RankRecord
from allranks.timing.steps import SURE, SURE_BLOCKS, Event, Timing, timing_of
from allranks.timing.timeline import BACKWARD, DATA, FORWARD, OPTIMIZER, OTHER, PHASES, WAIT

Shares = dict[str, float]

LIMITS = ("compute", "launches", "host", "copies", "data", "communication", "straggler", "pauses")
LOCAL = ("compute", "launches", "host", "copies")  # what only a trace can divide
DOUBT = "doubt"  # by how much the shares of host, launches and copies may be wrong
FAR = 0.3  # of a usual step: in a pause, `other` exceeds the usual by more than this
HEAVY = 1.3  # times the usual backward pass
CHANCE = 4.0  # times what a busy machine would explain
FEW = 0.25  # of the steps: what happens in more of them is no pause
PLACES, PLACE_BYTES = 12, 1 << 14  # in a long file: steps are read there to see how long one takes
NO_WAIT = {WAIT: math.inf}
MOST_SLOWER = 0.25  # of the time for copies: by how much they may be slower in other steps
SLOWED = 2.5  # times: more is not explained by tracing short operators on a CPU
# Traced steps may take this many times as long as others, on a GPU besides what the trace has cost.
LIKE_OTHERS = (0.75, 1.33)


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """What the traces of one rank show. Times are seconds of the average traced step."""

    device: str
    parts: Mapping[str, float]  # of LOCAL
    exchanges: float = 0.0  # beyond the waiting that the steps show
    lines: tuple[tuple[str, float], ...] = ()  # of the user's code, with the host's time in them
    copying: tuple[tuple[str, float], ...] = ()  # lines that waited for copies, likewise
    copied: float = 0.0  # bytes
    copied_back: float = 0.0  # of these, from the device to the host
    pageable: float = 0.0  # of these, from or to memory that is not pinned
    kernels: float = 0.0
    slowed: float = 1.0  # how many times as long as other steps they took
    is_alike: bool = True  # whether what the traces have cost explains that

    @property
    def line(self) -> str | None:
        """The line that takes most of the host's time."""
        return self.lines[0][0] if self.lines else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The shares of a run's time, and how much they vary over blocks of its steps."""

    timing: Timing  # of the steps without their pauses
    num_steps: int
    shares: Shares
    blocks: tuple[Shares, ...]  # seconds of the average step in each
    traced: Mapping[int, Traced]  # by rank; without those that have no trace
    evaluation: float = 0.0  # share of the time, as part of the pauses
    problem: str | None = None  # why there is no trace
    is_gpu: bool = False
    utilization: float | None = None  # of the GPUs, by NVML, where there is no trace
    doubt: float = 0.0  # by how much the shares of host, launches and copies may be wrong
    burst: float = 0.0  # the share of the time for data that falls into a few steps

    @property
    def typical(self) -> Traced | None:
        """The trace that divides the local work: the middle rank's, or else another's."""
        rank = trace_of(self.timing, self.traced)
        return None if rank is None else self.traced[rank]

    @property
    def has_trace(self) -> bool:
        """Whether there is a trace that the other steps do not contradict."""
        return self.typical is not None and self.typical.is_alike

    @property
    def step_seconds(self) -> float:
        """The length of the average step, including its part of the pauses."""
        return self.timing.step_seconds / (1 - self.shares["pauses"])


@dataclass(frozen=True, slots=True)
class _Steps:
    """The steps of all ranks without their pauses, and the pauses, by step."""

    steps: Mapping[int, Mapping[int, Event]]
    pauses: Mapping[int, float]  # seconds that all ranks lose before or in a step
    first: int
    is_one_clock: bool

    def timing(self, numbers: Sequence[int], *, steady: bool = True) -> Timing | None:
        of = {rank: {n: own[n] for n in numbers} for rank, own in self.steps.items()}
        window = {"first": numbers[0], "steady": steady}
        return timing_of(of, window, one_clock=self.is_one_clock)


def measure(
    records: Mapping[int, RankRecord],
    window: Timing,
    *,
    is_one_clock: bool,
    rare: float = 0.0,
) -> Measured | None:
    """The shares of the window's time; None where the steps have no phases.

    `records`: of all ranks, or the last steps of each, with their traces. `rare`: seconds of pauses
    per step over the whole run, in case these steps show fewer of them.
    """
    steps = {rank: record.timed_steps for rank, record in records.items()}
    common = set.intersection(*(set(own) for own in steps.values()))
    numbers = sorted(n for n in common if window.first_step <= n <= window.last_step)
    rows = [[own[n] for own in steps.values()] for n in numbers]
    if len(rows) < 2 or any(phase not in one for row in rows for one in row for phase in PHASES):
        return None
    between = time_between(records[min(records)], numbers, rare)
    cleaned = without_pauses(steps, numbers, between, is_one_clock=is_one_clock)
    timing = cleaned.timing(numbers, steady=window.steady)
    if timing is None or timing.parts is None:
        return None
    lead = min(records)
    is_gpu = any(one.mean("utilization", of=one.devices) is not None for one in records.values())
    traced = {
        rank: found
        for rank, record in records.items()
        if (found := traced_of(record, cleaned.steps[rank])) is not None
        # Without kernels, a trace of a GPU's rank says nothing about the GPU.
        and (found.device == "cuda" or not is_gpu)
    }
    is_gpu = is_gpu or any(one.device == "cuda" for one in traced.values())
    utilization = None if traced or not is_gpu else mean_utilization(records)
    middle = cleaned.steps[min(steps) if timing.middle_rank is None else timing.middle_rank]
    usual = statistics.median(local_seconds(event) for event in middle.values())
    division = divided(timing, usual, traced, utilization)
    ends = [len(numbers) * n // SURE_BLOCKS for n in range(SURE_BLOCKS + 1)]
    blocks = [numbers[a:b] for a, b in itertools.pairwise(ends) if b > a]
    shares = normalised(seconds_of(cleaned, numbers, timing, division))
    evaluation = math.fsum(steps[lead][n].get("evaluation", 0.0) for n in numbers) / len(numbers)
    return Measured(
        timing=timing,
        num_steps=len(numbers),
        shares=shares,
        blocks=tuple(
            seconds_of(cleaned, block, cleaned.timing(block), division) for block in blocks
        ),
        traced=traced,
        evaluation=evaluation * (1 - shares["pauses"]) / timing.step_seconds,
        problem=next((why for one in records.values() if (why := problem_of(one))), None),
        is_gpu=is_gpu,
        utilization=utilization,
        doubt=math.fsum(shares[part] for part in LOCAL) * (division or {}).get(DOUBT, 0.0),
        burst=burst_of([[own[n] for n in numbers] for own in cleaned.steps.values()]),
    )


def seconds_of(
    cleaned: _Steps, numbers: Sequence[int], timing: Timing | None, division: Shares | None
) -> Shares:
    """The parts of the average of these steps; `timing`: of these steps, None for a single one."""
    if timing is not None and timing.parts is not None:
        parts = timing.parts
    else:
        own = cleaned.steps[min(cleaned.steps)][numbers[0]]
        parts = {"compute": own["seconds"] - own[DATA] - own[WAIT], "comm": own[WAIT]}
        parts |= {"data": own[DATA], "straggler": 0.0, "other": 0.0}
    local = parts["compute"] + parts["other"]
    pauses = statistics.fmean(cleaned.pauses[n] for n in numbers)
    seconds = {
        **{part: local * (division or {}).get(part, 0.0) for part in LOCAL},
        "data": parts["data"],
        "communication": parts["comm"] + local * (division or {}).get("communication", 0.0),
        "straggler": parts["straggler"],
        "pauses": pauses,
    }
    if division is None:  # what is outside the passes is all that is known
        seconds |= {"compute": parts["compute"], "host": parts["other"]}
    return {part: max(0.0, took) for part, took in seconds.items()}


def normalised(seconds: Shares) -> Shares:
    total = math.fsum(seconds.values())
    return {part: took / total if total else 0.0 for part, took in seconds.items()}


# --- Pauses --------------------------------------------------------------------------------------


def without_pauses(
    steps: Mapping[int, Mapping[int, Event]],
    numbers: Sequence[int],
    between: Mapping[int, float],
    *,
    is_one_clock: bool,
) -> _Steps:
    """The steps as they would be without pauses, and without waiting for a rank that pauses.

    `between`: seconds before a step that belong to no step.
    """
    usual = statistics.median(own[n]["seconds"] for own in steps.values() for n in numbers)
    # A script without a loader has no mark between a pause and its forward pass.
    has_data = any(own[n][DATA] for own in steps.values() for n in numbers)
    phases = (OTHER,) if has_data else (OTHER, FORWARD)
    excess = {
        rank: {phase: pauses_in(phase, [own[n] for n in numbers], usual) for phase in phases}
        for rank, own in steps.items()
    }
    waits = {rank: statistics.median(own[n][WAIT] for n in numbers) for rank, own in steps.items()}
    cleaned: dict[int, dict[int, Event]] = {rank: {} for rank in steps}
    pauses: dict[int, float] = {}
    for at, n in enumerate(numbers):
        more = {rank: {p: excess[rank][p][at] for p in phases} for rank in steps}
        own = {
            rank: steps[rank][n].get("evaluation", 0.0) + math.fsum(more[rank].values())
            for rank in steps
        }
        pauses[n] = max(own.values())
        for rank, of_rank in steps.items():
            event = of_rank[n]
            waited = min(max(0.0, event[WAIT] - waits[rank]), pauses[n] - own[rank])
            is_same = not waited and not any(more[rank].values())
            cleaned[rank][n] = event if is_same else shortened(event, more[rank], waited)
        pauses[n] += between.get(n, 0.0)
    return _Steps(cleaned, pauses, numbers[0], is_one_clock)


def pauses_in(phase: str, steps: Sequence[Event], usual: float) -> list[float]:
    """Seconds of a phase in each of these steps that are a pause."""
    found = far_above([event[phase] for event in steps], usual)
    if not any(found):
        return found
    passes = [event[BACKWARD] + event[OPTIMIZER] for event in steps]
    middle = statistics.median(passes)
    if phase == FORWARD:  # if the backward pass is longer, too, it is a longer batch
        heavy = [took > HEAVY * middle for took in passes]
        found = [0.0 if is_heavy else took for is_heavy, took in zip(heavy, found, strict=True)]
    # A busy machine holds up everything now and then, backward passes as often as this phase.
    part = statistics.median(event[phase] for event in steps) / (middle or math.inf)
    by_chance = part * (statistics.fmean(passes) - middle)
    return found if statistics.fmean(found) > CHANCE * by_chance else [0.0] * len(found)


def far_above(seconds: Sequence[float], step: float) -> list[float]:
    """By how much each exceeds the median, if by much and in few steps; otherwise 0."""
    usual = statistics.median(seconds)
    found = [took - usual if took - usual > FAR * step else 0.0 for took in seconds]
    is_rare = sum(map(bool, found)) <= FEW * len(found)
    return found if is_rare else [0.0] * len(found)


def shortened(event: Event, more: Mapping[str, float], waited: float) -> Event:
    """A step without these seconds of its phases and of its longest wait."""
    new = {**event, WAIT: event[WAIT] - waited}
    for phase, took in more.items():
        new[phase] = event[phase] - took
    new["seconds"] = event["seconds"] - waited - math.fsum(more.values())
    if waits := list(event.get("waits", ())):
        longest = max(range(len(waits)), key=waits.__getitem__)
        waits[longest] = max(0.0, waits[longest] - waited)
        new["waits"] = waits
    return new


def time_between(record: RankRecord, numbers: Sequence[int], rare: float = 0.0) -> dict[int, float]:
    """Seconds before each step that belong neither to it nor to an evaluation, such as saves.

    Some are negative, since a host may be ahead of its device: only their sum is meaningful.
    """
    before = {event["step"]: event["t"] for event in record.steps}
    own = {n: event for n, event in record.timed_steps.items() if n - 1 in before}
    traced = {event["step"] for event in record.steps if event.get("traced")}
    found = {n: own[n]["t"] - before[n - 1] - lasted(own[n]) for n in numbers if n in own}
    found = {n: took for n, took in found.items() if n - 1 not in traced}
    seen = statistics.fmean(own[n].get("evaluation", 0.0) for n in found) if found else 0.0
    more = rare - seen - statistics.fmean(found.values()) if found else rare
    return {n: found.get(n, 0.0) + max(0.0, more) for n in numbers}


def lasted(event: Event) -> float:
    """The length of a step and of the evaluation before it."""
    return float(event["seconds"] + event.get("evaluation", 0.0))


def rare_pauses(path: Path) -> float:
    """Seconds between the steps of a long file, per step; 0 if chance may explain them.

    Steps at several places in it show how long one takes, and the clock how long all of them took.
    """
    whole, places = path.stat().st_size, []
    for place in range(PLACES):
        begin = whole * (place + 1) // (PLACES + 1)
        read = read_events(path, begin + PLACE_BYTES, last=whole - begin, kind="step")
        places.append([event for event in read if "seconds" in event and not event.get("traced")])
    places = [steps for steps in places if steps]
    if len(places) < 2 or places[-1][-1]["step"] <= places[0][0]["step"]:
        return 0.0
    first, last = places[0][0], places[-1][-1]
    means = [statistics.fmean(event["seconds"] for event in steps) for steps in places]
    whole_step = (last["t"] - first["t"]) / (last["step"] - first["step"])
    error = statistics.stdev(means) / math.sqrt(len(means))
    pauses = whole_step - statistics.fmean(means)
    return float(pauses) if pauses > SURE * error else 0.0


def burst_of(ranks: Sequence[Sequence[Event]]) -> float:
    """How much of the time for data falls into the first steps of epochs, or into a few steps.

    So it is where workers are started again.
    """
    seconds = [event[DATA] for own in ranks for event in own]
    most = sorted(seconds, reverse=True)[: max(1, len(seconds) // 20)]
    pairs = (pair for own in ranks for pair in itertools.pairwise(own))
    first = [event[DATA] for last, event in pairs if event.get("epoch") != last.get("epoch")]
    total = math.fsum(seconds)
    return max(math.fsum(most), math.fsum(first)) / total if total else 0.0


# --- Local work ----------------------------------------------------------------------------------


def traced_of(record: RankRecord, steps: Mapping[int, Event]) -> Traced | None:
    """What a rank's traces within these steps show, or its last trace if there is none."""
    known = [one for one in record.others["trace"] if "compute" in one and "first" in one]
    within = [one for one in known if one["first"] >= min(steps)] or known[-1:]
    if not within:
        return None
    # On a busy machine, a trace may fall into steps that are nothing like the others.
    within = [one for one in within if is_usual(one, record, steps)] or within
    numbers = {n for one in within for n in traced_steps(one)}
    weights = [len(traced_steps(one)) for one in within]

    def mean(name: str) -> float:
        total = math.fsum(w * one.get(name, 0.0) for w, one in zip(weights, within, strict=True))
        return float(total / sum(weights))

    own = [event for event in record.steps if event["step"] in numbers and OTHER in event]
    usual = statistics.median(event["seconds"] for event in steps.values())
    # A pause in a traced step is not part of every step; what comes in many steps is no pause.
    pauses = far_above([event[OTHER] for event in (*steps.values(), *own)], usual)[len(steps) :]
    parts = {part: mean(part) for part in LOCAL}
    # A trace's first step is preceded by the start of the trace, which is not part of it.
    starts = {one["first"] for one in within}
    traced = [took for event, took in zip(own, pauses, strict=True) if event["step"] not in starts]
    if own:
        parts["host"] = max(0.0, parts["host"] - math.fsum(traced) / len(own))
    device = str(within[-1].get("device", ""))
    least, most = LIKE_OTHERS
    if device == "cuda":
        read_in = set[int]()  # the cost says how long that took
        most += math.fsum(one.get("cost", 0.0) for one in within) / len(numbers) / usual
    else:
        read_in, most = {traced_steps(one)[-1] for one in within}, SLOWED
    slowed = slowed_by(own, steps, pauses, read_in)
    return Traced(
        device=device,
        parts=parts,
        lines=mean_lines(within, "lines"),
        copying=mean_lines(within, "copying"),
        exchanges=max(0.0, mean("exchanges") - statistics.fmean(e[WAIT] for e in own or [NO_WAIT])),
        copied=mean("copied"),
        copied_back=mean("copied_back"),
        pageable=mean("pageable"),
        kernels=mean("kernels"),
        slowed=slowed,
        is_alike=least <= slowed <= most,
    )


def mean_lines(traces: Sequence[Event], field: str) -> tuple[tuple[str, float], ...]:
    """Lines of the user's code and the seconds that each takes on average, longest first."""
    lines: dict[str, float] = {}
    for one in traces:
        for line, took in one.get(field, ()):
            lines[line] = lines.get(line, 0.0) + took / len(traces)
    return tuple(sorted(lines.items(), key=lambda each: -each[1]))


def traced_steps(trace: Mapping[str, Any]) -> range:
    return range(trace["first"], trace.get("last", trace["first"]) + 1)


def is_usual(trace: Mapping[str, Any], record: RankRecord, steps: Mapping[int, Event]) -> bool:
    """Whether the steps of a trace took about as long as those that were not traced."""
    own = [event for event in record.steps if event["step"] in traced_steps(trace)]
    if any(OTHER not in event for event in own):
        return False
    least, most = LIKE_OTHERS
    read_in = {traced_steps(trace)[-1]}
    return least <= slowed_by(own, steps, [0.0] * len(own), read_in) <= most


def slowed_by(
    traced: Sequence[Event],
    others: Mapping[int, Event],
    pauses: Sequence[float],
    read_in: Collection[int],
) -> float:
    """How many times as long traced steps took as the others; 1 if that is not known.

    `read_in`: steps in which a trace was read, which say nothing unless there is no other.
    """
    usual = statistics.median(local_seconds(event) for event in others.values())
    if not traced or not usual:
        return 1.0
    took = {
        event["step"]: local_seconds(event) - more
        for event, more in zip(traced, pauses, strict=True)
    }
    usable = [seconds for step, seconds in took.items() if step not in read_in]
    return statistics.fmean(usable or took.values()) / usual


def local_seconds(event: Event) -> float:
    """The length of a step without its waiting."""
    return float(event["seconds"] - event[DATA] - event[WAIT])


def problem_of(record: RankRecord) -> str | None:
    """Why a rank has no trace."""
    said = [one["problem"] for one in record.others["trace"] if "problem" in one]
    return said[-1] if said else None


def mean_utilization(records: Mapping[int, RankRecord]) -> float | None:
    """The mean utilisation of all GPUs, 0 to 1."""
    means = [one.mean("utilization", of=one.devices) for one in records.values()]
    known = [mean for mean in means if mean is not None]
    return statistics.fmean(known) / 100 if known else None


def divided(
    timing: Timing, usual: float, traced: Mapping[int, Traced], utilization: float | None
) -> Shares | None:
    """How local work is divided: shares that sum to 1; None if nothing shows it.

    `usual`: seconds of it in the median step. On a GPU, idle time is what is left of a step; the
    few steps that were much longer, for example to compile, must not count.
    """
    parts = timing.parts or {}
    local = parts["compute"] + parts["other"]
    if any(one.device == "cuda" for one in traced.values()):
        local = min(local, usual)
    if not local:
        return None
    rank = trace_of(timing, traced)
    if rank is not None:
        seconds = of_local(local, traced[rank])
    elif utilization is not None:
        idle = min(local, max(0.0, timing.step_seconds * (1 - utilization) - waiting(parts)))
        kind = "host" if parts["other"] > idle / 2 else "launches"
        seconds = {"compute": local - idle, kind: idle}
    else:
        return None
    return {part: seconds.get(part, 0.0) / local for part in (*LOCAL, "communication", DOUBT)}


def trace_of(timing: Timing, traced: Mapping[int, Traced]) -> int | None:
    """The rank whose trace divides the local work."""
    return timing.middle_rank if timing.middle_rank in traced else min(traced, default=None)


def waiting(parts: Mapping[str, float]) -> float:
    return parts["data"] + parts["comm"] + parts["straggler"]


def of_local(local: float, traced: Traced) -> Shares:
    """Divides seconds of local work as a trace shows it; tracing slows the host, not a GPU."""
    own = traced.parts
    if traced.device != "cuda":
        # Tracing slows operators, not what is between them; a busy machine slows both.
        host = min(local, own["host"] * min(1.0, SLOWED / traced.slowed))
        doubt = max(own["host"] - host, host - own["host"] / max(1.0, traced.slowed))
        return {"compute": local - host, "host": host, DOUBT: doubt}
    working = own["compute"] + own["copies"] + traced.exchanges
    scale = min(1.0, local / working) if working else 1.0
    idle = max(0.0, local - working)
    seen = own["host"] + own["launches"]
    unseen = max(0.0, idle - seen)
    # The host copies memory that is not pinned, so that time varies like all else that it does.
    by_host = own["copies"] * traced.pageable / traced.copied if traced.copied else 0.0
    part = by_host / (by_host + seen) if by_host else 0.0
    slower = min(MOST_SLOWER * by_host, unseen * part)
    idle -= slower
    likely = idle * own["host"] / seen if seen else idle
    host = min(idle, max(own["host"], likely))
    return {
        "compute": own["compute"] * scale,
        "copies": own["copies"] * scale + slower,
        "communication": traced.exchanges * scale,
        "host": host,
        "launches": idle - host,
        # If traced steps are idle for longer than others, which of the two is longer is not known.
        DOUBT: host - likely + unseen,
    }
