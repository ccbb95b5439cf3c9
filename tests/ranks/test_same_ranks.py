"""A layout's ranks come up alike, whoever starts them: `run` or any `bench`, in any order.

Every Python process of a rank writes down what it was given: the whole environment, CPUs, signals,
limits, open files. Two starts of one layout may differ in nothing but what names the run.
"""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import pytest
from tests.forked import run_forked
from tests.rank_states import WRITE_DOWN, differences, states

from allranks.launch.backends.local import run_here
from allranks.launch.node import Place
from allranks.launch.prepare import Request, prepare
from allranks.launch.screen import QuietScreen
from allranks.run.folder import RunDir
from allranks.show.console import PeopleConsole

pytestmark = pytest.mark.ranks

TRAIN = """
import os, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
data = TensorDataset(torch.randn(6400, 8), torch.randint(0, 2, (6400,)))
loader = DataLoader(data, batch_size=32, sampler=DistributedSampler(data))
model = DistributedDataParallel(torch.nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
print("threads", torch.get_num_threads(), torch.get_num_interop_threads())

class Aborts:  # as torch's threads may, where the interpreter ends and the process group has not
    def __del__(self):
        os.abort()

is_measured = "ALLRANKS_MEASURE" in os.environ
kept = Aborts() if is_measured else None
for epoch in range(1000 if is_measured else 1):
    for inputs, targets in loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        if is_measured:  # for seconds
            time.sleep(0.01)
dist.destroy_process_group()
"""
TASK = ("task=spiral", "data.num_workers=0")
NOTHING_OF_OMP = {name: "" for name in os.environ if name.startswith(("OMP_", "KMP_"))}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where ranks write down what they were given."""
    (tmp_path / "sitecustomize.py").write_text(WRITE_DOWN)
    (tmp_path / "train.py").write_text(TRAIN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for name in NOTHING_OF_OMP:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def runs_of(folder: Path, *words: str) -> dict[str, list[list[dict[str, Any]]]]:
    """The states of all runs that a command makes, by layout."""
    runs = folder / f"runs-{'-'.join(words[:2])}-{len(list(folder.iterdir()))}"
    command = [*words[: words.index("--")], "--runs", str(runs), *words[words.index("--") :]]
    done = run_forked(*(command if command[-1] != "--" else command[:-1]), cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, list[list[dict[str, Any]]]] = {}
    for path in sorted(runs.iterdir(), key=lambda path: path.name):
        run = RunDir(path)
        found.setdefault(str(run.info()["layout"]), []).append(states(run))
    return found


def test_layouts_in_any_order_in_one_process_find_what_they_find_alone(folder: Path) -> None:
    """By a command that ends at once: only what ranks are given is looked at."""
    (folder / "ends.py").write_text("")

    def start(layout: str) -> list[dict[str, Any]]:
        typed = Request(command=["python", "ends.py"], layout=layout, runs=folder / "runs")
        quiet = QuietScreen(PeopleConsole(quiet=True), makes_steps=False)
        return states(run_here(prepare(typed), Place(), quiet).run)

    alone = {
        layout: runs_of(folder, "run", "--layout", layout, "--", "python", "ends.py")[layout][0]
        for layout in ("1x1", "1x3")
    }
    open_files = []
    for layout in ("1x3", "1x1", "1x1", "2x1", "1x3", "1x1"):
        found = start(layout)
        gc.collect()
        open_files.append(len(os.listdir("/proc/self/fd")))
        if layout in alone:  # with the signals that this test's own process ignores or not
            assert [s["environment"] for s in found] == [s["environment"] for s in alone[layout]]
            assert [s["cpus"] for s in found] == [s["cpus"] for s in alone[layout]]
            assert [s["signals"] for s in found] == [s["signals"] for s in alone[layout]]
    assert open_files[-1] == open_files[0]  # sockets of the stores of ended runs


def test_every_rank_of_a_measured_script_is_as_under_run(folder: Path) -> None:
    script = ("--", "python", "train.py")
    options = ("--layouts", "1x2", "--no-baseline", "--repeats", "1", "--steps", "20")
    measured = runs_of(folder, "bench", "scaling", *options, *script)
    (typed,) = runs_of(folder, "run", "--layout", "1x2", *script)["1x2"]
    assert len(typed) == 2 and typed[0]["threads"]
    assert [differences(repeat, typed) for repeat in measured["1x2"]] == [[]]


@pytest.mark.soak
def test_every_rank_of_a_measured_task_is_as_under_run(folder: Path) -> None:
    layout = ("--layout", "1x2", "--")
    (typed,) = runs_of(folder, "run", *TASK, "steps=3", *layout)["1x2"]
    precise = ("--precisions", "fp32", "--repeats", "2", "--steps", "3")
    measured = runs_of(folder, "bench", "precision", *TASK, *precise, *layout)["1x2"]
    assert [differences(repeat, typed) for repeat in measured] == [[], []]
    fed = ("--workers", "0", "--seconds-each", "0.1", "--repeats", "1")
    (fed_ranks,) = runs_of(folder, "bench", "data", *TASK, *fed, *layout)["1x2"]
    assert not differences(fed_ranks, typed)


def test_what_a_job_sets_beats_what_this_process_has(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "ends.py").write_text("")
    outer = {"CUDA_VISIBLE_DEVICES": "7", "OMP_NUM_THREADS": "7", "MINE": "7"}
    for name, value in outer.items():
        monkeypatch.setenv(name, value)
    job = [f"env.{name}='3'" for name in outer] + ["env.RANK='3'"]
    typed = Request(
        overrides=job, command=["python", "ends.py"], layout="1x1", runs=folder / "runs"
    )
    quiet = QuietScreen(PeopleConsole(quiet=True), makes_steps=False)
    (rank,) = states(run_here(prepare(typed), Place(), quiet).run)
    assert {name: rank["environment"][name] for name in outer} == dict.fromkeys(outer, "3")
    assert rank["environment"]["RANK"] == "0"  # but for what only the launcher knows
