"""Model FLOPs utilisation: how much of its GPUs' peak a run's training step reaches."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from allranks.machine.gpus import Precision, find_gpu
from allranks.run.record import RankRecord
from allranks.timing.comparison import device_name, gpu_memory
from allranks.timing.steps import Timing

# What these are called in the catalogue of GPUs; the first for which a GPU has a peak counts.
PEAKS: Mapping[str, tuple[Precision, ...]] = {
    "float32": ("fp32",),
    "tf32": ("tf32", "fp32"),
    "float16": ("fp16",),
    "bfloat16": ("bf16",),
    "float8": ("fp8",),
}
NEGLIGIBLE = 0.01  # of all operations: below this, a precision without a known peak is ignored


def utilisation(
    records: Iterable[RankRecord], measured: Timing | None, info: Mapping[str, Any]
) -> float | None:
    """Model FLOPs utilisation, 0 to 1: the mean over the traced ranks; None if it is not known.

    `measured`: the steps that were not traced; `info`: the run's run.json.
    """
    if measured is None or not measured.step_seconds:
        return None
    shares: list[float] = []
    for record in records:
        traces = [event for event in record.others["trace"] if "problem" not in event]
        if not traces:  # in a long run, not every rank's trace is read
            continue
        uses_gpu = traces[-1].get("device") == "cuda"
        name = device_name(record.start, info, uses_gpu=uses_gpu)
        seconds = least_seconds(traces[-1].get("flops", {}), name, gpu_memory(info).get(name))
        if not uses_gpu or not seconds:
            return None
        shares.append(seconds / measured.step_seconds)
    return math.fsum(shares) / len(shares) if shares else None


def least_seconds(
    flops: Mapping[str, float], device: str, memory_bytes: int | None = None
) -> float | None:
    """How long these operations take a GPU at its peak; None if a peak is not known."""
    board = find_gpu(device, memory_bytes)
    if board is None:
        return None
    total, seconds = math.fsum(flops.values()), 0.0
    for precision, number in flops.items():
        known = [name for name in PEAKS.get(precision, ()) if name in board.peak_flops]
        if known:
            seconds += number / board.peak_flops[known[0]]
        elif number > NEGLIGIBLE * total:
            return None
    return seconds
