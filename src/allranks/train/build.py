"""Builds the parts of a rank's training from its environment and its job."""

from __future__ import annotations

import dataclasses
import importlib
import os
import random
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from pydantic import TypeAdapter, ValidationError
from torch import nn
from torch.distributed import distributed_c10d
from torch.utils.data import Dataset

from allranks.errors import AllranksError
from allranks.job.job import Job
from allranks.job.stages import num_micro_batches
from allranks.job.task_source import find_task
from allranks.layout import Layout
from allranks.machine.allotted import cpus_allotted
from allranks.machine.data_copies import local_copy, own_folder
from allranks.machine.gpus import gpu_link, local_gpus
from allranks.run import claims, commits
from allranks.run.events import EventLog
from allranks.run.folder import RunDir, no_readable_checkpoint
from allranks.tasks import Task
from allranks.train import checkpoint, initial, parallelize
from allranks.train.agreement import Pulse
from allranks.train.choose_step import COMPILED, Rules, device_name, measured_step
from allranks.train.compile_ahead import CompileCost
from allranks.train.compress import AveragedWeights, CompressedGradients, Compression
from allranks.train.data import Cut, EvaluationData, MicroBatch, Progress, TrainingData, mix
from allranks.train.fast_step import evaluate_once, pass_without_weight, set_compiled
from allranks.train.loop import (
    SaveEvery,
    Training,
    clear_gradients,
    forward_backward,
    one_step,
    weighted_losses,
)
from allranks.train.mesh import Mesh, Ranks
from allranks.train.meter import Meter
from allranks.train.micro_batches import MicroBatches
from allranks.train.optim import (
    Scaler,
    Schedule,
    allocate_state,
    build_optimizer,
    copies_in_replica,
    rate_scale,
)
from allranks.train.pipeline import Pipeline
from allranks.train.stages import divide_blocks

VECTOR_MATH = (
    *(torch.acos, torch.asin, torch.atan, torch.cos, torch.sin, torch.tan, torch.cosh, torch.sinh),
    *(torch.tanh, torch.erf, torch.erfc, torch.erfinv, torch.exp, torch.exp2, torch.expm1),
    *(torch.log, torch.log10, torch.log1p, torch.log2, torch.sqrt, torch.rsqrt, torch.trunc),
)


@dataclass(frozen=True, slots=True)
class Rank:
    """Which rank of which run this process is."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    run: RunDir
    attempt: int
    layout: Layout
    checkpoint: str  # name of the intact checkpoint to resume from; empty for none

    @classmethod
    def from_environment(cls) -> Rank:
        env = os.environ
        return cls(
            rank=int(env["RANK"]),
            world_size=int(env["WORLD_SIZE"]),
            local_rank=int(env["LOCAL_RANK"]),
            local_world_size=int(env["LOCAL_WORLD_SIZE"]),
            run=RunDir(Path(env["ALLRANKS_RUN_DIR"])),
            attempt=int(env["ALLRANKS_ATTEMPT"]),
            layout=Layout.parse(env["ALLRANKS_LAYOUT"]),
            checkpoint=env.get("ALLRANKS_CHECKPOINT", ""),
        )


def choose_device(me: Rank) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", me.local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def join_world(me: Rank, job: Job, device: torch.device) -> None:
    """Create the process group. Collective: returns when every rank has joined."""
    timeout = timedelta(seconds=job.timeout.seconds)
    # A mesh has no way to say how long the groups wait that it makes.
    vars(distributed_c10d).update(default_pg_timeout=timeout, default_pg_nccl_timeout=timeout)
    dist.init_process_group(
        backend="nccl" if device.type == "cuda" else "gloo",
        timeout=timeout,
        device_id=device if device.type == "cuda" else None,
    )


def gloo_group() -> dist.ProcessGroup:
    """A group of all ranks for messages between hosts. Every rank must call it."""
    group: dist.ProcessGroup = dist.new_group(backend="gloo")
    return group


def build(
    me: Rank,
    job: Job,
    device: torch.device,
    log: EventLog,
    *,
    rules: Rules | None = None,
    micro_batches: MicroBatches | None = None,
) -> Training:
    """Build everything the loop needs, restored from a checkpoint if there is one. Collective."""
    micro_batches = micro_batches or MicroBatches(me, job)
    mesh = Mesh.of(me.layout, device)
    task = load_staged_task(job)
    datasets = task.datasets()
    data = training_data(me, mesh, job, task, datasets["train"], device)
    precision = parallelize.resolve_precision(job.precision, device)
    micro_batches.begin(data, precision)  # collective
    autocast = parallelize.autocast(precision, device)
    commit = chosen_checkpoint(me)
    model, pipeline = divided_model(me.run, job, mesh, task, data, autocast, commit)
    parameters = [p for p in model.parameters() if p.requires_grad]
    in_graph = rules is not None and device.type == "cuda" and me.world_size == 1
    optimizer = build_optimizer(job.optimizer, parameters, in_graph=in_graph)
    scaler = Scaler(device, mesh.replica) if precision == "fp16" else None
    allocate_state(optimizer)
    compression = compression_of(job, parallelize.plain(model), optimizer, mesh.data)
    progress, notes = restore(commit, parallelize.plain(model), optimizer, scaler, compression)
    last_step = last_step_of(job, data, progress)
    training = Training(
        task=task,
        mesh=mesh,
        together=trained_together(job, mesh),
        compression=compression,
        model=model,
        loss=task.loss,
        parameters=parameters,
        copies=[copies_of(parameter, mesh, pipeline) for parameter in parameters],
        norms=parallelize.batch_norms(model),
        optimizer=optimizer,
        schedule=Schedule(job.optimizer, num_steps=last_step, scale=rate_scale(job, mesh.data)),
        scaler=scaler,
        autocast=autocast,
        max_norm=job.optimizer.clip,
        data=data,
        evaluations=evaluations(datasets, data),
        meter=Meter(log, mesh, log_every=job.log_every, last_step=last_step),
        pulse=Pulse(gloo_group() if me.world_size > 1 else None),
        checkpointer=checkpointer_of(me, job, model, optimizer, compression, progress, log),
        save_every=save_every(job),
        predict=pipeline.outputs if pipeline else parallelize.plain(model),
        forward_backward=pipeline.forward_backward if pipeline else forward_backward,
        step=one_step if rules is None else measured_step(me, job, rules, device, notes),
        device=device,
        seed=job.seed,
        last_step=last_step,
        notes=notes_of(me, job, pipeline),
        progress=progress,
        metrics=notes.get("metrics", []),
    )
    return begun(training, micro_batches, datasets, precision, pipeline)  # collective


def begun(
    t: Training,
    micro_batches: MicroBatches,
    datasets: Mapping[str, Dataset[Any]],
    precision: str,
    pipeline: Pipeline | None,
) -> Training:
    """The training, ready for its first step, once it is said what it will be. Collective."""
    me, job = micro_batches.me, micro_batches.job
    if micro_batches.choose(t, pipeline):  # collective
        t.evaluations = evaluations(datasets, t.data)
    warn_of_small_norms(me, t)
    compiled = should_compile(job, pipeline)
    t.meter.log.write_past("start", **describe(me, t, precision, compiled, pipeline))
    micro_batches.tell(t)
    cost = CompileCost.of(job, me.layout, t.device) if compiled else None
    make_first_passes(t, pipeline, cost)
    if t.compression is not None:
        t.compression.begin(t.model, t.progress.step, t.schedule)
    return t


def make_first_passes(t: Training, pipeline: Pipeline | None, cost: CompileCost | None) -> None:
    """Make passes that change nothing; with a cost to note, compile in them. Collective."""
    began = time.perf_counter()
    with nullcontext() if cost is None else cost.noted():
        set_compiled(t, cost is not None, pipeline)
        warm_up(t, pipeline)
        if cost is not None and not pipeline:
            evaluate_once(t, t.data.example(t.progress))
    lost = round(time.perf_counter() - began, 6)
    if cost is not None and t.mesh.world.rank == 0:
        t.meter.log.write("compile", step=t.progress.step + 1, form=COMPILED, lost=lost)


def checkpointer_of(
    me: Rank,
    job: Job,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    compression: Compression | None,
    progress: Progress,
    log: EventLog,
) -> checkpoint.Checkpointer:
    """What saves the training. Collective."""
    return checkpoint.Checkpointer(
        me.run.checkpoints,
        parallelize.plain(model),
        optimizer,
        keep=job.checkpoint.keep,
        group=gloo_group(),
        log=log,
        saved_step=progress.step or -1,
        divide=None if compression is None else compression.divide,
    )


def divided_model(
    run: RunDir,
    job: Job,
    mesh: Mesh,
    task: Task,
    data: TrainingData,
    autocast: AbstractContextManager[None],
    commit: commits.Commit | None,
) -> tuple[nn.Module, Pipeline | None]:
    """The task's model, with the same weights on every layout, ready to be called. Collective.

    With a pipeline, what this rank has of it: the pipeline calls it.
    """

    def make() -> nn.Module:
        seed_everything(job.seed)
        return task.model()

    model, recording = initial.fresh_model(make, job.seed)
    if any(parameter.dtype == torch.float64 for parameter in model.parameters()):
        data.dtype = torch.float64
    pipeline = None
    if mesh.layout.pp > 1:
        sizes = divide_blocks(job, mesh, task, model, data, autocast, run, commit)
        schedule, number = job.pipeline.schedule, data.cut.num_of_whole
        pipeline = Pipeline(task, sizes, mesh, data.device, schedule, number)

    def one_pass(model: nn.Module) -> None:
        def losses_of(micro: MicroBatch) -> Any:
            with autocast:
                return task.loss(model(micro.inputs), micro.targets)

        pass_without_weight(model, losses_of, data.example(Progress()))

    model = parallelize.parallelize(
        model,
        replace(mesh, data=trained_together(job, mesh)),
        data.device,
        recording=recording,
        plan=plan_of(task, model, mesh),
        activation_checkpointing=job.activation_checkpointing,
        cut=pipeline.cut if pipeline else None,
        one_pass=one_pass,
    )
    if pipeline:
        pipeline.tie(model)  # collective
    return model, pipeline


def trained_together(job: Job, mesh: Mesh) -> Ranks:
    """The ranks whose gradients are averaged in every step."""
    averages_weights = job.compress is not None and job.compress.averages_weights
    return Ranks() if averages_weights else mesh.data


def copies_of(parameter: nn.Parameter, mesh: Mesh, pipeline: Pipeline | None) -> int:
    """How many ranks of a replica hold the same part of a parameter."""
    return copies_in_replica(parameter, mesh.layout) * (
        pipeline.copies(parameter) if pipeline else 1
    )


def notes_of(me: Rank, job: Job, pipeline: Pipeline | None) -> dict[str, Any]:
    """What every checkpoint says besides the progress."""
    notes = {"layout": str(me.layout), "seed": job.seed, "threads": torch.get_num_threads()}
    return {**notes, "stages": pipeline.sizes} if pipeline else notes


def num_parameters(model: nn.Module, pipeline: Pipeline | None) -> int:
    """Of the whole model."""
    return pipeline.num_parameters if pipeline else sum(p.numel() for p in model.parameters())


def plan_of(task: Task, model: nn.Module, mesh: Mesh) -> Mapping[str, Any] | None:
    """How tensor parallelism cuts the model's matrices, if the task says so and the layout asks."""
    task.tp = mesh.layout.tp
    return task.tensor_parallel_plan(model) if task.tp > 1 else None


def load_staged_task(job: Job) -> Task:
    """The job's task, with its data on this node's own disk if the job asks for it; seeds."""
    task = load_task(job)
    if job.data.stage == "local":
        copies = own_folder()
        task.stage(lambda path: local_copy(path, copies))
    seed_everything(job.seed)
    return task


def load_task(job: Job) -> Task:
    """Import the task's class and construct it with the job's options."""
    assert job.task is not None
    module_name, _, class_name = find_task(job.task).path.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    cls = getattr(importlib.import_module(module_name), class_name, None)
    if not (isinstance(cls, type) and issubclass(cls, Task)):
        raise AllranksError(
            f"task: {job.task} is not a subclass of allranks.tasks.Task",
            fix=f"write `class {class_name}(Task):` in {module_name}",
        )
    return _construct(cls, job.options)


def _construct(cls: type[Task], options: dict[str, Any]) -> Task:
    try:
        if dataclasses.is_dataclass(cls):
            return TypeAdapter(cls).validate_python(options)
        return cls(**options)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(str(part) for part in first["loc"])
        raise AllranksError(
            f"options.{key}: {first['msg']}, got {first.get('input')!r}",
            fix=f"correct options.{key} in the job file; {cls.__name__} takes "
            + ", ".join(field.name for field in dataclasses.fields(cls)),  # type: ignore[arg-type]
        ) from None
    except TypeError as error:
        raise AllranksError(
            f"options: {error}", fix="correct the options in the job file"
        ) from None


def settle_vector_math() -> None:
    """Make MKL initialise each of its vector functions now, from a single thread.

    If two threads make the first call at the same time, one may get a result with only four correct
    digits: seen in sqrt, in about one process of forty on a busy machine (torch 2.13). Two runs
    would then not see the same data.
    """
    for dtype in (torch.float32, torch.float64):
        one = torch.ones(1, dtype=dtype)
        for function in VECTOR_MATH:
            function(one)


def seed_everything(seed: int) -> None:
    """Seed the generators that a task's data set and model may use, equally on every rank."""
    settle_vector_math()
    torch.manual_seed(mix(seed, 0))
    random.seed(seed)
    np.random.seed(seed)


def training_data(
    me: Rank, mesh: Mesh, job: Job, task: Task, dataset: Dataset[Any], device: torch.device
) -> TrainingData:
    batch_size = job.batch_size or (job.batch_size_per_rank or 0) * mesh.data.size
    # No batch is larger than an epoch: it would be padded up to its size.
    batch_size = min(batch_size, max(1, len(dataset)))  # type: ignore[arg-type]  # it has a length
    return TrainingData(
        dataset,
        task,
        Cut(
            batch_size,
            mesh.data.rank,
            mesh.data.size,
            None if job.micro_batch_size == "auto" else job.micro_batch_size,
            num_micro_batches(job, mesh.layout, batch_size) if mesh.layout.pp > 1 else None,
        ),
        seed=job.seed,
        device=device,
        num_workers=job.data.num_workers,
        prefetch=job.data.prefetch,
        num_cpus=max(1, cpus_allotted() // me.local_world_size),
    )


def warn_of_small_norms(me: Rank, t: Training) -> None:
    cut = t.data.cut
    if me.rank == 0 and t.norms and len(cut.micro_batches(0, cut.batch_size)) > 1:
        print(
            "note: BatchNorm sees one micro-batch (of all ranks) at a time: with gradient "
            "accumulation it computes the statistics of a smaller batch, and results differ"
        )


def should_compile(job: Job, pipeline: Pipeline | None) -> bool:
    """Whether to compile before the first step."""
    if pipeline and job.pipeline.schedule == "zero-bubble":
        return False  # it cuts backward passes in two, which compiled ones are not made for
    return job.compile is True


def last_step_of(job: Job, data: TrainingData, progress: Progress) -> int:
    """The number of the last step, given how far the training is."""
    if job.steps is not None:
        return job.steps
    assert job.epochs is not None
    if progress.epoch >= job.epochs:
        return progress.step
    left_in_epoch = -(-(data.num_samples - progress.position) // data.cut.batch_size)
    return progress.step + left_in_epoch + (job.epochs - progress.epoch - 1) * data.steps_per_epoch


def evaluations(
    datasets: Mapping[str, Dataset[Any]], data: TrainingData
) -> dict[str, EvaluationData]:
    return {
        split: EvaluationData(
            dataset,
            data.cut,
            device=data.device,
            num_workers=data.num_workers,
            pads=data.pads,
        )
        for split, dataset in datasets.items()
        if split != "train"
    }


def compression_of(
    job: Job, model: nn.Module, optimizer: torch.optim.Optimizer, ranks: Ranks
) -> Compression | None:
    """What sends less between the ranks, if the job asks for it."""
    if job.compress is None:
        return None
    if job.compress.averages_weights:
        return AveragedWeights(job.compress, model, optimizer, ranks)
    return CompressedGradients(job.compress, model, ranks, seed=job.seed)


def save_every(job: Job) -> SaveEvery:
    every = job.checkpoint.every
    return SaveEvery(steps=every) if isinstance(every, int) else SaveEvery(seconds=every.seconds)


def chosen_checkpoint(me: Rank) -> commits.Commit | None:
    """The newest intact checkpoint, if there is one. Collective."""
    choice = [me.checkpoint]
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0:
        # The launcher chose one before the first start; there may be a newer one now.
        if me.rank == 0:
            commit, damaged = commits.newest_whole(me.run.checkpoints)
            for line in damaged:
                print(line)
            if commit is None and damaged:
                raise no_readable_checkpoint(me.run, damaged)
            choice = [commit.path.name if commit else ""]
            commits.clean(me.run.checkpoints, claim=claims.own(), chosen=choice[0])
        dist.broadcast_object_list(choice, src=0)
    if not choice[0]:
        return None
    path = me.run.checkpoints / choice[0]
    return commits.Commit(path, step=int(choice[0].removeprefix("step-")))


def restore(
    commit: commits.Commit | None,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler | None,
    compression: Compression | None,
) -> tuple[Progress, dict[str, Any]]:
    """Load a checkpoint, if there is one; return what it notes. Collective."""
    if commit is None:
        return Progress(), {}
    progress, manifest = checkpoint.load(commit, model, optimizer)
    if scaler is not None and "scaler" in manifest:
        scaler.load_state_dict(manifest["scaler"])
    if compression is not None:
        compression.load(commit, manifest["world_size"])
    return progress, manifest


def warm_up(t: Training, pipeline: Pipeline | None) -> None:
    """Make one pass that changes nothing. Collective.

    DDP regroups its gradient buckets after its first backward pass, which changes the order of its
    sums: if that pass were the first real step, a resumed run would differ in the last bit.
    """
    if pipeline:
        pipeline.set_up(t)  # collective
    else:
        t.model.train()
        example = t.data.example(t.progress)
        pass_without_weight(t.model, lambda micro: weighted_losses(t, micro)[0], example)
        clear_gradients(t)


def link_between_ranks(me: Rank) -> str:
    """The name of what connects the ranks, for the banner."""
    if os.environ.get("ALLRANKS_RANKS_HERE") != str(me.world_size):
        return "the network"
    return gpu_link(local_gpus()) if dist.get_backend() == "nccl" else "the loopback interface"


def describe(
    me: Rank, t: Training, precision: str, compiled: bool, pipeline: Pipeline | None
) -> dict[str, Any]:
    """The start event: who this rank is, and what the banner shows."""
    cut = t.data.cut
    shares = sorted({cut.batch_size // cut.parts, -(-cut.batch_size // cut.parts)})
    return {
        "rank": me.rank,
        "world_size": me.world_size,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "layout": str(me.layout),
        "backend": dist.get_backend(),
        "link": link_between_ranks(me),
        "device": device_name(t.device),
        "threads": torch.get_num_threads(),
        "precision": precision,
        "compile": compiled,
        "parameters": num_parameters(t.model, pipeline),
        "global_batch": cut.batch_size,
        "rank_batch": shares,
        "micro_batch_size": cut.largest,
        "accumulation": len(cut.micro_batches(0, cut.batch_size)),
        "data_rank": t.mesh.data.rank,
        "samples_per_epoch": t.data.num_samples,
        "steps_per_epoch": t.data.steps_per_epoch,
        "step": t.progress.step,
        "steps": t.last_step,
        "epoch": t.progress.epoch,
        "num_workers": t.data.num_workers,
        **({"stages": pipeline.sizes} if pipeline else {}),
    }
