"""A GPU that runs out of memory, by hand: `pytest -m gpu`. One GPU is enough: ranks share it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.faults import losses, start

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1200)]

# Each rank may use so much of the GPU. In a training pass of its first attempt, something else
# takes what is left.
TIGHT = """
import os
from dataclasses import dataclass
import torch
from allranks.tasks.language import Language

@dataclass
class Tight(Language):
    most: int = 0  # bytes
    full_at: int = 0

    def model(self):
        self.passes = 0
        if self.most:
            total = torch.cuda.mem_get_info()[1]
            torch.cuda.set_per_process_memory_fraction(min(1.0, self.most / total))
        model = super().model()
        model.register_forward_pre_hook(self.fill)
        return model

    def fill(self, model, inputs):
        self.passes += model.training
        is_due = self.passes == self.full_at and os.environ["ALLRANKS_ATTEMPT"] == "0"
        if is_due and os.environ["RANK"] == os.environ["FULL_RANK"]:
            self.ballast = []
            try:
                while True:
                    self.ballast.append(torch.empty(1 << 20, dtype=torch.uint8, device="cuda"))
            except torch.OutOfMemoryError:
                del self.ballast[-2:]
"""

JOB = [
    *("task=tight:Tight", "options.size=16m", "batch_size=64", "steps=12", "log_every=1"),
    *("precision=fp32", "compile=false", "checkpoint.every=3"),
]


def trained(cwd: Path, *arguments: str, full_rank: int = 0) -> dict[str, Any]:
    """The result of a run that finished."""
    cwd.mkdir(exist_ok=True)
    (cwd / "tight.py").write_text(TIGHT)
    env = {"FULL_RANK": str(full_rank), "XDG_CACHE_HOME": str(cwd.parent / "cache")}
    code, result = start(cwd, *JOB, *arguments, env=env).wait(900)
    assert code == 0, (cwd / "stderr.txt").read_text()[-3000:]
    assert result["state"] == "finished"
    return result


def last_end(result: dict[str, Any]) -> dict[str, Any]:
    path = Path(result["run_dir"]) / f"attempts/{result['attempt']}/rank-0.jsonl"
    return next(e for e in map(json.loads, path.read_text().splitlines()) if e["event"] == "end")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One rank, with all the memory that it asks for."""
    return trained(tmp_path_factory.mktemp("whole") / "run")


def assert_same_losses(result: dict[str, Any], whole: dict[str, Any]) -> None:
    expected = losses(Path(whole["run_dir"]))
    assert losses(Path(result["run_dir"])) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("layout", ["1x1", "1x2", "1x2:fsdp=2"])
def test_auto_finds_what_fits_and_remembers_it(
    tmp_path: Path, whole: dict[str, Any], layout: str
) -> None:
    most = int((0.5 if layout == "1x1" else 0.35) * last_end(whole)["memory_peak"])
    job = ["micro_batch_size=auto", f"options.most={most}", "--layout", layout, "--oversubscribe"]
    first = trained(tmp_path / "first", *job)
    assert_same_losses(first, whole)
    share = 64 if layout == "1x1" else 32
    assert 1 < first["micro_batches"]["size"] < share
    assert 0.5 * most < last_end(first)["memory_peak"] <= most
    again = trained(tmp_path / "again", *job)
    assert again["attempt"] == 0
    assert again["micro_batches"]["why"] == "remembered"
    assert again["micro_batches"]["size"] == first["micro_batches"]["size"]


@pytest.mark.parametrize("layout", ["1x1", "1x2", "1x2:fsdp=2"])
def test_a_run_that_runs_out_goes_on_with_half(
    tmp_path: Path, whole: dict[str, Any], layout: str
) -> None:
    most = int(1.5 * last_end(whole)["memory_peak"])
    last_rank = 0 if layout == "1x1" else 1
    job = [f"options.most={most}", "options.full_at=8", "--layout", layout, "--oversubscribe"]
    result = trained(tmp_path / "run", *job, full_rank=last_rank)
    assert result["attempt"] == 1
    assert result["micro_batches"]["size"] == (32 if layout == "1x1" else 16)
    assert "going on with" in (tmp_path / "run/stderr.txt").read_text()
    assert_same_losses(result, whole)


@pytest.mark.parametrize("layout", ["1x1", "1x2", "1x2:fsdp=2"])
def test_an_offloaded_optimizer_takes_no_room_on_the_gpu(
    tmp_path: Path, whole: dict[str, Any], layout: str
) -> None:
    # Of one sample: its activations do not hide the optimizer's state.
    job = ["batch_size=2", "micro_batch_size=1", "--layout", layout, "--oversubscribe"]
    on_device = trained(tmp_path / "device", *job)
    on_host = trained(tmp_path / "host", *job, "optimizer.offload=true")
    assert_same_losses(on_host, on_device)
    run = Path(whole["run_dir"])
    events = map(json.loads, (run / "attempts/0/rank-0.jsonl").read_text().splitlines())
    parameters = next(e for e in events if e["event"] == "start")["parameters"]
    shards = 2 if "fsdp" in layout else 1
    saved = last_end(on_device)["memory_peak"] - last_end(on_host)["memory_peak"]
    assert saved > 0.7 * 8 * parameters / shards
