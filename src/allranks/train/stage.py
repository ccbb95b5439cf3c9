"""Copies of the data on each node's own disk, made once however many ranks ask."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import tempfile
from pathlib import Path

from allranks.errors import AllranksError
from allranks.tasks import Task


def stage_locally(task: Task) -> None:
    """Have the task read its data from node-local storage."""
    folder = local_folder()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if folder.stat().st_uid != os.getuid():
        raise AllranksError(
            f"data.stage: {folder} belongs to another user",
            fix="point TMPDIR at a folder of your own, or leave out data.stage",
        )
    task.stage(lambda path: local_copy(Path(path), folder))


def local_folder() -> Path:
    """Node-local storage: what the scheduler gives the job, else the temporary folder."""
    given = os.environ.get("SLURM_TMPDIR") or tempfile.gettempdir()
    return Path(given) / f"allranks-{os.getuid()}"


def local_copy(path: Path, folder: Path) -> Path:
    """The path of a local copy of a file or folder, which is made if it is not there yet.

    The copy is keyed by place, sizes and times of change: data that was changed is copied anew.
    """
    try:
        state = _state(path)
    except OSError as error:
        raise AllranksError(
            f"data.stage: local cannot read {path}: {error.strerror}",
            fix="correct the path, or leave out data.stage",
        ) from None
    key = f"{path.resolve()}:{state}"
    target = folder / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}-{path.name}"
    with (folder / f".{target.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the first rank copies, the others wait here
        if not target.exists():
            _copy(path, target)
    return target


def _state(path: Path) -> str:
    """Changes whenever a file in `path` does."""
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    sizes = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return hashlib.sha256(repr(sizes or path.stat().st_mtime_ns).encode()).hexdigest()


def _copy(path: Path, target: Path) -> None:
    partial = target.with_name(f".{target.name}.partial")
    try:
        if path.is_dir():
            shutil.copytree(path, partial, dirs_exist_ok=True)
        else:
            shutil.copyfile(path, partial)
        partial.rename(target)
    except OSError as error:
        raise AllranksError(
            f"data.stage: local cannot copy {path} to {target.parent}: {error.strerror}",
            fix="free space there, point TMPDIR at a larger disk, or leave out data.stage",
        ) from None
