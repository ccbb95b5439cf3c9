"""Checkpoints are there whole or not at all, and damage is found before they are used."""

from __future__ import annotations

import json
import os
import shutil
import sys
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from allranks.errors import AllranksError
from allranks.run import claims, commits
from allranks.run.claims import Claim
from allranks.run.commits import (
    MANIFEST,
    Commit,
    clean,
    commit,
    newest_whole,
    seal,
    with_checksum,
    writing_folder,
)


def written(folder: Path, step: int, **notes: Any) -> dict[str, Any]:
    """Write a checkpoint of two files; its manifest, with which it can be committed."""
    writing = writing_folder(folder, step)
    writing.mkdir(parents=True)
    (writing / "__0_0.distcp").write_bytes(bytes(range(256)) * 40)
    (writing / ".metadata").write_bytes(b"metadata")
    files = {path.name: seal(path) for path in sorted(writing.iterdir())}
    return {"step": step, "position": 5, "files": files, **notes}


def write(folder: Path, step: int, *, keep: int = 3, **notes: Any) -> Commit:
    return commit(folder, step, written(folder, step, **notes), keep=keep)


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
    clean(tmp_path / "none", claim=0, chosen="step-1")


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


def test_checksums_of_files_of_many_blocks_are_those_of_zlib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commits, "BLOCK_BYTES", 1000)
    monkeypatch.setattr(commits, "CHUNK_BYTES", 300)
    contents = [os.urandom(size) for size in (0, 1, 999, 1000, 1001, 12_345)]
    paths = [tmp_path / str(number) for number in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    assert commits.checksums(paths) == [f"{zlib.crc32(content):08x}" for content in contents]


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


def edit(path: Path, *, forged: bool = False, **changes: Any) -> None:
    content = {**json.loads((path / MANIFEST).read_text()), **changes}
    (path / MANIFEST).write_text(json.dumps(with_checksum(content) if forged else content))


def edit_the_step(path: Path) -> None:
    edit(path, step=21)


def edit_the_position(path: Path) -> None:
    edit(path, position=6)


def edit_the_version(path: Path) -> None:
    edit(path, v=1)


def write_another_version(path: Path) -> None:
    edit(path, forged=True, v=3)


def lose_the_checksum(path: Path) -> None:
    content = json.loads((path / MANIFEST).read_text())
    del content["crc32"]
    (path / MANIFEST).write_text(json.dumps(content))


def nest_the_manifest(path: Path) -> None:
    (path / MANIFEST).write_text("[" * 100_000)


def list_nothing(path: Path) -> None:
    edit(path, forged=True, files={})


def list_without_checksums(path: Path) -> None:
    edit(path, forged=True, files={".metadata": {"bytes": 8}})


def list_of_another_kind(path: Path) -> None:
    edit(path, forged=True, files={".metadata": 8})


DAMAGE = [
    (shorten, "__0_0.distcp has 100 bytes, but 10240 were written"),
    (flip_one_bit, "__0_0.distcp does not have the checksum"),
    (lose_a_file, ".metadata: No such file"),
    (lose_the_manifest, "checkpoint.json: No such file"),
    (tear_the_manifest, "checkpoint.json is not JSON"),
    (empty_the_manifest, "checkpoint.json is of version None: this allranks knows versions 1 to 2"),
    (nest_the_manifest, "checkpoint.json is not JSON"),
    (edit_the_step, "checkpoint.json does not have the checksum"),
    (edit_the_position, "checkpoint.json does not have the checksum"),
    (edit_the_version, "checkpoint.json does not have the checksum"),
    (write_another_version, "checkpoint.json is of version 3"),
    (lose_the_checksum, "checkpoint.json does not have the checksum"),
    (list_nothing, "checkpoint.json lists no files"),
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
    clean(tmp_path, claim=None, chosen="step-10")  # as who goes on from there does
    is_kept = damage is write_another_version  # a newer allranks can read it
    assert newest_whole(tmp_path) == (found, told if is_kept else [])


def test_a_checkpoint_under_another_name_is_damaged(tmp_path: Path) -> None:
    write(tmp_path, 10)
    write(tmp_path, 20).path.rename(tmp_path / "step-30")
    told = ["step-30 is damaged: checkpoint.json is of step 20"]
    assert newest_whole(tmp_path) == (Commit(tmp_path / "step-10", 10), told)


def test_a_manifest_may_be_laid_out_anew(tmp_path: Path) -> None:
    path = write(tmp_path, 10, metrics=[{"name": "ä", "value": float("nan"), 3: 0.1}]).path
    content = json.loads((path / MANIFEST).read_text())
    turned = dict(reversed(content.items()))
    (path / MANIFEST).write_text(json.dumps(turned, ensure_ascii=False, separators=(",", ":")))
    assert newest_whole(tmp_path) == (Commit(path, 10), [])


def test_checkpoints_of_version_1_are_still_read(tmp_path: Path) -> None:
    """They had no checksum of their manifest, and no claim: any newer holder's come first."""
    path = write(tmp_path, 20).path
    content = json.loads((path / MANIFEST).read_text())
    del content["crc32"], content["claim"]
    (path / MANIFEST).write_text(json.dumps({**content, "v": 1}))
    assert newest_whole(tmp_path) == (Commit(path, 20), [])
    path.rename(tmp_path / "step-30")
    found, told = newest_whole(tmp_path)
    assert (found, told) == (None, ["step-30 is damaged: checkpoint.json is of step 20"])


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
    clean(tmp_path, claim=None)
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
    clean(tmp_path, claim=None)
    assert names(tmp_path) == ["step-10"]


def test_cleaning_leaves_committed_checkpoints_and_other_files(tmp_path: Path) -> None:
    write(tmp_path, 10)
    writing_folder(tmp_path, 20).mkdir()
    (writing_folder(tmp_path, 20) / "__0_0.distcp").touch()
    (tmp_path / "notes.txt").touch()
    clean(tmp_path, claim=0, chosen="step-10")
    assert names(tmp_path) == ["notes.txt", "step-10"]


def test_a_save_after_going_back_keeps_itself(tmp_path: Path) -> None:
    """Damaged newer checkpoints must not push the good ones out."""
    write(tmp_path, 20, keep=3)
    write(tmp_path, 30, keep=3)
    next((tmp_path / "step-30").glob("*.distcp")).write_bytes(b"damaged")
    clean(tmp_path, claim=None, chosen="step-20")
    write(tmp_path, 25, keep=1)
    assert names(tmp_path) == ["step-25"]


def test_what_an_older_holder_had_renamed_gets_its_name_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = tmp_path / "checkpoints"
    checkpoints.mkdir()
    monkeypatch.setenv(claims.VARIABLE, "1")
    assert claims.take(tmp_path / "claims", Claim(number=1))
    path = write(checkpoints, 20).path
    path.rename(checkpoints / ".step-20.0.0a1b2c3d.deleting")  # and was killed
    clean(checkpoints, claim=2)
    assert newest_whole(checkpoints) == (Commit(path, 20), [])
    path.rename(checkpoints / ".step-20.1.0a1b2c3d.deleting")  # its own to delete
    clean(checkpoints, claim=2)
    assert names(checkpoints) == []


# --- A holder that lost the run -----------------------------------------------------------------


def now_holds(number: int, checkpoints: Path) -> None:
    """The test's process is the holder of this claim from here on."""
    os.environ[claims.VARIABLE] = str(number)
    if number > max(
        (claim.number for claim in claims.all_of(checkpoints.parent / "claims")), default=-1
    ):
        assert claims.take(checkpoints.parent / "claims", Claim(number=number))


def at_line(number: int, suspended: Callable[[], object], meanwhile: Callable[[], object]) -> bool:
    """Call a function, and another one before its line `number`; False if it has fewer lines.

    Lines are counted in all that it calls in its module. (A check of the claim counts as one line:
    within it, all depends on whether the claims were read before or after.)
    """
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        if frame.f_code.co_filename != commits.__file__:
            return None
        if event == "line":
            count += 1
            if count == number:
                sys.settrace(None)
                meanwhile()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        with suppress(AllranksError, OSError):
            suspended()
    finally:
        sys.settrace(before)
    return count >= number


@dataclass(frozen=True)
class Case:
    """A commit of step 30, and what another attempt does while it is suspended."""

    commits: tuple[int, ...]  # steps, by the other attempt
    keep: int = 2
    rots: tuple[int, ...] = ()  # checkpoints that are damaged before it begins
    before: str = ""  # how a checkpoint of step 30 is there already, when it is to be committed

    def suspend(self, folder: Path, number: int) -> bool:
        """Whether the commit has so many lines; nothing that the other one saw may be lost."""
        now_holds(0, folder)
        for step in (10, 20, *([30] if self.before else [])):
            write(folder, step)
        if self.before == "damaged":
            flip_one_bit(folder / "step-30")
        manifest = written(folder, 30)
        seen: dict[str, bytes] = {}
        is_there = at_line(
            number,
            lambda: commit(folder, 30, manifest, keep=1),
            lambda: seen.update(self.succeed(folder)),
        )
        left = content(folder)
        assert {name: left.get(name) for name in seen} == seen, f"suspended at line {number}"
        if seen and self.commits:
            newest = Commit(folder / f"step-{self.commits[-1]}", self.commits[-1])
            assert newest_whole(folder)[0] == newest, f"suspended at line {number}"
        return is_there

    def succeed(self, folder: Path) -> dict[str, bytes]:
        """Go on with the run as a resume does; the files on which the run stands then."""
        for path in [folder / f"step-{step}" for step in self.rots]:
            if path.exists():
                flip_one_bit(path)
        now_holds(1, folder)
        chosen, _ = newest_whole(folder)
        if chosen is not None:
            clean(folder, claim=1, chosen=chosen.path.name)
            for step in self.commits:
                write(folder, step, keep=self.keep)
        now_holds(0, folder)
        if chosen is None:
            return {}  # only one was kept, and that one is damaged: nobody can go on
        return content(folder, "step-*" if self.commits else chosen.path.name)


def content(folder: Path, name: str = "step-*") -> dict[str, bytes]:
    files = [path for found in folder.glob(name) for path in found.iterdir()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


CASES = {
    "goes on and finishes": Case((40, 50)),
    "commits the same step": Case((25, 30), keep=3, before="damaged"),
    "commits lower steps": Case((22, 24), keep=5),
}
SELDOM = {
    "has committed nothing yet": Case(()),
    "finds the newest damaged": Case((30,), rots=(30,)),
    "finds all but the oldest damaged": Case((), rots=(20, 30)),
    "trains all again": Case((20, 30, 40), keep=5, rots=(20, 30)),
    "replaces a damaged one": Case((20, 30, 40), keep=5, rots=(20, 30), before="damaged"),
    "goes on beside a whole one": Case((40, 50, 60), before="whole"),
    "commits lower steps than a whole one": Case((24, 30), keep=5, rots=(30,), before="whole"),
}


@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(case, id=name) for name, case in CASES.items()),
        *(pytest.param(case, id=name, marks=pytest.mark.soak) for name, case in SELDOM.items()),
    ],
)
def test_who_lost_the_run_in_any_line_of_a_commit_takes_nothing_from_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: Case
) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # nobody pulls the plug here
    monkeypatch.setenv(claims.VARIABLE, "0")
    number = 1
    while case.suspend(tmp_path / str(number) / "checkpoints", number):
        number += 1
    assert number > 40


def test_who_lost_the_run_commits_and_cleans_nothing(tmp_path: Path, monkeypatch: Any) -> None:
    folder = tmp_path / "checkpoints"
    monkeypatch.setenv(claims.VARIABLE, "0")
    now_holds(0, folder)
    write(folder, 10)
    manifest = written(folder, 20)
    now_holds(1, folder)
    written(folder, 30)
    now_holds(0, folder)
    before = content(folder)
    with pytest.raises(AllranksError, match="has lost the run to process"):
        commit(folder, 20, manifest, keep=1)
    assert content(folder) == before
    clean(folder, claim=0, chosen="step-10")
    assert names(folder) == [".step-30.1.writing", "step-10"]  # only its own is gone
