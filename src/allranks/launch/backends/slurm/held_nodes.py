"""Refuses an `allranks run` inside a SLURM allocation that would not start what its user means."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from allranks.errors import AllranksError
from allranks.launch.launchers import spell
from allranks.launch.prepare import Request
from allranks.layout import Layout
from allranks.machine import nodelist

FIRST_SPECIAL_STEP = 0xFFFFFFF0  # SLURM's numbers for the batch script, an interactive shell, ...
PORT = 29500


def check_allocation(layout: Layout, request: Request, env: Mapping[str, str]) -> None:
    """Refuse to run a layout's nodes on one node of an allocation, or a whole run in each task."""
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
    """The commands that the user may want."""
    _, bench, *_ = [*request.typed, "", ""] if request.typed[:1] == ["bench"] else ("", "")
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
        ways.append(f"send it to the queue: {spell(submit_line(layout, request))}")
    if not in_step and bench in ("", "scaling"):
        ways.append("add --here to run all ranks on this machine")
    return "; or ".join(ways)


def submit_line(layout: Layout, request: Request) -> list[str]:
    """`allranks submit` for what was to be run here."""
    file = [str(request.job_file)] if request.job_file is not None else []
    if request.resume is not None:
        words = ["allranks", "resume", request.resume]
    else:
        words = ["allranks", "submit", *file]
    words += [*request.overrides, "--layout", str(layout)]
    return [*words, *(["--", *request.command] if request.command is not None else [])]


def launcher_per_node(layout: Layout, request: Request, env: Mapping[str, str]) -> str:
    """The srun that starts `allranks run` once on each node; empty if there are too few of them."""
    nodes = nodelist.expand(env.get("SLURM_JOB_NODELIST", ""))
    if len(nodes) < layout.nodes:
        return ""
    own = f"--node-rank $SLURM_NODEID --master {nodes[0]}:{PORT}"
    typed = f"allranks {spell(request.typed)} {own}"
    if request.command is not None:
        typed += f" -- {spell(request.command)}"
    srun = ["srun", f"--nodes={layout.nodes}", "--ntasks-per-node=1", "--cpu-bind=none"]
    if len(nodes) > layout.nodes:
        srun.append(f"--nodelist={nodelist.compress(nodes[: layout.nodes])}")
    return f"{' '.join(srun)} bash -c {shlex.quote(typed)}"
