"""Whole trainings on ranks of `run_ranks`: on which layouts, of what, and what each rank saw.

Tests take a sample of LAYOUTS and CASES; `make soak` and benchmarks/axes.py all of them.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tests.ranks import run_ranks

from allranks.job.job import parse_job
from allranks.layout import Layout
from allranks.run.events import EventLog, read_events
from allranks.run.folder import RunDir
from allranks.train import build, loop, optim, parallelize

# All of 1, 2 and 4 ranks, and a sample of 8.
LAYOUTS = [str(layout) for ranks in (1, 2, 4) for layout in Layout(1, ranks).of_as_many_ranks()]
LAYOUTS += ["1x8", "1x8:fsdp=2,tp=2", "1x8:tp=2,pp=4", "2x4:fsdp=2,tp=2,pp=2"]

SETTINGS: dict[str, Any] = {
    "task": "language",  # whose embeddings are tied
    "options": {"context": 16, "tokens": "tokens.bin"},
    "batch_size": 12,
    "micro_batch_size": 2,  # so that gradients are accumulated
    "steps": 6,  # the fifth is an epoch's last
    "optimizer": {"clip": 0.5},  # which most gradients exceed
}

# In float64, with a loss that weights its samples.
WEIGHTED = """
from dataclasses import dataclass
from torch import nn
from allranks.tasks.language import Language

@dataclass
class Weighted(Language):
    def model(self):
        return super().model().double()

    def loss(self, outputs, targets):
        losses = nn.functional.cross_entropy(outputs.mT, targets, reduction="none").mean(1)
        return losses, (targets % 3).sum(1)
"""


@dataclass(frozen=True, slots=True)
class Case:
    """What every layout must see as one rank does."""

    settings: dict[str, Any]
    rel: float  # by how much losses and evaluations may differ
    steps: int = 100
    like: Callable[[Layout], int] = lambda layout: 1  # data ranks of what it is compared with


CASES = {
    "fp32": Case({}, 1e-5),
    "float64": Case({"task": "weighted:Weighted"}, 1e-10),
    # With more data ranks, each weights its samples more, and fp16 overflows earlier. So it does
    # where two samples are in one micro-batch: pipelines cut small batches in another way.
    "fp16": Case(
        {"precision": "fp16", "optimizer": {"clip": None}, "micro_batch_size": 1},
        5e-3,
        40,
        lambda layout: layout.data_ranks,
    ),
}


@dataclass
class Trained:
    """What one rank saw."""

    losses: list[float]  # rank 0's events
    norms: list[float]  # of the gradients, before clipping
    metrics: list[float]  # losses of the evaluations
    samples: int
    parameters: set[str]  # names of those that it holds
    stages: list[int]  # how many blocks each stage has
    state_bytes: int  # of the optimizer, on this rank
    scale: float | None  # of fp16's losses, at the end
    shared: float  # sum of the weights that other ranks of its replica hold too, at the end


def trained(layout: str, folder: Path, settings: dict[str, Any]) -> Trained:
    """Build and train, on a rank of the layout. Nothing is saved."""
    os.chdir(folder)  # where a task of the test's own is
    job = parse_job({"log_every": 1, "precision": "fp32", **settings})
    rank, world_size = dist.get_rank(), dist.get_world_size()
    run = RunDir(folder / layout.replace(":", "-"))
    me = build.Rank(rank, world_size, rank, world_size, run, 0, Layout.parse(layout), "")
    log = EventLog(run.events(0, rank))
    norms = []

    def clip(*args: Any) -> torch.Tensor:
        norms.append(optim.clip_gradients(*args))
        return norms[-1]

    vars(loop)["clip_gradients"] = clip
    t = build.build(me, job, device_of_ranks(), log)
    if t.scaler is not None:
        # Which overflows: the first steps are skipped.
        t.scaler.load_state_dict({**t.scaler.state_dict(), "scale": 2.0**20})
    t.checkpointer.save = lambda *_: None  # type: ignore[method-assign]  # others test it
    loop.train(t)
    log.close()
    steps = [event for event in read_events(log.path) if event["event"] == "step"]
    states = [value for state in t.optimizer.state.values() for value in state.values()]
    return Trained(
        losses=[event["loss"] for event in steps if "loss" in event],
        norms=[norm.item() for norm in norms],
        # A token more that is guessed right is a jump of the accuracy.
        metrics=[record["value"] for record in t.metrics if record["name"].endswith("_loss")],
        samples=sum(event["samples"] for event in steps),
        parameters={
            name.replace("_checkpoint_wrapped_module.", "")
            for name, _ in parallelize.plain(t.model).named_parameters()
        },
        stages=t.notes.get("stages", []),
        state_bytes=sum(optim.local(value).nbytes for value in states if value.dim()),
        scale=t.scaler.get_scale() if t.scaler is not None else None,
        shared=sum(
            optim.local(parameter).double().sum().item()
            for parameter, copies in zip(t.parameters, t.copies, strict=True)
            if copies > 1
        ),
    )


def several(wanted: Sequence[tuple[str, Path, dict[str, Any]]]) -> list[Trained]:
    """One training after another."""
    return [trained(*one) for one in wanted]


def device_of_ranks() -> torch.device:
    """What the ranks of run_ranks compute on."""
    return torch.device("cuda", 0) if dist.get_backend() == "nccl" else torch.device("cpu")


class Trainings:
    """Trainings in folders under this one, each made once: call it with a layout."""

    def __init__(
        self, folder: Path, files: Mapping[str, str] | None = None, backend: str = "gloo"
    ) -> None:
        self.folder, self.backend = folder, backend
        self.files = files or {"weighted.py": WEIGHTED}  # tasks
        self._made: dict[str, list[Trained]] = {}

    def __call__(
        self, layout: str, how: Callable[..., Trained] = trained, **settings: Any
    ) -> list[Trained]:
        """What each rank saw."""
        key = json.dumps([layout, how.__name__, settings])
        if key not in self._made:
            args = (layout, self._folder(), {**SETTINGS, **settings})
            ranks = Layout.parse(layout).ranks
            self._made[key] = run_ranks(
                how, ranks, self.folder, *args, timeout=900, backend=self.backend
            )
        return self._made[key]

    def together(
        self, layouts: Sequence[str], *settings: dict[str, Any]
    ) -> dict[tuple[str, int], list[Trained]]:
        """What each rank saw by layout and number of the settings; the ranks start only once."""
        wanted = [
            (layout, self._folder(), {**SETTINGS, **one}) for layout in layouts for one in settings
        ]
        ranks = Layout.parse(layouts[0]).ranks
        found = run_ranks(several, ranks, self.folder, wanted, timeout=900, backend=self.backend)
        keys = [(layout, number) for layout in layouts for number in range(len(settings))]
        return dict(zip(keys, map(list, zip(*found, strict=True)), strict=True))

    def _folder(self) -> Path:
        """A folder with tokens, and the tasks."""
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        # 57 windows to train on: an epoch's last batch has 9. And 3 to validate on.
        ids = np.random.default_rng(0).integers(0, 64, 60 * 17) ** 2 % 256
        ids.astype("<u2").tofile(folder / "tokens.bin")
        for name, text in self.files.items():
            (folder / name).write_text(text)
        return folder

    def compare(self, case: Case, layout: str, steps: int = 100) -> dict[str, float]:
        """The largest differences of a layout in this case; fails where they are too large."""
        steps = min(steps, case.steps)
        like = f"1x{case.like(Layout.parse(layout))}"
        found, expected = (self(one, **case.settings, steps=steps) for one in (layout, like))
        return assert_same(found, expected, case.rel)


def assert_same(
    found: Sequence[Trained], expected: Sequence[Trained], rel: float
) -> dict[str, float]:
    """Fail where ranks saw something else than the others; return the largest differences.

    Where the loss is steep, a norm has ten times the rounding of the weights, in any layout.
    """
    one, differences = expected[0], {}
    assert one.losses[-1] < one.losses[0] and one.metrics
    for what, ranks, limit in (
        ("losses", found[:1], rel),  # rank 0's events have them
        ("norms", found, 10 * rel),
        ("metrics", found, rel),
    ):
        apart = max(difference(getattr(rank, what), getattr(one, what)) for rank in ranks)
        assert apart <= limit, f"{what} are off by {apart:.1e}"
        differences[what] = apart
    assert all(rank.scale == one.scale for rank in found)
    assert sum(rank.samples for rank in found) == sum(rank.samples for rank in expected)
    held = (set[str]().union(*(rank.parameters for rank in ranks)) for ranks in (found, expected))
    assert len(set(map(frozenset, held))) == 1  # the same names
    return differences


def difference(seen: Sequence[float], wanted: Sequence[float]) -> float:
    """The largest relative one; an overflow must be there in both."""
    assert len(seen) == len(wanted)
    pairs = [(a, b) for a, b in zip(seen, wanted, strict=True) if a != b]
    if any(math.isfinite(a) != math.isfinite(b) for a, b in pairs):
        return math.inf
    return max((abs(a / b - 1) for a, b in pairs if math.isfinite(b)), default=0.0)
