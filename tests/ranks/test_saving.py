"""Any number of ranks reads what another saved, and all of them hear that one could not save."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.ranks import run_ranks
from torch import Tensor, nn

from allranks.errors import AllranksError
from allranks.run import commits
from allranks.run.events import EventLog
from allranks.train.checkpoint import Checkpointer, load, training_tensors
from allranks.train.data import Progress

pytestmark = pytest.mark.ranks


def training(seed: int, steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    for _ in range(steps):
        model(torch.randn(4, 7)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def save(folder: str, log: EventLog, step: int = 3) -> Checkpointer:
    group = dist.group.WORLD
    assert group is not None
    checkpointer = Checkpointer(
        Path(folder), *training(seed=0, steps=3), keep=2, group=group, log=log
    )
    checkpointer.save(Progress(step=step, samples=12), {"metrics": []})
    return checkpointer


def save_and_count(folder: str) -> tuple[int, dict[str, Tensor]]:
    """How many files this rank wrote, and what was saved."""
    log = EventLog(Path(folder).parent / f"rank-{dist.get_rank()}.jsonl")
    checkpointer = save(folder, log)
    checkpointer.finish()
    log.close()
    dist.barrier()  # the first rank commits
    files = list((Path(folder) / "step-3").glob(f"__{dist.get_rank()}_*"))
    return len(files), training_tensors(checkpointer.model, checkpointer.optimizer)


def load_all(folder: str) -> dict[str, Tensor]:
    model, optimizer = training(seed=dist.get_rank() + 1, steps=0)
    (commit,) = commits.commits(Path(folder))
    progress, manifest = load(commit, model, optimizer)
    assert progress == Progress(step=3, samples=12)
    assert manifest["world_size"] == 3
    return training_tensors(model, optimizer)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_what_three_ranks_saved_any_number_loads(tmp_path: Path, world_size: int) -> None:
    folder = tmp_path / "checkpoints"
    saved = run_ranks(save_and_count, 3, tmp_path, str(folder))
    assert [num_files for num_files, _ in saved] == [1, 1, 1]
    expected = saved[0][1]
    for found in run_ranks(load_all, world_size, tmp_path, str(folder)):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def save_on_a_full_disk(folder: str, culprit: int) -> str:
    """What this rank says when one rank cannot write."""

    def full(path: Path, crc32: int | None = None) -> Any:
        raise OSError(28, "No space left on device", str(path))

    if dist.get_rank() == culprit:
        commits.seal = full
    log = EventLog(Path(folder).parent / f"rank-{dist.get_rank()}.jsonl")
    try:
        save(folder, log).finish()
    except AllranksError as error:
        return error.what
    finally:
        log.close()
    return "saved"


@pytest.mark.parametrize("culprit", [0, 1])
def test_no_rank_thinks_that_it_saved_when_one_could_not(tmp_path: Path, culprit: int) -> None:
    folder = tmp_path / "checkpoints"
    for said in run_ranks(save_on_a_full_disk, 2, tmp_path, str(folder), culprit):
        assert "No space left on device" in said
    assert commits.commits(folder) == []
