"""Checkpoints: copied in memory, written in the background, committed by one rename.

Tensors go through torch.distributed.checkpoint, so that any layout can read what another wrote;
everything else is in `checkpoint.json` (see allranks.run.commits). Nothing in a checkpoint is
unpickled unchecked: loading one cannot run code.
"""

from __future__ import annotations

import shutil
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from allranks.errors import AllranksError, disk_error
from allranks.run import claims, commits
from allranks.run.commits import Commit
from allranks.run.events import EventLog
from allranks.train.data import Progress
from allranks.train.optim import allocate_state
from allranks.train.storage import TensorReader, TensorWriter

Tensors = dict[str, Tensor]


class Checkpointer:
    """Saves the training's tensors, and stalls it for less time than a copy in memory takes.

    All ranks must call `save` at the same steps, and `finish_copying` before every optimizer step.
    The optimizer must already have its state. `group` is a gloo group for the background thread.
    `divide`: into what all ranks have alike, and what this one alone has; it may add more.
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

    def _share(self) -> dict[str, Tensor]:
        """The tensors that this rank will write."""
        tensors, own = training_tensors(self.model, self.optimizer), Tensors()
        if self._divide is not None:
            tensors, own = self._divide(tensors)
        return share_of_tensors(tensors, self.rank, self.world_size) | own

    def _stage(self, tensors: Tensors) -> None:
        """Allocate memory for the copies of tensors that have none."""
        for name, tensor in tensors.items():
            if name not in self._staged:
                is_cuda = tensor.is_cuda
                self._staged[name] = torch.zeros_like(tensor, device="cpu", pin_memory=is_cuda)

    def _copy_what_may_change(self) -> dict[str, Tensor]:
        """Copy now what may change before the next optimizer step; return what will not.

        Buffers and frozen parameters may change in a forward pass. A GPU copies everything now,
        which takes it a fraction of a step.
        """
        trained = {f"model.{name}" for name, _ in named_parameters(self.model)}
        unchanged, share = {}, self._share()
        self._stage(share)
        self._saved = set(share)
        for name, tensor in share.items():
            if not tensor.is_cuda and (name.startswith("optimizer.") or name in trained):
                unchanged[name] = tensor
            else:
                self._staged[name].copy_(tensor, non_blocking=True)
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
            tensors = {name: t for name, t in self._staged.items() if name in self._saved}
            dcp.save(tensors, storage_writer=writer, process_group=self.group)
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


def training_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Every tensor of the model and the optimizer, by name."""
    tensors = model_tensors(model)
    for name, parameter in named_parameters(model):
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                tensors[f"optimizer.{name}.{key}"] = value
    return tensors


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name; one with several names (tied weights) under the first."""
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) not in seen:
            seen.add(id(value))
            tensors[f"model.{name}"] = value.detach()
    return tensors


def named_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Trained parameters in the optimizer's order, with their names in the state dict."""
    prefix = "_checkpoint_wrapped_module."  # of activation checkpointing
    return [
        (name.replace(prefix, ""), parameter)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]


def share_of_tensors(tensors: dict[str, Tensor], rank: int, world_size: int) -> dict[str, Tensor]:
    """The tensors that a rank writes; the shares of all ranks are about equal in bytes."""
    loads = [0] * world_size
    mine = {}
    for name in sorted(tensors, key=lambda name: (-tensors[name].nbytes, name)):
        owner = loads.index(min(loads))
        loads[owner] += tensors[name].nbytes
        if owner == rank:
            mine[name] = tensors[name]
    return mine


def read_tensors(commit: Commit, *prefixes: str) -> Tensors:
    """A checkpoint's tensors, or those with such names, on the CPU. Each rank reads for itself."""
    reader = TensorReader(commit.path, commit.manifest()["files"])
    entries = reader.read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata) and name.startswith(prefixes or "")
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(tensors, storage_reader=reader, no_dist=True)
    return tensors


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
    stored = read_tensors(commit, "model.", "optimizer.")
    expected = model_tensors(model)
    for name, tensor in expected.items():
        shape = tuple(stored[name].shape) if name in stored else "no such tensor"
        if shape != tuple(tensor.shape):
            raise AllranksError(
                f"{commit.path.name} does not fit the model: {name} is {tuple(tensor.shape)} "
                f"in the model, {shape} in the checkpoint",
                fix="resume with the task and options that the run was started with",
            )
    with torch.no_grad():
        for name, tensor in expected.items():
            tensor.copy_(stored[name])
    _load_optimizer(optimizer, model, stored)
    progress = Progress(**{key: manifest[key] for key in Progress.__dataclass_fields__})
    return progress, manifest


def _load_optimizer(
    optimizer: torch.optim.Optimizer, model: nn.Module, stored: dict[str, Tensor]
) -> None:
    allocate_state(optimizer)
    state: dict[int, dict[str, Tensor]] = {}
    for index, (name, parameter) in enumerate(named_parameters(model)):
        prefix = f"optimizer.{name}."
        own = {key: value for key, value in stored.items() if key.startswith(prefix)}
        # A name may be the beginning of another: "a." also matches "a.b.exp_avg".
        own = {key: value for key, value in own.items() if "." not in key[len(prefix) :]}
        stored_state = {key[len(prefix) :]: value for key, value in own.items()}
        # Only what this optimizer stores: with --force it may differ from the one that saved.
        fresh = optimizer.state[parameter]
        state[index] = {key: stored_state.get(key, value) for key, value in fresh.items()}
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state, "param_groups": groups})
