"""The run folder: names, finding a run, its one writer, its state."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from allranks.errors import AllranksError
from allranks.run.events import append_event
from allranks.run.folder import RunDir, create_run, find_run, list_runs, write_atomically

HOLDER = """
import sys, time
from pathlib import Path
from allranks.run.folder import RunDir
with RunDir(Path(sys.argv[1])).held():
    print("held", flush=True)
    time.sleep(60)
"""


@contextmanager
def holder(run: RunDir) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the run."""
    command = [sys.executable, "-c", HOLDER, str(run.path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        try:
            yield process
        finally:
            process.kill()


def make_run(runs: Path, name: str, created: float = 0.0) -> RunDir:
    run = RunDir(runs / name)
    run.path.mkdir(parents=True)
    run.write_info({"run": name, "created": created})
    return run


# --- Names --------------------------------------------------------------------------------------


def test_a_new_run_is_named_after_job_date_time_and_four_hex_digits(tmp_path: Path) -> None:
    run = create_run(tmp_path / "deep" / "runs", "my-job")
    assert re.fullmatch(r"my-job-\d{8}-\d{6}-[0-9a-f]{4}", run.name)
    assert run.path.is_dir()
    assert run.path.is_absolute()
    assert run.job_name == "my-job"


def test_runs_of_one_second_have_different_names(tmp_path: Path) -> None:
    assert len({create_run(tmp_path, "job").name for _ in range(50)}) == 50


def test_a_relative_folder_becomes_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert create_run(Path("runs"), "job").path.parent == tmp_path / "runs"


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(AllranksError, match="cannot make the run folder") as refusal:
        create_run(tmp_path / "file", "job")
    assert "--runs" in refusal.value.fix


def test_paths_are_those_of_the_design(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert run.job_file == tmp_path / "job.yaml"
    assert run.checkpoints == tmp_path / "checkpoints"
    assert run.log(0, 3) == tmp_path / "attempts/0/rank-3.log"
    assert run.events(0, 3) == tmp_path / "attempts/0/rank-3.jsonl"


def test_attempts_and_ranks_are_sorted_as_numbers(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert run.attempts() == []
    for attempt, rank in ((0, 0), (9, 0), (10, 10), (10, 2)):
        append_event(run.events(attempt, rank), "start")
    (tmp_path / "attempts" / "notes").mkdir()
    assert run.attempts() == [0, 9, 10]
    assert run.ranks(10) == [2, 10]
    assert run.ranks(11) == []


# --- Finding ------------------------------------------------------------------------------------


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    folder = tmp_path / "runs"
    make_run(folder, "digits-20261101-120000-aaaa")
    make_run(folder, "digits-20261102-120000-bbbb")
    make_run(folder, "spiral-20261103-120000-cccc", created=1.0)
    make_run(folder, "spiral-20261103-120000-0000", created=2.0)
    (folder / "notes").mkdir()
    return folder


@pytest.mark.parametrize(
    ("reference", "job", "name"),
    [
        ("digits-20261101-120000-aaaa", None, "digits-20261101-120000-aaaa"),
        ("digits-20261102", None, "digits-20261102-120000-bbbb"),
        ("last", None, "spiral-20261103-120000-0000"),
        ("last", "digits", "digits-20261102-120000-bbbb"),
        ("last", "spiral", "spiral-20261103-120000-0000"),
    ],
)
def test_a_run_is_found(runs: Path, reference: str, job: str | None, name: str) -> None:
    assert find_run(runs, reference, job).path == runs / name


def test_a_run_is_found_by_its_path_from_anywhere(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "digits-20261101-120000-aaaa"
    assert find_run(tmp_path / "other", str(runs / name)).path == runs / name
    monkeypatch.chdir(runs)
    assert find_run(tmp_path / "other", f"./{name}/").path == runs / name


def test_a_copied_run_under_another_name_is_found_by_its_path(runs: Path, tmp_path: Path) -> None:
    copy = (runs / "digits-20261101-120000-aaaa").rename(tmp_path / "home")
    assert find_run(runs, str(copy)) == RunDir(copy)


@pytest.mark.parametrize(
    ("reference", "job", "words"),
    [
        (
            "digits",
            None,
            "matches 2 runs: digits-20261102-120000-bbbb, digits-20261101-120000-aaaa",
        ),
        ("motion", None, "no run 'motion'"),
        ("motion", None, "newest: spiral-20261103-120000-0000"),
        ("last", "motion", "no run of job motion"),
        ("notes", None, "no run 'notes'"),
    ],
)
def test_a_run_that_is_not_found_is_told(
    runs: Path, reference: str, job: str | None, words: str
) -> None:
    with pytest.raises(AllranksError, match=words) as refusal:
        find_run(runs, reference, job)
    assert refusal.value.exit_code == 2
    assert refusal.value.fix


def test_no_run_at_all(tmp_path: Path) -> None:
    assert list_runs(tmp_path / "none") == []
    with pytest.raises(AllranksError, match="no run in"):
        find_run(tmp_path / "none", "last")


# --- One writer ---------------------------------------------------------------------------------


def test_a_held_run_is_live_and_refused_to_others(tmp_path: Path) -> None:
    run = make_run(tmp_path, "job-20261101-120000-aaaa")
    assert not run.is_live()
    with holder(run) as process:
        assert run.is_live()
        assert run.state() == "running"
        with pytest.raises(AllranksError, match=f"is live: process {process.pid} on"), run.held():
            pytest.fail("two writers")


def test_a_killed_holder_lets_go(tmp_path: Path) -> None:
    run = make_run(tmp_path, "job-20261101-120000-aaaa")
    with holder(run) as process:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert not run.is_live()
        with run.held():
            assert run.is_live()
    assert not run.is_live()


def test_an_error_while_holding_lets_go(tmp_path: Path) -> None:
    run = make_run(tmp_path, "job-20261101-120000-aaaa")
    with pytest.raises(ZeroDivisionError), run.held():
        raise ZeroDivisionError
    assert not run.is_live()


def test_looking_does_not_keep_a_writer_out(tmp_path: Path) -> None:
    run = make_run(tmp_path, "job-20261101-120000-aaaa")
    done = threading.Event()

    def look() -> None:
        while not done.is_set():
            run.is_live()

    watchers = [threading.Thread(target=look) for _ in range(2)]
    with run.held():
        pass  # makes the lock file
    for watcher in watchers:
        watcher.start()
    try:
        for _ in range(20):
            with run.held():
                pass
    finally:
        done.set()
        for watcher in watchers:
            watcher.join()


def test_one_who_stops_while_he_looks_does_not_keep_a_writer_out(tmp_path: Path) -> None:
    run = make_run(tmp_path, "job-20261101-120000-aaaa")
    with run.held():
        pass
    looking = os.open(run.path / ".lock", os.O_RDONLY)
    fcntl.flock(looking, fcntl.LOCK_SH)
    timer = threading.Timer(1.0, os.close, (looking,))
    timer.start()
    with run.held():
        assert run.is_live()
    timer.join()


# --- State --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ends", "state"),
    [
        (["finished", "finished"], "finished"),
        (["stopped", "stopped"], "stopped"),
        (["finished", "failed"], "failed"),
        (["stopped", "failed"], "failed"),
        (["finished", None], "failed"),  # killed: it wrote no end
        ([None, None], "failed"),
        ([], "failed"),
    ],
)
def test_the_state_is_that_of_the_worst_rank(
    tmp_path: Path, ends: list[str | None], state: str
) -> None:
    run = RunDir(tmp_path)
    for rank, end in enumerate(ends):
        append_event(run.events(0, rank), "start", rank=rank)
        if end is not None:
            append_event(run.events(0, rank), "end", state=end)
    assert run.state() == state


def test_the_state_is_that_of_the_last_attempt(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    append_event(run.events(0, 0), "end", state="failed")
    append_event(run.events(1, 0), "end", state="finished")
    assert run.state() == "finished"


def test_a_torn_end_is_no_end(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    append_event(run.events(0, 0), "end", state="finished")
    content = run.events(0, 0).read_bytes()
    run.events(0, 0).write_bytes(content[:-10])
    assert run.state() == "failed"


# --- Files --------------------------------------------------------------------------------------


def test_info_survives_what_is_not_there_or_not_json(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert run.info() == {}
    run.write_info({"run": "x", "created": 1.5})
    assert run.info() == {"run": "x", "created": 1.5}
    (tmp_path / "run.json").write_text('{"run": ')
    assert run.info() == {}
    (tmp_path / "run.json").write_text("[]")
    assert run.info() == {}


def test_a_request_to_stop_is_for_the_jobs_that_it_names(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert run.asked_to_stop("7") is None
    run.ask_to_stop("stopped by its user", ["7", "8"])
    word = {"why": "stopped by its user", "jobs": ["7", "8"], "moves": False}
    assert run.asked_to_stop("7") == run.asked_to_stop("8") == word
    assert run.asked_to_stop("9") is None
    run.ask_to_stop("moves to 1x2", ["9"], moves=True)
    assert run.asked_to_stop("7") is None
    assert run.asked_to_stop("9") == {"why": "moves to 1x2", "jobs": ["9"], "moves": True}
    (tmp_path / "stop.json").write_text('{"why": ')
    assert run.asked_to_stop("9") is None


def test_a_write_that_fails_leaves_the_old_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "job.yaml"
    write_atomically(path, "old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(AllranksError, match=r"(?s)cannot write .*: No space.*fix: free space"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    monkeypatch.undo()
    write_atomically(path, "new")
    assert path.read_text() == "new"


def test_a_link_to_nowhere_is_no_place_for_runs(tmp_path: Path) -> None:
    (tmp_path / "runs").symlink_to("gone")
    with pytest.raises(AllranksError, match="is a link to gone, which does not exist") as refused:
        create_run(tmp_path / "runs", "mine")
    assert "--runs DIR" in refused.value.fix
    (tmp_path / "file").touch()
    with pytest.raises(AllranksError, match="cannot make the run folder"):
        create_run(tmp_path / "file", "mine")
    (tmp_path / "gone").mkdir()
    assert create_run(tmp_path / "runs", "mine").path.is_dir()


def test_a_disk_that_is_full_at_the_start_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = create_run(tmp_path, "mine")

    def full(*arguments: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(AllranksError, match=r"cannot write .*\.lock: No space left"), run.held():
        pass


def test_a_change_of_run_json_keeps_what_it_does_not_understand(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    odd = {"attempts": [{"attempt": "one"}], "later": {"x": 1}}
    (tmp_path / "run.json").write_text(json.dumps(odd))
    run.update_info(lambda info: info.update(queued=True))
    assert json.loads((tmp_path / "run.json").read_text()) == {**odd, "queued": True}
    (tmp_path / "run.json").write_text("{torn")
    with pytest.raises(AllranksError, match=r"run\.json cannot be read"):
        run.update_info(lambda info: info.update(queued=False))
    assert (tmp_path / "run.json").read_text() == "{torn"
