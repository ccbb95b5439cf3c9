"""Which runs train the same thing at the same settings, so that their paces can be compared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from allranks.rundir import RunDir

SAME_JOB = (
    *("name", "task", "command", "options", "batch_size", "batch_size_per_rank", "optimizer"),
    *("lr_scaling", "compress", "precision", "compile", "activation_checkpointing", "launcher"),
)
# The one in C takes a tenth of the time, and is not everywhere.
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read_job(run: RunDir) -> dict[str, Any]:
    """The content of job.yaml; empty if there is none that can be read."""
    try:
        content = yaml.load(run.job_file.read_bytes(), _Loader)  # safe: a SafeLoader either way
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return content if isinstance(content, dict) else {}


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


def bench_of(info: Mapping[str, Any]) -> dict[str, Any]:
    """What run.json says of the benchmark that the run is part of; empty if of none."""
    bench = info.get("bench")
    return bench if isinstance(bench, dict) else {}
