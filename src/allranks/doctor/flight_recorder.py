"""Dumps of torch's Flight Recorder: pickles, so only plain data of our own files is read."""

from __future__ import annotations

import io
import math
import os
import pickle
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from allranks.doctor.finding import shown_path
from allranks.doctor.log_search import Source
from allranks.run import files

MAX_BYTES = 1 << 28
MAX_ENTRIES = 100_000
MAX_SIZES = 16  # dimensions of a tensor


class PlainUnpickler(pickle.Unpickler):
    """Reads numbers, strings, lists and dictionaries; refuses a pickle with any class."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} is not plain data")


def is_ours(path: Path) -> bool:
    """Whether a file belongs to this user (or root) and is not a link."""
    with suppress(OSError):
        status = path.lstat()
        return os.path.isfile(path) and not path.is_symlink() and status.st_uid in (os.getuid(), 0)
    return False


def read_dump(path: Path) -> dict[str, Any] | None:
    """The content of a dump; None if it is not ours, too large, or not plain data."""
    with suppress(Exception):  # whatever a broken pickle may raise
        if not is_ours(path) or path.stat().st_size > MAX_BYTES:
            return None
        content = PlainUnpickler(io.BytesIO(files.read_bytes(path, MAX_BYTES))).load()
        return content if isinstance(content, dict) else None
    return None


def is_dump(path: Path) -> bool:
    """Whether a file is a pickle of protocol 2 or later, by its first bytes."""
    with suppress(OSError), files.open_file(path) as file:
        head = file.read(2)
        return len(head) == 2 and head[0] == 0x80 and 2 <= head[1] <= 5
    return False


def flight_source(path: Path) -> Source | None:
    """A dump as lines that the doctor reads like a log."""
    dump = read_dump(path) if is_dump(path) else None
    if dump is None:
        return None
    lines: list[str] = []
    # There may be anything where torch writes lists and numbers.
    with suppress(LookupError, TypeError, ValueError, ArithmeticError):
        lines = lines_of(dump)
    return Source(path, shown_path(path), rank_of(path, dump), None, "\n".join(lines).encode())


def rank_of(path: Path, dump: dict[str, Any]) -> int | None:
    match = re.search(r"rank_?(\d+)(?:\.\w+)?$|(\d+)$", path.name)
    rank = dump.get("rank", match and int(match[1] or match[2]))
    return rank if isinstance(rank, int) else None


def lines_of(dump: dict[str, Any]) -> list[str]:
    """How far the rank got in each of its process groups, and what it waited in."""
    entries = [one for one in (dump.get("entries") or [])[-MAX_ENTRIES:] if isinstance(one, dict)]
    groups: dict[str, list[tuple[int, dict[str, Any]]]] = {}
    for one in entries:
        number = one.get("collective_seq_id", one.get("seq_id"))
        if isinstance(number, int):
            groups.setdefault(_group(one), []).append((number, one))
    lines = []
    for group, numbered in groups.items():
        begun = max(number for number, _ in numbered)
        done = [number for number, one in numbered if one.get("state") == "completed"]
        lines.append(
            f"{group}Flight Recorder: last enqueued work: {begun}, "
            f"last completed work: {max(done, default=-1)}"
        )
        stuck = [(number, one) for number, one in numbered if one.get("state") != "completed"]
        if stuck:
            lines.append(group + _waits(*stuck[0]))
    return lines


def _waits(number: int, entry: dict[str, Any]) -> str:
    """The collective that did not finish, in NCCL's words."""
    sizes = entry.get("input_sizes") or [[]]
    shape = sizes[0][:MAX_SIZES] if isinstance(sizes[0], list | tuple) else []
    count = math.prod(map(int, shape))
    operation = _word(entry.get("profiling_name")).rpartition(":")[2].upper()
    state = _word(entry.get("state"))
    if state not in ("scheduled", "started"):
        return f"{operation} {state}"
    return (
        f"Watchdog caught collective operation timeout: WorkNCCL(SeqNum={number}, "
        f"OpType={operation}, NumelIn={count})"
    )


def _group(entry: dict[str, Any]) -> str:
    """The process group of an entry, as NCCL's lines begin with it; "" if it has none."""
    named = entry.get("process_group")
    name, *more = named if isinstance(named, list | tuple) and named else [named]
    if name is None:
        return ""
    described = f"({_word(more[0])})" if more else ""
    return f"[PG GUID {_word(name)}{described}] "


def _word(value: object) -> str:
    """A short string or number of a dump; it must not begin another line."""
    return re.sub(r"[^\w.:-]", "_", str(value)[:64]) if isinstance(value, str | int) else ""
