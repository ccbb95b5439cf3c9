"""Which disk a folder is on, how much room it has, and how fast it is."""

from __future__ import annotations

import itertools
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

MOUNTS = Path("/proc/self/mountinfo")
NETWORK = {
    *("nfs", "nfs4", "cifs", "smb3", "smbfs", "lustre", "gpfs", "beegfs", "ceph", "glusterfs"),
    *("panfs", "orangefs", "wekafs", "afs", "ocfs2", "gfs2", "9p", "virtiofs", "daos"),
}
# File systems in user space that are on another machine.
NETWORK_FUSE = ("sshfs", "s3fs", "gcsfuse", "glusterfs", "ceph", "goofys", "rclone", "blobfuse")
MEMORY = {"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"}
TRIAL_WRITE_BYTES = 16 << 20
TRIAL_READ_BYTES = 64 << 20
TRIAL_READ_SECONDS = 1.0
TRIAL_FILES = 200
BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Disk:
    """A mounted file system."""

    mount: str
    kind: str  # as the kernel calls it: ext4, nfs4, lustre

    @property
    def is_network(self) -> bool:
        name = self.kind.removeprefix("fuse.")
        is_fuse = self.kind.startswith("fuse")
        return self.kind in NETWORK or (is_fuse and name.startswith(NETWORK_FUSE))

    @property
    def is_memory(self) -> bool:
        return self.kind in MEMORY


def disk_of(path: Path, mountinfo: str | None = None) -> Disk:
    """The disk that a path is on. `mountinfo`: the text of /proc/self/mountinfo."""
    if mountinfo is None:
        mountinfo = MOUNTS.read_text() if MOUNTS.exists() else ""
    place = Path(os.path.realpath(path))
    found = Disk("/", "unknown")
    for line in mountinfo.splitlines():
        left, dash, right = line.partition(" - ")
        if not dash:
            continue
        mount = _plain(left.split()[4])
        # Of two at one place, the later one hides the earlier.
        if place.is_relative_to(mount) and len(mount) >= len(found.mount):
            found = Disk(mount, (right.split() or ["unknown"])[0])
    return found


def _plain(word: str) -> str:
    r"""The kernel writes a space in a path as \040."""
    for code, character in (("040", " "), ("011", "\t"), ("012", "\n"), ("134", "\\")):
        word = word.replace(f"\\{code}", character)
    return word


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderFacts:
    """A folder that training reads from or writes to, as far as could be found out."""

    path: str
    use: str  # runs or data
    kind: str = "unknown"  # of its file system
    is_network: bool = False
    is_memory: bool = False
    free_bytes: int | None = None
    free_files: int | None = None  # that can still be created; None: no limit
    write_speed: float | None = None  # bytes a second, all the way to the disk
    read_speed: float | None = None  # bytes a second, from the disk
    problem: str = ""


def look_at(folder: Path, use: str, *, writes: bool) -> FolderFacts:
    """Measure a folder, or the nearest one above it that exists."""
    there = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())
    if not writes and there != folder.absolute():
        return FolderFacts(path=str(folder), use=use, problem="there is no such folder")
    disk = disk_of(there)
    facts = FolderFacts(
        path=str(there),
        use=use,
        kind=disk.kind,
        is_network=disk.is_network,
        is_memory=disk.is_memory,
    )
    try:
        found = os.statvfs(there)
        files = found.f_favail if found.f_files else None
        facts = replace(facts, free_bytes=shutil.disk_usage(there).free, free_files=files)
        if writes:
            return replace(facts, write_speed=write_speed(there))
        return replace(facts, read_speed=read_speed(there))
    except OSError as error:
        return replace(facts, problem=error.strerror or str(error))


def write_speed(folder: Path) -> float:
    """Bytes per second that reach the disk. Raises OSError if none can be written."""
    path = folder / f".allranks-speed-{os.getpid()}"
    block = os.urandom(1 << 20)
    try:
        with path.open("wb", buffering=0) as file:
            start = time.perf_counter()
            for _ in range(TRIAL_WRITE_BYTES // len(block)):
                file.write(block)
            os.fsync(file.fileno())
            return TRIAL_WRITE_BYTES / max(1e-9, time.perf_counter() - start)
    finally:
        with suppress(OSError):
            path.unlink()


def read_speed(folder: Path) -> float | None:
    """Bytes per second from the disk, for the first files found; None if there are none."""
    files = list(itertools.islice(_files(folder), TRIAL_FILES))
    for file in files:
        forget(file)
    block = bytearray(BLOCK_BYTES)
    num_bytes, passed, start = 0, 0.0, time.perf_counter()
    for file in files:
        with suppress(OSError), file.open("rb", buffering=0) as opened:
            while num_bytes < TRIAL_READ_BYTES and passed < TRIAL_READ_SECONDS:
                count = opened.readinto(block)
                if not count:
                    break
                num_bytes += count
                passed = time.perf_counter() - start
    return num_bytes / passed if num_bytes else None


def forget(file: Path) -> None:
    """Have the kernel drop a file from memory, where nobody has it mapped."""
    with suppress(OSError), file.open("rb") as opened:
        os.fdatasync(opened)  # unwritten data would stay in memory
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _files(folder: Path) -> Iterator[Path]:
    for root, _, names in os.walk(folder):
        for name in names:
            path = Path(root, name)
            with suppress(OSError):
                if path.is_file() and path.stat().st_size:
                    yield path
