"""Turns what was typed into a run to start: a new one, or the next attempt of an old one."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from allranks import __version__
from allranks.errors import AllranksError
from allranks.job.job import BUILT_IN, Job, load_job
from allranks.job.values import Duration
from allranks.job.yaml_lines import EXCLUSIVE
from allranks.launch import env_secrets
from allranks.launch.checks import check_owner
from allranks.launch.launchers import find_launcher, spell, with_layout
from allranks.layout import Layout
from allranks.machine import allotted, inventory
from allranks.machine.processes import Setting
from allranks.run import claims, commits, stacks
from allranks.run.folder import (
    RunDir,
    create_run,
    find_run,
    no_readable_checkpoint,
    write_atomically,
)

DEFAULT_TIMEOUT = Duration(1800)
ATTEMPT_FILE = "attempt.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the user typed."""

    job_file: Path | None = None
    overrides: Sequence[str] = ()
    command: Sequence[str] | None = None
    typed: Sequence[str] = ()  # the words before that command, `allranks` left out
    layout: str | None = None
    resume: str | None = None
    force: bool = False
    here: bool = False  # run here even if SLURM gave us several nodes
    leads: bool = True  # False on nodes other than 0, since node 0 holds the run
    runs: Path = Path("runs")


@dataclass(slots=True, kw_only=True)
class Prepared:
    """A run to start. Nothing is written until `open_run`."""

    request: Request
    job: Job
    run: RunDir | None  # None: a new one
    attempt: int = 0
    checkpoint: str = ""  # the checkpoint to resume from
    threads: int | None = None  # per rank, as when it was written in the same layout
    claim: int | None = None  # the claim taken for it; None without hard links
    variables: dict[str, str] = field(default_factory=dict)  # of this attempt's ranks alone
    settings: list[Setting] = field(default_factory=list)  # those of them that have a reason
    bench: dict[str, Any] = field(default_factory=dict)  # the benchmark that it is part of
    changes: list[dict[str, Any]] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    @property
    def layout(self) -> Layout:
        return self.job.layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """`attempts/N/attempt.json`: what whoever starts an attempt tells the launchers of its nodes.

    It is written once, before any rank starts; a launcher is given only its path.
    """

    number: int
    layout: str
    checkpoint: str  # to resume from; empty: start at step 0
    threads: int | None  # per rank, as when the checkpoint was written in the same layout
    claim: int | None
    nodes: Sequence[str]  # names by which they reach each other; the first one leads
    port: int  # of the first node, where the others meet it
    max_restarts: int | None = None  # None: what the job says
    oversubscribe: bool = False
    check: Sequence[str] = ()  # arguments of the preflight, where launchers are to run it

    @property
    def master(self) -> str:
        return f"{self.nodes[0]}:{self.port}"

    def prepared(self, run: RunDir, variables: Mapping[str, str]) -> Prepared:
        """What the launcher of one node starts; `variables`: for its ranks only."""
        return Prepared(
            request=Request(runs=run.path.parent, leads=False),
            # Not the file's layout: a run that is being moved has its next one there already.
            job=load_resolved(run, layout=self.layout),
            run=run,
            attempt=self.number,
            checkpoint=self.checkpoint,
            threads=self.threads,
            claim=self.claim,
            variables=dict(variables),
        )


def write_attempt(prepared: Prepared, run: RunDir, **more: Any) -> Path:
    """Write attempt.json for what was prepared; `more`: its nodes, their port, and the rest."""
    attempt = Attempt(
        number=prepared.attempt,
        layout=str(prepared.layout),
        checkpoint=prepared.checkpoint,
        threads=prepared.threads,
        claim=prepared.claim,
        **more,
    )
    path = run.attempt(attempt.number) / ATTEMPT_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(asdict(attempt), indent=2) + "\n")
    return path


def read_attempt(path: Path) -> Attempt:
    return Attempt(**json.loads(path.read_text()))


def prepare(request: Request) -> Prepared:
    """Check everything that can be checked before anything is written or started."""
    if request.job_file is not None and request.job_file.exists():  # else loading it says so
        check_owner(request.job_file)
    if request.resume is None:
        job = _load(request)
        refuse_launcher(job, request)
        return Prepared(request=request, job=job, run=None)
    named = None if request.job_file is None else _load(request).name
    run = find_run(request.runs, request.resume, named)
    check_owners(run)
    if request.leads and run.is_live():
        with run.held():  # says who holds it
            pass
    prepared = _next_attempt(request, run)
    refuse_launcher(prepared.job, request)
    if prepared.job.command is None:
        _choose_checkpoint(prepared, run)
    elif not prepared.job.last:
        prepared.remarks.append(
            "the script starts from its beginning, unless it finds its own checkpoint: "
            "the job does not say where that is (last: PATH)"
        )
    return prepared


def check_owners(run: RunDir) -> None:
    """Refuse to start anything from a run that is not this user's."""
    for path in (run.path, run.job_file):
        if path.exists():
            check_owner(path)


def refuse_launcher(job: Job, request: Request) -> None:
    """Refuse a command that starts ranks itself: each rank of the layout would train by itself."""
    meant = find_launcher(job.argv) if job.command is not None else None
    if meant is None:
        return
    layout, command = meant.layout(job.layout), spell(meant.command)
    also = "" if layout == job.layout else f" and layout: {layout}"
    if request.command is not None:
        fix = f"allranks {spell(with_layout(request.typed, layout))} -- {command}"
    else:
        file = request.job_file or "the job file"
        fix = f"write command: {command}{also} in {file}"
    raise AllranksError(
        f"{meant.launcher} starts ranks, and so does allranks: each rank of layout {job.layout} "
        "would start a whole training run of its own",
        fix=fix,
    )


def _load(request: Request, earlier: Sequence[str] = ()) -> Job:
    return load_job(
        request.job_file,
        request.overrides,
        earlier=earlier,
        command=request.command,
        layout=request.layout,
    )


def load_resolved(run: RunDir, overrides: Sequence[str] = (), *, layout: str | None = None) -> Job:
    """The job in the run's folder, with the overrides that are typed now."""
    job = load_job(run.job_file, overrides, layout=layout, resolved=True)
    return env_secrets.restored(job, run)


def _next_attempt(request: Request, run: RunDir) -> Prepared:
    """The run's next attempt, with the changes that were asked for and are allowed."""
    before = load_resolved(run)
    if request.job_file is None and request.command is None:
        job = load_resolved(run, request.overrides, layout=request.layout)
    else:
        # What was typed at the start still holds: only a changed file is a change.
        job = env_secrets.restored(_load(request, run.info().get("overrides", [])), run)
    env_secrets.check(job, run)
    changes = before.differences(job)
    forbidden = [change for change in changes if change.mathematics]
    if forbidden and not request.force:
        lines = [f"{change.key}: {change.ours!r} became {change.theirs!r}" for change in forbidden]
        raise AllranksError(
            f"run {run.name} cannot resume with different mathematics: {'; '.join(lines)}",
            fix="undo the change, start a new run without --resume, or add --force to do it anyway",
        )
    records = env_secrets.public_changes(changes)
    return Prepared(
        request=request,
        job=job,
        run=run,
        attempt=next_attempt(run),
        changes=records,
        remarks=[f"{one['key']}: {one['before']} -> {one['now']}" for one in records],
    )


def next_attempt(run: RunDir) -> int:
    return max(run.attempts(), default=-1) + 1


def newest_checkpoint(run: RunDir) -> str | None:
    """The name of the checkpoint that the next attempt would resume from."""
    commit, _ = commits.newest_whole(run.checkpoints)
    return commit.path.name if commit else None


def _choose_checkpoint(prepared: Prepared, run: RunDir) -> None:
    commit, damaged = commits.newest_whole(run.checkpoints)
    prepared.remarks += damaged
    if commit is None and damaged:
        raise no_readable_checkpoint(run, damaged)
    if commit is None:
        prepared.remarks.append("no committed checkpoint yet: starting at step 0")
        return
    manifest = commit.manifest()
    prepared.checkpoint = commit.path.name
    removed = "; damaged checkpoints are removed" if damaged else ""
    prepared.remarks.append(f"resuming after step {commit.step}{removed}")
    if manifest.get("layout") == str(prepared.layout):
        # Sums over another number of threads round differently.
        prepared.threads = manifest.get("threads")


def hold_run(prepared: Prepared, held: ExitStack) -> Prepared:
    """Take the run's folder for this process alone; returns what to start, as of then."""
    request = prepared.request
    run = prepared.run = prepared.run or create_run(request.runs, prepared.job.name)
    held.enter_context(run.held())
    jobs = run.info().get("jobs")
    if jobs:
        check_not_in_queue(run)
    unseen = run.refuse_if_held_unseen()
    try:
        # Jobs of this run that wait in a queue, and processes that see no lock, find it taken.
        prepared.claim = claims.take_next(run.claims, layout=str(prepared.layout), run=run.name)
    except claims.NoLinks:
        if jobs:
            raise
    now = prepared
    if request.resume is not None and prepared.attempt != next_attempt(run):
        now = prepare(replace(request, leads=False))  # another resume came and went in between
        now.claim, now.variables, now.bench = prepared.claim, prepared.variables, prepared.bench
        now.settings = prepared.settings
    now.remarks += [unseen] if unseen else []
    return now


def check_not_in_queue(run: RunDir) -> None:
    """Refuse to take a run from a job that is training it: not every file system shows its lock."""
    from allranks.launch import backends

    queue = backends.look([run])
    holder = claims.newest(run.claims)
    job = queue.jobs.get(holder.job) if holder is not None else None
    if job is not None and not job.waits:
        raise AllranksError(
            f"run {run.name} is being trained by job {job.job} on {', '.join(job.nodes)}",
            fix=f"stop it first: allranks stop {run.name}",
        )


def open_run(prepared: Prepared, *, backend: str = "local") -> RunDir:
    """Write what is about to start into its folder: job.yaml as resolved, run.json."""
    run = prepared.run or create_run(prepared.request.runs, prepared.job.name)
    env_secrets.write_job(run, prepared.job)
    attempt: dict[str, Any] = {
        "attempt": prepared.attempt,
        "layout": str(prepared.layout),
        "started": time.time(),
        "checkpoint": prepared.checkpoint or None,
        "last_changed": last_change(run, prepared.job),
    }
    if prepared.settings:
        attempt["settings"] = [asdict(setting) for setting in prepared.settings]

    def start(info: dict[str, Any]) -> None:
        info |= describe_run(prepared, run, info)
        info |= {"backend": backend, "queued": False, "hardware": inventory.inventory()}
        info.pop("ended", None)
        # With what was changed when the job was sent, where that was not now.
        attempt["changes"] = [*info.pop("changes", []), *prepared.changes]
        info["attempts"] = [*info.get("attempts", []), attempt]

    run.update_info(start)
    commits.clean(run.checkpoints, claim=prepared.claim, chosen=prepared.checkpoint)
    return run


def describe_run(prepared: Prepared, run: RunDir, info: dict[str, Any]) -> dict[str, Any]:
    """What run.json says about a run before any rank has started."""
    request = prepared.request
    return {
        "v": 1,
        "run": run.name,
        "created": info.get("created", time.time()),
        "job_file": str(request.job_file.absolute()) if request.job_file else info.get("job_file"),
        "overrides": typed_in_all(info.get("overrides", []), request),
        "layout": str(prepared.layout),
        "jobs": info.get("jobs", []),
        "cwd": os.getcwd(),
        "code": inventory.code_version(Path.cwd()),
        "allranks": __version__,
        "packages": inventory.package_versions(),
        **({"bench": prepared.bench} if prepared.bench else {}),
    }


def typed_in_all(earlier: Sequence[str], request: Request) -> list[str]:
    """The overrides of all attempts; a later one replaces the same key, or one that excludes it."""
    now = [*request.overrides, *([f"layout={request.layout}"] if request.layout else [])]
    keys = {override.partition("=")[0] for override in now}
    keys |= {key for pair in EXCLUSIVE for key in pair if keys & set(pair)}
    kept = [old for old in earlier if old.partition("=")[0] not in keys]
    return [env_secrets.public_override(one) for one in (*kept, *now)]


def fill_command(prepared: Prepared, run: RunDir, attempt: int) -> list[str]:
    """The user's command for this layout and attempt, its placeholders filled in."""
    job, last = prepared.job, last_of(prepared.job, run)
    words = job.argv  # {stage} is filled in where the copy is made: see rank_env
    if job.resume and attempt > 0 and Path(last).exists():
        words += shlex.split(job.resume)
    values = {**_placeholders(prepared.layout, run), "{last}": last}
    path = job.env.get("PATH", os.environ.get("PATH"))  # as the ranks have it
    return [find_python(words[0], path), *(_fill(word, values) for word in words[1:])]


@cache
def find_python(program: str, path: str | None) -> str:
    """The program; `python` is our own interpreter where the one on PATH has no torch."""
    if program not in ("python", "python3"):
        return program
    found = shutil.which(program, path=path)
    if found is not None and Path(found).parent == Path(sys.executable).parent:
        return program
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)"
    try:
        done = subprocess.run([found or "", "-c", code], capture_output=True, timeout=20)
        return program if done.returncode == 0 else sys.executable
    except (OSError, subprocess.SubprocessError):
        return sys.executable


def last_of(job: Job, run: RunDir) -> str:
    """Where the user's script keeps its newest checkpoint; empty if the job does not say."""
    return _fill(job.last or "", _placeholders(job.layout, run))


def has_checkpoint(job: Job, run: RunDir) -> bool:
    """Whether a later attempt would have a checkpoint to resume from."""
    saved = commits.commits(run.checkpoints)
    return bool(saved) if job.command is None else bool(last_change(run, job))


def last_change(run: RunDir, job: Job) -> float | None:
    """When a script's newest checkpoint was written; None if there is none."""
    last = last_of(job, run)
    return Path(last).stat().st_mtime if last and Path(last).exists() else None


def _placeholders(layout: Layout, run: RunDir) -> dict[str, str]:
    return {
        "{nodes}": str(layout.nodes),
        "{gpus}": str(layout.gpus),
        "{ranks}": str(layout.ranks),
        "{run}": run.name,
    }


def _fill(text: str, values: dict[str, str]) -> str:
    for placeholder, value in values.items():
        text = text.replace(placeholder, value)
    return text


def ranks_environment(
    prepared: Prepared, run: RunDir, *, here: int, oversubscribe: bool
) -> dict[str, str]:
    """The variables of `here` ranks on this machine, besides torchrun's and the user's own.

    The launcher's own environment stays as it is: the next run of this process starts from it.
    """
    job, layout = prepared.job, prepared.layout
    env_secrets.check(job, run)
    given = {**os.environ, **prepared.variables}
    env = {
        "ALLRANKS_RUN_DIR": str(run.path),
        "ALLRANKS_LAYOUT": str(layout),
        "ALLRANKS_RANKS_PER_NODE": str(layout.gpus),
        "ALLRANKS_RANKS_HERE": str(here),
        "ALLRANKS_CHECKPOINT": prepared.checkpoint,
        "ALLRANKS_LAUNCHER": str(os.getpid()),
        "ALLRANKS_TIMEOUT": str(job.timeout.seconds),
        stacks.VARIABLE: str(stacks.DUMP_SIGNAL),
        claims.VARIABLE: "" if prepared.claim is None else str(prepared.claim),
        "ALLRANKS_TIMEOUT_IS_SET": str(int(job.timeout != DEFAULT_TIMEOUT)),
    }
    if job.stage:
        env["ALLRANKS_STAGE"] = json.dumps(job.stage)
    if not job.probe.trace:
        env["ALLRANKS_TRACE"] = "off"
    if oversubscribe:
        env["ALLRANKS_OVERSUBSCRIBE"] = "1"
    threads = prepared.threads or max(1, allotted.cpus_allotted() // here)
    defaults = {"OMP_NUM_THREADS": str(threads)}
    if here > 1:
        # Threads that spin while they wait make every rank many times slower as soon as another
        # one wants their core. A rank alone keeps the default: waking threads costs time too.
        defaults["OMP_WAIT_POLICY"] = "passive"
    if "PYTORCH_CUDA_ALLOC_CONF" not in given:
        # Fragments of freed memory can be joined: fewer out-of-memory errors at no known cost.
        defaults["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    if here == layout.ranks:
        # All ranks are on this machine: its name may not resolve, the loopback always works.
        defaults["GLOO_SOCKET_IFNAME"] = "lo"
    if job.task is not None:
        # What was compiled once is found by all ranks, and after a restart of the machine.
        defaults["TORCHINDUCTOR_CACHE_DIR"] = str(allotted.user_cache(given) / "compiled")
    env |= {key: value for key, value in defaults.items() if key not in given}
    own = {k: v for k, v in job.env.items() if v != BUILT_IN["env"].get(k) or k not in given}
    return prepared.variables | env | own
