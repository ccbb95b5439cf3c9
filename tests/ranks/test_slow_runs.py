"""Real delays in real ranks, and what the doctor makes of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.scripts import run_script

from allranks.doctor.finding import Finding
from allranks.doctor.slow import slow
from allranks.timing.limits.facts import Thresholds

pytestmark = pytest.mark.ranks

# Steps of 100 ms that only sleep. The script's own stopwatch says what became of that: on a busy
# machine a rank comes late without any delay of ours, and the doctor is right to say so.
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
end = time.perf_counter()
for step, (x, y) in enumerate(DataLoader(Data(), batch_size=BATCH)):
    begun = time.perf_counter()
    if step == 28:
        break
    loss = mse_loss(model(x), y)
    time.sleep(WORK)
    ready = time.perf_counter()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    now = time.perf_counter()
    print("took", begun - end, ready - end, now - end)
    end = now
dist.destroy_process_group()
"""
SHORT = Thresholds(least_steps=10)  # of 28 steps, the last ones
MEASURED_STEPS = 18
LEAST = 5  # percent of a step: as much is told where it was not asked for


@dataclass(frozen=True)
class Diagnosis:
    """What the doctor says, and what is true: in percent of a step, in the mean."""

    findings: list[Finding]
    data: float  # of the rank that waits longer for its data
    late: float  # what rank 1 comes later than rank 0
    uneven: float  # what one of them comes later than the other

    @property
    def share(self) -> float:
        """As the first finding has it."""
        return float(self.findings[0].title.partition("%")[0].split()[-1])


def diagnose(
    tmp_path: Path, data: str = "0", work: str = "0.1", batch: str = "4", *, trace: str = "off"
) -> Diagnosis:
    """`trace`: off, so that sleeping counts as computing."""
    text = SCRIPT.replace("DATA)", f"({data}))").replace("WORK)", f"{work})")
    found = run_script(
        tmp_path,
        text.replace("batch_size=BATCH", f"batch_size={batch}"),
        2,
        env={"ALLRANKS_TRACE": trace},
    )
    assert found.exits == [0, 0], found.log(0)
    said = [found.said("took", rank)[-MEASURED_STEPS:] for rank in range(2)]
    ours, others = (
        [[float(word) for word in line.split()] for line in of_rank] for of_rank in said
    )
    percent = 100 / sum(took for _, _, took in ours)
    late = [other[1] - own[1] for own, other in zip(ours, others, strict=True)]
    return Diagnosis(
        slow(found.run, SHORT),
        percent * max(sum(took for took, _, _ in of_rank) for of_rank in (ours, others)),
        percent * sum(max(0.0, seconds) for seconds in late),
        percent * sum(map(abs, late)),
    )


def test_a_run_without_delays_gives_none(tmp_path: Path) -> None:
    found = diagnose(tmp_path)
    assert found.findings == [] or found.uneven > LEAST, found
    assert {each.cause for each in found.findings} <= {
        "uneven-steps",
        "uneven-lengths",
        "slow-rank",
    }, found


def test_a_trace_shows_the_line_that_sleeps(tmp_path: Path) -> None:
    (found, *_) = diagnose(tmp_path, trace="on").findings
    assert found.cause == "host-bound" and "most of it at train.py:23" in found.title


def test_slow_data_on_every_rank(tmp_path: Path) -> None:
    found = diagnose(tmp_path, data="0.016")  # 64 ms a batch, beside 100 of work
    (first, *_) = found.findings
    assert (first.cause, first.rank) == ("too-few-workers", None)
    assert found.data > 25 and found.share == pytest.approx(found.data, abs=LEAST + 3), found
    assert "num_workers=" in first.fix


@pytest.mark.soak
def test_one_rank_with_slow_data(tmp_path: Path) -> None:
    (found, *_) = diagnose(tmp_path, data="0.016 * (rank == 1)").findings
    assert (found.cause, found.rank) == ("data-bound", 1)


def test_one_slow_rank(tmp_path: Path) -> None:
    found = diagnose(tmp_path, work="0.1 + 0.07 * (rank == 1)")
    (first, *_) = found.findings
    assert (first.cause, first.rank) == ("slow-rank", 1)
    assert found.late > 25 and found.share == pytest.approx(found.late, abs=LEAST + 3), found


@pytest.mark.soak
def test_one_rank_with_more_samples(tmp_path: Path) -> None:
    (found, *_) = diagnose(tmp_path, work="0.02 * len(x)", batch="4 + 4 * (rank == 1)").findings
    assert (found.cause, found.rank) == ("unbalanced-data", 1)
