"""A run that goes on on other layouts: what each of them reads, computes and writes.

tests/ranks/test_resharding.py takes a sample of the moves, `make soak` and benchmarks/axes.py all.
"""

from __future__ import annotations

import copy
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from tests.faults import newest_weights, same_bits
from tests.ranks import run_ranks

from allranks.job.job import parse_job
from allranks.layout import Layout
from allranks.run.commits import commits
from allranks.run.events import EventLog, read_events
from allranks.run.folder import RunDir
from allranks.train import build, loop, storage
from allranks.train.checkpoint import Checkpointer, training_tensors
from allranks.train.optim import local
from allranks.train.parallelize import plain

CPU = torch.device("cpu")
STEPS = 3  # on each layout
CHAIN = ("1x4", "1x4:fsdp=2,tp=2", "1x4:pp=4", "1x1")
# An epoch of 57 samples: batches are uneven, and evaluation comes between steps.
NUM_TOKENS = 60 * 17
LANGUAGE = {
    "task": "language",
    "options": {"context": 16, "tokens": "tokens.bin"},
    "batch_size": 8,
    "optimizer": {"schedule": "constant", "warmup": 0},
}


@dataclass
class Seen:
    """What one rank saw of an attempt."""

    losses: list[float]  # rank 0's events
    bytes_read: int
    bytes_held: int


def go_on(layout: str, folder: Path, settings: dict[str, Any], attempt: int, steps: int) -> Seen:
    """Build from the newest checkpoint, save that at once to `moved-N`, and train to a step."""
    os.chdir(folder)
    job = parse_job({"log_every": 1, "precision": "fp32", **settings, "steps": steps})
    rank, world_size = dist.get_rank(), dist.get_world_size()
    run = RunDir(folder / "run")
    saved = commits(run.checkpoints)
    name = saved[0].path.name if saved else ""
    me = build.Rank(*(rank, world_size, rank, world_size), run, attempt, Layout.parse(layout), name)
    log = EventLog(run.events(attempt, rank))
    counts = []

    def preadv(*args: Any) -> int:
        counts.append(os.preadv(*args))
        return counts[-1]

    vars(storage)["os"] = SimpleNamespace(preadv=preadv)
    t = build.build(me, job, CPU, log)
    vars(storage)["os"] = os
    group = dist.group.WORLD
    assert group is not None
    again = Checkpointer(
        folder / f"moved-{attempt}" / "checkpoints",
        plain(t.model),
        t.optimizer,
        keep=1,
        group=group,
        log=log,
    )
    again.save(t.progress, {})
    again.finish()
    tensors = training_tensors(plain(t.model), t.optimizer).values()
    held = sum(local(tensor).nbytes for tensor in tensors)
    loop.train(t)
    log.close()
    events = [event for event in read_events(log.path) if event["event"] == "step"]
    losses = [event["loss"] for event in events if "loss" in event]
    return Seen(losses, sum(counts), held)


class Moving:
    """A run that moves from layout to layout. What is moved stays as it is."""

    def __init__(self, folder: Path, settings: dict[str, Any] = LANGUAGE) -> None:
        folder.mkdir()
        tokens = torch.randint(256, (NUM_TOKENS,), generator=torch.Generator().manual_seed(0))
        (folder / "tokens.bin").write_bytes(tokens.short().numpy().tobytes())
        self.folder, self.settings = folder, settings
        self.losses: list[float] = []
        self.attempts = 0
        self.weights: dict[str, torch.Tensor] = {}

    def copy(self, folder: Path) -> Moving:
        """The same run once more, to go on in another way."""
        other = copy.copy(self)
        other.folder, other.losses = folder, [*self.losses]
        shutil.copytree(self.folder, folder)
        return other

    def go_on(self, layout: str, steps: int = STEPS) -> Moving:
        """Train on ranks of this layout from where it is."""
        size, until = Layout.parse(layout).ranks, len(self.losses) + steps
        args = layout, self.folder, self.settings, self.attempts, until
        ranks = run_ranks(go_on, size, self.folder, *args)
        if self.attempts > 0:
            _, moved = newest_weights(self.folder / f"moved-{self.attempts}")
            assert same_bits(moved, self.weights)
            assert [rank.bytes_read for rank in ranks] == [rank.bytes_held for rank in ranks]
        step, self.weights = newest_weights(self.folder / "run")
        assert step == until
        # Each byte is written once, and all ranks write equally much; but only stages their own.
        (checkpoint, *_) = commits(self.folder / "run" / "checkpoints")
        files = checkpoint.manifest()["files"]
        written = [files[name]["bytes"] for name in files if name.endswith(".distcp")]
        assert sum(written) == sum(tensor.nbytes for tensor in self.weights.values())
        largest = max(tensor.nbytes for tensor in self.weights.values())
        assert len(written) == size
        assert max(written) - min(written) <= largest or Layout.parse(layout).pp > 1
        self.losses += ranks[0].losses
        assert len(self.losses) == until
        self.attempts += 1
        return self
