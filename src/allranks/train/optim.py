"""Optimizers, learning-rate schedules and gradient clipping."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from allranks.job.job import Job, Optimizer


def build_optimizer(
    settings: Optimizer, parameters: Iterable[nn.Parameter]
) -> torch.optim.Optimizer:
    """The optimizer as one fused kernel, which is the fastest on CPUs and GPUs alike."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    common: dict[str, Any] = {
        "lr": settings.lr,
        "weight_decay": settings.weight_decay,
        "fused": True,
    }
    if settings.name == "sgd":
        return torch.optim.SGD(trained, momentum=settings.momentum, **common)
    return torch.optim.AdamW(trained, betas=settings.betas, **common)


def allocate_state(optimizer: torch.optim.Optimizer) -> None:
    """Allocate the optimizer's state by a step with learning rate 0 on zero gradients.

    So the memory is taken when training starts, not in the middle of it.
    """
    if optimizer.state:
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    rates = [group["lr"] for group in optimizer.param_groups]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    for parameter in parameters:
        parameter.grad = None
        if "step" in optimizer.state[parameter]:
            optimizer.state[parameter]["step"].zero_()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


class Schedule:
    """The learning rate of every step, as a function of the step alone."""

    def __init__(self, settings: Optimizer, *, num_steps: int, scale: float = 1.0) -> None:
        self.peak = settings.lr * scale
        self.num_steps = num_steps
        self.warmup_steps = round(settings.warmup * num_steps)
        self.shape = settings.schedule

    def rate(self, step: int) -> float:
        """The rate of a step; steps count from 1."""
        if step <= self.warmup_steps:
            return self.peak * step / self.warmup_steps
        if self.shape == "constant":
            return self.peak
        done = (step - self.warmup_steps - 1) / max(1, self.num_steps - self.warmup_steps)
        left = 1 - min(done, 1.0)
        return self.peak * (
            left if self.shape == "linear" else 0.5 - 0.5 * math.cos(math.pi * left)
        )

    def set(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        rate = self.rate(step)
        for group in optimizer.param_groups:
            group["lr"] = rate


def rate_scale(job: Job, num_ranks: int) -> float:
    """The factor by which `lr_scaling` changes the rate when the batch grows with the ranks."""
    return {"none": 1.0, "linear": float(num_ranks), "sqrt": math.sqrt(num_ranks)}[job.lr_scaling]


def clip_gradients(gradients: list[Tensor], max_norm: float) -> Tensor:
    """Scale all gradients so that their global norm is at most `max_norm`; return the old norm.

    torch.nn.utils.clip_grad_norm_ does the same, but spends tens of microseconds on grouping.
    """
    norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
    torch._foreach_mul_(gradients, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
    return norm
