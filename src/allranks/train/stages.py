"""Which of a model's blocks each pipeline stage gets: divided by their times, measured once a run.

The division is kept in the run's folder and in its checkpoints: a run that goes on sums in the same
order, and so computes the same bits.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from allranks.errors import AllranksError
from allranks.job.job import Job
from allranks.job.stages import check_stages
from allranks.layout import Layout
from allranks.run.commits import Commit
from allranks.run.folder import RunDir, write_atomically
from allranks.tasks import Task
from allranks.train import parallelize
from allranks.train.data import MicroBatch, Progress, TrainingData
from allranks.train.loop import Loss
from allranks.train.mesh import Mesh, Ranks

FILE = "stages.json"  # in the run's folder: blocks of each stage, by the number of stages
MEASURED_PASSES = 3  # of each block, after one that warms up


def blocks_of(task: Task, model: nn.Module) -> list[nn.Module]:
    """The model's blocks; those without weights join the one before, leading ones the one after.

    Raises AllranksError if the model is not known to be a chain, or has weights outside of it.
    """
    blocks = task.blocks(model)
    if blocks is None and isinstance(model, nn.Sequential):
        blocks = list(model)
    name = type(task).__name__
    if not blocks:
        raise AllranksError(
            f"the layout has pp, but {name} does not say of which blocks its model is a chain",
            fix="write fsdp in place of pp, since fsdp divides any model, or add a method "
            f"blocks(model) to {name} that returns them as a list",
        )
    inside = {id(p) for block in blocks for p in block.parameters()}
    outside = [key for key, p in model.named_parameters() if id(p) not in inside]
    what = ""
    if outside:
        what = f"no block has {', '.join(outside[:3])}"
    elif len(inside) > len(list(model.parameters())):
        what = "a block has weights that are not the model's"
    elif len({id(block) for block in blocks}) < len(blocks):
        what = "a block is there twice"
    if what:
        raise AllranksError(
            f"{name}.blocks does not return the model as a chain: {what}",
            fix=f"let {name}.blocks return every part of the model once, in the order in which "
            "they are called",
        )
    groups: list[list[nn.Module]] = [[]]
    for block in blocks:
        if groups[-1] and _is_trained(block) and any(map(_is_trained, groups[-1])):
            groups.append([])
        groups[-1].append(block)
    return [group[0] if len(group) == 1 else nn.Sequential(*group) for group in groups]


def _is_trained(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def divide(costs: Sequence[float], num_stages: int) -> list[int]:
    """How many blocks each stage gets, so that the largest stage costs as little as possible.

    Of several such divisions, the most even one: that with the smallest sum of squares.
    """
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    # best[i]: the first i blocks in as many stages as rounds so far: (largest, squares, sizes)
    best: dict[int, tuple[float, float, list[int]]] = {0: (0.0, 0.0, [])}
    for stage in range(num_stages):
        left = num_stages - stage - 1  # stages, each of which needs a block
        best = {
            stop: min(
                (max(largest, sums[stop] - sums[start]),
                 squares + (sums[stop] - sums[start]) ** 2,
                 [*sizes, stop - start])
                for start, (largest, squares, sizes) in best.items() if start < stop
            )
            for stop in range(stage + 1, len(costs) - left + 1)
        }  # fmt: skip
    return best[len(costs)][2]


def measure(
    blocks: Sequence[nn.Module],
    micro: MicroBatch,
    loss: Loss,
    autocast: AbstractContextManager[None],
    device: torch.device,
) -> list[float]:
    """Seconds that a forward and backward pass of each block takes on this device.

    One block at a time is on the device. Passes are collective if the model has BatchNorm.
    """
    values, costs = micro.inputs, []
    for number, block in enumerate(blocks, start=1):
        home = next((p.device for p in block.parameters()), device)
        if home.type == "meta":  # too large to be in memory yet: other weights take as long
            block = copy.deepcopy(block).to_empty(device=device)
        block.to(device)
        then = None if number < len(blocks) else lambda y: _scalar(loss(y, micro.targets))
        seconds = []
        with parallelize.buffers_unchanged(block):
            for _ in range(1 + MEASURED_PASSES):
                inputs = values if number == 1 else pytree.tree_map_only(Tensor, _leaf, values)
                took, outputs = _time_pass(block, inputs, then, autocast, device)
                seconds.append(took)
        costs.append(min(seconds[1:]))
        values = outputs
        for parameter in block.parameters():
            parameter.grad = None
        block.to(home)
    # Equal blocks cost the same: differences between them are noise, and must not divide them.
    kinds = [kind_of_block(block) for block in blocks]
    return [
        sum(cost for cost, other in zip(costs, kinds, strict=True) if other == kind)
        / kinds.count(kind)
        for kind in kinds
    ]


def _time_pass(
    block: nn.Module,
    values: Any,
    then: Callable[[Any], Tensor] | None,
    autocast: AbstractContextManager[None],
    device: torch.device,
) -> tuple[float, Any]:
    """Seconds of a forward and backward pass, and the block's outputs."""
    _synchronise(device)
    began = time.perf_counter()
    with autocast:
        outputs = block(values)
        last = outputs if then is None else then(outputs)
    ends = [x for x in pytree.tree_leaves(last) if isinstance(x, Tensor) and x.requires_grad]
    torch.autograd.backward(ends, [torch.ones_like(x) for x in ends])
    _synchronise(device)
    return time.perf_counter() - began, outputs


def _leaf(tensor: Tensor) -> Tensor:
    """A tensor as it arrives at a stage."""
    return tensor.detach().requires_grad_(tensor.is_floating_point())


def _scalar(losses: Tensor | tuple[Tensor, Tensor]) -> Tensor:
    return (losses[0] if isinstance(losses, tuple) else losses).sum()


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def kind_of_block(block: nn.Module) -> tuple[Any, ...]:
    """A key that is equal for blocks that differ only in the values of their weights."""
    tensors = (*block.parameters(), *block.buffers())
    return type(block), repr(block), [(tuple(x.shape), x.dtype, x.requires_grad) for x in tensors]


def divide_blocks(
    job: Job,
    mesh: Mesh,
    task: Task,
    model: nn.Module,
    data: TrainingData,
    autocast: AbstractContextManager[None],
    run: RunDir,
    commit: Commit | None,
) -> list[int]:
    """Blocks of each stage: as in the run's earlier attempts, else by their cost. Collective."""
    blocks, num_stages = blocks_and_stages(job, mesh.layout, task, model)
    known = divisions_before(run, commit) if mesh.world.rank == 0 else {}
    sizes: list[int] = mesh.world.from_first(known.get(str(num_stages), []))  # collective
    if len(sizes) == num_stages and sum(sizes) == len(blocks) and min(sizes) > 0:
        return sizes
    parallelize.synchronise_batch_norm(model, Ranks())  # as it will be, but without other ranks
    costs = measure(blocks, data.example(Progress()), task.loss, autocast, data.device)
    # Of all ranks together, so that all divide alike.
    seconds = mesh.world.sum(torch.tensor(costs, device=data.device))  # collective
    sizes = divide(seconds.tolist(), num_stages)
    if mesh.world.rank == 0:
        write_atomically(run.path / FILE, json.dumps({**known, str(num_stages): sizes}) + "\n")
    return sizes


def divisions_before(run: RunDir, commit: Commit | None) -> dict[str, list[int]]:
    """Blocks of each stage in earlier attempts of a run, by the number of stages."""
    before = commit.manifest().get("stages") if commit else None
    known = {str(len(before)): before} if before else {}
    with suppress(OSError, ValueError, TypeError):  # there even if nothing was committed
        known |= json.loads((run.path / FILE).read_text())
    return known


def blocks_and_stages(
    job: Job, layout: Layout, task: Task, model: nn.Module
) -> tuple[list[nn.Module], int]:
    """The model's blocks, and how many stages to make of them. Raises AllranksError."""
    if task.couples_samples:
        raise AllranksError(
            f"layout {layout}: a pipeline's micro-batches are filled up with samples that do "
            f"not count, but {type(task).__name__} compares samples (couples_samples)",
            fix=f"write --layout {replace(layout, fsdp=layout.fsdp * layout.pp, pp=1)}",
        )
    blocks = blocks_of(task, model)
    return blocks, check_stages(layout, job.pipeline.schedule, len(blocks))
