"""A checkpoint of any layout goes on on any other, and each rank reads only what it holds."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.faults import newest_weights, same_bits
from tests.moving import CHAIN, LANGUAGE, STEPS, Moving
from tests.ranks import run_ranks
from tests.training import LAYOUTS
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from allranks.run.commits import commits
from allranks.run.events import EventLog
from allranks.train.checkpoint import Checkpointer, Tensors, load, training_tensors
from allranks.train.data import Progress
from allranks.train.optim import allocate_state, local

pytestmark = pytest.mark.ranks

# Sizes that the ranks do not divide: some hold nothing of a tensor.
DIGITS = {**LANGUAGE, "task": "digits", "options": {"norm": "batch"}}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Moving]:
    """`saved(layout)`: a run after its first steps, which are made once."""
    folder = tmp_path_factory.mktemp("saved")
    return cache(lambda layout: Moving(folder / layout.replace(":", "-")).go_on(layout))


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of one rank that is never stopped, for the longest of the moves."""
    one = Moving(tmp_path_factory.mktemp("one") / "1x1")
    return one.go_on("1x1", len(CHAIN) * STEPS).losses


@pytest.mark.parametrize(
    "layouts",
    [
        CHAIN,
        *(
            pytest.param(pair, marks=pytest.mark.soak)
            for pair in itertools.product(LAYOUTS, repeat=2)
        ),
    ],
    ids=" -> ".join,
)
def test_a_run_goes_on_on_any_layout(
    tmp_path: Path,
    saved: Callable[[str], Moving],
    uninterrupted: list[float],
    layouts: tuple[str, ...],
) -> None:
    run = saved(layouts[0]).copy(tmp_path / "moving")
    for layout in layouts[1:]:
        run.go_on(layout)
    assert run.losses == pytest.approx(uninterrupted[: len(run.losses)], rel=1e-5)


def test_ranks_that_hold_nothing_of_a_tensor_move_too(tmp_path: Path) -> None:
    moving = Moving(tmp_path / "moving", DIGITS).go_on("1x3:fsdp=3").go_on("1x2:fsdp=2")
    one = Moving(tmp_path / "one", DIGITS).go_on("1x1", 2 * STEPS)
    assert moving.losses == pytest.approx(one.losses, rel=1e-4)
    assert all(math.isfinite(loss) for loss in moving.losses)


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
