"""The CPUs and the memory that this process may use, and the instructions that the CPUs run."""

import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath

PROC = Path("/proc")

# The newest instructions that oneDNN, torch's library for CPUs, may use; empty: all it finds.
ONEDNN_LIMIT = "ONEDNN_MAX_CPU_ISA"
INSTRUCTION_SETS = ("", "AVX512_CORE_BF16", "AVX512_CORE", "AVX2")
TRIAL = """
import resource, torch
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
for kind in (torch.bfloat16, torch.float16):
    one = torch.ones(64, 64, dtype=kind)
    one @ one
"""
TRIAL_SECONDS = 300.0  # importing torch from a busy network disk takes minutes


def cpus_allotted() -> int:
    """The CPUs that this process may use: the least of affinity, cgroup quota and SLURM's share.

    In the launcher of a node, and in the ranks that it starts, this is the node's share of the job,
    which the ranks divide; in one of several ranks that srun started, it is that rank's own.
    """
    limits: list[float] = [_affinity()]
    limits += [quota for folder in _own_cgroups("cpu") if (quota := _cpu_quota(folder)) is not None]
    slurm = slurm_cpus(os.environ)
    if slurm is not None:
        limits.append(slurm)
    return max(1, math.ceil(min(limits)))


def memory_allotted() -> int:
    """The bytes of memory that this process may use: the machine's, or less by a cgroup."""
    limits = [_memory_limit(folder) for folder in _own_cgroups("memory")]
    return min([memory_total(), *(limit for limit in limits if limit is not None)])


def memory_kills() -> int | None:
    """How many processes of this cgroup the kernel has killed for memory; None: not counted."""
    for folder in _own_cgroups("memory"):
        for name in ("memory.events", "memory.oom_control"):  # of v2, of v1
            with suppress(OSError, ValueError):
                words = dict(line.split() for line in (folder / name).read_text().splitlines())
                if "oom_kill" in words:
                    return int(words["oom_kill"])
    return None


def memory_total() -> int:
    """The bytes of memory of the machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def slurm_cpus(env: Mapping[str, str]) -> int | None:
    """The CPUs that SLURM gave this process, or None outside a job.

    SLURM_CPUS_ON_NODE is the job's (in a step: the step's) share of this node. All of it belongs to
    the only task here, as the launcher is. SLURM_CPUS_PER_TASK is one task's share: it counts only
    if a step has several tasks on this node, since the batch shell, which starts every rank itself,
    sees it too.
    """
    on_node = _count(env.get("SLURM_CPUS_ON_NODE"))
    per_task = _count(env.get("SLURM_CPUS_PER_TASK"))
    tasks = parse_tasks_per_node(env.get("SLURM_STEP_TASKS_PER_NODE", ""))
    node = int(env["SLURM_NODEID"]) if env.get("SLURM_NODEID", "").isdecimal() else 0
    tasks_here = tasks[node] if node < len(tasks) else 1
    if tasks_here > 1:
        shares = [per_task, max(1, on_node // tasks_here) if on_node else None]
    else:
        shares = [on_node or per_task]
    return min((share for share in shares if share is not None), default=None)


def parse_tasks_per_node(text: str) -> list[int]:
    """SLURM's short form, node by node: '2(x3),1' is [2, 2, 2, 1]. Empty if it is not that."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            return []
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def cgroup_folders(cgroup: str, mountinfo: str, controller: str) -> list[Path]:
    """The folders whose limits apply to a process: from its own cgroup up to the mount point.

    Takes the texts of /proc/self/cgroup and /proc/self/mountinfo; finds folders of v1 and of v2.
    """
    paths: dict[str, str] = {}  # of the v1 controller, and of v2 under ""
    for line in cgroup.splitlines():
        _, controllers, own_path = line.split(":", 2)
        paths |= dict.fromkeys(controllers.split(","), own_path)
    folders: list[Path] = []
    for line in mountinfo.splitlines():
        mount, _, kind = line.partition(" - ")
        root, mount_point = mount.split()[3:5]
        file_system, _, options = kind.split()[:3]
        if file_system == "cgroup2":
            path = paths.get("")
        elif file_system == "cgroup" and controller in options.split(","):
            path = paths.get(controller)
        else:
            continue
        if path is not None:
            below = _below(path, root)
            folders += [Path(mount_point, part) for part in (below, *below.parents)]
    return folders


def parse_cpu_max(text: str) -> float | None:
    """CPUs by cgroup v2's cpu.max, '150000 100000' being 1.5; None for no limit."""
    quota, _, period = text.strip().partition(" ")
    return None if quota == "max" else int(quota) / int(period or 100_000)


def _affinity() -> int:
    if hasattr(os, "sched_getaffinity"):  # not on a Mac
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _count(text: str | None) -> int | None:
    return int(text) if text and text.isdecimal() and int(text) > 0 else None


def _below(path: str, root: str) -> PurePosixPath:
    """A cgroup's path inside a mount that shows the hierarchy from `root` down."""
    inside = PurePosixPath(path)
    if ".." not in inside.parts and inside.is_relative_to(root):
        return inside.relative_to(root)
    return PurePosixPath()  # outside of the container: only the mount point is known


def _own_cgroups(controller: str) -> list[Path]:
    try:
        cgroup = (PROC / "self/cgroup").read_text()
        mountinfo = (PROC / "self/mountinfo").read_text()
        return cgroup_folders(cgroup, mountinfo, controller)
    except (OSError, ValueError):  # not Linux, or an unknown format
        return []


def _cpu_quota(folder: Path) -> float | None:
    try:
        if (folder / "cpu.max").exists():
            return parse_cpu_max((folder / "cpu.max").read_text())
        quota = int((folder / "cpu.cfs_quota_us").read_text())
        period = int((folder / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError, ZeroDivisionError):
        return None
    return quota / period if quota > 0 and period > 0 else None


def _memory_limit(folder: Path) -> int | None:
    for name in ("memory.max", "memory.limit_in_bytes"):
        try:
            return int((folder / name).read_text())  # not a number: 'max', no limit
        except (OSError, ValueError):
            continue
    return None


def user_cache(env: Mapping[str, str] = os.environ) -> Path:
    """Where what was found or built once is kept for later runs of the same user."""
    home = os.path.expanduser("~/.cache")  # unlike Path.home, for users without a home, too
    return Path(env.get("XDG_CACHE_HOME") or home) / "allranks"


def usable_instructions() -> str | None:
    """What oneDNN must be limited to for bf16 and fp16 on this CPU; None: nothing works.

    Virtual machines may list AMX without allowing it: SIGILL kills a process that uses it. So it is
    tried in a child process, once for each boot and each version of torch.
    """
    if "amx_tile" not in _cpu_flags():
        return ""
    tried_for = [_boot(), _torch_version()]
    cache = user_cache()
    path = cache / f"cpu-{socket.gethostname()}.json"
    with suppress(OSError, ValueError, TypeError):
        known_for, known = json.loads(path.read_text())
        if known_for == tried_for and known in (*INSTRUCTION_SETS, None):
            return known if known is None else str(known)
    for limit in INSTRUCTION_SETS:
        code = _try_half_precision(limit)
        if code != -signal.SIGILL:
            break
    usable = None if code == -signal.SIGILL else limit
    if code in (0, -signal.SIGILL):  # any other end says nothing about the CPU
        with suppress(OSError):
            cache.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps([tried_for, usable]))
    return usable


def _try_half_precision(limit: str) -> int | None:
    """The exit code of a process that computes in bf16 and fp16; None if it takes too long."""
    env = {**os.environ, **({ONEDNN_LIMIT: limit} if limit else {})}
    words = [sys.executable, "-P", "-c", TRIAL]
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(words, env=env, capture_output=True, timeout=TRIAL_SECONDS).returncode
    return None


def _cpu_flags() -> list[str]:
    """What the processor supports, by Linux's names."""
    with suppress(OSError):
        for line in (PROC / "cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith("flags"):
                return line.split()
    return []


def _torch_version() -> str | None:
    from importlib import metadata  # 20 ms that --help need not pay

    with suppress(metadata.PackageNotFoundError):
        return metadata.version("torch")
    return None


def _boot() -> str | None:
    with suppress(OSError):
        return (PROC / "sys/kernel/random/boot_id").read_text().strip()
    return None
