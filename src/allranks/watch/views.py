"""What a watcher shows of a run: plain data, whoever draws it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

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
