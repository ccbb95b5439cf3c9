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
    folder.mkdir(parents=True, exist_ok=True)
    task.stage(lambda path: local_copy(Path(path), folder))


def local_folder() -> Path:
    """Node-local storage: what the scheduler gives the job, else the temporary folder."""
    given = os.environ.get("SLURM_TMPDIR") or tempfile.gettempdir()
    return Path(given) / f"allranks-{os.getuid()}"


def local_copy(path: Path, folder: Path) -> Path:
    """The path of a local copy of a file or folder, which is made if it is not there yet.

    The copy is keyed by place, size and time of change: data that was changed is copied anew.
    """
    try:
        status = path.stat()
    except OSError as error:
        raise AllranksError(
            f"data.stage: local cannot read {path}: {error.strerror}",
            fix="correct the path, or leave out data.stage",
        ) from None
    key = f"{path.resolve()}:{status.st_size}:{status.st_mtime_ns}"
    target = folder / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}-{path.name}"
    with (folder / f".{target.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the first rank copies, the others wait here
        if not target.exists():
            _copy(path, target)
    return target


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
