"""A model's blocks divided among stages, each on other ranks, which work on micro-batches in turn.

torch.distributed.pipelining says who computes which micro-batch when. Weights that several stages
share get the sum of their gradients, so that the stages together compute what one rank would.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.utils import _pytree as pytree

from allranks.errors import AllranksError
from allranks.tasks import Task
from allranks.timing import timeline
from allranks.train.data import Batch, MicroBatch
from allranks.train.loop import (
    Training,
    check_losses,
    clear_gradients,
    divide_by_weight,
    weigh,
)
from allranks.train.mesh import Mesh, Ranks
from allranks.train.optim import local
from allranks.train.parallelize import (
    SynchronisedBatchNorm,
    batch_norms,
    buffers_unchanged,
    compile_calls,
    norms_count,
)
from allranks.train.stages import blocks_of

# A stage.


class Stage(nn.Module):
    """Neighbouring blocks on one rank. In training, the last stage ends with the loss."""

    def __init__(self, blocks: Iterable[nn.Module], number: int, num_stages: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.number = number
        self.is_first, self.is_last = number == 0, number == num_stages - 1
        self.feed: Iterator[MicroBatch] = iter(())  # what it will be called for, in this order
        self.context: Callable[[MicroBatch], AbstractContextManager[Any]] = _nothing
        self.score: Callable[[Any, MicroBatch], Tensor] | None = None  # outputs -> loss, [1]

    def forward(self, *received: Tensor) -> Any:
        micro = next(self.feed)
        timeline.mark(timeline.FORWARD)
        values: Any = received[0] if len(received) == 1 else received
        if self.is_first:
            values = micro.inputs
        with self.context(micro):
            for block in self.blocks:
                values = block(values)
            if self.is_last and self.score is not None:
                return self.score(values, micro)
        return pytree.tree_map_only(Tensor, Tensor.contiguous, values)  # as it can be sent


def _nothing(micro: MicroBatch) -> AbstractContextManager[None]:
    return nullcontext()


class SeenStage(PipelineStage):
    """torch's stage, whose backward passes are recorded, even where they are cut in two."""

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> None:
        timeline.mark(timeline.BACKWARD)
        super().backward_one_chunk(*args, **kwargs)
        timeline.mark(timeline.AFTER)

    def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> None:
        timeline.mark(timeline.BACKWARD)
        super().backward_weight_one_chunk(*args, **kwargs)
        timeline.mark(timeline.AFTER)


# The pipeline.


class Pipeline:
    """One rank's stages, and the schedule by which its pipeline works on micro-batches."""

    def __init__(
        self,
        task: Task,
        sizes: list[int],
        mesh: Mesh,
        device: torch.device,
        schedule: str,
        num_micro_batches: int,
    ) -> None:
        self.sizes = sizes  # blocks of each stage
        self.num_parameters = 0  # of the whole model
        self.stages: list[Stage] = []
        self.ranks = mesh.stages
        self.device = device
        self._task = task
        self._mesh = mesh
        self._stages_with: dict[str, list[int]] = {}  # name of a parameter -> which have it
        self._places: list[list[tuple[nn.Module, str]]] = []  # of each of this rank's parameters
        self._tied: list[tuple[nn.Parameter, Ranks]] = []
        self._schedule_name = schedule
        self._schedule: Any = None
        self._ticks = torch.zeros(num_micro_batches)  # stand for the micro-batches
        self._passed: dict[Any, dict[int, Passed]] = {}  # what each stage gets, by kind of inputs
        self._sent: list[tuple[Any, Tensor]] = []
        self._has_weights = False  # whether the task's loss returns weights of the samples
        self._losses: list[Tensor] = []  # of each micro-batch, with the last stage
        self._weights: list[Tensor] = []

    def cut(self, model: nn.Module) -> list[Stage]:
        """This rank's stages of the model, which keeps no other weights."""
        blocks = blocks_of(self._task, model)
        ends = list(itertools.accumulate(self.sizes, initial=0))
        of_stages = [blocks[start:stop] for start, stop in itertools.pairwise(ends)]
        self.num_parameters = sum(parameter.numel() for parameter in model.parameters())
        names = {id(parameter): name for name, parameter in _names(model)}
        for number, group in enumerate(of_stages):
            for parameter in nn.ModuleList(group).parameters():
                self._stages_with.setdefault(names[id(parameter)], []).append(number)
        own = range(self.ranks.rank, len(self.sizes), self.ranks.size)
        self.stages = [Stage(of_stages[number], number, len(self.sizes)) for number in own]
        self._places = _keep_only(model, blocks, self.stages)
        return self.stages

    @property
    def is_last(self) -> bool:
        """Whether this rank has the last stage."""
        return self.stages[-1].is_last

    def tie(self, model: nn.Module) -> None:
        """Find the parameters that other ranks' stages have too. Collective.

        Call it when parameters are where they stay: FSDP and TP replace them.
        """
        inside = {id(module) for stage in self.stages for module in stage.modules()}
        for places in self._places:
            kept = {getattr(module, name) for module, name in places if id(module) in inside}
            if len(kept) > 1:
                raise AllranksError(
                    f"layout {self._mesh.layout}: two stages of a rank share weights, which dp, "
                    "fsdp and tp cannot divide",
                    fix="write pipeline.schedule=1f1b",
                )
            for module, name in places:  # those outside of the stages are only names
                setattr(module, name, *kept)
        own = dict(_names(model))
        for name, stages in self._stages_with.items():
            holders = sorted({number % self.ranks.size for number in stages})
            if len(holders) > 1:
                ranks = self._mesh.among_stages(holders)  # collective
                if name in own and own[name].requires_grad:
                    self._tied.append((own[name], ranks))

    def copies(self, parameter: nn.Parameter) -> int:
        """How many ranks of a pipeline have this parameter."""
        return next((ranks.size for tied, ranks in self._tied if tied is parameter), 1)

    def set_up(self, t: Training) -> None:
        """Learn what stages send each other, and make a step that changes nothing. Collective."""
        micro = t.data.example(t.progress)
        with torch.no_grad(), t.autocast:
            outputs = self.outputs(micro.inputs)
            if self.is_last:
                losses = t.loss(outputs, micro.targets)
                check_losses(losses, len(micro.weights))
                self._has_weights = isinstance(losses, tuple)
        flag = torch.tensor(self._has_weights, device=self.device).int()
        self._has_weights = bool(self.ranks.largest(flag).item())
        self._schedule = self._make_schedule(self._passed[_kinds(micro.inputs)])
        number = len(self._ticks)
        micro = micro._replace(weights=torch.zeros_like(micro.weights))
        with buffers_unchanged(t.model):
            self.forward_backward(t, Batch(1, 0, 0, False, iter([micro] * number), number), False)
        clear_gradients(t)

    def _make_schedule(self, passed: dict[int, Passed]) -> Any:
        loss = torch.zeros(1, device=self.device, requires_grad=True)
        stages: list[Any] = [
            SeenStage(
                *(stage, stage.number, len(self.sizes), self.device),
                input_args=self._ticks[:1] if stage.is_first else passed[stage.number].examples(),
                output_args=loss if stage.is_last else passed[stage.number + 1].examples(),
                group=self.ranks.group,
            )
            for stage in self.stages
        ]
        options: dict[str, Any] = {"loss_fn": lambda loss, tick: loss, "scale_grads": False}
        number = len(self._ticks)
        if self._schedule_name == "interleaved":
            return ScheduleInterleaved1F1B(stages, number, **options)
        if self._schedule_name == "zero-bubble":
            return ScheduleInterleavedZeroBubble(stages, number, **options)
        if self._schedule_name == "1f1b" and number >= len(self.sizes):
            return Schedule1F1B(stages[0], number, **options)
        # 1F1B is the same with fewer micro-batches than stages.
        return ScheduleGPipe(stages[0], number, **options)

    def compile(self) -> None:
        for stage in self.stages:
            for block in stage.blocks:
                compile_calls(block)

    def forward_backward(self, t: Training, batch: Batch, want_loss: bool) -> Tensor | None:
        """Compute the gradients of the global batch's mean loss. Collective.

        Returns this rank's part of that mean if it is wanted: 0 without the last stage.
        """
        micro_batches = list(batch.micro_batches)
        for stage in self.stages:
            if not stage.training:
                stage.train()
            stage.feed = iter(micro_batches)
            stage.context = partial(_forward_context, t, batch_norms(stage))
            stage.score = partial(self._score, t)
        self._wait_for_sent()
        self._schedule.step(self._ticks, target=self._ticks)  # collective
        timeline.mark(timeline.AFTER)
        if t.scaler is not None and not self.is_last:
            t.scaler.scale(torch.zeros((), device=self.device))  # it must know that it is used
        for parameter, ranks in self._tied:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            ranks.sum(local(parameter.grad))  # collective
        loss = self._take_sum(self._losses, t.data.dtype)
        if self._has_weights:
            weight = self.ranks.sum(self._take_sum(self._weights, t.data.dtype))  # collective
            loss = loss * divide_by_weight(t, weight)  # collective
        return loss / t.mesh.data.size if want_loss else None

    def _score(self, t: Training, outputs: Any, micro: MicroBatch) -> Tensor:
        """What the last stage's backward pass starts from: a sum of weighted losses, shape [1]."""
        losses, weights, own_weight = weigh(t.loss(outputs, micro.targets), micro)
        t.meter.own.keep(t.progress.step + 1, losses)
        self._losses.append(torch.dot(losses.detach(), weights))
        if own_weight is not None:
            self._weights.append(own_weight)
        loss = (losses * weights.detach()).sum(0, keepdim=True)
        return loss if t.scaler is None else t.scaler.scale(loss)

    def _take_sum(self, values: list[Tensor], dtype: torch.dtype) -> Tensor:
        """The sum of the values, which are then dropped; 0 on ranks without the last stage."""
        zero = torch.zeros((), device=self.device, dtype=dtype)
        total = torch.stack(values).sum() if values else zero
        values.clear()
        return total

    def outputs(self, inputs: Any) -> Any:
        """The model's outputs, on the rank with the last stage; None on others. Collective."""
        kinds = _kinds(inputs)
        is_known = kinds in self._passed
        passed = self._passed.setdefault(kinds, {})
        before, after = (
            (self.ranks.rank - 1) % self.ranks.size,
            (self.ranks.rank + 1) % self.ranks.size,
        )
        group = self.ranks.group
        values = None
        for stage in self.stages:
            received: tuple[Tensor, ...] = (self._ticks[:1],)  # FSDP of torch 2.11 wants one
            if not stage.is_first:
                if not is_known:
                    shapes: list[Any] = [None]
                    dist.recv_object_list(shapes, group=group, group_src=before, device=self.device)
                    passed[stage.number] = shapes[0]
                received = passed[stage.number].empty(self.device)
                for tensor in received:
                    dist.recv(tensor, group=group, group_src=before)
            if stage.training:
                stage.eval()
            stage.feed = iter([MicroBatch(inputs, None, *_NO_WEIGHTS)])
            stage.context, stage.score = _nothing, None
            values = stage(*received)
            if isinstance(stage, FSDPModule):
                stage.reshard()  # only then its parameters are those that have names
            if not stage.is_last:
                tensors = values if isinstance(values, tuple) else (values,)
                self._wait_for_sent()
                if not is_known:
                    passed[stage.number + 1] = Passed.of(tensors)
                    shapes = [passed[stage.number + 1]]
                    dist.send_object_list(shapes, group=group, group_dst=after, device=self.device)
                for tensor in tensors:
                    tensor = tensor.detach()
                    self._sent.append((dist.isend(tensor, group=group, group_dst=after), tensor))
        return values if self.is_last else None

    def _wait_for_sent(self) -> None:
        while self._sent:
            self._sent.pop(0)[0].wait()


@dataclass(frozen=True, slots=True)
class Passed:
    """What one stage passes to the next: shapes and types of tensors, and which have gradients."""

    tensors: tuple[tuple[tuple[int, ...], torch.dtype], ...]

    @classmethod
    def of(cls, tensors: tuple[Tensor, ...]) -> Passed:
        if any(not isinstance(tensor, Tensor) for tensor in tensors):
            raise AllranksError(
                "a block returned something other than a tensor or a tuple of tensors",
                fix="let every block but the last return tensors, which can be sent to the next "
                "stage of a pipeline",
            )
        return cls(tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors))

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.empty(torch.device("meta")))

    def empty(self, device: torch.device) -> tuple[Tensor, ...]:
        return tuple(
            torch.empty(shape, dtype=dtype, device=device) for shape, dtype in self.tensors
        )

    def examples(self) -> tuple[Tensor, ...]:
        """Tensors of these shapes and types, without memory, as torch's stages expect them."""
        found = self.empty(torch.device("meta"))
        return tuple(tensor.requires_grad_(tensor.is_floating_point()) for tensor in found)


def _kinds(inputs: Any) -> tuple[Any, ...]:
    """What decides the shapes of everything that is computed from inputs."""
    leaves = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)]
    return tuple((tuple(leaf.shape), leaf.dtype) for leaf in leaves)


_NO_WEIGHTS: Any = (None, None)  # in evaluations


@contextmanager
def _forward_context(
    t: Training, norms: list[SynchronisedBatchNorm], micro: MicroBatch
) -> Iterator[None]:
    with t.autocast, norms_count(norms, micro.counted) if t.data.borrows else nullcontext():
        yield


def _names(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters with the names that they have without activation checkpointing."""
    for name, parameter in model.named_parameters():
        yield name.replace("_checkpoint_wrapped_module.", ""), parameter


def _keep_only(
    model: nn.Module, blocks: Sequence[nn.Module], stages: Sequence[Stage]
) -> list[list[tuple[nn.Module, str]]]:
    """Drop the weights that no stage has from the model; return where each of the others is.

    Modules stay, so that what is left has its names.
    """
    own = {id(x) for stage in stages for x in (*stage.parameters(), *stage.buffers())}
    in_blocks = {id(buffer) for block in blocks for buffer in block.buffers()}
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in dict.fromkeys(m for root in (model, *stages) for m in root.modules()):
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) in own:
                places.setdefault(id(parameter), []).append((module, name))
            else:
                module._parameters[name] = None
        for name, buffer in module._buffers.items():
            if id(buffer) in in_blocks and id(buffer) not in own:
                module._buffers[name] = None
    return list(places.values())
