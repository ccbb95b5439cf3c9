"""Which disk a path is on, and what of its files is in memory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from allranks.machine import disks
from allranks.machine.disks import Disk, disk_of

MOUNTS = """\
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
30 22 0:25 / /scratch rw - lustre 10.0.0.1@o2ib:/fs rw
31 22 0:26 / /scratch/local rw - xfs /dev/nvme0n1 rw
32 22 0:27 / /my\\040data rw - fuse.sshfs me@far:/d rw
33 22 0:28 / /dev/shm rw - tmpfs tmpfs rw
34 22 0:29 / /squash rw - fuse.squashfuse image rw
no mount at all
"""


@pytest.mark.parametrize(
    ("path", "kind", "is_network", "is_memory"),
    [
        ("/home/me/tokens.bin", "ext4", False, False),
        ("/scratch/me", "lustre", True, False),
        ("/scratch/local/me", "xfs", False, False),
        ("/scratchy", "ext4", False, False),
        ("/my data/a", "fuse.sshfs", True, False),
        ("/dev/shm/a", "tmpfs", False, True),
        ("/squash/a", "fuse.squashfuse", False, False),
    ],
)
def test_the_longest_mount_counts(path: str, kind: str, is_network: bool, is_memory: bool) -> None:
    disk = disk_of(Path(path), MOUNTS)
    assert (disk.kind, disk.is_network, disk.is_memory) == (kind, is_network, is_memory)


def test_without_a_list_of_mounts_the_disk_is_unknown() -> None:
    assert disk_of(Path("/a"), "") == Disk("/", "unknown")


def test_a_forgotten_file_is_read_from_the_disk(tmp_path: Path) -> None:
    file = tmp_path / "data"
    file.write_bytes(os.urandom(8 << 20))
    before = disks.cached_share([file])
    if before is None or disk_of(file).is_memory:
        pytest.skip("this file system does not say what is in memory")
    assert before > 0.9
    disks.forget([file])
    share = disks.cached_share([file])
    assert share is not None and share < 0.2  # looking brings some of it back


def test_a_read_stops_at_its_limit(tmp_path: Path) -> None:
    files = [tmp_path / "a", tmp_path / "b"]
    for file in files:
        file.write_bytes(bytes(3 << 20))
    missing = tmp_path / "missing"
    whole = disks.read_speed([missing, *files], max_bytes=1 << 30, max_seconds=10)
    assert whole.num_bytes == 6 << 20
    assert whole.bytes_per_second > 0
    assert disks.read_speed(files, max_bytes=1 << 20, max_seconds=10).num_bytes == 1 << 20
    copy = tmp_path / "copy"
    assert disks.copy_beginning(files, copy, max_bytes=4 << 20) == copy.stat().st_size == 4 << 20


def test_nothing_is_said_of_files_that_are_not_there(tmp_path: Path) -> None:
    disks.forget([tmp_path / "missing"])
    assert disks.cached_share([tmp_path / "missing"]) is None
