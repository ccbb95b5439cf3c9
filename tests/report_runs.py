"""Run folders as runs on GPUs leave them, for the tests of the report."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from allranks.run.folder import RunDir

H100 = {"name": "NVIDIA H100 80GB HBM3", "memory_bytes": 85_520_809_984}
BEGIN = 1_790_000_000.0


def make_run(
    runs: Path,
    layout: str,
    *,
    step_seconds: float,
    number: int = 0,
    name: str = "language",
    steps: int = 60,
    batch: int = 256,
    state: str | None = "finished",
    gpu: Mapping[str, Any] | None = H100,
    phases: bool = True,
    comm: float = 0.0,
    info: Mapping[str, Any] | None = None,
    job: Mapping[str, Any] | None = None,
    edit: Callable[[int, dict[str, Any]], dict[str, Any]] = lambda rank, event: event,
) -> RunDir:
    """One run of `steps` steps; `comm`: seconds of a step that are communication.

    `edit`: takes a rank and each of its events, and returns the event as it is written.
    """
    run = RunDir(runs / f"{name}-20260921-1200{number:02}-{number:04x}")
    nodes, per_node = map(int, layout.partition(":")[0].split("x"))
    ranks = nodes * per_node
    run.attempt(0).mkdir(parents=True)
    settings = {"name": name, "task": "language", "batch_size": batch, "steps": steps, "seed": 0}
    run.job_file.write_text(yaml.safe_dump({**settings, **(job or {})}))
    run.write_info(
        {
            "v": 1,
            "run": run.name,
            "created": BEGIN + number,
            "layout": layout,
            "backend": "slurm",
            "hardware": {"gpus": [dict(gpu)] if gpu else []},
            "attempts": [{"attempt": 0, "layout": layout}],
            **(info or {}),
        }
    )
    world = _World(layout, ranks, batch, steps, step_seconds, comm, gpu, phases, number)
    world.is_script = bool((job or {}).get("command"))
    for rank in range(ranks):
        events = [edit(rank, event) for event in world.events(rank, state)]
        lines = [json.dumps({"v": 1, **event}) for event in events]
        run.events(0, rank).write_text("\n".join(lines) + "\n")
    return run


class _World:
    """The events of all ranks of one made-up run."""

    is_script = False

    def __init__(
        self,
        layout: str,
        ranks: int,
        batch: int,
        steps: int,
        step_seconds: float,
        comm: float,
        gpu: Mapping[str, Any] | None,
        phases: bool,
        number: int,
    ) -> None:
        self.layout, self.ranks, self.batch, self.steps = layout, ranks, batch, steps
        self.comm, self.gpu, self.phases = comm, gpu, phases
        noise = random.Random(number)
        self.seconds = [step_seconds * (1 + 0.01 * noise.uniform(-1, 1)) for _ in range(steps)]
        self.seconds[0] *= 5

    def events(self, rank: int, state: str | None) -> list[dict[str, Any]]:
        device = self.gpu["name"] if self.gpu else "CPU"
        start = {
            **{"rank": rank, "world_size": self.ranks, "layout": self.layout, "device": device},
            **{"global_batch": self.batch, "samples_per_epoch": self.batch * 10},
            **{"steps_per_epoch": 10, "step": 0, "steps": self.steps},
        }
        if self.is_script:  # the launcher writes it, which knows nothing of the training
            start = {key: start[key] for key in ("rank", "world_size", "layout")}
        now = BEGIN
        found: list[dict[str, Any]] = [{"t": now, "event": "start", **start}]
        for number, seconds in enumerate(self.seconds, start=1):
            now += seconds
            step = {"step": number, "samples": self.batch // self.ranks, "seconds": seconds}
            if self.phases:
                step |= self._phases(rank, seconds)
            if rank == 0 and number % 2 == 0:
                step["loss"] = 4.2 * math.exp(-number / 40) + 1.1
            found.append({"t": now, "event": "step", **step})
        for i in range(20):
            use: dict[str, Any] = {"cpu": 0.9 + 0.02 * (i % 3)}
            if self.gpu:
                use["utilization"] = round(97 - 400 * self.comm - (i * 7 + rank) % 4)
            found.append({"t": BEGIN + 2 * i, "event": "device", **use})
        if state:
            found.append({"t": now, "event": "end", "state": state, **self._end(rank, state)})
        return found

    def _phases(self, rank: int, seconds: float) -> dict[str, float]:
        wait = self.comm + (0.03 * seconds if self.ranks > 1 and rank != self.ranks - 1 else 0.0)
        rest = seconds - wait
        shares = {"data": 0.04, "forward": 0.3, "backward": 0.56, "optimizer": 0.07, "other": 0.03}
        return {"wait": wait, **{phase: share * rest for phase, share in shares.items()}}

    def _end(self, rank: int, state: str) -> dict[str, Any]:
        if state == "failed":
            return {"exit": 1, "error": {"what": "CUDA out of memory", "fix": "use less"}}
        if self.is_script:
            return {"exit": 0}
        return {
            **{"exit": 0, "step": self.steps, "epoch": 6, "samples": self.steps * self.batch},
            **{"seconds": sum(self.seconds) + 2.0, "samples_per_second": 1.0},
            "metrics": {"val_loss": 1.52 + 1e-6 * self.ranks, "val_accuracy": 0.712},
        }


def scaling_study(runs: Path) -> list[RunDir]:
    """Three repeats each of one to eight GPUs, two nodes among them, and one run that crashed."""
    made: list[RunDir] = []
    layouts = {
        "1x1": (0.4, 0.0),
        "1x2": (0.205, 0.006),
        "1x4": (0.106, 0.007),
        "2x4": (0.065, 0.014),
    }
    for layout, (seconds, comm) in layouts.items():
        for repeat in range(3):
            slower = seconds * (1 + 0.004 * (repeat - 1))
            made.append(
                make_run(runs, layout, step_seconds=slower, comm=comm, number=len(made), steps=200)
            )
    made.append(
        make_run(
            runs,
            "2x4",
            step_seconds=0.064,
            comm=0.014,
            number=12,
            steps=90,
            state="failed",
            job={"steps": 200},
        )
    )
    return made
