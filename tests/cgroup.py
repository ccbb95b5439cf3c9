"""A memory cgroup with a limit: what runs in it is killed by the kernel when it takes more."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.slurm.live import unavailable

from allranks.machine.allotted import cgroup_folders

NAME = f"allranks-tests-{os.getpid()}"
# Swap would only make it slow.
LIMITS_V1 = ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes")
LIMITS_V2 = ("memory.max", "memory.swap.max")


@contextmanager
def memory_cgroup(num_bytes: int) -> Iterator[Path]:
    """Its folder: a process that is written to `cgroup.procs` in it, and its children, are in."""
    folder = make_folder()
    try:
        is_v1 = (folder / LIMITS_V1[0]).exists()
        for name in LIMITS_V1 if is_v1 else LIMITS_V2:
            if (folder / name).exists():  # there is no swap, or it is not counted
                (folder / name).write_text("0" if name == "memory.swap.max" else str(num_bytes))
        yield folder
    finally:
        remove(folder)


def make_folder() -> Path:
    """Below this process's own cgroup, or below the nearest one that hands memory down."""
    why = "this machine has no memory cgroups"
    own = Path("/proc/self/cgroup").read_text()
    mounts = Path("/proc/self/mountinfo").read_text()
    for parent in cgroup_folders(own, mounts, "memory"):
        handed_down = parent / "cgroup.subtree_control"
        is_v1 = (parent / "memory.limit_in_bytes").exists()
        if not is_v1 and not (handed_down.exists() and "memory" in handed_down.read_text().split()):
            continue
        try:
            (parent / NAME).mkdir()
        except OSError as error:
            why = f"no memory cgroup can be made: {error.strerror}"
            continue
        return parent / NAME
    unavailable(why)


def remove(folder: Path) -> None:
    """Once all that ran in it is gone: the kernel takes a moment."""
    deadline = time.monotonic() + 5
    while True:
        try:
            folder.rmdir()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def kills_in(folder: Path) -> int:
    """How many processes the kernel has killed for its memory."""
    for name in ("memory.events", "memory.oom_control"):
        if (folder / name).exists():
            words = dict(line.split() for line in (folder / name).read_text().splitlines())
            return int(words.get("oom_kill", 0))
    raise AssertionError(f"{folder} does not count")
