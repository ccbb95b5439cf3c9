"""A step of allranks takes at most 1.05x a step of a hand-written PyTorch DDP loop.

    python benchmarks/loop_overhead.py          # about 12 minutes; exit code 1 if it takes more
    python benchmarks/loop_overhead.py --pairs 20 --ranks 1 --model small     # a first look
    python benchmarks/loop_overhead.py --pairs 20 --ranks 1,2,4,8             # with a core a rank

Both loops train the same MLP on the same data in the same order, in the same processes, on CPU,
in alternating blocks. Ours is what `allranks run` runs (train() with the parts that build.py
builds, events, pulse, checkpointer, and the probe), with its progress bar beside it. During the
hand-written loop's turn, the process that draws the bar is stopped and the probe is removed from
torch, so that the hand-written loop does not pay for them. Our events are formatted and written
within our block. (Bar and pulse go by the clock, which continues during the other loop's turns:
both work a few times more often per step than in a real run.)

The hand-written loop slices tensors in memory that it shuffles once per epoch; it loads, logs and
draws nothing. `tuned` has a fused AdamW, gradients as views of DDP's buckets, and no DDP around a
single rank: the claim is about this one. `default` is the same loop with torch's defaults. Each
block of ours is compared with the mean of the two tuned blocks around it; the ratio of these two is
the noise.

`scaling`: how many times as fast the first number of ranks is that our loop, and the tuned one,
train on this many. Ours is at least that of the tuned loop where ours/tuned does not grow.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.nn.functional as F
from probe_switch import Switch
from rich.console import Console
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset, TensorDataset

from allranks.job.job import Job, load_job
from allranks.launch import prepare
from allranks.launch.screen import Screen
from allranks.probe.device_sampler import DeviceSampler
from allranks.probe.recorder import Recorder
from allranks.run.events import EventLog, read_events
from allranks.run.folder import RunDir
from allranks.tasks import Task
from allranks.timing import timeline
from allranks.train.data import Batch, Progress, TrainingData, mix
from allranks.train.loop import train
from allranks.train.optim import Schedule

if TYPE_CHECKING:  # the environment of a rank comes first
    from allranks.train.build import Rank

LIMIT = 1.05
NUM_SAMPLES = 16_384
NUM_FEATURES = 32
NUM_CLASSES = 10
WARM_UP_STEPS = 50
# Sizes that take about 0.5 and 5 ms a step on one rank of two cores.
MODELS = {
    "small": {"layers": 1, "width": 64, "batch_size": 32},
    "large": {"layers": 2, "width": 768, "batch_size": 128},
}


@dataclass
class Mlp(Task):
    """An MLP on random data; no validation set, so nothing is evaluated."""

    layers: int = 1  # hidden ones
    width: int = 64

    def model(self) -> nn.Module:
        widths = [NUM_FEATURES] + self.layers * [self.width]
        hidden = [
            module
            for before, after in itertools.pairwise(widths)
            for module in (nn.Linear(before, after), nn.ReLU())
        ]
        return nn.Sequential(*hidden, nn.Linear(self.width, NUM_CLASSES))

    def datasets(self) -> dict[str, Dataset[tuple[Tensor, ...]]]:
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(NUM_SAMPLES, NUM_FEATURES, generator=generator)
        targets = torch.randint(NUM_CLASSES, (NUM_SAMPLES,), generator=generator)
        return {"train": TensorDataset(inputs, targets)}

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets, reduction="none")


def hand_loop(job: Job, *, tuned: bool) -> Iterator[Tensor]:
    """The loop to compare with; it pauses after every step."""
    from allranks.train.build import load_task

    # Only what must be equal for a fair comparison is ours: task, order of samples, rate.
    rank, world_size = dist.get_rank(), dist.get_world_size()
    settings = job.optimizer
    assert job.steps is not None
    assert job.batch_size is not None
    assert settings.clip is not None
    schedule = Schedule(settings, num_steps=job.steps)
    task = load_task(job)
    dataset = task.datasets()["train"]
    assert isinstance(dataset, TensorDataset)
    inputs, targets = dataset.tensors
    share = job.batch_size // world_size
    torch.manual_seed(mix(job.seed, 0))
    model = task.model()
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=settings.lr,
        weight_decay=settings.weight_decay,
        fused=True if tuned else None,
    )
    if world_size > 1 or not tuned:
        model = DistributedDataParallel(model, gradient_as_bucket_view=tuned)
    step = 0
    for epoch in itertools.count():
        generator = torch.Generator().manual_seed(mix(job.seed, epoch))
        order = torch.randperm(len(inputs), generator=generator)
        epoch_inputs, epoch_targets = inputs[order], targets[order]
        for start in range(rank * share, len(inputs), job.batch_size):
            step += 1
            for group in optimizer.param_groups:
                group["lr"] = schedule.rate(step)
            stop = start + share
            loss = F.cross_entropy(model(epoch_inputs[start:stop]), epoch_targets[start:stop])
            loss.backward()  # torch does not type it
            nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
            optimizer.step()
            optimizer.zero_grad()
            yield loss


# In a rank.


def run_rank(num_pairs: int, block_seconds: float, display: int) -> None:
    """Train as rank.run does, giving way to the hand loops between blocks of steps."""
    from allranks.train import build

    me = build.Rank.from_environment()
    log = EventLog(me.run.events(me.attempt, me.rank))
    job = load_job(me.run.job_file, resolved=True)
    device = torch.device("cpu")
    build.join_world(me, job, device)
    probe = probe_of(me)
    t = build.build(me, job, device, log)
    probe.turn(on=False)
    tuned, default = hand_loop(job, tuned=True), hand_loop(job, tuned=False)
    losses = [mean_over_ranks(next(tuned)) for _ in range(WARM_UP_STEPS)]
    run_block(default, WARM_UP_STEPS)
    num_steps = steps_per_block(tuned, block_seconds)
    seconds: dict[str, list[float]] = {"before": [], "ours": [], "after": [], "default": []}

    class Blocks(TrainingData):
        """The training's own data, with the hand loops' turns in between."""

        def batches(self, progress: Progress) -> Iterator[Batch]:
            stream = super().batches(progress)
            probe.turn(on=True)
            yield from itertools.islice(stream, max(WARM_UP_STEPS, num_steps))
            probe.turn(on=False)
            for _ in range(num_pairs):
                wake(display, awake=False)
                seconds["default"].append(run_block(default, num_steps))
                seconds["before"].append(run_block(tuned, num_steps))
                wake(display, awake=True)
                probe.turn(on=True)
                dist.barrier()
                t.meter.begin_step()
                started = time.perf_counter()
                yield from itertools.islice(stream, num_steps)
                log.flush()
                seconds["ours"].append(time.perf_counter() - started)
                probe.turn(on=False)
                wake(display, awake=False)
                seconds["after"].append(run_block(tuned, num_steps))
            t.last_step = t.progress.step + 1
            probe.turn(on=True)
            yield next(stream)
            assert probe.recorder.is_on and probe.recorder.step > num_pairs

    data = Blocks.__new__(Blocks)
    data.__dict__.update(t.data.__dict__)
    t.data = data
    train(t)
    log.close()
    dist.barrier()
    if me.rank == 0:
        compare_losses(me.run, losses)
        content = {"num_steps": num_steps, "seconds": seconds}
        (me.run.path / "overhead.json").write_text(json.dumps(content))
    dist.destroy_process_group()


def probe_of(me: Rank) -> Switch:
    """The probe that every rank has; removed from torch while it is the hand loops' turn."""
    recorder = Recorder(me.run.events(me.attempt, me.rank).parent, me.rank)
    timeline.current = recorder.timeline
    timeline.take()  # as rank.py does: steps are those of the training
    DeviceSampler(recorder, os.environ).begin_with_steps()
    return Switch(recorder)


def run_block(loop: Iterator[Tensor], num_steps: int) -> float:
    dist.barrier()
    started = time.perf_counter()
    for _ in range(num_steps):
        next(loop)
    return time.perf_counter() - started


def wake(process: int, *, awake: bool) -> None:
    if dist.get_rank() == 0:
        os.kill(process, signal.SIGCONT if awake else signal.SIGSTOP)


def steps_per_block(loop: Iterator[Tensor], seconds: float) -> int:
    """How many steps a block has: by rank 0's clock, the same on all ranks."""
    step_seconds = min(run_block(loop, 20) for _ in range(5)) / 20
    count = torch.tensor(round(seconds / step_seconds))
    dist.broadcast(count, src=0)
    return max(10, int(count))


def mean_over_ranks(loss: Tensor) -> float:
    mean = loss.detach() / dist.get_world_size()
    dist.all_reduce(mean)
    return float(mean)


def compare_losses(run: RunDir, hand: list[float]) -> None:
    """Loops that do not compute the same cannot be compared."""
    steps = [e for e in read_events(run.events(0, 0)) if e["event"] == "step" and "loss" in e]
    ours = {e["step"]: e["loss"] for e in steps if e["step"] <= len(hand)}
    assert ours, "no step event carries a loss"
    for step, loss in ours.items():
        expected = hand[step - 1]
        assert abs(loss - expected) <= 1e-4 * expected, (step, loss, expected)


# In the process that starts the ranks, and in the one that draws the bar.


def run_display(run: RunDir) -> None:
    """Draw what `allranks run` draws on a terminal, as often, until killed."""
    with open(os.devnull, "w") as nowhere:
        screen = Screen(Console(file=nowhere, force_terminal=True, width=100))
        screen.follow(run, load_job(run.job_file, resolved=True), 0)
        while True:
            screen.update(0)
            time.sleep(0.1)


def measure(
    model: str, num_ranks: int, folder: Path, num_pairs: int, block_seconds: float
) -> dict[str, float]:
    """Start the ranks of one comparison and wait for its numbers."""
    size = MODELS[model]
    job_file = folder / f"{model}.yaml"
    job = {
        "name": model,
        "task": "loop_overhead:Mlp",
        "options": {"layers": size["layers"], "width": size["width"]},
        "batch_size": size["batch_size"],
        "steps": 10_000_000,  # the end comes with the last pair of blocks
    }
    job_file.write_text(json.dumps(job))  # JSON is YAML
    request = prepare.Request(job_file=job_file, layout=f"1x{num_ranks}", runs=folder)
    prepared = prepare.prepare(request)
    run = prepare.open_run(prepared)
    given = prepare.ranks_environment(prepared, run, here=num_ranks, oversubscribe=False)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = {
        **os.environ,
        **given,
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "ALLRANKS_ATTEMPT": "0",
    }
    this = [sys.executable, __file__]
    display = subprocess.Popen([*this, "--display", str(run.path)], env=env)
    turn = ["--rank", str(display.pid), "--pairs", str(num_pairs)]
    command = [*this, *turn, "--block-seconds", str(block_seconds)]
    ranks = [
        subprocess.Popen(command, env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(num_ranks)
    ]
    try:
        while any(rank.poll() is None for rank in ranks):
            if any(rank.poll() for rank in ranks):
                break
            time.sleep(0.1)
    finally:
        for process in [*ranks, display]:
            process.kill()
            process.wait()
    if any(rank.returncode for rank in ranks):
        raise SystemExit(f"{model} on {num_ranks} rank(s) failed: see above")
    measured = json.loads((run.path / "overhead.json").read_text())
    return summarise(measured["seconds"], measured["num_steps"])


def summarise(seconds: dict[str, list[float]], num_steps: int) -> dict[str, float]:
    """Milliseconds of a step, and the ratios."""
    tuned = [(a + b) / 2 for a, b in zip(seconds["before"], seconds["after"], strict=True)]

    def ratio(ours: list[float], theirs: list[float]) -> float:
        return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))

    return {
        "milliseconds": 1000 * statistics.median(tuned) / num_steps,
        "tuned": ratio(seconds["ours"], tuned),
        "default": ratio(seconds["ours"], seconds["default"]),
        "noise": ratio(seconds["after"], seconds["before"]),
    }


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=100, help="pairs of blocks")
    parser.add_argument("--block-seconds", type=float, default=0.25)
    parser.add_argument("--ranks", type=numbers, default=[1, 2], help="default: 1,2")
    parser.add_argument("--model", choices=MODELS, action="append", help="default: both")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--display", type=Path, help=argparse.SUPPRESS)
    wanted = parser.parse_args()
    if wanted.display:
        run_display(RunDir(wanted.display))
    if wanted.rank:
        run_rank(wanted.pairs, wanted.block_seconds, wanted.rank)
        return 0
    print(f"medians of {wanted.pairs} pairs of blocks of {wanted.block_seconds} s")
    print(
        "model  ranks  tuned step  ours/tuned  tuned/tuned  ours/default  scaling ours, tuned  "
        f"at most {LIMIT}x"
    )
    holds = True
    with tempfile.TemporaryDirectory(prefix="allranks-benchmark-") as folder:
        for model in wanted.model or MODELS:
            first: dict[str, float] = {}
            for num_ranks in wanted.ranks:
                found = measure(model, num_ranks, Path(folder), wanted.pairs, wanted.block_seconds)
                first = first or found
                tuned = first["milliseconds"] / found["milliseconds"]
                ours = tuned * first["tuned"] / found["tuned"]
                verdict = found["tuned"] <= LIMIT
                holds = holds and verdict
                print(
                    f"{model:5}  {num_ranks:5}  {found['milliseconds']:7.3f} ms"
                    f"  {found['tuned']:9.3f}x  {found['noise']:10.3f}x  {found['default']:11.3f}x"
                    f"  {ours:11.2f}x {tuned:5.2f}x"
                    f"  {'yes' if verdict else 'NO'}",
                    flush=True,
                )
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
