"""The files of a run's folder, opened and checked in one place.

A folder may have been copied from anywhere, so nothing in it is trusted. Only regular files are
opened, up to a limit, never through a link, and never a FIFO, which would have to be waited for.
Types are checked here; wrong values are left out, and noted for whoever shows the run.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

from allranks.show.text import plain

MAX_BYTES = 16 << 20  # of a file that is read whole
MAX_HOLE_BYTES = 64 << 20  # of zeros that take no space on the disk
MAX_NUMBER = 1_000_000  # of a rank or an attempt
MAX_NOTES = 10_000
MAX_NODES = 100_000  # values of a document: aliases in YAML multiply them
MAX_YAML_BYTES = 1 << 20
MAX_NESTED = 2000  # brackets and list marks of a YAML document
SHOWN_VALUE = 40  # characters

Check = Callable[[Any], bool]

_notes: dict[Path, str] = {}  # the first thing that was wrong in each file that was read


# --- Opening ------------------------------------------------------------------------------------


def open_file(path: Path) -> BinaryIO:
    """Open a regular file to read it. Raises OSError for anything else: links, FIFOs, devices."""
    if not stat.S_ISREG(os.lstat(path).st_mode):  # first: opening a device may do something
        raise _refused(path, kind_of(os.lstat(path).st_mode))
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_NOCTTY
    descriptor = os.open(path, flags)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise _refused(path, kind_of(status.st_mode))
        if status.st_size > MAX_HOLE_BYTES:
            hole = os.lseek(descriptor, 0, os.SEEK_HOLE)
            if status.st_size - hole > MAX_HOLE_BYTES:
                raise _refused(path, "a file with holes")
            os.lseek(descriptor, 0, os.SEEK_SET)
        return cast(BinaryIO, os.fdopen(descriptor, "rb"))
    except BaseException:
        os.close(descriptor)
        raise


def open_named(path: Path) -> BinaryIO:
    """Open a file that the user named: links are followed, and pipes are read.

    A FIFO without a writer is empty.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        os.set_blocking(descriptor, True)
        return cast(BinaryIO, os.fdopen(descriptor, "rb"))
    except BaseException:
        os.close(descriptor)
        raise


def is_regular(path: Path) -> bool:
    """Whether there is a file, not a link to one."""
    try:
        return stat.S_ISREG(os.lstat(path).st_mode)
    except OSError:
        return False


def read_bytes(path: Path, limit: int = MAX_BYTES) -> bytes:
    """The content of a regular file. Raises OSError, also if it is larger than the limit."""
    with open_file(path) as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise OSError(errno.EFBIG, f"larger than {limit} bytes", str(path))
    return content


def kind_of(mode: int) -> str:
    """What a file is, in words."""
    kinds = {stat.S_IFLNK: "a link", stat.S_IFIFO: "a FIFO", stat.S_IFDIR: "a folder"}
    kinds |= {stat.S_IFSOCK: "a socket", stat.S_IFREG: "a file"}
    return kinds.get(stat.S_IFMT(mode), "a device")


def _refused(path: Path, what: str) -> OSError:
    return OSError(errno.EINVAL, f"it is {what}", str(path))


# --- Folders ------------------------------------------------------------------------------------


def entries(folder: Path) -> list[os.DirEntry[str]]:
    """The entries of a folder, by name; none if it is a link, or cannot be read."""
    try:
        if not stat.S_ISDIR(os.lstat(folder).st_mode):
            note(folder, f"it is {kind_of(os.lstat(folder).st_mode)}")
            return []
        with os.scandir(folder) as found:
            return sorted(found, key=lambda entry: entry.name)
    except FileNotFoundError:
        return []
    except OSError as error:
        note(folder, error.strerror or str(error))
        return []


def numbers_in(folder: Path, before: str = "", after: str = "") -> list[int]:
    """The numbers N of all names `{before}N{after}` in a folder, sorted."""
    names = [entry.name for entry in entries(folder)]
    inner = [
        name[len(before) : len(name) - len(after)]
        for name in names
        if name.startswith(before) and name.endswith(after) and len(name) > len(before + after)
    ]
    return sorted(number for text in inner if (number := number_of(text)) is not None)


def number_of(text: str) -> int | None:
    """The number in a name of ours: plain digits, and not too many; None for anything else."""
    if not (text.isascii() and text.isdigit() and len(text) < len(str(MAX_NUMBER))):
        return None
    return int(text) if str(int(text)) == text else None


def odd_entries(folder: Path, *, spared: Sequence[str] = ()) -> list[str]:
    """The entries of a folder that are neither files nor folders, in words."""
    odd = [
        entry
        for entry in entries(folder)
        if entry.name not in spared
        and not (entry.is_file(follow_symlinks=False) or entry.is_dir(follow_symlinks=False))
    ]
    return [f"{plain(entry.name)}: it is {kind_of(mode_of(entry))}" for entry in odd]


def mode_of(entry: os.DirEntry[str]) -> int:
    try:
        return entry.stat(follow_symlinks=False).st_mode
    except OSError:  # it was just removed
        return 0


# --- Content ------------------------------------------------------------------------------------


def parse_json(text: bytes) -> Any:
    """JSON without NaN, and without anything that a terminal would obey. Raises ValueError."""
    try:
        return cleaned(_decode(text.decode()), text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def parse_yaml(text: bytes) -> Any:
    """YAML as plain data, without anything that a terminal would obey. Raises ValueError."""
    import yaml  # ranks do not need it

    if len(text) > MAX_YAML_BYTES:
        raise ValueError("it is too large")
    if max(map(text.count, (b"[", b"{", b"- ", b"? "))) > MAX_NESTED:  # libyaml would crash
        raise ValueError("it is nested too deeply")
    # libyaml takes a tenth of the time, but is not installed everywhere.
    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        return plain_data(yaml.load(text, loader))  # safe: a SafeLoader either way
    except (yaml.YAMLError, RecursionError, AttributeError, TypeError):
        raise ValueError("it is not valid YAML") from None


_decode = json.JSONDecoder(parse_constant=lambda _: None).decode


def cleaned(value: Any, text: bytes) -> Any:
    """What was parsed from a text, with all strings made plain; in most texts they are."""
    return plain_data(value) if b"\\" in text or not text.isascii() else value


def plain_data(value: Any) -> Any:
    """Only types of JSON, with plain strings. Raises ValueError if there is too much of it."""
    left = [MAX_NODES]
    try:
        return _plain_data(value, left)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _plain_data(value: Any, left: list[int]) -> Any:
    left[0] -= 1
    if left[0] < 0:
        raise ValueError("it is too large")
    if isinstance(value, str):
        return plain(value)
    if value is None or isinstance(value, int | float):
        return value
    if isinstance(value, dict):
        return {plain(str(key)): _plain_data(item, left) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [_plain_data(item, left) for item in value]
    return plain(str(value))


def read_mapping(
    path: Path, fields: Mapping[str, Check], parse: Callable[[bytes], Any] = parse_json
) -> dict[str, Any]:
    """The content of a document in a run's folder, checked; empty if there is none (yet)."""
    try:
        content = parse(read_bytes(path))
    except FileNotFoundError:
        forget(path)
        return {}
    except OSError as error:
        note(path, error.strerror or str(error))
        return {}
    except ValueError as error:
        said = str(error) if str(error).startswith("it is ") else "it cannot be parsed"
        note(path, said)
        return {}
    if not isinstance(content, dict):
        note(path, "it is not a mapping of names to values")
        return {}
    forget(path)
    return checked(content, fields, path)


def checked(content: dict[str, Any], fields: Mapping[str, Check], path: Path) -> dict[str, Any]:
    """The content without values of a wrong type, which are noted."""
    wrong = [name for name in content if name in fields and not fields[name](content[name])]
    for name in wrong:
        note(path, wrong_value(name, content.pop(name)))
    return content


def wrong_value(name: str, value: Any) -> str:
    try:
        text = json.dumps(value, default=str)
    except (ValueError, RecursionError):
        text = "…"
    return f"{name} is {text if len(text) <= SHOWN_VALUE else text[:SHOWN_VALUE] + '…'}"


def is_number(value: Any) -> bool:
    """Whether it is finite, and small enough to compute with."""
    return (type(value) is float or type(value) is int) and -1e30 < value < 1e30


def is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 53


def is_size(value: Any) -> bool:
    """Whether it is a count to divide by, or of things that are listed one by one."""
    return type(value) is int and 0 < value <= MAX_NUMBER


def is_positive(value: Any) -> bool:
    return is_count(value) and value > 0


def is_time(value: Any) -> bool:
    """Whether it is UNIX time, or seconds, within what a calendar can show."""
    return is_number(value) and 0 <= value < 1e11


def is_text(value: Any) -> bool:
    return isinstance(value, str)


def is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def is_integer(value: Any) -> bool:
    return type(value) is int and abs(value) < 1 << 53


def or_none(check: Check) -> Check:
    return lambda value: value is None or check(value)


def one_of(*values: str) -> Check:
    return lambda value: isinstance(value, str) and value in values


def list_of(check: Check) -> Check:
    return lambda value: isinstance(value, list) and all(map(check, value))


def row_of(*checks: Check) -> Check:
    """A list with one value for each check."""
    return lambda value: (
        isinstance(value, list)
        and len(value) == len(checks)
        and all(check(item) for check, item in zip(checks, value, strict=True))
    )


def is_mapping(value: Any) -> bool:
    return isinstance(value, dict)


def values_of(check: Check) -> Check:
    return lambda value: isinstance(value, dict) and all(map(check, value.values()))


def mapping(needs: Mapping[str, Check], more: Mapping[str, Check] | None = None) -> Check:
    """A mapping with all names of `needs`, and maybe those of `more`."""
    allowed = more or {}
    return lambda value: (
        isinstance(value, dict)
        and all(name in value and check(value[name]) for name, check in needs.items())
        and all(check(value[name]) for name, check in allowed.items() if name in value)
    )


# --- The fields of a run's files that anybody but their writer reads ------------------------------

_TEXTS = list_of(is_text)
_MAYBE_NUMBER = or_none(is_number)
_GPU = mapping({}, {"memory_bytes": _MAYBE_NUMBER})
_BYTES = dict.fromkeys(("memory_bytes", "memory_allotted_bytes"), _MAYBE_NUMBER)
_CPUS = dict.fromkeys(("cpus", "cpus_allotted"), _MAYBE_NUMBER)
_STATE = one_of("queued", "running", "finished", "failed", "stopped")
INFO: dict[str, Check] = {
    "created": is_time,
    **dict.fromkeys(("layout", "cwd"), is_text),
    **dict.fromkeys(("backend", "job_file"), or_none(is_text)),
    **dict.fromkeys(("jobs", "overrides", "checked_nodes"), _TEXTS),
    **dict.fromkeys(("queued", "replaced_nodes"), is_flag),
    **dict.fromkeys(("code", "packages", "ladder"), or_none(is_mapping)),
    "hardware": mapping({}, {"gpus": or_none(list_of(_GPU)), **_BYTES, **_CPUS}),
    "bench": mapping({}, {"job": is_mapping}),
    "ended": or_none(mapping({"state": _STATE, "reason": is_text})),
    "attempts": list_of(
        mapping({}, {"attempt": is_count, "started": is_time, "changes": list_of(is_mapping)})
    ),
    "changes": list_of(mapping({"key": is_text})),
    "racers": values_of(mapping({"layout": is_text}, {"claim": is_integer})),
    "missing": or_none(
        mapping({"attempt": is_count, "path": is_text, "on": _TEXTS, "not_on": _TEXTS})
    ),
}
JOB: dict[str, Check] = {
    **dict.fromkeys(("name", "task", "command", "last", "launcher"), or_none(is_text)),
    **dict.fromkeys(
        ("epochs", "steps", "batch_size", "batch_size_per_rank", "seed"), or_none(is_integer)
    ),
    **dict.fromkeys(
        ("options", "optimizer", "data", "slurm", "env", "checkpoint"), or_none(is_mapping)
    ),
}
STOP: dict[str, Check] = {"why": is_text, "jobs": _TEXTS, "moves": is_flag}


# --- What was wrong -----------------------------------------------------------------------------


def note(path: Path, what: str) -> None:
    """Remember the first thing that is wrong with a file."""
    if len(_notes) < MAX_NOTES:
        _notes.setdefault(path, what)


def forget(path: Path) -> None:
    """Forget what was wrong with a file: it is read again from the beginning."""
    _notes.pop(path, None)


def notes_on(folder: Path) -> list[str]:
    """What was wrong with the files of a folder that this process has read."""
    found = [(path, what) for path, what in _notes.copy().items() if path.is_relative_to(folder)]
    return [f"{plain(str(path.relative_to(folder)))}: {what}" for path, what in found]
