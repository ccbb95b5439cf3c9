"""Every axis computes what one rank computes: losses, norms of gradients, evaluations."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.ranks import run_ranks
from tests.training import Trained, trained
from torch import nn

from allranks.job.job import Optimizer
from allranks.layout import Layout
from allranks.train import initial, optim
from allranks.train.mesh import Ranks

pytestmark = pytest.mark.ranks

SETTINGS: dict[str, Any] = {
    "task": "language",
    "options": {"context": 16, "tokens": "tokens.bin"},
    "batch_size": 12,
    "micro_batch_size": 2,  # so that gradients are accumulated
    "steps": 12,
    "optimizer": {"clip": 0.5},  # which most gradients exceed
}

# In float64, with a loss that weights its samples.
WEIGHTED = """
from dataclasses import dataclass
from torch import nn
from allranks.tasks.language import Language

@dataclass
class Weighted(Language):
    def model(self):
        return super().model().double()

    def loss(self, outputs, targets):
        losses = nn.functional.cross_entropy(outputs.mT, targets, reduction="none").mean(1)
        return losses, (targets % 3).sum(1)
"""

Train = Callable[..., list[Trained]]


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Train:
    """`train(layout, **settings)`: what each rank saw; every run is made once."""
    made: dict[str, list[Trained]] = {}

    def train(layout: str, how: Callable[..., Trained] = trained, **settings: Any) -> list[Trained]:
        key = json.dumps([layout, how.__name__, settings])
        if key not in made:
            folder = tmp_path_factory.mktemp("axes")
            # 101 windows to train on: an epoch's last batch has 5. And 5 to validate on.
            ids = np.random.default_rng(0).integers(0, 64, 106 * 17) ** 2 % 256
            ids.astype("<u2").tofile(folder / "tokens.bin")
            (folder / "weighted.py").write_text(WEIGHTED)
            args = (layout, folder, {**SETTINGS, **settings})
            ranks = Layout.parse(layout).ranks
            made[key] = run_ranks(how, ranks, folder, *args, timeout=240)
        return made[key]

    return train


def assert_same(found: list[Trained], expected: list[Trained], rel: float) -> None:
    one = expected[0]
    assert found[0].losses == pytest.approx(one.losses, rel=rel)
    for rank in found:
        assert rank.norms == pytest.approx(one.norms, rel=rel)
        assert rank.metrics == pytest.approx(one.metrics, rel=rel)
        assert rank.scale == one.scale
    assert sum(rank.samples for rank in found) == sum(rank.samples for rank in expected)


LAYOUTS = [
    *("1x2", "1x2:fsdp=2", "1x2:tp=2", "1x4:fsdp=2", "1x4:tp=2", "1x4:fsdp=2,tp=2"),
    *("1x4:fsdp=4", "1x4:tp=4", "1x8:fsdp=2,tp=2"),
]
SAMPLE = ("1x4:fsdp=2,tp=2", "1x4:fsdp=2", "1x4:tp=2")


@pytest.mark.parametrize("layout", SAMPLE)
def test_axes_do_not_change_the_losses(train: Train, layout: str) -> None:
    one = train("1x1")
    found = train(layout)
    assert len(one[0].norms) == len(one[0].losses)
    assert_same(found, one, rel=1e-5)
    if Layout.parse(layout).tp == 1:  # what fsdp shards, each rank of a replica has a part of
        whole = one[0].state_bytes * Layout.parse(layout).dp
        assert sum(rank.state_bytes for rank in found) == whole


@pytest.mark.soak
@pytest.mark.parametrize("layout", LAYOUTS)
def test_axes_do_not_change_the_losses_of_100_steps(train: Train, layout: str) -> None:
    one = train("1x1", steps=100)
    assert_same(train(layout, steps=100), one, rel=1e-5)


@pytest.mark.parametrize(
    "layout",
    [
        "1x2:tp=2",
        "1x2:fsdp=2",
        *(pytest.param(layout, marks=pytest.mark.soak) for layout in SAMPLE),
    ],
)
def test_weighted_samples_in_float64(train: Train, layout: str) -> None:
    one = train("1x1", task="weighted:Weighted")
    assert_same(train(layout, task="weighted:Weighted"), one, rel=1e-10)


@pytest.mark.parametrize(
    ("layout", "precision", "rel"),
    [
        ("1x2:fsdp=2", "fp16", 5e-3),
        pytest.param("1x4:fsdp=2,tp=2", "fp16", 5e-3, marks=pytest.mark.soak),
        pytest.param("1x4:fsdp=2,tp=2", "bf16", 3e-2, marks=pytest.mark.soak),
    ],
)
def test_half_precision(train: Train, layout: str, precision: str, rel: float) -> None:
    settings = {"precision": precision, "steps": 24, "optimizer": {"clip": None}}
    # As many data ranks: with more, each weights its samples more, and fp16 overflows earlier.
    expected = train(f"1x{Layout.parse(layout).data_ranks}", **settings)
    assert precision != "fp16" or (expected[0].scale or 0) in (2.0**n for n in range(30))
    assert_same(train(layout, **settings), expected, rel=rel)


@pytest.mark.parametrize(
    "layout", ["1x2:fsdp=2", pytest.param("1x4:fsdp=2", marks=pytest.mark.soak)]
)
def test_batchnorm_sees_all_samples_of_all_shards(train: Train, layout: str) -> None:
    settings = {"task": "digits", "options": {"norm": "batch"}}
    one = train("1x1", batch_size=50, micro_batch_size=None, **settings)
    found = train(layout, batch_size=50, micro_batch_size=None, **settings)
    assert_same(found, one, rel=1e-4)


@pytest.mark.parametrize(
    "checkpointing", ["full", pytest.param("selective", marks=pytest.mark.soak)]
)
def test_axes_with_recomputed_activations(train: Train, checkpointing: str) -> None:
    found = train("1x4:fsdp=2,tp=2", activation_checkpointing=checkpointing)
    assert_same(found, train("1x1"), rel=1e-5)


def trained_from_a_recording(layout: str, folder: Path, settings: dict[str, Any]) -> Trained:
    """As if the model were too large to be built whole."""
    initial.LARGE_BYTES = 1000
    return trained(layout, folder, settings)


@pytest.mark.parametrize(
    "layout",
    [
        "1x4:fsdp=2,tp=2",
        *(pytest.param(one, marks=pytest.mark.soak) for one in ("1x2", "1x2:pp=2", "1x2:fsdp=2")),
    ],
)
def test_large_models_start_from_the_same_weights(train: Train, layout: str) -> None:
    one = train("1x1", trained_from_a_recording)
    assert one[0].losses[0] != train("1x1")[0].losses[0]  # they are drawn in another order
    assert_same(train(layout, trained_from_a_recording), one, rel=1e-5)


def test_ranks_that_divide_matrices_draw_the_same_masks(train: Train) -> None:
    one, other = train("1x2:tp=2", options={**SETTINGS["options"], "dropout": 0.3})
    assert one.shared == other.shared  # what both hold would drift apart
    assert one.shared
    assert one.losses != train("1x2:tp=2")[0].losses


def skips_a_step() -> tuple[float, float]:
    """A weight and the scale after a step in which the last rank alone overflows."""
    ranks = Ranks(dist.get_world_size(), dist.get_rank(), dist.group.WORLD)
    parameter = nn.Parameter(torch.ones(1))
    optimizer = optim.build_optimizer(Optimizer(lr=0.5), [parameter])
    scaler = optim.Scaler(torch.device("cpu"), ranks)
    scaler.scale(parameter.sum()).backward()
    assert parameter.grad is not None
    parameter.grad *= float("inf") if ranks.rank == ranks.size - 1 else 1.0
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    return parameter.item(), scaler.get_scale()


def test_all_shards_skip_a_step_that_overflows_in_one(tmp_path: Path) -> None:
    assert run_ranks(skips_a_step, 2, tmp_path) == [(1.0, 2.0**15)] * 2
