"""How large, how fast and where the disk of a folder is. No torch."""

from __future__ import annotations

import itertools
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from allranks.machine import disks

WRITE_BYTES = 16 << 20
READ_BYTES = 64 << 20
READ_SECONDS = 1.0
MOST_FILES = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderFacts:
    """A folder that training reads from or writes to, as far as could be found out."""

    path: str
    use: str  # runs or data
    kind: str = "unknown"  # of its file system
    is_network: bool = False
    is_memory: bool = False
    free_bytes: int | None = None
    free_files: int | None = None  # that can still be made; None where there is no limit
    write_speed: float | None = None  # bytes a second, all the way to the disk
    read_speed: float | None = None  # bytes a second, from the disk
    problem: str = ""


def look_at(folder: Path, use: str, *, writes: bool) -> FolderFacts:
    """Measure a folder, or the nearest one above it that is there already."""
    there = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())
    if not writes and there != folder.absolute():
        return FolderFacts(path=str(folder), use=use, problem="there is no such folder")
    disk = disks.disk_of(there)
    free, files, speed, read, problem = None, None, None, None, ""
    try:
        free = shutil.disk_usage(there).free
        found = os.statvfs(there)
        files = found.f_favail if found.f_files else None
        if writes:
            speed = write_speed(there)
        else:
            read = read_speed(there)
    except OSError as error:
        problem = error.strerror or str(error)
    return FolderFacts(
        path=str(there),
        use=use,
        kind=disk.kind,
        is_network=disk.is_network,
        is_memory=disk.is_memory,
        free_bytes=free,
        free_files=files,
        write_speed=speed,
        read_speed=read,
        problem=problem,
    )


def write_speed(folder: Path) -> float:
    """Bytes a second that come to the disk. Raises OSError where none can be written."""
    path = folder / f".allranks-speed-{os.getpid()}"
    block = os.urandom(1 << 20)
    try:
        with path.open("wb", buffering=0) as file:
            start = time.perf_counter()
            for _ in range(WRITE_BYTES // len(block)):
                file.write(block)
            os.fsync(file.fileno())
            return WRITE_BYTES / max(1e-9, time.perf_counter() - start)
    finally:
        with suppress(OSError):
            path.unlink()


def read_speed(folder: Path) -> float | None:
    """Bytes a second from the disk, of the first files found; None where there are none."""
    files = list(itertools.islice(_files(folder), MOST_FILES))
    found = disks.read_speed(files, max_bytes=READ_BYTES, max_seconds=READ_SECONDS)
    return found.bytes_per_second if found.num_bytes else None


def _files(folder: Path) -> Iterator[Path]:
    for root, _, names in os.walk(folder):
        for name in names:
            path = Path(root, name)
            with suppress(OSError):
                if path.is_file() and path.stat().st_size:
                    yield path
