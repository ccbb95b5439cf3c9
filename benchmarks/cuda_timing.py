"""The probe's times on a GPU agree with the profiler's within 3%, and it waits for no stream.

    python benchmarks/cuda_timing.py        # with a GPU, half a minute; exit code 1 if they do not

An ordinary loop trains under torch's profiler, with and without the probe's hooks in torch. For
each event that the probe records, the profiler's own clocks show when the host was there, and when
the device had finished every kernel and copy launched before it. The phases between those moments
are compared with what the probe reads from its events. Calls that wait for the device
(`cuda*Synchronize`) are counted in both traces: the numbers must be equal.
"""

from __future__ import annotations

import bisect
import itertools
import json
import statistics
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.data import DataLoader, TensorDataset

from allranks.probe import hooks
from allranks.probe.recorder import Recorder
from allranks.run.events import read_events
from allranks.timing.timeline import DeviceEvent, Timeline

LIMIT = 0.03
NEGLIGIBLE_SECONDS = 20e-6  # a few launches: of the profiler no more is known
WARM_UP_STEPS = 20
PROFILED_STEPS = 40
PHASES = ("data", "forward", "backward", "optimizer")
MARK = "mark"  # the name of an event that the probe records
HOST_CALLS = ("cuda_runtime", "cuda_driver")
DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
# (name, width, layers, batch): one that keeps the device busy, one that waits for the host
MODELS = (("large", 4096, 8, 8192), ("small", 256, 8, 256))


def training(width: int, layers: int, batch_size: int) -> Iterator[None]:
    """A loop as scripts have it, with names for the profiler; it pauses after every step."""
    torch.manual_seed(0)
    rows = 8 * batch_size
    data = TensorDataset(torch.randn(rows, width), torch.randn(rows, 1))
    body = [layer for _ in range(layers) for layer in (nn.Linear(width, width), nn.ReLU())]
    model = nn.Sequential(*body, nn.Linear(width, 1)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    while True:
        batches = iter(DataLoader(data, batch_size=batch_size, pin_memory=True))
        for _ in range(len(data) // batch_size):
            with record_function("data"):
                inputs, targets = next(batches)
            with record_function("forward"):
                inputs = inputs.cuda(non_blocking=True)
                loss = mse_loss(model(inputs), targets.cuda(non_blocking=True))
            with record_function("backward"):
                loss.backward()
            with record_function("optimizer"):
                optimizer.step()
            optimizer.zero_grad()
            yield


def profiled(loop: Iterator[None]) -> list[dict[str, Any]]:
    """The trace of some steps."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(PROFILED_STEPS):
            next(loop)
        torch.cuda.synchronize()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profiler.export_chrome_trace(file.name)
        events: list[dict[str, Any]] = json.loads(Path(file.name).read_text())["traceEvents"]
        return events


def name_marks(timeline: Timeline) -> None:
    """Have the profiler see where the probe records its events."""
    record = timeline.record_event
    assert record is not None

    def named() -> DeviceEvent | None:
        with record_function(MARK):
            return record()

    timeline.record_event = named


def device_seconds(trace: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Seconds of each phase in every step that has a beginning and an end in the trace."""
    calls = [event for event in trace if event.get("cat") in HOST_CALLS]
    records = sorted(
        event["ts"] + event["dur"]
        for event in trace
        if event.get("cat") == "user_annotation" and event["name"] == MARK
    )
    launched = {event["args"]["correlation"]: event["ts"] for event in calls}
    work = sorted(
        (launched[event["args"]["correlation"]], event["ts"] + event["dur"])
        for event in trace
        if event.get("cat") in DEVICE_WORK
    )
    launches = [at for at, _ in work]
    ends = list(itertools.accumulate((end for _, end in work), max))

    def passed(at: float) -> float:
        """When the device had done all that the host had launched at this moment."""
        before = bisect.bisect(launches, at)
        return max(at, ends[before - 1]) if before else at

    found: dict[str, list[float]] = {phase: [] for phase in PHASES}
    for marks in step_marks(trace, records):
        moments = itertools.pairwise(passed(at) for at in marks)
        for phase, (begin, end) in zip(PHASES, moments, strict=True):
            found[phase].append((end - begin) / 1e6)
    return found


def step_marks(trace: list[dict[str, Any]], records: list[float]) -> list[list[float]]:
    """Where the probe marked each step; the last mark is its end, where the next step begins."""
    ranges: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for event in trace:
        if event.get("cat") == "user_annotation" and event["name"] in PHASES:
            ranges[event["name"]].append((event["ts"], event["ts"] + event["dur"]))

    def within(phase: str, step: int, which: int) -> float:
        low, high = sorted(ranges[phase])[step]
        return [at for at in records if low <= at <= high][which]

    return [
        [
            within("optimizer", step - 1, -1),
            within("data", step, -1),  # the batch has come
            within("backward", step, 0),
            within("backward", step, -1),  # the gradients are there
            within("optimizer", step, -1),
        ]
        for step in range(1, PROFILED_STEPS)
    ]


def waits_for_device(trace: list[dict[str, Any]]) -> Counter[str]:
    return Counter(
        event["name"]
        for event in trace
        if event.get("cat") in HOST_CALLS and "Synchronize" in event["name"]
    )


def probed_seconds(file: Path, first: int) -> dict[str, list[float]]:
    """Seconds of each phase as the probe wrote them; `first`: the second profiled step."""
    steps = [event for event in read_events(file) if event["event"] == "step"]
    wanted = [event for event in steps if event["step"] >= first][: PROFILED_STEPS - 1]
    # Between its steps a script may do anything; this one only waits for data.
    found = {phase: [event[phase] for event in wanted] for phase in PHASES}
    found["data"] = [event["data"] + event["other"] for event in wanted]
    return found


def main() -> int:
    if not torch.cuda.is_available():
        print("this needs a GPU", file=sys.stderr)
        return 2
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    plain = {}
    for name, *shape in MODELS:  # before the hooks are there
        loop = training(*shape)
        for _ in range(WARM_UP_STEPS):
            next(loop)
        plain[name] = waits_for_device(profiled(loop))
    holds = True
    with tempfile.TemporaryDirectory(prefix="allranks-benchmark-") as folder:
        recorder = Recorder(Path(folder), 0)
        hooks.install(recorder)
        for name, *shape in MODELS:
            loop = training(*shape)
            for _ in range(WARM_UP_STEPS):
                next(loop)
            first = recorder.step + 2
            name_marks(recorder.timeline)
            trace = profiled(loop)
            recorder.flush()
            holds &= compare(name, trace, probed_seconds(Path(folder) / "rank-0.jsonl", first))
            added = waits_for_device(trace)
            holds &= added == plain[name]
            print(f"  waits for the device: {dict(added)}; without the probe: {dict(plain[name])}")
        assert recorder.is_on
    return 0 if holds else 1


def compare(name: str, trace: list[dict[str, Any]], probed: dict[str, list[float]]) -> bool:
    by_profiler = device_seconds(trace)
    by_profiler["step"] = [sum(parts) for parts in zip(*by_profiler.values(), strict=True)]
    probed["step"] = [sum(parts) for parts in zip(*probed.values(), strict=True)]
    print(f"{name}: {PROFILED_STEPS - 1} steps, medians")
    holds = True
    for phase, seconds in by_profiler.items():
        theirs, ours = statistics.median(seconds), statistics.median(probed[phase])
        is_met = abs(ours - theirs) <= LIMIT * theirs or theirs < NEGLIGIBLE_SECONDS
        holds &= is_met
        # Data that arrive while the device is still at the previous step take none of its time.
        ratio = f"{ours / theirs:.4f}x" if theirs else "nothing"
        print(
            f"  {phase:<10} profiler {1e3 * theirs:8.3f} ms, probe {1e3 * ours:8.3f} ms:"
            f" {ratio} {'' if is_met else '  DOES NOT HOLD'}",
            flush=True,
        )
    return holds


if __name__ == "__main__":
    sys.exit(main())
