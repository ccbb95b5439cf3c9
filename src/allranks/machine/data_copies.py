"""Copies of the data on each node's own disk, made once for all ranks of the node."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import stat
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from allranks.errors import AllranksError


def own_folder() -> Path:
    """The folder for our copies on this node's own disk, made if it is not there yet."""
    folder = local_folder()
    fix = "point TMPDIR at a folder of your own, or stage nothing"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        found = folder.lstat()
    except OSError as error:
        raise AllranksError(f"stage: cannot make {folder}: {error.strerror}", fix=fix) from None
    # Its name is known: in a /tmp that users share, another one may have made it first.
    if not stat.S_ISDIR(found.st_mode):
        raise AllranksError(f"stage: {folder} is a link or a file, not a folder", fix=fix)
    if found.st_uid != os.getuid():
        raise AllranksError(f"stage: {folder} belongs to another user", fix=fix)
    if found.st_mode & 0o002:
        raise AllranksError(
            f"stage: everyone may write to {folder}", fix=f"remove it: rm -r {folder}"
        )
    return folder


def stage_together(paths: Sequence[Path]) -> Path:
    """A folder on this node that contains a copy of each path under the path's own name."""
    names = [path.name for path in paths]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise AllranksError(
            f"stage: two paths are called {twice[0]}", fix="rename one, or stage their parent"
        )
    folder = own_folder()
    copies = [local_copy(path, folder) for path in paths]
    key = hashlib.sha256("\n".join(map(str, copies)).encode()).hexdigest()[:16]
    together = folder / f"stage-{key}"
    together.mkdir(exist_ok=True)
    for name, copy in zip(names, copies, strict=True):
        with suppress(FileExistsError):  # another rank of this node was here
            (together / name).symlink_to(copy)
    return together


def local_folder() -> Path:
    """Node-local storage: what the scheduler gives the job, or the temporary folder."""
    given = os.environ.get("SLURM_TMPDIR") or tempfile.gettempdir()
    return Path(given) / f"allranks-{os.getuid()}"


def local_copy(path: Path, folder: Path) -> Path:
    """The path of a local copy of a file or folder, which is made if it does not exist yet.

    Its name depends on the path, sizes and modification times: changed data are copied again.
    """
    try:
        state = _state(path)
    except OSError as error:
        raise AllranksError(
            f"stage: cannot read {path}: {error.strerror}",
            fix="correct the path, or stage nothing",
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
            f"stage: cannot copy {path} to {target.parent}: {error.strerror}",
            fix="free space there, point TMPDIR at a larger disk, or stage nothing",
        ) from None
