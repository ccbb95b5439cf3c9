"""One step of one rank on tensors without data, whose exchanges reach nobody."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.parallel.distributed as ddp
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining import stage as pipelining_stage
from torch.distributed.pipelining.schedules import _PipelineSchedule
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import _pytree as pytree
from torch.utils import checkpoint
from torch.utils.data import Dataset
from torch.utils.flop_counter import FlopCounterMode

from allranks.job.job import Job
from allranks.layout import Layout
from allranks.run.folder import RunDir
from allranks.tasks import Task
from allranks.train import build, parallelize
from allranks.train.counted import (
    Exchanges,
    Held,
    LiveTensors,
    SavedTensors,
    Sent,
    bytes_of,
    gathered,
    parts_of,
    state_of,
)
from allranks.train.data import Batch, MicroBatch, Progress, TrainingData
from allranks.train.fast_step import model_and_loss
from allranks.train.loop import Training, clear_gradients, forward_backward, update
from allranks.train.mesh import Mesh, Ranks
from allranks.train.optim import Scaler, allocate_state, build_optimizer
from allranks.train.pipeline import Passed, Pipeline, SeenStage
from allranks.train.stages import blocks_and_stages, blocks_of, divide, kind_of_block

DEVICE = torch.device("cpu")
divide_gradients = dist._compute_bucket_assignment_by_size
DDP_BUCKET_BYTES = 25 << 20  # what DDP sends at once, unless it is told otherwise
# What autocast computes in float32 on a GPU, but on a CPU in the type of what it is given.
IN_FLOAT32 = {
    *("layer_norm", "group_norm", "rms_norm", "softmax", "log_softmax", "logsumexp", "softplus"),
    *("exp", "log", "pow", "rsqrt", "reciprocal", "sum", "cumsum", "prod", "cumprod", "norm"),
}


class OneFakeMode(FakeTensorMode):
    """Tensors of two modes cannot be used together: those of a copied model have the same mode."""

    def __deepcopy__(self, memo: dict[int, Any]) -> OneFakeMode:
        return self


WITHOUT_DATA = OneFakeMode(allow_non_fake_inputs=True)  # such as a task's class weights


@dataclass(frozen=True, slots=True)
class Stages:
    """How a pipeline divides the model, which all ranks find alike."""

    sizes: list[int]  # blocks of each
    passed: dict[int, Passed]  # what each gets
    has_weights: bool  # whether the task's loss weights its samples
    kinds: list[Any]  # of the places along pp: those of one kind hold and send the same


@dataclass(slots=True)
class Tried:
    """What one rank of a pipeline stage holds and sent."""

    held: Held
    kept: int  # for the backward pass, of a micro-batch
    # The peak over parameters, buffers and optimizer state; in a pipeline, of one micro-batch.
    most: int
    given: int  # of this, the micro-batch itself
    adds: int  # what another micro-batch at once adds to it
    in_flight: list[float]  # micro-batches that each place along pp keeps at once
    sent: Counter[Sent]
    batch: dict[str, Any]
    stages: Stages | None


def precision_of(job: Job) -> str:
    """The precision of the computation, as far as it is known here."""
    if job.precision == "auto" and torch.cuda.is_available():
        return parallelize.resolve_precision("auto", torch.device("cuda"))
    return {"auto": "fp32", "tf32": "fp32"}.get(job.precision, job.precision)


def try_places(job: Job, task: Task, samples: Dataset[Any]) -> list[Tried]:
    """Try one step of a rank at each place of the pipeline; of places of one kind, at the first."""
    tried: list[Tried] = []
    for pp in range(job.layout.pp):
        stages = tried[0].stages if tried else None
        first = stages.kinds.index(stages.kinds[pp]) if stages else pp
        tried.append(tried[first] if first < pp else try_place(job, task, samples, pp, stages))
    return tried


def try_place(
    job: Job, task: Task, samples: Dataset[Any], pp: int, stages: Stages | None = None
) -> Tried:
    """Try one step of the first rank at this place of the pipeline. `stages`: if known.

    All micro-batches of a pipeline are alike: what they add is known from two of them.
    """
    layout = job.layout
    rank = next(r for r in range(layout.ranks) if layout.place_of(r)["pp"] == pp)
    if layout.pp == 1:
        return try_rank(job, task, samples, rank)
    cut = build.training_data(
        as_rank(layout, rank), Mesh(layout=layout), job, task, samples, DEVICE
    ).cut
    cut = replace(cut, parts=layout.data_ranks)
    number = cut.num_of_whole
    first = try_rank(with_micro_batches(job, cut.largest, 1), task, samples, rank, number, stages)
    if number > 1:
        two = with_micro_batches(job, cut.largest, 2)
        second = try_rank(two, task, samples, rank, stages=first.stages)
        second.sent.subtract(first.sent)
        for sent, count in second.sent.items():
            first.sent[sent] += (number - 1) * count
        assert first.stages is not None
        # Micro-batches, and room to receive inputs and gradients, are there for all of them. With
        # several stages on a rank, what it sends stays until the end of the step, too.
        received = received_bytes(first.stages, pp, layout.pp)
        passed = received if len(first.stages.sizes) == layout.pp else 2 * received
        first.most += (number - 1) * (first.given + passed)
    first.batch |= {"batch_size": cut.batch_size, "micro_batches": number}
    return first


def received_bytes(stages: Stages, pp: int, num_ranks: int) -> int:
    """What this place of a pipeline gets for a micro-batch: inputs, and gradients of outputs."""
    numbers = range(pp, len(stages.sizes), num_ranks)
    sizes = {number: passed.nbytes for number, passed in stages.passed.items()}
    return sum(sizes.get(at, 0) for number in numbers for at in (number, number + 1))


def with_micro_batches(job: Job, size: int, number: int) -> Job:
    """The job with so many micro-batches in a batch, each of this size on each rank."""
    pipeline = job.pipeline.model_copy(update={"micro_batches": number})
    batch = {"batch_size": size * number * job.layout.data_ranks, "batch_size_per_rank": None}
    return job.model_copy(update={"pipeline": pipeline, "micro_batch_size": None, **batch})


def try_rank(
    job: Job,
    task: Task,
    samples: Dataset[Any],
    rank: int,
    in_schedule: int = 1,
    stages: Stages | None = None,
) -> Tried:
    """One step of a rank; `in_schedule`: how many micro-batches its pipeline really works on."""
    layout = job.layout
    dist.init_process_group("fake", rank=rank, world_size=layout.ranks, store=FakeStore())
    try:
        mesh = Mesh.of(layout, DEVICE)
        data = build.training_data(as_rank(layout, rank), mesh, job, task, samples, DEVICE)
        batch = next(data.batches(Progress()))
        micro_batches = [*batch.micro_batches]
        with WITHOUT_DATA, AsOnGpu(), LiveTensors() as live, Exchanges(layout) as exchanges:
            made = pytree.tree_map_only(Tensor, WITHOUT_DATA.from_tensor, micro_batches)
            t, pipeline, stages = training(job, task, mesh, data, made[0], stages)
            held = Held(
                parameters=parts_of(t.model.parameters()),
                buffers=parts_of(t.model.buffers()),
                optimizer=parts_of(state_of(t.optimizer)),
            )
            exchanges.sent = Counter()
            saved = SavedTensors(t.model)
            given, left = bytes_of(made), kept_by_stages(pipeline, saved)
            live.start()
            with saved.counted():
                if pipeline is None:
                    batch = repeated(batch, made, exchanges)
                else:
                    batch = batch._replace(micro_batches=iter(made))
                t.forward_backward(t, batch, False)
            kept, left = saved.most, dict(left)
            held.gradients = parts_of(gradients_of(t))
            most, at_once = live.added(gradients_of(t)), [1.0]
            if pipeline is not None and stages is not None and in_schedule > 1:
                sent, exchanges.sent = exchanges.sent, None
                work_again(t, batch, made, live, is_cut=bool(gathered(held.gradients)))
                most, exchanges.sent = live.added(gradients_of(t)), sent
                at_once = in_flight(pipeline, in_schedule, stages.passed, [*left.values()])
            exchanges.when, exchanges.times = "update", 1
            update(t)
        counts: dict[str, Any] = {
            "batch_size": data.cut.batch_size,
            "micro_batch_size": data.cut.largest,
            "micro_batches": len(micro_batches),
            "stages": pipeline.sizes if pipeline else None,
        }
        adds, most = sum(left.values()), most + given
        return Tried(held, kept, most, given, adds, at_once, exchanges.sent, counts, stages)
    finally:
        dist.destroy_process_group()
        _clear_sharding_prop_cache()  # it remembers this rank's groups


def as_rank(layout: Layout, rank: int) -> build.Rank:
    return build.Rank(
        rank=rank,
        world_size=layout.ranks,
        local_rank=rank % layout.gpus,
        local_world_size=layout.gpus,
        run=RunDir(Path()),
        attempt=0,
        layout=layout,
        checkpoint="",
    )


def training(
    job: Job,
    task: Task,
    mesh: Mesh,
    data: TrainingData,
    example: MicroBatch,
    stages: Stages | None,
) -> tuple[Training, Pipeline | None, Stages | None]:
    """The parts of a rank's training that a step needs, as build() makes them, and its pipeline."""
    precision = precision_of(job)
    autocast = parallelize.autocast(precision, DEVICE)  # type: ignore[arg-type]
    data.example = lambda progress: example  # type: ignore[method-assign]  # without data
    with Division(job, task, example, autocast, stages).used() as division:
        model, pipeline = build.divided_model(RunDir(Path()), job, mesh, task, data, autocast, None)
    parameters = [p for p in model.parameters() if p.requires_grad]
    # What it holds is counted, wherever that is.
    optimizer = build_optimizer(job.optimizer.model_copy(update={"offload": False}), parameters)
    allocate_state(optimizer)
    nothing = SimpleNamespace(keep=lambda *args: None, finish_copying=lambda: None)
    t = SimpleNamespace(
        task=task,
        mesh=mesh,
        together=mesh.data,
        compression=None,
        model=model,
        loss=task.loss,
        losses=model_and_loss(model, task.loss),
        parameters=parameters,
        copies=[build.copies_of(parameter, mesh, pipeline) for parameter in parameters],
        norms=parallelize.batch_norms(model),
        optimizer=optimizer,
        scaler=Scaler(DEVICE, mesh.replica) if precision == "fp16" else None,
        autocast=autocast,
        max_norm=job.optimizer.clip,
        data=data,
        forward_backward=pipeline.forward_backward if pipeline else forward_backward,
        meter=SimpleNamespace(own=nothing),
        checkpointer=nothing,
        device=DEVICE,
        progress=Progress(),
    )
    if pipeline and division.stages:
        pipeline._schedule = pipeline._make_schedule(division.stages.passed)
        pipeline._has_weights = division.stages.has_weights
    return cast(Training, t), pipeline, division.stages


def repeated(batch: Batch, made: list[MicroBatch], exchanges: Exchanges) -> Batch:
    """The batch with two micro-batches at most: the first stands for all but the last.

    Only the last is different: it ends the accumulation.
    """

    def micro_batches() -> Iterator[MicroBatch]:
        exchanges.times = max(1, len(made) - 1)
        yield from made[:-1][:1]
        exchanges.times = 1
        yield made[-1]

    return batch._replace(micro_batches=micro_batches(), num_micro_batches=min(2, len(made)))


# What ranks find out by running, and is predicted here.


@dataclass(slots=True)
class Division:
    """How a model is divided among stages, and its gradients into the pieces that DDP sends."""

    job: Job
    task: Task
    micro: MicroBatch
    autocast: AbstractContextManager[None]
    stages: Stages | None  # None until they are known
    ready: list[Tensor] = field(default_factory=list)  # parameters, in the order of gradients

    @contextmanager
    def used(self) -> Iterator[Division]:
        """A context in which a model that is built is divided like this."""
        replaced: tuple[tuple[Any, str, Any], ...] = (
            (self.task, "model", self._model),
            (build, "divide_blocks", self._divide_blocks),
            (dist, "_compute_bucket_assignment_by_size", self._divide_gradients),
        )
        before = [getattr(owner, name) for owner, name, _ in replaced]
        for owner, name, ours in replaced:
            setattr(owner, name, ours)
        try:
            yield self
        finally:
            for (owner, name, _), theirs in zip(replaced, before, strict=True):
                setattr(owner, name, theirs)

    def _model(self) -> nn.Module:
        model = type(self.task).model(self.task)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self.ready.append)
        return model

    def _divide_blocks(
        self, job: Job, mesh: Mesh, task: Task, model: nn.Module, *args: Any
    ) -> list[int]:
        """Blocks of each stage, by their floating-point operations in place of their time."""
        if self.stages is not None:
            return self.stages.sizes
        blocks, num_stages = blocks_and_stages(job, mesh.layout, task, model)
        parallelize.synchronise_batch_norm(model, Ranks())
        costs, peaks, outputs = [], [], []
        values = self.micro.inputs
        with torch.no_grad(), self.autocast:
            for block in blocks:
                with LiveTensors() as live, FlopCounterMode(display=False) as counter:
                    values = block(values)
                peaks.append(live.most)
                # Embeddings have no operations, and take time all the same.
                num_bytes = sum(x.nbytes for x in pytree.tree_leaves(values))
                costs.append(counter.get_total_flops() + num_bytes)
                outputs.append(values)
            has_weights = isinstance(task.loss(values, self.micro.targets), tuple)
            if mesh.layout.tp > 1:  # each rank may have a part of them
                model = type(task).model(task)
                parallelize.tensor_parallel(model, mesh, build.plan_of(task, model, mesh))
                values = self.micro.inputs
                outputs = [values := block(values) for block in blocks_of(task, model)]
        sizes = divide(costs, num_stages)
        got = (outputs[end - 1] for end in itertools.accumulate(sizes[:-1]))
        passed = {
            at: Passed.of(x if isinstance(x, tuple) else (x,)) for at, x in enumerate(got, start=1)
        }
        kinds = kinds_of_places(blocks, sizes, passed, mesh.layout.pp, peaks)
        self.stages = Stages(sizes, passed, has_weights, kinds)
        return sizes

    def _divide_gradients(
        self, tensors: list[Tensor], *args: Any
    ) -> tuple[list[list[int]], list[int]]:
        """As DDP does after its first step: in the order in which gradients were ready."""
        numbers = {id(tensor): number for number, tensor in enumerate(tensors)}
        ready = dict.fromkeys(id(tensor) for tensor in self.ready)
        order = [numbers[key] for key in ready if key in numbers]
        sizes = [dist._DEFAULT_FIRST_BUCKET_BYTES, DDP_BUCKET_BYTES]
        ordered = [tensors[number] for number in order]
        pieces, limits = divide_gradients(ordered, sizes, [False] * len(order), order)
        return pieces[::-1], limits[::-1]  # DDP turns them around


def kinds_of_places(
    blocks: Sequence[nn.Module],
    sizes: Sequence[int],
    passed: Mapping[int, Passed],
    num_ranks: int,
    peaks: Sequence[int],
) -> list[Any]:
    """What decides what a rank at each place along pp holds and sends.

    Places are of one kind where they have blocks of the same kinds, which get and return the same,
    with the same peaks in between.
    The first and the last stage, and those that share weights with others, are like no other.
    """
    ends = [*itertools.accumulate(sizes, initial=0)]
    of_stages = [blocks[start:stop] for start, stop in itertools.pairwise(ends)]
    kinds_of = [[*map(kind_of_block, of)] for of in of_stages]
    peaks_of = [peaks[start:stop] for start, stop in itertools.pairwise(ends)]
    held = Counter(id(p) for of in of_stages for p in {*nn.ModuleList(of).parameters()})
    kinds: list[Any] = []
    for place in range(num_ranks):
        numbers = range(place, len(sizes), num_ranks)
        is_like_no_other = any(
            number in (0, len(sizes) - 1)
            or any(held[id(p)] > 1 for p in nn.ModuleList(of_stages[number]).parameters())
            for number in numbers
        )
        alike = [
            (passed[number], passed[number + 1], peaks_of[number], kinds_of[number])
            for number in (() if is_like_no_other else numbers)
        ]
        kinds.append(place if is_like_no_other else alike)
    return kinds


def work_again(
    t: Training, batch: Batch, made: list[MicroBatch], live: LiveTensors, *, is_cut: bool
) -> None:
    """Work on a later micro-batch of a pipeline, which finds gradients, and look for its peak.

    `is_cut`: by FSDP, which keeps gradients whole until the last micro-batch.
    """
    if is_cut:
        clear_gradients(t)
        with without_last():
            t.forward_backward(t, batch._replace(micro_batches=iter(made)), False)
    live.most = live.now
    t.forward_backward(t, batch._replace(micro_batches=iter(made)), False)


def kept_by_stages(pipeline: Pipeline | None, saved: SavedTensors) -> dict[int, int]:
    """The bytes that each stage's last forward pass will have left: activations, and its output."""
    left: dict[int, int] = {}

    def begin(stage: Any, inputs: Any) -> None:
        left[stage.number] = -saved.now

    def end(stage: Any, inputs: Any, outputs: Any) -> None:
        left[stage.number] += saved.now + (0 if stage.is_last else bytes_of(outputs))

    for stage in pipeline.stages if pipeline else ():
        stage.register_forward_pre_hook(begin)
        stage.register_forward_hook(end)
    return left


def gradients_of(t: Training) -> list[Tensor]:
    return [p.grad for p in t.parameters if p.grad is not None]


@contextmanager
def without_last() -> Iterator[None]:
    """A context in which no micro-batch of a pipeline is the last."""
    backward = SeenStage.backward_one_chunk

    def one_of_many(*args: Any, **kwargs: Any) -> None:
        backward(*args, **{**kwargs, "last_backward": False})

    SeenStage.backward_one_chunk = one_of_many  # type: ignore[method-assign]
    try:
        yield
    finally:
        SeenStage.backward_one_chunk = backward  # type: ignore[method-assign]


def in_flight(
    pipeline: Pipeline, number: int, passed: dict[int, Passed], left: Sequence[int]
) -> list[float]:
    """The number of micro-batches whose activations each place along pp keeps at once.

    `left`: what each of a rank's stages leaves of one, if it has several.
    """
    pipeline._ticks = torch.zeros(number)
    schedule, size = pipeline._make_schedule(passed), pipeline.ranks.size
    if isinstance(schedule, ScheduleGPipe):
        return [number] * size
    if isinstance(schedule, Schedule1F1B):
        return [min(number, size - place) for place in range(size)]
    changes = {"FORWARD": 1, "FULL_BACKWARD": -1, "BACKWARD_WEIGHT": -1}
    last = len(pipeline.sizes) - 1

    def change(action: Any) -> int:
        kind, stage = action.computation_type.name, action.stage_index
        # A loss, which stays, keeps the graph of a backward pass that is cut in two.
        is_kept = kind == "BACKWARD_WEIGHT" and stage == last
        return 0 if is_kept else changes.get(kind, 0) * left[stage // size]

    orders = (filter(None, schedule.pipeline_order[place]) for place in range(size))
    return [max(itertools.accumulate(map(change, of))) / max(1, sum(left)) for of in orders]


class AsOnGpu(TorchFunctionMode):
    """Keeps for the backward pass what autocast keeps on a GPU, on a CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in IN_FLOAT32 and torch.is_autocast_enabled(DEVICE.type):
            args, kwargs = pytree.tree_map_only(Tensor, in_float32, (args, kwargs))
        return func(*args, **(kwargs or {}))


def in_float32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


# What torch cannot do on tensors without data.


def with_new_tensors(
    module: nn.Module, change: Callable[[Tensor], Tensor], recurse: bool = True
) -> nn.Module:
    """In place of nn.Module._apply, which would change the tensors of parameters in place."""
    made: dict[nn.Parameter, nn.Parameter] = {}  # those that modules share stay shared
    for one in module.modules() if recurse else [module]:
        for name, parameter in one._parameters.items():
            if parameter is not None and parameter not in made:
                with torch.no_grad():
                    changed = change(parameter)
                is_same = changed.dtype == parameter.dtype and changed.device == parameter.device
                new = parameter if is_same else nn.Parameter(changed, parameter.requires_grad)
                made[parameter] = new
            if parameter is not None:
                one._parameters[name] = made[parameter]
        for name, buffer in one._buffers.items():
            if buffer is not None:
                one._buffers[name] = change(buffer)
    return module


@cache
def imitate() -> None:
    """Make this process, which does nothing else, able to try ranks."""
    recompute = checkpoint._checkpoint_without_reentrant_generator
    among_stages, cut = Mesh.among_stages, _fsdp_param._chunk_with_empty
    known: dict[tuple[Any, ...], list[Tensor]] = {}

    def recompute_as_on_gpu(function: Any, *args: Any, **kwargs: Any) -> Any:
        def again(*inputs: Any, **more: Any) -> Any:
            with AsOnGpu():  # autograd leaves all such modes
                return function(*inputs, **more)

        return recompute(again, *args, **kwargs)

    def with_numbers(mesh: Mesh, places: Sequence[int]) -> Ranks:
        with unset_fake_temporarily():
            return among_stages(mesh, places)

    def know_what_is_sent(schedule: Any, stages: Sequence[Any], *args: Any) -> None:
        for stage in stages:  # torch 2.13 would ask the other ranks
            stage._inference_mode = pipelining_stage.InferenceMode.STATIC

    def cut_once(tensor: Tensor, num_chunks: int, dim: int) -> list[Tensor]:
        # For all parameters of a shape: to cut each of them would take most of the time.
        key = (tensor.shape, tensor.dtype, num_chunks, dim)
        return known.get(key) or known.setdefault(key, cut(tensor, num_chunks, dim))

    for owner, name, other in (
        (nn.Module, "_apply", with_new_tensors),
        (checkpoint, "_checkpoint_without_reentrant_generator", recompute_as_on_gpu),
        (ddp, "_verify_param_shape_across_processes", lambda *args, **kwargs: None),
        (Mesh, "among_stages", with_numbers),
        (PipelineStage, "_get_init_p2p_neighbors_ops", lambda self: []),
        (_PipelineSchedule, "_warmup_p2p", know_what_is_sent),
        (_fsdp_param, "_chunk_with_empty", cut_once),
    ):
        setattr(owner, name, other)
