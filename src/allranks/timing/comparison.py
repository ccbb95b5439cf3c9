"""Which runs are compared, and with which of them: one rule for every command that says how much
faster more ranks are.

Compared are runs that train the same thing at the same settings on the same kind of device: those
of one benchmark of scaling, or else all of a job. The base is the fewest ranks among them that have
a pace (of several such layouts the fastest), and its pace is the mean of its runs. A run that
failed counts only where its layout has no other.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from allranks.run.folder import RunDir

SAME_JOB = (
    *("name", "task", "command", "options", "batch_size", "batch_size_per_rank", "optimizer"),
    *("lr_scaling", "compress", "precision", "compile", "activation_checkpointing", "launcher"),
)
CPU = "CPU"
SCALING = "scaling"  # the one benchmark whose runs are there to be compared by their layouts


class Paced(Protocol):
    """A run, as far as its pace can be compared."""

    @property
    def run(self) -> str: ...
    @property
    def layout(self) -> str | None: ...
    @property
    def ranks(self) -> int: ...
    @property
    def state(self) -> str: ...
    @property
    def samples_per_second(self) -> float | None: ...


P = TypeVar("P", bound=Paced)


@dataclass(frozen=True, slots=True)
class Base:
    """What others are compared with: the mean pace of these runs of one layout."""

    layout: str
    ranks: int
    samples_per_second: float
    runs: tuple[str, ...]

    def efficiency(self, ranks: int, samples_per_second: float) -> float:
        return samples_per_second / self.samples_per_second * self.ranks / ranks


def counted(runs: Iterable[P]) -> list[P]:
    """Those of a layout's runs that its pace is the mean of."""
    paced = [run for run in runs if run.samples_per_second]
    return [run for run in paced if run.state != "failed"] or paced


def mean_pace(runs: Sequence[Paced]) -> float:
    return statistics.fmean(run.samples_per_second or 0.0 for run in runs)


def base_of(runs: Iterable[Paced]) -> Base | None:
    """The base of runs that can be compared; None if none of them has a pace."""
    by_layout: dict[tuple[int, str], list[Paced]] = {}
    for run in runs:
        if run.layout is not None and run.samples_per_second:
            by_layout.setdefault((run.ranks, run.layout), []).append(run)
    if not by_layout:
        return None
    fewest = min(ranks for ranks, _ in by_layout)
    bases = [
        Base(layout, ranks, mean_pace(those), tuple(run.run for run in those))
        for (ranks, layout), found in by_layout.items()
        if ranks == fewest and (those := counted(found))
    ]
    return max(bases, key=lambda base: base.samples_per_second)


def is_compared(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether a run of the same job is compared with `one`; both by their run.json.

    Runs of one benchmark took turns: they stay among themselves. Other benchmarks measure
    something else than how layouts scale.
    """
    mine, theirs = bench_of(one), bench_of(other)
    if mine.get("kind") == SCALING:
        return mine.get("id") == theirs.get("id")
    return is_comparable(other)


def is_comparable(info: Mapping[str, Any]) -> bool:
    """Whether a run is one to compare layouts with, by its run.json."""
    return bench_of(info).get("kind") in (None, SCALING)


def same_job(job: Mapping[str, Any], info: Mapping[str, Any], run: RunDir) -> dict[str, Any]:
    """What must agree between runs that are compared; the seed, for one, need not."""
    same = {"name": run.job_name} | {key: job[key] for key in SAME_JOB if job.get(key) is not None}
    data = job.get("data")
    if isinstance(data, dict) and "num_workers" in data:
        same["data.num_workers"] = data["num_workers"]
    if bench_of(info).get("mode") == "weak":
        same.pop("batch_size", None)  # it grows with the ranks, which is the point
        same["scaling"] = "weak"
    return same


def identity(same: Mapping[str, Any]) -> str:
    """What `same_job` found, as one text."""
    return json.dumps(same, sort_keys=True, default=str)


def device_name(start: Mapping[str, Any], info: Mapping[str, Any], *, uses_gpu: bool) -> str:
    """What a rank computes on: as it says; of a script, which does not, as its machine has it."""
    if start.get("device"):
        return str(start["device"])
    names = list(gpu_memory(info))
    return names[0] if names else "GPU" if uses_gpu else CPU


def gpu_memory(info: Mapping[str, Any]) -> dict[str, Any]:
    """The GPUs of a run's machine by name, with their bytes, as its run.json has them."""
    hardware = info.get("hardware")
    gpus = hardware.get("gpus") or [] if isinstance(hardware, dict) else []
    return {str(gpu.get("name")): gpu.get("memory_bytes") for gpu in gpus if isinstance(gpu, dict)}


def bench_of(info: Mapping[str, Any]) -> dict[str, Any]:
    """What run.json says of the benchmark that the run is part of; empty if of none."""
    bench = info.get("bench")
    return bench if isinstance(bench, dict) else {}
