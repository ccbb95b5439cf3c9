"""The probe's own work takes under 50 us a step, and a step of 5 ms at most 1.01x what it took.

    python benchmarks/probe_cost.py               # about 15 minutes; exit code 1 if it takes more
    python benchmarks/probe_cost.py --pairs 200 --ranks 1       # a first look

An ordinary loop (DataLoader, AdamW, DDP on two ranks) trains in blocks of ten steps, in turns with
the probe and without it, in the same process: without it means that torch has its own functions
back, not that hooks are idle. Chance decides which of a pair comes first: machines have rhythms of
their own. The ten steps after a change are not counted: in them Python finds out anew what it had
known of the functions that were changed, which takes it 200 us a step at first. Each step of a
block has its partner in the other: two ranks that fill their cores wait for the scheduler by whole
ticks, of the length of a step, and a sum over a block would be one of ticks. `ratio` is the median
of the ratios, with a 95% interval by drawing pairs of blocks anew; `nothing/nothing` is the same
without the probe in either block: the noise.

Threads do the rest, seldom: every half second one formats and writes the events, every two seconds
one looks at CPUs, memory and network. That cannot take turns with anything. What it takes is
measured, the events' between steps of the same loop, and added to the ratio as if the training
stood still for it.

`own time` is what the hooks take of a step, by a stopwatch around each of them less one around the
function of torch's that it calls: the median over as many steps, in the same loop. A stopwatch that
comes to its turn after milliseconds of matrices takes microseconds itself: what the same ones show
around functions that do nothing, in every other block, is subtracted and printed beside it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from probe_switch import PLACES, REGISTRIES, Switch
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from allranks.events import FLUSH_SECONDS
from allranks.probe import hooks
from allranks.probe.recorder import Recorder
from allranks.probe.surroundings import SAMPLE_SECONDS, Surroundings

MAX_RATIO, MAX_OWN_MICROSECONDS = 1.01, 50.0
STEP_SECONDS = 0.005
BATCH_SIZE, NUM_FEATURES = 32, 64
WARM_UP_STEPS = 50
WRITINGS = 20
STEPS_PER_BLOCK = SETTLING_STEPS = 10
DRAWS = 1000


class Stopwatch:
    """Time in the probe's hooks, less that in what they call of torch."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._inside = 0.0

    def torch(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self._inside += time.perf_counter() - started

        return call

    def probe(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            inside, started = self._inside, time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                took = time.perf_counter() - started
                self.seconds += took - (self._inside - inside)

        return call


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


def block_seconds(loop: Iterator[None], num_steps: int) -> list[float]:
    """Seconds of each of the next steps."""
    if dist.is_initialized():
        dist.barrier()
    times = [time.perf_counter()]
    for _ in range(num_steps):
        next(loop)
        times.append(time.perf_counter())
    return [end - begin for begin, end in itertools.pairwise(times)]


def width_of_step(seconds: float) -> int:
    """The width at which a step takes so long, by rank 0's clock; the same on all ranks."""
    width = torch.tensor(128)
    while True:
        loop = training(int(width))
        block_seconds(loop, WARM_UP_STEPS)
        # Long enough that the memory it needs has been asked for: that makes steps shorter.
        steps = block_seconds(loop, 40 * STEPS_PER_BLOCK)
        step = torch.tensor(statistics.median(steps[len(steps) // 2 :]))
        if dist.is_initialized():
            dist.broadcast(step, src=0)
        if float(step) >= 0.95 * seconds:
            return int(width)
        width += 64 if float(step) < 0.8 * seconds else 16


def step_pairs(
    width: int, switch: Switch, num_pairs: int, *, probe: bool = True
) -> list[tuple[list[float], list[float]]]:
    """Seconds of the steps with and without the probe, in the two blocks of each pair."""
    loop = training(width)
    pairs = []
    for _ in range(WARM_UP_STEPS):
        next(loop)
    first = random.Random(0)  # the same on all ranks
    for _ in range(num_pairs):
        took = {}
        for on in (True, False) if first.random() < 0.5 else (False, True):
            switch.turn(on=on and probe)
            block_seconds(loop, SETTLING_STEPS)
            took[on] = block_seconds(loop, STEPS_PER_BLOCK)
        pairs.append((took[True], took[False]))
    return pairs


def writing_seconds(width: int, switch: Switch) -> float:
    """What formatting and writing the event of a step takes, of half a second's at once."""
    loop, log = training(width), switch.recorder._log
    assert log is not None
    num_steps = max(1, round(FLUSH_SECONDS / STEP_SECONDS))
    switch.turn(on=True)
    took = []
    for _ in range(WRITINGS):
        with log._writing:  # its own thread has to wait
            for _ in range(num_steps):
                next(loop)
        started = time.perf_counter()
        log.flush("wait")
        took.append((time.perf_counter() - started) / num_steps)
    switch.turn(on=False)
    return statistics.median(took)


def own_seconds(width: int, recorder: Recorder, num_steps: int) -> tuple[list[float], list[float]]:
    """What stopwatches show of each step: around the hooks, and around functions that do nothing.

    The probe stays in torch afterwards.
    """
    watch = Stopwatch()
    # What the probe does within torch's functions is its own too.
    hooks.Arrival.queue = watch.probe(hooks.Arrival.queue)  # type: ignore[method-assign]
    hooks.Arrival.arrive = watch.probe(hooks.Arrival.arrive)  # type: ignore[method-assign]
    own = [watch.torch(getattr(holder, name)) for holder, name in PLACES]
    for (holder, name), function in zip(PLACES, own, strict=True):
        setattr(holder, name, function)
    hooks.install(recorder)
    hooked = [watch.probe(getattr(holder, name)) for holder, name in PLACES]
    idle = [watch.probe(function) for function in own]
    registered = [dict(registry) for registry in REGISTRIES]
    loop = training(width)
    found: dict[bool, list[float]] = {True: [], False: []}
    for block in range((WARM_UP_STEPS + 2 * num_steps) // STEPS_PER_BLOCK):
        on = block % 2 == 0
        for (holder, name), function in zip(PLACES, hooked if on else idle, strict=True):
            setattr(holder, name, function)
        for registry, functions in zip(REGISTRIES, registered, strict=True):
            for number, hook in functions.items():
                registry[number] = watch.probe(hook if on else nothing_of)
        recorder.timeline.restart()
        for _ in range(STEPS_PER_BLOCK):
            watch.seconds = 0.0
            next(loop)
            if block * STEPS_PER_BLOCK >= WARM_UP_STEPS:
                found[on].append(watch.seconds)
    return found[True], found[False]


def nothing_of(*_: Any) -> None:
    pass


def pin(rank: int) -> None:
    """Keep a rank to a core: the longest steps are those of ranks that were moved."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})


def run_rank(num_pairs: int, folder: Path) -> None:
    """In a rank: measure, and leave the numbers in the folder."""
    torch.set_num_threads(1)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world_size > 1:
        pin(rank)
        dist.init_process_group("gloo")
    recorder = Recorder(folder, rank)
    switch = Switch(recorder)
    switch.turn(on=False)
    width = width_of_step(STEP_SECONDS)
    found: dict[str, Any] = {"width": width}
    found["pairs"] = step_pairs(width, switch, num_pairs)
    found["noise"] = step_pairs(width, switch, -(-num_pairs // 4), probe=False)
    found["writing"] = writing_seconds(width, switch)
    assert recorder.is_on and recorder.step > num_pairs
    watched = Recorder(folder / "own", rank)
    found["own"], found["idle"] = own_seconds(width, watched, max(num_pairs, 100))
    assert watched.is_on and watched.step >= num_pairs
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


def median_ratio(
    pairs: Sequence[tuple[Sequence[float], Sequence[float]]],
) -> tuple[float, float, float]:
    """Median over all steps, and a 95% interval of it: steps of a block are not independent."""
    with_probe, without = np.array(pairs).swapaxes(0, 1)
    ratios = with_probe / without
    draw = np.random.default_rng(0)
    medians = [
        np.median(ratios[draw.integers(len(ratios), size=len(ratios))]) for _ in range(DRAWS)
    ]
    low, high = np.quantile(medians, (0.025, 0.975))
    return float(np.median(ratios)), float(low), float(high)


def median_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Median, and a 95% interval of it, by order: nothing is assumed of the noise."""
    ordered = sorted(values)
    reach = 1.96 * math.sqrt(len(ordered)) / 2
    low = max(0, math.floor(len(ordered) / 2 - reach))
    high = min(len(ordered) - 1, math.ceil(len(ordered) / 2 + reach))
    return statistics.median(ordered), ordered[low], ordered[high]


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
        step = statistics.median(seconds for _, block in found["pairs"] for seconds in block)
        background = found["look"] / SAMPLE_SECONDS + found["writing"] / step
        ratio, low, high = (value + background for value in median_ratio(found["pairs"]))
        noise, *_ = median_ratio(found["noise"])
        idle = statistics.median(found["idle"])
        own, own_low, own_high = median_interval([1e6 * (took - idle) for took in found["own"]])
        is_met = ratio <= MAX_RATIO and own <= MAX_OWN_MICROSECONDS
        is_noise = low <= MAX_RATIO and own <= MAX_OWN_MICROSECONDS
        verdict = "holds" if is_met else "NOT SHOWN, noise" if is_noise else "DOES NOT HOLD"
        holds = holds and is_met
        print(
            f"{num_ranks} rank(s), {1e3 * step:.2f} ms"
            f" a step: own time {own:.1f} us ({own_low:.1f} to {own_high:.1f}),"
            f" stopwatches {1e6 * idle:.1f} us;"
            f" ratio {ratio:.4f} ({low:.4f} to {high:.4f}), {100 * background:.3f}% of it for the"
            f" threads, nothing/nothing {noise:.4f}: {verdict}",
            flush=True,
        )
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
