"""How many loader workers a job needs, from what its ranks measured. Pure, and without torch.

`data.json` in a run's folder (see train/feed_bench.py) has every single measurement; here they
become rows, a knee, a recommendation and a sentence.
"""

from __future__ import annotations

import json
import secrets
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from allranks.errors import AllranksError
from allranks.rundir import RunDir
from allranks.timing import Timing

KNEE_GAIN = 0.10  # what more workers must add to be worth having
AS_GOOD = 0.05  # a training this close to the fastest is as good
KEEPS_UP = 0.95  # of the pace of steps that wait for nothing
FASTER_DISK = 1.5
DISTURBED = (
    1.5  # repeats that differ by more, or steps that are faster with their data than without
)

Found = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Pace:
    """Samples a second of all ranks together, over repeats."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Pace | None:
        return cls(statistics.median(values), min(values), max(values)) if values else None


@dataclass(frozen=True, slots=True)
class Row:
    """What so many workers a rank give."""

    workers: int
    warm: Pace | None  # data from memory, nobody using them
    cold: Pace | None  # data from the disk
    training: Pace | None  # steps on those data


def overrides_of(*, workers: Sequence[int], seconds: float, repeats: int) -> tuple[str, ...]:
    """What a task's job must be told for its ranks to measure their data."""
    settings = {"workers": list(workers), "seconds": seconds, "repeats": repeats}
    return (f"env.ALLRANKS_BENCH_DATA='{json.dumps(settings)}'", "env.ALLRANKS_PROBE='off'")


def new_record() -> dict[str, Any]:
    """What the run's folder says of the benchmark that it belongs to."""
    return {"id": secrets.token_hex(4), "kind": "data"}


def read_workers(text: str | None) -> list[int]:
    """`--workers 0,2,8`; nothing: ranks choose by their CPUs. Raises AllranksError."""
    words = [word.strip() for word in text.split(",")] if text else []
    if not all(word.isdecimal() and int(word) <= 1024 for word in words):
        raise AllranksError(
            f'--workers "{text}" is no list of numbers of workers',
            fix="write --workers 0,1,2,4, or leave it out for the CPUs that a rank has",
        )
    return sorted({int(word) for word in words})


def read_found(run: RunDir) -> Found | None:
    """What the ranks of a run have measured, as far as they came."""
    try:
        content: Found = json.loads((run.path / "data.json").read_bytes())
    except (OSError, ValueError):
        return None
    return content


def rows_of(found: Found) -> list[Row]:
    """One row for each number of workers, fewest first."""

    def pace(kind: str, workers: int) -> Pace | None:
        return Pace.of([v for k, w, v in measured if (k, w) == (kind, workers)])

    measured = [(m["kind"], m["workers"], m["samples_per_second"]) for m in found["measured"]]
    counts = sorted({workers for _, workers, _ in measured if workers is not None})
    return [
        Row(count, pace("warm", count), pace("cold", count), pace("training", count))
        for count in counts
    ]


def step_of(found: Found) -> Pace | None:
    """How fast the task's own steps are when they wait for no data."""
    steps = [m for m in found["measured"] if m["kind"] == "step"]
    return Pace.of([m["samples_per_second"] for m in steps])


def knee_of(rows: Sequence[Row]) -> int | None:
    """The fewest workers from which on more of them add less than a tenth."""
    known = [(row.workers, row.warm.median) for row in rows if row.warm is not None]
    for number, (workers, pace) in enumerate(known):
        if all(more <= (1 + KNEE_GAIN) * pace for _, more in known[number + 1 :]):
            return workers
    return None


def chosen_row(rows: Sequence[Row]) -> Row | None:
    """The fewest workers that train as fast as any; by the data alone where nothing trained."""
    trained = [(row, row.training.median) for row in rows if row.training is not None]
    if trained:
        fastest = max(pace for _, pace in trained)
        return next(row for row, pace in trained if pace >= (1 - AS_GOOD) * fastest)
    knee = knee_of(rows)
    return next((row for row in rows if row.workers == knee), None)


def as_json(found: Found, run: RunDir) -> dict[str, Any]:
    """What `bench data --json` prints for a task."""
    rows, step = rows_of(found), step_of(found)
    batch, chosen = found["batch_size"], chosen_row(rows)
    return {
        "mode": "task",
        "run": run.name,
        "run_dir": str(run.path),
        "ranks": found["world_size"],
        "cpus_per_rank": found["cpus"],
        "device": found["device"],
        "batch_size": batch,
        "samples_per_epoch": found["num_samples"],
        "rows": [
            {
                "workers": row.workers,
                "is_direct": row.workers == 0 and found["is_direct"],
                **_fields("", row.warm),
                "batches_per_second": row.warm.median / batch if row.warm else None,
                **_fields("cold_", row.cold),
                **_fields("training_", row.training),
                "of_step": row.training.median / step.median if row.training and step else None,
            }
            for row in rows
        ],
        "step": None
        if step is None
        else {
            **_fields("", step),
            "batches_per_second": step.median / batch,
            "seconds": batch / step.median,
        },
        "knee": knee_of(rows),
        "files": found["files"],
        "disks": found["disks"],
        "workers_of_job": found["workers_of_job"],
        "recommendation": None
        if chosen is None
        else {"num_workers": chosen.workers, "reason": reason(chosen, step)},
        "is_disturbed": is_disturbed(rows, step),
        "verdict": verdict(found, rows, step, chosen),
    }


def is_disturbed(rows: Sequence[Row], step: Pace | None) -> bool:
    """Whether the measurements contradict each other: something else uses this machine."""
    paces = [pace for row in rows for pace in (row.warm, row.training) if pace is not None]
    if step is not None:
        paces.append(step)
        if any(row.training and row.training.median > DISTURBED * step.median for row in rows):
            return True
    return any(pace.high > DISTURBED * pace.low for pace in paces)


def _fields(prefix: str, pace: Pace | None) -> dict[str, Any]:
    return {
        f"{prefix}samples_per_second": pace.median if pace else None,
        f"{prefix}range": [pace.low, pace.high] if pace else None,
    }


def reason(row: Row, step: Pace | None) -> str:
    """Why so many workers, in measured numbers."""
    words = f"{count_of(row.workers)}:"
    if row.warm is not None:
        words += f" {row.warm.median:,.0f} samples/s"
    if step is not None:
        words += f", the step takes {step.median:,.0f}"
    if row.training is not None:
        words += f", training with them makes {row.training.median:,.0f}"
    return words


def count_of(workers: int) -> str:
    return f"{workers} worker" if workers == 1 else f"{workers or 'no'} workers"


def verdict(found: Found, rows: Sequence[Row], step: Pace | None, chosen: Row | None) -> str:
    """What was found, and what to set."""
    if chosen is None:
        return "nothing was measured"
    why = reason(chosen, step)
    is_as_now = chosen.workers == found["workers_of_job"]
    setting = f"data.num_workers={chosen.workers}" + (", as it is now" if is_as_now else "")
    if step is None or chosen.training is None or chosen.warm is None:
        return f"{setting} ({why}); the training itself was not measured"
    words = f"{setting} ({why})"
    lost = 1 - chosen.training.median / step.median
    if chosen.training.median >= KEEPS_UP * step.median:
        words += ": the data keep up"
    elif chosen.warm.median < step.median:
        words += (
            f": the data are the limit, {lost:.0%} of the step's pace is lost to them; give a rank "
            "more CPUs, or make a sample cheaper to prepare"
        )
    else:
        words += (
            f": the data are fast enough, but {lost:.0%} of the step's pace is lost to preparing "
            "them on the same CPUs"
        )
    return words + first_epoch(found, chosen, step)


def first_epoch(found: Found, chosen: Row, step: Pace) -> str:
    """What reading from the disk adds to it, where that is slower than the steps."""
    if chosen.cold is None or chosen.cold.median >= KEEPS_UP * step.median:
        return ""
    words = f". From the disk they come at {chosen.cold.median:,.0f} samples/s: the first epoch, "
    words += "or every one of data larger than the memory, waits for it"
    disks = {disk["role"]: disk for disk in found["disks"]}
    data, staging = (disks.get(role, {}).get("bytes_per_second") for role in ("data", "staging"))
    if data and staging and staging > FASTER_DISK * data:
        words += f"; data.stage=local reads a copy {staging / data:.1f}x as fast"
    return words


def script_as_json(run: RunDir, timing: Timing, num_workers: int | None) -> dict[str, Any]:
    """The same for a script, at its own settings: its loaders are its own to change."""
    waits = timing.parts["data"] if timing.parts else None
    share = waits / timing.step_seconds if waits is not None and timing.step_seconds else None
    pace = timing.samples_per_second
    return {
        "mode": "script",
        "run": run.name,
        "run_dir": str(run.path),
        "ranks": timing.ranks,
        "rows": [],
        "num_workers": num_workers,
        "samples_per_second": pace,
        "samples_per_second_without_waiting": pace / (1 - share)
        if share is not None and share < 1
        else None,
        "step_seconds": timing.step_seconds,
        "data_seconds": waits,
        "data_share": share,
        "steady": timing.steady,
        "recommendation": None,
        "verdict": script_verdict(share, num_workers),
    }


def script_verdict(share: float | None, num_workers: int | None) -> str:
    """`num_workers` is None where the run was too short to see any."""
    only = (
        "the number of workers is the script's own and cannot be changed from outside, so this is "
        "measured as it is" + ("" if num_workers is None else f": {count_of(num_workers)} a rank")
    )
    if share is None:
        return f"the time waiting for data is not known; {only}"
    said = f"steps wait {share:.1%} of their time for data"
    if share < 1 - KEEPS_UP:
        return f"{said}: the data keep up; {only}"
    more = "give its DataLoader more workers, or make a sample cheaper, and measure again"
    return f"{said}: {more}; {only}"
