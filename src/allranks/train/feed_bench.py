"""What a rank of `allranks bench data` runs instead of training.

It measures how fast data arrive with each number of workers, and how fast steps could use them. All
ranks measure at the same time, since in training they share the disks and CPUs. Rank 0 writes
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.utils.data import Dataset

from allranks.job.job import Job, load_job
from allranks.machine import disks
from allranks.machine.allotted import cpus_allotted
from allranks.run.events import EventLog, to_json
from allranks.run.folder import write_atomically
from allranks.tasks import Task
from allranks.timing import timeline
from allranks.train.build import (
    Rank,
    build,
    choose_device,
    join_world,
    load_staged_task,
    seed_everything,
    training_data,
)
from allranks.train.data import Batch, Progress, TrainingData
from allranks.train.feed_files import (
    compare_disks,
    data_files,
    held_files,
    opened_files,
    why_not_cold,
)
from allranks.train.loop import Training, forward_backward, seed_dropout, update
from allranks.train.rank import fail
from allranks.train.signals import stop_requested

VARIABLE = "ALLRANKS_BENCH_DATA"
SETTLE_SECONDS = 0.2  # after the first batch, when every worker has begun
MIN_BATCHES, PATIENCE = 3, 5.0  # batches of a slow pipeline, within that many times the seconds
SETTLE_STEPS = 5
LOOK_BATCHES, LOOK_SECONDS = 4, 2.0

Kind = Literal["warm", "cold", "step", "training"]


@dataclass(frozen=True, slots=True)
class Settings:
    """What the command asked for."""

    workers: list[int]  # empty: derived from a rank's CPUs
    seconds: float
    repeats: int

    @classmethod
    def from_environment(cls) -> Settings:
        return cls(**json.loads(os.environ[VARIABLE]))


class Stopped(Exception):
    """Some rank was asked to stop, and all ranks know it."""


def run() -> None:
    """Measure, record how it ended, and exit."""
    timeline.take()
    me = Rank.from_environment()
    log = EventLog(me.run.events(me.attempt, me.rank))
    try:
        job = load_job(me.run.job_file, resolved=True)
        device = choose_device(me)
        join_world(me, job, device)
        state = "finished"
        try:
            Bench(me, job, device, log, Settings.from_environment()).measure()
        except Stopped:
            state = "stopped"
        dist.barrier()
        log.write("end", state=state, exit=0, signal=stop_requested())
        log.close()
        dist.destroy_process_group()
    except BaseException as error:
        fail(error, log)


class Bench:
    """The measurements of one rank. All of them are collective."""

    def __init__(
        self, me: Rank, job: Job, device: torch.device, log: EventLog, settings: Settings
    ) -> None:
        self.me, self.job, self.device, self.log = me, job, device, log
        self.settings = settings
        self.task: Task = load_staged_task(job)
        self.cpus = max(1, cpus_allotted() // me.local_world_size)
        self.workers = settings.workers or worker_counts(self.cpus)
        self.files: list[Path] = []
        self.dataset: Dataset[Any] | None = None
        self.found: dict[str, Any] = {"v": 1, "measured": []}

    def measure(self) -> None:
        self.look_at_data()
        can_be_cold = self.found["files"]["why_not_cold"] is None
        for number in range(self.settings.repeats):
            for workers in self.workers:
                if can_be_cold:
                    self.forget_data()
                    self.note("cold", workers, number, self.feed(workers, is_cold=True))
                self.note("warm", workers, number, self.feed(workers))
        self.write()
        self.release_dataset()  # `build` makes its own
        training = build(self.me, self.job, self.device, self.log)
        for number in range(self.settings.repeats):
            self.note("step", None, number, self.steps(training, None))
            for workers in self.workers:
                self.note("training", workers, number, self.steps(training, workers))
        training.checkpointer.finish()
        self.write()

    def look_at_data(self) -> None:
        """Find where the data are, and how the job loads them now. Collective."""
        before = held_files()
        self.make_dataset()
        held = held_files() - before
        self.found |= self.describe_data()
        self.files, is_all = data_files(held, self.files_of_batches(), self.job.options)
        self.release_dataset()
        why_not: list[str | None] = ["the data are in memory"]
        self.found["disks"] = []
        if self.files and self.me.rank == 0:
            why_not = [why_not_cold(self.files)]
            self.found["disks"] = compare_disks(self.files)
        # Rank 0 decides: ranks that disagree would wait for each other forever.
        dist.broadcast_object_list(why_not, src=0)
        self.found["files"] = {
            "count": len(self.files),
            "bytes": sum(file.stat().st_size for file in self.files),
            "is_all": is_all,
            "why_not_cold": why_not[0],
        }

    def describe_data(self) -> dict[str, Any]:
        wanted = self.job.data.num_workers
        data = self.data_of(wanted)
        return {
            "world_size": self.me.world_size,
            "batch_size": data.cut.batch_size,
            "num_samples": data.num_samples,
            "device": self.device.type,
            "cpus": self.cpus,
            "workers_of_job": data.num_workers,
            "is_direct": self.data_of(0).is_direct,
        }

    def files_of_batches(self) -> set[str]:
        """The files that are opened to make a few batches."""
        started = time.perf_counter()
        with opened_files() as opened, closing(stream_of(self.data_of(0))) as batches:
            for number, batch in enumerate(batches, start=1):
                list(batch.micro_batches)
                if number >= LOOK_BATCHES or time.perf_counter() - started > LOOK_SECONDS:
                    break
        return opened

    def make_dataset(self) -> None:
        seed_everything(self.job.seed)
        self.dataset = self.task.datasets()["train"]

    def data_of(self, num_workers: int | Literal["auto"]) -> TrainingData:
        assert self.dataset is not None
        return self.with_workers(self.dataset, self.task, num_workers)

    def with_workers(
        self, dataset: Dataset[Any], task: Task, num_workers: int | Literal["auto"]
    ) -> TrainingData:
        data = self.job.data.model_copy(update={"num_workers": num_workers})
        job = self.job.model_copy(update={"data": data})
        return training_data(self.me, job, task, dataset, self.device)

    def forget_data(self) -> None:
        """Make the next read come from the disk, on every node. Collective."""
        self.release_dataset()
        dist.barrier()
        if self.me.local_rank == 0:
            disks.forget(self.files)
        dist.barrier()
        self.make_dataset()

    def release_dataset(self) -> None:
        """Close its files: mapped files would stay in memory."""
        self.dataset = None
        gc.collect()

    def feed(self, workers: int, *, is_cold: bool = False) -> float:
        """Samples per second from this rank's pipeline, with nothing consuming them."""
        self.meet()
        if self.dataset is None:
            self.make_dataset()
        with closing(stream_of(self.data_of(workers))) as batches:
            pace = feed_pace(batches, self.settings.seconds, self.synchronize, is_cold=is_cold)
        gc.collect()  # ends the workers with their iterator
        return pace

    def steps(self, t: Training, workers: int | None) -> float:
        """Samples per second of the task's own steps; without `workers`, on one ready batch."""
        self.meet()
        if workers is None:
            with closing(stream_of(t.data)) as stream:
                one = next(stream)
                kept = list(one.micro_batches)
            batches = repeated(one, kept)
        else:
            batches = stream_of(self.with_workers(t.data.dataset, t.task, workers))
        with closing(batches):
            pace = self.step_pace(t, batches)
        gc.collect()
        return pace

    def step_pace(self, t: Training, batches: Iterator[Batch]) -> float:
        t.model.train()

        def step() -> int:
            batch = next(batches)
            t.progress.step += 1
            t.schedule.set(t.optimizer, min(t.progress.step, t.last_step))
            seed_dropout(t, t.progress.step)
            forward_backward(t, batch, want_loss=False)  # collective
            update(t)
            return batch.num_samples

        step()
        self.synchronize()
        started = time.perf_counter()
        for _ in range(SETTLE_STEPS):
            step()
        self.synchronize()
        pace = (time.perf_counter() - started) / SETTLE_STEPS
        count = self.agreed(max(MIN_BATCHES, math.ceil(self.settings.seconds / pace)))
        started = time.perf_counter()
        samples = sum(step() for _ in range(count))
        self.synchronize()
        return samples / (time.perf_counter() - started)

    def note(self, kind: Kind, workers: int | None, number: int, pace: float) -> None:
        """Record the sum over all ranks. Collective."""
        total = torch.tensor(pace, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        self.found["measured"].append(
            {
                "kind": kind,
                "workers": workers,
                "repeat": number,
                "samples_per_second": total.item(),
            }
        )

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


def feed_pace(
    batches: Iterator[Batch], seconds: float, synchronize: Callable[[], None], *, is_cold: bool
) -> float:
    """Samples per second once every worker has started; if cold, of at most one epoch."""
    sizes = sizes_of(batches, one_epoch=is_cold)
    asked = time.perf_counter()
    first = next(sizes)
    while not is_cold and time.perf_counter() - asked < SETTLE_SECONDS:
        next(sizes)
    synchronize()
    begin = time.perf_counter()
    samples = num_batches = 0
    for size in sizes:
        samples += size
        num_batches += 1
        passed = time.perf_counter() - begin
        if (passed >= seconds and num_batches >= MIN_BATCHES) or passed >= PATIENCE * seconds:
            break
    synchronize()
    if num_batches == 0:  # one batch is the whole epoch
        return first / (time.perf_counter() - asked)
    return samples / (time.perf_counter() - begin)


def sizes_of(batches: Iterator[Batch], *, one_epoch: bool) -> Iterator[int]:
    """Consume batches, and yield the number of samples in each."""
    for batch in batches:
        for _ in batch.micro_batches:
            pass
        yield batch.num_samples
        if one_epoch and batch.ends_epoch:
            return


def stream_of(data: TrainingData) -> Generator[Batch, None, None]:
    """All batches of the data; closing the generator ends the workers."""
    yield from data.batches(Progress())


def repeated(batch: Batch, kept: list[Any]) -> Generator[Batch, None, None]:
    """The same ready batch, again and again."""
    while True:
        yield batch._replace(micro_batches=iter(kept))
