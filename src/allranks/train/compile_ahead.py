"""Compiles a task's step beside its training, into the cache from which the ranks then take it.

A rank of each node starts `python -m allranks.train.compile_ahead` with its own environment. It
must not take cores or memory from the training: if these run out, it is the first to be ended.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import torch
import torch.distributed as dist

from allranks.job.job import Job, load_job
from allranks.job.task_source import code_of
from allranks.layout import Layout
from allranks.machine.allotted import cpus_allotted
from allranks.machine.gpus import nvml
from allranks.machine.processes import die_with_parent
from allranks.run.folder import RunDir, write_atomically
from allranks.train.loop import Training

CONTEXT_BYTES = 1 << 30  # of CUDA itself, in a second process
KEPT_FREE = 0.1  # of a GPU's memory, in case the training needs more
MOST_SECONDS = 900.0
NICENESS = 10
# What is compiled from the cache takes so many times as long as following its Python code.
FROM_CACHE = 2.0
OUT_OF_MEMORY = 3  # the exit code
# What of a job decides what is compiled for it.
COMPILED_FROM = {
    *("task", "options", "batch_size", "batch_size_per_rank", "micro_batch_size"),
    *("precision", "activation_checkpointing"),
}


@dataclass(frozen=True, slots=True)
class CompileCost:
    """How long compiling a job's step from this machine's cache takes, as measured before."""

    file: Path | None  # in the cache: it is gone when that is

    @classmethod
    def of(cls, job: Job, layout: Layout, device: torch.device) -> CompileCost:
        cache = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
        settings = job.model_dump_json(include=COMPILED_FROM) + code_of(str(job.task))
        key = hashlib.sha256(f"{settings} {layout} {name} {torch.__version__}".encode()).hexdigest()
        return cls(Path(cache, f"allranks-{key[:32]}.json") if cache else None)

    def seconds(self) -> float:
        """The time it takes; infinite if it is not known."""
        if self.file is not None:
            with suppress(OSError, ValueError, TypeError, KeyError):
                return float(json.loads(self.file.read_text())["seconds"])
        return math.inf

    @contextmanager
    def noted(self) -> Iterator[None]:
        """A context that notes how long compiling takes, or will take once it is in the cache."""
        from torch._dynamo.utils import calculate_time_spent

        began, before = time.perf_counter(), calculate_time_spent()
        yield
        spent = Counter(calculate_time_spent())
        spent.subtract(before)
        seconds = time.perf_counter() - began - saved_by_cache(spent)
        if self.file is not None:
            with suppress(OSError):
                self.file.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(self.file, json.dumps({"seconds": round(seconds, 3)}) + "\n")


def saved_by_cache(spent: Counter[str]) -> float:
    """Seconds that compiling the same from the cache would not take; by torch's own names."""
    if not spent["inductor_compile"]:  # it was in the cache
        return 0.0
    followed = spent["entire_frame_compile"] - spent["backend_compile"]
    return max(0.0, spent["total_wall_time"] - FROM_CACHE * followed)


class Child(Protocol):
    """A process that compiles ahead of the ranks of its node."""

    def poll(self) -> int | None: ...
    def kill(self) -> None: ...


class Compiler:
    """The process that compiles, as the rank that started it sees it."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._deadline = time.monotonic() + MOST_SECONDS

    def poll(self) -> int | None:
        if time.monotonic() > self._deadline:
            self._process.kill()
        return self._process.poll()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


class NothingToDo:
    """Stands for the child on a rank whose node has another rank that compiles."""

    def poll(self) -> int:
        return 0

    def kill(self) -> None:
        pass


def start(t: Training, run: RunDir, log: Path, ranks_here: int, local_rank: int) -> Child | str:
    """Start a process that compiles; or return why there is no room for it."""
    if local_rank > 0:
        return NothingToDo()
    spare = cpus_allotted() - ranks_here * (1 + t.data.num_workers)
    if spare < 1:
        return "no CPU core is spare"
    share = 1.0
    if t.device.type == "cuda":
        if is_exclusive(t.device):
            return "the GPU allows only one process"
        room = room_on_gpu(t.device)
        if isinstance(room, str):
            return room
        share = room
    asked = {"share": share, "ranks": ranks_here, "niceness": NICENESS}
    asked["micro_batch_size"] = t.data.cut.largest
    try:
        return spawn(run, t.mesh.layout, asked, log, spare)
    except OSError as error:
        return f"no process could be started: {error}"


def spawn(run: RunDir, layout: Layout, asked: dict[str, Any], log: Path, cores: int) -> Compiler:
    asked = {**asked, "parent": os.getpid()}
    command = [sys.executable, "-m", __spec__.name, str(run.path), str(layout), json.dumps(asked)]
    # Code for a CPU depends on the number of threads that it is for.
    threads = {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    env = {**os.environ, **threads, "TORCHINDUCTOR_COMPILE_THREADS": str(cores)}
    with log.open("ab") as output:
        return Compiler(
            subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=env,
            )
        )


def is_exclusive(device: torch.device) -> bool:
    """Whether a GPU allows only one process."""
    with nvml() as pynvml:
        if pynvml is None:
            return False
        with suppress(pynvml.NVMLError, RuntimeError):
            uuid = str(torch.cuda.get_device_properties(device).uuid)
            handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid.removeprefix('GPU-')}")
            mode = pynvml.nvmlDeviceGetComputeMode(handle)
            return bool(mode != pynvml.NVML_COMPUTEMODE_DEFAULT)
    return False


def room_on_gpu(device: torch.device) -> float | str:
    """The share of a GPU's memory that a second process may take; or why there is none."""
    free, total = torch.cuda.mem_get_info(device)
    room = free - KEPT_FREE * total - CONTEXT_BYTES
    if room < torch.cuda.max_memory_allocated(device):
        return "the GPU has no memory for a second model"
    return float(room / total)


# --- In the process that compiles ----------------------------------------------------------------


def main() -> None:
    folder, layout, asked = sys.argv[1:]
    settings = json.loads(asked)
    die_with_parent(settings["parent"])
    os.nice(settings["niceness"])
    with suppress(OSError):  # Linux: if memory runs out, the kernel ends this process first
        Path("/proc/self/oom_score_adj").write_text("1000")
    job = load_job(RunDir(Path(folder)).job_file, resolved=True)
    try:
        for device in devices(settings["ranks"]):
            if device.type == "cuda":
                torch.cuda.set_device(device)
                torch.cuda.set_per_process_memory_fraction(settings["share"], device)
            compile_for(job, Layout.parse(layout), device, settings["micro_batch_size"])
            torch._dynamo.reset()
    except torch.OutOfMemoryError as error:
        print(error)
        sys.exit(OUT_OF_MEMORY)


def devices(ranks: int) -> list[torch.device]:
    """The devices of this node's ranks: what is compiled for one GPU is not found for another."""
    if not torch.cuda.is_available():
        return [torch.device("cpu")]
    return [torch.device("cuda", n) for n in range(min(ranks, torch.cuda.device_count()))]


def compile_for(job: Job, layout: Layout, device: torch.device, size: int) -> None:
    """Make the passes of a rank of this layout, alone, with the same model and batch."""
    from allranks.train import build, fast_step, parallelize
    from allranks.train.data import Progress
    from allranks.train.mesh import Mesh

    # Exchanges that exchange nothing: the model is divided as on the ranks.
    if not dist.is_initialized():
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=layout.ranks)
    mesh = Mesh.of(layout, device)
    task = build.load_staged_task(job)
    me = build.Rank(
        rank=0,
        world_size=layout.ranks,
        local_rank=0,
        local_world_size=layout.gpus,
        run=RunDir(Path()),
        attempt=0,
        layout=layout,
        checkpoint="",
    )
    datasets = task.datasets()
    data = build.training_data(me, mesh, job, task, datasets["train"], device)
    data.cut = replace(data.cut, micro_batch_size=size)  # `auto` is known to the ranks alone
    autocast = parallelize.autocast(parallelize.resolve_precision(job.precision, device), device)
    model, _ = build.divided_model(me.run, job, mesh, task, data, autocast, None)
    t: Any = SimpleNamespace(  # what a pass needs of a Training
        task=task,
        mesh=mesh,
        model=model.train(),
        predict=parallelize.plain(model),
        data=data,
        evaluations=datasets.keys() - {"train"},
        autocast=autocast,
        norms=parallelize.batch_norms(model),
        parameters=[p for p in model.parameters() if p.requires_grad],
    )
    fast_step.set_compiled(t, False)
    with CompileCost.of(job, layout, device).noted():
        fast_step.compile_now(t, data.example(Progress()))


if __name__ == "__main__":
    main()
