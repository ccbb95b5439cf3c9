"""The forms of a device step besides the plain one: compiled, and replayed as one CUDA graph.

choose_step.py decides which form is used. Preparing a form changes nothing in the training, and
raises if the form does not work. Only `CudaGraph` needs a GPU.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import optimizer as optimizer_hooks

from allranks.timing import timeline
from allranks.train.data import Batch, MicroBatch, Progress, mapped
from allranks.train.loop import (
    Loss,
    PerSample,
    Training,
    check_losses,
    clear_gradients,
    one_step,
    seed_dropout,
    update,
    weighted_losses,
)
from allranks.train.optim import HostOptimizer, set_rate
from allranks.train.parallelize import (
    batch_norms,
    buffers_unchanged,
    compile_calls,
    plain,
    without_sync,
)
from allranks.train.pipeline import Pipeline
from allranks.train.stages import blocks_of

MOST_MICRO_BATCHES = 16  # in one graph: more of them keep a GPU busy without
# Two backward passes may sum in different orders; a learning rate or batch that was ignored, or an
# update that was left out, makes a far larger difference than this.
LOSS_TOLERANCE, UPDATE_TOLERANCE = 1e-3, 0.05
# Of a compiled loss, which sums in another order. How much it may differ because of other dropout
# masks is seen from several passes of the plain model.
COMPILED_TOLERANCE, REHEARSALS = 0.1, 4
# If a last block has at least this many outputs for each input, as in language models, it is
# compiled for parts of the batch in turn: all its outputs at once would be slow to move.
WIDE, PARTS = 16, 2
SAME = 1e-3  # of their norm: what a matrix product of fewer rows may round differently


class Refused(Exception):
    """A form of the step that cannot be used for this training, and why."""


# --- Compiled ------------------------------------------------------------------------------------


def model_and_loss(model: nn.Module, loss: Loss) -> Callable[[Any, Any], PerSample]:
    """The losses of inputs and targets, as one function."""

    def losses(inputs: Any, targets: Any) -> PerSample:
        return loss(model(inputs), targets)

    return losses


def losses_in_parts(t: Training) -> Callable[[Any, Any], PerSample]:
    """The losses of inputs and targets as one function; in parts if the last block is wide.

    Parts only if that computes what the model does: its blocks are then called in its place.
    """
    with suppress(Exception):  # the model is no chain, or passes on what cannot be divided
        *body, last = blocks_of(t.task, t.model)
        is_possible = is_wide(last) and not t.task.couples_samples
        if is_possible and same_outputs(t, of_parts(body, last, outputs_only)):
            return of_parts(body, last, t.task.loss)
    return model_and_loss(t.model, t.task.loss)


def of_parts(
    body: Sequence[nn.Module], last: nn.Module, loss: Loss
) -> Callable[[Any, Any], PerSample]:
    """The losses of a chain of blocks, the last of which gets parts of the batch in turn."""

    def losses(inputs: Any, targets: Any) -> PerSample:
        values = inputs
        for block in body:
            values = block(values)
        pairs = zip(values.chunk(PARTS), targets.chunk(PARTS), strict=True)
        parts: list[Any] = [loss(last(value), target) for value, target in pairs]
        if isinstance(parts[0], tuple):
            kinds = zip(*parts, strict=True)  # losses, and the task's own weights
            return torch.cat(next(kinds)), torch.cat(next(kinds))
        return torch.cat(parts)

    return losses


def outputs_only(outputs: Tensor, targets: Any) -> Tensor:
    """In place of a loss."""
    return outputs


def same_outputs(t: Training, chain: Callable[[Any, Any], Any]) -> bool:
    """Whether a chain of the model's blocks computes what the model does."""
    micro = t.data.example(Progress())
    found: list[Any] = []
    with buffers_unchanged(t.model), torch.no_grad(), t.autocast, torch.random.fork_rng([]):
        for function in (chain, model_and_loss(t.model, outputs_only)):
            torch.manual_seed(0)
            found.append(function(micro.inputs, micro.targets))
    return distance(found[:1], found[1:]) <= SAME * float(found[1].float().norm())


def is_wide(block: nn.Module) -> bool:
    shapes = [parameter.shape for parameter in block.parameters() if parameter.dim() == 2]
    return not batch_norms(block) and any(rows >= WIDE * columns for rows, columns in shapes)


def with_outputs(
    predict: Callable[[Any], Any], loss: Loss
) -> Callable[[Any, Any], tuple[Any, PerSample]]:
    """The outputs and losses of inputs and targets, as one function."""

    def evaluated(inputs: Any, targets: Any) -> tuple[Any, Any]:
        outputs = predict(inputs)  # None on a rank without the last stage of a pipeline
        return outputs, None if outputs is None else loss(outputs, targets)

    return evaluated


def set_compiled(t: Training, compiled: bool, pipeline: Pipeline | None = None) -> None:
    """Compile model and loss in their next passes, or run them uncompiled from now on.

    One rank compiles them as one function. Several ranks compile them separately, the model inside
    DDP, which splits its graph by buckets, so that these are exchanged in the backward pass.
    """
    inner, is_alone = plain(t.model), t.mesh.world.size == 1
    inner._compiled_call_impl = None
    t.loss = t.task.loss
    if compiled and not is_alone:
        if pipeline:
            pipeline.compile()
        else:
            compile_calls(inner)
        t.loss = torch.compile(t.loss)
    t.losses, t.evaluated = model_and_loss(t.model, t.loss), with_outputs(t.predict, t.loss)
    if compiled and is_alone:
        t.losses = torch.compile(losses_in_parts(t))
        t.evaluated = torch.compile(t.evaluated)


def compile_now(t: Training, micro: MicroBatch) -> None:
    """Compile for training and for evaluation, by passes that change and exchange nothing.

    Raises what the compiler raises, or Refused if the losses are not those of the plain model.
    """
    plain_losses = torch.stack([rehearsed_loss(t, micro) for _ in range(REHEARSALS)])
    set_compiled(t, True)
    compare_compiled(rehearsed_loss(t, micro), plain_losses)
    evaluate_once(t, micro)


def compare_compiled(loss: Tensor, plain_losses: Tensor) -> None:
    """Raise if a compiled loss is not like those of the plain model, which vary with dropout."""
    usual, spread = plain_losses.mean(), plain_losses.max() - plain_losses.min()
    allowed = COMPILED_TOLERANCE * usual.abs() + REHEARSALS * spread + 1e-6
    if usual.isfinite() and not (loss - usual).abs() <= allowed:
        raise Refused(f"compiled, the loss is {loss:.6g} instead of {usual:.6g}")


def evaluate_once(t: Training, micro: MicroBatch) -> None:
    """If there will be evaluations, make a pass as they do, only to compile it."""
    if not t.evaluations:
        return
    t.model.eval()
    try:
        with torch.no_grad(), t.autocast:
            t.evaluated(micro.inputs, micro.targets)
    finally:
        t.model.train()


def rehearsed_loss(t: Training, micro: MicroBatch) -> Tensor:
    """The mean loss of a micro-batch, by a pass that changes nothing on this rank alone."""
    with without_sync(t.model):
        losses = pass_without_weight(t.model, lambda one: weighted_losses(t, one)[0], micro)
    clear_gradients(t)
    return losses.detach().mean()


def pass_without_weight(
    model: nn.Module, losses_of: Callable[[MicroBatch], PerSample], micro: MicroBatch
) -> Tensor:
    """A forward and a backward pass that changes nothing but gradients. Collective."""
    with buffers_unchanged(model):
        losses = check_losses(losses_of(micro), len(micro.weights))
        losses.backward(torch.zeros_like(losses))
    return losses


# --- Replayed ------------------------------------------------------------------------------------


class Graph(Protocol):
    """Records the work of a device, and repeats it on what is then in the same memory."""

    def capture(self, work: Callable[[], Tensor | None]) -> Tensor | None: ...
    def replay(self) -> None: ...
    def record_event(self) -> timeline.DeviceEvent | None: ...
    def settle(self) -> None: ...  # wait for the device
    def no_room(self) -> str | None: ...  # why a launched step may no longer fit in memory


class CudaGraph:
    """Kernels of a GPU, recorded once and launched together."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._graph = torch.cuda.CUDAGraph()
        self._pool = torch.cuda.graph_pool_handle()
        # What a launched step takes besides what stays: the graph has as much of its own.
        peak, stays = torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device)
        self._step_bytes = peak - stays

    def capture(self, work: Callable[[], Tensor | None]) -> Tensor | None:
        """Record, but do not do, the work. Random numbers follow the generator's seed at replay."""
        stream = torch.cuda.current_stream(self.device)
        try:
            # Other threads may go on calling CUDA: data loading, for instance.
            with torch.cuda.graph(self._graph, self._pool, capture_error_mode="thread_local"):
                return work()
        except BaseException:
            self._recover(stream)
            raise

    def _recover(self, stream: torch.cuda.Stream) -> None:
        """End a failed capture, which torch still considers under way."""
        torch.cuda.set_stream(stream)
        index: int = self.device.index
        with suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(index, self._pool)
        fresh = torch.Generator(self.device)
        torch.cuda.default_generators[index].graphsafe_set_state(fresh.graphsafe_get_state())

    def replay(self) -> None:
        self._graph.replay()

    def record_event(self) -> timeline.DeviceEvent:
        """An event that is recorded again in every replay."""
        event = torch.cuda.Event(enable_timing=True, external=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def settle(self) -> None:
        torch.cuda.synchronize(self.device)

    def no_room(self) -> str | None:
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(self.device)
        if free >= self._step_bytes:
            return None
        return f"a step needs {self._step_bytes >> 20:,} MiB beside it, {free >> 20:,} MiB are free"


class GraphStep:
    """The device step as one graph. Batches of another shape do not use it."""

    def __init__(self, t: Training, batch: Batch, graph: Graph) -> None:
        self._graph = graph
        self._batch = batch._replace(micro_batches=iter(()))
        micros = list(batch.micro_batches)
        self._given: list[Any] = []  # the tensors of the last batch
        self._shape = shape_of(micros, self._given)
        if not all(isinstance(leaf, Tensor) and leaf.device == t.device for leaf in self._given):
            raise Refused("a batch has parts that are not tensors on the device")
        self._micros: list[MicroBatch] = mapped(torch.clone, micros)  # which the graph reads
        self._static: list[Tensor] = []
        shape_of(self._micros, self._static)
        self._kept = RehearsedLosses()
        self._loss: Tensor | None = None
        self._shares: dict[str, float] = {}
        self._marks: list[timeline.Mark] = []

    def __call__(self, t: Training, batch: Batch, want_loss: bool) -> Tensor | None:
        micros = list(batch.micro_batches)
        if not self._fill(micros):
            return one_step(t, batch._replace(micro_batches=iter(micros)), want_loss)
        t.checkpointer.finish_copying()
        if timeline.current is not None:
            # Copying the batch is part of it.
            timeline.current.mark_instead(timeline.FORWARD, timeline.REPLAY, (self._shares,))
        self._graph.replay()
        for hook in list(optimizer_hooks._global_optimizer_post_hooks.values()):
            hook(t.optimizer, (), {})  # a replay calls none: the probe must see the step
        # Copies, since the next replay writes to the same memory.
        for losses in self._kept:
            t.meter.own.keep(t.progress.step + 1, losses.clone())
        assert self._loss is not None
        return self._loss.clone() if want_loss else None

    def _fill(self, micros: list[MicroBatch]) -> bool:
        """Copy a batch to where the graph reads it; False if it has another shape."""
        tensors: list[Any] = []
        if shape_of(micros, tensors) != self._shape:
            return False
        for new, given, static in zip(tensors, self._given, self._static, strict=True):
            if new is not given:  # the weights are the same tensors from step to step
                static.copy_(new)
        self._given = tensors
        return True

    def launched(self, t: Training) -> Tensor | None:
        """The step that the graph records, launched kernel by kernel."""
        self._kept.clear()
        loss = t.forward_backward(
            t, self._batch._replace(micro_batches=self._micro_batches()), True
        )
        timeline.mark(timeline.OPTIMIZER)
        update(t)
        timeline.mark(timeline.OTHER)
        return loss

    def _micro_batches(self) -> Iterator[MicroBatch]:
        for micro in self._micros:
            timeline.mark(timeline.FORWARD)
            yield micro

    def rehearse(self, t: Training) -> None:
        """Capture, and compare a replay with a launched step. Changes nothing; raises why not."""
        before = [tensor.clone() for tensor in changing(t)]
        step = t.progress.step + 1
        try:
            with rehearsal(t, self._kept):
                seed_dropout(t, step)
                with without_waiting(t.device):
                    loss = self.launched(t)
                assert loss is not None
                expected = [loss.clone(), *(p.detach().clone() for p in t.parameters)]
                put_back(t, before)
                # Captured with another rate and seed, so that one that is not followed shows.
                set_rate(t.optimizer, 0.0)
                seed_dropout(t, 0)
                with marks_apart(self._graph.record_event) as marks:
                    self._loss = self._graph.capture(lambda: self.launched(t))
                put_back(t, before)
                t.schedule.set(t.optimizer, step)
                seed_dropout(t, step)
                self._graph.replay()
                self._graph.settle()
                assert self._loss is not None
                found = [self._loss, *(p.detach() for p in t.parameters)]
                compare(found, expected, before[: len(t.parameters)])
                self._shares = timeline.shares(marks)
                self._marks = marks  # every replay records their events: they must live as long
        finally:
            clear_gradients(t)
            put_back(t, before)
            t.schedule.set(t.optimizer, step)
            seed_dropout(t, step)
        del before, expected, found  # copies of the parameters
        if (why := self._graph.no_room()) is not None:
            raise Refused(why)


def shape_of(value: Any, leaves: list[Any]) -> Any:
    """What two batches that one graph can read have in common; adds what is in it to `leaves`.

    Called at every step: torch's tree_flatten takes ten times as long.
    """
    if isinstance(value, Tensor):
        leaves.append(value)
        return value.shape, value.dtype
    if isinstance(value, dict):
        return [(key, shape_of(item, leaves)) for key, item in value.items()]
    if isinstance(value, tuple | list):
        return [shape_of(item, leaves) for item in value]
    if value is not None:
        leaves.append(value)
    return type(value)


class RehearsedLosses(list[Tensor]):
    """In place of the meter's OwnLosses: the losses of each micro-batch in a rehearsed step."""

    def keep(self, step: int, losses: Tensor) -> None:
        self.append(losses.detach())


def graph_refused(t: Training) -> str | None:
    """Why the step of this training cannot be one graph, as far as is known in advance."""
    cut = t.data.cut
    if t.mesh.world.size > 1:
        return "several ranks exchange gradients"
    if isinstance(t.optimizer, HostOptimizer):
        return "optimizer.offload updates on the host"
    if t.scaler is not None:
        return "fp16 checks its gradients on the host"
    if not t.data.pads:
        return "batches differ in shape"
    if len(cut.micro_batches(0, cut.batch_size)) > MOST_MICRO_BATCHES:
        return f"a step has more than {MOST_MICRO_BATCHES} micro-batches"
    return None


def changing(t: Training) -> list[Tensor]:
    """Every tensor that a step changes: trained parameters first."""
    state = (value for of in t.optimizer.state.values() for value in of.values())
    tensors = [*t.parameters, *t.model.buffers(), *(v for v in state if isinstance(v, Tensor))]
    return [tensor.detach() for tensor in tensors]


def put_back(t: Training, before: list[Tensor]) -> None:
    for tensor, old in zip(changing(t), before, strict=True):
        tensor.copy_(old)


def compare(found: list[Tensor], expected: list[Tensor], before: list[Tensor]) -> None:
    """Raise if a replayed step is not the launched one. The loss comes first, then parameters."""
    loss, replayed = float(expected[0]), float(found[0])
    if not abs(replayed - loss) <= LOSS_TOLERANCE * abs(loss) + 1e-6:
        raise Refused(f"replayed, the loss is {replayed:.6g} instead of {loss:.6g}")
    update, error = distance(expected[1:], before), distance(expected[1:], found[1:])
    if not error <= UPDATE_TOLERANCE * update:
        raise Refused(f"replayed, the update differs by {error / max(update, 1e-30):.0%}")


def distance(tensors: list[Tensor], others: list[Tensor]) -> float:
    norms = [(a - b).float().norm() for a, b in zip(tensors, others, strict=True)]
    return float(torch.stack(norms).norm())


@contextmanager
def rehearsal(t: Training, kept: RehearsedLosses) -> Iterator[None]:
    """A context whose steps are not steps of the training: no hook and no meter sees them."""
    hooks: tuple[dict[int, Any], ...] = (
        optimizer_hooks._global_optimizer_pre_hooks,
        optimizer_hooks._global_optimizer_post_hooks,
    )
    kept_hooks = [dict(of) for of in hooks]
    own = t.meter.own
    t.meter.own = kept  # type: ignore[assignment]
    for of in hooks:
        of.clear()
    t.meter.log.pause(True)  # nothing may ask the device anything during a capture
    try:
        yield
    finally:
        t.meter.log.pause(False)
        t.meter.own = own
        for of, before in zip(hooks, kept_hooks, strict=True):
            of.update(before)


@contextmanager
def marks_apart(record_event: Callable[[], Any]) -> Iterator[list[timeline.Mark]]:
    """A context that collects its marks, with events of another kind; the timeline forgets them."""
    marks: list[timeline.Mark] = []
    current = timeline.current
    if current is None:
        yield marks
        return
    number, before = len(current.marks), current.record_event
    if before is not None:
        current.record_event = record_event
    try:
        yield marks
    finally:
        current.record_event = before
        marks += current.marks[number:]
        del current.marks[number:]


@contextmanager
def without_waiting(device: torch.device) -> Iterator[None]:
    """A context that raises where the host waits for a GPU, which a capture cannot survive."""
    if device.type != "cuda":
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this mode does not see every wait
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
