"""What a process inside a SLURM job knows about it, asks SLURM, and starts on its nodes."""

from __future__ import annotations

import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from allranks.errors import AllranksError
from allranks.job.job import Job
from allranks.launch import prepare
from allranks.launch.backends.slurm.sbatch import time_seconds
from allranks.launch.prepare import Prepared
from allranks.machine.allotted import parse_tasks_per_node
from allranks.machine.processes import blocked_signals
from allranks.run.folder import RunDir
from allranks.slurm import commands as slurm
from allranks.slurm import nodelist

FIRST_PORT, NUM_PORTS = 20_000, 10_000  # below what Linux hands out by itself
LIGHTNING = re.compile(r"(?m)^\s*(?:from|import) +(?:lightning|pytorch_lightning)\b")
IMPORT = re.compile(r"(?m)^\s*(?:from|import) +(\.*)([\w.]*)(?: +import +\(?([\w, ]*))?")
MAX_SCRIPTS, MAX_SCRIPT_BYTES = 100, 1 << 18


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
                "this is for the inside of a SLURM job",
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
    with suppress(OSError):  # a disk that is full, a reader that is gone: no run ends of it
        print(f"allranks: {text}", flush=True)


def patiently(*words: str, seconds: float = 900.0) -> str:
    """A SLURM command, asked again while the controller is silent."""
    return while_silent(lambda: slurm.call(*words), seconds=seconds)


def while_silent(call: Callable[[], str], *, seconds: float = 900.0) -> str:
    """Repeat a call while the controller does not answer, for at most so many seconds."""
    deadline, pause = time.monotonic() + seconds, 1.0
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
        printed = patiently("squeue", "-h", "-j", job, "-o", "%T|%r").strip()
    except slurm.SlurmError as error:
        return "GONE" if "invalid job id" in error.words.lower() else "UNKNOWN", ""
    state, _, reason = (printed or "GONE").partition("|")
    return state, reason


def requeue(place: SlurmNodes) -> str:
    """Have SLURM run this job again."""
    try:
        with blocked_signals():  # a requeue ends all that this job runs, scontrol as well
            return slurm.call("scontrol", "requeue", place.job)
    except slurm.SlurmError:
        # It may have been done all the same: by a scontrol that could not say so, or by SLURM.
        shown = patiently("scontrol", "show", "job", "-o", place.job)
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
        return left, time_seconds(limit)
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
    return {
        node: f"SLURM says that it is {state}"
        for node, state in states.items()
        if state.startswith(unusable)
    }


def has_saved(run: RunDir, prepared: Prepared, *, since: float) -> bool:
    """Whether another attempt would resume from where the stopped one left off."""
    if prepared.job.command is None:
        return True
    attempt = max(run.attempts(), default=0)
    ends = [run.end(attempt, rank) for rank in run.ranks(attempt)]
    if all(end and end["exit"] in (0, 75) for end in ends):
        return True  # the script knew what the signal meant
    last = prepare.last_of(prepared.job, run)
    return bool(last) and Path(last).exists() and Path(last).stat().st_mtime > since


def no_progress(run: RunDir, job: Job) -> bool:
    """Whether the last two attempts began where this one would begin."""
    key = "checkpoint" if job.command is None else "last_changed"
    starts = [attempt.get(key) for attempt in run.info().get("attempts", [])]
    newest = (
        prepare.newest_checkpoint(run) if job.command is None else prepare.last_change(run, job)
    )
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


def stop_signal(job: Job) -> tuple[signal.Signals, str]:
    """The signal that tells ranks to save and stop; and why, if it was chosen here."""
    if job.slurm.signal is not None:
        return signal.Signals[f"SIG{job.slurm.signal}"], ""
    texts = script_texts(job.argv)
    lightning = next((path for path, text in texts.items() if LIGHTNING.search(text)), None)
    # One that names USR2 listens to that, whatever it imports.
    if lightning is None or any("SIGUSR2" in text for text in texts.values()):
        return signal.SIGUSR2, ""
    return signal.SIGUSR1, f"{lightning} imports Lightning, which saves and requeues on that signal"


def script_texts(words: Sequence[str]) -> dict[str, str]:
    """The Python files that a command names, and those beside them that they import."""
    modules = [name.replace(".", "/") for flag, name in pairwise(words) if flag == "-m"]
    paths = [Path(word) for word in words if word.endswith(".py")]
    paths += [Path(f"{name}{end}") for name in modules for end in (".py", "/__main__.py")]
    roots = {Path(), *(path.parent for path in paths)}
    texts: dict[str, str] = {}
    while paths and len(texts) < MAX_SCRIPTS:
        path = paths.pop(0)
        if str(path) in texts or not path.is_file():
            continue
        with suppress(OSError), path.open("rb") as file:
            texts[str(path)] = file.read(MAX_SCRIPT_BYTES).decode(errors="replace")
        for dots, module, names in IMPORT.findall(texts.get(str(path), "")):
            base = module.replace(".", "/")
            parts = [base, *(f"{base}/{name}".strip("/") for name in re.findall(r"\w+", names))]
            folders = [path.parent, *path.parent.parents][len(dots) - 1 :][:1] if dots else roots
            paths += [
                folder / f"{part}{end}"
                for folder in folders
                for part in parts
                for end in (".py", "/__init__.py")
            ]
    return texts


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


def nodes_failed(said: str) -> list[str]:
    """Nodes that srun names as lost, in its words: `srun: error: Node failure on node3`."""
    found: list[str] = []
    for line in said.splitlines():
        _, words, text = line.rpartition("Node failure on ")
        with suppress(AllranksError):  # a rank's own words
            found += nodelist.expand(text) if words else []
    return found
