"""`allranks bench scaling` on real ranks: a script that knows nothing of it, scripts that fail."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.forked import run_forked
from tests.slurm.runs import SLOW_TASK

from allranks.run.folder import RunDir
from allranks.timing.steps import timing

pytestmark = pytest.mark.ranks

DELAY = 0.06  # seconds: many times what else happens on the machine
# A rank's share of a global batch of 32, or always 8 samples; a delay on the last rank.
TRAIN = """
import os, sys, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
data = TensorDataset(torch.randn(6400, 8), torch.randint(0, 2, (6400,)))
batch = int(sys.argv[1]) // world if sys.argv[1] != "8" else 8
loader = DataLoader(data, batch_size=batch, sampler=DistributedSampler(data))

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Linear(8, 2)

    def forward(self, inputs):
        if rank == 1:
            time.sleep(DELAY)
        return self.layers(inputs)

model = DistributedDataParallel(Model())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
try:
    for inputs, targets in loader:
        loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
finally:
    print("cleaned up")
"""
FAILING = {
    "never_steps": "import torch\nprint('done')",
    "crashes": "import torch\nraise ValueError('no such data')",
    "steps_on_rank_0": """
import os, torch
if os.environ["RANK"] == "0":
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(30):
        model(torch.randn(4, 2)).sum().backward()
        optimizer.step()
""",
    "empty_batches": """
import torch
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(30):
    model(torch.randn(0, 2)).sum().backward()
    optimizer.step()
""",
}


def bench(folder: Path, *args: str, code: int = 0) -> dict[str, Any]:
    done = run_forked("bench", "scaling", "--json", *args, cwd=folder, timeout=140)
    assert done.returncode == code, done.stderr
    return dict(json.loads(done.stdout))


@pytest.mark.parametrize(
    ("batch", "mode"), [("32", "strong"), pytest.param("8", "weak", marks=pytest.mark.soak)]
)
def test_an_unchanged_script_is_measured_and_its_straggler_named(
    tmp_path: Path, batch: str, mode: str
) -> None:
    (tmp_path / "train.py").write_text(TRAIN.replace("DELAY", str(DELAY)))
    args = ["--layouts", "1x2", "--repeats", "1", "--steps", "40", "--", "python", "train.py"]
    found = bench(tmp_path, *args, batch)
    assert found["mode"] == mode
    assert [row["layout"] for row in found["rows"]] == ["1x1", "1x2"]  # the baseline was added
    for row in found["rows"]:
        assert row["samples_per_step"] == (8 * row["ranks"] if batch == "8" else 32)
        assert sum(row["parts"].values()) == pytest.approx(row["step_seconds"], rel=0.02)
        low, high = row["ci95"]
        assert low < row["samples_per_second"] < high
    two = found["rows"][1]
    assert two["slowest_rank"] == 1 and two["slowest_part"] == "forward"
    assert two["parts"]["straggler"] >= 0.9 * DELAY
    run = RunDir(tmp_path / "runs" / two["repeats"][0]["run"])
    assert run.state() == "finished"
    measured = timing(run)
    assert measured is not None and measured.num_steps >= 40
    steps = [json.loads(line) for line in run.events(0, 1).read_text().splitlines()]
    last = max(event["step"] for event in steps if event["event"] == "step")
    assert last == measured.last_step < 200  # it did not run to its end
    assert "cleaned up" in run.log(0, 1).read_text()


@pytest.mark.parametrize(
    ("script", "words"),
    [
        pytest.param("never_steps", "no optimizer step was seen", marks=pytest.mark.soak),
        pytest.param(
            "crashes",
            "rank 0 failed: ValueError: no such data  (",
            marks=pytest.mark.soak,
        ),
        ("steps_on_rank_0", "no optimizer step was seen on rank 1"),
        pytest.param("empty_batches", "no samples were seen", marks=pytest.mark.soak),
    ],
)
def test_a_script_that_cannot_be_measured_is_answered_with_the_reason(
    tmp_path: Path, script: str, words: str
) -> None:
    (tmp_path / "train.py").write_text(FAILING[script])
    layout = "1x1,1x2" if script == "steps_on_rank_0" else "1x1"
    args = ["--layouts", layout, "--repeats", "1", "--steps", "10", "--", "python", "train.py"]
    found = bench(tmp_path, *args, code=1)
    assert words in found["rows"][-1]["problem"]
    if script == "steps_on_rank_0":  # what could be measured is kept
        assert found["rows"][0]["samples_per_second"] > 0


def test_a_task_is_measured_with_its_mathematics_unchanged(tmp_path: Path) -> None:
    args = ["task=spiral", "--layouts", "1x1", "--repeats", "1", "--steps", "30"]
    found = bench(tmp_path, *args)
    (row,) = found["rows"]
    assert row["samples_per_step"] == 32
    if not row["doubt"]:  # thirty steps of a busy machine may differ too much
        assert row["hours_per_epoch"] == pytest.approx(7000 / row["samples_per_second"] / 3600)
    assert row["parts"]["comm"] == row["parts"]["straggler"] == 0


def test_layouts_that_divide_the_model_are_compared(tmp_path: Path) -> None:
    layouts = {"1x2:tp=2": "tensor-parallel", "1x2:fsdp=2": "all-gather", "1x2:pp=2": "pipeline"}
    (tmp_path / "slow.py").write_text(SLOW_TASK)  # they are measured for seconds
    args = ["task=slow:SlowLanguage", "options.size=tiny", "batch_size=4", "--no-baseline"]
    args += ["--layouts", ",".join(layouts), "--repeats", "1", "--steps", "3"]
    found = bench(tmp_path, *args)
    rows = {row["layout"]: row for row in found["rows"]}
    assert sorted(rows) == sorted(layouts)
    assert {row["samples_per_step"] for row in found["rows"]} == {4.0}
    for layout, exchange in layouts.items():
        assert rows[layout]["exchanges"][exchange] > 0
        assert sum(rows[layout]["exchanges"].values()) <= rows[layout]["step_seconds"]
    assert "reduce-scatter" in rows["1x2:fsdp=2"]["exchanges"]
    assert "all-gather" not in rows["1x2:tp=2"]["exchanges"]  # no weights are gathered
    base = max(found["rows"], key=lambda row: row["samples_per_second"])["layout"]
    assert {row["baseline"] for row in found["rows"]} == {base}  # the fastest of as many ranks
