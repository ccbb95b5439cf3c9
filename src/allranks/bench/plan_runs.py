"""Which runs a benchmark of scaling needs, and in what order. No torch."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from allranks.errors import AllranksError
from allranks.job.job import Job
from allranks.layout import Layout

ENDLESS_STEPS = 10_000_000  # the probe ends the run long before


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """One run to be made."""

    layout: Layout
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RunPlan:
    """All runs, round by round: what drifts on the machine drifts for all layouts."""

    runs: tuple[PlannedRun, ...]
    steps: int | None  # None: to the end
    weak: bool
    bench: dict[str, Any] = field(default_factory=dict)  # noted in every run's folder
    added: Layout | None = None  # to compare the others with: nobody asked for it

    def for_job(self, job: Job) -> RunPlan:
        """The same runs, with what this job must be told to be measured."""
        overrides: list[str] = []
        bench = dict(self.bench)
        if self.steps is not None:
            overrides.append(f"env.ALLRANKS_MEASURE='{self.steps}'")
        if job.command is None:
            if self.steps is not None:
                overrides.append(f"steps={ENDLESS_STEPS}")
                bench["job"] = {"epochs": job.epochs, "steps": job.steps}  # as it is to train
            if self.weak:
                overrides.append(f"batch_size_per_rank={job.batch_size or job.batch_size_per_rank}")
                bench["mode"] = "weak"
        elif self.weak:
            raise AllranksError(
                "--weak is for tasks: a script decides on its batches itself",
                fix="leave it out; what the batches were is measured, and said",
            )
        runs = tuple(replace(run, overrides=tuple(overrides)) for run in self.runs)
        return replace(self, runs=runs, bench=bench)


def plan_runs(
    layouts: str, *, steps: str, repeats: int, weak: bool = False, may_add: bool = True
) -> RunPlan:
    """Read what was asked for. Raises AllranksError.

    A missing layout of one rank is added if it may be; not where every layout divides the model,
    which would hardly fit one rank.
    """
    wanted = read_layouts(layouts)
    is_whole = any(layout.dp == layout.ranks for layout in wanted)
    added = Layout(1, 1) if may_add and is_whole and wanted[0].ranks > 1 else None
    order = [*([added] if added else []), *wanted]
    runs = tuple(PlannedRun(layout) for _ in range(repeats) for layout in order)
    bench = {"id": secrets.token_hex(4), "kind": "scaling"}
    return RunPlan(runs, read_steps(steps), weak, bench, added)


def read_layouts(text: str) -> list[Layout]:
    words = [word.strip() for word in text.split(",")]
    if not all(words):
        raise AllranksError(f'--layouts "{text}": a layout is missing', fix="write 1x1,1x2,1x4")
    return sorted_once([Layout.parse(word) for word in words])


def sorted_once(layouts: Sequence[Layout]) -> list[Layout]:
    return sorted(dict.fromkeys(layouts), key=lambda layout: (layout.ranks, layout.nodes))


def read_steps(text: str) -> int | None:
    if text == "all":
        return None
    if text.isdigit() and int(text) > 0:
        return int(text)
    raise AllranksError(f'--steps "{text}" is no number of steps', fix="write --steps 200, or all")
