"""How fast a run's steps are, and where their time goes, from the events of all its ranks.

A rank that waits does not know whether it waits for bytes or for a slower rank; all of them
together do. An exchange ends for all ranks at once, so whoever came last has waited the shortest:
that is what the exchange itself took, and whatever another rank waited longer, it waited for that
one. No clocks are compared.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from allranks.events import read_events
from allranks.rundir import RunDir
from allranks.timeline import BACKWARD, DATA, FORWARD, OPTIMIZER, OTHER, PHASES, WAIT

STEADY_STEPS, STEADY_CHANGE = 10, 0.05
PARTS = ("compute", "comm", "straggler", "data", "other")

Event = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """A window of steps of one attempt. Times are seconds of a step, in the mean."""

    first_step: int
    last_step: int
    ranks: int
    steady: bool
    seconds: float  # of the whole window, by the clock of rank 0
    samples: int  # of all ranks
    step_seconds: float
    step_deviation: float  # standard deviation of the step times
    parts: dict[str, float] | None  # sum to step_seconds; None where phases were not measured
    slowest_rank: int | None  # the one that the others wait for most often
    slowest_share: float  # of the steps
    slowest_part: str | None  # what it does longer than the others

    @property
    def samples_per_second(self) -> float:
        return self.samples / self.seconds if self.seconds else 0.0

    @property
    def num_steps(self) -> int:
        return self.last_step - self.first_step + 1


def timing(run: RunDir, attempt: int | None = None) -> Timing | None:
    """The measured window of a run's attempt, the last by default.

    None unless every rank has made the same two steps at least.
    """
    attempts = run.attempts()
    if not attempts:
        return None
    number = attempts[-1] if attempt is None else attempt
    steps: dict[int, dict[int, Event]] = {rank: {} for rank in run.ranks(number)}
    window: Event | None = None
    for rank in steps:
        for event in read_events(run.events(number, rank)):
            if event["event"] == "step" and "seconds" in event:
                steps[rank][event["step"]] = event
            elif event["event"] == "window" and event["first"] >= (window or event)["first"]:
                window = event  # of ranks that never meet, each has its own
    return timing_of(steps, window)


def timing_of(steps: Mapping[int, Mapping[int, Event]], window: Event | None) -> Timing | None:
    """The same from step events, by rank and step."""
    if not steps or not all(steps.values()):
        return None
    common = sorted(set.intersection(*(set(of_rank) for of_rank in steps.values())))
    if len(common) < 2:
        return None
    if window is not None and window["first"] <= common[-1]:
        first, is_steady = window["first"], bool(window["steady"])
    else:
        lead = min(steps)
        first, is_steady = steady_from([(n, steps[lead][n]["seconds"]) for n in common])
    chosen = [number for number in common if number >= first]
    rows = [[steps[rank][number] for rank in sorted(steps)] for number in chosen]
    seconds = [row[0]["seconds"] for row in rows]
    split = split_waits(rows) if all(WAIT in event for row in rows for event in row) else None
    slowest = split.slowest if split else None
    mean = statistics.fmean(seconds)
    return Timing(
        first_step=chosen[0],
        last_step=chosen[-1],
        ranks=len(steps),
        steady=is_steady,
        seconds=sum(seconds),
        samples=sum(int(event.get("samples", 0)) for row in rows for event in row),
        step_seconds=mean,
        step_deviation=statistics.pstdev(seconds),
        parts=scaled(split.parts, mean) if split else None,
        slowest_rank=sorted(steps)[slowest] if slowest is not None else None,
        slowest_share=split.slowest_share if split else 0.0,
        slowest_part=split.slowest_part if split else None,
    )


def steady_from(seconds: Sequence[tuple[int, float]]) -> tuple[int, bool]:
    """The step after a block that took as long as the block from there on; whether there is one.

    A median is blind to a few slow steps at the beginning of the first block: it is left out.
    """
    times = [took for _, took in seconds]
    block = min(STEADY_STEPS, len(times) // 3)
    for start in range(1, len(times) - 2 * block + 1):
        if block < 2:
            break
        before = statistics.median(times[start : start + block])
        after = statistics.median(times[start + block : start + 2 * block])
        if abs(after - before) <= STEADY_CHANGE * before:
            return seconds[start + block][0], True
    return seconds[min(1, len(seconds) - 1)][0], False


@dataclass(frozen=True, slots=True)
class Split:
    """Where the time of steps went; ranks are counted as they stand in a row."""

    parts: dict[str, float]  # seconds of a step, in the mean
    slowest: int | None  # None where no rank ever waits for another
    slowest_share: float  # of the steps in which it came last
    slowest_part: str | None


def split_waits(rows: Sequence[Sequence[Event]]) -> Split:
    """Tell communication from waiting for slower ranks; a row has the events of all ranks.

    The parts are those of a rank in the middle, and sum to its steps. What the slowest rank waits
    longer for its data than that one counts as data, whoever has to wait for it.
    """
    num_ranks = len(rows[0])
    exchanges = [exchange_seconds(row) for row in rows]
    late = [  # how long each rank waits for slower ones
        statistics.fmean(row[r][WAIT] - took for row, took in zip(rows, exchanges, strict=True))
        for r in range(num_ranks)
    ]
    phases = [
        {phase: statistics.fmean(row[r][phase] for row in rows) for phase in PHASES}
        for r in range(num_ranks)
    ]
    is_met = num_ranks > 1 and any(event[WAIT] for row in rows for event in row)
    slowest, *others = sorted(range(num_ranks), key=lambda r: late[r])
    middle = others[len(others) // 2] if is_met else 0
    mine, theirs = phases[middle], phases[slowest]
    straggler = max(0.0, late[middle])
    late_data = min(straggler, max(0.0, theirs[DATA] - mine[DATA]))
    parts = {
        "compute": mine[FORWARD] + mine[BACKWARD] + mine[OPTIMIZER],
        "comm": mine[WAIT] - straggler,
        "straggler": straggler - late_data,
        "data": mine[DATA] + late_data,
        "other": mine[OTHER],
    }
    if not is_met:
        return Split(parts, None, 0.0, None)
    excess = {phase: theirs[phase] - mine[phase] for phase in PHASES if phase != WAIT}
    part = max(excess, key=lambda phase: excess[phase])
    came_last = [min(range(num_ranks), key=lambda r: row[r][WAIT]) for row in rows]
    share = came_last.count(slowest) / len(rows)
    return Split(parts, slowest, share, part if excess[part] > 0 else None)


def scaled(parts: Mapping[str, float], step_seconds: float) -> dict[str, float]:
    """The same shares of the steps of rank 0, which begin and end a little elsewhere."""
    total = math.fsum(parts.values())
    return {
        part: seconds * step_seconds / total if total else 0.0 for part, seconds in parts.items()
    }


def exchange_seconds(row: Sequence[Event]) -> float:
    """What the exchanges of a step took after the last rank had come to each."""
    waits = [list(event.get("waits", [event[WAIT]])) for event in row]
    if len({len(one) for one in waits}) > 1:
        return min(math.fsum(one) for one in waits)
    return math.fsum(min(times) for times in zip(*waits, strict=True))
