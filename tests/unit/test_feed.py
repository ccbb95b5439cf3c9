"""What a rank does to measure its data, in one process."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from allranks.machine.disks import disk_of
from allranks.train import feed_files
from allranks.train.data import Batch
from allranks.train.feed_bench import feed_pace, sizes_of, worker_counts
from allranks.train.feed_files import (
    compare_disks,
    data_files,
    held_files,
    named_paths,
    opened_files,
    why_not_cold,
)


@pytest.mark.parametrize(
    ("cpus", "counts"),
    [(1, [0, 1]), (2, [0, 1, 2]), (6, [0, 1, 2, 4, 6]), (16, [0, 1, 2, 4, 8, 16])],
)
def test_workers_up_to_the_cpus(cpus: int, counts: list[int]) -> None:
    assert worker_counts(cpus) == counts


def batches(sizes: list[int], *, ends_epoch: bool = False) -> Iterator[Batch]:
    for number, size in enumerate(sizes):
        last = ends_epoch and number == len(sizes) - 1
        yield Batch(1, size, size, last, iter([]), 1)


def test_a_cold_pass_ends_with_its_epoch() -> None:
    assert list(sizes_of(batches([4, 4, 2], ends_epoch=True), one_epoch=True)) == [4, 4, 2]
    assert feed_pace(batches([4, 4], ends_epoch=True), 1, lambda: None, is_cold=True) > 0
    assert feed_pace(batches([4], ends_epoch=True), 1, lambda: None, is_cold=True) > 0


def test_files_that_are_opened_for_samples_bring_their_like(tmp_path: Path) -> None:
    for name in ("a.img", "b.img", "notes.txt"):
        (tmp_path / name).write_text("x")
    with opened_files() as opened:
        (tmp_path / "a.img").read_text()
        (tmp_path / "written.img").write_text("x")
    (tmp_path / "notes.txt").read_text()
    assert opened == {str(tmp_path / "a.img")}
    files, is_all = data_files([], opened, {})
    assert {file.name for file in files} == {"a.img", "b.img", "written.img"}
    assert is_all


def test_files_that_stay_open_or_mapped_are_found(tmp_path: Path) -> None:
    for name in ("mapped.bin", "open.bin"):
        (tmp_path / name).write_bytes(bytes(4096))
    before = held_files()
    with (tmp_path / "open.bin").open("rb"), (tmp_path / "mapped.bin").open("rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        found = held_files() - before
        mapping.close()
    files, _ = data_files(found, [], {})
    assert {file.name for file in files} == {"mapped.bin", "open.bin"}


def test_paths_among_the_options_are_data(tmp_path: Path) -> None:
    (tmp_path / "train" / "cats").mkdir(parents=True)
    (tmp_path / "train" / "cats" / "1.img").write_text("x")
    (tmp_path / "train" / "code.py").write_text("x")
    options = {"folder": str(tmp_path / "train"), "size": "tiny", "layers": 3, "none": None}
    assert named_paths(options) == [tmp_path / "train"]
    files, _ = data_files([], [], options)
    assert [file.name for file in files] == ["1.img"]


def test_data_in_memory_are_never_cold() -> None:
    shared = Path("/dev/shm")
    if not os.access(shared, os.W_OK):
        pytest.skip("there is no /dev/shm")
    file = shared / f"allranks-test-{os.getpid()}"
    file.write_bytes(bytes(4096))
    try:
        assert "in memory (tmpfs" in str(why_not_cold([file]))
    finally:
        file.unlink()


def test_copies_on_another_disk_are_read_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = Path("/dev/shm")
    if not os.access(shared, os.W_OK) or disk_of(tmp_path).is_memory:
        pytest.skip("there is only one disk")
    file = tmp_path / "data.bin"
    file.write_bytes(bytes(1 << 20))
    monkeypatch.setattr(feed_files, "own_folder", lambda: tmp_path)
    data, same = compare_disks([file])
    assert (data["role"], data["bytes"], same["role"]) == ("data", 1 << 20, "staging")
    assert data["bytes_per_second"] > 0 and same["bytes_per_second"] is None
    monkeypatch.setattr(feed_files, "own_folder", lambda: shared)
    before = set(shared.iterdir())
    _, other = compare_disks([file])
    assert (other["kind"], other["bytes"]) == ("tmpfs", 1 << 20)
    assert other["bytes_per_second"] > 0
    assert set(shared.iterdir()) <= before
    monkeypatch.setattr(feed_files, "own_folder", lambda: shared / "missing")
    assert compare_disks([file])[1]["problem"] == "No such file or directory"


def test_files_that_take_long_to_forget_are_left_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed_files, "FORGET_SECONDS", -1.0)
    file = tmp_path / "data.bin"
    file.write_bytes(bytes(4096))
    if not disk_of(file).is_memory:
        assert "forget 1 files takes" in str(why_not_cold([file]))
