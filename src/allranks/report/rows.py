"""From layouts compared to what they cost: time to finish, GPU-hours, dollars. Pure functions."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from allranks.machine.prices import Price, find_price
from allranks.report.facts import RunFacts
from allranks.timing.comparison import Compared, compare, identity, is_same
from allranks.timing.spread import Spread, spread

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
    metrics: Mapping[str, Spread] | None = None
    metrics_kind: str | None = None  # final, or so far

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
    memory = {run.device: run.device_memory for run in runs}
    rows = []
    for layout in compare(runs):
        own = [run for run in runs if (run.device, run.layout) == (layout.device, layout.layout)]
        row = with_metrics(with_seconds(row_of(layout, own), own, work), own)
        rows.append(with_price(row, find_price(row.device, memory[row.device], prices)))
    for device in {row.device for row in rows}:
        paced = [row for row in rows if row.device == device and row.pace]
        hours = hours_compared(paced, work)
        rows = [with_extra(row, paced, hours) if row in paced else row for row in rows]
    return rows


def row_of(layout: Compared, runs: Sequence[RunFacts]) -> Row:
    known = {field.name: getattr(layout, field.name) for field in fields(layout)}
    row = Row(**known, is_gpu=runs[0].is_gpu)
    size = max((run.samples_per_epoch or 0 for run in runs), default=0)
    return replace(row, gpu_hours_per_epoch=size * (row.hours_per_sample or 0.0) or None)


def work_of(runs: Sequence[RunFacts]) -> int | None:
    """How many samples the job is: what it asks for, else what complete runs have trained."""
    asked = [run.target_samples for run in runs if run.target_samples]
    done = [run.samples for run in runs if run.is_complete and run.samples]
    return max(asked or done, default=None)


def with_seconds(row: Row, runs: Sequence[RunFacts], work: int | None) -> Row:
    """Time to finish: measured where runs of the whole job finished, else from the pace."""
    whole = [
        run.seconds
        for run in runs
        if run.is_complete and run.seconds and work and is_same(run.samples or 0, work)
    ]
    if whole:
        times = spread(whole, lowest=0.0)
        row = replace(row, seconds=times.median, seconds_kind=MEASURED, seconds_spread=times)
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


def hours_compared(rows: Sequence[Row], work: int | None) -> dict[str, float | None]:
    """GPU-hours of the job by layout, on one footing: all measured, or all from the pace.

    A measured time has evaluations and saves in it, a predicted one has not.
    """
    if all(row.seconds_kind == MEASURED for row in rows):
        return {row.layout: row.gpu_hours for row in rows}
    return {row.layout: work * (row.hours_per_sample or 0) if work else None for row in rows}


def with_extra(row: Row, rows: Sequence[Row], hours: Mapping[str, float | None]) -> Row:
    """What it takes more than the baseline, and than the next smaller one of `rows`."""
    baseline = next(one for one in rows if one.layout == row.baseline)
    mine, theirs = hours[row.layout], hours[baseline.layout]
    fewer = [other for other in rows if other.ranks < row.ranks]
    before = max(fewer, key=lambda other: (other.ranks, other.pace or 0), default=None)
    return replace(
        row,
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
    """By which share they grow with one doubling of the ranks, however many doublings there are."""
    doublings = math.log2(row.ranks / before.ranks)
    return float((growth(before, row, hours) + 1) ** (1 / doublings) - 1)


def what_differs(jobs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For each job the settings in which it is not like the others."""
    keys = sorted({key for job in jobs for key in job if key != "name"})
    different = [
        key for key in keys if len({json.dumps(job.get(key), default=str) for job in jobs}) > 1
    ]
    return [{key: job.get(key) for key in different} for job in jobs]
