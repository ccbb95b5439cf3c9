"""A save stalls a CPU's loop for at most 30% of a torch.save, and costs a GPU at most 10% of one.

    python benchmarks/checkpoint_stall.py       # 2 to 5 minutes; exit code 1 if it takes more

On a machine without a GPU (`language` 16m, one rank): how long a save stalls the loop, from the
second save on. With a GPU (`language` 124m): all training time lost to a save, including steps that
are slowed down while it is written in the background. Either is compared with torch.save of the
same tensors (model and optimizer) to the same disk. Both keep as many files as a run keeps; ours
are synced and checksummed, while torch.save's need not have reached the disk when it returns. For
comparison, the time of torch.save when its file is deleted immediately, so that its pages are
reused and never written, is printed too. Blocks of steps with a save, blocks without one, and
blocking saves take turns.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from allranks.launch import prepare

if TYPE_CHECKING:  # torch must not be imported before the environment of a rank is set
    from allranks.train.data import Batch, Progress
    from allranks.train.loop import Training

STAGING_LIMIT = 0.30
LOST_LIMIT = 0.10
KEPT = 3  # the default of checkpoint.keep
STEPS_BEFORE_SAVE = 3  # a save does not find the device idle


@dataclass
class Seconds:
    """One entry for each round, the first save being left out."""

    staging: list[float] = field(default_factory=list)  # the loop stands still
    with_save: list[float] = field(default_factory=list)
    without: list[float] = field(default_factory=list)
    blocking: list[float] = field(default_factory=list)  # torch.save, the newest files kept
    vanishing: list[float] = field(default_factory=list)  # torch.save, its file deleted at once
    first_staging: float = 0.0
    writing: float = 0.0  # of the first save, with nothing else going on
    num_steps: int = 0


def training(folder: Path) -> Training:
    """One rank's training, as `allranks run` would build it in this process."""
    from allranks.machine.gpus import local_gpus

    job = {
        "name": "stall",
        "task": "language",
        "options": {"size": "124m" if local_gpus() else "16m"},
        "batch_size": 16 if local_gpus() else 2,
        "steps": 1_000_000,  # the end comes with the last round
    }
    job_file = folder / "job.yaml"
    job_file.write_text(json.dumps(job))  # JSON is YAML
    prepared = prepare.prepare(prepare.Request(job_file=job_file, runs=folder))
    run = prepare.open_run(prepared)
    os.environ.update(prepare.ranks_environment(prepared, run, here=1, oversubscribe=False))
    one = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    here = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "ALLRANKS_ATTEMPT": "0"}
    os.environ.update(one | here)

    from allranks.run.events import EventLog
    from allranks.train import build

    me = build.Rank.from_environment()
    device = build.choose_device(me)
    build.join_world(me, prepared.job, device)
    t = build.build(me, prepared.job, device, EventLog(run.events(0, 0)))
    t.evaluations = {}  # an epoch may end here, and that would take longer than all the saves
    return t


def measure(t: Training, folder: Path, num_rounds: int) -> Seconds:
    """Train in blocks of steps, with and without a save."""
    import torch.distributed as dist

    from allranks.train import loop
    from allranks.train.data import TrainingData

    seconds = Seconds()

    class Blocks(TrainingData):
        """The training's own data, with saves between the steps, where train() would have them."""

        def batches(self, progress: Progress) -> Iterator[Batch]:
            stream = super().batches(progress)
            for _ in range(5):
                yield next(stream)  # the optimizer has its state, everything is compiled
            started = now(t)
            loop.save(t)
            t.checkpointer.finish_copying()
            seconds.first_staging = t.checkpointer.stall
            t.checkpointer.finish()
            seconds.writing = time.perf_counter() - started
            for _ in range(KEPT):
                blocking_save(t, folder, keep=KEPT)
            started = now(t)
            for _ in range(5):
                yield next(stream)
            step_seconds = (now(t) - started) / 5
            # Long enough for the writing to end within the block.
            covering = math.ceil(2 * seconds.writing / step_seconds)
            seconds.num_steps = STEPS_BEFORE_SAVE + max(5, covering)
            for _ in range(num_rounds):
                seconds.blocking.append(blocking_save(t, folder, keep=KEPT))
                seconds.vanishing.append(blocking_save(t, folder / "vanishing", keep=0))
                started = now(t)
                for _ in range(seconds.num_steps):
                    yield next(stream)
                seconds.without.append(now(t) - started)
                started = now(t)
                for number in range(seconds.num_steps):
                    if number == STEPS_BEFORE_SAVE:
                        loop.save(t)
                    yield next(stream)
                seconds.staging.append(t.checkpointer.stall)
                t.checkpointer.finish()
                seconds.with_save.append(now(t) - started)
            t.last_step = t.progress.step + 1
            yield next(stream)

    data = Blocks.__new__(Blocks)
    data.__dict__.update(t.data.__dict__)
    t.data = data
    loop.train(t)
    t.meter.log.close()
    dist.destroy_process_group()
    return seconds


def now(t: Training) -> float:
    """The time, once the device has done everything it was given."""
    if t.device.type == "cuda":
        import torch

        torch.cuda.synchronize()
    return time.perf_counter()


def blocking_save(t: Training, folder: Path, *, keep: int) -> float:
    """What people write by hand, with the same state that our save copies."""
    import torch

    from allranks.train.parallelize import plain

    folder.mkdir(exist_ok=True)
    path = folder / f"{time.time_ns()}.pt"
    started = now(t)
    state = {"model": plain(t.model).state_dict(), "optimizer": t.optimizer.state_dict()}
    torch.save(state, path)
    elapsed = time.perf_counter() - started
    for old in sorted(folder.glob("*.pt"), reverse=True)[keep:]:
        old.unlink()
    return elapsed


def report(seconds: Seconds, *, on_gpu: bool) -> bool:
    """Print the numbers; whether the claim holds."""
    pairs = zip(seconds.with_save, seconds.without, strict=True)
    lost = statistics.median(a - b for a, b in pairs)
    # The change from one block without a save to the next is what the difference cannot resolve.
    changes = [abs(b - a) for a, b in itertools.pairwise(seconds.without)]
    staging, blocking = statistics.median(seconds.staging), statistics.median(seconds.blocking)
    print(f"medians of {len(seconds.staging)} saves, blocks of {seconds.num_steps} steps")
    rows = {
        "blocking torch.save": blocking,
        "staging": staging,
        "slowed steps": lost - staging,
        "staging plus slowed steps": lost,
        "torch.save, deleted at once": statistics.median(seconds.vanishing),
        "noise (two blocks without a save)": statistics.median(changes),
        "staging of the first save": seconds.first_staging,
        "first save, waited for": seconds.writing,
        "a step": statistics.median(seconds.without) / seconds.num_steps,
    }
    for name, value in rows.items():
        print(f"{name:34} {value:8.4f} s  {value / blocking:7.1%} of torch.save")
    share, limit = (lost, LOST_LIMIT) if on_gpu else (staging, STAGING_LIMIT)
    holds = share <= limit * blocking
    what = "staging plus slowed steps" if on_gpu else "staging"
    print(f"{what} is at most {limit:.0%} of torch.save: {'yes' if holds else 'NO'}")
    return holds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--folder", type=Path, help="on the disk to write to; default: TMPDIR's")
    wanted = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="allranks-benchmark-", dir=wanted.folder) as folder:
        t = training(Path(folder))
        seconds = measure(t, Path(folder), wanted.rounds)
    return 0 if report(seconds, on_gpu=t.device.type == "cuda") else 1


if __name__ == "__main__":
    sys.exit(main())
