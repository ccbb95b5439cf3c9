"""The probe takes under 50 us per step, and a step of 5 ms takes at most 1.01x as long with it.

    python benchmarks/probe_cost.py               # 8 minutes a row; exit code 1 if it costs more
    python benchmarks/probe_cost.py --pairs 1000 --ranks 1       # a first look
    python benchmarks/probe_cost.py --gpu        # 3 minutes: steps of 5 and 50 ms on a GPU
    python benchmarks/probe_cost.py --trace      # 3 minutes: what a trace leaves behind

An ordinary loop (DataLoader, AdamW, DDP on two ranks) trains with and without the probe, in turns,
in the same process. Without it, torch has its own functions back; the hooks are not merely idle. A
pair is one step of each, each after an uncounted one, in which the caches recover from the switch.
Which comes first is random, because machines have rhythms of their own. `ratio` is the median of
the ratios, with a 95% interval from resampling rounds of 20 pairs, which lie within half a second;
`nothing/nothing` is the same with no probe in either step: the noise. Two ranks are measured if
each has two cores: with fewer, their training, gloo's threads and the probe's take turns, and the
scheduler decides how long a step takes; `--ranks 2` measures that anyway.

Threads do the rest, rarely: every half second one formats and writes the events, and every two
seconds one samples CPUs, memory and network. That cannot be measured in turns. Its time is measured
separately (for events, between steps of the same loop) and added to the ratio as if the training
stood still for it.

`own time` is what the hooks take of a step: a stopwatch around each of them, minus one around the
torch function that it calls; the median over as many steps, in the same loop. A stopwatch that runs
after milliseconds of matrix products takes microseconds itself, so the time that the same
stopwatches show around empty functions, in turns with them, is subtracted and printed too.

On a GPU, the host waits for the device at the end of every step, so nothing that the probe does is
hidden by kernels that are still to run. A step of 5 ms may take 1.03x as long, one of 50 ms 1.01x.

`--trace` compares two probes in the same way, one that traces steps and has made its first trace,
and one that never does: at most 1.005x, and no claim if the interval is wider than 0.02. It runs on
a GPU if there is one. The profiler has then run in the process of both probes; what that costs both
shows in `after/before`: 200 steps of the second probe after the first one's trace, over 200 before
it. `nothing/nothing` compares 200 steps and the next 200 with no trace in between.
"""

from __future__ import annotations

import argparse
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
from probe_switch import Functions, Turns
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from allranks.machine import allotted
from allranks.probe import backward_pass, hooks
from allranks.probe.device_sampler import SAMPLE_SECONDS, DeviceSampler
from allranks.probe.profilers import Profilers
from allranks.probe.recorder import Recorder
from allranks.probe.tracing import Tracer
from allranks.run.events import FLUSH_SECONDS

MAX_RATIO, MAX_OWN_MICROSECONDS = 1.01, 50.0
MAX_GPU_RATIOS = {0.005: 1.03, 0.05: 1.01}  # by seconds of a step
MAX_TRACE_RATIO, MAX_INTERVAL = 1.005, 0.02
STEP_SECONDS = 0.005
BATCH_SIZE, NUM_FEATURES = 32, 64
WARM_UP_STEPS = 50
STEPS_BESIDE_TRACE = 200
WRITINGS = 20
PAIRS_PER_ROUND, DRAWS = 20, 1000
CORES_PER_RANK = 2


class Stopwatch:
    """Time in the probe's hooks, minus that in the torch functions that they call."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._inside = 0.0
        self._depth = 0  # of torch's functions, one of which may call another

    def torch(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            self._depth += 1
            try:
                return function(*args, **kwargs)
            finally:
                self._depth -= 1
                if not self._depth:
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


def training(width: int, turns: Turns, device: str = "cpu") -> Iterator[None]:
    """A training loop like that of many scripts; it yields after every step."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(4096, NUM_FEATURES), torch.randn(4096, 1))
    with torch.device(device):  # a GPU draws the billions of weights of a long step at once
        model: nn.Module = nn.Sequential(
            nn.Linear(NUM_FEATURES, width), nn.ReLU(), nn.Linear(width, width), nn.Linear(width, 1)
        )
    if dist.is_initialized():
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for inputs, targets in turns.batches(data, BATCH_SIZE):
        mse_loss(model(inputs.to(device)), targets.to(device)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if device != "cpu":
            torch.cuda.synchronize()
        yield


def step_seconds(loop: Iterator[None]) -> float:
    """How long the next step takes."""
    started = time.perf_counter()
    next(loop)
    return time.perf_counter() - started


def width_of_step(seconds: float, turns: Turns, device: str = "cpu") -> int:
    """The width at which a step takes this long, by rank 0's clock; the same on all ranks."""
    width = torch.tensor(128 if device == "cpu" else 8192)
    while True:
        # The shortest of several: a CPU that is slow for a while would make the step too short.
        medians = []
        for _ in range(3 if device == "cpu" else 1):
            loop = training(int(width), turns, device)
            # Long enough for the process to have all its memory: steps are shorter from then on.
            steps = [
                step_seconds(loop) for _ in range(WARM_UP_STEPS + (200 if device == "cpu" else 20))
            ]
            medians.append(statistics.median(steps[len(steps) // 2 :]))
        step = torch.tensor(min(medians))
        if dist.is_initialized():
            dist.broadcast(step, src=0)
        if float(step) >= 0.98 * seconds:
            return int(width)
        if device == "cpu":
            width += 64 if float(step) < 0.8 * seconds else 16
        else:  # the optimizer's memory takes most of the time
            width = (64 + width * math.sqrt(seconds / float(step)) // 64 * 64).long()


def step_pairs(
    width: int, *functions: Functions, num_pairs: int, device: str = "cpu"
) -> list[tuple[float, float]]:
    """Seconds of steps with the first of two sets of functions, and with the second."""
    turns = Turns(*functions)
    loop = training(width, turns, device)
    for number in (0, 1):
        turns.take(number)
        for _ in range(WARM_UP_STEPS):
            next(loop)
    first = random.Random(0)  # the same on all ranks
    pairs = []
    for _ in range(num_pairs):
        took = [0.0, 0.0]
        for number in (0, 1) if first.random() < 0.5 else (1, 0):
            turns.take(number)
            next(loop)
            took[number] = step_seconds(loop)
        pairs.append((took[0], took[1]))
    return pairs


def writing_seconds(
    width: int, probe: Functions, recorder: Recorder, seconds: float, device: str
) -> float:
    """Seconds to format and write a step's event, if those of half a second are written at once."""
    turns, log = Turns(probe), recorder._log
    assert log is not None
    turns.take(0)
    loop = training(width, turns, device)
    num_steps = max(1, round(FLUSH_SECONDS / seconds))
    log.pause(True)  # its own thread, which lets the training go first now and then
    took = []
    for _ in range(WRITINGS):
        for _ in range(num_steps):
            next(loop)
        started = time.perf_counter()
        log.flush("wait")
        took.append((time.perf_counter() - started) / num_steps)
    log.pause(False)
    return statistics.median(took)


def own_seconds(
    width: int, torchs: Functions, recorder: Recorder, num_steps: int, device: str
) -> tuple[list[float], list[float]]:
    """What stopwatches show per step: around the hooks, and around functions that do nothing."""
    watch = Stopwatch()
    # What the probe does within torch's functions is its own too.
    backward_pass.Arrival.queue = watch.probe(backward_pass.Arrival.queue)  # type: ignore[method-assign]
    backward_pass.Arrival.arrive = watch.probe(backward_pass.Arrival.arrive)  # type: ignore[method-assign]
    idle = torchs.within(watch.torch)
    idle.put()
    hooked = Functions.in_place(hooks.install(recorder))
    turns = Turns(hooked.within(watch.probe), idle.within(watch.probe))
    loop = training(width, turns, device)
    found: tuple[list[float], list[float]] = ([], [])
    for step in range(WARM_UP_STEPS + num_steps):
        for number in (0, 1):
            turns.take(number)
            next(loop)
            watch.seconds = 0.0
            next(loop)
            if step >= WARM_UP_STEPS:
                found[number].append(watch.seconds)
    return found


def run_rank(num_pairs: int, folder: Path, seconds: float, device: str) -> None:
    """In a rank: measure, and leave the numbers in the folder."""
    torch.set_num_threads(1)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world_size > 1:
        dist.init_process_group("gloo")
    torchs = Functions.in_place()
    recorder = Recorder(folder, rank)
    probe = Functions.in_place(hooks.install(recorder))
    torchs.put()
    width = width_of_step(seconds, Turns(torchs), device)
    found: dict[str, Any] = {"width": width}
    found["pairs"] = step_pairs(width, probe, torchs, num_pairs=num_pairs, device=device)
    quarter = -(-num_pairs // 4)
    found["noise"] = step_pairs(width, torchs, torchs, num_pairs=quarter, device=device)
    found["writing"] = writing_seconds(width, probe, recorder, seconds, device)
    assert recorder.is_on and recorder.step > num_pairs
    watched = Recorder(folder / "own", rank)
    num_steps = max(num_pairs // 4, 100 if device == "cpu" else 20)
    found["own"], found["idle"] = own_seconds(width, torchs, watched, num_steps, device)
    assert watched.is_on and watched.step >= num_pairs // 4
    device_sampler = DeviceSampler(recorder, os.environ)
    looks = []
    for _ in range(50):
        started = time.perf_counter()
        device_sampler.sample()
        looks.append(time.perf_counter() - started)
    found["look"] = statistics.median(looks)
    if rank == 0:
        (folder / "cost.json").write_text(json.dumps(found))
    if world_size > 1:
        dist.barrier()
        dist.destroy_process_group()


def trace_rank(num_pairs: int, folder: Path) -> None:
    """In a rank: steps with a probe that has traced, beside those with one that never traces."""
    torch.set_num_threads(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torchs, found = Functions.in_place(), dict[str, Any]()
    width = width_of_step(STEP_SECONDS, Turns(torchs), device)
    recorders = [Recorder(folder / name, 0) for name in ("traces", "never")]
    Tracer(recorders[0], Profilers(recorders[0]))
    events: list[str] = []
    recorders[0].write = lambda event, **fields: events.append(event)  # type: ignore[method-assign]
    probes = []
    for recorder in recorders:
        torchs.put()
        probes.append(Functions.in_place(hooks.install(recorder)))
    turns = Turns(*probes)
    loop = training(width, turns, device)
    turns.take(1)
    for _ in range(WARM_UP_STEPS):
        next(loop)
    for name in ("earlier", "before"):
        found[name] = [step_seconds(loop) for _ in range(STEPS_BESIDE_TRACE)]
    turns.take(0)
    while "trace" not in events:
        next(loop)
    turns.take(1)
    for _ in range(WARM_UP_STEPS):
        next(loop)
    found["after"] = [step_seconds(loop) for _ in range(STEPS_BESIDE_TRACE)]
    found["pairs"] = step_pairs(width, *probes, num_pairs=num_pairs, device=device)
    found["device"] = device
    (folder / "cost.json").write_text(json.dumps(found))


def print_trace_cost(num_pairs: int) -> bool:
    """Print what tracing costs after the first trace; returns whether the claim holds."""
    found = start_ranks(1, num_pairs, "--trace")
    step = statistics.median(without for _, without in found["pairs"])
    ratio, low, high = median_ratio(found["pairs"])
    earlier, before, after = (statistics.median(found[n]) for n in ("earlier", "before", "after"))
    is_met = ratio <= MAX_TRACE_RATIO and high - low <= MAX_INTERVAL
    is_noise = low <= MAX_TRACE_RATIO
    print(
        f"{found['device']}, {1e3 * step:.2f} ms a step, after the first trace:"
        f" trace/none {ratio:.4f} ({low:.4f} to {high:.4f}), at most {MAX_TRACE_RATIO};"
        f" after/before {after / before:.4f}, nothing/nothing {before / earlier:.4f}:"
        f" {'holds' if is_met else 'NOT SHOWN, noise' if is_noise else 'DOES NOT HOLD'}",
        flush=True,
    )
    return is_met


def pairs_of(seconds: float, pairs: int) -> int:
    """How many pairs of steps of this length to measure, if so many are measured of short ones."""
    return max(100, round(pairs * STEP_SECONDS / seconds))


def print_cost(
    num_ranks: int, num_pairs: int, most: float, seconds: float, *, on_gpu: bool = False
) -> bool:
    """Print what the probe costs in steps of this length; returns whether the claim holds."""
    more = ("--seconds", str(seconds), *(["--gpu"] if on_gpu else []))
    found = start_ranks(num_ranks, num_pairs, *more)
    step = statistics.median(without for _, without in found["pairs"])
    background = found["look"] / SAMPLE_SECONDS + found["writing"] / step
    ratio, low, high = (value + background for value in median_ratio(found["pairs"]))
    noise, *_ = median_ratio(found["noise"])
    idle = statistics.median(found["idle"])
    own, own_low, own_high = median_interval([1e6 * (took - idle) for took in found["own"]])
    is_little = own <= MAX_OWN_MICROSECONDS or on_gpu
    is_met, is_noise = ratio <= most and is_little, low <= most and is_little
    print(
        f"{num_ranks} rank(s){' on a GPU' if on_gpu else ''}, {1e3 * step:.2f} ms"
        f" a step: own time {own:.1f} us ({own_low:.1f} to {own_high:.1f}),"
        f" stopwatches {1e6 * idle:.1f} us;"
        f" ratio {ratio:.4f} ({low:.4f} to {high:.4f}), {100 * background:.3f}% of it for the"
        f" threads, nothing/nothing {noise:.4f}; at most {most}:"
        f" {'holds' if is_met else 'NOT SHOWN, noise' if is_noise else 'DOES NOT HOLD'}",
        flush=True,
    )
    return is_met


def start_ranks(num_ranks: int, num_pairs: int, *more: str) -> dict[str, Any]:
    """Start the ranks of one comparison and wait for rank 0's numbers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    with tempfile.TemporaryDirectory(prefix="allranks-benchmark-") as folder:
        command = [sys.executable, __file__, "--pairs", str(num_pairs), "--folder", folder, *more]
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


def median_ratio(pairs: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """Median over all pairs, and its 95% interval: pairs of one round are not independent."""
    ratios = np.array([with_probe / without for with_probe, without in pairs])
    rounds = np.array_split(ratios, math.ceil(len(ratios) / PAIRS_PER_ROUND))
    draw = np.random.default_rng(0)
    medians = [
        np.median(np.concatenate([rounds[n] for n in draw.integers(len(rounds), size=len(rounds))]))
        for _ in range(DRAWS)
    ]
    low, high = np.quantile(medians, (0.025, 0.975))
    return float(np.median(ratios)), float(low), float(high)


def median_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Median and its 95% interval, by rank order: nothing is assumed about the noise."""
    ordered = sorted(values)
    reach = 1.96 * math.sqrt(len(ordered)) / 2
    low = max(0, math.floor(len(ordered) / 2 - reach))
    high = min(len(ordered) - 1, math.ceil(len(ordered) / 2 + reach))
    return statistics.median(ordered), ordered[low], ordered[high]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--pairs", type=int, default=10_000, help="pairs of steps, if they take 5 ms; else fewer"
    )
    parser.add_argument(
        "--ranks", type=int, action="append", help="default: 1, then 2 if cores suffice"
    )
    parser.add_argument("--gpu", action="store_true", help="steps on a GPU")
    parser.add_argument("--seconds", type=float, help="of a step; with --gpu, only that row")
    parser.add_argument("--trace", action="store_true", help="only what a trace leaves behind")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    wanted = parser.parse_args()
    if wanted.folder and wanted.trace:
        trace_rank(wanted.pairs, wanted.folder)
        return 0
    if wanted.folder:
        device = "cuda" if wanted.gpu else "cpu"
        run_rank(wanted.pairs, wanted.folder, wanted.seconds or STEP_SECONDS, device)
        return 0
    print("medians of pairs of steps, with their 95% intervals")
    if wanted.trace:
        return 0 if print_trace_cost(wanted.pairs) else 1
    if wanted.gpu:
        rows = [
            print_cost(1, pairs_of(seconds, wanted.pairs), most, seconds, on_gpu=True)
            for seconds, most in MAX_GPU_RATIOS.items()
            if wanted.seconds in (None, seconds)
        ]
        return 0 if all(rows) else 1
    ranks = wanted.ranks or [1, 2]
    num_cores = allotted.cpus_allotted()
    if not wanted.ranks and num_cores < CORES_PER_RANK * 2:
        ranks = [1]
        print(f"2 ranks: not measured here, on {num_cores} cores (see above; --ranks 2 does)")
    seconds = wanted.seconds or STEP_SECONDS
    rows = [
        print_cost(number, pairs_of(seconds, wanted.pairs), MAX_RATIO, seconds) for number in ranks
    ]
    return 0 if all(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
