"""A followed run: its events and state, the view made from them, how it compares with others."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from allranks.errors import AllranksError
from allranks.layout import Layout
from allranks.run.folder import RunDir
from allranks.run.record import Event, final_step, read_ranks
from allranks.run.run_state import RunState
from allranks.run.stalls import patience
from allranks.show.numbers import duration
from allranks.timing.comparison import (
    SCALING,
    Compared,
    Pace,
    bench_of,
    compare,
    cpu_use,
    device_name,
    identity,
    is_comparable,
    same_job,
)
from allranks.timing.remarks import PACE, SPEEDUP, Remark, forbidding, remarks
from allranks.timing.steps import (
    AFFORDABLE_BYTES,
    Timing,
    affordable_timing,
    event_bytes,
)
from allranks.timing.verdict import Judgement
from allranks.watch.reader import RunReader
from allranks.watch.views import ACTIVE, RunView

SIGNS = ("run.json", "attempts", "claims", ".lock", "stop.json")
MIN_STEPS = 10  # a running run must have made before others are compared with it
# Steps after which a running run first gets remarks, and how many events per rank these use.
FIRST_REMARKS, REMARKED_EVENTS = 20, 400
# If a run has more events than this, its pace is taken from its first rank alone. Small, because a
# live screen takes no keys while it reads.
LIVE_BYTES = 2 << 20
Key = tuple[str, str, str | None]  # the job, the device, the benchmark


@dataclass(frozen=True, slots=True)
class Comparison:
    """A run's layout and the baseline it is compared with."""

    row: Compared
    base: Compared


@dataclass(slots=True)
class Followed:
    """One run, and when to look at it again."""

    run: RunDir
    reader: RunReader
    info: dict[str, Any] = field(default_factory=dict)
    job: dict[str, Any] = field(default_factory=dict)
    same: str = ""  # equal for runs of the same job
    sets: tuple[Key, ...] = ()  # of comparable runs; it is compared within the first
    comparison: Comparison | None = None
    is_measured: bool = False  # it has ended and its pace is known
    measured: Timing | None = None
    remarks: list[Remark] = field(default_factory=list)
    judgement: Judgement | None = None
    remarked: tuple[int | None, int] = (None, 0)  # a running run's attempt, and its steps by then
    pace: float | None = None
    status: RunState = field(default_factory=RunState)
    view: RunView | None = None
    due: float = 0.0
    is_read: bool = False
    is_settled: bool = False  # its final state is known: only a change of its folder matters
    is_old: bool = False  # ended long ago: hidden unless asked for
    is_aside: bool = False  # not asked for, but others are compared with it
    problem: str | None = None  # what is wrong with its folder
    _first_start: Event | None = None
    _signs: tuple[int, ...] = ()

    @property
    def is_active(self) -> bool:
        return self.status.state in ACTIVE

    @property
    def is_hidden(self) -> bool:
        return self.is_old or self.is_aside

    @property
    def may_have_jobs(self) -> bool:
        return (not self.is_read or self.is_active) and not self.is_aside

    def has_changed(self) -> bool:
        """Whether the run was started, resumed, moved or stopped since the last look."""
        signs = tuple(modified(self.run.path / name) for name in SIGNS)
        if signs == self._signs:
            return False
        self._signs = signs
        self.info = self.run.info()
        self.job = self.run.job()
        self.same = identity(same_job(self.job, self.info, self.run))
        self._first_start = None
        return True

    @property
    def start(self) -> Event:
        """Its first rank's start event, even if nothing else of the run was read."""
        if self.reader.attempt is not None:
            return self.reader.lead.start
        if self._first_start is None:
            attempts = self.run.attempts()
            self._first_start = (self.run.start(attempts[-1]) if attempts else None) or {}
        return self._first_start

    @property
    def layout(self) -> str:
        return str(self.start.get("layout") or self.info.get("layout", ""))

    @property
    def device(self) -> str:
        """What a rank computes on: as it reports or, for a user's script, as its machine has it."""
        uses_gpu = self.reader.lead.device.get("utilization") is not None
        return device_name(self.start, self.info, uses_gpu=uses_gpu)

    def look_for_remarks(self) -> None:
        """Judge a running run by its first steps, and again whenever its steps have doubled."""
        lead, attempt = self.reader.lead, self.reader.attempt
        made = (lead.last_step or 0) - lead.start.get("step", 0)
        last = self.remarked[1] if self.remarked[0] == attempt else 0
        if made >= max(FIRST_REMARKS, 2 * last):
            self.remarked = attempt, made
            self.judge_first_steps()

    def judge_first_steps(self) -> None:
        records = read_ranks(self.run, max(self.run.attempts(), default=0), REMARKED_EVENTS)
        self.remarks = remarks(self.run, None, records, so_far=True)

    def find_sets(self) -> None:
        """Find the sets of comparable runs that it belongs to."""
        bench, of_job = bench_of(self.info), (self.same, self.device, None)
        if not is_comparable(self.info) or not self.same:
            self.sets = ()
        elif bench.get("kind") == SCALING:
            self.sets = ((self.same, self.device, str(bench.get("id"))), of_job)
        else:
            self.sets = (of_job,)

    @property
    def compared_pace(self) -> float | None:
        """Pace over its steady steps; None while a running run has too few of them."""
        if self.is_measured:
            return self.pace
        has_enough = (self.reader.lead.last_step or 0) >= MIN_STEPS
        return self.reader.steady_pace(ranks_of(self.layout) or 1) if has_enough else None


class ComparableRuns:
    """Sets of comparable runs as of now. Reads their files until the deadline."""

    def __init__(self, followed: Iterable[Followed], deadline: float) -> None:
        self._deadline = deadline
        self._max_bytes = AFFORDABLE_BYTES if math.isinf(deadline) else LIVE_BYTES
        self.is_behind = False  # the deadline passed before everything was read
        self._sets: dict[Key, dict[str, list[Followed]]] = {}  # by layout
        self._found: dict[tuple[Key, str], Comparison | None] = {}
        self._unread: set[str] = set()  # jobs with runs that have not been read yet
        for one in followed:
            if not one.is_read:
                self._unread.add(one.run.job_name)
            for key in one.sets:
                self._sets.setdefault(key, {}).setdefault(one.layout, []).append(one)

    def of(self, one: Followed) -> Comparison | None:
        """How its layout compares; None if nothing was measured or not everything is read yet."""
        key, layout = next(iter(one.sets), None), one.layout
        if key is None or one.run.job_name in self._unread or ranks_of(layout) is None:
            return None
        if (key, layout) not in self._found:
            self._found[key, layout] = self._compare(self._sets.get(key, {}), layout)
        return self._found[key, layout]

    def _compare(self, layouts: dict[str, list[Followed]], wanted: str) -> Comparison | None:
        """Compare all layouts, since one that is too fast to be true makes the base doubtful."""
        names = [name for name in layouts if ranks_of(name) is not None]
        rows = self._rows(layouts, names) or []
        row = next((row for row in rows if row.layout == wanted), None)
        base = next((one for one in rows if row and one.layout == row.baseline), None)
        return Comparison(row, base) if row is not None and base is not None else None

    def _rows(self, layouts: dict[str, list[Followed]], names: list[str]) -> list[Compared] | None:
        """Compare these layouts; None if not all of their runs could be read in time."""
        runs = [one for name in names for one in layouts[name]]
        if not all([self.measure(one) for one in runs]):
            return None
        return compare(
            Pace(
                one.run.name,
                one.layout,
                one.compared_pace,
                one.status.state,
                one.device,
                timing=one.measured,
                remarks=one.remarks,
                cpus=cpu_use([one.reader.lead]),
            )
            for one in runs
        )

    def measure(self, one: Followed) -> bool:
        """Measure an ended run over the same steps as every other command, if there is time."""
        if one.is_active or one.is_measured:
            return True
        if time.monotonic() > self._deadline:
            self.is_behind = True
            return False
        if one.reader.attempt is None:
            one.reader.look(all_ranks=False)
        one.is_measured, one.measured = True, None
        if event_bytes(one.run) > self._max_bytes:
            one.pace = one.reader.steady_pace(ranks_of(one.layout) or 1)
            one.judge_first_steps()
            return True
        one.measured = affordable_timing(one.run, self._max_bytes)
        one.pace = one.measured.pace if one.measured else None
        one.remarks = remarks(one.run, one.measured)
        return True


def run_view(one: Followed, *, now: float, stalled: float | None) -> RunView:
    """Everything known about a run, from its folder, SLURM and its ranks' events."""
    reader, status, lead = one.reader, one.status, one.reader.lead
    is_running = status.state == "running"
    layout = str(lead.start.get("layout") or status.layout) if not is_running else status.layout
    world = lead.start.get("world_size") or ranks_of(layout)
    step, steps = reader.steps_made, final_step(lead.start, one.info, lead.window)
    newest = lead.steps[-1] if lead.steps else {}
    pace = one.pace if one.is_measured else reader.samples_per_second(world)
    if forbidding(PACE, one.remarks):
        pace = None
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
        device=one.device if lead.start.get("device") or lead.devices else None,
        world_size=world,
        attempt=reader.attempt,
        attempts=len(reader.attempts),
        epoch=reader.epoch,
        epochs=epochs_of(one.job, steps, lead.start),
        step=step,
        steps=steps,
        loss=reader.losses.last,
        metrics=dict(reader.metrics),
        loss_steps=tuple(reader.losses.steps),
        losses=tuple(reader.losses.values),
        step_seconds=step_seconds(one),
        samples_per_second=pace,
        speedup=speedup,
        efficiency=efficiency,
        doubt=one.comparison.row.doubt if one.comparison else None,
        remarks=tuple(one.remarks),
        judgement=one.judgement,
        repeats=len(one.comparison.row.counted) if one.comparison and not one.is_active else 0,
        baseline=base.counted[0] if base else None,
        baseline_layout=base.layout if base else None,
        baseline_runs=base.counted if base else (),
        baseline_samples_per_second=base.pace if base else None,
        seconds_left=lead.clock.seconds_left(steps, now) if is_running and not silence else None,
        rank_hours=reader.rank_hours(now if is_running else None),
        checkpoint=reader.checkpoint,
        started=lead.first_time,
        last_step=newest.get("t"),
        heartbeat=lead.last_time,
    )


def ratios_of(
    one: Followed, world: int | None, pace: float | None
) -> tuple[float | None, float | None]:
    """Speedup and efficiency: its own while it runs, afterwards those of its layout's runs.

    None for a run that does not count, such as one that failed while others of its layout did not.
    """
    found = one.comparison
    if found is None or found.row.doubt or forbidding(SPEEDUP, one.remarks):
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
    if one.status.state == "running" or "seconds" not in lead.curves:
        return lead.mean("seconds")
    return lead.curves["seconds"].mean()


def silence_of(reader: RunReader, now: float, stalled: float | None) -> str | None:
    """A message if there has been no step for longer than expected, else None."""
    lead = reader.lead
    if lead.first_time is None:
        return None
    took = (lead.mean("seconds") or 0.0) if lead.steps else None
    passed = now - (lead.steps[-1]["t"] if lead.steps else lead.first_time)
    if passed <= patience(took, reader.longest_pause, stands_out=False, asked=stalled):
        return None
    what = "no first step" if took is None else "no step"
    before = f"; earlier steps took {duration(took)}" if took else ""
    return f"stalled: {what} for {duration(passed, whole=True)}{before}"


def epochs_of(job: dict[str, Any], steps: int | None, start: Event) -> int | None:
    if isinstance(job.get("epochs"), int):
        return int(job["epochs"])
    length = start.get("steps_per_epoch")
    return -(-steps // length) if steps and length else None


def ranks_of(layout: str) -> int | None:
    try:
        return Layout.parse(layout.partition("@")[0]).ranks if layout else None
    except AllranksError:  # several alternatives, none of which has started yet
        return None


def modified(path: Path) -> int:
    """Modification time in nanoseconds; 0 if there is no such file."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
