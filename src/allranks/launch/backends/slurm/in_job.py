"""What a process inside a SLURM job knows about it, asks SLURM, and starts on its nodes."""

from __future__ import annotations

import os
import re
import shlex
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allranks.errors import STOPPED_AT_CHECKPOINT, AllranksError
from allranks.job.job import Job
from allranks.launch import prepare
from allranks.launch.launchers import spell
from allranks.launch.prepare import Prepared, Request
from allranks.layout import Layout
from allranks.machine import nodelist
from allranks.machine.allotted import parse_tasks_per_node
from allranks.machine.processes import blocked_signals, output_of
from allranks.run.failures import missing_path
from allranks.run.folder import RunDir
from allranks.run.logs import tail
from allranks.run.record import read_ends
from allranks.slurm import commands as slurm

SILENCE_SECONDS = 900.0  # a controller that is being restarted, say
FIRST_PORT, NUM_PORTS = 20_000, 10_000  # below what Linux hands out by itself
MOST_RANKS = 64  # whose last words are read
LOOK_SECONDS = 30.0  # for all nodes to say which files they have
LOOK = 'for path; do [ -e "$path" ]; echo "$? $SLURMD_NODENAME $path"; done'
FIRST_SPECIAL_STEP = 0xFFFFFFF0  # SLURM's numbers for the batch script, an interactive shell, ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmNodes:
    """Where SLURM put this job, from the variables that it sets."""

    job: str
    restart: int
    nodes: tuple[str, ...]
    cpus_per_node: int  # of the node that has the fewest

    @classmethod
    def from_environment(cls, env: Mapping[str, str]) -> SlurmNodes:
        if "SLURM_JOB_ID" not in env:
            raise AllranksError(
                "this only works inside a SLURM job",
                fix="send the script with sbatch, or use allranks submit",
            )
        cpus = parse_tasks_per_node(env.get("SLURM_JOB_CPUS_PER_NODE", ""))
        return cls(
            job=env["SLURM_JOB_ID"],
            restart=int(env.get("SLURM_RESTART_COUNT") or 0),
            nodes=tuple(nodelist.expand(env["SLURM_JOB_NODELIST"])),
            cpus_per_node=min(cpus, default=1),
        )


def say(text: str) -> None:
    """Print into the job's log, which people read first when something looks wrong."""
    with suppress(OSError):  # a full disk, or a reader that is gone, must not end a run
        print(f"allranks: {text}", flush=True)


def while_silent(call: Callable[[], str]) -> str:
    """Repeat a call while the controller does not answer, for at most SILENCE_SECONDS."""
    deadline, pause = time.monotonic() + SILENCE_SECONDS, 1.0
    while True:
        try:
            return call()
        except slurm.SlurmError as error:
            if not error.is_silence or time.monotonic() > deadline:
                raise
        time.sleep(pause)
        pause = min(30.0, 2 * pause)


def job_state(job: str) -> tuple[str, str]:
    """A job's state and its reason in SLURM's words, once SLURM answers."""
    try:
        printed = while_silent(lambda: slurm.call("squeue", "-h", "-j", job, "-o", "%T|%r")).strip()
    except slurm.SlurmError as error:
        return "GONE" if error.is_gone else "UNKNOWN", ""
    state, _, reason = (printed or "GONE").partition("|")
    return state, reason


def requeue(place: SlurmNodes) -> str:
    """Have SLURM run this job again."""
    try:
        with blocked_signals():  # a requeue ends all that this job runs, scontrol as well
            return slurm.call("scontrol", "requeue", place.job)
    except slurm.SlurmError:
        # It may have been done all the same: by a scontrol that could not say so, or by SLURM.
        shown = while_silent(lambda: slurm.call("scontrol", "show", "job", "-o", place.job))
        restarts = re.search(r"\bRestarts=(\d+)", shown)
        if restarts is None or int(restarts[1]) <= place.restart:
            raise
        return ""


def time_to_limit(job: str) -> tuple[float | None, int | None]:
    """Seconds until SLURM ends this job, and its limit; None where there is no limit, or answer."""
    try:
        printed = slurm.call("squeue", "-h", "-j", job, "-o", "%e|%l", seconds=15)
        end, _, limit = printed.strip().partition("|")
        left = time.mktime(time.strptime(end, "%Y-%m-%dT%H:%M:%S")) - time.time()
        seconds = slurm.parse_time(limit)
        return (None, None) if seconds is None else (left, seconds)
    except (slurm.SlurmError, ValueError):
        return None, None


def unusable_nodes(nodes: Sequence[str]) -> dict[str, str]:
    """Which of these nodes SLURM has taken out of use, and its word for their state."""
    try:
        printed = slurm.call("sinfo", "-h", "-N", "-n", ",".join(nodes), "-o", "%N %T")
    except slurm.SlurmError:
        return {}
    states = dict(line.split() for line in printed.splitlines() if len(line.split()) == 2)
    unusable = ("down", "drain", "fail", "error", "boot", "reboot", "inval")
    bad = {node: state for node, state in states.items() if state.startswith(unusable)}
    return {node: f"SLURM says that it is {state}" for node, state in bad.items()}


def record_failed(run: RunDir, failed: Mapping[str, str]) -> None:
    """Note nodes on which the run has failed, and why: its next jobs are to avoid them."""
    if failed:
        run.update_info(lambda info: info.setdefault("failed_nodes", {}).update(failed))


def has_saved(run: RunDir, prepared: Prepared, *, since: float) -> bool:
    """Whether another attempt would resume from where the stopped one left off."""
    if prepared.job.command is None:
        return True
    attempt = max(run.attempts(), default=0)
    ends = [run.end(attempt, rank) for rank in run.ranks(attempt)]
    if all(end and end["exit"] in (0, STOPPED_AT_CHECKPOINT) for end in ends):
        return True  # the script knew what the signal meant
    last = prepare.last_of(prepared.job, run)
    return bool(last) and Path(last).exists() and Path(last).stat().st_mtime > since


def no_progress(run: RunDir, job: Job) -> bool:
    """Whether the last two attempts began where this one would begin."""
    is_task = job.command is None
    key = "checkpoint" if is_task else "last_changed"
    starts = [attempt.get(key) for attempt in run.info().get("attempts", [])]
    newest = prepare.newest_checkpoint(run) if is_task else prepare.last_change(run, job)
    return len(starts) >= 2 and starts[-2:] == [newest, newest]


def why_it_ends(run: RunDir, prepared: Prepared) -> str:
    """Why no job continues a run that was stopped."""
    if not prepared.job.slurm.requeue:
        return "stopped short of its end, and slurm.requeue is false"
    last = prepare.last_of(prepared.job, run)
    where = f"nothing new is at {last}" if last else "the job does not say where (last: PATH)"
    return f"the script did not save when it was told to stop: {where}"


def step_environment(env: Mapping[str, str]) -> dict[str, str]:
    """The environment without the variables that srun would read as options."""
    options = ("CPU_BIND", "NTASKS", "NPROCS", "TASKS_PER_NODE", "CPUS_PER_TASK", "DISTRIBUTION")
    ours = ("SRUN_", "SLURM_TRES_PER_TASK", *(f"SLURM_{option}" for option in options))
    return {key: value for key, value in env.items() if not key.startswith(ours)}


def srun(place: SlurmNodes, *, tasks_per_node: int, ends_together: bool) -> list[str]:
    """The beginning of a step on all nodes of this job."""
    return [
        "srun",
        f"--nodes={len(place.nodes)}",
        f"--ntasks={len(place.nodes) * tasks_per_node}",
        f"--ntasks-per-node={tasks_per_node}",
        f"--cpus-per-task={max(1, place.cpus_per_node // tasks_per_node)}",
        "--distribution=block",  # ranks of a node follow each other
        "--export=ALL",
        "--wait=0",  # a site may have others ended a while after the first: a node may be slow
        # Tasks end with 0 when they were told to stop: any other code is a failure of all.
        f"--kill-on-bad-exit={int(ends_together)}",
    ]


def check_words(place: SlurmNodes, folder: Path, port: int, gpus: int, seconds: int) -> list[str]:
    """What the preflight of every node is told; what it finds is written into the folder."""
    words = ["--folder", str(folder), "--nodes", ",".join(place.nodes)]
    words += ["--master", f"{place.nodes[0]}:{port}", "--gpus", str(gpus)]
    return [*words, "--seconds", str(seconds)]


def check_command(place: SlurmNodes, folder: Path, port: int, gpus: int, seconds: int) -> list[str]:
    """The preflight as a step of its own, once on every node."""
    nodes = ",".join(place.nodes)
    words = [sys.executable, "-m", "allranks.launch.network", "--peers", nodes, "--"]
    words += [sys.executable, "-m", "allranks.doctor.preflight"]
    words += check_words(place, folder, port, gpus, seconds)
    return [*srun(place, tasks_per_node=1, ends_together=False), *words]


def has_launchers(job: Job) -> bool:
    """Whether a process on each node starts its ranks; else srun starts every rank by itself."""
    return job.command is None or job.launcher != "srun"


def step_command(job: Job, place: SlurmNodes, attempt: Path) -> list[str]:
    """What srun starts: a launcher on every node, or every rank by itself."""
    tasks = 1 if has_launchers(job) else job.layout.gpus
    words = [sys.executable, "-m", "allranks.launch.backends.slurm.step", str(attempt)]
    return [*srun(place, tasks_per_node=tasks, ends_together=True), *words]


def free_port(job: str, *, offset: int = 0) -> int:
    """A port of this node that follows from the job's id, or the next one that is free."""
    first = (int(job) * 7 + offset) % NUM_PORTS
    for step in range(NUM_PORTS):
        port = FIRST_PORT + (first + step) % NUM_PORTS
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
        return port
    raise AllranksError("no port is free on this node", fix="tell the site", exit_code=1)


# --- A file that a rank did not find -------------------------------------------------------------


def look_for_missing(
    run: RunDir, attempt: int, place: SlurmNodes, said: Iterable[str]
) -> dict[str, Any] | None:
    """After a failure on several nodes: the path that a rank did not find, and which nodes have it.

    None if there is none. `said`: srun's last lines. One short step asks all nodes, since disks
    that are thought to be shared may not be.
    """
    cwd = run.info().get("cwd", os.getcwd())
    path = path_of_failure(run, attempt) or missing_path(said)
    if path is None or len(place.nodes) < 2:
        return None
    wanted = [cwd, os.path.normpath(os.path.join(cwd, path))]
    nodes = ask_nodes(place, wanted)
    # If the folder is missing, so is everything named relative to it: then that is the reason.
    for one in wanted:
        has_it = nodes.get(one, {})
        if not all(has_it.values()):
            return {
                "attempt": attempt,
                "path": one,
                "on": [node for node, has in has_it.items() if has],
                "not_on": [node for node, has in has_it.items() if not has],
            }
    return None


def path_of_failure(run: RunDir, attempt: int) -> str | None:
    """The path that the first rank to fail for a missing file did not find."""
    ends = {rank: run.end(attempt, rank) for rank in run.ranks(attempt)[:MOST_RANKS]}
    failed = [(end["t"], rank) for rank, end in ends.items() if end and end["state"] == "failed"]
    for _, rank in sorted(failed):
        record = read_ends(run, attempt, rank)
        said = [f"{event['type']}: {event['message']}" for event in record.others["error"]]
        said.append(str(((record.end or {}).get("error") or {}).get("what", "")))
        path = missing_path(said) or missing_path(tail(run.log(attempt, rank)))
        if path is not None:
            return path
    return None


def ask_nodes(place: SlurmNodes, paths: Sequence[str]) -> dict[str, dict[str, bool]]:
    """For each path, whether each node has it; without the paths that some node says nothing of."""
    step = srun(place, tasks_per_node=1, ends_together=False)
    command = [*step, "--overlap", "--chdir=/", "sh", "-c", LOOK, "sh", *paths]
    printed = output_of(command, LOOK_SECONDS, step_environment(os.environ)) or ""
    answers: dict[str, dict[str, bool]] = {}
    for line in printed.splitlines():
        code, node, path = [*line.split(" ", 2), "", ""][:3]
        if node in place.nodes and path in paths:
            answers.setdefault(path, {})[node] = code == "0"
    return {
        path: {node: nodes[node] for node in place.nodes}
        for path, nodes in answers.items()
        if len(nodes) == len(place.nodes)
    }


# --- `allranks run` inside an allocation ---------------------------------------------------------


def check_allocation(layout: Layout, request: Request, env: Mapping[str, str]) -> None:
    """Refuse to run all nodes of a layout on one node of an allocation, or a whole run per task."""
    job = env.get("SLURM_JOB_ID")
    if not job:
        return
    num_tasks = tasks_of_step(env)
    if num_tasks > 1:
        raise AllranksError(
            f"this is one of {num_tasks} tasks of an srun of job {job}: each of them would start "
            f"a whole run of layout {layout}",
            fix=what_to_type(layout, request, env, in_step=True),
        )
    if layout.nodes > 1 and not request.here:
        raise AllranksError(
            f"layout {layout} has {layout.nodes} nodes, but this would start all {layout.ranks} "
            f"ranks on this machine, not on the nodes of job {job}",
            fix=what_to_type(layout, request, env, in_step=False),
        )


def tasks_of_step(env: Mapping[str, str]) -> int:
    """How many tasks srun started, including this one; 1 outside of a step."""
    if "SLURM_PTY_PORT" in env or "SLURM_PTY_WIN_COL" in env:
        return 1  # a shell: srun --pty gives the terminal to one task, and the others end
    step = env.get("SLURM_STEP_ID") or env.get("SLURM_STEPID") or ""
    if not step.isdecimal() or int(step) >= FIRST_SPECIAL_STEP or "SLURM_PROCID" not in env:
        return 1
    tasks = env.get("SLURM_STEP_NUM_TASKS") or env.get("SLURM_NTASKS") or ""
    return int(tasks) if tasks.isdecimal() else 1


def what_to_type(layout: Layout, request: Request, env: Mapping[str, str], *, in_step: bool) -> str:
    """The commands that the user may have meant."""
    bench = "".join(request.typed[1:2]) if request.typed[:1] == ["bench"] else ""
    ways = []
    if layout.nodes == 1 or (bench and in_step):
        ways.append("start it once: without srun, or with srun --ntasks=1")
    elif bench:
        ways.append("measure layouts of a single node")
    elif per_node := launcher_per_node(layout, request, env):
        ways.append(f"start one launcher on each node: {per_node}")
    if bench in ("scaling", "comm"):
        ways.append("add --backend slurm")
    elif not bench:
        ways.append(f"send it to the queue: {submit_line(layout, request)}")
    if not in_step and bench in ("", "scaling"):
        ways.append("add --here to run all ranks on this machine")
    return "; or ".join(ways)


def submit_line(layout: Layout, request: Request) -> str:
    """`allranks submit` for what was to be run here."""
    words = ["submit", *([str(request.job_file)] if request.job_file is not None else [])]
    if request.resume is not None:
        words = ["resume", request.resume]
    words += [*request.overrides, "--layout", str(layout)]
    command = ["--", *request.command] if request.command is not None else []
    return spell(["allranks", *words, *command])


def launcher_per_node(layout: Layout, request: Request, env: Mapping[str, str]) -> str:
    """The srun that starts `allranks run` once on each node; empty if there are too few of them."""
    nodes = nodelist.expand(env.get("SLURM_JOB_NODELIST", ""))
    if len(nodes) < layout.nodes:
        return ""
    own = f"--node-rank $SLURM_NODEID --master {nodes[0]}:29500"
    typed = f"allranks {spell(request.typed)} {own}"
    if request.command is not None:
        typed += f" -- {spell(request.command)}"
    srun = ["srun", f"--nodes={layout.nodes}", "--ntasks-per-node=1", "--cpu-bind=none"]
    if len(nodes) > layout.nodes:
        srun.append(f"--nodelist={nodelist.compress(nodes[: layout.nodes])}")
    return f"{' '.join(srun)} bash -c {shlex.quote(typed)}"
