"""An exported file is what the safetensors format says, and has the names of the state dict."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.commandline import call_allranks
from torch import nn

from allranks.errors import AllranksError
from allranks.run.events import EventLog
from allranks.run.folder import RunDir
from allranks.train.checkpoint import Checkpointer
from allranks.train.data import Progress
from allranks.train.export import export

TYPES = {
    "C64": torch.complex64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "BOOL": torch.bool,
}


class Mixed(nn.Module):
    """Tied weights, types of several widths, a scalar and an empty tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(4)
        self.narrow = nn.Parameter(torch.randn(3).bfloat16())
        self.waves = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("nothing", torch.zeros(0, 3))


def run_of(tmp_path: Path, steps: tuple[int, ...] = (3, 5)) -> tuple[RunDir, Mixed]:
    """A run whose checkpoints were written by one rank."""
    run = RunDir(tmp_path / "runs" / "mixed-20261115-142301-3f9a")
    run.path.mkdir(parents=True)
    run.write_info({"run": run.name})
    run.job_file.write_text("task: spiral\n")
    torch.manual_seed(0)
    model = Mixed()
    optimizer = torch.optim.SGD(model.parameters())
    group = dist.group.WORLD
    assert group is not None
    log = EventLog(tmp_path / "rank-0.jsonl")
    saver = Checkpointer(run.checkpoints, model, optimizer, keep=3, group=group, log=log)
    for step in steps:
        with torch.no_grad():
            model.norm.weight.fill_(step)
        saver.save(Progress(step=step), {"metrics": []})
        saver.finish()
    saver._thread.shutdown()
    log.close()
    return run, model


def read(path: Path) -> dict[str, torch.Tensor]:
    """A safetensors file, read as its format is described."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    assert header.pop("__metadata__") == {"format": "pt"}
    tensors, end = {}, 0
    for name, entry in header.items():
        begin, end = entry["data_offsets"][0], entry["data_offsets"][1]
        data = bytearray(content[8 + length + begin : 8 + length + end])
        dtype = TYPES[entry["dtype"]]
        assert (8 + length + begin) % dtype.itemsize == 0
        flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
        tensors[name] = flat.view(entry["shape"])
    assert 8 + length + end == len(content)  # no holes, and nothing left
    return tensors


@pytest.mark.usefixtures("alone")
def test_the_file_loads_into_the_model(tmp_path: Path) -> None:
    run, model = run_of(tmp_path)
    written = export(run, tmp_path / "model.safetensors")
    tensors = read(tmp_path / "model.safetensors")
    assert (written["step"], written["tensors"]) == (5, len(tensors))
    expected = model.state_dict()
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)
    assert all(tensors[name].dtype == expected[name].dtype for name in expected)
    Mixed().load_state_dict(tensors)  # strict
    assert sorted(path.name for path in tmp_path.glob("*model*")) == ["model.safetensors"]


@pytest.mark.usefixtures("alone")
def test_another_step_a_damaged_one_and_what_is_refused(tmp_path: Path) -> None:
    run, _ = run_of(tmp_path)
    target = tmp_path / "model.safetensors"

    def refused(path: Path = target, step: int | None = None) -> str:
        with pytest.raises(AllranksError) as refusal:
            export(run, path, step)
        return f"{refusal.value.what}: {refusal.value.fix}"

    assert "has no checkpoint of step 4: choose one of: 5, 3" in refused(step=4)
    file = run.checkpoints / "step-5" / "__0_0.distcp"
    file.write_bytes(b"?" + file.read_bytes()[1:])
    assert "step-5 of run mixed-20261115-142301-3f9a is damaged" in refused(step=5)
    assert not target.exists()
    written = export(run, target)
    assert (written["step"], len(written["remarks"])) == (3, 1)
    assert read(target)["norm.weight"].tolist() == [3.0] * 4
    assert "exists already" in refused()
    assert f"{tmp_path}/no is not a folder: mkdir -p" in refused(tmp_path / "no" / "a.safetensors")
    run.job_file.write_text("command: python train.py\nlast: out/last.ckpt\n")
    other = tmp_path / "other.safetensors"
    assert "trained a script, which writes its own files" in refused(other)
    assert refused(other).endswith("the script has written, out/last.ckpt")


@pytest.mark.usefixtures("alone")
def test_a_run_without_a_checkpoint_has_nothing_to_export(tmp_path: Path) -> None:
    run, _ = run_of(tmp_path, steps=())
    with pytest.raises(AllranksError, match="has no checkpoint\n  fix: allranks resume"):
        export(run, tmp_path / "model.safetensors")


def test_the_command_says_what_is_wrong_in_json(tmp_path: Path) -> None:
    done = call_allranks(
        "export", "last", "--to", "safetensors", "model.safetensors", "--json", cwd=tmp_path
    )
    assert done.returncode == 2
    error: dict[str, Any] = json.loads(done.stdout)["error"]
    assert error["what"] == "no run in runs"
