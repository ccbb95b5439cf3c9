"""Real delays in real ranks, and what the doctor makes of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.scripts import run_script

from allranks.doctor.finding import Finding
from allranks.doctor.slow import Thresholds, slow
from allranks.doctor.slow_facts import read_slow_facts

pytestmark = pytest.mark.ranks

# Steps of 100 ms that only sleep, once for the data and once for the work of a batch: what else
# runs on this machine cannot change much, and changes both alike.
SCRIPT = """
import os, time, torch, torch.distributed as dist
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
dist.init_process_group("gloo")
rank = dist.get_rank()
class Data(Dataset):
    def __len__(self):
        return 10000
    def __getitem__(self, n):
        if n % 4 == 0:
            time.sleep(4 * DATA)
        return torch.ones(8), torch.ones(1)
model = DDP(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step, (x, y) in enumerate(DataLoader(Data(), batch_size=BATCH)):
    if step == 28:
        break
    loss = mse_loss(model(x), y)
    time.sleep(WORK)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""
SHORT = Thresholds(least_seconds=1.0)  # of 28 steps, the last ones


def diagnose(tmp_path: Path, data: str = "0", work: str = "0.1", batch: str = "4") -> list[Finding]:
    text = SCRIPT.replace("DATA)", f"({data}))").replace("WORK)", f"{work})")
    found = run_script(tmp_path, text.replace("batch_size=BATCH", f"batch_size={batch}"), 2)
    assert found.exits == [0, 0], found.log(0)
    facts = read_slow_facts(found.run)
    assert facts is not None
    return slow(facts, SHORT)


def test_a_run_without_delays_gives_none(tmp_path: Path) -> None:
    assert diagnose(tmp_path) == []


def test_slow_data_on_every_rank(tmp_path: Path) -> None:
    (found, *_) = diagnose(tmp_path, data="0.016")  # 64 ms a batch, beside 100 of work
    assert (found.cause, found.rank) == ("too-few-workers", None)
    share = float(found.title.partition("%")[0].split()[-1])
    assert 30 < share < 55, found.title
    assert "num_workers=" in found.fix


@pytest.mark.soak
def test_one_rank_with_slow_data(tmp_path: Path) -> None:
    (found, *_) = diagnose(tmp_path, data="0.016 * (rank == 1)")
    assert (found.cause, found.rank) == ("too-few-workers", 1)


def test_one_slow_rank(tmp_path: Path) -> None:
    (found, *_) = diagnose(tmp_path, work="0.1 + 0.07 * (rank == 1)")
    assert (found.cause, found.rank) == ("slow-rank", 1)
    share = float(found.title.partition("%")[0].split()[-1])
    assert 25 < share < 50, found.title


@pytest.mark.soak
def test_one_rank_with_more_samples(tmp_path: Path) -> None:
    (found, *_) = diagnose(tmp_path, work="0.02 * len(x)", batch="4 + 4 * (rank == 1)")
    assert (found.cause, found.rank) == ("unbalanced-data", 1)
