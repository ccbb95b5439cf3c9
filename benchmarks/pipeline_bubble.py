"""A pipeline's step takes as long as theory says: its bubble, measured and theoretical.

    python benchmarks/pipeline_bubble.py        # about 3 minutes; exit code 1 if it is off by 15%
    python benchmarks/pipeline_bubble.py --stages 2 --width 256 --steps 3     # to see that it works

A stage that works on m micro-batches in turn with s - 1 others computes for m of m + s - 1 rounds,
and waits in the others: the bubble is (s - 1) / (m + s - 1) of a step. Four stages of equal blocks
train on 1 (the naive split of a model: only one stage works at any time), 4, 8 and 16 micro-batches
of one size, in processes of one thread each. The time of a step, without the update, until all
stages are done is divided by the time in which a stage computed in the same step, on average over
the stages. Theory says that this is (m + s - 1) / m.

It needs a core a stage: with fewer, stages that should wait for each other take turns on a core,
and the result means nothing.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.multiprocessing import spawn
from torch.utils.data import Dataset, TensorDataset

from allranks.job.job import parse_job
from allranks.layout import Layout
from allranks.machine.allotted import cpus_allotted
from allranks.run.events import EventLog
from allranks.run.folder import RunDir
from allranks.tasks import Task
from allranks.train import build, pipeline
from allranks.train.data import Progress

LIMIT = 0.15
MICRO_BATCHES = (1, 4, 8, 16)
MICRO_BATCH_SIZE = 64  # large, so that a pass takes much longer than sending its result
BLOCKS_PER_STAGE = 4
WARM_UP_STEPS = 2


@dataclass
class Equal(Task):
    """Equal blocks, and a loss that costs little."""

    depth: int = 16
    width: int = 2048

    def model(self) -> nn.Module:
        blocks = [
            nn.Sequential(nn.Linear(self.width, self.width), nn.GELU()) for _ in range(self.depth)
        ]
        # Without weights before it, the first block computes no gradient of its inputs.
        return nn.Sequential(nn.Sequential(Scale(self.width), blocks[0]), *blocks[1:])

    def datasets(self) -> dict[str, Dataset[tuple[Tensor, ...]]]:
        inputs = torch.randn(2_048, self.width, generator=torch.Generator().manual_seed(0))
        return {"train": TensorDataset(inputs, inputs)}

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).square().mean(1)


class Scale(nn.Module):
    """A weight for each feature."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * self.weight


def run_rank(rank: int, arguments: argparse.Namespace, folder: Path) -> None:
    """Measure with every number of micro-batches; rank 0 writes the results."""
    torch.set_num_threads(1)
    os.chdir(Path(__file__).parent)  # where the task is found
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = f"file://{folder / 'store'}"
    stages = arguments.stages
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=stages)
    busy = [0.0]  # seconds in which this rank's stage computed
    count_time(pipeline.Stage, "forward", busy)
    count_time(pipeline.SeenStage, "backward_one_chunk", busy)
    results = []
    for number in MICRO_BATCHES:
        job = parse_job(
            {
                "task": "pipeline_bubble:Equal",
                "options": {"depth": stages * BLOCKS_PER_STAGE, "width": arguments.width},
                "batch_size": number * MICRO_BATCH_SIZE,
                "steps": WARM_UP_STEPS + arguments.steps,
                "precision": "fp32",
                "pipeline": {"micro_batches": number, "schedule": arguments.schedule},
            }
        )
        run = RunDir(folder / str(number))
        run.path.mkdir(exist_ok=True)
        layout = Layout(1, stages, pp=stages)
        me = build.Rank(rank, stages, rank, stages, run, 0, layout, "")
        log = EventLog(run.events(0, rank))
        t = build.build(me, job, torch.device("cpu"), log)
        batches = t.data.batches(Progress())
        steps = []
        for _ in range(WARM_UP_STEPS + arguments.steps):
            batch = next(batches)
            dist.barrier()
            busy[0], began = 0.0, time.perf_counter()
            t.forward_backward(t, batch, False)
            took, computing = torch.tensor(time.perf_counter() - began), torch.tensor(busy[0])
            dist.all_reduce(took, dist.ReduceOp.MAX)  # the last stages are done first
            dist.all_reduce(computing)
            steps.append((computing.item() / stages, took.item()))
            t.optimizer.zero_grad()
        results.append(steps[WARM_UP_STEPS:])
        log.close()
    if rank == 0:
        torch.save(results, folder / "results")
    dist.barrier()
    dist.destroy_process_group()


def count_time(owner: type, name: str, seconds: list[float]) -> None:
    """Add the time of every call of a method to a sum."""
    method: Callable[..., Any] = getattr(owner, name)

    @wraps(method)
    def timed(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return method(*args, **kwargs)
        finally:
            seconds[0] += time.perf_counter() - began

    setattr(owner, name, timed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--width", type=int, default=2048, help="of the blocks")
    parser.add_argument("--steps", type=int, default=10, help="measured of each row")
    parser.add_argument("--schedule", choices=["1f1b", "gpipe"], default="1f1b")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        spawn(run_rank, (arguments, Path(name)), nprocs=arguments.stages)
        results = torch.load(Path(name) / "results")
    stages, worst = arguments.stages, 0.0
    table = Table("micro-batches", "ms/step", "computing", "step/computing", "theory", "off")
    table.title = f"{stages} stages, {arguments.schedule}, median of {arguments.steps} steps"
    for number, steps in zip(MICRO_BATCHES, results, strict=True):
        busy, seconds = (statistics.median(column) for column in zip(*steps, strict=True))
        measured = statistics.median(step / computing for computing, step in steps)
        theory = (number + stages - 1) / number
        off = measured / theory - 1
        worst = max(worst, abs(off))
        table.add_row(
            f"{number}" + (" (naive)" if number == 1 else ""),
            f"{seconds * 1e3:.1f}",
            f"{busy * 1e3:.1f}",
            f"{measured:.2f} (bubble {1 - 1 / measured:.0%})",
            f"{theory:.2f} (bubble {1 - 1 / theory:.0%})",
            f"{off:+.0%}",
        )
    Console(width=100).print(table)
    if cpus_allotted() < stages:
        print(f"{cpus_allotted()} cores for {stages} stages: this result means nothing")
        return
    print(f"worst: {worst:.0%}, the limit is {LIMIT:.0%}")
    sys.exit(int(worst > LIMIT))


if __name__ == "__main__":
    main()
