"""What one run's folder tells a report: read here, once, whatever state the folder is in."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from allranks.errors import AllranksError
from allranks.layout import Layout
from allranks.run.events import read_events
from allranks.run.failures import failure, failure_in_words
from allranks.run.folder import RunDir
from allranks.run.results import outcome, samples_per_epoch
from allranks.run.run_state import unreadable
from allranks.timing.comparison import CPU, bench_of, device_name, gpu_memory, same_job
from allranks.timing.samples_seen import remarks
from allranks.timing.steps import Timing, timing

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
    problem: str | None = None  # why there is less to see than one may expect
    bench: Mapping[str, Any] = field(default_factory=dict)
    steps: int | None = None
    samples: int | None = None  # done, by all ranks
    target_samples: int | None = None  # what the job asks for; None where only a script knows
    samples_per_epoch: int | None = None
    is_complete: bool = False  # trained to its end: not stopped, and not cut short to measure
    seconds: float | None = None  # of training; None if layouts changed on the way
    timing: Timing | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()  # on what its ranks read, and whether they exchange anything
    loss: Curve | None = None  # by step
    utilization: Curve | None = None  # by seconds: percent of a GPU, or CPUs of a rank

    @property
    def samples_per_second(self) -> float | None:
        return self.timing.samples_per_second or None if self.timing else None

    @property
    def is_gpu(self) -> bool:
        return self.device != CPU


def read_run(run: RunDir) -> RunFacts:
    """Everything that a report says of a run, whatever a crash may have left behind."""
    try:
        return _read_run(run)
    except Exception as error:  # what nobody foresaw costs this run its numbers, not others theirs
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
    start = first_start(run, attempts)
    layout = parse_layout(found["layout"])
    seen = read_ranks(run, attempts)
    measured = timing(run)
    odd = remarks(run, measured)
    device, memory = device_of(start, info, seen)
    layouts = {one.get("layout") for one in info.get("attempts", []) if isinstance(one, dict)}
    state = found["state"]
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
        problem="; ".join(filter(None, [problem_of(run, state, measured, layout), run.problem()]))
        or None,
        bench=bench_of(info),
        steps=found["steps"],
        samples=found["samples"] or seen.samples or None,
        target_samples=target_samples({**job, **bench_of(info).get("job", {})}, start),
        samples_per_epoch=samples_per_epoch(run),
        is_complete=state == "finished" and not seen.has_window,
        # A script's start and end have its imports between them, a task's measured time has not.
        seconds=(seen.seconds if job.get("command") else found["seconds"]) or None
        if len(layouts) <= 1
        else None,
        timing=measured,
        remarks=tuple(odd),
        metrics=numbers(found["metrics"]) | seen.metrics | numbers(found["metrics"]),
        loss=thinned(sorted(seen.losses.items())),
        utilization=seen.utilization(),
    )


def first_start(run: RunDir, attempts: Sequence[int]) -> dict[str, Any]:
    """What the first rank of the last attempt said of itself when it began."""
    if not attempts:
        return {}
    return run.start(attempts[-1], min(run.ranks(attempts[-1]), default=0)) or {}


def parse_layout(text: Any) -> Layout | None:
    try:
        return Layout.parse(text) if isinstance(text, str) else None
    except AllranksError:  # several layouts, of which none has started yet
        return None


def device_of(
    start: Mapping[str, Any], info: Mapping[str, Any], seen: RankEvents
) -> tuple[str, int | None]:
    """What a rank computes on, and its memory."""
    device = device_name(start, info, uses_gpu=bool(seen.percents))
    memory = gpu_memory(info).get(device) or seen.memory_total
    return device, int(memory) if memory else None


def target_samples(job: Mapping[str, Any], start: Mapping[str, Any]) -> int | None:
    epochs, size = job.get("epochs"), start.get("samples_per_epoch")
    if isinstance(epochs, int) and isinstance(size, int):
        return epochs * size
    steps, batch = job.get("steps") or start.get("steps"), start.get("global_batch")
    return steps * batch if isinstance(steps, int) and isinstance(batch, int) else None


def problem_of(
    run: RunDir, state: str, measured: Timing | None, layout: Layout | None
) -> str | None:
    """In a line, why a run is failed or has no pace; None if all is well."""
    if state == "failed":
        failed = failure(run)
        given_up = run.info().get("ended")
        if isinstance(given_up, dict) and given_up.get("reason"):
            return str(given_up["reason"])
        if failed:
            return failure_in_words(failed)
        return "it was killed" if run.attempts() else "it never started"
    if layout is None:
        return "it has not started yet"
    if measured is None:
        return "it made fewer than two steps that all ranks recorded"
    if not measured.samples:
        return "how many samples a step takes is not known"
    return None


class RankEvents:
    """What is gathered from the events of all ranks in one pass."""

    def __init__(self) -> None:
        self.samples = 0
        self.seconds = 0.0  # from the first step to the last, of all attempts
        self._begin, self._end = math.inf, -math.inf
        self.losses: dict[float, float] = {}
        self.metrics: dict[str, float] = {}
        self.percents: list[tuple[float, float]] = []
        self.cpus: list[tuple[float, float]] = []
        self.memory_total: int | None = None
        self.has_window = False

    def take(self, event: Mapping[str, Any]) -> None:
        kind = event["event"]
        if kind == "step":
            self._span(_number(event.get("t")), _number(event.get("seconds")))
            self.samples += int(_number(event.get("samples")) or 0)
            loss, step = _number(event.get("loss")), _number(event.get("step"))
            if loss is not None and step is not None:
                self.losses[step] = loss
        elif kind == "metric" and _number(event.get("value")) is not None:
            self.metrics[str(event.get("name"))] = float(event["value"])
        elif kind == "window":
            self.has_window = True
        elif kind == "device":
            when = _number(event.get("t"))
            for field_name, points in (("utilization", self.percents), ("cpu", self.cpus)):
                value = _number(event.get(field_name))
                if value is not None and when is not None:
                    points.append((when, value))
            self.memory_total = event.get("memory_total") or self.memory_total

    def _span(self, end: float | None, seconds: float | None) -> None:
        if end is not None and seconds is not None:
            self._begin, self._end = min(self._begin, end - seconds), max(self._end, end)

    def next_attempt(self) -> None:
        self.seconds += max(0.0, self._end - self._begin)
        self._begin, self._end = math.inf, -math.inf

    def utilization(self) -> Curve | None:
        """The mean over the ranks as time goes by, in as many steps as a chart can show."""
        points = sorted(self.percents or self.cpus)
        if len(points) < 2:
            return None
        begin, end = points[0][0], points[-1][0]
        width = max(2.0, (end - begin) / MAX_POINTS)  # ranks are sampled every two seconds
        bins: dict[int, list[float]] = {}
        for when, value in points:
            bins.setdefault(int((when - begin) / width), []).append(value)
        rounded = [(round(i * width, 1), round(statistics.fmean(v), 2)) for i, v in bins.items()]
        return thinned(rounded)


def read_ranks(run: RunDir, attempts: Sequence[int]) -> RankEvents:
    """Later attempts take the place of what they trained again; utilisation is of the last one."""
    seen = RankEvents()
    for attempt in attempts:
        seen.percents, seen.cpus, seen.has_window = [], [], False
        for rank in run.ranks(attempt):
            for event in read_events(run.events(attempt, rank)):
                seen.take(event)
        seen.next_attempt()
    return seen


def thinned(points: list[tuple[float, float]]) -> Curve | None:
    """Evenly, with the last one kept; None for fewer than two points."""
    if len(points) < 2:
        return None
    stride = -(-len(points) // MAX_POINTS)
    chosen = points[::stride]
    if chosen[-1] != points[-1]:
        chosen.append(points[-1])
    return Curve([x for x, _ in chosen], [y for _, y in chosen])


def numbers(values: Any) -> dict[str, float]:
    items = values.items() if isinstance(values, dict) else ()
    return {str(name): value for name, value in items if _number(value) is not None}


def _number(value: Any) -> float | None:
    """A number of JSON; NaN was written as null."""
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None
