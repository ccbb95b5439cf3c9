"""How many loader workers a job needs, from what its ranks measured. Pure, and without torch.

`data.json` in a run's folder (see train/feed_bench.py) has every single measurement; here they
become rows; data_verdict.py says what follows from them.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from typing import Any

from allranks.bench.data_verdict import (
    Found,
    Pace,
    Row,
    judge,
    knee_of,
    reason,
    script_verdict,
    verdict,
)
from allranks.errors import AllranksError
from allranks.run.folder import RunDir
from allranks.timing.steps import Timing


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


def as_json(found: Found, run: RunDir) -> dict[str, Any]:
    """What `bench data --json` prints for a task."""
    rows, step = rows_of(found), step_of(found)
    batch, judged = found["batch_size"], judge(rows, step)
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
        "limit": judged.limit,
        "recommendation": None
        if judged.row is None
        else {"num_workers": judged.row.workers, "reason": reason(judged)},
        "is_disturbed": judged.contradiction is not None or bool(judged.remarks),
        "remarks": list(judged.remarks),
        "verdict": verdict(found, judged),
    }


def _fields(prefix: str, pace: Pace | None) -> dict[str, Any]:
    return {
        f"{prefix}samples_per_second": pace.median if pace else None,
        f"{prefix}range": [pace.low, pace.high] if pace else None,
    }


def script_as_json(
    run: RunDir, timing: Timing, num_workers: int | None, cpus: int
) -> dict[str, Any]:
    """The same for a script, at its own settings: its loaders are its own to change.

    `num_workers` is None where the run was too short to see any; `cpus` are those of a rank.
    """
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
        "cpus_per_rank": cpus,
        "samples_per_second": pace,
        "samples_per_second_without_waiting": pace / (1 - share)
        if share is not None and share < 1
        else None,
        "step_seconds": timing.step_seconds,
        "data_seconds": waits,
        "data_share": share,
        "steady": timing.steady,
        "recommendation": None,
        "verdict": script_verdict(share, num_workers, cpus, is_steady=timing.steady),
    }
