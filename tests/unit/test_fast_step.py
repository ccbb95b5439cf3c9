"""Model and loss as one function: where the last block may get the batch in parts."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from allranks.tasks import Task
from allranks.train.data import MicroBatch
from allranks.train.fast_step import PARTS, losses_in_parts
from allranks.train.parallelize import buffers_unchanged

WIDTH, CLASSES, SIZE = 8, 200, 6


class Last(nn.Module):
    """A wide block; `how` changes what it is made of."""

    def __init__(self, how: str = "") -> None:
        super().__init__()
        self.how, self.calls = how, 0
        self.matrix = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Any) -> Tensor:
        self.calls += 1
        x = x[0] if self.how == "tuple" else x
        if self.how == "sees the batch":
            x = x - x.mean(0)
        y: Tensor = self.matrix(x)
        return y


class Pair(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


class Model(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), Pair() if how == "tuple" else nn.ReLU())
        self.last = Last(how)
        if how == "a weight is left out":
            self.scale = nn.Parameter(torch.ones(()))
        self.how = how

    def forward(self, x: Tensor) -> Any:
        y = self.last(self.body(x))
        return y * (1.005 if self.how == "more than its blocks" else getattr(self, "scale", 1.0))


class Wide(Task):
    def loss(self, outputs: Tensor, targets: Tensor) -> Any:
        return F.cross_entropy(outputs, targets, reduction="none"), 1.0 + targets % 2

    def blocks(self, model: nn.Module) -> Any:
        return [model.body, model.last]


class Coupled(Wide):
    couples_samples = True


class Chainless(Wide):
    def blocks(self, model: nn.Module) -> None:
        return None


def passed(task: Task, how: str) -> tuple[int, list[Tensor], list[Tensor]]:
    """How many times a pass calls the last block; its losses and gradients, and the model's own."""
    torch.manual_seed(1)
    model = Model(how)
    inputs, targets = torch.randn(SIZE, WIDTH), torch.randint(CLASSES, (SIZE,))
    micro = MicroBatch(inputs, targets, torch.ones(SIZE), torch.ones(SIZE))
    data = SimpleNamespace(example=lambda progress: micro)
    t: Any = SimpleNamespace(task=task, model=model, data=data, autocast=nullcontext())
    losses_of, found, random = losses_in_parts(t), [], torch.get_rng_state()
    calls = model.last.calls
    for function in (losses_of, lambda *pair: task.loss(model(pair[0]), pair[1])):
        torch.set_rng_state(random)
        losses, weights = function(inputs, targets)
        losses.backward(weights)
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        found.append([losses.detach(), weights, *grads])
        model.zero_grad()
    return model.last.calls - calls - 1, *found


def test_a_wide_last_block_gets_parts_of_the_batch() -> None:
    calls, parts, whole = passed(Wide(), "")
    assert calls == len(torch.arange(SIZE).chunk(PARTS)) > 1
    torch.testing.assert_close(parts, whole)


@pytest.mark.parametrize(
    ("task", "how"),
    [
        (Wide(), "more than its blocks"),
        (Wide(), "a weight is left out"),
        (Wide(), "tuple"),
        (Wide(), "sees the batch"),
        (Coupled(), ""),
        (Chainless(), ""),
    ],
)
def test_a_model_that_would_not_compute_the_same_stays_whole(task: Task, how: str) -> None:
    calls, found, own = passed(task, how)
    assert calls == 1
    torch.testing.assert_close(found, own, rtol=0, atol=0)


def test_a_pass_that_fails_leaves_buffers_as_they_were() -> None:
    norm = nn.BatchNorm1d(WIDTH)
    with pytest.raises(RuntimeError, match="later"), buffers_unchanged(norm):
        norm(torch.randn(SIZE, WIDTH))
        raise RuntimeError("later")
    assert norm.num_batches_tracked == 0 and not norm.running_mean.any()
