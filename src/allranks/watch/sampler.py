"""Prints what one node of a SLURM job is doing, as JSON on stdout.

Sent to the job's nodes as text (`python - JOB INTERVAL COUNT MODE`), where allranks need not be
installed and Python may be old: only the standard library, and nothing newer than Python 3.7.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

TICK = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")
GPU_FIELDS = {
    "index": "index",
    "name": "name",
    "utilization.gpu": "utilization",
    "memory.used": "memory",
    "memory.total": "memory_total",
    "power.draw": "power",
    "power.limit": "power_limit",
    "temperature.gpu": "temperature",
}
MEBIBYTE = 1 << 20
MARK = "ALLRANKS_SAMPLER"  # set in sampling steps, so that they do not show up themselves
DUMP_SECONDS = 20
PIECE = 700  # characters per line, to keep lines under 1 KiB


def environment_of(pid: str) -> dict[str, str]:
    """The environment that a process was started with; empty if we may not read it."""
    try:
        words = Path("/proc", pid, "environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return {}
    return dict(word.split("=", 1) for word in words if "=" in word)


def processes_of(job: str) -> dict[str, dict[str, str]]:
    """The job's processes on this node with their environments, without those of samplers."""
    node, step = os.environ.get("SLURMD_NODENAME"), os.environ.get("SLURM_STEP_ID")
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        env = environment_of(folder.name)
        if env.get("SLURM_JOB_ID") != job:
            continue
        # Several nodes may share a machine.
        if node and env.get("SLURMD_NODENAME", node) != node:
            continue
        if MARK not in env and (step is None or env.get("SLURM_STEP_ID") != step):
            found[folder.name] = env
    return found


def rank_of(env: dict[str, str]) -> str | None:
    """The rank of a process, if any: the batch script has a SLURM_PROCID but is not a rank."""
    task = env.get("SLURM_PROCID") if "SLURM_STEP_ID" in env else None
    return env.get("RANK", task)


def usage(pid: str) -> dict[str, Any] | None:
    """CPU seconds so far, memory in bytes, state and command of a process."""
    try:
        text = Path("/proc", pid, "stat").read_text()
        command = Path("/proc", pid, "cmdline").read_bytes().replace(b"\0", b" ")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return {
        "state": fields[0],
        "cpu_seconds": (int(fields[11]) + int(fields[12])) / TICK,
        "threads": int(fields[17]),
        "memory": int(fields[21]) * PAGE,
        "command": command.decode(errors="replace").strip() or text[text.find("(") :][:40],
    }


def gpus() -> list[dict[str, Any]]:
    """The GPUs that the job may see, according to nvidia-smi; none without it."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=" + ",".join(GPU_FIELDS)]
    try:
        said = subprocess.run(
            [*query, "--format=csv,noheader,nounits"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=DUMP_SECONDS,
            check=True,
        ).stdout.decode(errors="replace")
    except (OSError, subprocess.SubprocessError):
        return []
    return [gpu_of(line) for line in said.splitlines() if line.strip()]


def gpu_of(line: str) -> dict[str, Any]:
    """Parse one line of nvidia-smi's output; `[N/A]` becomes None."""
    found: dict[str, Any] = {}
    for name, word in zip(GPU_FIELDS.values(), line.split(",")):  # noqa: B905  # Python 3.7
        word = word.strip()
        try:
            found[name] = word if name == "name" else float(word)
        except ValueError:
            found[name] = None
    for name in ("memory", "memory_total"):
        if found.get(name) is not None:
            found[name] = int(found[name] * MEBIBYTE)
    return found


def memory() -> dict[str, int]:
    """The node's memory in bytes."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if "kB" in line}
    return {"memory_total": sizes["MemTotal"], "memory_available": sizes.get("MemAvailable", 0)}


def sample(job: str, before: dict[str, tuple[float, float]]) -> dict[str, Any]:
    """This node now. Updates `before`: each process's CPU seconds and when they were read."""
    found = []
    for pid, env in processes_of(job).items():
        used = usage(pid)
        if used is None or used["state"] == "Z":
            continue
        now = time.monotonic()
        seconds, moment = before.get(pid, (used["cpu_seconds"], now))
        before[pid] = (used["cpu_seconds"], now)
        if now > moment:
            used["cpu"] = round((used["cpu_seconds"] - seconds) / (now - moment), 2)
        found.append({"pid": int(pid), "rank": rank_of(env), **used})
    return {
        "node": os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
        "t": time.time(),
        "cpus": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        **memory(),
        "gpus": gpus(),
        "processes": found,
    }


def stacks(job: str) -> dict[str, Any]:
    """A stack dump of each of the job's Python processes."""
    found = []
    for pid, env in processes_of(job).items():
        used = usage(pid)
        if used is None or "python" not in used["command"].split(" ")[0]:
            continue
        whose = {"pid": int(pid), "rank": rank_of(env), "command": used["command"]}
        found.append({**whose, **dump(pid)})
    return {"node": os.environ.get("SLURMD_NODENAME") or socket.gethostname(), "stacks": found}


def dump(pid: str) -> dict[str, str]:
    """A stack by py-spy if it is there and permitted, else what the kernel knows."""
    beside = str(Path(sys.executable).with_name("py-spy"))
    program = shutil.which("py-spy") or (beside if os.access(beside, os.X_OK) else None)
    trouble = "py-spy is not on this node"
    if program is not None:
        try:
            done = subprocess.run(
                [program, "dump", "--pid", pid],
                capture_output=True,
                timeout=DUMP_SECONDS,
            )
            if done.returncode == 0:
                return {"by": "py-spy", "stack": done.stdout.decode(errors="replace").strip()}
            trouble = done.stderr.decode(errors="replace").strip().splitlines()[-1]
        except (OSError, subprocess.SubprocessError, IndexError) as error:
            trouble = str(error)
    threads = []
    for folder in sorted(Path("/proc", pid, "task").glob("[0-9]*")):
        try:
            name = (folder / "comm").read_text().strip()
            threads.append("%s: %s" % (name, (folder / "wchan").read_text().strip()))  # noqa: UP031
        except OSError:
            continue
    return {"by": "kernel", "trouble": trouble, "stack": "\n".join(threads)}


def tell(found: dict[str, Any]) -> None:
    """Print in numbered pieces, as srun mixes up long lines of several nodes."""
    text = json.dumps(found)
    pieces = [text[at : at + PIECE] for at in range(0, len(text), PIECE)]
    for number, piece in enumerate(pieces, 1):
        print(f"{found['node']} {number}/{len(pieces)} {piece}", flush=True)


def main(job: str, interval: float, count: int, mode: str) -> None:
    if mode == "stacks":
        tell(stacks(job))
        return
    before: dict[str, tuple[float, float]] = {}
    sample(job, before)  # rates need two samples
    time.sleep(min(1.0, interval))
    for number in range(count):
        if number:
            time.sleep(interval)
        tell(sample(job, before))


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
