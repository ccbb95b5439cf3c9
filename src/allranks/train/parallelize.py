"""Divides a model among ranks: norms, tensor parallelism, activation checkpointing, FSDP or DDP."""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.nn.functional import all_reduce as all_reduce_with_gradient
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import (
    CheckpointPolicy,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

from allranks.errors import AllranksError
from allranks.train.initial import Recording, fill
from allranks.train.mesh import Mesh, Ranks

Precision = Literal["fp32", "tf32", "fp16", "bf16"]
# Of a checkpointed forward pass, and of its repetition.
Contexts = Callable[[], tuple[AbstractContextManager[None], AbstractContextManager[None]]]

# torch 2.13 renamed it, and warns about the old name.
_RENAMED = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
_NO_BUFFER_SYNC: Any = {"forward_sync_buffers" if _RENAMED else "broadcast_buffers": False}


def parallelize(
    model: nn.Module,
    mesh: Mesh,
    device: torch.device,
    *,
    plan: Mapping[str, Any] | None = None,
    recording: Recording | None = None,
    activation_checkpointing: Literal["off", "full", "selective"] = "off",
    cut: Callable[[nn.Module], Sequence[nn.Module]] | None = None,
    one_pass: Callable[[nn.Module], object] | None = None,
) -> nn.Module:
    """The model to call in training. Collective.

    `plan`: the task's tensor_parallel_plan. `recording`: of weights that are not in memory yet.
    `cut` drops what other stages hold, and returns the parts that this rank calls in place of the
    whole.
    `one_pass` makes a forward and backward pass that changes nothing but gradients. It shows which
    parameters take no part in the loss: DDP fails on them unless it is told to look for them.
    """
    synchronise_batch_norm(model, mesh.data)
    is_cut = mesh.layout.tp > 1 or (mesh.devices is not None and mesh.data.size > 1)
    wholes = dict(model.named_parameters())
    if mesh.layout.tp > 1:
        tensor_parallel(model, mesh, plan)
    if recording is not None:
        recording.replaced(wholes, dict(model.named_parameters()))
    if activation_checkpointing != "off":
        checkpoint_activations(model, selective=activation_checkpointing == "selective")
    blocks = blocks_of_their_own(model)
    parts = [model] if cut is None else cut(model)
    if not is_cut:  # otherwise each rank takes its part, so that the whole need not fit the device
        fill(model, recording)
        model.to(device)
    for part in parts if is_cut else ():
        shard(part, blocks, mesh, recording)
    if mesh.data.size > 1 and not is_cut:
        assert one_pass is not None
        one_pass(model)
        parameters = [p for p in model.parameters() if p.requires_grad]
        unused = torch.tensor(any(p.grad is None for p in parameters), device=device).int()
        mesh.data.largest(unused)  # collective
        for parameter in parameters:
            parameter.grad = None
        model = data_parallel(model, mesh.data, device, find_unused_parameters=bool(unused.item()))
    return model


def data_parallel(
    model: nn.Module, ranks: Ranks, device: torch.device, *, find_unused_parameters: bool = False
) -> DistributedDataParallel:
    """A model whose gradients are averaged over the ranks. Collective."""
    return DistributedDataParallel(
        model,
        process_group=ranks.group,
        find_unused_parameters=find_unused_parameters,
        device_ids=[device] if device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        # Buffers are already equal on all ranks: training changes only those of BatchNorm, which
        # is synchronised.
        **_NO_BUFFER_SYNC,
    )


def tensor_parallel(model: nn.Module, mesh: Mesh, plan: Mapping[str, Any] | None) -> None:
    """Cut matrices as the plan says; parameters that it does not name stay whole on every rank."""
    assert mesh.devices is not None
    if plan is None:
        raise AllranksError(
            f"layout {mesh.layout}: tp needs a plan, and the task has no tensor_parallel_plan",
            fix=f"write fsdp={mesh.layout.tp} in place of tp={mesh.layout.tp}, or add a "
            "method tensor_parallel_plan to the task",
        )
    tied = [names for names in _names_by_parameter(model).values() if len(names) > 1]
    # Every rank has the whole model, with equal weights: nothing needs to be sent.
    parallelize_module(model, mesh.devices["tp"], dict(plan), src_data_rank=None)
    for first, *others in tied:
        for name in others:
            owner, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(owner), attribute, model.get_parameter(first))


def _names_by_parameter(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return names


def shard(
    model: nn.Module, blocks: Sequence[nn.Module], mesh: Mesh, recording: Recording | None
) -> None:
    """Shard parameters over fsdp, those of each block together; average gradients over dp and fsdp.

    With fsdp=1, replicas are averaged by the same means: DDP cannot, if the parameters are cut
    by tp or differ between stages.
    """
    assert mesh.devices is not None
    axes = mesh.devices["dp", "fsdp"] if mesh.layout.dp > 1 else mesh.devices["fsdp"]
    own = set(model.modules())
    divided: set[nn.Parameter] = set()
    for module in (*(block for block in blocks if block in own), model):
        fill(module, recording)
        module.register_forward_hook(_without_views)  # before FSDP's own
        together = {p.dtype for p in module.parameters() if p.requires_grad and p not in divided}
        try:
            if len(together) > 1:
                types = " and ".join(sorted(map(str, together)))
                raise ValueError(f"weights of {types} would be sent together")
            # A stage is called many times in a row: it would gather its shards every time.
            fully_shard(module, mesh=axes, reshard_after_forward=mesh.layout.pp == 1)
        except (ValueError, NotImplementedError) as error:
            layout = mesh.layout
            raise AllranksError(
                f"layout {layout} cannot divide the model: {error}",
                fix=f"change the model, or write --layout {layout.nodes}x{layout.gpus}",
            ) from error
        divided.update(module.parameters())


def _without_views(module: nn.Module, inputs: object, outputs: Any) -> Any:
    """Copy outputs that are views: changed in place, they would lose FSDP's hook on them."""
    return tree_map_only(
        Tensor, lambda t: t.clone() if t.requires_grad and t._is_view() else t, outputs
    )


def blocks_of_their_own(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks that have parameters and share none with the rest of the model."""
    blocks = repeated_blocks(model)
    names = _names_by_parameter(model)
    found = []
    for block in blocks.children() if blocks is not None else []:
        own = _names_by_parameter(block)
        if own and all(len(own[parameter]) == len(names[parameter]) for parameter in own):
            found.append(block)
    return found


@contextlib.contextmanager
def buffers_unchanged(model: nn.Module) -> Iterator[None]:
    """A context after which the model's buffers are as they were before."""
    buffers = [buffer.clone() for buffer in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, before in zip(model.buffers(), buffers, strict=True):
                buffer.copy_(before)


def plain(model: nn.Module) -> nn.Module:
    """The model without its DDP wrapper."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def compile_calls(module: nn.Module) -> None:
    """Compile a module in its next calls.

    Its method `compile` would not, if the class is one of torch's own (a Sequential).
    """
    module._compiled_call_impl = partial(torch.compile(call), module)


def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call a module as torch does where it is not compiled."""
    return module._call_impl(*args, **kwargs)


def without_sync(model: nn.Module) -> AbstractContextManager[None]:
    """A context in which backward passes do not average gradients over replicas yet.

    FSDP's shards are reduced in every one: to wait would take memory for gradients of all shards.
    """
    if isinstance(model, DistributedDataParallel):
        return model.no_sync()
    return _without_all_reduce(model) if isinstance(model, FSDPModule) else nullcontext()


@contextlib.contextmanager
def _without_all_reduce(model: FSDPModule) -> Iterator[None]:
    model.set_requires_all_reduce(False)
    try:
        yield
    finally:
        model.set_requires_all_reduce(True)


# Precision.


def resolve_precision(wanted: str, device: torch.device) -> Precision:
    """The precision to use; raises if this device does not support the one that is wanted."""
    bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    if wanted == "auto":
        return "bf16" if bf16 else "fp32"
    if wanted == "tf32" and (
        device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0)
    ):
        raise AllranksError(
            f"precision: tf32 needs an NVIDIA GPU of the Ampere generation or later, not {device}",
            fix="write precision: fp32, or auto",
        )
    if wanted == "bf16" and device.type == "cuda" and not bf16:
        raise AllranksError(
            f"precision: bf16 is not supported by {torch.cuda.get_device_name(device)}",
            fix="write precision: fp16, or auto",
        )
    assert wanted in ("fp32", "tf32", "fp16", "bf16")
    return wanted  # type: ignore[return-value]  # narrowed by the line above


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[None]:
    """A reusable context for forward passes. Also sets how fp32 matrix products are computed."""
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    if precision in ("fp16", "bf16"):
        dtype = torch.float16 if precision == "fp16" else torch.bfloat16
        return torch.autocast(device.type, dtype=dtype)
    return nullcontext()  # a disabled autocast would cost microseconds per step


# Activation checkpointing.


def checkpoint_activations(model: nn.Module, *, selective: bool) -> None:
    """Recompute the activations of each repeated block in the backward pass.

    `selective` keeps the results of matrix products and attention, which are costly to recompute.
    """
    blocks = repeated_blocks(model)
    if blocks is None:
        raise AllranksError(
            "activation_checkpointing: the model has no ModuleList or Sequential of several blocks",
            fix="write activation_checkpointing: off, or put the model's layers in one",
        )
    for name, block in list(blocks.named_children()):
        contexts: Contexts = _keep_matrix_products if selective else noop_context_fn
        if norms := batch_norms(block):
            contexts = partial(_counting_again, norms, contexts)
        setattr(blocks, name, checkpoint_wrapper(block, context_fn=contexts))


def repeated_blocks(model: nn.Module) -> nn.Module | None:
    """The ModuleList or Sequential that holds most of the parameters."""
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList | nn.Sequential)]
    lists = [m for m in lists if len(m) > 1]
    return max(lists, key=_num_parameters, default=None)


def _num_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


_COSTLY = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.convolution.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
}


def _counting_again(
    norms: list[SynchronisedBatchNorm], contexts: Contexts
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Contexts in which the recomputed norms count the samples that they count now."""
    first, again = contexts()
    return first, _both(norms_count(norms, norms[0].counted), again)


@contextlib.contextmanager
def _both(one: AbstractContextManager[None], other: AbstractContextManager[None]) -> Iterator[None]:
    with one, other:
        yield


def _keep_matrix_products() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    def policy(context: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in _COSTLY else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)  # type: ignore[no-any-return]


# BatchNorm over all ranks.


class SynchronisedBatchNorm(_BatchNorm):
    """BatchNorm over the samples of all ranks, on any device. Its forward pass is collective.

    torch's SyncBatchNorm does this on GPUs only. The mean is computed first, then the squared
    distances from it: a difference of two large sums would lose the digits that layouts must agree
    on.
    """

    ranks = Ranks()
    counted: Tensor | None = None  # 1.0 for each sample, 0.0 for padding; None: all are counted

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2 dimensions, got {input.dim()}")

    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        if not self.training:
            return super().forward(input)
        dims = [dim for dim in range(input.dim()) if dim != 1]
        shape = [1, -1] + [1] * (input.dim() - 2)
        x = input if input.dtype == torch.float64 else input.float()
        count = torch.full((1,), x.numel() / x.size(1), device=x.device, dtype=x.dtype)
        weights = None
        if self.counted is not None:
            # A module may have made several rows of each sample.
            rows = self.counted.to(x.dtype).repeat_interleave(x.size(0) // len(self.counted))
            count = count * rows.mean()
            weights = rows.view(-1, *[1] * (x.dim() - 1))
        totals = _sum_over(self.ranks, torch.cat([_weighted(x, weights).sum(dims), count]))
        # None are counted in some of a pipeline's micro-batches, if there are few samples.
        count = totals[-1].detach()
        mean = totals[:-1] / count.clamp(min=1)
        centred = x - mean.view(shape)
        squares = _weighted(centred * centred, weights).sum(dims)
        variance = _sum_over(self.ranks, squares) / count.clamp(min=1)
        if not _is_recomputing():
            self._track(mean.detach(), variance.detach(), count)
        y = centred * torch.rsqrt(variance + self.eps).view(shape)
        if self.weight is not None:
            y = y * self.weight.view(shape)
        if self.bias is not None:
            y = y + self.bias.view(shape)
        return y.to(input.dtype)

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        if not self.track_running_stats:
            return
        assert self.running_mean is not None and self.running_var is not None
        assert self.num_batches_tracked is not None
        counts = (count > 0).squeeze()
        self.num_batches_tracked.add_(counts)
        unbiased = variance * (count / torch.clamp(count - 1, min=1))
        if self.momentum is None:
            share = counts / self.num_batches_tracked.to(mean.dtype).clamp(min=1)
        else:
            share = counts * mean.new_tensor(self.momentum)
        self.running_mean += (mean - self.running_mean) * share
        self.running_var += (unbiased - self.running_var) * share


def _weighted(values: Tensor, weights: Tensor | None) -> Tensor:
    return values if weights is None else values * weights


def _sum_over(ranks: Ranks, value: Tensor) -> Tensor:
    if ranks.size == 1:
        return value
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        result: Tensor = all_reduce_with_gradient(value, group=ranks.group)
    return result


def _is_recomputing() -> bool:
    """Whether this is activation checkpointing's second forward pass, within a backward pass."""
    return bool(torch._C._current_graph_task_id() != -1)


def synchronise_batch_norm(model: nn.Module, ranks: Ranks) -> nn.Module:
    """Synchronise every BatchNorm of a model across ranks."""
    for module in model.modules():
        if type(module) in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d):
            # The same object, so that shared, tied and frozen parameters stay as they are.
            module.__class__ = SynchronisedBatchNorm
    for norm in batch_norms(model):
        norm.ranks = ranks
    return model


def batch_norms(model: nn.Module) -> list[SynchronisedBatchNorm]:
    return [module for module in model.modules() if isinstance(module, SynchronisedBatchNorm)]


@contextlib.contextmanager
def norms_count(norms: list[SynchronisedBatchNorm], counted: Tensor | None) -> Iterator[None]:
    """A context in which only the counted samples contribute to the norms' statistics."""
    for norm in norms:
        norm.counted = counted
    try:
        yield
    finally:
        for norm in norms:
            norm.counted = None
