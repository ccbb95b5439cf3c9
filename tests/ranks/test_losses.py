"""Gradients are those of the mean over the global batch, weighted if the task says so."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from tests.ranks import run_ranks
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from allranks.layout import Layout
from allranks.tasks import Task
from allranks.train.data import Cut, Progress, TrainingData
from allranks.train.fast_step import model_and_loss
from allranks.train.loop import Training, forward_backward
from allranks.train.mesh import Mesh
from allranks.train.parallelize import batch_norms, parallelize, plain

pytestmark = pytest.mark.ranks

NUM_SAMPLES = 23


class Plain(Task):
    """One loss per sample."""

    def loss(self, outputs: Any, targets: Any) -> Any:
        return (outputs - targets).square().mean(1)


class ByTokens(Plain):
    """Samples count by how many tokens they have; some have none."""

    def loss(self, outputs: Any, targets: Any) -> Any:
        tokens = (targets[:, 0].abs() * 10).long().clamp(0, 7)
        return super().loss(outputs, targets), tokens


TASKS: dict[str, type[Task]] = {"plain": Plain, "tokens": ByTokens}


def network(norm: bool) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 6), nn.BatchNorm1d(6)] if norm else [nn.Linear(4, 6)]
    return nn.Sequential(*layers, nn.Tanh(), nn.Linear(6, 3))


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(NUM_SAMPLES, 4, generator=generator),
        torch.randn(NUM_SAMPLES, 3, generator=generator),
    )


def epoch(task: str, batch_size: int, micro: int | None, norm: bool) -> list[list[Tensor]]:
    """Loss over all ranks, then the gradients, of every global batch of an epoch."""
    cpu = torch.device("cpu")
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    mesh = Mesh.of(Layout(1, world_size), cpu) if world_size > 1 else Mesh()
    cut = Cut(batch_size, mesh.data.rank, world_size, micro)
    inputs = dataset()[:2][0]
    model = parallelize(
        network(norm), mesh, cpu, one_pass=lambda model: model(inputs).sum().backward()
    )

    data = TrainingData(dataset(), TASKS[task](), cut, seed=0, device=cpu)
    parts = SimpleNamespace(
        task=TASKS[task](),
        losses=model_and_loss(model, TASKS[task]().loss),
        mesh=mesh,
        together=mesh.data,
        model=model,
        parameters=list(plain(model).parameters()),
        norms=batch_norms(model),
        autocast=nullcontext(),
        scaler=torch.amp.GradScaler("cpu", enabled=False),
        progress=SimpleNamespace(step=0),
        meter=SimpleNamespace(own=SimpleNamespace(keep=lambda step, losses: None)),
        data=data,
    )
    shown = []
    batches = data.batches(Progress())
    for _ in range(data.steps_per_epoch):
        loss = forward_backward(cast(Training, parts), next(batches), True)
        assert loss is not None
        mesh.world.sum(loss)
        gradients = [parameter.grad for parameter in parts.parameters]
        shown.append([loss, *(gradient.clone() for gradient in gradients)])
        for parameter in parts.parameters:
            parameter.grad = None
    return shown


def by_hand(task: str, batch_size: int, norm: bool) -> list[list[Tensor]]:
    """The same with nothing but torch."""
    model = network(norm)
    data = TrainingData(
        dataset(), Plain(), Cut(NUM_SAMPLES, 0, 1), seed=0, device=torch.device("cpu")
    )
    shown = []
    for indices in torch.split(data.order(0), batch_size):
        inputs, targets = dataset()[indices]
        losses = TASKS[task]().loss(model(inputs), targets)
        if isinstance(losses, tuple):
            loss = (losses[0] * losses[1]).sum() / losses[1].sum()
        else:
            loss = losses.mean()
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        shown.append([loss.detach(), *gradients])
    return shown


def assert_same(found: list[list[Tensor]], expected: list[list[Tensor]]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        for left, right in zip(one, other, strict=True):
            torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("micro", [None, 2])
def test_gradients_are_the_same_on_any_number_of_ranks(
    tmp_path: Path, task: str, world_size: int, micro: int | None
) -> None:
    expected = by_hand(task, 7, norm=False)
    for found in run_ranks(epoch, world_size, tmp_path, task, 7, micro, False):
        assert_same(found, expected)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_gradients_through_batchnorm_are_the_same_though_some_ranks_are_empty(
    tmp_path: Path, world_size: int
) -> None:
    # 23 samples in batches of 10: the last has 3, for 4 ranks.
    expected = by_hand("plain", 10, norm=True)
    for found in run_ranks(epoch, world_size, tmp_path, "plain", 10, None, True):
        assert_same(found, expected)
