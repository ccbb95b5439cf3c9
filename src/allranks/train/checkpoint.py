"""Checkpoints: copied in memory, written in the background, committed by one rename.

Tensors go through torch.distributed.checkpoint: it knows which part of which tensor a rank holds,
whatever the layout, so that each part is written once, and a rank reads what it holds itself;
everything else is in `checkpoint.json` (see allranks.run.commits). Nothing in a checkpoint is
unpickled unchecked: loading one cannot run code.
"""

from __future__ import annotations

import math
import shutil
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from allranks.errors import AllranksError, disk_error
from allranks.run import claims, commits
from allranks.run.commits import Commit
from allranks.run.events import EventLog
from allranks.train.data import Progress
from allranks.train.optim import allocate_state, local
from allranks.train.storage import TensorReader, TensorWriter

Tensors = dict[str, Tensor]
Part = tuple[str, tuple[int, ...]]  # the name of a tensor, and the index where the part begins


class Checkpointer:
    """Saves the training's tensors, and stalls it for less time than a copy in memory takes.

    All ranks must make one, call `save` at the same steps, and `finish_copying` before every
    optimizer step. The optimizer must already have its state. `group` is a gloo group of all ranks
    for the background thread. `divide`: into what is the same on all ranks, or their parts of it,
    and what this one alone has; it may add more, later too.
    """

    def __init__(
        self,
        folder: Path,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        keep: int,
        group: dist.ProcessGroup,
        log: EventLog,
        saved_step: int = -1,
        divide: Callable[[Tensors], tuple[Tensors, Tensors]] | None = None,
    ) -> None:
        self.folder = folder
        self.model = model
        self.optimizer = optimizer
        self.keep = keep
        self.group = group
        self.log = log
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self._divide = divide
        self.saved_step = saved_step  # the newest step that has been or is being saved
        self.stall = 0.0  # seconds for which the newest save stalled the training
        self._last_save = time.monotonic()
        self._copied = threading.Event()
        self._copied.set()
        shared, _ = self._tensors()
        self._planned = set(shared)  # also what this rank has nothing of
        self._parts = parts_of(shared)
        held = {part: local(shared[part[0]]).nbytes for part in self._parts}
        everyones: list[Any] = [None] * self.world_size
        dist.all_gather_object(everyones, (held, tied_names(model)), group=group)  # collective
        self._mine = share_of_parts([held for held, _ in everyones], self.rank)
        self._tied = {name: first for _, tied in everyones for name, first in tied.items()}
        # Memory for the copies, allocated now: pinning it can take as long as a save.
        self._staged: Tensors = {}
        self._saved: set[str] = set()  # what this rank saves: its share is another if there is more
        self._stage(self._share())
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None

    def save(self, progress: Progress, notes: dict[str, Any]) -> None:
        """Start to copy and write everything in the background. Every rank must call it."""
        if progress.step == self.saved_step:
            return
        started = time.perf_counter()
        self.finish()  # one save at a time: the memory is reused
        waited = time.perf_counter() - started
        unchanged = self._copy_what_may_change()
        manifest = {
            "step": progress.step,
            "epoch": progress.epoch,
            "position": progress.position,
            "samples": progress.samples,
            "world_size": self.world_size,
            "torch": torch.__version__,
            "tied": self._tied,
            **notes,
        }
        self.saved_step = progress.step
        self._last_save = time.monotonic()
        self._copied.clear()
        self._writing = self._thread.submit(self._save, unchanged, manifest, started + waited)
        self.stall = time.perf_counter() - started

    def finish_copying(self) -> None:
        """Wait until the optimizer may change the tensors that are being saved."""
        if not self._copied.is_set():
            started = time.perf_counter()
            self._copied.wait()
            self.stall += time.perf_counter() - started

    def seconds_since_save(self) -> float:
        return time.monotonic() - self._last_save

    @property
    def failed(self) -> bool:
        """Whether writing in the background has failed; `finish` raises the error."""
        return (
            self._writing is not None
            and self._writing.done()
            and self._writing.exception() is not None
        )

    def finish(self) -> None:
        """Wait until the last save is committed; raises if it failed."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _tensors(self) -> tuple[Tensors, Tensors]:
        """What is the same on all ranks, or their parts of it; and what this one alone has."""
        tensors = training_tensors(self.model, self.optimizer)
        return (tensors, {}) if self._divide is None else self._divide(tensors)

    def _share(self) -> Tensors:
        """The tensors that this rank will write, or its parts of them."""
        shared, own = self._tensors()
        # What has come since is whole, and on all ranks.
        later: dict[tuple[str, tuple[int, ...]], int] = {
            (name, ()): t.nbytes for name, t in shared.items() if name not in self._planned
        }
        mine = [*self._mine, *share_of_parts([later] * self.world_size, self.rank)]
        return {name: local(shared[name]) for name, _ in mine} | own

    def _stage(self, share: Tensors) -> None:
        """Allocate memory for the copies of tensors that have none."""
        for name, part in share.items():
            if name not in self._staged:
                is_cuda = part.is_cuda
                self._staged[name] = torch.zeros_like(part, device="cpu", pin_memory=is_cuda)

    def _copy_what_may_change(self) -> Tensors:
        """Copy now what may change before the next optimizer step; return what will not.

        Buffers and frozen parameters may change in a forward pass. A GPU copies everything now,
        which takes it a fraction of a step.
        """
        trained = {f"model.{name}" for name, _ in named_parameters(self.model)}
        unchanged, share = {}, self._share()
        self._stage(share)
        self._saved = set(share)
        for name, part in share.items():
            if not part.is_cuda and (name.startswith("optimizer.") or name in trained):
                unchanged[name] = part
            else:
                self._staged[name].copy_(part, non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
        return unchanged

    def _save(self, unchanged: dict[str, Tensor], manifest: dict[str, Any], started: float) -> None:
        """Copy the rest, write and commit. Runs in the background thread."""
        try:
            for name, tensor in unchanged.items():
                copy_on_one_core(self._staged[name], tensor)
        finally:
            self._copied.set()
        if self.rank == 0:
            claims.raise_if_lost(self.folder.parent / "claims", claims.own())
        step = manifest["step"]
        writing = commits.writing_folder(self.folder, step)
        try:
            files = self._write_files(writing, step)
            if self.rank == 0:
                commits.commit(self.folder, step, {**manifest, "files": files}, keep=self.keep)
        except (OSError, AllranksError) as error:
            # Half a checkpoint is useless, and the space is needed to report what happened.
            shutil.rmtree(writing, ignore_errors=True)
            if isinstance(error, AllranksError):
                raise
            # A newer holder may have removed the file.
            claims.raise_if_lost(self.folder.parent / "claims", claims.own())
            raise disk_error(error, Path(error.filename or writing)) from error
        seconds = round(time.perf_counter() - started, 6)
        self.log.write("checkpoint", step=step, seconds=seconds, stall=round(self.stall, 6))

    def _write_files(self, folder: Path, step: int) -> dict[str, Any]:
        """Write and sync this rank's files; return the manifest's entries of all ranks' files."""
        folder.mkdir(parents=True, exist_ok=True)
        writer = TensorWriter(folder)
        try:
            dcp.save(
                {name: copy for name, copy in self._staged.items() if name in self._saved},
                planner=SharePlanner({name: self._parts[name, at] for name, at in self._mine}),
                storage_writer=writer,
                process_group=self.group,
            )
        except dcp.CheckpointException as error:
            raise _cause(error) from None
        sealed: dict[str, Any] | OSError
        try:
            # A resume starts after this step: events that are not on disk by now never will be.
            self.log.flush("wait", last_step=step)
            if self.log.error is not None:
                raise self.log.error
            sealed = {
                name: commits.seal(folder / name, crc) for name, crc in writer.checksums.items()
            }
            if self.rank == 0:
                sealed[".metadata"] = commits.seal(folder / ".metadata")
        except OSError as error:
            sealed = error
        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, sealed, group=self.group)
        files: dict[str, Any] = {}
        for part in gathered:
            if isinstance(part, OSError):
                raise part
            files |= part
        return files


class SharePlanner(DefaultSavePlanner):
    """Writes the copies of a rank's share as the parts of tensors that they are."""

    def __init__(self, parts: dict[str, WriteItem]) -> None:
        super().__init__()
        self._parts = parts

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        items = [self._parts.get(item.index.fqn, item) for item in plan.items]
        self.plan = replace(plan, items=items)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        copy: Tensor = self.state_dict[index.fqn]
        return copy


def copy_on_one_core(target: Tensor, source: Tensor) -> None:
    """`target.copy_(source)` without torch's threads, which the training is using."""
    same_size = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    integers = same_size.get(source.dtype.itemsize)
    if integers is None:
        target.copy_(source)
    else:  # as integers, because NumPy does not have all of torch's types
        np.copyto(target.view(integers).numpy(), source.view(integers).numpy())


def _cause(error: dcp.CheckpointException) -> BaseException:
    """The first OSError among the failed ranks, else what went wrong on the first of them."""
    causes = [failure[0] for _, failure in sorted(error.failures.items())]
    for cause in causes:
        nested: BaseException | None = cause
        while nested is not None:
            if isinstance(nested, OSError):
                return nested
            nested = nested.__cause__ or nested.__context__
    return causes[0]


def training_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensors:
    """Every tensor of the model and the optimizer that this rank has a part of, by name."""
    tensors = {}
    for tensor, (name, *_) in _names_of_tensors(model):
        tensors[f"model.{name}"] = tensor.detach()
        for key, value in optimizer.state.get(tensor, {}).items():
            if isinstance(value, Tensor):
                tensors[f"optimizer.{name}.{key}"] = value
    return tensors


def model_tensors(model: nn.Module) -> Tensors:
    """Parameters and buffers by name; one with several names (tied weights) under the first."""
    return {f"model.{name}": tensor.detach() for tensor, (name, *_) in _names_of_tensors(model)}


def named_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Trained parameters, with their names in the state dict."""
    return [
        (name, tensor)
        for tensor, (name, *_) in _names_of_tensors(model)
        if isinstance(tensor, nn.Parameter) and tensor.requires_grad
    ]


def tied_names(model: nn.Module) -> dict[str, str]:
    """The further names of tensors that have several, and the first name of each."""
    return {name: first for _, (first, *others) in _names_of_tensors(model) for name in others}


def _names_of_tensors(model: nn.Module) -> list[tuple[Tensor, list[str]]]:
    """Parameters and buffers with their names in the state dict: several if they are tied."""
    found: dict[int, tuple[Tensor, list[str]]] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            raise AllranksError(
                f"the model's state dict has {name}, a {type(value).__name__}: a checkpoint "
                "holds only tensors",
                fix="make a tensor of it, or leave it out of the state dict",
            )
        found.setdefault(id(value), (value, []))[1].append(name)
    return list(found.values())


def parts_of(tensors: Tensors) -> dict[Part, WriteItem]:
    """What this rank holds of each tensor, as DCP describes it. Ranks may hold the same part."""
    planner = DefaultSavePlanner()
    planner.set_up_planner(tensors)
    parts = {}
    for item in planner.create_local_plan().items:
        assert item.tensor_data is not None and item.index.offset is not None  # it is a tensor
        # An uneven division leaves nothing to some ranks.
        if local(tensors[item.index.fqn]).numel() or not math.prod(item.tensor_data.size):
            parts[item.index.fqn, tuple(item.index.offset)] = item
    return parts


def share_of_parts(held: Sequence[Mapping[Part, int]], rank: int) -> list[Part]:
    """The parts that a rank writes; the shares of all ranks are about equal in bytes.

    `held`: the bytes of the parts that each rank holds.
    """
    holders: dict[Part, list[int]] = {}
    for number, parts in enumerate(held):
        for part in parts:
            holders.setdefault(part, []).append(number)

    def order(part: Part) -> tuple[int, int, Part]:
        # First what few can write, then large ones: what is left evens out the shares.
        return len(holders[part]), -held[holders[part][0]][part], part

    loads = [0] * len(held)
    mine = []
    for part in sorted(holders, key=order):
        owner = min(holders[part], key=loads.__getitem__)
        loads[owner] += held[owner][part]
        if owner == rank:
            mine.append(part)
    return mine


def load(
    commit: Commit, model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[Progress, dict[str, Any]]:
    """Load a checkpoint into a model and its optimizer; return its progress and manifest."""
    manifest = commit.manifest()
    missing = [key for key in (*Progress.__dataclass_fields__, "metrics") if key not in manifest]
    if missing:
        raise AllranksError(
            f"{commit.path}/{commits.MANIFEST} lacks {', '.join(missing)}",
            fix="use another checkpoint",
            exit_code=1,
        )
    allocate_state(optimizer)
    reader = TensorReader(commit.path, manifest["files"])
    stored = reader.kinds()
    tied = {f"model.{name}": f"model.{first}" for name, first in manifest.get("tied", {}).items()}
    wanted: Tensors = {}
    untied: list[tuple[Tensor, str]] = []
    for name, tensor in training_tensors(model, optimizer).items():
        if name not in stored:
            # Buffers under several names are one tensor on a CPU, but several on a GPU.
            name = tied.get(name, name)
        if name.startswith("optimizer.") and name not in stored:
            continue  # with --force it may be another optimizer than the one that was saved
        if name in wanted:
            untied.append((tensor, name))
            continue
        shape = stored[name][1] if name in stored else "no such tensor"
        if shape != tuple(tensor.shape):
            raise AllranksError(
                f"{commit.path.name} does not fit the model: {name} is {tuple(tensor.shape)} "
                f"in the model, {shape} in the checkpoint",
                fix="resume with the task and options that the run was started with",
            )
        wanted[name] = tensor
    read_into(wanted, reader)
    for tensor, name in untied:
        tensor.copy_(wanted[name])
    progress = Progress(**{key: manifest[key] for key in Progress.__dataclass_fields__})
    return progress, manifest


def read_tensors(commit: Commit, *prefixes: str) -> Tensors:
    """A checkpoint's tensors, or those with such names, on the CPU. Each rank reads for itself."""
    reader = TensorReader(commit.path, commit.manifest()["files"])
    tensors = {
        name: torch.empty(shape, dtype=dtype)
        for name, (dtype, shape) in reader.kinds().items()
        if name.startswith(prefixes or "")
    }
    read_into(tensors, reader)
    return tensors


def read_into(tensors: Tensors, reader: TensorReader) -> None:
    """Fill tensors, or this rank's parts of them, from a checkpoint. Each rank reads for itself."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            dcp.load(tensors, storage_reader=reader, no_dist=True)
        except dcp.CheckpointException as error:
            raise _cause(error) from None
