"""Checkpoints are there whole or not at all, and damage is found before they are used."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from allranks import commits
from allranks.commits import MANIFEST, Commit, clean, commit, newest_whole, seal, writing_folder


def write(folder: Path, step: int, *, keep: int = 3, **notes: Any) -> Commit:
    """A checkpoint of two files, committed."""
    writing = writing_folder(folder, step)
    writing.mkdir(parents=True)
    (writing / "__0_0.distcp").write_bytes(bytes(range(256)) * 40)
    (writing / ".metadata").write_bytes(b"metadata")
    files = {path.name: seal(path) for path in sorted(writing.iterdir())}
    return commit(folder, step, {"v": 1, "step": step, "files": files, **notes}, keep=keep)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_committed_checkpoint_is_whole_and_says_what_was_noted(tmp_path: Path) -> None:
    made = write(tmp_path, 20, layout="1x2")
    assert made == Commit(tmp_path / "step-20", 20)
    assert made.damage() is None
    assert made.manifest()["layout"] == "1x2"
    assert names(tmp_path) == ["step-20"]
    assert sorted(json.loads((made.path / MANIFEST).read_text())["files"]) == [
        ".metadata",
        "__0_0.distcp",
    ]


def test_newest_first_by_number_not_by_name(tmp_path: Path) -> None:
    for step in (9, 10, 100):
        write(tmp_path, step)
    (tmp_path / "step-7.old").mkdir()
    (tmp_path / "notes.txt").touch()
    assert [found.step for found in commits.commits(tmp_path)] == [100, 10, 9]


def test_a_missing_folder_has_none(tmp_path: Path) -> None:
    assert commits.commits(tmp_path / "none") == []
    assert newest_whole(tmp_path / "none") == (None, [])
    clean(tmp_path / "none")


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for step in range(1, 6):
        write(tmp_path, step, keep=2)
    assert names(tmp_path) == ["step-4", "step-5"]


def test_a_step_that_is_trained_again_replaces_the_old_one(tmp_path: Path) -> None:
    write(tmp_path, 5, seed=1)
    (tmp_path / "step-5" / "stray").touch()
    again = write(tmp_path, 5, seed=2)
    assert again.manifest()["seed"] == 2
    assert not (again.path / "stray").exists()
    assert names(tmp_path) == ["step-5"]


# --- Damage -------------------------------------------------------------------------------------


def shorten(path: Path) -> None:
    with (path / "__0_0.distcp").open("rb+") as file:
        file.truncate(100)


def flip_one_bit(path: Path) -> None:
    content = bytearray((path / "__0_0.distcp").read_bytes())
    content[5000] ^= 1
    (path / "__0_0.distcp").write_bytes(content)


def lose_a_file(path: Path) -> None:
    (path / ".metadata").unlink()


def lose_the_manifest(path: Path) -> None:
    (path / MANIFEST).unlink()


def tear_the_manifest(path: Path) -> None:
    content = (path / MANIFEST).read_bytes()
    (path / MANIFEST).write_bytes(content[: len(content) // 2])


def empty_the_manifest(path: Path) -> None:
    (path / MANIFEST).write_text("{}")


def list_without_checksums(path: Path) -> None:
    (path / MANIFEST).write_text('{"files": {".metadata": {"bytes": 8}}}')


def list_of_another_kind(path: Path) -> None:
    (path / MANIFEST).write_text('{"files": {".metadata": 8}}')


DAMAGE = [
    (shorten, "__0_0.distcp has 100 bytes, 10240 were written"),
    (flip_one_bit, "__0_0.distcp has another checksum"),
    (lose_a_file, ".metadata: No such file"),
    (lose_the_manifest, "checkpoint.json: No such file"),
    (tear_the_manifest, "checkpoint.json is not JSON"),
    (empty_the_manifest, "checkpoint.json lists no files"),
    (list_without_checksums, "crc32"),
    (list_of_another_kind, ""),
]


@pytest.mark.parametrize(("damage", "words"), DAMAGE, ids=[d.__name__ for d, _ in DAMAGE])
def test_damage_is_found_and_the_previous_one_used(tmp_path: Path, damage: Any, words: str) -> None:
    write(tmp_path, 10)
    damage(write(tmp_path, 20).path)
    problem = Commit(tmp_path / "step-20", 20).damage()
    assert problem is not None
    assert words in problem
    found, told = newest_whole(tmp_path)
    assert found == Commit(tmp_path / "step-10", 10)
    assert told == [f"step-20 is damaged: {problem}"]


def test_all_damaged_means_none(tmp_path: Path) -> None:
    for step in (1, 2):
        flip_one_bit(write(tmp_path, step).path)
    found, told = newest_whole(tmp_path)
    assert found is None
    assert [line.partition(" ")[0] for line in told] == ["step-2", "step-1"]


def test_an_unreadable_manifest_is_a_value_error(tmp_path: Path) -> None:
    made = write(tmp_path, 1)
    lose_the_manifest(made.path)
    with pytest.raises(ValueError, match=r"checkpoint\.json: No such file"):
        made.manifest()


# --- What a killed writer leaves ----------------------------------------------------------------


def test_what_is_being_written_is_no_checkpoint(tmp_path: Path) -> None:
    write(tmp_path, 10)
    shutil.copytree(tmp_path / "step-10", writing_folder(tmp_path, 20))
    assert [found.step for found in commits.commits(tmp_path)] == [10]


def test_an_interrupted_deletion_leaves_no_torn_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, 10)

    def killed(path: Path, **options: bool) -> None:
        (path / ".metadata").unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, 20, keep=1)
    monkeypatch.undo()
    assert [found.step for found in commits.commits(tmp_path)] == [20]
    assert newest_whole(tmp_path) == (Commit(tmp_path / "step-20", 20), [])
    assert len(names(tmp_path)) == 2
    clean(tmp_path)
    assert names(tmp_path) == ["step-20"]


@pytest.mark.parametrize("moment", ["fsync", "rename"])
def test_a_writer_killed_before_the_rename_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    write(tmp_path, 10)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr({"fsync": os, "rename": Path}[moment], moment, killed)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, 20)
    monkeypatch.undo()
    assert newest_whole(tmp_path) == (Commit(tmp_path / "step-10", 10), [])
    clean(tmp_path)
    assert names(tmp_path) == ["step-10"]


def test_cleaning_leaves_committed_checkpoints_and_other_files(tmp_path: Path) -> None:
    write(tmp_path, 10)
    writing_folder(tmp_path, 20).mkdir()
    (writing_folder(tmp_path, 20) / "__0_0.distcp").touch()
    (tmp_path / "notes.txt").touch()
    clean(tmp_path)
    assert names(tmp_path) == ["notes.txt", "step-10"]


def test_a_manifest_that_lists_nothing_is_damage(tmp_path: Path) -> None:
    (tmp_path / "step-1").mkdir()
    (tmp_path / "step-1" / MANIFEST).write_text('{"files": {}}')
    assert Commit(tmp_path / "step-1", 1).damage() is not None


def test_a_save_after_going_back_keeps_itself(tmp_path: Path) -> None:
    """Damaged newer checkpoints must not push the good ones out."""
    write(tmp_path, 20, keep=3)
    write(tmp_path, 30, keep=3)
    next((tmp_path / "step-30").glob("*.distcp")).write_bytes(b"damaged")
    write(tmp_path, 25, keep=1)
    assert newest_whole(tmp_path) == (Commit(tmp_path / "step-25", 25), [])
