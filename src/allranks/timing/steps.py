"""How fast a run's steps are, and where their time goes, from the events of all its ranks.

A rank that waits does not know whether it waits for bytes or for a slower rank; all ranks together
do. An exchange ends for all ranks at once, so the rank that came last waited the least: that is the
time of the exchange itself. Whatever another rank waited longer, it waited for that rank. Clocks
are compared only between ranks on one machine, to see which one returns last.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from allranks.layout import with_place
from allranks.run.folder import RunDir
from allranks.run.record import (
    MEASURED,
    Counted,
    RankRecord,
    newest_window,
    read_ranks,
    steps_by_rank,
)
from allranks.show.numbers import percent
from allranks.timing.timeline import BACKWARD, DATA, FORWARD, OPTIMIZER, OTHER, PHASES, WAIT

STEADY_STEPS, STEADY_CHANGE = 10, 0.05  # two blocks of them, and how far their medians may differ
# A rank is slower than the others if on average they wait for it at least this share of a step, and
# that average is at least this many times its standard error over blocks of steps: equal ranks take
# turns at being late, and other work on a machine may slow one of them for a while.
LEAST_LATE, SURE, SURE_BLOCKS = 0.01, 3.5, 10
LEAST_STEPS = 5  # with fewer, one rank is late in most of them by chance
ENOUGH_STEPS = 20  # steady ones: with fewer, what limits a run is not certain
LEAST_PART = 0.1  # of the time others wait for a slow rank: a part that explains as much is named
LEAST_AFTER = 0.25  # of the exchange: how much later than all others a rank leaves it
LEAST_SAME = 0.5  # of the steps: in these, all ranks wait longest in the same exchange
STOPPED_EARLY = "it was stopped before there was enough to measure"
TOO_FEW = "too few steps were made (it takes two on every rank, as the first is always slower)"
AFFORDABLE_BYTES = 32 << 20  # of events; reading ten megabytes takes a second
PIPELINE = "pipeline"  # what waiting for another stage is called
PARTS = ("compute", "comm", "straggler", "data", "other")
PART_WORDS = {part: part for part in PARTS} | {"straggler": "waiting"}  # what people read
SLOWER_IN = {"comm": "communication", DATA: "data loading", OTHER: "the rest of the loop"}

Event = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """A window of steps of one attempt. Times are seconds of the average step."""

    first_step: int
    last_step: int
    ranks: int
    steady: bool
    seconds: float  # of the whole window, by the clock of rank 0
    samples: int  # of all ranks
    step_seconds: float
    step_deviation: float  # standard deviation of the step times
    parts: dict[str, float] | None  # sum to step_seconds; None where phases were not measured
    slowest_rank: int | None  # the one that the others wait for; None where none is slower
    slowest_share: float  # of the steps in which they do
    slowest_part: str | None  # what it does longer than the others: a phase, or comm
    evaluation_seconds: float = 0.0  # between these steps, by the clock of rank 0; not in `seconds`
    counted: Counted = MEASURED  # how sure `samples` is
    late_seconds: float = 0.0  # how long the others wait for the slowest rank
    data_seconds: Mapping[int, float] = field(default_factory=dict)  # waiting for data, by rank
    middle_rank: int | None = None  # the one whose parts these are
    exchanges: Mapping[str, float] = field(default_factory=dict)  # its waiting, by name
    traced_steps: int = 0  # of the window, which are in none of these figures

    @property
    def samples_per_second(self) -> float:
        """The pace of the steps, without evaluations and saves between them."""
        return self.samples / self.seconds if self.seconds else 0.0

    @property
    def samples_per_second_with_evaluation(self) -> float:
        whole = self.seconds + self.evaluation_seconds
        return self.samples / whole if whole else 0.0

    @property
    def evaluation_share(self) -> float:
        """Of the time of steps and evaluations."""
        whole = self.seconds + self.evaluation_seconds
        return self.evaluation_seconds / whole if whole else 0.0

    @property
    def pace(self) -> float | None:
        """Samples/s where it is known: what is shown and compared."""
        return None if self.counted.samples == "unknown" else self.samples_per_second or None

    @property
    def samples_per_step(self) -> float:
        """Of all ranks together: its step time times its samples/s."""
        made = round(self.seconds / self.step_seconds) if self.step_seconds else 0
        return self.samples / made if made else 0.0

    @property
    def num_steps(self) -> int:
        return self.last_step - self.first_step + 1 - self.traced_steps

    @property
    def window(self) -> str:
        return f"steps {self.first_step} to {self.last_step}"

    @property
    def slowest_words(self) -> str:
        return slowest_in_words(
            self.slowest_rank, self.slowest_share, self.slowest_part, self.window
        )


def slowest_in_words(
    rank: int | None, share: float, part: str | None, window: str, layout: object = None
) -> str:
    """Which rank the others wait for, and in which steps, in the same words on every screen.

    The last steps may differ from the whole run, so the window is always named.
    """
    if rank is None:
        return f"no rank is slower than the others in {window}"
    by = f", slower in {SLOWER_IN.get(part, part)}" if part else ""
    who = with_place(f"rank {rank}", layout, [rank])
    return f"{who}, last in {percent(share, 0)} of {window}{by}"


def timing(
    run: RunDir, attempt: int | None = None, records: Mapping[int, RankRecord] | None = None
) -> Timing | None:
    """The measured window of a run's attempt, the last by default; None if it is too short.

    All ranks must have at least two steps in common. `records`: if they were read already.
    """
    attempts = run.attempts()
    if not attempts:
        return None
    if records is None:
        records = read_ranks(run, attempts[-1] if attempt is None else attempt)
    ends = [record.end or {} for record in records.values()]
    if any((end.get("error") or {}).get("own_ranks") for end in ends):
        return None  # the script started ranks itself: nobody knows how many trainings these are
    layout = str(run.info().get("layout", ""))
    steps = steps_of_one_form(records)
    found = timing_of(steps, newest_window(records.values()), one_clock=layout.startswith("1x"))
    return found and replace(found, counted=Counted.worst(records.values()))


def steps_of_one_form(records: Mapping[int, RankRecord]) -> dict[int, Mapping[int, Event]]:
    """The timed steps of all ranks, since the step has had its present form (compiled, say).

    If there are only a few, all of them: a pace of few steps is worth less than one of two forms.
    """
    since = max((e["step"] for of in records.values() for e in of.others["compile"]), default=0)
    steps = {rank: record.timed_steps for rank, record in records.items()}
    late = {rank: {n: e for n, e in of.items() if n >= since} for rank, of in steps.items()}
    is_enough = all(len(of) >= ENOUGH_STEPS for of in late.values())
    return {**(late if is_enough else steps)}


def why_no_pace(run: RunDir, measured: Timing | None) -> str | None:
    """Why a run that has not failed has no samples a second; None if it has."""
    if measured is not None and measured.counted.samples == "unknown":
        return measured.counted.why
    if measured is not None and measured.samples:
        return None
    state, steps = run.state(), steps_by_rank(run)
    if not run.attempts():
        return "it has not started yet"
    if state == "stopped":
        return STOPPED_EARLY
    most = max(steps, key=lambda rank: steps[rank], default=0)
    none = [rank for rank in steps if not steps[rank]]
    if not steps.get(most):
        if state == "running":
            return "no optimizer step was seen so far"
        return "no optimizer step was seen: the script must train with a torch optimizer, in Python"
    if none:
        ranks = f"rank {none[0]}" if len(none) == 1 else f"{len(none)} other ranks"
        return f"no optimizer step was seen on {ranks}, while rank {most} made {steps[most]}"
    if measured is None:
        return TOO_FEW
    return "no samples were seen, as the batches have no length"


def affordable_timing(
    run: RunDir,
    max_bytes: int = AFFORDABLE_BYTES,
    records: Mapping[int, RankRecord] | None = None,
) -> Timing | None:
    """The timing of a run; None if reading it would keep people waiting.

    `records`: if they were read already.
    """
    try:
        if records is None and event_bytes(run) > max_bytes:
            return None
        return timing(run, records=records)
    except (KeyError, TypeError, ValueError, OSError):  # files that no rank has written
        return None


def event_bytes(run: RunDir) -> int:
    """The size of the event files of a run's last attempt."""
    attempt = max(run.attempts(), default=0)
    paths = [run.events(attempt, rank) for rank in run.ranks(attempt)]
    return sum(path.stat().st_size for path in paths if path.exists())


def timing_of(
    steps: Mapping[int, Mapping[int, Event]], window: Event | None, *, one_clock: bool = False
) -> Timing | None:
    """The timing from step events, by rank and step; `one_clock`: all ranks are on one machine."""
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
    split = None
    if all(phase in event for row in rows for event in row for phase in PHASES):
        split = split_waits(rows, one_clock=one_clock)
    slowest = split.slowest if split else None
    mean = statistics.fmean(seconds)
    return Timing(
        first_step=chosen[0],
        last_step=chosen[-1],
        ranks=len(steps),
        steady=is_steady,
        seconds=sum(seconds),
        evaluation_seconds=math.fsum(row[0].get("evaluation", 0.0) for row in rows),
        samples=sum(int(event.get("samples", 0)) for row in rows for event in row),
        step_seconds=mean,
        step_deviation=math.sqrt(statistics.fmean([(took - mean) ** 2 for took in seconds])),
        parts=scaled(split.parts, mean) if split else None,
        slowest_rank=sorted(steps)[slowest] if slowest is not None else None,
        slowest_share=split.slowest_share if split else 0.0,
        slowest_part=split.slowest_part if split else None,
        late_seconds=split.late_seconds if split else 0.0,
        data_seconds={
            rank: statistics.fmean([row[at][DATA] for row in rows])
            for at, rank in enumerate(sorted(steps))
            if split
        },
        middle_rank=sorted(steps)[split.middle] if split else None,
        exchanges=mean_exchanges([row[split.middle] for row in rows]) if split else {},
        traced_steps=chosen[-1] - chosen[0] + 1 - len(chosen),
    )


def mean_exchanges(events: Sequence[Event]) -> dict[str, float]:
    """Seconds of an average step that a rank waits in each kind of exchange, the longest first."""
    sums: dict[str, float] = {}
    for event in events:
        for name, seconds in event.get("exchanges", {}).items():
            sums[name] = sums.get(name, 0.0) + seconds
    ordered = sorted(sums.items(), key=lambda pair: -pair[1])
    return {name: seconds / len(events) for name, seconds in ordered}


def steady_from(seconds: Sequence[tuple[int, float]]) -> tuple[int, bool]:
    """The first steady step, after a block as fast as the next one; and whether there is one.

    The first block is left out: a median does not see a few slow steps at its beginning.
    """
    times = [took for _, took in seconds]
    block = min(STEADY_STEPS, len(times) // 3)
    for start in range(1, len(times) - 2 * block + 1):
        if block < 2:
            break
        if is_steady(times[start : start + 2 * block]):
            return seconds[start + block][0], True
    # Between the first two steps the probe looks for what the script trains.
    return seconds[min(2 if len(seconds) > 3 else 1, len(seconds) - 1)][0], False


def is_steady(times: Sequence[float]) -> bool:
    """Whether the second half of these steps took as long as the first."""
    before, after = times[: len(times) // 2], times[len(times) // 2 :]
    usual = statistics.median(before)
    return abs(statistics.median(after) - usual) <= STEADY_CHANGE * usual


@dataclass(frozen=True, slots=True)
class Split:
    """Where the time of steps went; ranks are numbered by their place in a row."""

    parts: dict[str, float]  # seconds of the average step
    slowest: int | None  # None where no rank is slower than the others
    slowest_share: float  # of the steps in which it came last
    slowest_part: str | None
    late_seconds: float = 0.0  # how long the middle one of the others waits for it
    middle: int = 0  # the one whose parts these are


def split_waits(rows: Sequence[Sequence[Event]], *, one_clock: bool = False) -> Split:
    """Separate communication from waiting for slower ranks; a row has the events of all ranks.

    The parts are those of the median rank, and sum to its steps. If the last rank to
    arrive waits longer for its data, waiting for it counts as data; if the slowest one spends
    longer around an exchange, waiting for it counts as communication.
    """
    ranks = range(len(rows[0]))
    phases = [
        {phase: statistics.fmean([row[r][phase] for row in rows]) for phase in PHASES}
        for r in ranks
    ]
    if len(ranks) == 1 or not any(of_rank[WAIT] for of_rank in phases):
        return Split(parts_of(phases[0]), None, 0.0, None)
    waits = [[math.fsum(inner_waits(event)) for event in row] for row in rows]
    took = statistics.fmean([exchange_seconds(row) for row in rows])
    inner = [statistics.fmean([of_ranks[r] for of_ranks in waits]) for r in ranks]
    slowest, *others = sorted(ranks, key=lambda r: inner[r])
    middle = others[len(others) // 2]
    mine, theirs = phases[middle], phases[slowest]
    straggler = max(0.0, inner[middle] - took)
    late_data = statistics.fmean(
        [late_for_data(row, own, middle) for row, own in zip(rows, waits, strict=True)]
    )
    late_data = min(straggler, late_data)
    # A rank's own part of its waits: what it does before and after the exchanges themselves.
    excess = {phase: theirs[phase] - mine[phase] for phase in PHASES if phase != WAIT}
    excess["comm"] = (theirs[WAIT] - inner[slowest]) - (mine[WAIT] - inner[middle])
    late_comm = min(straggler - late_data, max(0.0, excess["comm"]))
    parts = parts_of(mine, straggler - late_data - late_comm, late_data)
    least = LEAST_LATE * math.fsum(mine.values())
    late = [one[middle] - one[slowest] for one in waits]
    is_shared = one_clock and not any(map(is_pipeline, rows))
    held = held_longest(rows, max(least, statistics.fmean(late))) if is_shared else None
    if held is not None:
        return Split(parts, *held, "comm", max(0.0, statistics.fmean(late)), middle)
    if not is_longer(late, least):
        return Split(parts, None, 0.0, None, middle=middle)
    came_last = [min(ranks, key=lambda r: one[r]) for one in waits]
    part = max(excess, key=lambda phase: excess[phase])
    is_part = excess[part] >= LEAST_PART * statistics.fmean(late)
    return Split(
        parts,
        slowest,
        came_last.count(slowest) / len(rows),
        part if is_part else None,
        statistics.fmean(late),
        middle,
    )


def parts_of(
    phases: Mapping[str, float], straggler: float = 0.0, late_data: float = 0.0
) -> dict[str, float]:
    """A rank's phases as parts of a step. Some of its waiting is for slower ranks or their data."""
    return {
        "compute": phases[FORWARD] + phases[BACKWARD] + phases[OPTIMIZER],
        "comm": phases[WAIT] - straggler - late_data,
        "straggler": straggler,
        "data": phases[DATA] + late_data,
        "other": phases[OTHER],
    }


def late_for_data(row: Sequence[Event], waits: Sequence[float], middle: int) -> float:
    """How long a rank waits in a step because the last one to arrive has waited for its data."""
    last = min(range(len(row)), key=lambda r: waits[r])
    longer = float(row[last][DATA] - row[middle][DATA])
    return max(0.0, min(waits[middle] - waits[last], longer))


def is_longer(differences: Sequence[float], least: float) -> bool:
    """Whether the mean of the differences of steps is at least `least`, and not by chance."""
    if len(differences) < LEAST_STEPS:
        return False
    num = min(SURE_BLOCKS, len(differences))
    ends = [len(differences) * n // num for n in range(num + 1)]
    means = [statistics.fmean(differences[a:b]) for a, b in itertools.pairwise(ends)]
    error = statistics.stdev(means) / math.sqrt(num)
    mean = statistics.fmean(differences)
    return mean > 0 and mean >= least and mean >= SURE * error


def held_longest(rows: Sequence[Sequence[Event]], least: float) -> tuple[int, float] | None:
    """The rank that leaves exchanges after all others, and in what share of the steps.

    All ranks wait equally long then: this one at the end of the exchange, the others for it at the
    beginning of the next. Only a clock that all share shows which one it is.
    """
    if not all("left" in event and "arrive" in event for row in rows for event in row):
        return None
    begins = [[event["arrive"] for event in row] for row in rows]
    ends = [[event["left"] for event in row] for row in rows]
    # Ranks may wait longest in different exchanges: such steps say nothing.
    same = [max(begin) <= min(end) for begin, end in zip(begins, ends, strict=True)]
    if sum(same) < LEAST_SAME * len(rows):
        return None
    ends = [end for end, is_same in zip(ends, same, strict=True) if is_same]
    ranks = range(len(rows[0]))
    last = max(ranks, key=lambda r: statistics.fmean(end[r] for end in ends))
    behind = [end[last] - max(end[r] for r in ranks if r != last) for end in ends]
    exchange = statistics.fmean(row[last][WAIT] for row in rows)
    if not is_longer(behind, max(least, LEAST_AFTER * exchange)):
        return None
    return last, sum(each > 0 for each in behind) / len(behind)


def scaled(parts: Mapping[str, float], step_seconds: float) -> dict[str, float]:
    """The parts as shares of rank 0's step, whose steps begin and end at other moments."""
    total = math.fsum(parts.values())
    return {
        part: seconds * step_seconds / total if total else 0.0 for part, seconds in parts.items()
    }


def inner_waits(event: Event) -> list[float]:
    """The time of each wait in the exchange itself, without the rank's own code around it."""
    waits, own = event.get("waits", [event[WAIT]]), event.get("own", ())
    if len(own) == len(waits):
        return [max(0.0, wait - mine) for wait, mine in zip(waits, own, strict=True)]
    return [max(0.0, event[WAIT] - math.fsum(own))] if own else list(waits)


def is_pipeline(row: Sequence[Event]) -> bool:
    """Whether ranks wait for different neighbours: the waits of one are not those of another."""
    return any(PIPELINE in event.get("exchanges", ()) for event in row)


def exchange_seconds(row: Sequence[Event]) -> float:
    """How long the exchanges of a step took once the last rank had arrived."""
    waits = [inner_waits(event) for event in row]
    if len({len(one) for one in waits}) > 1 or is_pipeline(row):
        return min(math.fsum(one) for one in waits)
    return math.fsum(min(times) for times in zip(*waits, strict=True))
