"""From runs to a comparison: repeats averaged, each layout against one rank. Pure functions."""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from allranks.machine.prices import Price, find_price
from allranks.report.facts import RunFacts
from allranks.timing.comparison import base_of, counted, identity
from allranks.timing.spread import Spread, spread
from allranks.timing.steps import PARTS

SAME = 0.01  # relative difference up to which two amounts of work are the same
MEASURED, PREDICTED = "measured", "predicted"
# A row's state is the first of these that one of its runs has.
STATES = ("finished", "running", "stopped", "queued", "failed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One layout on one kind of device: its runs together. None: not known."""

    layout: str
    device: str
    is_gpu: bool
    ranks: int
    nodes: int
    state: str
    runs: tuple[str, ...]
    num_counted: int  # runs that the numbers are of; failed ones count only where no other does
    num_failed: int
    is_steady: bool  # whether all of them reached steady steps
    batch: float | None = None  # samples of a step, of all ranks
    samples_per_second: Spread | None = None
    step_seconds: float | None = None
    parts: dict[str, float] | None = None
    slowest_rank: int | None = None
    slowest_part: str | None = None
    baseline: str | None = None  # the layout that speedup and extra hours are against
    speedup: float | None = None
    speedup_ci95: tuple[float, float] | None = None
    efficiency: float | None = None
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
    metrics: Mapping[str, Spread] | None = None
    metrics_kind: str | None = None  # final, or so far

    @property
    def pace(self) -> float | None:
        return self.samples_per_second.mean if self.samples_per_second else None

    @property
    def hours_per_sample(self) -> float | None:
        return self.ranks / self.pace / 3600 if self.pace else None


def groups(runs: Iterable[RunFacts]) -> list[list[RunFacts]]:
    """Runs by job, the job of the newest run first, each from the oldest run to the newest."""
    by_job: dict[str, list[RunFacts]] = {}
    for run in sorted(runs, key=lambda run: (run.created, run.run), reverse=True):
        by_job.setdefault(identity(run.same_job), []).append(run)
    return [list(reversed(of_job)) for of_job in by_job.values()]


def rows_of(runs: Sequence[RunFacts], prices: Sequence[Price] = ()) -> list[Row]:
    """The rows of one job, by device and from few ranks to many."""
    work = work_of(runs)
    by_layout: dict[tuple[str, str], list[RunFacts]] = {}
    for run in runs:
        if run.layout is not None:
            by_layout.setdefault((run.device, run.layout), []).append(run)
    rows = [averaged(of_layout, work) for of_layout in by_layout.values()]
    rows.sort(key=lambda row: (row.device, row.ranks, row.nodes, row.layout))
    memory = {run.device: run.device_memory for run in runs}
    priced = [with_price(row, find_price(row.device, memory[row.device], prices)) for row in rows]
    same_device = itertools.groupby(priced, key=lambda row: row.device)
    found: list[Row] = []
    for device, some in same_device:
        base = base_of(run for run in runs if run.device == device)
        found += compared(list(some), base.layout if base else None, work)
    return found


def work_of(runs: Sequence[RunFacts]) -> int | None:
    """How many samples the job is: what it asks for, else what complete runs have trained."""
    asked = [run.target_samples for run in runs if run.target_samples]
    done = [run.samples for run in runs if run.is_complete and run.samples]
    return max(asked or done, default=None)


def averaged(runs: Sequence[RunFacts], work: int | None) -> Row:
    """The runs of one layout as a row, before it is compared with others."""
    first = runs[0]
    those = counted(runs)
    timings = [run.timing for run in those if run.timing]
    parted = [timing for timing in timings if timing.parts] or timings
    slowest = statistics.mode([timing.slowest_rank for timing in timings]) if timings else None
    row = Row(
        layout=str(first.layout),
        device=first.device,
        is_gpu=first.is_gpu,
        ranks=first.ranks,
        nodes=first.nodes,
        state=min((run.state for run in runs), key=STATES.index),
        runs=tuple(run.run for run in runs),
        num_counted=len(those),
        num_failed=sum(run.state == "failed" for run in runs),
        is_steady=all(timing.steady for timing in timings),
        batch=_mean([timing.samples / timing.num_steps for timing in timings]),
        step_seconds=_mean([timing.step_seconds for timing in parted]),
        parts=mean_parts([timing.parts for timing in parted if timing.parts]),
        slowest_rank=slowest,
        slowest_part=next((t.slowest_part for t in timings if t.slowest_rank == slowest), None),
    )
    paces = [pace for run in those if (pace := run.samples_per_second)]
    if paces:
        row = replace(row, samples_per_second=spread(paces, lowest=0.0))
        size = max((run.samples_per_epoch or 0 for run in those), default=0)
        row = replace(row, gpu_hours_per_epoch=size * (row.hours_per_sample or 0.0) or None)
    return with_metrics(with_seconds(row, runs, work), runs)


def mean_parts(parts: Sequence[Mapping[str, float]]) -> dict[str, float] | None:
    if not parts:
        return None
    return {name: statistics.fmean(one[name] for one in parts) for name in PARTS}


def with_seconds(row: Row, runs: Sequence[RunFacts], work: int | None) -> Row:
    """Time to finish: measured where runs of the whole job finished, else from the pace."""
    whole = [
        run.seconds
        for run in runs
        if run.is_complete and run.seconds and work and close(run.samples or 0, work)
    ]
    if whole:
        times = spread(whole, lowest=0.0)
        row = replace(row, seconds=times.mean, seconds_kind=MEASURED, seconds_spread=times)
    elif work and row.pace:
        row = replace(row, seconds=work / row.pace, seconds_kind=PREDICTED)
    return replace(row, gpu_hours=row.seconds * row.ranks / 3600) if row.seconds else row


def with_metrics(row: Row, runs: Sequence[RunFacts]) -> Row:
    """Of complete runs; where there are none, of those that have any."""
    complete = [run for run in runs if run.is_complete and run.metrics]
    known = complete or [run for run in runs if run.metrics]
    names = list(dict.fromkeys(name for run in known for name in run.metrics))
    metrics = {
        name: spread([run.metrics[name] for run in known if name in run.metrics]) for name in names
    }
    kind = "final" if complete else "so far"
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


def compared(rows: Sequence[Row], base: str | None, work: int | None) -> list[Row]:
    """Rows of one device, each against the layout that is their base."""
    paced = [row for row in rows if row.pace]
    baseline = next((row for row in paced if row.layout == base), None)
    if baseline is None:
        return list(rows)
    hours = hours_compared(paced, work)
    return [against(row, baseline, paced, hours) if row.pace else row for row in rows]


def hours_compared(rows: Sequence[Row], work: int | None) -> dict[str, float | None]:
    """GPU-hours of the job by layout, on one footing: all measured, or all from the pace.

    A measured time has evaluations and saves in it, a predicted one has not.
    """
    if all(row.seconds_kind == MEASURED for row in rows):
        return {row.layout: row.gpu_hours for row in rows}
    return {row.layout: work * (row.hours_per_sample or 0) if work else None for row in rows}


def against(row: Row, baseline: Row, rows: Sequence[Row], hours: Mapping[str, float | None]) -> Row:
    assert row.pace and baseline.pace
    speedup = row.pace / baseline.pace
    mine, theirs = hours[row.layout], hours[baseline.layout]
    fewer = [other for other in rows if other.ranks < row.ranks]
    before = max(fewer, key=lambda other: (other.ranks, other.pace or 0), default=None)
    return replace(
        row,
        baseline=baseline.layout,
        speedup=speedup,
        speedup_ci95=None if row is baseline else ratio_interval(row, baseline),
        efficiency=speedup * baseline.ranks / row.ranks,
        extra_gpu_hours=None if mine is None or theirs is None else mine - theirs,
        extra_share=growth(baseline, row, hours),
        doubling_from=before.layout if before else None,
        doubling_share=doubling(before, row, hours) if before else None,
    )


def growth(before: Row, row: Row, hours: Mapping[str, float | None]) -> float:
    """By which share GPU-hours grow from one layout to another."""
    mine, theirs = hours[row.layout], hours[before.layout]
    if mine is None or theirs is None:  # how much work the job is does not matter to the share
        mine, theirs = row.hours_per_sample, before.hours_per_sample
    assert mine and theirs
    return mine / theirs - 1


def doubling(before: Row, row: Row, hours: Mapping[str, float | None]) -> float:
    """The same for one doubling of the ranks, where the step was larger or smaller than that."""
    doublings = math.log2(row.ranks / before.ranks)
    return float((growth(before, row, hours) + 1) ** (1 / doublings) - 1)


def ratio_interval(row: Row, baseline: Row) -> tuple[float, float] | None:
    """95% of the speedup: the relative half-widths of both paces, added as errors are."""
    halves = []
    for pace in (row.samples_per_second, baseline.samples_per_second):
        if pace is not None and pace.ci95 is not None:
            halves.append((pace.ci95[1] - pace.mean) / pace.mean)
    if not halves:
        return None
    assert row.pace and baseline.pace
    speedup, half = row.pace / baseline.pace, math.hypot(*halves)
    return max(0.0, speedup * (1 - half)), speedup * (1 + half)


def mode_of(rows: Sequence[Row]) -> str:
    """strong: the same batch on every layout; weak: the same batch on every rank."""
    known = [(row.batch, row.ranks) for row in rows if row.batch]
    if len({ranks for _, ranks in known}) < 2:
        return "one size"
    batches = [batch for batch, _ in known]
    if close(min(batches), max(batches)):
        return "strong"
    shares = [batch / ranks for batch, ranks in known]
    return "weak" if close(min(shares), max(shares)) else "mixed"


def close(a: float, b: float) -> bool:
    return abs(a - b) <= SAME * max(abs(a), abs(b))


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def what_differs(jobs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For each job the settings in which it is not like the others."""
    keys = sorted({key for job in jobs for key in job if key != "name"})
    different = [
        key for key in keys if len({json.dumps(job.get(key), default=str) for job in jobs}) > 1
    ]
    return [{key: job.get(key) for key in different} for job in jobs]
