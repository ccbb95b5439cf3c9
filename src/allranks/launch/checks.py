"""What is refused or warned about before anything is written or started."""

from __future__ import annotations

import os
import pwd
import re
import shlex
import shutil
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from allranks.errors import AllranksError
from allranks.job.job import Job, Pipeline
from allranks.job.stages import num_micro_batches
from allranks.launch.models import check_models
from allranks.layout import MAX_GPUS_PER_NODE, Layout
from allranks.machine import allotted
from allranks.machine.allotted import ONEDNN_LIMIT
from allranks.machine.gpus import local_gpus
from allranks.machine.processes import Setting
from allranks.show.numbers import count

if TYPE_CHECKING:
    from allranks.launch.prepare import Prepared

# The most ranks per CPU core: with more, a measurement says nothing about scaling, and a run takes
# minutes to start.
MEASURED_PER_CPU, RUN_PER_CPU = 4, 16


def check_owner(path: Path, info: os.stat_result | None = None) -> None:
    """Refuse to run what another user wrote, or anyone may write: it would run as this user.

    Reading it is another matter, and members of a group trust each other. Root's files are trusted,
    and under `sudo` those of the user who typed it. `info`: of the file that was opened, where the
    path may lead elsewhere by now.
    """
    path = path.resolve()
    trusted = os.environ.get("ALLRANKS_TRUST", "").split(os.pathsep)
    if any(path.is_relative_to(Path(folder).resolve()) for folder in trusted if folder):
        return
    info = info or path.stat()
    why = ""
    if str(info.st_uid) not in (str(os.geteuid()), "0", os.environ.get("SUDO_UID")):
        why, fix = f"{path} belongs to {_user(info.st_uid)}", "copy it, and run the copy"
    elif info.st_mode & stat.S_IWOTH:
        why, fix = f"anyone may write to {path}", f"chmod o-w {shlex.quote(str(path))}"
    if why:
        folder = path if path.is_dir() else path.parent
        raise AllranksError(
            f"{why}: it would run as {_user(os.geteuid())}",
            fix=f"{fix}; or, if you trust everyone who can write to it: "
            f"export ALLRANKS_TRUST={folder}",
        )


def _user(number: int) -> str:
    try:
        return f"user {pwd.getpwuid(number).pw_name}"
    except KeyError:
        return f"user {number}"


def check_machine(
    layout: Layout, *, here: int, oversubscribe: bool = False, is_measured: bool = False
) -> list[str]:
    """Refuse more ranks (`here`) than this machine can run; remarks on those that it runs badly."""
    ranks, gpus = count(here, "rank"), len(local_gpus())
    if gpus and here > gpus and not oversubscribe:
        raise AllranksError(
            f"layout {layout} needs {here} GPUs here, but this machine has {gpus}",
            fix=f"write --layout 1x{gpus}, or add --oversubscribe to let ranks share a GPU "
            "for testing",
        )
    if gpus:
        shared = f"{ranks} share {count(gpus, 'GPU')}: timings are meaningless"
        return [shared] if here > gpus else []
    cpus = allotted.cpus_allotted()
    cores, most = count(cpus, "CPU core"), cpus * (MEASURED_PER_CPU if is_measured else RUN_PER_CPU)
    if here > most and not oversubscribe:
        fits = Layout(1, min(most, MAX_GPUS_PER_NODE))
        fix = f"write --layout {fits} or a smaller one, or add --oversubscribe to start it anyway"
        if is_measured:
            fix = f"leave it out, or measure at most {fits} here; on a cluster: --backend slurm"
        what = f"layout {layout} is larger than this machine: {ranks} would take turns on {cores}"
        raise AllranksError(what, fix=fix)
    return [f"{ranks} on {cores}: they take turns"] if here > cpus else []


def settle_precision(prepared: Prepared) -> list[str]:
    """Limit oneDNN to instructions that really run on this CPU; what was decided, in words.

    Only where it can matter: for a task in bf16 or fp16, or a script, on a machine without GPUs.
    """
    job = prepared.job
    given = {**os.environ, **prepared.variables, **job.env}
    may_matter = job.command is not None or job.precision in ("bf16", "fp16")
    if not may_matter or {ONEDNN_LIMIT, "DNNL_MAX_CPU_ISA"} & set(given) or local_gpus():
        return []
    limit = allotted.usable_instructions()
    dies = "this CPU lists AMX but cannot run it: bf16 would be killed by SIGILL (tested)"
    if limit is None and job.command is None:
        raise AllranksError(
            f"precision: {job.precision} cannot be computed on this machine: {dies}, "
            f"even with {ONEDNN_LIMIT}={allotted.INSTRUCTION_SETS[-1]}",
            fix="write precision: fp32",
        )
    if not limit:
        return [] if limit is not None else [f"{dies}, whatever oneDNN is limited to"]
    prepared.variables = {**prepared.variables, ONEDNN_LIMIT: limit}
    prepared.settings = [Setting(ONEDNN_LIMIT, limit, dies)]
    return [f"{ONEDNN_LIMIT}={limit}: {dies}"]


def warnings(*jobs: Job) -> list[str]:
    """Settings that do not do what people expect, in a job or in its forms for several layouts."""
    said = [line for job in jobs for line in (*_idle_ranks(job), *_unread_variables(job))]
    return [*dict.fromkeys([*said, *_unused_micro_batches(jobs)])]


def _idle_ranks(job: Job) -> Iterator[str]:
    layout, batch, shares = job.layout, job.batch_size, job.layout.data_ranks
    if job.command is None and batch is not None and batch < shares:
        nodes, idle = min(layout.nodes, batch), (shares - batch) * layout.ranks // shares
        near = f"--layout {Layout(nodes, batch // nodes)}, or " if shares == layout.ranks else ""
        of_them = "" if shares == layout.ranks else " that get samples of their own (dp x fsdp)"
        yield (
            f"batch_size {batch} is less than the {shares} ranks of layout {layout}{of_them}: "
            f"{count(idle, 'rank')} will never get a sample; write "
            f"{near}batch_size={shares} or more"
        )


def _unread_variables(job: Job) -> Iterator[str]:
    if "NCCL_TIMEOUT" in {**os.environ, **job.env}:
        yield (
            "NCCL_TIMEOUT is set, but NCCL does not read it; "
            f"the job's key `timeout` ({job.timeout}) is what counts"
        )


def _unused_micro_batches(jobs: Sequence[Job]) -> Iterator[str]:
    """Not refused: a job keeps its keys where a run moves to a layout without pp."""
    default, with_pp = Pipeline(), [job for job in jobs if job.layout.pp > 1]
    for job in with_pp:
        wanted, largest = job.pipeline.micro_batches, _largest_micro_batch(job)
        if wanted and job.micro_batch_size not in (None, "auto", largest):
            yield (
                f"micro_batch_size={job.micro_batch_size} has no effect on layout {job.layout}: "
                f"pipeline.micro_batches={wanted} makes micro-batches of "
                f"{count(largest, 'sample')}; leave one of them out"
            )
    for job in jobs[-1:] if not with_pp else ():
        layout, wanted = job.layout, job.pipeline.micro_batches
        keys = [f"pipeline.{key}" for key, value in default if getattr(job.pipeline, key) != value]
        has = "have" if len(keys) > 1 else "has"
        is_possible = layout.ranks % (2 * layout.tp) == 0
        near = Layout(layout.nodes, layout.gpus, tp=layout.tp, pp=2) if is_possible else "1x2:pp=2"
        size = f", or micro_batch_size={_largest_micro_batch(job)} to accumulate gradients"
        if keys:
            yield (
                f"{' and '.join(keys)} {has} no effect on layout {layout}, which has no pp; "
                f"write --layout {near}{size if wanted and job.micro_batch_size is None else ''}"
            )


def _largest_micro_batch(job: Job) -> int:
    """How many samples pipeline.micro_batches leaves for each."""
    share = job.batch_size_per_rank or -(-(job.batch_size or 1) // job.layout.data_ranks)
    return -(-share // (job.pipeline.micro_batches or 1))


def check_supported(*jobs: Job) -> None:
    """Refuse what a job may say but the training, or its model, cannot do."""
    for job in jobs:
        _check_supported(job)
    check_models(jobs)


def _check_supported(job: Job) -> None:
    if "{stage}" in f"{job.command} {job.resume}" and not job.stage:
        raise AllranksError(
            "command: {stage} is used, but nothing is staged", fix="write stage: [PATH of the data]"
        )
    layout = job.layout
    if job.command is None and layout.pp > 1:
        batch_size = job.batch_size or (job.batch_size_per_rank or 0) * layout.data_ranks
        num_micro_batches(job, layout, batch_size)
    if job.compress is not None and layout.dp < max(layout.ranks, 2):
        shape = f"{layout.nodes}x{layout.gpus}" if layout.ranks > 1 else "1x2"
        why = "divides the model" if layout.ranks > 1 else "has only one rank"
        raise AllranksError(
            f"compress: {job.compress.name} is for ranks that each hold the whole model (dp), "
            f"but layout {layout} {why}",
            fix=f"write --layout {shape}, or compress=null",
        )


def check_command(job: Job) -> None:
    """Refuse a command that does not exist, before every rank fails with a traceback of its own."""
    program, script, *_ = [*job.argv, "", ""]
    if "{" in program or not program:
        return
    is_python = re.fullmatch(r"python[\d.]*", os.path.basename(program)) is not None
    path = {**os.environ, **job.env}.get("PATH")  # as the ranks will have it
    if not is_python and shutil.which(program, path=path) is None:
        raise no_program(program)
    if is_python and script.endswith(".py") and "{" not in script and not os.path.isfile(script):
        raise AllranksError(
            f"the script {script!r} was not found in {Path.cwd()}",
            fix="write its path from here, or change to its folder first",
        )


def no_program(program: str) -> AllranksError:
    """The error for a program that cannot be started, with what to type instead."""
    why, fix, typed = "was not found here", "write its path", shlex.quote(program)
    if os.path.isdir(program):
        why, fix = "is a folder", "name a file"
    elif os.path.isfile(program) and program.endswith(".py"):
        fix = f"write python {typed}"
    elif os.path.isfile(program) and "/" not in program:
        fix = f"write ./{typed}"
    elif os.path.isfile(program):
        why, fix = "is not executable", f"chmod +x {typed}"
    elif " " in program:
        fix = f"leave out the quotes: -- {shlex.join(program.split())}"
    return AllranksError(f"the command's program {program!r} {why}", fix=fix)
