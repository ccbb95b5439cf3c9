"""Data is copied to a node's own disk once, and again only when it has changed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.commandline import Allranks

from allranks.errors import AllranksError
from allranks.job.job import load_job
from allranks.launch.checks import check_supported
from allranks.machine.data_copies import local_copy, own_folder, stage_together
from allranks.run.folder import list_runs


@pytest.fixture(autouse=True)
def local_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "disk").mkdir()
    monkeypatch.setenv("SLURM_TMPDIR", str(tmp_path / "disk"))
    return tmp_path / "disk"


def test_a_copy_is_made_once_and_anew_when_the_data_changes(tmp_path: Path) -> None:
    data = tmp_path / "tokens.bin"
    data.write_text("one")
    first = local_copy(data, own_folder())
    assert first.read_text() == "one" and first.is_relative_to(tmp_path / "disk")
    inode = first.stat().st_ino
    assert local_copy(data, own_folder()).stat().st_ino == inode
    data.write_text("other")
    assert local_copy(data, own_folder()).read_text() == "other"


def test_a_folder_that_others_made_or_may_change_is_refused(local_disk: Path) -> None:
    """Its name is known to everybody, and /tmp is everybody's."""
    folder, elsewhere = local_disk / f"allranks-{os.getuid()}", local_disk / "elsewhere"
    for _ in range(2):  # to nowhere, and to a folder
        folder.symlink_to(elsewhere)
        with pytest.raises(AllranksError, match="is a link or a file"):
            own_folder()
        folder.unlink()
        elsewhere.mkdir(exist_ok=True)
    assert list(elsewhere.iterdir()) == []
    own_folder().chmod(0o777)
    with pytest.raises(AllranksError, match="everyone may write to"):
        own_folder()
    folder.chmod(0o700)
    assert own_folder() == folder


def test_several_paths_stand_together_under_their_own_names(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "a.png").write_text("a")
    (tmp_path / "labels.csv").write_text("b")
    paths = [tmp_path / "images", tmp_path / "labels.csv"]
    folder = stage_together(paths)
    assert (folder / "images" / "a.png").read_text() == "a"
    assert (folder / "labels.csv").read_text() == "b"
    assert stage_together(paths) == folder


def test_wrong_paths_are_told(tmp_path: Path) -> None:
    with pytest.raises(AllranksError, match=r"cannot read .*missing"):
        stage_together([tmp_path / "missing"])
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "data").write_text(name)
    with pytest.raises(AllranksError, match="two paths are called data"):
        stage_together([tmp_path / "one" / "data", tmp_path / "two" / "data"])


@pytest.mark.ranks
def test_a_script_reads_the_copy(tmp_path: Path, allranks: Allranks, local_disk: Path) -> None:
    (tmp_path / "data.txt").write_text("hello")
    (tmp_path / "train.py").write_text("import sys; print(open(sys.argv[1]).read(), sys.argv[1])")
    words = ["stage=[data.txt]", "--layout", "1x2", "--", "python", "train.py", "{stage}/data.txt"]
    done = allranks("run", *words)
    assert done.returncode == 0, done.stderr
    run = list_runs(tmp_path / "runs")[0]
    for rank in range(2):
        said = run.log(0, rank).read_text()
        assert said.startswith(f"hello {local_disk}/")


def test_a_placeholder_without_data_to_stage_is_refused() -> None:
    job = load_job(None, command=["python", "train.py", "{stage}/data.txt"])
    with pytest.raises(AllranksError, match="nothing is staged") as refused:
        check_supported(job)
    assert "stage: [PATH" in refused.value.fix
