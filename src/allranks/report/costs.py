"""What each layout costs in time, GPU-hours and dollars, and which one to take."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from allranks.machine.prices import Price, find_price
from allranks.report.facts import RunFacts
from allranks.show.numbers import dollars, number, percent, ratio
from allranks.timing.comparison import (
    Compared,
    Spread,
    compare,
    identity,
    is_same,
    relative_error,
    spread,
    worst_doubt,
)

MEASURED, PREDICTED = "measured", "predicted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row(Compared):
    """One layout on one kind of device, and what the job takes on it. None: not known."""

    is_gpu: bool
    seconds: float | None = None  # to finish the job
    seconds_kind: str | None = None
    seconds_spread: Spread | None = None  # of measured ones
    gpu_hours: float | None = None
    gpu_hours_per_epoch: float | None = None
    extra_gpu_hours: float | None = None
    extra_share: float | None = None  # of the baseline's GPU-hours
    doubling_from: str | None = None
    doubling_share: float | None = None  # GPU-hours that the last doubling of ranks added
    usd_per_hour: float | None = None  # of one GPU
    usd: float | None = None
    usd_per_million_samples: float | None = None
    samples: int | None = None  # of the whole job, which the hours are for
    metrics: Mapping[str, Spread] | None = None
    metrics_kind: str | None = None  # final, or so far

    @property
    def hours_per_sample(self) -> float | None:
        """Of the whole job if its hours are known, with evaluations and saves if measured.

        Otherwise of steps alone.
        """
        if self.gpu_hours is not None and self.samples:
            return self.gpu_hours / self.samples
        return self.step_hours_per_sample

    @property
    def step_hours_per_sample(self) -> float | None:
        """From the pace of steps, by which layouts are compared unless all have finished."""
        return self.ranks / self.pace / 3600 if self.pace and not self.doubt else None


def groups(runs: Iterable[RunFacts]) -> list[list[RunFacts]]:
    """Runs by job, the job of the newest run first, each from the oldest run to the newest."""
    by_job: dict[str, list[RunFacts]] = {}
    for run in sorted(runs, key=lambda run: (run.created, run.run), reverse=True):
        by_job.setdefault(identity(run.same_job), []).append(run)
    return [list(reversed(of_job)) for of_job in by_job.values()]


def rows_of(runs: Sequence[RunFacts], prices: Sequence[Price] = ()) -> list[Row]:
    """The rows of one job, by device and from few ranks to many."""
    work = work_of(runs)
    memory = {run.device: run.device_memory for run in runs}
    rows = []
    for layout in compare(runs):
        own = [run for run in runs if (run.device, run.layout) == (layout.device, layout.layout)]
        row = with_metrics(with_seconds(row_of(layout, own[0]), own, work), own, work)
        size = max((run.samples_per_epoch or 0 for run in own), default=0)
        row = replace(row, gpu_hours_per_epoch=size * (row.hours_per_sample or 0.0) or None)
        rows.append(with_price(row, find_price(row.device, memory[row.device], prices)))
    for device in {row.device for row in rows}:
        paced = [row for row in rows if row.device == device and row.efficiency]
        costs, hours = costs_of(paced, work)
        rows = [with_extra(row, paced, costs, hours) if row in paced else row for row in rows]
    return rows


def row_of(layout: Compared, run: RunFacts) -> Row:
    known = {field.name: getattr(layout, field.name) for field in fields(layout)}
    return Row(**known, is_gpu=run.is_gpu)


def work_of(runs: Sequence[RunFacts]) -> int | None:
    """The job in samples: what it asks for, else what complete runs have trained."""
    asked = [run.target_samples for run in runs if run.target_samples]
    done = [run.samples for run in runs if run.is_complete and run.samples]
    return max(asked or done, default=None)


def with_seconds(row: Row, runs: Sequence[RunFacts], work: int | None) -> Row:
    """Time to finish: measured where runs of the whole job finished, else from the pace."""
    whole = [
        run.seconds
        for run in runs
        if run.is_complete and run.seconds and is_same(run.samples or 0, work or 0)
    ]
    if whole:
        times = spread(whole, lowest=0.0)
        row = replace(row, seconds=times.median, seconds_kind=MEASURED, seconds_spread=times)
    elif work and row.pace and not row.doubt:
        row = replace(row, seconds=work / row.pace, seconds_kind=PREDICTED)
    if row.seconds is None:
        return row
    return replace(row, gpu_hours=row.seconds * row.ranks / 3600, samples=work)


def with_metrics(row: Row, runs: Sequence[RunFacts], work: int | None) -> Row:
    """Add the metrics of the runs that have trained longest, not averaged with any others.

    They are final if these runs are complete and have trained the whole job.
    """
    having = [run for run in runs if run.metrics]
    known = [run for run in having if run.is_complete] or having
    longest = max((run.samples or 0 for run in known), default=0)
    known = [run for run in known if is_same(run.samples or 0, longest)]
    names = list(dict.fromkeys(name for run in known for name in run.metrics))
    metrics = {
        name: spread([run.metrics[name] for run in known if name in run.metrics]) for name in names
    }
    is_whole = is_same(longest, work or longest) and all(run.is_complete for run in known)
    kind = "final" if is_whole else "so far"
    return replace(row, metrics=metrics, metrics_kind=kind) if metrics else row


def with_price(row: Row, price: Price | None) -> Row:
    if price is None:
        return row
    per_sample = row.hours_per_sample
    return replace(
        row,
        usd_per_hour=price.usd_per_hour,
        usd=None if row.gpu_hours is None else row.gpu_hours * price.usd_per_hour,
        usd_per_million_samples=per_sample and per_sample * 1e6 * price.usd_per_hour,
    )


def costs_of(rows: Sequence[Row], work: int | None) -> tuple[dict[str, float], float | None]:
    """What the job costs on each layout, comparable, and the GPU-hours of one such unit.

    All measured, or all from the pace: a measured time includes evaluations and saves, a predicted
    one does not.
    """
    if all(row.seconds_kind == MEASURED for row in rows):
        return {row.layout: row.gpu_hours or 0.0 for row in rows}, 1.0
    return {row.layout: row.step_hours_per_sample or 0.0 for row in rows}, work


def with_extra(
    row: Row, rows: Sequence[Row], costs: Mapping[str, float], hours: float | None
) -> Row:
    """With what it takes beyond the baseline, and beyond the next smaller one of `rows`."""
    assert row.baseline is not None
    cost, base = costs[row.layout], costs[row.baseline]
    fewer = [other for other in rows if other.ranks < row.ranks]
    before = max(fewer, key=lambda other: (other.ranks, other.pace or 0), default=None)
    per_doubling = None
    if before is not None:  # the same growth with each doubling of the ranks
        doublings = math.log2(row.ranks / before.ranks)
        per_doubling = (cost / costs[before.layout]) ** (1 / doublings) - 1
    return replace(
        row,
        extra_gpu_hours=(cost - base) * hours if hours else None,
        extra_share=cost / base - 1,
        doubling_from=before.layout if before else None,
        doubling_share=per_doubling,
    )


def what_differs(jobs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For each job, the settings in which the jobs differ, such as `optimizer.lr`."""
    flat = [with_dots(job) for job in jobs]
    keys = sorted({key for job in flat for key in job if key != "name"})
    different = [
        key for key in keys if len({json.dumps(job.get(key), default=str) for job in flat}) > 1
    ]
    return [{key: job.get(key) for key in different} for job in flat]


def with_dots(job: Mapping[str, Any]) -> dict[str, Any]:
    """A job with the keys of its mappings as they are typed in a command: `optimizer.lr`."""
    flat: dict[str, Any] = {}
    for key, value in job.items():
        inner = value if isinstance(value, Mapping) else {"": value}
        flat |= {f"{key}.{name}".rstrip("."): one for name, one in inner.items()}
    return flat


GOOD, BELOW, DIMINISHING = "good", "below target", "diminishing returns"
BASELINE, UNKNOWN, DOUBTFUL = "baseline", "not measured", "doubtful"
BOTH = "the fastest layout whose verdict is good: it meets its target, without diminishing returns"


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """What a layout must reach; shares of one."""

    within_node: float = 0.95  # efficiency
    across_nodes: float = 0.85
    doubling: float = 0.10  # GPU-hours that a doubling of the ranks may add


Choice = dict[str, str]  # a layout to choose, its device, and why


def verdict(row: Row, targets: Targets) -> tuple[list[str], str]:
    """What to think of a row: a word or two, and a sentence with its numbers."""
    if row.doubt:
        return [DOUBTFUL], row.doubt
    if row.efficiency is None:
        return [UNKNOWN], "no pace was measured"
    if row.layout == row.baseline:
        kind = "one rank" if row.ranks == 1 else f"{row.ranks} ranks, the fewest there are"
        return [BASELINE], f"what the others are compared with: {kind}"
    target, where = targets.within_node, "within a node"
    if row.nodes > 1:
        target, where = targets.across_nodes, "across nodes"
    is_reached = row.efficiency >= target
    verb = "meets" if is_reached else "is below"
    text = f"{percent(row.efficiency)} efficiency {verb} {percent(target)} {where}"
    if row.speedup_ci95 and row.speedup:
        low, high = (row.efficiency * bound / row.speedup for bound in row.speedup_ci95)
        if low < target < high:
            text += f" (not certain: 95% interval {percent(low)} to {percent(high)})"
    words = [] if is_reached else [BELOW]
    if row.doubling_share is not None and row.doubling_share > targets.doubling:
        words.append(DIMINISHING)
        growth = percent(row.doubling_share)
        text += f"; doubling the ranks from {row.doubling_from} adds {growth} {hours_name(row)}"
    return words or [GOOD], text


def hours_name(row: Row) -> str:
    return "GPU-hours" if row.is_gpu else "rank-hours"


def best_of(rows: Sequence[Row]) -> Row | None:
    """The row that the headline is about: the fastest that has a speedup, or the only one."""
    larger = [row for row in rows if row.speedup is not None and row.layout != row.baseline]
    paced = [row for row in rows if row.pace]
    only = paced[0] if len(paced) == 1 and not paced[0].doubt else None
    return max(larger, key=lambda row: row.pace or 0, default=only)


def headline(rows: Sequence[Row], best: Row | None, limits: Sequence[str]) -> str | None:
    """The result in a sentence: the best layout against the baseline, and what limits it."""
    if best is None:
        doubt = worst_doubt(rows)
        said = [f"{rows[0].layout} is {limit}." for limit in limits]
        return doubt and " ".join([f"No speedup can be stated. {doubt}.", *said])
    if best.speedup is None or best.efficiency is None or best.layout == best.baseline:
        return f"{best.layout} is {limits[0]}." if limits else None
    text = f"{best.layout} is {ratio(best.speedup)} as fast as {best.baseline}"
    text += f" on {best.device}, at " if len({row.device for row in rows}) > 1 else ", at "
    return "; ".join([f"{text}{percent(best.efficiency)} efficiency", *limits]) + "."


def recommended(rows: Sequence[Row], targets: Targets) -> dict[str, Choice | None]:
    """The layout to choose by time, by cost, and as the best of both; None if not known."""
    paced = [row for row in rows if row.pace and not row.doubt]
    if len(paced) < 2:
        return {"time": None, "cost": None, "both": None}
    return {"time": by_time(paced), "cost": by_cost(paced), "both": by_both(paced, targets)}


def choice(row: Row, why: str) -> Choice:
    return {"layout": row.layout, "device": row.device, "why": why}


def by_time(rows: Sequence[Row]) -> Choice:
    chosen, fastest = least([(1 / (row.pace or 1.0), row) for row in rows])
    why = f"{number(chosen.pace)} samples/s, the most"
    if chosen is not fastest:
        why = (
            f"{number(chosen.pace)} samples/s; {fastest.layout} may be no faster, as their 95% "
            "intervals overlap"
        )
    return choice(chosen, why)


def by_cost(rows: Sequence[Row]) -> Choice | None:
    """By dollars if prices are known; else by GPU-hours, if all layouts are on the same device.

    Of the whole job if all layouts have finished it, else of steps alone.
    """
    priced = [row for row in rows if row.usd_per_hour is not None]
    devices = {row.device for row in rows}
    is_priced = len(priced) == len(rows) or (bool(priced) and len(devices) > 1)
    if not is_priced and len(devices) > 1:
        return None
    compared = priced if is_priced else rows
    is_whole = all(row.seconds_kind == MEASURED for row in compared)

    def cost(row: Row) -> float:
        hours = row.hours_per_sample if is_whole else row.step_hours_per_sample
        return (hours or 0.0) * 1e6 * ((row.usd_per_hour or 0.0) if is_priced else 1.0)

    chosen, cheapest = least([(cost(row), row) for row in compared])
    what = dollars(cost(chosen)) if is_priced else f"{number(cost(chosen))} {hours_name(chosen)}"
    why = f"{what} for a million samples{'' if is_whole else ', counting steps alone'}"
    if chosen is cheapest:
        why += ", the least" if is_priced else ", the fewest"
    else:
        why += f"; {cheapest.layout} may cost no less, as their 95% intervals overlap"
    if not is_priced:
        why += " (no price is known)"
    elif len(priced) < len(rows):
        why += " where a price is known"
    return choice(chosen, why)


def least(costs: Sequence[tuple[float, Row]]) -> tuple[Row, Row]:
    """The row with the fewest ranks of those as cheap as the cheapest up to noise; the cheapest."""
    lowest, best = min(costs, key=lambda one: (one[0], one[1].ranks))
    highest = lowest * (1 + relative_error(best))
    near = [(cost, row) for cost, row in costs if cost * (1 - relative_error(row)) <= highest]
    return min(near, key=lambda one: (one[1].ranks, one[0]))[1], best


def by_both(rows: Sequence[Row], targets: Targets) -> Choice:
    fit = [row for row in rows if verdict(row, targets)[0][0] in (GOOD, BASELINE)]
    best = max(fit, key=lambda row: (row.pace or 0, -row.ranks))
    if best.layout == best.baseline:
        why = "no larger layout meets its target without diminishing returns"
    else:
        why = f"the fastest that is worth it: {verdict(best, targets)[1]}"
    return choice(best, why)
