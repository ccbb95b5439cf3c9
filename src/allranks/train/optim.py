"""Optimizers, learning-rate schedules and gradient clipping."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from allranks.job.job import Job, Optimizer
from allranks.layout import Layout
from allranks.train.mesh import Ranks


def build_optimizer(
    settings: Optimizer, parameters: Iterable[nn.Parameter], *, in_graph: bool = False
) -> torch.optim.Optimizer:
    """The optimizer as one fused kernel where there is one: the fastest on CPUs and GPUs alike.

    `in_graph`: its step may become part of a CUDA graph, so its rate is a number on the GPU.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    # torch has none for complex numbers, and none of SGD for parts of tensors.
    is_cut = any(isinstance(parameter, DTensor) for parameter in trained)
    has_kernel = not any(p.is_complex() for p in trained) and not (
        settings.name == "sgd" and is_cut
    )
    if settings.offload:
        return HostOptimizer(settings, trained, fused=has_kernel)
    return make_optimizer(settings, trained, fused=has_kernel, in_graph=in_graph)


def make_optimizer(
    settings: Optimizer, parameters: Sequence[nn.Parameter], *, fused: bool, in_graph: bool = False
) -> torch.optim.Optimizer:
    """torch's own, on tensors as they are."""
    common: dict[str, Any] = {
        "lr": torch.tensor(settings.lr, device=parameters[0].device) if in_graph else settings.lr,
        "weight_decay": settings.weight_decay,
        "fused": fused,
    }
    if settings.name == "sgd":
        return torch.optim.SGD(parameters, momentum=settings.momentum, **common)
    return torch.optim.AdamW(parameters, betas=settings.betas, capturable=in_graph, **common)


class HostOptimizer(torch.optim.Optimizer):
    """Keeps its state in host memory, and updates there: gradients go there, weights come back.

    Its parameters are those on the device. What it updates are copies of this rank's parts of them.
    """

    def __init__(
        self, settings: Optimizer, parameters: Sequence[nn.Parameter], *, fused: bool
    ) -> None:
        self._weights = [nn.Parameter(on_host(parameter)) for parameter in parameters]
        self._gradients = [on_host(parameter) for parameter in parameters]
        self._on_host = make_optimizer(settings, self._weights, fused=fused)
        super().__init__(parameters, {"lr": settings.lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # no closure is given
        (group,) = self.param_groups
        on_device = [local(parameter) for parameter in group["params"]]
        # The weights too: checkpoints and averages over ranks change those on the device.
        for parameter, weight, gradient in zip(
            group["params"], self._weights, self._gradients, strict=True
        ):
            weight.copy_(local(parameter), non_blocking=True)
            weight.grad = None
            if parameter.grad is not None:
                weight.grad = gradient.copy_(local(parameter.grad), non_blocking=True)
        if on_device[0].is_cuda:
            torch.cuda.current_stream(on_device[0].device).synchronize()
        set_rate(self._on_host, group["lr"])
        # Without the hooks of a step: whoever counts steps has seen that this one began.
        type(self._on_host).step.__wrapped__(self._on_host)  # type: ignore[attr-defined]
        for weight, part in zip(self._weights, on_device, strict=True):
            part.copy_(weight, non_blocking=True)
        if not self.state:
            self._show_state()

    def _show_state(self) -> None:
        """Name the state by the parameters on the device, as parts of what those are parts of."""
        for parameter, weight in zip(self.param_groups[0]["params"], self._weights, strict=True):
            for key, value in self._on_host.state.get(weight, {}).items():
                if isinstance(parameter, DTensor) and value.shape == weight.shape:
                    value = DTensor(value, parameter._spec, requires_grad=False)
                self.state[parameter][key] = value


def on_host(tensor: Tensor) -> Tensor:
    """Host memory for this rank's part of a tensor, which a GPU can copy from and to by itself."""
    part = local(tensor)
    return torch.zeros_like(part, device="cpu", pin_memory=part.is_cuda, requires_grad=False)


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
        set_rate(optimizer, self.rate(step))


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate: in place if it is a tensor, which a graph reads."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def rate_scale(job: Job, data: Ranks) -> float:
    """The factor by which `lr_scaling` changes the rate when the batch grows with the ranks."""
    return {"none": 1.0, "linear": float(data.size), "sqrt": math.sqrt(data.size)}[job.lr_scaling]


def gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """This rank's parts of all gradients."""
    return [local(p.grad) for p in parameters if p.grad is not None]


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def copies_in_replica(tensor: Tensor, layout: Layout) -> int:
    """How many ranks of a pipeline stage hold the same part of a tensor."""
    shards = 1
    if isinstance(tensor, DTensor):
        sizes = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
        shards = math.prod(size for size, placement in sizes if not placement.is_replicate())
    return layout.fsdp * layout.tp // shards


def clip_gradients(
    parameters: Sequence[nn.Parameter], max_norm: float, replica: Ranks, copies: Sequence[int]
) -> Tensor:
    """Scale all gradients so that their norm is at most `max_norm`; return the old. Collective.

    `copies`: of each parameter, how many ranks of `replica` hold this rank's part of it.
    torch.nn.utils.clip_grad_norm_ spends tens of microseconds on grouping, and cannot mix meshes.
    """
    own = gradients(parameters)
    norms = torch._foreach_norm(own)
    norm: Tensor
    if replica.size == 1:
        norm = torch.linalg.vector_norm(torch.stack(norms))
    else:  # each part of the model counts once
        held = [n for n, p in zip(copies, parameters, strict=True) if p.grad is not None]
        torch._foreach_mul_(norms, [n**-0.5 for n in held])
        norm = replica.sum(torch.stack(norms).square().sum()).sqrt()  # collective
    torch._foreach_mul_(own, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
    return norm


class Scaler(torch.amp.GradScaler):
    """Scales fp16's losses; a step is skipped if a gradient overflowed on any rank of a replica."""

    def __init__(self, device: torch.device, replica: Ranks) -> None:
        super().__init__(device.type)
        self._replica = replica

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, Tensor]:
        """Collective."""
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        own = gradients(parameters)
        torch._amp_foreach_non_finite_check_and_unscale_(own, found_inf, inv_scale)
        return {found_inf.device: self._replica.largest(found_inf)}
