"""What a report knows about one run, from its folder, whatever state the folder is in."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from allranks.errors import AllranksError
from allranks.layout import Layout
from allranks.run.failures import failure, failure_in_words
from allranks.run.folder import RunDir
from allranks.run.record import RankRecord, newest_window, outcome, read_ranks, samples_per_epoch
from allranks.run.run_state import KILLED, NEVER_STARTED, unreadable
from allranks.timing.comparison import (
    CPU,
    CpuUse,
    bench_of,
    cpu_use,
    device_name,
    gpu_memory,
    same_job,
)
from allranks.timing.remarks import Remark, remarks
from allranks.timing.steps import Timing, timing, why_no_pace
from allranks.timing.verdict import Judgement, judge

MAX_POINTS = 400  # of a curve: more than a chart has pixels for


@dataclass(frozen=True, slots=True)
class Curve:
    """Points of a chart."""

    x: list[float]
    y: list[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """One run, as far as it got."""

    run: str
    run_dir: str
    created: float
    job: str
    same_job: Mapping[str, Any]  # what other runs must have in common with it
    layout: str | None  # None before one was chosen
    ranks: int = 0
    nodes: int = 0
    device: str = CPU
    device_memory: int | None = None
    state: str = "failed"
    problem: str | None = None  # why it failed, or has no pace
    bench: Mapping[str, Any] = field(default_factory=dict)
    steps: int | None = None
    samples: int | None = None  # done, by all ranks
    target_samples: int | None = None  # what the job asks for; None where only a script knows
    samples_per_epoch: int | None = None
    is_complete: bool = False  # trained to its end: not stopped, and not cut short to measure
    seconds: float | None = None  # of training; None if layouts changed on the way
    timing: Timing | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    remarks: tuple[Remark, ...] = ()
    judgement: Judgement | None = None
    cpus: CpuUse = field(default_factory=CpuUse)
    loss: Curve | None = None  # by step
    utilization: Curve | None = None  # by seconds: percent of a GPU, or CPUs of a rank

    @property
    def samples_per_second(self) -> float | None:
        return self.timing.pace if self.timing else None

    @property
    def is_gpu(self) -> bool:
        return self.device != CPU


def read_run(run: RunDir) -> RunFacts:
    """Everything that a report says of a run, whatever a crash may have left behind."""
    try:
        return _read_run(run)
    except Exception as error:  # a folder nobody foresaw must not cost other runs their numbers
        return RunFacts(
            run=run.name,
            run_dir=str(run.path),
            created=0.0,
            job=run.job_name,
            same_job={"name": run.job_name},
            layout=None,
            problem=unreadable(error),
        )


def _read_run(run: RunDir) -> RunFacts:
    info, job = run.info(), run.job()
    attempts = run.attempts()
    found = outcome(run)
    layout = parse_layout(found["layout"])
    seen = AllRanks(run, attempts)
    start = seen.last[min(seen.last)].start if seen.last else {}
    measured = timing(run, records=seen.last)
    odd = remarks(run, measured, seen.last)
    device, memory = device_of(start, info, seen)
    layouts = {one.get("layout") for one in info.get("attempts", []) if isinstance(one, dict)}
    state = found["state"]
    is_counted = found["counted"]["samples"] != "unknown"
    said = {name: value for name, value in found["metrics"].items() if value is not None}
    return RunFacts(
        run=run.name,
        run_dir=str(run.path),
        created=float(info.get("created") or 0.0),
        job=str(job.get("name") or run.job_name),
        same_job=same_job(job, info, run),
        layout=str(layout) if layout else None,
        ranks=layout.ranks if layout else 0,
        nodes=layout.nodes if layout else 0,
        device=device,
        device_memory=memory,
        state=state,
        problem="; ".join(filter(None, [problem_of(run, state, measured), run.problem()])) or None,
        bench=bench_of(info),
        steps=found["steps"],
        samples=(found["samples"] or seen.samples or None) if is_counted else None,
        target_samples=target_samples({**job, **bench_of(info).get("job", {})}, start),
        samples_per_epoch=samples_per_epoch(run),
        is_complete=state == "finished" and newest_window(seen.last.values()) is None,
        seconds=found["seconds"] or None if len(layouts) <= 1 else None,
        timing=measured,
        remarks=tuple(odd),
        judgement=judge(run, measured, seen.last),
        cpus=cpu_use(seen.last.values()),
        metrics=said | seen.metrics | said,
        loss=thinned([(step, loss) for step, loss in sorted(seen.losses.items())]),
        utilization=seen.utilization(),
    )


def parse_layout(text: Any) -> Layout | None:
    try:
        return Layout.parse(text) if isinstance(text, str) else None
    except AllranksError:  # several layouts, of which none has started yet
        return None


def device_of(
    start: Mapping[str, Any], info: Mapping[str, Any], seen: AllRanks
) -> tuple[str, int | None]:
    """What a rank computes on, and its memory."""
    device = device_name(start, info, uses_gpu=bool(seen.of_devices("utilization")))
    totals = [total for _, total in seen.of_devices("memory_total")]
    memory = gpu_memory(info).get(device) or (totals[-1] if totals else None)
    return device, int(memory) if memory else None


def target_samples(job: Mapping[str, Any], start: Mapping[str, Any]) -> int | None:
    epochs, size = job.get("epochs"), start.get("samples_per_epoch")
    if isinstance(epochs, int) and isinstance(size, int):
        return epochs * size
    steps, batch = job.get("steps") or start.get("steps"), start.get("global_batch")
    return steps * batch if isinstance(steps, int) and isinstance(batch, int) else None


def problem_of(run: RunDir, state: str, measured: Timing | None) -> str | None:
    """In a line, why a run failed or has no pace; None if all is well."""
    if state == "failed":
        failed = failure(run)
        given_up = run.info().get("ended")
        if isinstance(given_up, dict) and given_up.get("reason"):
            return str(given_up["reason"])
        if failed:
            return failure_in_words(failed)
        return KILLED if run.attempts() else NEVER_STARTED
    return why_no_pace(run, measured)


class AllRanks:
    """What the ranks of all attempts have recorded, one attempt in memory at a time.

    Steps that a later attempt trained again replace the earlier ones; utilisation is of the last.
    """

    def __init__(self, run: RunDir, attempts: Sequence[int]) -> None:
        self.samples = 0
        self.losses: dict[int, float] = {}
        self.metrics: dict[str, float] = {}
        self.last: dict[int, RankRecord] = {}  # of the last attempt
        for attempt in attempts:
            self.last = {}  # first: those of a long attempt take much memory
            self.last = read_ranks(run, attempt)
            for record in self.last.values():
                self.samples += sum(event.get("samples", 0) for event in record.steps)
                known = record.losses.items()
                self.losses |= {step: loss for step, loss in known if loss is not None}
                self.metrics |= record.metrics

    def of_devices(self, name: str) -> list[tuple[float, float]]:
        """A field of all ranks' `device` events, with their times."""
        events = [event for record in self.last.values() for event in record.devices]
        return [(event["t"], event[name]) for event in events if event.get(name) is not None]

    def utilization(self) -> Curve | None:
        """The mean over the ranks by time, with as many points as a chart can show."""
        points = sorted(self.of_devices("utilization") or self.of_devices("cpu"))
        if len(points) < 2:
            return None
        begin, end = points[0][0], points[-1][0]
        width = max(2.0, (end - begin) / MAX_POINTS)  # ranks are sampled every two seconds
        bins: dict[int, list[float]] = {}
        for when, value in points:
            bins.setdefault(int((when - begin) / width), []).append(value)
        rounded = [(round(i * width, 1), round(statistics.fmean(v), 2)) for i, v in bins.items()]
        return thinned(rounded)


def thinned(points: Sequence[tuple[float, float]]) -> Curve | None:
    """Evenly spaced points, with the last one kept; None for fewer than two."""
    if len(points) < 2:
        return None
    stride = -(-len(points) // MAX_POINTS)
    chosen = [*points[::stride]]
    if chosen[-1] != points[-1]:
        chosen.append(points[-1])
    return Curve([x for x, _ in chosen], [y for _, y in chosen])
