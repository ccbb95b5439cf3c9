"""What every view of a run is drawn from: plain data about runs, ranks and step times."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from allranks.timing.remarks import Remark, is_guess
from allranks.timing.result import VerdictLine, judged, verdict_lines
from allranks.timing.verdict import Judgement

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
    doubt: str | None = None  # why it is not compared, though it has a pace
    remarks: tuple[Remark, ...] = ()  # what makes its numbers doubtful, the worst first
    judgement: Judgement | None = None  # what limits it, and warnings
    baseline: str | None = None  # the newest run of the baseline
    baseline_layout: str | None = None
    baseline_runs: tuple[str, ...] = ()  # the runs whose median pace is the baseline's
    baseline_samples_per_second: float | None = None
    seconds_left: float | None = None  # by the clock, with evaluations and saves
    rank_hours: float = 0.0  # GPU-hours where ranks use GPUs; all attempts
    checkpoint: int | None = None  # step of the newest checkpoint
    started: float | None = None  # UNIX time; newest attempt
    last_step: float | None = None  # UNIX time
    heartbeat: float | None = None  # UNIX time of its first rank's last event

    def as_json(self) -> dict[str, Any]:
        fields = asdict(replace(self, judgement=None))
        return {key: fields[key] for key in fields if key != "judgement"} | self.judged

    @property
    def verdict_lines(self) -> list[VerdictLine]:
        """What is concluded about it, in words."""
        return verdict_lines({"state": self.state, **self.judged})

    @property
    def judged(self) -> dict[str, Any]:
        """The keys of its object that hold what is concluded about it."""
        return judged(self.judgement)

    @property
    def is_active(self) -> bool:
        return self.state in ACTIVE

    @property
    def hours_unit(self) -> str:
        return "rank-hours" if self.device in (None, "CPU") else "GPU-hours"

    @property
    def is_guess(self) -> bool:
        """Whether its samples are an estimate."""
        return is_guess(self.remarks)

    @property
    def culprit(self) -> int | None:
        """The rank that ended it, if that is known."""
        match = re.match(r"rank (\d+)\b", self.reason or "")
        return int(match[1]) if match else None

    @property
    def is_compared(self) -> bool:
        """Whether its efficiency is relative to a smaller layout."""
        return self.efficiency is not None and self.layout != self.baseline_layout


@dataclass(frozen=True, slots=True, kw_only=True)
class RankView:
    """One rank of the newest attempt at one moment. Times are means over its last steps."""

    rank: int
    node: str | None = None
    place: str | None = None  # in a layout that divides the model: its stage, its shard
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
    host_memory_now: int | None = None
    host_memory_shared: int | None = None  # of that, what other processes may use as well
    sent: float | None = None  # bytes per second of its node, reported by the node's first rank
    received: float | None = None
    link: float | None = None  # bytes per second that the node's link can carry
    heartbeat: float | None = None  # UNIX time of its last event
    slowest: bool = False  # the rank that the others wait for most often


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Where the time of the last steps went, and which rank the others wait for."""

    seconds: dict[str, float]  # per step: compute, comm, straggler, data, other
    steps: int  # how many were measured
    slowest_rank: int | None = None  # None: no rank stands out
    slowest_share: float = 0.0  # share of the steps in which it was last
    slowest_part: str | None = None  # the part of a step that takes it longer than the others
    layout: str = ""
    exchanges: dict[str, float] = field(default_factory=dict)  # waiting, by name


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """Curves over the steps of the newest attempt; bucket i starts at step i*width+1.

    `ranks` maps `seconds`, `data`, `wait`, `utilization` and `cpu` to one row of means per rank.
    """

    width: int
    samples_per_second: tuple[float | None, ...]  # all ranks together
    ranks: dict[str, dict[int, tuple[float | None, ...]]]
