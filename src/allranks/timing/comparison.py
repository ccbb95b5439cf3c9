"""How much faster more ranks are. All commands compare runs by the rules below.

These commands are `bench scaling`, `report`, `watch`, `status` and `submit --ladder`. The rules:

- Runs are compared if they train the same thing with the same settings (`same_job`). Runs of one
  scaling benchmark are compared with each other (`is_compared`), each kind of device separately.
- A layout's pace is the median of its repeats. Its 95% interval is Student's of their mean, widened
  to hold the median; of a single run it comes from the spread of its steps.
- A run that failed, or that must not be compared (`remarks.py`: its ranks train alone, or it is too
  short), counts only if its layout has no other run with a pace. Stopped runs and runs that are
  still going count.
- The base is the layout with the fewest ranks that has a pace; of several, the fastest.
- Speedup is a layout's pace over the base's, efficiency is that over how many times more ranks.
  A layout without a pace has neither.
- A layout has a `doubt` instead of a speedup if its runs must not be compared, if half of its 95%
  interval is more than a quarter of its pace (`WIDE`), or if the base has a doubt. The base also
  has one if a layout that divides the model as the base does, or any if the base is a single rank,
  is more than 110% efficient (`SUSPICIOUS`): more ranks cannot achieve that, so the base must have
  been slowed down. Without a speedup there is no efficiency, verdict,
  recommendation, law or prediction.
- Where a step's time goes is taken from the median repeat (from two if their number is even), as
  shares of the median step.
- Scaling is `strong` if all layouts train the same batch, `weak` if all ranks with samples of their
  own do, to 2%; `mixed` if neither, `one layout` if there is only one.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from allranks.layout import Layout
from allranks.run.folder import RunDir
from allranks.run.record import RankRecord
from allranks.show.numbers import between, count, number, percent
from allranks.timing.remarks import SPEEDUP, Remark, forbidding, is_guess
from allranks.timing.steps import PARTS, Timing

SAME_JOB = (
    *("name", "task", "command", "options", "batch_size", "batch_size_per_rank", "optimizer"),
    *("lr_scaling", "compress", "precision", "compile", "activation_checkpointing", "launcher"),
)
CPU = "CPU"
SCALING = "scaling"  # the one benchmark whose runs are meant to be compared by layout
MODES = {
    "strong": "strong scaling (the same batch on every layout)",
    "weak": "weak scaling (the same batch on every rank)",
    "mixed": "scaling with batches that differ",
    "one layout": "one layout",
}
SAME = 0.02  # relative difference up to which two batches, or two amounts of work, are the same
SUSPICIOUS = 1.1  # efficiency: caches can make it a little better than ideal, not much
WIDE = 0.25  # of a pace: the most that half of its 95% interval may be for a comparison
# A layout's state is the first of these that one of its runs has.
STATES = ("finished", "running", "stopped", "queued", "failed")

# Student's t, 97.5%, for 1 to 30 degrees of freedom.
T_975 = (
    *(12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281),
    *(2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860),
    *(2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423),
)


@dataclass(frozen=True, slots=True)
class CpuUse:
    """The threads and CPUs of an average rank. None: not known."""

    threads: int | None = None  # of torch
    cpus: float | None = None  # in use

    @property
    def words(self) -> str:
        """For example: 2 threads and 0.87 CPUs in use."""
        threads = count(self.threads, "thread") if self.threads else ""
        in_use = f"{number(self.cpus, 2)} CPUs in use" if self.cpus is not None else ""
        return " and ".join(filter(None, [threads, in_use]))


class Measured(Protocol):
    """What the comparison needs to know about a run."""

    @property
    def run(self) -> str: ...
    @property
    def layout(self) -> str | None: ...
    @property
    def device(self) -> str: ...
    @property
    def state(self) -> str: ...
    @property
    def samples_per_second(self) -> float | None: ...
    @property
    def timing(self) -> Timing | None: ...
    @property
    def remarks(self) -> Sequence[Remark]: ...
    @property
    def cpus(self) -> CpuUse: ...


M = TypeVar("M", bound=Measured)


@dataclass(frozen=True, slots=True)
class Pace:
    """A run of which only the pace is known."""

    run: str
    layout: str
    samples_per_second: float | None
    state: str = "finished"
    device: str = CPU
    timing: Timing | None = None
    remarks: Sequence[Remark] = ()
    cpus: CpuUse = CpuUse()


@dataclass(frozen=True, slots=True)
class Spread:
    """Repeats of one quantity."""

    median: float  # what is shown of them
    mean: float
    min: float
    max: float
    n: int
    ci95: tuple[float, float] | None  # None for a single value


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One layout on one kind of device: its runs together, against the base. None: not known.

    Times are seconds of a step.
    """

    layout: str
    device: str
    ranks: int
    nodes: int
    state: str
    runs: tuple[str, ...]
    counted: tuple[str, ...]  # the runs that the numbers come from
    typical: str | None  # the run of median pace: its limit is the layout's
    num_failed: int
    is_steady: bool  # whether all of them reached steady steps
    is_guess: bool = False  # whether their samples are an estimate
    batch: float | None = None  # samples of a step, of all ranks
    samples_per_second: Spread | None = None
    step_seconds: float | None = None
    parts: dict[str, float] | None = None
    exchanges: dict[str, float] = field(default_factory=dict)  # waiting, by name
    slowest_rank: int | None = None
    slowest_part: str | None = None
    baseline: str | None = None  # the layout that speedup and efficiency are against
    speedup: float | None = None
    speedup_ci95: tuple[float, float] | None = None
    efficiency: float | None = None
    lost: dict[str, float] = field(default_factory=dict)  # efficiency that each part costs
    doubt: str | None = None  # why it has a pace and no speedup
    cpus: CpuUse = CpuUse()  # of its first run

    @property
    def whole(self) -> Layout:
        return Layout.parse(self.layout.partition("@")[0])

    @property
    def pace(self) -> float | None:
        return self.samples_per_second.median if self.samples_per_second else None

    @property
    def ci95(self) -> tuple[float, float] | None:
        return self.samples_per_second.ci95 if self.samples_per_second else None

    def ratio(self, ranks: int, pace: float) -> tuple[float, float] | tuple[None, None]:
        """Speedup and efficiency of `ranks` ranks at a pace, with this layout as the base."""
        if not self.pace or self.doubt:
            return None, None
        return pace / self.pace, pace / self.pace * self.ranks / ranks


def compare(runs: Iterable[Measured]) -> list[Compared]:
    """A row for each layout of comparable runs, sorted by device and number of ranks."""
    by_layout: dict[tuple[str, str], list[Measured]] = {}
    for run in runs:
        if run.layout is not None:
            by_layout.setdefault((run.device, run.layout), []).append(run)
    rows = [layout_row(those) for those in by_layout.values()]
    rows.sort(key=lambda row: (row.device, row.ranks, row.nodes, row.layout))
    bases = {device: judged_base(rows, device) for device, _ in by_layout}
    return [compared_with(row, bases[row.device]) for row in rows]


def layout_row(runs: Sequence[Measured]) -> Compared:
    """The runs of one layout as a row, not yet compared with others."""
    those = counted(runs)
    name = str(runs[0].layout)
    layout = Layout.parse(name.partition("@")[0])
    # The parts of the median run, or of two, as shares of the step that is shown.
    ordered = sorted(those, key=lambda run: run.samples_per_second or 0.0)
    middle = [run.timing for run in ordered[(len(ordered) - 1) // 2 : len(ordered) // 2 + 1]]
    timings = [run.timing for run in those if run.timing is not None]
    row = Compared(
        layout=name,
        device=runs[0].device,
        ranks=layout.ranks,
        nodes=layout.nodes,
        state=min((run.state for run in runs), key=STATES.index),
        runs=tuple(run.run for run in runs),
        counted=tuple(run.run for run in those),
        typical=ordered[(len(ordered) - 1) // 2].run if ordered else None,
        num_failed=sum(run.state == "failed" for run in runs),
        is_steady=all(timing.steady for timing in timings),
        is_guess=is_guess(remark for run in those for remark in run.remarks),
        samples_per_second=pace_of(those),
        cpus=those[0].cpus if those else CpuUse(),
    )
    row = replace(row, doubt=doubt_of(row, those))
    known = [timing for timing in middle if timing is not None]
    if row.pace and known and len(known) == len(middle):
        batch = statistics.fmean(timing.samples_per_step for timing in known)
        step = batch / row.pace
        row = replace(row, batch=batch, step_seconds=step, parts=parts_of(known, step))
        row = replace(row, exchanges=exchanges_of(known, step))
    if timings:
        slowest = statistics.mode([timing.slowest_rank for timing in timings])
        parts = [timing.slowest_part for timing in timings if timing.slowest_rank == slowest]
        row = replace(row, slowest_rank=slowest, slowest_part=statistics.mode(parts))
    return row


def counted(runs: Iterable[M]) -> list[M]:
    """The runs of a layout that its pace comes from."""
    paced = [run for run in runs if run.samples_per_second]
    whole = [run for run in paced if run.state != "failed"] or paced
    return [run for run in whole if not forbidding(SPEEDUP, run.remarks)] or whole


def doubt_of(row: Compared, runs: Sequence[Measured]) -> str | None:
    """Why a layout cannot be compared, judging by its own runs."""
    said = forbidding(SPEEDUP, (remark for run in runs for remark in run.remarks))
    if said is not None:
        return f"{row.layout}: {said.text}"
    error = relative_error(row)
    if error <= WIDE:
        return None
    what = f"its {len(runs)} repeats vary" if len(runs) > 1 else "its steps vary"
    what, again = f"{what} too much to compare it", "more repeats or longer runs"
    if len(runs) == 2:  # they may be close to each other: their interval is wide all the same
        both = " and ".join(number(run.samples_per_second) for run in runs)
        what = f"two repeats ({both} samples/s) are too few to compare it"
        again = "more runs (--repeats 3 or more)"
    return (
        f"{row.layout}: {what}: {number(row.pace)} samples/s ±{percent(error, 0)} (95% interval "
        f"{between(row.ci95)}), and the limit is ±{percent(WIDE, 0)}; measure again on an idle "
        f"machine, with {again}"
    )


def worst_doubt(rows: Sequence[Compared]) -> str | None:
    """A base's, which no speedup can do without; else the largest layout's."""
    ordered = sorted(rows, key=lambda row: row.layout == row.baseline)
    return next((row.doubt for row in reversed(ordered) if row.doubt), None)


def pace_of(runs: Sequence[Measured]) -> Spread | None:
    if not runs:
        return None
    found = spread([run.samples_per_second or 0.0 for run in runs], lowest=0.0)
    if len(runs) == 1 and runs[0].timing is not None:
        return replace(found, ci95=interval_within(runs[0].timing))
    return found


def interval_within(timing: Timing) -> tuple[float, float] | None:
    """The 95% interval from the steps of one run: how much runs differ is not in it."""
    if timing.num_steps < 2:
        return None
    factor = t_975(timing.num_steps - 1) / math.sqrt(timing.num_steps)
    error = factor * timing.step_deviation / timing.step_seconds
    return timing.samples_per_second * max(0.0, 1 - error), timing.samples_per_second * (1 + error)


def spread(values: Sequence[float], *, lowest: float = -math.inf) -> Spread:
    """The spread of one value or more; no interval goes below `lowest`.

    The interval is Student's of the mean, widened to hold the median that it is shown with.
    """
    mean, median = statistics.fmean(values), statistics.median(values)
    interval = None
    if len(values) > 1:
        half = t_975(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
        interval = (min(max(lowest, mean - half), median), max(mean + half, median))
    return Spread(median, mean, min(values), max(values), len(values), interval)


def t_975(freedom: int) -> float:
    """The 97.5% quantile of Student's t: 95% of it lies between minus this and this."""
    if freedom <= len(T_975):
        return T_975[freedom - 1]
    z = statistics.NormalDist().inv_cdf(0.975)  # Cornish and Fisher's expansion around it
    first = (z**3 + z) / (4 * freedom)
    second = (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    return z + first + second


def parts_of(timings: Sequence[Timing], step_seconds: float) -> dict[str, float] | None:
    shares = [
        {part: timing.parts[part] / timing.step_seconds for part in PARTS}
        for timing in timings
        if timing.parts is not None
    ]
    if len(shares) < len(timings):
        return None
    return {part: step_seconds * statistics.fmean(one[part] for one in shares) for part in PARTS}


def exchanges_of(timings: Sequence[Timing], step_seconds: float) -> dict[str, float]:
    names = dict.fromkeys(name for timing in timings for name in timing.exchanges)
    return {
        name: step_seconds
        * statistics.fmean(one.exchanges.get(name, 0.0) / one.step_seconds for one in timings)
        for name in names
    }


def base_of(rows: Iterable[Compared], device: str) -> Compared | None:
    """What the layouts of a device are compared with; None if none of them has a pace."""
    paced = [row for row in rows if row.device == device and row.pace]
    return min(paced, key=lambda row: (row.ranks, -(row.pace or 0.0)), default=None)


def judged_base(rows: Sequence[Compared], device: str) -> Compared | None:
    """The base of a device, with a doubt if another layout is too fast to be true."""
    base = base_of(rows, device)
    if base is None or base.doubt:
        return base
    own = [
        row
        for row in rows
        if row.device == device
        and row.pace
        and not row.doubt
        # To divide the model otherwise can be more efficient: it exchanges other things.
        and (base.ranks == 1 or row.whole.divided == base.whole.divided)
    ]
    best = max(own, key=lambda row: (row.pace or 0.0) / row.ranks)
    _, efficiency = base.ratio(best.ranks, best.pace or 0.0)
    if efficiency is None or efficiency <= SUSPICIOUS:
        return base
    used = [f"{row.cpus.words} on {row.layout}" for row in (base, best) if row.cpus.words]
    seen = f" (per rank: {', '.join(used)})" if used else ""
    threads = ", or with the same OMP_NUM_THREADS on every layout" if device == CPU else ""
    return replace(
        base,
        doubt=f"{best.layout} is {percent(efficiency)} efficient against {base.layout}, too good "
        f"to be true: {base.layout} was slowed down by {'its threads or ' if threads else ''}other "
        f"work on its machine{seen}; measure it again on an idle machine{threads}",
    )


def compared_with(row: Compared, base: Compared | None) -> Compared:
    """The row with its speedup and efficiency, and how much of it each part costs.

    With perfect scaling a sample costs base.step / base.batch / (ranks / base.ranks). Whatever it
    costs beyond that is lost, part by part: the losses sum to 1 - efficiency.
    """
    if base is None or not row.pace:
        return row
    row = replace(row, baseline=base.layout, doubt=row.doubt or base.doubt)
    if row.doubt:
        return row
    assert row.pace
    speedup, efficiency = base.ratio(row.ranks, row.pace)
    lost = {}
    if row.parts and base.parts and row.batch and base.batch:
        cost = sum(row.parts.values()) / row.batch
        for part in PARTS:
            ideal = base.parts[part] / base.batch * base.ranks / row.ranks
            lost[part] = (row.parts[part] / row.batch - ideal) / cost
    return replace(
        row,
        speedup=speedup,
        speedup_ci95=None if row.layout == base.layout else ratio_interval(row, base),
        efficiency=efficiency,
        lost=lost,
    )


def ratio_interval(row: Compared, base: Compared) -> tuple[float, float] | None:
    """The 95% interval of the speedup: the relative errors of both paces, added in quadrature."""
    halves = [relative_error(one) for one in (row, base) if one.ci95 is not None]
    if not halves or not row.pace or not base.pace:
        return None
    speedup, half = row.pace / base.pace, math.hypot(*halves)
    return max(0.0, speedup * (1 - half)), speedup * (1 + half)


def relative_error(row: Compared) -> float:
    """Half of a pace's 95% interval, relative to the pace; 0 if it is not known."""
    return (row.ci95[1] - row.ci95[0]) / 2 / row.pace if row.ci95 and row.pace else 0.0


def mode_of(rows: Sequence[Compared]) -> str:
    known = [(row.batch, row.whole.data_ranks) for row in rows if row.batch]
    if len(known) < 2:
        return "one layout"
    batches = [batch for batch, _ in known]
    if is_same(min(batches), max(batches)):
        return "strong"
    shares = [batch / ranks for batch, ranks in known]
    return "weak" if is_same(min(shares), max(shares)) else "mixed"


def is_same(a: float, b: float) -> bool:
    return abs(a - b) <= SAME * max(abs(a), abs(b))


def is_compared(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether a run of the same job is compared with `one`; both are given by their run.json.

    The runs of one benchmark took turns: they are compared only with each other. Other benchmarks
    do not measure how layouts scale.
    """
    mine, theirs = bench_of(one), bench_of(other)
    if mine.get("kind") == SCALING:
        return mine.get("id") == theirs.get("id")
    return is_comparable(other)


def is_comparable(info: Mapping[str, Any]) -> bool:
    """Whether a run can be compared with other layouts, by its run.json."""
    return bench_of(info).get("kind") in (None, SCALING)


def same_job(job: Mapping[str, Any], info: Mapping[str, Any], run: RunDir) -> dict[str, Any]:
    """The settings that compared runs must have in common; the seed is not among them."""
    same = {"name": run.job_name} | {key: job[key] for key in SAME_JOB if job.get(key) is not None}
    data = job.get("data")
    if isinstance(data, dict) and "num_workers" in data:
        same["data.num_workers"] = data["num_workers"]
    if bench_of(info).get("mode") == "weak":
        same.pop("batch_size", None)  # it grows with the ranks, which is the point
        same["scaling"] = "weak"
    return same


def identity(same: Mapping[str, Any]) -> str:
    """The settings that `same_job` found, as one string."""
    return json.dumps(same, sort_keys=True, default=str)


def device_name(start: Mapping[str, Any], info: Mapping[str, Any], *, uses_gpu: bool) -> str:
    """What a rank computes on: by its start event or, for a script, by its machine."""
    if start.get("device"):
        return str(start["device"])
    names = list(gpu_memory(info))
    return names[0] if names else "GPU" if uses_gpu else CPU


def cpu_use(records: Iterable[RankRecord]) -> CpuUse:
    """The threads of a rank and the CPUs that it uses, by the events of its run."""
    of_run = list(records)
    used = [used for one in of_run if (used := one.mean("cpu", of=one.devices)) is not None]
    threads = next((one.start["threads"] for one in of_run if one.start.get("threads")), None)
    return CpuUse(threads, statistics.fmean(used) if used else None)


def gpu_memory(info: Mapping[str, Any]) -> dict[str, Any]:
    """The GPUs of a run's machine by name, with their bytes, as its run.json has them."""
    hardware = info.get("hardware")
    gpus = hardware.get("gpus") or [] if isinstance(hardware, dict) else []
    return {str(gpu.get("name")): gpu.get("memory_bytes") for gpu in gpus if isinstance(gpu, dict)}


def bench_of(info: Mapping[str, Any]) -> dict[str, Any]:
    """What run.json says about the benchmark that the run is part of; empty if there is none."""
    bench = info.get("bench")
    return bench if isinstance(bench, dict) else {}
