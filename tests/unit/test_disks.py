"""Which disk a path is on, and how fast it is read."""

from __future__ import annotations

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


def test_a_folder_is_read_up_to_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert disks.read_speed(tmp_path) is None and disks.read_speed(tmp_path / "missing") is None
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(bytes(3 << 20))
    assert (disks.read_speed(tmp_path) or 0) > 0
    monkeypatch.setattr(disks, "forget", Path.unlink)
    assert disks.read_speed(tmp_path) is None  # they were removed meanwhile
