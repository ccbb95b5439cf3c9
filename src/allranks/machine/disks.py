"""Which disk files are on, how large and fast it is, and how to drop its files from memory.

Data that are read a second time come from memory, the page cache. What the first epoch costs shows
only after the kernel has dropped the files.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
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
PROBES = 64  # places in the files that are checked for being in memory


@dataclass(frozen=True, slots=True)
class Disk:
    """A mounted file system."""

    mount: str
    kind: str  # as the kernel calls it: ext4, nfs4, lustre
    source: str = ""

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
            kind, source, *_ = [*right.split(), ""]
            found = Disk(mount, kind, _plain(source))
    return found


def _plain(word: str) -> str:
    r"""The kernel writes a space in a path as \040."""
    for code, character in (("040", " "), ("011", "\t"), ("012", "\n"), ("134", "\\")):
        word = word.replace(f"\\{code}", character)
    return word


def forget(files: Iterable[Path]) -> None:
    """Have the kernel drop these files from memory, where nobody has them mapped."""
    for file in files:
        with suppress(OSError):
            descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fdatasync(descriptor)  # unwritten data would stay in memory
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def cached_share(files: Sequence[Path]) -> float | None:
    """The share of these files that is in memory, by samples; None if the kernel does not say.

    Looking may load some of it: call `forget` again afterwards.
    """
    choose = random.Random(0)
    sizes = [(file, size) for file in files if (size := _size(file)) > 0]
    if not sizes:
        return None
    chosen = choose.choices(sizes, weights=[size for _, size in sizes], k=PROBES)
    # From the end of a file: the kernel reads ahead.
    places = sorted(((file, choose.randrange(size)) for file, size in chosen), reverse=True)
    answers = [_is_cached(file, place) for file, place in places]
    known = [answer for answer in answers if answer is not None]
    return sum(known) / len(known) if known else None


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0


def _is_cached(file: Path, place: int) -> bool | None:
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        os.preadv(descriptor, [bytearray(1)], place, os.RWF_NOWAIT)
        return True
    except BlockingIOError:
        return False
    except OSError:  # this file system cannot say
        return None
    finally:
        os.close(descriptor)


@dataclass(frozen=True, slots=True)
class ReadSpeed:
    """One pass over files, or over their beginning, block by block."""

    num_bytes: int
    seconds: float

    @property
    def bytes_per_second(self) -> float:
        return self.num_bytes / self.seconds if self.seconds > 0 else 0.0


def read_speed(files: Sequence[Path], *, max_bytes: int, max_seconds: float) -> ReadSpeed:
    """Read from the disk itself, up to either limit; files in memory are dropped first."""
    forget(files)
    block = bytearray(BLOCK_BYTES)
    num_bytes, started = 0, time.perf_counter()
    for file in files:
        with suppress(OSError), file.open("rb", buffering=0) as opened:
            while count := opened.readinto(block):
                num_bytes += count
                if num_bytes >= max_bytes or time.perf_counter() - started >= max_seconds:
                    return ReadSpeed(num_bytes, time.perf_counter() - started)
    return ReadSpeed(num_bytes, time.perf_counter() - started)


def copy_beginning(files: Sequence[Path], target: Path, *, max_bytes: int) -> int:
    """Copy the first bytes of files into one file, all the way to the disk; return their number.

    Raises OSError if there is no room.
    """
    left = max_bytes
    with target.open("wb") as copy:
        for file in files:
            with file.open("rb", buffering=0) as opened:
                while left > 0 and (block := opened.read(min(left, BLOCK_BYTES))):
                    copy.write(block)
                    left -= len(block)
        copy.flush()
        os.fsync(copy.fileno())
    return max_bytes - left


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
        return replace(facts, read_speed=folder_read_speed(there))
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


def folder_read_speed(folder: Path) -> float | None:
    """Bytes per second from the disk, for the first files found; None if there are none."""
    files = list(itertools.islice(_files(folder), TRIAL_FILES))
    found = read_speed(files, max_bytes=TRIAL_READ_BYTES, max_seconds=TRIAL_READ_SECONDS)
    return found.bytes_per_second if found.num_bytes else None


def _files(folder: Path) -> Iterator[Path]:
    for root, _, names in os.walk(folder):
        for name in names:
            path = Path(root, name)
            with suppress(OSError):
                if path.is_file() and path.stat().st_size:
                    yield path
