"""What explain says of a layout is what its ranks then hold and send."""

from __future__ import annotations

import json
import re
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.commandline import call_allranks
from tests.fork_server import fork_server
from tests.held import assert_held, measured
from tests.ranks import run_ranks
from tests.training import LAYOUTS
from torch import nn

from allranks.job.job import parse_job
from allranks.layout import Layout
from allranks.train.counted import SavedTensors
from allranks.train.dry_step import AsOnGpu
from allranks.train.explain import explain

pytestmark = pytest.mark.ranks

TINY = {
    "task": "language",  # whose embeddings are tied
    "options": {"context": 16},
    "batch_size": 24,
    "steps": 5,
    "precision": "fp32",
    "data": {"num_workers": 0},
}
WIDER = {"options": {"context": 32}, "batch_size": 64}
# What ordinary models do that tensors without data do not like.
ORDINARY = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from allranks.tasks import Task

class Ordinary(Task):
    def model(self):
        self.weights = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)  # which is copied
        return nn.Sequential(nn.TransformerEncoder(layer, 2), nn.Flatten(), nn.BatchNorm1d(32),
                             nn.Linear(32, 3)).double()

    def datasets(self):
        inputs = torch.zeros(64, 4, 8, dtype=torch.float64)
        return {"train": TensorDataset(inputs, torch.zeros(64, dtype=torch.long))}

    def loss(self, outputs, targets):
        return nn.functional.cross_entropy(outputs, targets, torch.ones(3).double() * self.weights,
                                           reduction="none")
"""


@pytest.mark.parametrize(
    ("layout", "settings"),
    [
        ("1x2", {"task": "digits", "options": {"norm": "batch"}, "batch_size": 16}),
        ("1x2", {"options": {"size": "16m", "context": 8}, "micro_batch_size": 4}),
        ("1x6:fsdp=3", {"micro_batch_size": 2, "activation_checkpointing": "full"}),  # hybrid
        ("1x4:fsdp=2,tp=2", {}),
        ("1x4:tp=2,pp=2", {}),
        ("1x4:pp=4", {"pipeline": {"schedule": "gpipe", "micro_batches": 3}}),
        ("1x4:pp=2,fsdp=2", {"pipeline": {"micro_batches": 4}}),
        ("1x2:pp=2", {**WIDER, "pipeline": {"schedule": "interleaved"}}),
        *(pytest.param(layout, {}, marks=pytest.mark.soak) for layout in LAYOUTS),
    ],
)
def test_ranks_hold_and_send_what_was_explained(
    tmp_path: Path, layout: str, settings: dict[str, Any]
) -> None:
    settings = {**TINY, **settings}
    if settings["task"] == "language":  # the order of few samples takes little memory
        tokens = tmp_path / "tokens.bin"
        tokens.write_bytes(bytes(8000))
        settings["options"] = {**settings["options"], "tokens": str(tokens)}
    # As `models.explain` asks for it, but of a process that need not import torch.
    with ProcessPoolExecutor(1, mp_context=fork_server()) as process:
        told = process.submit(explain, parse_job({**settings, "layout": layout})).result()
    ranks = run_ranks(measured, Layout.parse(layout).ranks, tmp_path, layout, tmp_path, settings)
    for rank, real in enumerate(ranks):
        (kind,) = [kind for kind in told["ranks"] if rank in kind["ranks"]]
        assert_held(kind["bytes"], real["bytes"])
        if settings["task"] == "language":  # the others have their data there, too
            assert kind["peak"] == pytest.approx(real["peak"], rel=0.15)  # a tensor or two
        divided = Layout.parse(layout)
        stays = divided.pp > 1 and divided.ranks > divided.pp
        whole = 2 * divided.fsdp * real["bytes"]["parameters"] if stays else 0
        assert kind["bytes"]["gathered"] == whole
        stage = kind["coordinates"]["pp"][0]
        sent: Counter[str] = Counter()
        for one in told["collectives"]:
            if stage in one["stages"]:
                sent[one["kind"]] += one["count"]
        assert sent == real["sent"]
    everyone = sorted(rank for kind in told["ranks"] for rank in kind["ranks"])
    assert everyone == [*range(len(ranks))]


def test_saved_tensors_count_once_and_without_parameters() -> None:
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.ReLU(), nn.Linear(8, 8, bias=False))
    saved = SavedTensors(model)
    x = torch.ones(2, 8)
    with saved.counted():
        y = model(x)
    assert saved.most == 2 * 64  # the input, and what the ReLU returns: once for two operations
    y.sum().backward()
    with saved.counted():
        model(x)
    assert saved.most == 2 * 64  # what the first pass needed is gone


def test_autocast_keeps_what_it_does_on_a_gpu() -> None:
    norm, x = nn.LayerNorm(8), torch.ones(2, 8, dtype=torch.bfloat16, requires_grad=True)
    for precision in (torch.bfloat16, torch.float16):
        with AsOnGpu(), torch.autocast("cpu", precision):
            y = norm(x)
            assert y.dtype == y.grad_fn._saved_input.dtype == torch.float32
    with AsOnGpu():
        assert x.sum().dtype == torch.bfloat16


@pytest.mark.parametrize("layout", ["1x1", "1x2:pp=2"])
def test_an_ordinary_model_is_explained(tmp_path: Path, layout: str) -> None:
    (tmp_path / "ordinary.py").write_text(ORDINARY)
    job = ["task=ordinary:Ordinary", "batch_size=8", "epochs=1", "--layout", layout, "--json"]
    done = call_allranks("explain", *job, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    held = sum(kind["bytes"]["parameters"] for kind in told["ranks"])
    assert held == 8 * told["parameters"]


def test_a_step_that_recomputes_in_bf16_is_explained(tmp_path: Path) -> None:
    job = ["task=language", "precision=bf16", "activation_checkpointing=full"]
    done = call_allranks("explain", *job, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_large_model_on_64_ranks_is_explained_without_memory_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    words = ["explain", "task=language", "options.size=1.5b", "batch_size=64"]
    done = call_allranks(*words, "--layout", "8x8:fsdp=64", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "nodes 2-6 likewise: ranks 16-55" in done.stdout
    assert re.search(r"^each rank +92.8 MiB +92.8 MiB +186 MiB", done.stdout, re.MULTILINE)
    assert [*tmp_path.iterdir()] == []


def test_axes_that_the_model_cannot_have_are_refused_before_anything_is_written(
    tmp_path: Path,
) -> None:
    words = ["run", "task=language", "--layout", "1x3:tp=3", "--oversubscribe"]
    done = call_allranks(*words, cwd=tmp_path)
    assert done.returncode == 2
    assert "tp=3 does not divide the model's 4 heads" in done.stderr
    assert [*tmp_path.iterdir()] == []
