"""Run folders that no rank of allranks leaves behind: copied in part, edited, hostile."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from tests.watch_runs import GrowingRun

from allranks.run.folder import RunDir

# Escapes of every kind: a clipboard, a link, colours, C1, a title, directions, returns.
HOSTILE = (
    "\x1b]52;c;Y3VybA==\x07\x1b]8;;http://x\x1b\\\x1b[31;8m\x9b2J\x9d0;t\x9c\u202e\u2066\r\b"
    "</td><script>[/x]`|$(id)"
)
CONTROL = [chr(n) for n in (*range(9), *range(11, 32), *range(127, 160), 0x202E, 0x2066)]

ODD_VALUES: list[Any] = [
    *(None, True, -1, 0, 10**18, 10**400, 1e308, -0.5, "", "x", HOSTILE, "1x999999999", "²"),
    *([], {}, [None], [[]], {"": None}, {"state": 1}, ["--help"], "2026-11-15", {"a": {"b": []}}),
    *("failed", {"state": "failed", "reason": HOSTILE}, [{}], {"gpus": [1]}, {"what": 1, "fix": 2}),
]
NAN = "@nan@"  # made a literal in the text
ODD_TEXTS = [
    b"",
    b"null",
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b"NaN",
    b"\x00" * 5000,
    b"\xff\xfe\x00{",
    b'{"v":1',
    b'{"v":1,"t":1e999,"event":"step","step":1}\n' * 3,
    b"- " * 50_000,
    b"a: &a [x, x, x, x, x, x, x, x]\n"
    + b"".join(b"%c: &%c [*%c, *%c, *%c, *%c]\n" % (n, n, *[n - 1] * 4) for n in range(98, 118)),
    b"a: &a [*a]",
    b"? [1]\n: 2\n1: 2\nnull: 3",
    b"9" * 6000,
    b"error: rank " + b"9" * 6000 + b" was killed by SIGKILL\n",
    b'  File "/dev/zero", line ' + b"9" * 6000 + b", in f\nTraceback (most recent call last):\n",
    b"x" * 3_000_000,
    HOSTILE.encode(),
]
FILES = (
    *("run.json", "job.yaml", "attempts/0/rank-0.jsonl", "attempts/0/rank-1.jsonl"),
    *("attempts/0/rank-0.log", "claims/0", ".lock", "stop.json", "slurm-1.log", "attempts"),
    *("attempts/0", "claims", "attempts/0/rank-2.jsonl", "attempts/0/rank-7.log", "secrets.json"),
    *("attempts/²", "attempts/007", "attempts/3", "attempts/99999999999999999999", "error.json"),
    *("checkpoints", "attempts/0/nccl_trace_rank_0", ".run.json.lock", "claims/²", "claims/5"),
    *("attempts/0/rank-²0.jsonl", "attempts/0/rank-x.log", "slurm-x.log", "claims/00"),
)
LISTED = tuple(name for name in FILES if "/" not in name or name.startswith("attempts/0/"))
Change = Callable[[Path], None]


def good_run(runs: Path, number: int, **options: Any) -> GrowingRun:
    """A finished run of two ranks, with a claim, a log of its job and one who asked it to stop."""
    run = GrowingRun(runs, "1x2", number=number, steps=10, gpu=False, **options)
    run.begin()
    run.steps(10)
    run.write(0, "metric", step=10, name="val_loss", value=0.5)
    run.write(0, "checkpoint", step=10, seconds=0.1, stall=0.0)
    run.write(0, "batch", epoch=1, batch=0, samples=4, loader=0, trained=True, content="a")
    run.write(0, "window", first=4, last=10, steady=True)
    run.end(seconds=2.0, step=10, metrics={"val_loss": 0.5})
    path = run.run.path
    (path / "claims").mkdir()
    claim = {"number": 0, "job": "1", "restart": 0, "layout": "1x2", "nodes": ["n1"], "host": "h"}
    (path / "claims" / "0").write_text(json.dumps({**claim, "pid": 1, "time": 1.0, "token": "t"}))
    (path / "slurm-1.log").write_text("hello\n")
    return run


def failed_run(runs: Path, number: int) -> GrowingRun:
    """One whose rank 1 raised, with everything that an end may tell."""
    run = good_run(runs, number, info={"jobs": ["1"], "racers": {"1": {"layout": "1x2"}}})
    frames = [["/tmp/train.py", 3, "f", "x"]]
    error = {"type": "ValueError", "message": "no", "echo": False, "pid": 1, "frames": frames}
    run.write(1, "error", **error, file="/tmp/train.py", line=3, function="f", cause="because")
    run.write(1, "end", state="failed", exit=1, error={"what": "no", "fix": "", "echo": False})
    return run


# --- What can be wrong with one -----------------------------------------------------------------


def write(path: Path, text: bytes) -> None:
    remove(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text)


def remove(path: Path) -> None:
    for parent in reversed(path.parents[:2]):
        if parent.is_symlink() or (parent.exists() and not parent.is_dir()):
            parent.unlink()
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    elif os.path.lexists(path):
        path.unlink()


def make_odd(path: Path, kind: str) -> None:
    """In place of a file or folder: something that is neither."""
    remove(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        (path / "inside").mkdir(parents=True)
    elif kind == "socket":
        short = Path(f"/proc/self/fd/{os.open(path.parent, os.O_RDONLY)}")
        with socket.socket(socket.AF_UNIX) as there:
            there.bind(str(short / path.name))
        os.close(int(short.name))
    elif kind == "holes":
        with path.open("wb") as file:
            file.truncate(1 << 40)
    else:
        path.symlink_to(kind)


def mutated(text: str, line: int, key: str, value: Any, *, drop: bool) -> str:
    """A JSON document of one or several lines with one of its fields changed."""
    lines = text.splitlines()
    at = line % len(lines) if len(lines) > 1 and lines[0].startswith('{"v"') else None
    content = json.loads(lines[at] if at is not None else text)
    key = sorted(content)[int(key) % len(content)] if key.isdigit() else key
    content.pop(key, None)
    if not drop:
        content[key] = value
    made = json.dumps(content).replace(f'"{NAN}"', "NaN")
    if at is None:
        return made
    lines[at] = made
    return "\n".join(lines) + "\n"


def change_field(name: str, line: int, key: str, value: Any, *, drop: bool) -> Change:
    def change(folder: Path) -> None:
        path = folder / name
        try:
            text = mutated(path.read_text(), line, key, value, drop=drop)
        except (OSError, ValueError, TypeError):  # changed beyond that before
            return
        path.write_text(text)

    return change


# --- As strategies ------------------------------------------------------------------------------

KEYS = st.one_of(
    st.integers(0, 30).map(str),
    st.sampled_from(
        [
            *("t", "event", "step", "seconds", "loss", "state", "error", "frames", "at", "metrics"),
            *("created", "layout", "jobs", "ended", "attempts", "bench", "hardware", "queued"),
            *("world_size", "network", "processes", "waits", "own", "signal", "exit", "name"),
            *("backend", "overrides", "code", "packages", "racers", "missing", "changes", "nodes"),
        ]
    ),
)
JSON_FILES = ("run.json", "attempts/0/rank-0.jsonl", "attempts/0/rank-1.jsonl", "claims/0")
FIELDS = st.builds(
    change_field,
    st.sampled_from(JSON_FILES),
    st.integers(0, 40),
    KEYS,
    st.one_of(st.sampled_from([*ODD_VALUES, NAN]), st.integers(), st.text(max_size=8)),
    drop=st.booleans(),
)
TEXTS = st.builds(
    lambda name, text: lambda folder: write(folder / name, text),
    st.sampled_from(FILES),
    st.one_of(st.sampled_from(ODD_TEXTS), st.binary(max_size=40)),
)
KINDS = ("fifo", "folder", "socket", "holes", "/dev/zero", "/etc/passwd", "/nowhere", ".", "..")
ENTRIES = st.builds(
    lambda name, kind: lambda folder: make_odd(folder / name, kind),
    st.sampled_from(FILES),
    st.sampled_from(KINDS),
)
ODD_FOLDERS: st.SearchStrategy[list[Change]] = st.lists(
    st.one_of(FIELDS, FIELDS, TEXTS, ENTRIES), min_size=1, max_size=3
)


def apply(run: RunDir, changes: Sequence[Change]) -> None:
    for change in changes:
        change(run.path)
