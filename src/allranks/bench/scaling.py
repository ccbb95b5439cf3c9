"""How a job's speed grows with its ranks, and what each missing part of it is lost to. No torch.

Everything here is a pure function of measured runs; `bench scaling` makes them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from allranks.bench.laws import Fit, differ_too_much, fit_object, law_of
from allranks.layout import Layout
from allranks.timing.samples_seen import APART
from allranks.timing.spread import spread, t_975
from allranks.timing.steps import PARTS, Timing

STOPPED = "it was stopped before there was enough to measure"
NOTHING_TO_MEASURE = ("no optimizer step", "only one step", "no samples")  # in a run that is well
SUSPICIOUS = 1.1  # efficiency: caches can do a little more than ideal, not much
SAME = 0.02  # global batches that differ by less are the same


@dataclass(frozen=True, slots=True)
class Repeat:
    """One run of one layout; `timing` is None if nothing could be measured, and `problem` why."""

    run: str
    layout: Layout
    timing: Timing | None
    problem: str | None = None
    samples_per_epoch: int | None = None
    remarks: Sequence[str] = ()  # on what its ranks read, and whether they exchange anything


@dataclass(slots=True, kw_only=True)
class Row:
    """What was measured of one layout. Times in seconds of a step."""

    layout: Layout
    repeats: list[Repeat]
    samples_per_second: float = 0.0
    ci95: tuple[float, float] | None = None  # None: a single step tells nothing of it
    step_seconds: float = 0.0
    samples_per_step: float = 0.0
    parts: dict[str, float] | None = None
    slowest_rank: int | None = None
    slowest_part: str | None = None
    steady: bool = False
    speedup: float | None = None
    efficiency: float | None = None
    lost: dict[str, float] = field(default_factory=dict)  # efficiency that each part costs

    @property
    def ranks(self) -> int:
        return self.layout.ranks

    @property
    def problem(self) -> str | None:
        return next((one.problem for one in self.repeats if one.problem), None)

    @property
    def remarks(self) -> list[str]:
        return [*dict.fromkeys(remark for one in self.repeats for remark in one.remarks)]


def rows_of(repeats: Sequence[Repeat]) -> list[Row]:
    """One row for each layout, in order of ranks, compared with the smallest that was measured."""
    by_layout: dict[Layout, list[Repeat]] = {}
    for repeat in repeats:
        by_layout.setdefault(repeat.layout, []).append(repeat)
    rows = [row_of(layout, those) for layout, those in by_layout.items()]
    rows.sort(key=lambda row: (row.ranks, row.layout.nodes))
    base = next((row for row in rows if row.samples_per_second), None)
    for row in rows:
        if base is not None and row.samples_per_second:
            compare(row, base)
    return rows


def row_of(layout: Layout, repeats: list[Repeat]) -> Row:
    row = Row(layout=layout, repeats=repeats)
    timings = [one.timing for one in repeats if one.timing is not None]
    if not timings:
        return row
    speeds = [timing.samples_per_second for timing in timings]
    row.samples_per_second = statistics.median(speeds)
    row.ci95 = around(row.samples_per_second, spread(speeds, lowest=0.0).ci95)
    if len(timings) == 1:
        row.ci95 = interval_within(timings[0])
    # The parts of the run in the middle, or of the two, as shares of the step that is shown.
    timings.sort(key=lambda timing: timing.samples_per_second)
    middle = timings[(len(timings) - 1) // 2 : len(timings) // 2 + 1]
    row.samples_per_step = statistics.fmean(each.samples / each.num_steps for each in middle)
    row.step_seconds = row.samples_per_step / row.samples_per_second
    shares = [
        {part: each.parts[part] / each.step_seconds for part in PARTS}
        for each in middle
        if each.parts is not None
    ]
    if len(shares) == len(middle):
        row.parts = {
            part: row.step_seconds * statistics.fmean(share[part] for share in shares)
            for part in PARTS
        }
    row.steady = all(timing.steady for timing in timings)
    named = [t.slowest_rank for t in timings if t.slowest_rank is not None]
    if named:
        row.slowest_rank = statistics.mode(named)
        those = [t.slowest_part for t in timings if t.slowest_rank == row.slowest_rank]
        row.slowest_part = statistics.mode(those)
    return row


def around(value: float, interval: tuple[float, float] | None) -> tuple[float, float] | None:
    """The interval is the mean's: it is widened to what it is shown with."""
    return interval and (min(interval[0], value), max(interval[1], value))


def nothing_measured(state: str, steps: Mapping[int, int]) -> str:
    """Why a run that did not fail has no timing; `steps`: how many each rank has made."""
    if state == "stopped":
        return STOPPED
    most = max(steps, key=lambda rank: steps[rank], default=0)
    if not steps.get(most):
        return "no optimizer step was seen: the script must train with a torch optimizer, in Python"
    none = [rank for rank in steps if not steps[rank]]
    if none:
        ranks = f"rank {none[0]}" if len(none) == 1 else f"{len(none)} other ranks"
        return (
            f"no optimizer step was seen on every rank: rank {most} made {steps[most]}, {ranks} "
            "none, so there is nothing to measure"
        )
    if min(steps.values()) < 2:
        return "only one step was made: the first one is no measure of the others"
    return "no samples were seen: the batches have no length"


def interval_within(timing: Timing) -> tuple[float, float] | None:
    """95% from the spread of the steps of one run: it cannot know how runs differ."""
    if timing.num_steps < 2:
        return None
    factor = t_975(timing.num_steps - 1) / math.sqrt(timing.num_steps)
    error = factor * timing.step_deviation / timing.step_seconds
    return timing.samples_per_second * max(0.0, 1 - error), timing.samples_per_second * (1 + error)


def compare(row: Row, base: Row) -> None:
    """Speedup and efficiency against the smallest layout, and what each part takes of it.

    Perfect scaling makes a sample cost base.step / base.samples / (ranks / base.ranks). What a
    sample costs more than that is lost, part by part: the losses sum to 1 - efficiency.
    """
    times = row.ranks / base.ranks
    row.speedup = row.samples_per_second / base.samples_per_second
    row.efficiency = row.speedup / times
    if row.parts is None or base.parts is None or not row.samples_per_step:
        return
    cost = sum(row.parts.values()) / row.samples_per_step
    for part in PARTS:
        ideal = base.parts[part] / base.samples_per_step / times if base.samples_per_step else 0.0
        row.lost[part] = (row.parts[part] / row.samples_per_step - ideal) / cost


def mode_of(rows: Sequence[Row]) -> str:
    """`strong` if the global batch stays the same, `weak` if the batch of a rank does."""
    measured = [row for row in rows if row.samples_per_step]
    if len(measured) < 2:
        return "one layout"
    base = measured[0]

    def all_near(values: Sequence[float]) -> bool:
        return all(abs(value - values[0]) <= SAME * values[0] for value in values)

    if all_near([row.samples_per_step for row in measured]):
        return "strong"
    if all_near([row.samples_per_step / (row.ranks / base.ranks) for row in measured]):
        return "weak"
    return "mixed"


def as_json(
    rows: Sequence[Row],
    *,
    added: Layout | None = None,
    price: float | None = None,
    more: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """What `bench scaling --json` prints. `price`: dollars for an hour of a rank, if known.

    `added`: the layout that nobody asked for, to compare the others with.
    """
    fit, no_fit = law_of(rows)
    return {
        "mode": mode_of(rows),
        "rows": [
            {
                "layout": str(row.layout),
                "added": row.layout == added,
                "ranks": row.ranks,
                "samples_per_second": row.samples_per_second,
                "ci95": list(row.ci95) if row.ci95 is not None else None,
                "repeats": [
                    {
                        "run": one.run,
                        "samples_per_second": one.timing.samples_per_second if one.timing else None,
                        **({"problem": one.problem} if one.problem else {}),
                    }
                    for one in row.repeats
                ],
                "step_seconds": row.step_seconds,
                "samples_per_step": row.samples_per_step,
                "speedup": row.speedup,
                "efficiency": row.efficiency,
                "parts": row.parts,
                "lost": row.lost or None,
                "slowest_rank": row.slowest_rank,
                "slowest_part": row.slowest_part,
                "steady": row.steady,
                "hours_per_epoch": (hours := hours_per_epoch(row)),
                "cost_per_epoch": None if hours is None or price is None else hours * price,
                "problem": row.problem,
                "remarks": row.remarks,
            }
            for row in rows
        ],
        "fit": fit and fit_object(fit),
        "fit_problem": no_fit,
        **(more or {}),
        "verdict": verdict(rows, fit),
    }


def hours_per_epoch(row: Row) -> float | None:
    """Rank-hours (GPU-hours, where a rank has a GPU) for one pass over the data."""
    sizes = [one.samples_per_epoch for one in row.repeats if one.samples_per_epoch]
    if not sizes or not row.samples_per_second:
        return None
    return row.ranks * sizes[0] / row.samples_per_second / 3600


NEXT = {
    "compute": "a rank computes less efficiently on its smaller share, or ranks share a processor: "
    "try a larger batch_size, or fewer ranks",
    "comm": "exchanging gradients is not hidden behind the computation: try a larger batch_size or "
    "accumulation (fewer exchanges for each sample), and allranks bench comm for the network",
    "straggler": "ranks wait for a slower one: see what is different there",
    "data": "ranks wait for their data: try more data.num_workers, and allranks bench data",
    "other": "the loop does other things between its steps: see them with --profile 20",
}


def verdict(rows: Sequence[Row], fit: Fit | None) -> str:
    """What was found, in a sentence or two, and the next thing to try."""
    measured = [row for row in rows if row.efficiency is not None]
    if not measured:
        why = next((row.problem for row in rows if row.problem), "no step was made")
        return f"nothing could be measured: {why}"
    top = measured[-1]
    if len(measured) == 1:
        others = ", ".join(str(row.layout) for row in rows if row.problem)
        said = f"{top.layout} makes {top.samples_per_second:,.0f} samples/s; "
        return said + (f"{others} could not be measured" if others else "name more layouts")
    for row in (measured[0], top):
        if differs := differ_too_much(row):
            return f"{differs}: measure again when nothing else runs, with more --steps"
    assert top.efficiency is not None and top.speedup is not None
    said = (
        f"{top.layout} is {top.speedup:.2f}x as fast as {measured[0].layout} "
        f"({top.efficiency:.0%} efficient, measured)"
    )
    if any(remark.startswith(APART) for remark in top.remarks):
        return f"{said}, but {APART}: it is one training only if they join"
    if top.efficiency > SUSPICIOUS:
        return (
            f"{said}: more than {top.ranks} ranks should do; before you trust it, look at what "
            f"slowed {measured[0].layout} down (threads, a busy machine), and measure again"
        )
    if top.efficiency >= 0.95:
        return f"{said}: it scales; try more ranks{_beyond(fit, top)}"
    if not top.lost:
        return f"{said}{_beyond(fit, top)}"
    part = max(top.lost, key=lambda name: top.lost[name])
    where = " for slower ranks" if part == "straggler" else ""
    if top.slowest_rank is not None:
        doing = WORDS.get(top.slowest_part or "", top.slowest_part)
        if part == "straggler":
            longer = f" (its {doing} takes longer)" if doing else ""
            where = f" for rank {top.slowest_rank}{longer}"
        elif part == top.slowest_part:
            where = f" (longest on rank {top.slowest_rank})"
    return (
        f"{said}; {top.lost[part]:.0%} is lost to {WORDS[part]}{where}: "
        f"{NEXT[part]}{_beyond(fit, top)}"
    )


WORDS = {
    "compute": "computing",
    "comm": "communication",
    "straggler": "waiting",
    "data": "waiting for data",
    "other": "the rest of the loop",
}


def _beyond(fit: Fit | None, top: Row) -> str:
    if fit is None or top.ranks < 2:
        return ""
    twice = 2 * top.ranks
    return f". Predicted for {twice} ranks: {fit.speedup(twice):.1f}x"
