"""The settings that runs were started with, for a page to share: no secrets, nothing twice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from allranks.launch.backends import TABLE
from allranks.show.tables import Table, markdown
from allranks.show.text import in_markdown
from allranks.timing.comparison import bench_of

SHOWN_SETTINGS = (
    *("task", "command", "launcher", "options", "batch_size", "batch_size_per_rank"),
    *("micro_batch_size", "epochs", "steps", "seed", "precision", "compile"),
    *("activation_checkpointing", "lr_scaling", "compress", "optimizer", "data", "checkpoint"),
    *("slurm", "env"),
)
# What became of them in the ranks, as the first of them said.
APPLIED = {
    "precision": "precision",
    "compile": "compile",
    "backend": "backend",
    "link": "network",
    "rank_batch": "batch of a rank",
    "accumulation": "accumulation",
    "num_workers": "loader workers",
    "threads": "threads",
}
# Variables of the environment whose values may be told.
OPEN_VARIABLES = ("NCCL_", "OMP_", "CUDA_", "TORCH_", "PYTORCH_")


@dataclass(frozen=True, slots=True)
class Settings:
    """One run's: the job as resolved, what its run.json says, and what its first rank said."""

    run: str
    job_name: str
    job: Mapping[str, Any]
    info: Mapping[str, Any]
    start: Mapping[str, Any]


def settings_lines(runs: Sequence[Settings]) -> list[str]:
    """A table for the runs of each job; what differs between them has their names beside it."""
    lines = []
    by_job = sorted(runs, key=lambda one: one.job_name)
    for job, group in groupby(by_job, key=lambda one: one.job_name):
        same = list(group)
        known = {one.run: rows_of(one) for one in same}
        keys = dict.fromkeys(key for rows in known.values() for key in rows)
        rows = [[key, told({run: known[run].get(key, "") for run in known})] for key in keys]
        lines += [f"### {in_markdown(job)}: {in_markdown(', '.join(known))}", ""]
        table = markdown(Table("", ("setting", "value"), rows, texts=("value",)))
        lines += table if rows else ["None is known.", ""]
    return lines or ["None.", ""]


def told(by_run: Mapping[str, str]) -> str:
    """One value for all runs; or each with those that have it, by the end of their names."""
    values = dict.fromkeys(by_run.values())
    if len(values) == 1:
        return next(iter(values))
    return "; ".join(
        f"{value or 'none'} (…{', …'.join(run[-4:] for run in by_run if by_run[run] == value)})"
        for value in values
    )


def rows_of(one: Settings) -> dict[str, str]:
    """Every setting of a run that is set, in a line each."""
    shown = [key for key in SHOWN_SETTINGS if key not in TABLE or key == one.info.get("backend")]
    # One that is measured was told to go on for ever: how long the job is, is in its record.
    job = {**one.job, **bench_of(one.info).get("job", {})}
    rows = {key: job_setting(key, job.get(key)) for key in shown}
    for key, word in APPLIED.items():
        if is_set(one.start.get(key)):
            rows[f"applied: {word}"] = setting(one.start[key])
    rows["typed"] = " ".join(typed(str(word)) for word in one.info.get("overrides") or [])
    code, packages = one.info.get("code") or {}, one.info.get("packages") or {}
    if code.get("commit"):
        rows["code"] = str(code["commit"])[:12] + (", changed" if code.get("dirty") else "")
    versions = [f"{name} {packages[name]}" for name in ("allranks", "torch") if name in packages]
    rows["versions"] = ", ".join(versions)
    return {key: value for key, value in rows.items() if value}


def is_set(value: object) -> bool:
    return value not in (None, "", [], {})


def job_setting(key: str, value: object) -> str:
    """A setting of the job; of its variables only the values that are known to be no secrets."""
    if not is_set(value):
        return ""
    if key != "env":
        return setting(value)
    if not isinstance(value, Mapping):
        return ""
    return ", ".join(
        f"{name}={setting(item)}" if is_open(str(name)) else str(name)
        for name, item in value.items()
    )


def typed(word: str) -> str:
    """What was typed; `env.NAME=VALUE` as in the job."""
    name, sign, _ = word.removeprefix("env.").partition("=")
    return f"env.{name}" if sign and word.startswith("env.") and not is_open(name) else word


def is_open(name: str) -> bool:
    return name.startswith(OPEN_VARIABLES)


def setting(value: object) -> str:
    """A value in one line; of a mapping, what is set in it."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={setting(item)}" for key, item in value.items() if is_set(item))
    if isinstance(value, list):
        return ", ".join(map(setting, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)
