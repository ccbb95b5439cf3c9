"""Dumps of torch's Flight Recorder: pickles, so only read if they are ours, and only plain data."""

from __future__ import annotations

import io
import os
import pickle
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from allranks.doctor.judge import shown_path
from allranks.doctor.scan import Source

MAX_BYTES = 1 << 28
MAX_ENTRIES = 100_000


class PlainUnpickler(pickle.Unpickler):
    """Numbers, texts, lists and dictionaries; a pickle that asks for any class is refused."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} is not plain data")

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("references are not plain data")


def is_ours(path: Path) -> bool:
    """Owned by this user (or root), and no link to elsewhere."""
    with suppress(OSError):
        status = path.lstat()
        return os.path.isfile(path) and not path.is_symlink() and status.st_uid in (os.getuid(), 0)
    return False


def read_dump(path: Path) -> dict[str, Any] | None:
    """The content of a dump; None if it is not ours, too large, or more than plain data."""
    if not is_ours(path) or path.stat().st_size > MAX_BYTES:
        return None
    with suppress(Exception):  # whatever a broken pickle may raise
        content = PlainUnpickler(io.BytesIO(path.read_bytes())).load()
        return content if isinstance(content, dict) else None
    return None


def is_dump(path: Path) -> bool:
    """A pickle of protocol 2 or later, by its first bytes."""
    with suppress(OSError), path.open("rb") as file:
        head = file.read(2)
        return len(head) == 2 and head[0] == 0x80 and 2 <= head[1] <= 5
    return False


def flight_source(path: Path) -> Source | None:
    """A dump as lines that the doctor reads like a log's."""
    dump = read_dump(path) if is_dump(path) else None
    if dump is None:
        return None
    rank = rank_of(path, dump)
    return Source(path, shown_path(path), rank, None, "\n".join(lines_of(dump)).encode())


def rank_of(path: Path, dump: dict[str, Any]) -> int | None:
    match = re.search(r"rank_?(\d+)(?:\.\w+)?$|(\d+)$", path.name)
    rank = dump.get("rank", match and int(match[1] or match[2]))
    return rank if isinstance(rank, int) else None


def lines_of(dump: dict[str, Any]) -> list[str]:
    """How far the rank came, and what it waited in."""
    entries = [one for one in (dump.get("entries") or [])[-MAX_ENTRIES:] if isinstance(one, dict)]
    numbers = [one["collective_seq_id"] for one in entries if _is_number(one, "collective_seq_id")]
    done = [one["collective_seq_id"] for one in entries if one.get("state") == "completed"]
    if not numbers:
        return []
    lines = [
        f"Flight Recorder: last enqueued work: {max(numbers)}, "
        f"last completed work: {max(done, default=-1)}"
    ]
    for one in entries:
        is_stuck = one.get("state") != "completed" and _is_number(one, "collective_seq_id")
        if is_stuck:
            sizes = one.get("input_sizes") or [[]]
            count = 1
            for size in sizes[0] if isinstance(sizes[0], list | tuple) else []:
                count *= int(size)
            operation = str(one.get("profiling_name", "")).rpartition(":")[2].upper()
            lines.append(
                f"Watchdog caught collective operation timeout: WorkNCCL(SeqNum="
                f"{one['collective_seq_id']}, OpType={operation}, NumelIn={count})"
                if one.get("state") in ("scheduled", "started")
                else f"{operation} {one.get('state')}"
            )
            break
    return lines


def _is_number(entry: dict[str, Any], key: str) -> bool:
    return isinstance(entry.get(key), int)
