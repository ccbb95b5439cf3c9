"""What every view of a run is drawn from: plain data about runs, ranks and step times."""

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
    """One run at one moment; None means not known (yet)."""

    run: str
    run_dir: str
    job: str  # the job's name
    state: str
    reason: str | None = None  # why it waits, why it ended, or what needs attention
    stalled: bool = False  # running, but without a step for longer than expected
    expected_start: str | None = None  # SLURM's own estimate
    jobs: tuple[str, ...] = ()  # ids of its SLURM jobs
    nodes: tuple[str, ...] = ()
    layout: str = ""
    device: str | None = None  # what a rank computes on: CPU, or the name of the GPU
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
    step_seconds: float | None = None  # mean of the last steps, or of all steps once it has ended
    samples_per_second: float | None = None  # of all ranks: last steps, or as reported at the end
    # While it runs: from its last steps. Afterwards: of all repeats of its layout, as in `report`.
    speedup: float | None = None
    efficiency: float | None = None
    repeats: int = 0  # runs behind these two numbers
    baseline: str | None = None  # the newest run of the baseline
    baseline_layout: str | None = None
    baseline_runs: tuple[str, ...] = ()  # the runs whose median pace is the baseline's
    baseline_samples_per_second: float | None = None
    seconds_left: float | None = None  # judging by the last ten minutes of wall-clock time
    rank_hours: float = 0.0  # GPU-hours where ranks use GPUs; all attempts
    checkpoint: int | None = None  # step of the newest checkpoint
    started: float | None = None  # UNIX time; newest attempt
    last_step: float | None = None  # UNIX time
    heartbeat: float | None = None  # UNIX time of its first rank's last event

    @property
    def is_active(self) -> bool:
        return self.state in ACTIVE

    @property
    def is_gpu(self) -> bool:
        return self.device not in (None, "CPU")

    @property
    def is_compared(self) -> bool:
        """Whether its efficiency is relative to a smaller layout."""
        return self.efficiency is not None and self.layout != self.baseline_layout

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankView:
    """One rank of the newest attempt at one moment. Times are means over its last steps."""

    rank: int
    node: str | None = None
    state: str | None = None  # how it ended; None while it runs
    step: int | None = None
    step_seconds: float | None = None
    data: float | None = None  # seconds per step spent waiting for data
    wait: float | None = None  # seconds per step spent waiting for other ranks and their bytes
    utilization: float | None = None  # of its GPU, in percent
    memory: int | None = None  # bytes in use on its GPU
    memory_total: int | None = None
    power: float | None = None  # watts
    power_limit: float | None = None
    temperature: float | None = None  # degrees Celsius
    clock: float | None = None  # MHz
    clock_max: float | None = None
    cpu: float | None = None  # CPUs in use
    workers_cpu: float | None = None  # CPUs in use by its loader's workers
    num_workers: int | None = None
    host_memory: int | None = None  # peak, in bytes
    sent: float | None = None  # bytes per second of its node, reported by the node's first rank
    received: float | None = None
    link: float | None = None  # bytes per second that the node's link can carry
    heartbeat: float | None = None  # UNIX time of its last event
    slowest: bool = False  # the rank that the others wait for most often

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Where the time of the last steps went, and which rank the others wait for."""

    seconds: dict[str, float]  # per step: compute, comm, straggler, data, other
    steps: int  # how many were measured
    slowest_rank: int | None = None  # None: no rank stands out
    slowest_share: float = 0.0  # share of the steps in which it was last
    slowest_part: str | None = None  # the part of a step that takes it longer than the others


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """Curves over the steps of the newest attempt; bucket i starts at step i*width+1.

    `ranks` maps `seconds`, `data`, `wait`, `utilization` and `cpu` to one row of means per rank.
    """

    width: int
    samples_per_second: tuple[float | None, ...]  # all ranks together
    ranks: dict[str, dict[int, tuple[float | None, ...]]]


def run_view(one: Followed, *, now: float, stalled: float | None) -> RunView:
    """Everything known about a run, from its folder, SLURM and its ranks' events."""
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
        seconds_left=max(0, steps - step) * by_clock
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
    """Speedup and efficiency: its own while it runs, afterwards those of its layout's runs.

    None for a run that does not count, such as one that failed while others of its layout did not.
    """
    found = one.comparison
    if found is None:
        return None, None
    if one.is_active:
        return found.base.ratio(world, pace) if world and pace else (None, None)
    is_counted = one.run.name in found.row.counted
    return (found.row.speedup, found.row.efficiency) if is_counted else (None, None)


def step_seconds(one: Followed) -> float | None:
    """Mean of the last steps; once it has ended, of the steps that its pace is taken from."""
    lead = one.reader.lead
    if one.is_measured and one.measured is not None:
        return one.measured.step_seconds
    if lead is None or one.status.state == "running" or "seconds" not in lead.curves:
        return lead.mean("seconds") if lead else None
    return lead.curves["seconds"].mean()


def silence_of(reader: RunReader, now: float, stalled: float | None) -> str | None:
    """A message if there has been no step for longer than expected, else None."""
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
    before = f"; earlier steps took {duration(took)}" if took else ""
    return f"stalled: no step for {duration(passed, whole=True)}{before}"


def device_of(start: dict[str, Any], info: dict[str, Any], reader: RunReader) -> str | None:
    """What a rank computes on: as it reports or, for a user's script, as its machine has it."""
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
    except AllranksError:  # several alternatives, none of which has started yet
        return None
