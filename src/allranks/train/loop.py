"""The training loop, to be read top to bottom: nothing happens elsewhere, no collective is hidden.

build.py makes the parts that it uses.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from allranks.errors import AllranksError
from allranks.tasks import Task
from allranks.train.agreement import Pulse
from allranks.train.checkpoint import Checkpointer
from allranks.train.compress import Compression
from allranks.train.data import Batch, EvaluationData, MicroBatch, Progress, TrainingData, mix
from allranks.train.mesh import Mesh, Ranks
from allranks.train.meter import Meter
from allranks.train.optim import Scaler, Schedule, clip_gradients, gradients
from allranks.train.parallelize import (
    SynchronisedBatchNorm,
    norms_count,
    without_sync,
)
from allranks.train.signals import stop_requested

PerSample = Tensor | tuple[Tensor, Tensor]  # losses, or losses and the task's own weights
Loss = Callable[[Any, Any], PerSample]  # of outputs and targets
# What is computed for a batch; whether its loss is wanted, which then is returned.
Compute = Callable[["Training", Batch, bool], Tensor | None]


@dataclass(kw_only=True, slots=True)
class Training:
    """The parts of one rank's training."""

    task: Task
    mesh: Mesh
    together: Ranks  # whose gradients are averaged in each step: mesh.data, or this rank alone
    compression: Compression | None
    model: nn.Module  # wrapped in DDP or FSDP if there are several ranks
    loss: Loss  # the task's, maybe compiled
    # Model and loss as one function of inputs and targets, by fast_step.set_compiled.
    losses: Callable[[Any, Any], PerSample] = field(init=False)
    evaluated: Callable[[Any, Any], tuple[Any, PerSample]] = field(init=False)  # outputs too
    parameters: list[nn.Parameter]
    copies: list[int]  # of this rank's part of each parameter, in a replica
    norms: list[SynchronisedBatchNorm]
    optimizer: torch.optim.Optimizer
    schedule: Schedule
    scaler: Scaler | None  # only in fp16
    autocast: AbstractContextManager[None]
    max_norm: float | None
    data: TrainingData
    evaluations: Mapping[str, EvaluationData]
    meter: Meter
    pulse: Pulse
    checkpointer: Checkpointer
    save_every: SaveEvery
    predict: Callable[[Any], Any]  # the model's outputs; None on a rank without the last stage
    forward_backward: Compute  # of the model, or of a pipeline's stages
    step: Compute  # everything between one batch and the next that only the device works on
    device: torch.device
    seed: int
    last_step: int
    notes: dict[str, Any]  # what a checkpoint says besides the progress
    progress: Progress = field(default_factory=Progress)
    metrics: list[dict[str, Any]] = field(default_factory=list)  # every evaluation so far


@dataclass(frozen=True, slots=True)
class SaveEvery:
    """When checkpoints are due: every N steps, or every N seconds by rank 0's clock."""

    steps: int | None = None
    seconds: float | None = None


def train(t: Training) -> Literal["finished", "stopped"]:
    """Train to the last step, or until all ranks agree to stop; save in either case. Collective."""
    stopping = t.pulse.agree(stop=stop_requested() is not None).stop  # collective
    batches = t.data.batches(t.progress)
    if not stopping and evaluation_was_skipped(t):
        evaluate_and_record(t, "val")  # collective
    t.model.train()
    t.meter.begin_step()
    while t.progress.step < t.last_step and not stopping:
        batch = next(batches)
        step = t.progress.step + 1
        t.schedule.set(t.optimizer, step)
        seed_dropout(t, step)
        loss = t.step(t, batch, t.meter.wants_loss(step))  # collective
        if t.compression is not None:
            t.compression.after_step(step)  # collective, in some steps
        advance(t.progress, batch)
        t.meter.end_step(t.progress, batch, loss)

        if t.pulse.beats_next:
            t.meter.reduce_losses()  # collective, in the background
        # Collective, in the background.
        decision = t.pulse.step(stop_requested() is not None, save_due(t), writing_failed(t))
        if decision.failed:
            raise_failure(t)
        if (batch.ends_epoch and not decision.stop) or step == t.last_step:
            evaluate_and_record(t, "val")  # collective
        if decision.save or (t.save_every.steps and step % t.save_every.steps == 0):
            save(t)  # collective, in the background
            t.meter.begin_step()
        stopping = decision.stop

    finished = t.progress.step >= t.last_step
    if finished:
        evaluate_and_record(t, "test")  # collective
    save(t)  # collective, in the background
    t.checkpointer.finish()
    t.meter.finish()
    return "finished" if finished else "stopped"


def one_step(t: Training, batch: Batch, want_loss: bool) -> Tensor | None:
    """Make one optimizer step; return this rank's part of its loss if it is wanted. Collective."""
    loss = t.forward_backward(t, batch, want_loss)
    update(t)
    return loss


def forward_backward(t: Training, batch: Batch, want_loss: bool) -> Tensor | None:
    """Compute the gradients of the global batch's mean loss. Collective.

    Returns this rank's part of that mean if it is wanted. Ranks exchange gradients during the last
    micro-batch only.
    """
    loss: Tensor | None = None
    total_weight: Tensor | None = None
    for number, micro in enumerate(batch.micro_batches, start=1):
        with nullcontext() if number == batch.num_micro_batches else without_sync(t.model):
            losses, weights, own_weight = weighted_losses(t, micro)
            (losses if t.scaler is None else t.scaler.scale(losses)).backward(weights)
        t.meter.own.keep(t.progress.step + 1, losses)
        if want_loss:
            part = torch.dot(losses.detach(), weights)
            loss = part if loss is None else loss + part
        if own_weight is not None:
            total_weight = own_weight if total_weight is None else total_weight + own_weight
    if total_weight is not None:  # the task weights its samples: the divisor is known only now
        correction = divide_by_weight(t, total_weight)  # collective
        loss = loss * correction if loss is not None else None
    return loss / t.mesh.data.size if loss is not None else None


def divide_by_weight(t: Training, total_weight: Tensor) -> Tensor:
    """Divide the gradients by the weight of all samples; return the loss's factor. Collective."""
    t.together.sum(total_weight)  # collective
    correction = torch.where(total_weight > 0, t.together.size / total_weight, 0.0)
    torch._foreach_mul_(gradients(t.parameters), correction)
    return correction


def weighted_losses(t: Training, micro: MicroBatch) -> tuple[Tensor, Tensor, Tensor | None]:
    """What a pass computes: see `weigh`."""
    counted = norms_count(t.norms, micro.counted) if t.norms and t.data.borrows else nullcontext()
    with t.autocast, counted:
        return weigh(t.losses(micro.inputs, micro.targets), micro)


def weigh(losses: PerSample, micro: MicroBatch) -> tuple[Tensor, Tensor, Tensor | None]:
    """Each sample's loss and weight in the global mean, and the task's own weights' sum if any.

    All of the type of the model's weights, whatever the loss was computed in: float32 at least.
    """
    if isinstance(losses, tuple):
        losses, own = losses
        weights = micro.weights * own.to(micro.weights.dtype)
        return losses.to(weights.dtype), weights, weights.sum()
    return losses.to(micro.weights.dtype), micro.weights, None


def check_losses(losses: PerSample, size: int) -> Tensor:
    """The losses of a batch of so many samples. Raises AllranksError if they are not one each."""
    losses = losses[0] if isinstance(losses, tuple) else losses
    if losses.shape != (size,):
        raise AllranksError(
            f"the task's loss returned shape {list(losses.shape)} for a batch of {size} samples",
            fix=f"return one loss per sample, shape [{size}]: with torch's loss functions, "
            'use reduction="none"',
        )
    return losses


def update(t: Training) -> None:
    """Clip the gradients, make one optimizer step, and clear them. Collective."""
    t.checkpointer.finish_copying()
    if t.scaler is not None:
        t.scaler.unscale_(t.optimizer)  # collective
    if t.max_norm is not None:
        clip_gradients(t.parameters, t.max_norm, t.mesh.replica, t.copies)  # collective
    if t.scaler is not None:
        t.scaler.step(t.optimizer)  # skips the step if a gradient overflowed
        t.scaler.update()
    else:
        t.optimizer.step()
    clear_gradients(t)


def clear_gradients(t: Training) -> None:
    for parameter in t.parameters:  # faster than optimizer.zero_grad()
        parameter.grad = None


def advance(progress: Progress, batch: Batch) -> None:
    progress.step += 1
    progress.samples += batch.global_samples
    progress.position += batch.global_samples
    if batch.ends_epoch:
        progress.epoch += 1
        progress.position = 0


def seed_dropout(t: Training, step: int) -> None:
    """Seed the masks from (seed, step, rank), so that a resumed run draws the same ones."""
    # Neither do two stages of a pipeline draw the same ones.
    seed = mix(t.seed, step, t.data.cut.part + t.data.cut.parts * t.mesh.stages.rank)
    torch.default_generator.manual_seed(seed)
    if t.device.type == "cuda":
        torch.cuda.default_generators[t.device.index].manual_seed(seed)


@torch.no_grad()
def evaluate(t: Training, split: str) -> dict[str, float]:
    """The mean loss and metrics over a whole data set, equal on all ranks. Collective."""
    t.model.eval()
    sums: dict[str, Tensor] = {}  # name -> [sum of values, sum of their weights]
    for inputs, targets, count in t.evaluations[split]:
        with t.autocast:
            outputs, losses = t.evaluated(inputs, targets)  # collective with stages
        if outputs is None:  # another rank has the last stage
            continue
        losses, weights = losses if isinstance(losses, tuple) else (losses, torch.ones_like(losses))
        for name, values in {"loss": losses, **t.task.metrics(outputs, targets)}.items():
            values = values[:count].double()
            weight = weights[:count].double() if name == "loss" else torch.ones_like(values)
            pair = torch.stack([(values * weight).sum(), weight.sum()])
            sums[name] = sums.get(name, 0) + pair
    t.model.train()
    means = {}
    if sums:
        totals = t.mesh.data.sum(torch.stack(list(sums.values())))  # collective
        means = dict(zip(sums, (totals[:, 0] / totals[:, 1]).tolist(), strict=True))
    return t.mesh.stages.from_last(means)  # collective


def evaluation_was_skipped(t: Training) -> bool:
    """Whether the run was stopped at the end of an epoch, before its evaluation."""
    at_boundary = t.progress.step > 0 and t.progress.position == 0
    return at_boundary and all(record["step"] != t.progress.step for record in t.metrics)


def evaluate_and_record(t: Training, split: str) -> None:
    """Evaluate on `val` or `test` if the task has it, and write the metrics. Collective."""
    if split not in t.evaluations:
        return
    began = time.perf_counter()
    t.checkpointer.finish_copying()
    with nullcontext() if t.compression is None else t.compression.as_one_model():  # collective
        means = evaluate(t, split)  # collective
    for name, value in means.items():
        record = {"step": t.progress.step, "name": f"{split}_{name}", "value": value}
        t.metrics.append(record)
        if t.mesh.world.rank == 0:
            t.meter.log.write("metric", **record)
    t.meter.evaluated(time.perf_counter() - began)
    t.meter.begin_step()


def save(t: Training) -> None:
    """Start a checkpoint of this step. Every rank must call it."""
    t.meter.reduce_losses()  # collective, in the background: the losses are committed too
    notes = {**t.notes, "metrics": list(t.metrics)}  # a copy: it is written in the background
    if t.scaler is not None:
        notes["scaler"] = t.scaler.state_dict()
    if t.compression is not None and t.progress.step != t.checkpointer.saved_step:
        t.compression.prepare_to_save()  # collective
    t.checkpointer.save(t.progress, notes)


def save_due(t: Training) -> bool:
    """Whether a checkpoint is due by rank 0's clock; the pulse tells the other ranks."""
    return (
        t.save_every.seconds is not None
        and t.mesh.world.rank == 0
        and t.checkpointer.seconds_since_save() >= t.save_every.seconds
    )


def writing_failed(t: Training) -> bool:
    """Whether writing this rank's checkpoint or events failed in the background."""
    return t.checkpointer.failed or t.meter.log.error is not None


def raise_failure(t: Training) -> None:
    """Stop because some rank cannot write; say why if it is this one."""
    t.meter.log.check()
    if t.checkpointer.failed:
        t.checkpointer.finish()
    raise PeerFailure


class PeerFailure(Exception):
    """Another rank has failed, and reports the reason."""
