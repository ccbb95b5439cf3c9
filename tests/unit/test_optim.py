"""The learning rate of every step, and clipping on the global norm."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from allranks.job.job import Optimizer, parse_job
from allranks.train.mesh import Ranks
from allranks.train.optim import (
    Schedule,
    allocate_state,
    build_optimizer,
    clip_gradients,
    local,
    rate_scale,
)

Shape = Literal["cosine", "linear", "constant"]
SHAPES = st.sampled_from(["cosine", "linear", "constant"])


def schedule(num_steps: int, scale: float = 1.0, **settings: Any) -> Schedule:
    return Schedule(Optimizer(**settings), num_steps=num_steps, scale=scale)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", ["adamw", "sgd"])
@pytest.mark.parametrize("kind", ["plain", "cut", "complex"])
def test_every_optimizer_updates_every_kind_of_weight(
    name: Literal["adamw", "sgd"], kind: str
) -> None:
    start = torch.ones(3, dtype=torch.complex64 if kind == "complex" else torch.float32)
    if kind == "cut":  # by fsdp or tp
        start = distribute_tensor(start, init_device_mesh("cpu", (1,)), [Shard(0)])
    weight = nn.Parameter(start)
    optimizer = build_optimizer(Optimizer(name=name, lr=0.1, weight_decay=0.0), [weight])
    allocate_state(optimizer)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    torch.testing.assert_close(local(weight.detach()), torch.full_like(local(start), 0.9))


# --- Schedule -----------------------------------------------------------------------------------


@given(
    num_steps=st.integers(1, 300),
    warmup=st.floats(0, 1),
    shape=SHAPES,
    lr=st.floats(1e-6, 10),
)
def test_the_rate_rises_to_the_peak_then_never_rises_and_is_never_zero(
    num_steps: int, warmup: float, shape: Shape, lr: float
) -> None:
    rates = [
        schedule(num_steps, lr=lr, warmup=warmup, schedule=shape).rate(step)
        for step in range(1, num_steps + 1)
    ]
    warm = round(warmup * num_steps)
    rising, falling = rates[:warm], rates[max(warm - 1, 0) :]
    assert rising == pytest.approx(sorted(rising))
    assert falling == pytest.approx(sorted(falling, reverse=True))
    assert all(0 < rate <= lr * (1 + 1e-12) for rate in rates)
    assert max(rates) == pytest.approx(lr)


@given(num_steps=st.integers(1, 300), step=st.integers(1, 300), shape=SHAPES)
def test_the_rate_is_a_function_of_the_step_alone(num_steps: int, step: int, shape: Shape) -> None:
    one = schedule(num_steps, schedule=shape)
    for other in range(1, 10):
        one.rate(other)
    assert one.rate(step) == schedule(num_steps, schedule=shape).rate(step)
    assert one.rate(step) >= 0


def test_known_points() -> None:
    linear = schedule(10, lr=1.0, warmup=0.2, schedule="linear")
    assert [linear.rate(step) for step in (1, 2, 3, 7, 10)] == pytest.approx(
        [0.5, 1, 1, 0.5, 1 / 8]
    )
    cosine = schedule(10, lr=1.0, warmup=0.0, schedule="cosine")
    assert [cosine.rate(step) for step in (1, 6)] == pytest.approx([1.0, 0.5])
    assert schedule(10, lr=1.0, warmup=0.0, schedule="constant").rate(10) == 1.0
    assert schedule(10, lr=1.0, warmup=1.0).rate(10) == 1.0
    assert schedule(10, lr=1.0, warmup=0.0, scale=4.0).rate(1) == 4.0


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_the_optimizer_uses_the_rate_that_was_set(name: Literal["adamw", "sgd"]) -> None:
    parameter = nn.Parameter(torch.ones(3))
    settings = Optimizer(name=name, lr=0.1, weight_decay=0.0, warmup=0.0)
    optimizer = build_optimizer(settings, [parameter])
    Schedule(settings, num_steps=2).set(optimizer, 2)
    parameter.grad = torch.ones(3)
    optimizer.step()
    assert torch.allclose(parameter.detach(), torch.full((3,), 1 - 0.05), atol=1e-6)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_the_optimizer_is_torchs_own(name: Literal["adamw", "sgd"]) -> None:
    torch.manual_seed(0)
    ours, theirs = (nn.Parameter(torch.ones(5)) for _ in range(2))
    settings = Optimizer(name=name, lr=0.01, weight_decay=0.1, momentum=0.8, betas=(0.8, 0.95))
    optimizer = build_optimizer(settings, [ours, nn.Parameter(torch.ones(1), requires_grad=False)])
    reference: torch.optim.Optimizer
    if name == "sgd":
        reference = torch.optim.SGD([theirs], lr=0.01, weight_decay=0.1, momentum=0.8)
    else:
        reference = torch.optim.AdamW([theirs], lr=0.01, weight_decay=0.1, betas=(0.8, 0.95))
    for _ in range(5):
        ours.grad = torch.randn(5)
        theirs.grad = ours.grad.clone()
        optimizer.step()
        reference.step()
    assert torch.allclose(ours, theirs, atol=1e-7)
    assert sum(len(group["params"]) for group in optimizer.param_groups) == 1


@pytest.mark.parametrize(("scaling", "scale"), [("none", 1.0), ("linear", 9.0), ("sqrt", 3.0)])
def test_the_rate_can_follow_the_ranks(scaling: str, scale: float) -> None:
    job = parse_job({"task": "spiral", "batch_size_per_rank": 32, "lr_scaling": scaling})
    assert rate_scale(job, Ranks(9)) == scale
    assert rate_scale(job, Ranks()) == 1.0


# --- Clipping -----------------------------------------------------------------------------------


@given(
    seed=st.integers(0, 2**31),
    shapes=st.lists(st.lists(st.integers(1, 5), max_size=3), min_size=1, max_size=4),
    scale=st.sampled_from([0.0, 1e-4, 1.0, 1e4]),
    max_norm=st.sampled_from([1e-3, 1.0, 10.0]),
)
def test_clipping_is_torchs(
    seed: int, shapes: list[list[int]], scale: float, max_norm: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    gradients = [scale * torch.randn(shape, generator=generator) for shape in shapes]
    ours, theirs = ([nn.Parameter(torch.zeros_like(g)) for g in gradients] for _ in range(2))
    for parameter, gradient in zip([*ours, *theirs], [*gradients, *gradients], strict=True):
        parameter.grad = gradient.clone()
    expected = nn.utils.clip_grad_norm_(theirs, max_norm)
    torch.testing.assert_close(clip_gradients(ours, max_norm, Ranks(), []), expected)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.grad, other.grad)
