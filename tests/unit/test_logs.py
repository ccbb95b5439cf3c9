"""What ranks print: whole lines, with their rank, once, until the run has ended."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from allranks.errors import AllranksError
from allranks.launch import backends
from allranks.launch.follow import show_logs
from allranks.run import logs as rank_logs
from allranks.run import run_state
from allranks.run.folder import RunDir
from allranks.run.logs import LogTail


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write(text.encode(errors="surrogateescape"))


def shown(run: RunDir, rank: int | None = None) -> list[str]:
    lines: list[str] = []
    assert show_logs(run, rank, follow=False, write=lines.append, say=pytest.fail) == (0, [])
    return lines


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second is a hundredth of one."""
    monotonic, sleep = time.monotonic, time.sleep
    monkeypatch.setattr(time, "monotonic", lambda: 100 * monotonic())
    monkeypatch.setattr(time, "sleep", lambda seconds: sleep(seconds / 100))


# --- One file -----------------------------------------------------------------------------------


def test_a_tail_gives_each_line_once_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "log"
    tail = LogTail(path)
    assert list(tail.lines()) == []  # there is no file yet
    write(path, "one\ntw")
    assert list(tail.lines()) == ["one"]
    assert list(tail.lines()) == []
    write(path, "o\n\nthree")
    assert list(tail.lines()) == ["two", ""]
    assert list(tail.last()) == ["three"]
    assert list(tail.last()) == []


def test_a_letter_that_is_cut_in_two_by_a_look_is_one_letter(tmp_path: Path) -> None:
    path = tmp_path / "log"
    tail = LogTail(path)
    path.write_bytes(b"caf\xc3")
    assert list(tail.lines()) == []
    with path.open("ab") as file:
        file.write(b"\xa9\n\xff\n")
    assert list(tail.lines()) == ["caf\xe9", "\ufffd"]


def test_a_large_file_is_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_logs, "CHUNK_BYTES", 7)
    lines = [f"line {number}" for number in range(50)]
    (tmp_path / "log").write_text("\n".join(lines))
    tail = LogTail(tmp_path / "log")
    assert [*tail.lines(), *tail.last()] == lines


# --- A run --------------------------------------------------------------------------------------


def test_all_ranks_of_the_newest_attempt_with_their_rank(run: RunDir) -> None:
    write(run.log(0, 0), "old\n")
    for rank in (10, 2, 0):
        write(run.log(1, rank), f"I am {rank}\n")
    assert shown(run) == ["[0] I am 0", "[2] I am 2", "[10] I am 10"]


def test_the_log_of_the_newest_job_comes_first(run: RunDir) -> None:
    for job, age in ((99, 5), (100, 50)):  # by their time: a requeued job has an older number
        write(run.path / f"slurm-{job}.log", f"job {job}\n")
        os.utime(run.path / f"slurm-{job}.log", (0, 1000 - age))
    write(run.log(0, 0), "step 1\nand a half")
    assert shown(run) == ["[job] job 99", "[0] step 1", "[0] and a half"]


def test_a_rank_alone_has_no_prefix(run: RunDir) -> None:
    write(run.path / "slurm-100.log", "job\n")
    for rank in (0, 1, 11):
        write(run.log(0, rank), f"I am {rank}\n")
    assert shown(run, 1) == ["I am 1"]


def test_rank_minus_one_is_the_jobs_own_log(run: RunDir) -> None:
    for job in (99, 100):
        write(run.path / f"slurm-{job}.log", f"job {job}\n")
        os.utime(run.path / f"slurm-{job}.log", (0, job))
    write(run.log(0, 0), "step 1\n")
    assert shown(run, -1) == ["job 99", "job 100"]


@pytest.mark.parametrize(
    ("rank", "words"), [(None, "has printed nothing yet"), (3, "has no log of rank 3")]
)
def test_nothing_to_show_is_told(run: RunDir, rank: int | None, words: str) -> None:
    write(run.log(0, 0), "" if rank is None else "step 1\n")
    with pytest.raises(AllranksError, match=words) as error:
        shown(run, rank)
    assert error.value.exit_code == 1
    assert "allranks ls" in error.value.fix


def test_a_rank_that_the_run_cannot_have_is_refused(run: RunDir) -> None:
    run.write_info({"layout": "1x2@a100"})
    with pytest.raises(AllranksError, match="layout 1x2 has 2") as error:
        shown(run, 5)
    assert error.value.fix == "write --rank N with N from 0 to 1, or -1 for the job itself"


# --- Following ----------------------------------------------------------------------------------


@pytest.fixture
def follow(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """The lines of the run until `has_ended` says so."""

    def follow(has_ended: Callable[[], bool], rank: int | None = None) -> list[str]:
        def describe(run: RunDir, queue: object) -> dict[str, str]:
            return {"state": "finished" if has_ended() else "running", "reason": ""}

        lines: list[str] = []
        monkeypatch.setattr(backends, "look", lambda runs: None)
        monkeypatch.setattr(run_state, "describe", describe)
        assert show_logs(run, rank, follow=True, write=lines.append, say=pytest.fail) == (0, [])
        return lines

    return follow


@pytest.mark.usefixtures("quick")
def test_following_shows_everything_until_the_end(
    run: RunDir, follow: Callable[..., list[str]]
) -> None:
    looks = 0

    def has_ended() -> bool:
        nonlocal looks
        looks += 1
        write(run.log(looks // 2, 0), f"look {looks}\n")  # the second attempt begins in between
        return looks == 3

    assert follow(has_ended) == ["[0] look 1", "[0] look 2", "[0] look 3"]


@pytest.mark.usefixtures("quick")
def test_what_is_written_while_it_ends_is_shown_and_the_rest_without_a_newline(
    run: RunDir, follow: Callable[..., list[str]]
) -> None:
    def has_ended() -> bool:
        write(run.log(0, 0), "last words\nkilled in mid-")
        return True

    assert follow(has_ended, rank=0) == ["last words", "killed in mid-"]


@pytest.mark.usefixtures("quick")
def test_following_a_run_that_printed_nothing_is_no_error(follow: Callable[..., list[str]]) -> None:
    assert follow(lambda: True) == []


def test_slurm_is_asked_less_and_less_often(
    follow: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    asked: list[float] = []

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    def has_ended() -> bool:
        asked.append(now)
        return now > 600

    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(time, "sleep", sleep)
    follow(has_ended)
    pauses = [after - before for before, after in pairwise(asked)]
    assert pauses[0] < 2
    assert 30 <= pauses[-1] < 31
    assert len(asked) < 32


@pytest.mark.timeout(60)
def test_a_line_of_100_megabytes_is_read_once(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.log"
    path.write_bytes(b"x" * 100_000_000 + b"\nlast")
    tail = LogTail(path)
    assert [len(line) for line in tail.lines()] == [100_000_000]
    assert list(tail.last()) == ["last"]
