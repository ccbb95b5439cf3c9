"""Finds the files that a task's samples are read from.

No single source lists them all. Python reports every file that it opens; files that libraries open
are in /proc if they stay open, and in the task's options if they are named there.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

MAX_FILES = 100_000  # more would take longer to find and drop from the cache than to read
CODE = (".py", ".pyc", ".so")
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
