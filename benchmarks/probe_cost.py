"""The probe's own work takes under 50 us a step, and a step of 5 ms at most 1.01x what it took.

    python benchmarks/probe_cost.py               # about 4 minutes; exit code 1 if it takes more
    python benchmarks/probe_cost.py --pairs 200 --ranks 1       # a first look

An ordinary loop (DataLoader, AdamW, DDP on two ranks) trains in blocks of a few steps, in turns
with the probe and without it, in the same process: without it means that torch has its own
functions back, not that hooks are idle. Whether a pair begins with the probe or without it
alternates too. Formatting and writing the events, which a thread does in a training, is done
within the blocks that have the probe. `own time` is the median of the differences between the
blocks of a pair, with a model so small that they stand out; the `ratio` is the median of those
of the blocks of a pair at 5 ms a step. Both have a 95% interval, by the order of the pairs.

Beside it a thread looks at CPUs, memory and network every two seconds; it cannot take turns with
anything, so what one look takes is measured and its share of the two seconds added to the ratio.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer as optimizers
from torch.utils.data import DataLoader, TensorDataset, dataloader

from allranks.probe import hooks
from allranks.probe.recorder import Recorder
from allranks.probe.surroundings import SAMPLE_SECONDS, Surroundings

MAX_RATIO, MAX_OWN_MICROSECONDS = 1.01, 50.0
STEP_SECONDS = 0.005
BATCH_SIZE, NUM_FEATURES = 32, 64
WARM_UP_STEPS = 50
STEPS_PER_BLOCK = {"small": 50, "large": 10}


class Switch:
    """The probe in torch, to be taken out and put back between steps."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        places: list[tuple[Any, str]] = [
            (torch.autograd, "backward"),
            (dataloader._BaseDataLoaderIter, "__next__"),
            (dataloader._BaseDataLoaderIter, "_next_index"),
            (dataloader.DataLoader, "__iter__"),
            (dist.Work, "wait"),
            (DistributedDataParallel, "_sync_buffers"),
        ]
        own = [getattr(holder, name) for holder, name in places]
        hooks.install(recorder)
        self._places = [
            (holder, name, getattr(holder, name), before)
            for (holder, name), before in zip(places, own, strict=True)
        ]
        changed = [name for _, name, hooked, before in self._places if hooked is not before]
        assert len(changed) == len(places), changed
        self._registries: list[Any] = [
            optimizers._global_optimizer_pre_hooks,
            optimizers._global_optimizer_post_hooks,
        ]
        self._registered = [dict(registry) for registry in self._registries]
        assert all(self._registered)

    def turn(self, *, on: bool) -> None:
        for holder, name, hooked, before in self._places:
            setattr(holder, name, hooked if on else before)
        for registry, registered in zip(self._registries, self._registered, strict=True):
            registry.clear()
            if on:
                registry.update(registered)
        if on:
            self.recorder.timeline.restart()


def training(width: int) -> Iterator[None]:
    """A loop as scripts have it; it pauses after every step."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(4096, NUM_FEATURES), torch.randn(4096, 1))
    model: nn.Module = nn.Sequential(
        nn.Linear(NUM_FEATURES, width), nn.ReLU(), nn.Linear(width, width), nn.Linear(width, 1)
    )
    if dist.is_initialized():
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    while True:
        for inputs, targets in DataLoader(data, batch_size=BATCH_SIZE):
            mse_loss(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
            yield


def block_seconds(loop: Iterator[None], num_steps: int, finish: Callable[[], None]) -> float:
    if dist.is_initialized():
        dist.barrier()
    started = time.perf_counter()
    for _ in range(num_steps):
        next(loop)
    finish()
    return time.perf_counter() - started


def nothing() -> None:
    pass


def width_of_step(seconds: float) -> int:
    """The width at which a step takes so long, by rank 0's clock; the same on all ranks."""
    width = torch.tensor(128)
    for _ in range(40):
        loop = training(int(width))
        took = [block_seconds(loop, 5, nothing) / 5 for _ in range(5)]
        step = torch.tensor(min(took))
        if dist.is_initialized():
            dist.broadcast(step, src=0)
        if float(step) >= 0.95 * seconds:
            break
        width += 64
    return int(width)


def measure(width: int, switch: Switch, num_pairs: int, num_steps: int) -> dict[str, list[float]]:
    """Seconds of the blocks with and without the probe, pair by pair."""
    loop = training(width)
    seconds: dict[str, list[float]] = {"with": [], "without": []}
    for _ in range(WARM_UP_STEPS):
        next(loop)
    for pair in range(num_pairs):
        for on in (True, False) if pair % 2 else (False, True):
            switch.turn(on=on)
            took = block_seconds(loop, num_steps, switch.recorder.flush if on else nothing)
            seconds["with" if on else "without"].append(took / num_steps)
    return seconds


def run_rank(num_pairs: int, folder: Path) -> None:
    """In a rank: measure, and leave the numbers in the folder."""
    torch.set_num_threads(1)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world_size > 1:
        dist.init_process_group("gloo")
    recorder = Recorder(folder, rank)
    switch = Switch(recorder)
    switch.turn(on=False)
    width = width_of_step(STEP_SECONDS)
    found: dict[str, Any] = {"width": width}
    for name, chosen in (("small", 16), ("large", width)):
        found[name] = measure(chosen, switch, num_pairs, STEPS_PER_BLOCK[name])
    assert recorder.is_on and recorder.step > num_pairs
    surroundings = Surroundings(recorder, os.environ)
    looks = []
    for _ in range(50):
        started = time.perf_counter()
        surroundings.sample()
        looks.append(time.perf_counter() - started)
    found["look"] = statistics.median(looks)
    if rank == 0:
        (folder / "cost.json").write_text(json.dumps(found))
    if world_size > 1:
        dist.barrier()
        dist.destroy_process_group()


def start_ranks(num_ranks: int, num_pairs: int) -> dict[str, Any]:
    """Start the ranks of one comparison and wait for rank 0's numbers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    with tempfile.TemporaryDirectory(prefix="allranks-benchmark-") as folder:
        command = [sys.executable, __file__, "--pairs", str(num_pairs), "--folder", folder]
        env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        env |= {"WORLD_SIZE": str(num_ranks), "OMP_WAIT_POLICY": "passive"}
        ranks = [
            subprocess.Popen(command, env={**env, "RANK": str(rank)}) for rank in range(num_ranks)
        ]
        try:
            codes = [rank.wait() for rank in ranks]
        finally:
            for process in ranks:
                process.kill()
        if any(codes):
            raise SystemExit(f"{num_ranks} rank(s) failed: see above")
        found: dict[str, Any] = json.loads((Path(folder) / "cost.json").read_text())
        return found


def median_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Median, and a 95% interval of it, by order: nothing is assumed of the noise."""
    ordered = sorted(values)
    reach = 1.96 * math.sqrt(len(ordered)) / 2
    low = max(0, math.floor(len(ordered) / 2 - reach))
    high = min(len(ordered) - 1, math.ceil(len(ordered) / 2 + reach))
    return statistics.median(ordered), ordered[low], ordered[high]


def pairs_of(seconds: dict[str, list[float]]) -> list[tuple[float, float]]:
    return list(zip(seconds["with"], seconds["without"], strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=1000, help="pairs of blocks")
    parser.add_argument("--ranks", type=int, action="append", help="default: 1, then 2")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    wanted = parser.parse_args()
    if wanted.folder:
        run_rank(wanted.pairs, wanted.folder)
        return 0
    print(f"medians of {wanted.pairs} pairs of blocks, with their 95% intervals")
    print(f"at most {MAX_OWN_MICROSECONDS:.0f} us of its own, and {MAX_RATIO}x")
    holds = True
    for num_ranks in wanted.ranks or (1, 2):
        found = start_ranks(num_ranks, wanted.pairs)
        small, large = pairs_of(found["small"]), pairs_of(found["large"])
        own, own_low, own_high = median_interval([1e6 * (a - b) for a, b in small])
        background = found["look"] / SAMPLE_SECONDS
        ratio, low, high = median_interval([a / b + background for a, b in large])
        is_met = ratio <= MAX_RATIO and own <= MAX_OWN_MICROSECONDS
        holds = holds and is_met
        print(
            f"{num_ranks} rank(s): own time {own:.1f} us ({own_low:.1f} to {own_high:.1f})"
            f" beside a step of {1e3 * statistics.median(b for _, b in small):.2f} ms;"
            f" ratio {ratio:.4f} ({low:.4f} to {high:.4f})"
            f" at {1e3 * statistics.median(b for _, b in large):.2f} ms a step,"
            f" {100 * background:.3f}% of it for the background:"
            f" {'holds' if is_met else 'DOES NOT HOLD'}",
            flush=True,
        )
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
