"""What a rank of `allranks bench data` does instead of training.

It measures how fast data arrive with each number of workers, and how fast steps could use them. All
ranks measure at the same time, since in training they share the CPUs and disks. Rank 0 writes
data.json.
"""

from __future__ import annotations

import gc
import json
import math
import os
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.utils.data import Dataset

from allranks.job.job import Job
from allranks.machine.allotted import cpus_allotted
from allranks.run.events import EventLog, to_json
from allranks.run.folder import write_atomically
from allranks.tasks import Task
from allranks.train.build import Rank, build, load_staged_task, training_data
from allranks.train.data import Batch, Progress, TrainingData
from allranks.train.loop import Training, seed_dropout
from allranks.train.mesh import Mesh
from allranks.train.signals import stop_requested

VARIABLE = "ALLRANKS_BENCH_DATA"  # what the command asked for
SETTLE_SECONDS = 0.2  # after the first batch, when every worker has begun
MIN_BATCHES, PATIENCE = 3, 5.0  # batches of a slow pipeline, within that many times the seconds
SETTLE_STEPS = 5


class Stopped(Exception):
    """Some rank was asked to stop, and all ranks know it."""


def measure(me: Rank, job: Job, device: torch.device, log: EventLog) -> dict[str, Any]:
    """Measure, and return the fields of the end event. Collective."""
    bench = Bench(me, job, device)
    try:
        bench.measure_loading()
        bench.measure_steps(build(me, job, device, log))
    except Stopped:
        return {"state": "stopped"}
    return {"state": "finished"}


class Bench:
    """The measurements of one rank. All of them are collective."""

    def __init__(self, me: Rank, job: Job, device: torch.device) -> None:
        self.me, self.job, self.device = me, job, device
        self.mesh = Mesh.of(me.layout, device)
        asked = json.loads(os.environ[VARIABLE])
        self.seconds: float = asked["seconds"]
        self.repeats: int = asked["repeats"]
        cpus = max(1, cpus_allotted() // me.local_world_size)
        self.workers: list[int] = asked["workers"] or worker_counts(cpus)
        self.found: dict[str, Any] = {"v": 1, "cpus": cpus, "measured": []}

    def measure_loading(self) -> None:
        """How fast data arrive with nothing consuming them."""
        task = load_staged_task(self.job)
        dataset = task.datasets()["train"]
        usual = self.data_of(dataset, task, self.job.data.num_workers)
        self.found |= {
            "world_size": self.me.world_size,
            "batch_size": usual.cut.batch_size,
            "num_samples": usual.num_samples,
            "device": self.device.type,
            "workers_of_job": usual.num_workers,
            "is_direct": self.data_of(dataset, task, 0).is_direct,
        }
        for number in range(self.repeats):
            for workers in self.workers:
                self.meet()
                with closing(stream_of(self.data_of(dataset, task, workers))) as batches:
                    pace = feed_pace(batches, self.seconds, self.synchronize)
                gc.collect()  # ends the workers with their iterator
                self.note("loading", workers, number, pace)
        self.write()

    def measure_steps(self, t: Training) -> None:
        """How fast steps are on one ready batch, and on what each number of workers loads."""
        size = t.data.cut.largest  # `auto` is known only now
        self.job = self.job.model_copy(update={"micro_batch_size": size})
        for number in range(self.repeats):
            self.note("step", None, number, self.step_pace(t, repeated(t.data)))
            for workers in self.workers:
                data = self.data_of(t.data.dataset, t.task, workers)
                self.note("training", workers, number, self.step_pace(t, stream_of(data)))
        t.checkpointer.finish()
        self.write()

    def data_of(
        self, dataset: Dataset[Any], task: Task, num_workers: int | Literal["auto"]
    ) -> TrainingData:
        data = self.job.data.model_copy(update={"num_workers": num_workers})
        job = self.job.model_copy(update={"data": data})
        return training_data(self.me, self.mesh, job, task, dataset, self.device)

    def step_pace(self, t: Training, batches: Generator[Batch, None, None]) -> float:
        """Samples per second of the task's own steps."""
        self.meet()
        t.model.train()

        def step() -> int:
            batch = next(batches)
            t.progress.step += 1
            t.schedule.set(t.optimizer, min(t.progress.step, t.last_step))
            seed_dropout(t, t.progress.step)
            t.step(t, batch, False)  # collective
            return batch.num_samples

        with closing(batches):
            step()
            self.synchronize()
            started = time.perf_counter()
            for _ in range(SETTLE_STEPS):
                step()
            self.synchronize()
            seconds = (time.perf_counter() - started) / SETTLE_STEPS
            count = self.agreed(max(MIN_BATCHES, math.ceil(self.seconds / seconds)))
            started = time.perf_counter()
            samples = sum(step() for _ in range(count))
            self.synchronize()
            pace = samples / (time.perf_counter() - started)
        gc.collect()
        return pace

    def note(
        self,
        kind: Literal["loading", "step", "training"],
        workers: int | None,
        number: int,
        pace: float,
    ) -> None:
        """Record the sum over all ranks. Collective."""
        total = torch.tensor(pace, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        measured = {"kind": kind, "workers": workers, "repeat": number}
        self.found["measured"].append(measured | {"samples_per_second": total.item()})

    def meet(self) -> None:
        """Begin together, or end together if a rank was asked to stop. Collective."""
        asked = torch.tensor(int(stop_requested() is not None), device=self.device)
        dist.all_reduce(asked)
        if asked.item():
            raise Stopped

    def agreed(self, count: int) -> int:
        """Rank 0's number, since every rank must make the same number of steps. Collective."""
        number = torch.tensor(count, device=self.device)
        dist.broadcast(number, src=0)
        return int(number.item())

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def write(self) -> None:
        if self.me.rank == 0:
            write_atomically(self.me.run.path / "data.json", to_json(self.found, indent=1))


def worker_counts(cpus: int) -> list[int]:
    """0, 1, 2, 4, … up to the number of CPUs that a rank has."""
    powers = [1 << power for power in range(cpus.bit_length()) if 1 << power <= cpus]
    return sorted({0, *powers, cpus})


def feed_pace(batches: Iterator[Batch], seconds: float, synchronize: Callable[[], None]) -> float:
    """Samples per second once every worker has started."""
    asked = time.perf_counter()
    consume(next(batches))
    while time.perf_counter() - asked < SETTLE_SECONDS:
        consume(next(batches))
    synchronize()
    begin = time.perf_counter()
    samples = num_batches = 0
    passed = 0.0
    while passed < PATIENCE * seconds and (passed < seconds or num_batches < MIN_BATCHES):
        samples += consume(next(batches))
        num_batches += 1
        passed = time.perf_counter() - begin
    synchronize()
    return samples / (time.perf_counter() - begin)


def consume(batch: Batch) -> int:
    """Fetch what a batch consists of; return its number of samples."""
    for _ in batch.micro_batches:
        pass
    return batch.num_samples


def stream_of(data: TrainingData) -> Generator[Batch, None, None]:
    """All batches of the data; closing the generator ends the workers."""
    yield from data.batches(Progress())


def repeated(data: TrainingData) -> Generator[Batch, None, None]:
    """The first batch of the data, made once, again and again."""
    with closing(stream_of(data)) as stream:
        first = next(stream)
        made = list(first.micro_batches)
    while True:
        yield first._replace(micro_batches=iter(made))
