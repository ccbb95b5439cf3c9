"""A checkpoint of any layout goes on on any other, and each rank reads only what it holds."""

from __future__ import annotations

import itertools
import math
import os
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.faults import newest_weights, same_bits
from tests.ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from allranks.job.job import parse_job
from allranks.layout import Layout
from allranks.run.commits import commits
from allranks.run.events import EventLog, read_events
from allranks.run.folder import RunDir
from allranks.train import build, loop, storage
from allranks.train.checkpoint import Checkpointer, Tensors, load, training_tensors
from allranks.train.data import Progress
from allranks.train.optim import allocate_state, local
from allranks.train.parallelize import plain

pytestmark = pytest.mark.ranks

CPU = torch.device("cpu")
STEPS = 3  # on each layout
LAYOUTS = (
    *("1x1", "1x2", "1x2:fsdp=2", "1x2:tp=2", "1x2:pp=2"),
    *("1x4", "1x4:fsdp=4", "1x4:fsdp=2", "1x4:tp=4", "1x4:tp=2", "1x4:fsdp=2,tp=2"),
    *("1x4:pp=4", "1x4:pp=2", "1x4:fsdp=2,pp=2", "1x4:tp=2,pp=2"),
)
# An epoch of 57 samples: batches are uneven, and evaluation comes between steps.
NUM_TOKENS = 60 * 17
LANGUAGE = {
    "task": "language",
    "options": {"context": 16, "tokens": "tokens.bin"},
    "batch_size": 8,
    "optimizer": {"schedule": "constant", "warmup": 0},
}
# Sizes that the ranks do not divide: some hold nothing of a tensor.
DIGITS = {**LANGUAGE, "task": "digits", "options": {"norm": "batch"}}


@dataclass
class Trained:
    """What one rank saw of an attempt."""

    losses: list[float]  # rank 0's events
    bytes_read: int
    bytes_held: int


def train(layout: str, folder: Path, settings: dict[str, Any], attempt: int, steps: int) -> Trained:
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

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage, "os", SimpleNamespace(preadv=preadv))
        t = build.build(me, job, CPU, log)
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
    return Trained(losses, sum(counts), held)


def trained(
    layouts: tuple[str, ...], folder: Path, settings: dict[str, Any], steps: int = STEPS
) -> list[float]:
    """The losses of a run that moves from layout to layout. What is moved stays as it is."""
    folder.mkdir()
    tokens = torch.randint(256, (NUM_TOKENS,), generator=torch.Generator().manual_seed(0))
    (folder / "tokens.bin").write_bytes(tokens.short().numpy().tobytes())
    losses: list[float] = []
    weights: dict[str, torch.Tensor] = {}
    for attempt, layout in enumerate(layouts):
        size, until = Layout.parse(layout).ranks, (attempt + 1) * steps
        ranks = run_ranks(train, size, folder, layout, folder, settings, attempt, until)
        if attempt > 0:
            _, moved = newest_weights(folder / f"moved-{attempt}")
            assert same_bits(moved, weights)
            assert [rank.bytes_read for rank in ranks] == [rank.bytes_held for rank in ranks]
        step, weights = newest_weights(folder / "run")
        assert step == until
        # Each byte is written once, and all ranks write equally much; but only stages their own.
        (checkpoint, *_) = commits(folder / "run" / "checkpoints")
        files = checkpoint.manifest()["files"]
        written = [files[name]["bytes"] for name in files if name.endswith(".distcp")]
        assert sum(written) == sum(tensor.nbytes for tensor in weights.values())
        largest = max(tensor.nbytes for tensor in weights.values())
        assert len(written) == size
        assert max(written) - min(written) <= largest or Layout.parse(layout).pp > 1
        losses += ranks[0].losses
    assert len(losses) == len(layouts) * steps
    return losses


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of one rank that is never stopped, for the longest of the moves."""
    return trained(("1x1",), tmp_path_factory.mktemp("one") / "1x1", LANGUAGE, 4 * STEPS)


@pytest.mark.parametrize(
    "layouts",
    [
        ("1x4", "1x4:fsdp=2,tp=2", "1x4:pp=4", "1x1"),
        *(
            pytest.param(pair, marks=pytest.mark.soak)
            for pair in itertools.product(LAYOUTS, repeat=2)
        ),
    ],
    ids=" -> ".join,
)
def test_a_run_goes_on_on_any_layout(
    tmp_path: Path, uninterrupted: list[float], layouts: tuple[str, ...]
) -> None:
    losses = trained(layouts, tmp_path / "moving", LANGUAGE)
    assert losses == pytest.approx(uninterrupted[: len(losses)], rel=1e-5)


def test_ranks_that_hold_nothing_of_a_tensor_move_too(tmp_path: Path) -> None:
    losses = trained(("1x3:fsdp=3", "1x2:fsdp=2"), tmp_path / "moving", DIGITS)
    assert losses == pytest.approx(trained(("1x1",), tmp_path / "one", DIGITS, 2 * STEPS), rel=1e-4)
    assert all(math.isfinite(loss) for loss in losses)


def tiny_model(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Shards of a model with more ranks than rows."""
    torch.manual_seed(seed)
    model = nn.Sequential(*[nn.Linear(1, 1) for _ in range(5)], nn.Linear(1, 7))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    allocate_state(optimizer)
    return model, optimizer


def save_and_load(folder: Path) -> tuple[Tensors, Tensors]:
    saved, loaded = tiny_model(0), tiny_model(1)
    log = EventLog(folder / f"rank-{dist.get_rank()}.jsonl")
    group = dist.group.WORLD
    assert group is not None
    checkpointer = Checkpointer(folder / "checkpoints", *saved, keep=1, group=group, log=log)
    checkpointer.save(Progress(step=1), {"metrics": []})
    checkpointer.finish()
    log.close()
    dist.barrier()
    load(commits(folder / "checkpoints")[0], *loaded)
    before, after = (
        {name: local(tensor) for name, tensor in training_tensors(*one).items()}
        for one in (saved, loaded)
    )
    return before, after


def test_tensors_with_fewer_rows_than_ranks_come_back(tmp_path: Path) -> None:
    for before, after in run_ranks(save_and_load, 3, tmp_path, tmp_path):
        assert same_bits(before, after)
    assert len(newest_weights(tmp_path)[1]) == 12 + 3 * 12
