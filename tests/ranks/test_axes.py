"""Every axis computes what one rank computes: losses, norms of gradients, evaluations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.ranks import run_ranks
from tests.training import (
    CASES,
    LAYOUTS,
    SETTINGS,
    Trained,
    Trainings,
    assert_same,
    difference,
    trained,
)
from torch import nn

from allranks.job.job import Optimizer
from allranks.layout import Layout
from allranks.train import initial, optim
from allranks.train.mesh import Ranks

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Trainings:
    return Trainings(tmp_path_factory.mktemp("axes"))


@pytest.mark.parametrize("layout", ["1x4:fsdp=2", "1x4:tp=2"])
def test_axes_do_not_change_the_losses(train: Trainings, layout: str) -> None:
    one = train("1x1")
    found = train(layout)
    assert len(one[0].norms) == len(one[0].losses)
    assert_same(found, one, rel=1e-5)
    if Layout.parse(layout).tp == 1:  # what fsdp shards, each rank of a replica has a part of
        whole = one[0].state_bytes * Layout.parse(layout).dp
        assert sum(rank.state_bytes for rank in found) == whole


@pytest.mark.soak
@pytest.mark.timeout(1800)  # eight ranks may share two busy cores
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_in_every_case(train: Trainings, layout: str, case: str) -> None:
    train.compare(CASES[case], layout)


@pytest.mark.parametrize(
    ("layout", "case"), [("1x2:tp=2", "float64"), ("1x2:fsdp=2", "float64"), ("1x2:fsdp=2", "fp16")]
)
def test_weighted_samples_in_float64_and_overflows_in_fp16(
    train: Trainings, layout: str, case: str
) -> None:
    train.compare(CASES[case], layout, steps=6)


@pytest.mark.soak
def test_bf16(train: Trainings) -> None:
    settings: dict[str, Any] = {"precision": "bf16", "steps": 24, "optimizer": {"clip": None}}
    assert_same(train("1x4:fsdp=2,tp=2", **settings), train("1x2", **settings), rel=3e-2)


@pytest.mark.parametrize(
    "layout", ["1x2:fsdp=2", pytest.param("1x4:fsdp=2", marks=pytest.mark.soak)]
)
def test_batchnorm_sees_all_samples_of_all_shards(train: Trainings, layout: str) -> None:
    settings: dict[str, Any] = {"task": "digits", "options": {"norm": "batch"}}
    one = train("1x1", batch_size=50, micro_batch_size=None, **settings)
    found = train(layout, batch_size=50, micro_batch_size=None, **settings)
    assert_same(found, one, rel=1e-4)


@pytest.mark.parametrize(
    ("layout", "checkpointing"),
    [
        ("1x2:tp=2", "full"),
        ("1x2:fsdp=2", "selective"),
        pytest.param("1x4:fsdp=2,tp=2", "full", marks=pytest.mark.soak),
        pytest.param("1x4:fsdp=2,tp=2", "selective", marks=pytest.mark.soak),
    ],
)
def test_axes_with_recomputed_activations(
    train: Trainings, layout: str, checkpointing: str
) -> None:
    found = train(layout, activation_checkpointing=checkpointing)
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
def test_large_models_start_from_the_same_weights(train: Trainings, layout: str) -> None:
    one = train("1x1", trained_from_a_recording)
    assert one[0].losses[0] != train("1x1")[0].losses[0]  # they are drawn in another order
    assert_same(train(layout, trained_from_a_recording), one, rel=1e-5)


def test_ranks_that_divide_matrices_draw_the_same_masks(train: Trainings) -> None:
    one, other = train("1x2:tp=2", options={**SETTINGS["options"], "dropout": 0.3})
    assert one.shared == other.shared  # what both hold would drift apart
    assert one.shared
    assert difference(one.losses, train("1x1")[0].losses) > 1e-3


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
