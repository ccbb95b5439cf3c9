"""The files that a task's samples are read from, and how fast their disks are.

No single source lists them all. Python reports every file that it opens; files that libraries open
are in /proc if they stay open, and in the task's options if they are named there.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from allranks.machine import disks
from allranks.machine.data_copies import own_folder

MAX_FILES = 100_000  # more would take longer to find and drop from the cache than to read
CODE = (".py", ".pyc", ".so")
DISK_BYTES, DISK_SECONDS = 1 << 28, 3.0  # read to measure a disk
FORGET_SECONDS = 10.0
STILL_CACHED = 0.2  # from here on it is not a cold read; looking brings a little back
NOT_DISKS = ("/proc/", "/sys/", "/dev/")

_opened: set[str] | None = None  # not None while opened_files is active
_is_listening = False


@contextmanager
def opened_files() -> Iterator[set[str]]:
    """Collects the files that Python opens for reading in this context."""
    global _opened, _is_listening
    if not _is_listening:
        sys.addaudithook(_note)  # an audit hook cannot be removed
        _is_listening = True
    noted: set[str] = set()
    _opened = noted
    try:
        yield noted
    finally:
        _opened = None


def _note(event: str, args: tuple[Any, ...]) -> None:
    if _opened is None or event != "open":
        return
    path, _, flags = args
    if isinstance(path, bytes):
        path = os.fsdecode(path)
    if isinstance(path, str) and not flags & (os.O_WRONLY | os.O_RDWR):
        _opened.add(os.path.realpath(path))


def held_files() -> set[str]:
    """Files that this process has open or mapped, except its code."""
    held = set()
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            held.add(str(link.readlink()))
    mapped: dict[str, bool] = {}  # whether it holds code
    with suppress(OSError):
        for line in Path("/proc/self/maps").read_text().splitlines():
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and fields[5].startswith("/"):
                mapped[fields[5]] = mapped.get(fields[5], False) or "x" in fields[1]
    return held | {path for path, is_code in mapped.items() if not is_code}


def data_files(
    held: Iterable[str], opened: Iterable[str], options: Mapping[str, Any]
) -> tuple[list[Path], bool]:
    """The files of a data set, and whether these are all of them.

    `held`: files that it keeps open; `opened`: files that it opens per sample, so similar ones in
    the same folder are included; `options`: the task's, some of which may be paths.
    """
    found: dict[Path, None] = {}
    for path in [*map(Path, held), *named_paths(options)]:
        if path.is_dir():
            for root, _, names in os.walk(path):
                found |= dict.fromkeys(Path(root, name) for name in names)
                if len(found) > MAX_FILES:
                    break
        else:
            found[path] = None
    one_each = [Path(path) for path in opened]
    for folder, suffix in dict.fromkeys((path.parent, path.suffix) for path in one_each):
        if len(found) <= MAX_FILES and folder.is_dir():
            found |= dict.fromkeys(path for path in folder.iterdir() if path.suffix == suffix)
    files = [path for path in list(found)[:MAX_FILES] if is_data(path)]
    return files, len(found) <= MAX_FILES


def named_paths(options: Mapping[str, Any]) -> list[Path]:
    """The task's options that look like paths."""
    texts = [value for value in options.values() if isinstance(value, str | Path) and str(value)]
    paths = [Path(text).expanduser() for text in texts]
    # A word such as "train" may be the name of a folder by chance.
    return [path.absolute() for path in paths if len(path.parts) > 1 or path.suffix]


def is_data(path: Path) -> bool:
    name = str(path)
    if name.startswith(NOT_DISKS) or path.suffix in CODE or ".so." in path.name:
        return False
    with suppress(OSError):
        return path.is_file() and path.stat().st_size > 0
    return False


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


def compare_disks(files: list[Path]) -> list[dict[str, Any]]:
    """How fast the data are read where they are, and from a copy on this node's own disk."""
    data = disk_fields("data", files[0].parent) | speed_fields(files)
    folder = own_folder()
    staging = disk_fields("staging", folder)
    if staging["mount"] != data["mount"]:
        copy = folder / f"read-speed-{os.getpid()}"
        try:
            disks.copy_beginning(files, copy, max_bytes=data["bytes"])
            staging |= speed_fields([copy])
        except OSError as error:
            staging["problem"] = str(error.strerror or error)
        finally:
            copy.unlink(missing_ok=True)
    return [data, staging]


def disk_fields(role: str, path: Path) -> dict[str, Any]:
    disk = disks.disk_of(path)
    place = {"role": role, "path": str(path), "mount": disk.mount, "kind": disk.kind}
    return {**place, "is_network": disk.is_network, "bytes_per_second": None, "bytes": 0}


def speed_fields(files: list[Path]) -> dict[str, Any]:
    speed = disks.read_speed(files, max_bytes=DISK_BYTES, max_seconds=DISK_SECONDS)
    return {"bytes_per_second": speed.bytes_per_second, "bytes": speed.num_bytes}
