"""`bench precision`: one job in several precisions, side by side: speed, memory, and the loss.

The runs see the same samples in the same order from the same weights, so their losses differ only
by the precision.
"""

from __future__ import annotations

import secrets
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.text import Text

from allranks.bench.measure import Ended, Result, Series
from allranks.errors import AllranksError
from allranks.launch.prepare import Prepared
from allranks.machine.allotted import usable_instructions
from allranks.machine.gpus import LocalGPU, local_gpus
from allranks.run.record import read_rank
from allranks.show.numbers import between, metric, number, ratio, size
from allranks.show.tables import Table, show_table
from allranks.timing.steps import STOPPED_EARLY, Timing, timing

PRECISIONS = ("fp32", "tf32", "fp16", "bf16")
AMPERE = (8, 0)  # compute capability of the first GPUs with tf32 and bf16


@dataclass(frozen=True, slots=True)
class Trial:
    """One run in one precision (or of another variant of the job), or why there is none."""

    name: str
    run: str = ""
    samples_per_second: float | None = None
    memory_bytes: int | None = None
    memory_of: str | None = None  # device or host
    losses: Mapping[int, float] = field(default_factory=dict)  # by step
    problem: str | None = None
    is_refused: bool = False  # this machine does not support it: nothing was started
    measured: Timing | None = None
    sent_per_step: float | None = None  # bytes, by rank 0


def read_precisions(text: str | None) -> list[str]:
    """The names in `--precisions fp32,bf16`, in one order; all of them if it is not given."""
    words = [word.strip() for word in text.split(",")] if text else list(PRECISIONS)
    wrong = [word for word in words if word not in PRECISIONS]
    if wrong:
        raise AllranksError(
            f'--precisions "{text}": {wrong[0] or "one"} is not a precision',
            fix=f"write some of {','.join(PRECISIONS)}",
        )
    return [precision for precision in PRECISIONS if precision in words]


def why_unsupported(
    precision: str, gpus: Sequence[LocalGPU], *, cpu_can: Callable[[], bool] = lambda: True
) -> str | None:
    """Why this machine cannot compute in a precision; None if it can.

    `cpu_can`: whether its CPU computes in bf16 and fp16.
    """
    if precision in ("fp16", "bf16") and not gpus and not cpu_can():
        return "this CPU lists AMX but cannot run it: a test ended with SIGILL"
    if precision == "tf32" and not gpus:
        return "tf32 needs an NVIDIA GPU, and there is none here"
    if precision in ("tf32", "bf16"):
        old = [gpu for gpu in gpus if _capability(gpu) < AMPERE]
        if old:
            return f"{old[0].name} is older than Ampere, the first generation with {precision}"
    return None


def _capability(gpu: LocalGPU) -> tuple[int, ...]:
    parts = gpu.compute_capability.split(".")
    return tuple(int(part) for part in parts) if all(p.isdecimal() for p in parts) else AMPERE


def measure(
    names: Sequence[str],
    prepare: Callable[[Sequence[str]], Prepared],
    console: Console,
    *,
    steps: int,
    repeats: int,
) -> Result:
    """Make all runs, round by round. `prepare` takes more overrides."""
    if prepare(()).job.command is not None:
        raise AllranksError(
            "bench precision is for tasks: a script chooses its own precision",
            fix="run your script once per precision, with its own settings, and compare the runs: "
            "allranks report",
        )
    refused = {
        name: why_unsupported(name, local_gpus(), cpu_can=lambda: usable_instructions() is not None)
        for name in names
    }
    planned = [
        (name, prepare((f"precision={name}", f"steps={steps}")))
        for name in names
        if not refused[name]
    ]
    record = {"id": secrets.token_hex(4), "kind": "precision"}
    series = Series(planned * repeats, console, record)

    trials = [Trial(name, problem=why, is_refused=True) for name, why in refused.items() if why]
    done = series.here(reader(series))
    trials += done
    found = as_json(trials, steps=steps) | {"interrupted": series.is_interrupted}
    error = None if series.is_interrupted else error_in(trials)
    return Result(found, error, series.is_interrupted, series.how_far(one.problem for one in done))


def reader(series: Series) -> Callable[[Ended], Trial]:
    """What reads each run, says what it measured, and leaves out repeats of one that failed."""

    def read(ended: Ended) -> Trial:
        trial = trial_of(ended)
        if trial.problem:
            series.left_out.add(ended.name)
        pace = trial.samples_per_second
        said = trial.problem if pace is None else f"{number(pace)} samples/s"
        run = f"  ({trial.run})" if trial.run else ""
        line = f"{trial.name}: {said}{run}"
        series.console.print(line, style="dim", soft_wrap=True, markup=False)
        return trial

    return read


def trial_of(ended: Ended) -> Trial:
    """What a run has measured, or why it has not."""
    run = ended.run
    if run is None:
        return Trial(ended.name, problem=ended.problem(None))
    measured = timing(run)
    problem = ended.problem(measured)
    attempt = max(run.attempts(), default=0)
    end = run.end(attempt, 0) or {}
    if run.state() == "stopped":
        problem = STOPPED_EARLY
    on_device, on_host = end.get("memory_peak"), end.get("host_memory")
    losses = read_rank(run, attempt, 0).losses
    lost = next((step for step, loss in losses.items() if loss is None), None)
    if lost is not None and problem is None:
        problem = f"its loss is not a number from step {lost} on"
    start = (run.start(attempt, 0) or {}) if end else {}
    steps = end.get("step", 0) - start.get("step", 0)
    return Trial(
        name=ended.name,
        run=run.name,
        samples_per_second=measured.samples_per_second if measured and not problem else None,
        memory_bytes=on_device or on_host,
        measured=None if problem else measured,
        sent_per_step=end["sent"] / steps if steps and "sent" in end else None,
        memory_of="device" if on_device else "host" if on_host else None,
        losses={step: loss for step, loss in losses.items() if loss is not None},
        problem=problem,
    )


def error_in(trials: Sequence[Trial]) -> AllranksError | None:
    """Why a supported precision could not be measured; None if all were."""
    failed = [trial for trial in trials if trial.problem and not trial.is_refused]
    if not failed and any(trial.samples_per_second for trial in trials):
        return None
    if not failed:
        what = verdict([row_of([trial]) for trial in trials], None, 0)
        return AllranksError(what, fix="name another precision", exit_code=1)
    what = f"{failed[0].name}: {failed[0].problem}"
    run = failed[0].run
    fix = f"see allranks doctor {run}" if run else "fix it, then measure again"
    return AllranksError(what, fix=fix, exit_code=1)


def as_json(trials: Sequence[Trial], *, steps: int) -> dict[str, Any]:
    """What `bench precision --json` prints."""
    rows = [
        row_of([trial for trial in trials if trial.name == precision])
        for precision in PRECISIONS
        if any(trial.name == precision for trial in trials)
    ]
    base = next((row for row in rows if row["samples_per_second"]), None)
    for row in rows:
        compare(row, base)
    return {
        "steps": steps,
        "baseline": base["precision"] if base else None,
        "rows": [{key: row[key] for key in row if key != "losses"} for row in rows],
        "verdict": verdict(rows, base, steps),
    }


def row_of(trials: Sequence[Trial]) -> dict[str, Any]:
    """The repeats of one precision."""
    paces = [t.samples_per_second for t in trials if t.samples_per_second is not None]
    memory = [t.memory_bytes for t in trials if t.memory_bytes is not None]
    losses = trials[0].losses
    return {
        "precision": trials[0].name,
        "problem": next((t.problem for t in trials if t.problem), None),
        "samples_per_second": statistics.median(paces) if paces else None,
        "range": [min(paces), max(paces)] if paces else None,
        "memory_bytes": max(memory) if memory else None,
        "memory_of": trials[0].memory_of,
        "loss": losses[max(losses)] if losses else None,
        "losses": losses,
        "repeats": [
            {"run": t.run, "samples_per_second": t.samples_per_second} for t in trials if t.run
        ],
    }


def compare(row: dict[str, Any], base: Mapping[str, Any] | None) -> None:
    """Add how the row compares with the first one that was measured."""
    pace = row["samples_per_second"]
    row["speedup"] = pace / base["samples_per_second"] if base and pace else None
    ours, theirs = row["losses"], base["losses"] if base else {}
    common = sorted(set(ours) & set(theirs)) if pace else []
    apart = [ours[step] - theirs[step] for step in common]
    row["loss_difference"] = apart[-1] if apart else None
    row["largest_loss_difference"] = max(map(abs, apart)) if apart else None


def verdict(rows: Sequence[Mapping[str, Any]], base: Mapping[str, Any] | None, steps: int) -> str:
    """Which precision to choose."""
    if base is None:
        why = next((row["problem"] for row in rows if row["problem"]), "no run was made")
        return f"nothing could be measured: {why}"
    measured = [row for row in rows if row["speedup"] is not None]
    if len(measured) == 1:
        return f"only {base['precision']} could be measured, so there is nothing to compare"
    best = max(measured, key=lambda row: row["samples_per_second"])
    if best is base:
        return f"{base['precision']} is the fastest here: there is no reason to use another"
    memory = ""
    if best["memory_bytes"] and base["memory_bytes"] and best["memory_of"] == "device":
        memory = f", with {ratio(best['memory_bytes'] / base['memory_bytes'])} the memory"
    difference = ""
    if best["loss_difference"] is not None:
        apart = f"{best['loss_difference']:+.2g} (from {base['loss']:.4g})"
        difference = f"; after {steps} steps its loss differs by {apart}"
    return (
        f"precision={best['precision']} is {ratio(best['speedup'])} as fast as {base['precision']}"
        f"{memory}{difference}"
    )


def show(console: Console, found: Mapping[str, Any]) -> None:
    """What `as_json` made, for people."""
    measured = [row for row in found["rows"] if row["samples_per_second"] is not None]
    if measured:
        show_table(console, table_of(found, measured))
    for row in found["rows"]:
        if row["problem"]:
            console.print(Text(f"{row['precision']}: {row['problem']}"), soft_wrap=True)
    if any(row["memory_of"] == "host" for row in measured):
        line = "memory is the host's: everything that a rank uses, including Python and torch"
        console.print(Text(line), soft_wrap=True)
    console.print(Text(found["verdict"], style="bold"), soft_wrap=True)


def table_of(found: Mapping[str, Any], rows: list[Mapping[str, Any]]) -> Table:
    columns = (
        *("precision", "samples/s", "range", "speedup", "memory", "loss"),
        *("differs by", "at most"),
    )
    cells = []
    for row in rows:
        last, most = row["loss_difference"], row["largest_loss_difference"]
        if row["precision"] == found["baseline"]:
            last = most = None
        cells.append(
            (
                row["precision"],
                number(row["samples_per_second"]),
                between(row["range"]),
                ratio(row["speedup"]),
                size(row["memory_bytes"]),
                metric(row["loss"]),
                number(last, 2, signed=True),
                number(most, 2),
            )
        )
    return Table(f"{found['steps']} steps each, measured", columns, cells)
