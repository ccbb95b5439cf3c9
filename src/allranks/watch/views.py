"""What a watcher shows of a run: plain data, whoever draws it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from allranks.errors import AllranksError
from allranks.layout import Layout
from allranks.run.record import final_step
from allranks.run.stalls import patience
from allranks.show.numbers import duration
from allranks.timing.comparison import device_name

if TYPE_CHECKING:
    from allranks.watch.live import Followed
    from allranks.watch.reader import RunReader

ACTIVE = ("queued", "running")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """One run at one moment. None: not known (yet)."""

    run: str
    run_dir: str
    job: str  # the job's name
    state: str
    reason: str | None = None  # why it waits, ended, or is to be looked at, in words
    stalled: bool = False  # runs, and has made no step for longer than expected
    expected_start: str | None = None  # by SLURM's own estimate
    jobs: tuple[str, ...] = ()  # of SLURM
    nodes: tuple[str, ...] = ()
    layout: str = ""
    device: str | None = None  # what a rank computes on; CPU, or a GPU's name
    world_size: int | None = None
    attempt: int | None = None
    attempts: int = 0
    epoch: int | None = None
    epochs: int | None = None
    step: int | None = None
    steps: int | None = None
    loss: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    loss_steps: tuple[int, ...] = ()
    losses: tuple[float | None, ...] = ()
    step_seconds: float | None = None  # in the mean: of the last steps, or of all when it ended
    samples_per_second: float | None = None  # of all ranks: of the last steps, or as it ended
    speedup: float | None = None  # of a run that goes on, by its last steps; of one that has
    efficiency: float | None = None  # ended, of its layout's repeats together, as `report` has it
    repeats: int = 0  # how many those are
    baseline: str | None = None  # the newest run of the base
    baseline_layout: str | None = None
    baseline_runs: tuple[str, ...] = ()  # whose median pace it is
    baseline_samples_per_second: float | None = None
    seconds_left: float | None = None  # by the clock of the last ten minutes
    rank_hours: float = 0.0  # GPU-hours on GPUs, of all attempts
    checkpoint: int | None = None  # the step of the newest
    started: float | None = None  # UNIX time, of the newest attempt
    last_step: float | None = None  # UNIX time
    heartbeat: float | None = None  # UNIX time of the last event of its first rank

    @property
    def is_active(self) -> bool:
        return self.state in ACTIVE

    @property
    def is_gpu(self) -> bool:
        return self.device not in (None, "CPU")

    @property
    def is_compared(self) -> bool:
        """Whether it is measured against a smaller layout than its own."""
        return self.efficiency is not None and self.layout != self.baseline_layout

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankView:
    """One rank at one moment, its newest attempt. Times are means over its last steps."""

    rank: int
    node: str | None = None
    state: str | None = None  # how it ended; None while it goes on
    step: int | None = None
    step_seconds: float | None = None
    data: float | None = None  # seconds of a step that it waits for data
    wait: float | None = None  # seconds of a step that it waits for other ranks and their bytes
    utilization: float | None = None  # percent of its GPU
    memory: int | None = None  # bytes in use on its GPU
    memory_total: int | None = None
    power: float | None = None  # watts
    power_limit: float | None = None
    temperature: float | None = None  # degrees Celsius
    clock: float | None = None  # MHz
    clock_max: float | None = None
    cpu: float | None = None  # CPUs in use
    workers_cpu: float | None = None  # CPUs in use by all of its loader's workers
    num_workers: int | None = None
    host_memory: int | None = None  # bytes, the most it has had
    sent: float | None = None  # bytes a second, of its node; its first rank says it
    received: float | None = None
    link: float | None = None  # bytes a second that the node's link carries
    heartbeat: float | None = None  # UNIX time of its last event
    slowest: bool = False  # the one that the others wait for most often

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Where the time of the last steps went, and whom the ranks wait for."""

    seconds: dict[str, float]  # of a step: compute, comm, straggler, data, other
    steps: int  # that were looked at
    slowest_rank: int | None = None  # None: no rank is clearly slower than the others
    slowest_share: float = 0.0  # of these steps in which it came last
    slowest_part: str | None = None  # what it does longer than the others


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """Curves over the steps of the newest attempt: bucket i has the steps from i*width+1 on.

    `ranks` has rows of means: `seconds`, `data`, `wait`, `utilization`, `cpu`, by rank.
    """

    width: int
    buckets: int
    samples_per_second: tuple[float | None, ...]  # of all ranks
    ranks: dict[str, dict[int, tuple[float | None, ...]]]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def run_view(one: Followed, *, now: float, stalled: float | None) -> RunView:
    """Everything that a line about a run says."""
    reader, status = one.reader, one.status
    start, lead = reader.start, reader.lead
    is_running = status.state == "running"
    layout = str(start.get("layout") or status.layout) if not is_running else status.layout
    world = start.get("world_size") or ranks_of(layout)
    step = lead.steps_made if lead else None
    steps = final_step(start, one.info, lead.window if lead else None)
    took, by_clock = step_seconds(one), lead.clock_seconds() if lead else None
    pace = one.pace if one.is_measured else reader.samples_per_second(world)
    silence = silence_of(reader, now, stalled) if is_running else None
    speedup, efficiency = ratios_of(one, world, pace)
    base = one.comparison.base if one.comparison and efficiency else None
    return RunView(
        run=one.run.name,
        run_dir=str(one.run.path),
        job=one.run.job_name,
        state=status.state,
        reason="; ".join(filter(None, [status.reason or silence, one.problem])) or None,
        stalled=silence is not None,
        expected_start=status.expected_start,
        jobs=status.jobs,
        nodes=status.nodes,
        layout=layout,
        device=device_of(start, one.info, reader),
        world_size=world,
        attempt=reader.attempt,
        attempts=len(reader.attempts),
        epoch=lead.steps[-1].get("epoch") if lead and lead.steps else None,
        epochs=epochs_of(one.job, steps, start),
        step=step,
        steps=steps,
        loss=reader.losses.last,
        metrics=dict(reader.metrics),
        loss_steps=tuple(reader.losses.steps),
        losses=tuple(reader.losses.values),
        step_seconds=took,
        samples_per_second=pace,
        speedup=speedup,
        efficiency=efficiency,
        repeats=len(one.comparison.row.counted) if one.comparison and not one.is_active else 0,
        baseline=base.counted[0] if base else None,
        baseline_layout=base.layout if base else None,
        baseline_runs=base.counted if base else (),
        baseline_samples_per_second=base.pace if base else None,
        seconds_left=(steps - step) * by_clock
        if is_running and steps and step and by_clock
        else None,
        rank_hours=reader.rank_hours(now if is_running else None),
        checkpoint=reader.checkpoint,
        started=lead.first_time if lead else None,
        last_step=lead.steps[-1].get("t") if lead and lead.steps else None,
        heartbeat=lead.last_time if lead else None,
    )


def ratios_of(
    one: Followed, world: int | None, pace: float | None
) -> tuple[float | None, float | None]:
    """Speedup and efficiency: of a run that goes on its own now, else those of its layout's runs.

    None of a run that does not count, as one that failed where another of its layout did not.
    """
    found = one.comparison
    if found is None:
        return None, None
    if one.is_active:
        return found.base.ratio(world, pace) if world and pace else (None, None)
    is_counted = one.run.name in found.row.counted
    return (found.row.speedup, found.row.efficiency) if is_counted else (None, None)


def step_seconds(one: Followed) -> float | None:
    """Of the last steps; of a run that has ended, of those that its pace is of."""
    lead = one.reader.lead
    if one.is_measured and one.measured is not None:
        return one.measured.step_seconds
    if lead is None or one.status.state == "running" or "seconds" not in lead.curves:
        return lead.mean("seconds") if lead else None
    return lead.curves["seconds"].mean()


def silence_of(reader: RunReader, now: float, stalled: float | None) -> str | None:
    """In words, that no step was made for longer than expected; None if all is well."""
    lead = reader.lead
    if lead is None or lead.first_time is None:
        return None
    if not lead.steps:
        passed, limit = now - lead.first_time, patience(None, 0.0, stands_out=False, asked=stalled)
        return (
            f"stalled: no first step for {duration(passed, whole=True)}" if passed > limit else None
        )
    passed = now - lead.steps[-1]["t"]
    took = lead.mean("seconds")
    if passed <= patience(took or 0.0, reader.longest_pause, stands_out=False, asked=stalled):
        return None
    before = f"; steps before took {duration(took)}" if took else ""
    return f"stalled: no step for {duration(passed, whole=True)}{before}"


def device_of(start: dict[str, Any], info: dict[str, Any], reader: RunReader) -> str | None:
    """What a rank computes on: as it says; of a script, as its machine has it."""
    seen = reader.lead.device if reader.lead else {}
    if not start.get("device") and not seen:
        return None
    return device_name(start, info, uses_gpu=seen.get("utilization") is not None)


def epochs_of(job: dict[str, Any], steps: int | None, start: dict[str, Any]) -> int | None:
    if isinstance(job.get("epochs"), int):
        return int(job["epochs"])
    length = start.get("steps_per_epoch")
    return -(-steps // length) if steps and length else None


def ranks_of(layout: str) -> int | None:
    try:
        return Layout.parse(layout.partition("@")[0]).ranks if layout else None
    except AllranksError:  # several layouts, of which none has started yet
        return None
