"""What the disks give that a task's data are on, and whether they can be read from there at all."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from allranks.machine import disks
from allranks.machine.data_copies import own_folder

DISK_BYTES, DISK_SECONDS = 1 << 28, 3.0
FORGET_SECONDS = 10.0
STILL_CACHED = 0.2  # from here on it is not a cold read; looking brings a little back


def why_not_cold(files: list[Path]) -> str | None:
    """Why these files cannot be read from their disk itself; None if they can."""
    disk = disks.disk_of(files[0])
    if disk.is_memory:
        return f"the data are in memory ({disk.kind} on {disk.mount})"
    started = time.perf_counter()
    disks.forget(files)
    took = time.perf_counter() - started
    if took > FORGET_SECONDS:  # before every single measurement
        return f"having the kernel forget {len(files):,} files takes {took:.0f} s"
    share = disks.cached_share(files)
    disks.forget(files)  # looking has brought some of it back
    if share is None:
        return f"this kernel does not say whether files on {disk.kind} are in memory"
    if share > STILL_CACHED:
        return f"{share:.0%} of the files stayed in memory: another process has them open"
    return None


def disk_fields(role: str, path: Path) -> dict[str, Any]:
    disk = disks.disk_of(path)
    return {
        "role": role,
        "path": str(path),
        "mount": disk.mount,
        "kind": disk.kind,
        "is_network": disk.is_network,
        "bytes_per_second": None,
        "bytes": 0,
    }


def compare_disks(files: list[Path]) -> list[dict[str, Any]]:
    """How fast the data are read where they are, and a copy of them on this node's own disk."""
    limits: dict[str, Any] = {"max_bytes": DISK_BYTES, "max_seconds": DISK_SECONDS}
    data = disk_fields("data", files[0].parent)
    speed = disks.read_speed(files, **limits)
    data |= {"bytes_per_second": speed.bytes_per_second, "bytes": speed.num_bytes}
    folder = own_folder()
    staging = disk_fields("staging", folder)
    if staging["mount"] != data["mount"]:
        copy = folder / f"read-speed-{os.getpid()}"
        try:
            disks.copy_beginning(files, copy, max_bytes=speed.num_bytes)
            speed = disks.read_speed([copy], **limits)
            staging |= {"bytes_per_second": speed.bytes_per_second, "bytes": speed.num_bytes}
        except OSError as error:
            staging["problem"] = str(error.strerror or error)
        finally:
            copy.unlink(missing_ok=True)
    return [data, staging]
