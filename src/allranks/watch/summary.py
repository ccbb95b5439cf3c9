"""A run in one line: its state by its folder and SLURM, its progress by its ranks' events."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from allranks.errors import AllranksError
from allranks.layout import Layout
from allranks.run.record import final_step
from allranks.run.stalls import patience
from allranks.show.numbers import duration
from allranks.timing.comparison import device_name
from allranks.watch.reader import RunReader
from allranks.watch.views import RunView

if TYPE_CHECKING:
    from allranks.watch.live import Followed


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
