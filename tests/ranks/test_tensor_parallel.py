"""The language model's plan for cutting matrices: two ranks compute what one computes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.ranks import run_ranks
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from allranks.tasks.language import Language

pytestmark = pytest.mark.ranks


def loss_and_gradients(ranks: int) -> tuple[Tensor, dict[str, Tensor]]:
    task = Language()
    torch.manual_seed(0)
    model = task.model()
    tokens = torch.randint(256, (3, 33))
    if ranks > 1:
        mesh = init_device_mesh("cpu", (ranks,))
        parallelize_module(model, mesh, dict(task.tensor_parallel_plan(model)))
    loss = task.loss(model(tokens[:, :-1]), tokens[:, 1:]).mean()
    loss.backward()
    gradients = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        assert gradient is not None
        if isinstance(gradient, DTensor):
            gradient = gradient.full_tensor()
        gradients[name] = gradient
    return loss.detach(), gradients


def on_ranks() -> tuple[Tensor, dict[str, Tensor]]:
    return loss_and_gradients(dist.get_world_size())


def test_two_ranks_compute_what_one_computes(tmp_path: Path) -> None:
    loss, gradients = loss_and_gradients(1)
    for found, found_gradients in run_ranks(on_ranks, 2, tmp_path):
        torch.testing.assert_close(found, loss, rtol=1e-5, atol=1e-6)
        assert found_gradients.keys() == gradients.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(found_gradients[name], gradient, rtol=1e-4, atol=1e-6)
