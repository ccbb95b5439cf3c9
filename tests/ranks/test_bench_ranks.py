"""bench data, --profile and bench precision with real ranks, through the command line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from tests.commandline import Allranks
from tests.forked import EXECUTED, run_forked

from allranks.bench.profile import summarise
from allranks.run.events import read_events
from allranks.run.folder import RunDir

# Each starts Python and torch several times.
pytestmark = pytest.mark.ranks

TASK = """
from dataclasses import dataclass
from pathlib import Path
import time
import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset
from allranks.tasks import Task

class Files(Dataset):
    def __init__(self, folder):
        self.paths = sorted(Path(folder).glob("*.npy"))
    def __len__(self):
        return 100 * len(self.paths)  # few epochs: each starts workers
    def __getitem__(self, index):
        path = self.paths[index % len(self.paths)]
        return torch.from_numpy(np.load(path)), torch.tensor(index % 2)

@dataclass
class Mine(Task):
    folder: str = "./data"
    breaks: bool = False
    defaults = {"batch_size": 16, "epochs": 1}
    def model(self):
        if self.breaks:
            raise ValueError("no model today")
        return nn.Linear(32, 2)
    def datasets(self):
        return {"train": Files(self.folder)}
    def loss(self, outputs, targets):
        time.sleep(0.01)  # it is measured for seconds
        return nn.functional.cross_entropy(outputs, targets, reduction="none")
"""

SCRIPT = """
import sys
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(32, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.randn(4096, 32), torch.randint(2, (4096,)))
for step, (inputs, targets) in enumerate(DataLoader(data, batch_size=8)):
    if step == int(sys.argv[1]):
        break
    torch.nn.functional.cross_entropy(model(inputs), targets).backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""

ONE_THREAD = {"OMP_NUM_THREADS": "1"}
NO_FORKED_RANKS = {**ONE_THREAD, **EXECUTED}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    import numpy as np

    (tmp_path / "mine.py").write_text(TASK)
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "data").mkdir()
    for number in range(96):
        np.save(tmp_path / "data" / f"{number}.npy", np.ones(32, np.float32))
    return tmp_path


def answer(outcome: Any) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(outcome.stdout)
    return value


def test_data_of_files_by_workers(allranks: Allranks, folder: Path) -> None:
    options = ["task=mine:Mine", "--seconds-each", "0.1", "--repeats", "1", "--workers", "0,1"]
    words = ("bench", "data", *options, "--layout", "1x2", "--json")
    outcome = allranks(*words, env=ONE_THREAD)
    assert outcome.returncode == 0, outcome.stderr
    found = answer(outcome)
    assert (found["mode"], found["ranks"], found["batch_size"]) == ("task", 2, 16)
    assert [row["workers"] for row in found["rows"]] == [0, 1]
    for row in found["rows"]:
        assert row["samples_per_second"] > 0 and row["training_samples_per_second"] > 0
    assert found["step"]["samples_per_second"] > 0
    if not found["is_disturbed"]:  # by other work on this machine
        assert found["recommendation"]["num_workers"] in (0, 1)
    run = RunDir(Path(found["run_dir"]))
    assert run.info()["bench"]["kind"] == "data"
    assert run.state() == "finished"


@pytest.mark.soak
def test_what_was_measured_before_a_failure_is_kept(allranks: Allranks, folder: Path) -> None:
    options = ["task=mine:Mine", "options.breaks=true", "--seconds-each", "0.1", "--repeats", "1"]
    outcome = allranks("bench", "data", *options, "--workers", "0", "--json", env=ONE_THREAD)
    assert outcome.returncode == 1
    assert "no model today" in outcome.stderr
    found = answer(outcome)
    assert found["rows"][0]["samples_per_second"] > 0
    assert found["step"] is None


def test_a_script_that_ends_while_it_is_profiled_ends_well(folder: Path) -> None:
    options = ["--layout", "1x1", "--profile", "4", "--json", "--", "python", "train.py", "12"]
    outcome = run_forked("run", *options, cwd=folder, env=NO_FORKED_RANKS)  # they cannot trace
    assert outcome.returncode == 0, outcome.stderr
    assert answer(outcome)["profile"] is None
    assert "the script made 12 steps, a profile needs 13" in outcome.stderr


def test_a_script_is_traced_on_every_rank(folder: Path) -> None:
    options = ["--layout", "1x2", "--profile", "4", "--json", "--", "python", "train.py", "40"]
    outcome = run_forked("run", *options, cwd=folder, env=NO_FORKED_RANKS)  # they cannot trace
    assert outcome.returncode == 0, outcome.stderr
    found = json.loads(Path(answer(outcome)["profile"]).read_text())
    assert [(rank["rank"], rank["steps"]) for rank in found["ranks"]] == [(0, 4), (1, 4)]
    (exchange,) = found["collectives_of_a_step"]
    assert (exchange["name"], exchange["bytes"]) == ("all_reduce", (32 * 2 + 2) * 4)
    assert (exchange["group_size"], exchange["count"]) == (2, 1)
    # Which operators are slowest differs between machines: the layer is tiny.
    assert any(row["name"].startswith("aten::") for row in found["operators"])
    for rank in found["ranks"]:
        whole = rank["compute_seconds"] + rank["exposed_seconds"] + rank["idle_seconds"]
        assert whole == pytest.approx(rank["step_seconds"], rel=0.02)
        check_opens(Path(rank["trace"]))
    assert "https://ui.perfetto.dev" in outcome.stderr
    assert "USDT" not in outcome.stderr  # torch's profiler talks about itself
    run = RunDir(Path(answer(outcome)["run_dir"]))
    events = [e for e in read_events(run.events(0, 0)) if e["event"] == "profile"]
    assert [(event["last"] - event["first"] + 1) for event in events] == [4]
    assert "# Profile of" in (run.path / "profile.md").read_text()


def check_opens(path: Path) -> None:
    """Slices of a thread lie in each other or apart: a viewer drops any other."""
    content = json.loads(gzip.decompress(path.read_bytes()))
    threads: dict[Any, list[tuple[float, float]]] = {}
    for event in content["traceEvents"]:
        if event["ph"] == "X":
            thread = threads.setdefault((event["pid"], event["tid"]), [])
            thread.append((event["ts"], event["ts"] + event["dur"]))
    for spans in threads.values():
        open_ones: list[float] = []
        for begin, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            while open_ones and open_ones[-1] <= begin:
                open_ones.pop()
            assert not open_ones or end <= open_ones[-1] + 0.01
            open_ones.append(end)


def test_precisions_side_by_side_and_a_task_is_traced_too(allranks: Allranks, folder: Path) -> None:
    options = ["--precisions", "fp32,tf32,bf16", "--steps", "30", "--repeats", "1", "--json"]
    env = {**ONE_THREAD, "ALLRANKS_PROFILE": "3"}
    outcome = allranks("bench", "precision", "task=spiral", *options, env=env)
    assert outcome.returncode == 0, outcome.stderr
    rows = {row["precision"]: row for row in answer(outcome)["rows"]}
    assert rows["fp32"]["loss_difference"] == 0
    assert 0 < abs(rows["bf16"]["loss_difference"]) < 0.1
    assert rows["bf16"]["memory_bytes"] > 0
    (repeat,) = rows["fp32"]["repeats"]
    found = summarise(RunDir(folder / "runs" / repeat["run"]))
    assert found is not None
    assert [rank["steps"] for rank in found["ranks"]] == [3]
    assert found["ranks"][0]["hidden_share"] is None
    assert "nothing is exchanged" in found["verdict"]


@pytest.mark.parametrize(
    ("words", "code", "what"),
    [
        (["bench", "data", "--workers", "x"], 2, "not a list of numbers"),
        (["bench", "data", "--", "python", "-c", "import torch"], 1, "no optimizer step was seen"),
        (["bench", "precision", "--", "python", "train.py"], 2, "a script chooses"),
        (["bench", "precision", "--precisions", "fp8"], 2, "fp8 is not a precision"),
        (["run", "--profile", "0"], 2, "--profile"),
    ],
)
def test_refusals(allranks: Allranks, words: list[str], code: int, what: str) -> None:
    cut = words.index("--") if "--" in words else len(words)
    outcome = allranks(*words[:cut], "--json", *words[cut:])
    assert outcome.returncode == code
    error = answer(outcome)["error"]
    assert what in error["what"] and error["fix"]
