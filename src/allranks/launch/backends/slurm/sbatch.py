"""The script that is submitted to SLURM, built from a job and a layout by pure functions."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allranks.errors import AllranksError
from allranks.job.job import BUILT_IN, Job
from allranks.job.values import Duration
from allranks.launch import env_secrets
from allranks.layout import Layout, split_layouts
from allranks.slurm.commands import parse_time

DEFAULT_GRACE = 120  # seconds; a quarter of the limit where that is less
READ_ONLY = ("BASHOPTS", "BASH_VERSINFO", "EUID", "PPID", "SHELLOPTS", "UID")  # bash's own
GPU_TYPE = r"[A-Za-z0-9_][A-Za-z0-9_.:-]*"
FIND_MODULE = """\
if ! command -v module >/dev/null; then
  for init in /etc/profile.d/{lmod,z00_lmod,modules}.sh; do
    if [ -r "$init" ]; then . "$init"; fi
  done
fi"""

# Directives that have a key of their own, or that would undo what the others rely on.
SLURM_KEYS = (
    "account partition qos constraint reservation exclude dependency exclusive time mem job-name "
    "requeue cpus-per-gpu cpus-per-task mem-per-gpu"
)
INSTEAD = {
    "--layout": "nodes ntasks ntasks-per-node gpus gpus-per-task",
    "slurm.gpu and slurm.gpu_request": "gres gpus-per-node",
    "slurm.grace (when) and slurm.signal (which)": "signal",
    "--runs: logs are in the run's folder": "output error open-mode",
    "slurm.requeue: false": "no-requeue",
    "SLURM_CONF: jobs go to this machine's own cluster": "clusters cluster",
    "a run of its own": "array wrap parsable wait test-only chdir",
}
OWN_KEYS = {name: f"slurm.{name.replace('-', '_')}" for name in SLURM_KEYS.split()}
OWN_KEYS |= {name: key for key, names in INSTEAD.items() for name in names.split()}


@dataclass(frozen=True, slots=True)
class Racer:
    """A layout, and the type of GPU if only one will do: `1x4`, `1x4@a100`."""

    layout: Layout
    gpu: str | None = None

    @classmethod
    def parse(cls, text: str) -> Racer:
        """Read what `str` writes. Raises AllranksError."""
        shape, at, gpu = text.strip().partition("@")
        layout = Layout.parse(shape)
        if at and not re.fullmatch(GPU_TYPE, gpu):
            raise AllranksError(
                f'"{text}" names no type of GPU after "@"', fix=f"write {shape}@a100, or {shape}"
            )
        return cls(layout, gpu or None)

    def __str__(self) -> str:
        return f"{self.layout}@{self.gpu}" if self.gpu else str(self.layout)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What one racer asks SLURM for; None: nothing is asked, and the site's default holds."""

    nodes: int
    tasks_per_node: int
    gpus_per_node: int
    gpu: str | None
    cpus_per_task: int | None
    mem: str | None  # of each node
    exclusive: bool
    seconds: int | None  # the time limit
    grace: int  # seconds before it at which the ranks are told to stop

    @property
    def cpus(self) -> int | None:
        tasks = self.nodes * self.tasks_per_node
        return None if self.cpus_per_task is None else tasks * self.cpus_per_task


def parse_race(text: str) -> list[Racer]:
    """The racers in a list such as `1x4,4x1@a40`. Raises AllranksError."""
    return [Racer.parse(word) for word in split_layouts(text, "race")]


def racers_of(job: Job, race: Sequence[Racer]) -> list[Racer]:
    """The layouts that were asked for, once for each type of GPU that will do."""
    wanted = race or [Racer(job.layout)]
    gpu = job.slurm.gpu
    types: Sequence[str | None] = gpu if isinstance(gpu, tuple) else [gpu]
    for name in types:
        if name and not re.fullmatch(GPU_TYPE, name):
            raise AllranksError(
                f'slurm.gpu: "{name}" is not one type of GPU',
                fix=f"write slurm.gpu: [{', '.join(re.split('[^A-Za-z0-9_.:-]+', name))}]",
            )
    found = [
        racer if racer.gpu else Racer(racer.layout, gpu_type)
        for racer in wanted
        for gpu_type in ([None] if job.slurm.gpus == 0 else types or [None])
    ]
    return list(dict.fromkeys(found))


def ask(job: Job, racer: Racer, *, grace: int | None = None) -> Ask:
    """What the job and the layout need. `grace`: seconds, where more than the default is needed."""
    slurm, layout = job.slurm, racer.layout
    gpus = layout.gpus if slurm.gpus is None else slurm.gpus
    one_task_per_rank = job.command is not None and job.launcher == "srun"
    ranks_per_task = 1 if one_task_per_rank else layout.gpus
    _refuse_pair(job, "cpus_per_gpu", "cpus_per_task")
    _refuse_pair(job, "mem", "mem_per_gpu")
    if gpus == 0 and (slurm.cpus_per_gpu or slurm.mem_per_gpu or racer.gpu):
        raise AllranksError(
            "slurm: cpus_per_gpu, mem_per_gpu and a type of GPU have no meaning with gpus: 0",
            fix="write slurm.cpus_per_task and slurm.mem, or remove slurm.gpus",
        )
    cpus_per_rank = slurm.cpus_per_task or (1 if gpus == 0 else None)
    cpus = cpus_per_rank * ranks_per_task if cpus_per_rank else None
    if slurm.cpus_per_gpu:
        tasks = layout.gpus if one_task_per_rank else 1
        cpus = -(-slurm.cpus_per_gpu * gpus // tasks)
    mem = slurm.mem
    if slurm.mem_per_gpu:
        number, unit = re.fullmatch(r"(\d+)(\D?)", slurm.mem_per_gpu).groups()  # type: ignore[union-attr]
        mem = f"{int(number) * gpus}{unit}"
    seconds = None if slurm.time is None else time_seconds(slurm.time)
    if seconds == 0:
        raise AllranksError(
            f"slurm.time: {slurm.time} is zero",
            fix="write slurm.time=2h, or leave it out for the partition's own limit",
        )
    return Ask(
        nodes=layout.nodes,
        tasks_per_node=layout.gpus if one_task_per_rank else 1,
        gpus_per_node=gpus,
        gpu=racer.gpu,
        cpus_per_task=cpus,
        mem=mem,
        exclusive=slurm.exclusive,
        seconds=seconds,
        grace=grace_seconds(slurm.grace, seconds, grace),
    )


def _refuse_pair(job: Job, one: str, other: str) -> None:
    if getattr(job.slurm, one) and getattr(job.slurm, other):
        raise AllranksError(
            f"slurm.{one} and slurm.{other} are both given", fix=f"remove slurm.{one}"
        )


def grace_seconds(asked: Duration | None, limit: int | None, needed: int | None = None) -> int:
    """How long before the limit the ranks are told; at most half of it."""
    if asked is not None and limit is not None and asked.seconds > limit / 2:
        raise AllranksError(
            f"slurm.grace {asked} is more than half of the time limit of {limit} seconds",
            fix=f"write slurm.grace={Duration(max(1, limit // 2))}, or a longer slurm.time",
        )
    if asked is not None:
        return asked.seconds
    usual = DEFAULT_GRACE if limit is None else min(DEFAULT_GRACE, limit // 4)
    seconds = max(usual, needed or 0)
    return seconds if limit is None else max(1, min(seconds, limit // 2))


def time_seconds(text: str) -> int:
    """Seconds of a time limit: SLURM's forms (60, 90:00, 12:00:00, 2-12, 2-12:30:00), or 2h30m."""
    seconds = parse_time(text)
    return Duration.parse(text).seconds if seconds is None else seconds


def time_text(seconds: int) -> str:
    """As SLURM writes it: 2-12:00:00."""
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    clock = f"{hours:02}:{minutes:02}:{seconds:02}"
    return f"{days}-{clock}" if days else clock


def sbatch_script(
    job: Job,
    racer: Racer,
    *,
    run_dir: Path,
    claim: int,
    folder: Path,
    exclude: str = "",
    dependency: str | None = None,
    grace: int | None = None,
) -> str:
    """The script to send. `claim`: which of the run's claims the job may take (see claims.py)."""
    slurm = job.slurm
    asked = ask(job, racer, grace=grace)
    words = [sys.executable, "-m", "allranks.launch.backends.slurm.allocation", str(run_dir)]
    words += ["--racer", str(racer), "--claim", str(claim)]
    # Ranks get all of it from their launcher; modules and setup see what bash lets us set.
    env = [
        (name, value)
        for name, value in job.env.items()
        if value != BUILT_IN["env"].get(name)
        and name not in READ_ONLY
        and not env_secrets.is_secret(name, value)  # the script is for everyone to read
    ]
    for text in (*words, str(folder), *slurm.modules, slurm.setup, *(value for _, value in env)):
        if re.search("[\0\ud800-\udfff]", text):  # a null byte, or what is no UTF-8
            raise AllranksError(
                f"{text!r:.200} cannot be written into a script",
                fix="remove the non-text characters",
            )
    excluded = ",".join(part for part in (slurm.exclude, exclude) if part)
    directives = _directives(job, asked, run_dir, excluded, dependency or slurm.dependency)
    name = re.sub(r"[^\x20-\x7e]", "?", run_dir.name)
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH {directive}" for directive in directives),
        "",
        f"# Written by allranks for the run {name}; plain `sbatch` can submit it as is.",
        "trap '' USR2  # until Python listens: SLURM may warn of the limit in the first second",
        "set -e",
        f"cd {shlex.quote(str(folder))}",
        *(f"export {name}={shlex.quote(value)}" for name, value in env),
        *([FIND_MODULE, f"module load {shlex.join(slurm.modules)}"] if slurm.modules else []),
        *([setup] if (setup := slurm.setup.strip("\n")) else []),
        f"exec {shlex.join(words)}",
    ]
    return "\n".join(lines) + "\n"


def _directives(
    job: Job, asked: Ask, run_dir: Path, exclude: str, dependency: str | None
) -> Iterator[str]:
    slurm = job.slurm
    # A folder that was renamed by hand may have any name.
    yield f"--job-name={slurm.job_name or re.sub(r'[^A-Za-z0-9_.-]', '_', run_dir.name)}"
    for name in ("account", "partition", "qos", "constraint", "reservation"):
        if getattr(slurm, name) is not None:
            yield f"--{name}={getattr(slurm, name)}"
    yield f"--nodes={asked.nodes}"
    yield f"--ntasks-per-node={asked.tasks_per_node}"
    if asked.gpus_per_node:
        kind = f"{asked.gpu}:" if asked.gpu else ""
        form = "--gpus-per-node=" if slurm.gpu_request == "gpus-per-node" else "--gres=gpu:"
        yield f"{form}{kind}{asked.gpus_per_node}"
    if asked.cpus_per_task is not None:
        yield f"--cpus-per-task={asked.cpus_per_task}"
    if asked.mem is not None:
        yield f"--mem={asked.mem}"
    if asked.exclusive:
        yield "--exclusive"
    if asked.seconds is not None:
        yield f"--time={time_text(asked.seconds)}"
    if exclude:
        yield f"--exclude={exclude}"
    if dependency:
        yield f"--dependency={dependency}"
    # To the batch shell alone: it passes the signal on when all ranks can take it.
    yield f"--signal=B:USR2@{asked.grace}"
    yield "--requeue" if slurm.requeue else "--no-requeue"
    yield "--open-mode=append"
    yield f"--output={_log_path(run_dir)}"
    yield from _other_directives(job)


def _other_directives(job: Job) -> Iterator[str]:
    for name, value in job.slurm.directives.items():
        own = [key for key in OWN_KEYS if key.startswith(name)]  # sbatch takes a beginning too
        if own:
            raise AllranksError(
                f"slurm.directives.{name} would change what allranks asks for itself",
                fix=f"use {OWN_KEYS[min(own)]} instead",
            )
        if not re.fullmatch(r"[a-z][a-z0-9-]*", name):
            raise AllranksError(
                f"slurm.directives.{name} is not the long name of a directive",
                fix="write it as `man sbatch` does, without the dashes in front: mail-type",
            )
        text = "" if value is None else f'="{value}"' if " " in str(value) else f"={value}"
        yield f"--{name}{text}"


def _log_path(run_dir: Path) -> str:
    """The job's log as a directive names it, quoted."""
    if re.search(r'[\x00-\x1f"\\\x7f]', str(run_dir)):
        raise AllranksError(
            f"a SLURM script cannot name the folder {run_dir!s:.200}: it has a quote, "
            "a backslash or a control character in its path",
            fix="use another folder with --runs DIR",
        )
    # In SLURM's file names % begins a pattern; our own is the one for the job's id.
    return f'"{str(run_dir).replace("%", "%%")}/slurm-%j.log"'


def summary(job: Job, racer: Racer, samples_per_epoch: int | None) -> dict[str, Any]:
    """One column of the table that `--dry-run` opens with."""
    asked = ask(job, racer)
    num_gpus, kind = asked.gpus_per_node * asked.nodes, f" x {asked.gpu}" if asked.gpu else ""
    column: dict[str, Any] = {
        "nodes": asked.nodes,
        "ranks": racer.layout.ranks,
        "GPUs": f"{num_gpus}{kind}" if num_gpus else "none",
        "CPUs": asked.cpus or "site default",
        "memory per node": asked.mem or "site default",
        "nodes are": "exclusive" if asked.exclusive else "shared",
        "time limit": time_text(asked.seconds) if asked.seconds else "site default",
    }
    if job.command is None:
        batch = job.batch_size or (job.batch_size_per_rank or 0) * racer.layout.data_ranks
        column["effective batch"] = batch
        column["steps per epoch"] = (
            -(-samples_per_epoch // batch) if samples_per_epoch else "known at the start"
        )
    return column
