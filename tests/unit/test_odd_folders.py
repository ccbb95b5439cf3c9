"""One odd run folder never takes a command from the others, and is flagged.

`make test` tries 100 folders, `make soak` thousands.
"""

from __future__ import annotations

import io
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tests.odd_folders import (
    CONTROL,
    HOSTILE,
    ODD_FOLDERS,
    Change,
    apply,
    change_field,
    failed_run,
    good_run,
    make_odd,
    write,
)
from typer.main import get_command

from allranks.cli.main import app
from allranks.doctor.diagnose import diagnose_logs, log_files
from allranks.errors import AllranksError
from allranks.run.folder import RunDir, list_runs
from allranks.run.run_state import unreadable
from allranks.slurm.commands import SlurmError
from allranks.watch import logs
from allranks.watch.hub import Hub
from allranks.watch.live import Watcher
from allranks.watch.page_data import METRICS, Wish

GOOD = ("digits-20261115-120000-0000", "digits-20261115-120001-0001")
UNFORESEEN = unreadable(ValueError()).partition("(")[0]
AT_ONCE = 10  # odd folders beside the good ones
COMMAND = get_command(app)


@pytest.fixture(autouse=True)
def _cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without what takes longest and reads no run: the cluster, pictures, other programs."""
    monkeypatch.setattr("allranks.watch.status.resources", lambda: {})
    monkeypatch.setattr("allranks.report.files.find_spec", lambda _: None)
    monkeypatch.setattr("allranks.slurm.commands.call", no_slurm)
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setattr("allranks.watch.hub.BUDGET_SECONDS", math.inf)  # all at the first look


def no_slurm(*words: str, **options: object) -> str:
    raise SlurmError(words[0], "Socket timed out")


def invoke(*words: str) -> str:
    """What a command prints; it may refuse something, and raises nothing else."""
    out = io.StringIO()
    with redirect_stdout(out), redirect_stderr(out):
        try:
            COMMAND.main(list(words), "allranks", standalone_mode=False)
        except AllranksError as error:
            return error.shown
    return out.getvalue()


@contextmanager
def folder_of_runs(odd: Sequence[Sequence[Change]]) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        runs = Path(name) / "runs"
        good_run(runs, 0)
        good_run(runs, 1)
        for number, changes in enumerate(odd, 2):
            apply(failed_run(runs, number).run, changes)
        yield runs


def look_with_all(runs: Path) -> None:
    """Every command, as a user with other runs in the folder would type it."""
    at = ("--runs", str(runs))
    listed = {one["run"]: one for one in json.loads(invoke("ls", "--json", *at))}
    assert all(listed[name]["problem"] is None for name in GOOD)
    commands = [("ls",), ("watch", "--once", "--all"), ("status", "--all")]
    commands += [("report", "digits", "--out", str(runs.parent / "out")), ("stop", "--all")]
    for words in commands:
        text = invoke(*words, *at)
        assert UNFORESEEN not in text, text
        assert not any(letter in text for letter in CONTROL), text
        if words[0] != "stop":  # none of them runs
            assert all(name in text for name in GOOD), (words, text)
    look_with_page(runs)
    for run in list_runs(runs):
        for command in ("doctor", "logs", "stop"):
            text = invoke(command, run.name, *at)
            assert UNFORESEEN not in text, text


def look_with_page(runs: Path) -> None:
    watcher = Watcher(runs, old=True)
    hub = Hub(watcher)
    try:
        for run in list_runs(runs):
            wish = Wish(run.name, METRICS[0], ())
            hub._wishes = {object(): wish}
            hub._look()
            seen = hub._pictures[wish]
            assert seen["problem"] is None
            assert set(GOOD) <= set(seen["order"])
            for path in logs.log_files(run).values():
                logs.read_lines(path)
    finally:
        watcher.close()


@pytest.mark.timeout(1200)  # half a minute alone; with old libraries beside other tests, ten
@settings(
    max_examples=50 // AT_ONCE,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],  # a smaller example takes many folders to find
    suppress_health_check=list(HealthCheck),
)
@given(st.lists(ODD_FOLDERS, min_size=AT_ONCE, max_size=AT_ONCE))
def test_every_command_answers_for_the_other_runs(odd: list[list[Change]]) -> None:
    with folder_of_runs(odd) as runs:
        look_with_all(runs)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@settings(max_examples=2000 // AT_ONCE, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(ODD_FOLDERS, min_size=AT_ONCE, max_size=AT_ONCE))
def test_every_command_answers_for_the_other_runs_again_and_again(odd: list[list[Change]]) -> None:
    with folder_of_runs(odd) as runs:
        look_with_all(runs)


def text_of(name: str, text: bytes) -> Change:
    return lambda folder: write(folder / name, text)


def entry_of(name: str, kind: str) -> Change:
    return lambda folder: make_odd(folder / name, kind)


EVENTS = "attempts/0/rank-0.jsonl"
FLAGGED: dict[str, Change] = {
    "created is null": change_field("run.json", 0, "created", None, drop=False),
    "an end without a state": change_field(EVENTS, -1, "state", None, drop=True),
    "seconds is null": change_field(EVENTS, -7, "seconds", None, drop=False),
    "t is null": change_field(EVENTS, -7, "t", None, drop=False),
    "NaN": change_field(EVENTS, -7, "seconds", "@nan@", drop=False),
    "jobs is a text": change_field("run.json", 0, "jobs", "12", drop=False),
    "nested events": text_of(EVENTS, b"[" * 100_000 + b"\n"),
    "a nested run.json": text_of("run.json", b'{"a":' * 100_000),
    "a half-written claim": text_of("claims/0", b'{"number": 0, "jo'),
    "a claim of another form": change_field("claims/0", 0, "nodes", None, drop=False),
    "an empty run.json": text_of("run.json", b""),
    "no run.json": lambda folder: (folder / "run.json").unlink(),
    "a FIFO for run.json": entry_of("run.json", "fifo"),
    "an endless run.json": entry_of("run.json", "/dev/zero"),
    "a link for a log": entry_of("attempts/0/rank-0.log", "/etc/passwd"),
    "a FIFO for events": entry_of(EVENTS, "fifo"),
    "a FIFO for the lock": entry_of(".lock", "fifo"),
    "events with holes": entry_of(EVENTS, "holes"),
    "a link for the attempts": entry_of("attempts", "/etc"),
    "a FIFO for the job": entry_of("job.yaml", "fifo"),
    "nul bytes for events": text_of(EVENTS, bytes(5000) + b"\n"),
}


def test_what_is_wrong_is_said_of_that_run_alone(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    good_run(runs, 0)
    good_run(runs, 1)
    odd = {good_run(runs, number).run: name for number, name in enumerate(FLAGGED, 2)}
    for run, name in odd.items():
        FLAGGED[name](run.path)
    look_with_all(runs)
    listed = {one["run"]: one for one in json.loads(invoke("ls", "--json", "--runs", str(runs)))}
    unflagged = [name for run, name in odd.items() if not listed[run.name]["problem"]]
    assert not unflagged
    page = invoke("watch", "--once", "--all", "--json", "--runs", str(runs))
    reasons = {one["run"]: one["reason"] or "" for one in json.loads(page)}
    assert all("something is wrong with its folder" in reasons[run.name] for run in odd)
    shown = invoke("ls", "--runs", str(runs))
    null = next(run.name for run, name in odd.items() if name == "created is null")
    (line,) = [line for line in shown.splitlines() if line.startswith(null)]
    assert line.endswith("something is wrong with its folder: run.json: created is null")
    told = json.loads(invoke("doctor", null, "--json", "--runs", str(runs)))
    assert "odd-run-folder" in [one["cause"] for one in told]


def test_names_and_texts_of_a_stranger_are_shown_and_not_obeyed(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    good_run(runs, 0)
    good_run(runs, 1)
    odd = failed_run(runs, 2).run
    for key in ("layout", "backend"):
        change_field("run.json", 0, key, HOSTILE, drop=False)(odd.path)
    ended = {"state": "failed", "reason": HOSTILE}
    change_field("run.json", 0, "ended", ended, drop=False)(odd.path)
    for key in ("host", "layout", "device"):
        change_field(EVENTS, 0, key, HOSTILE, drop=False)(odd.path)
    change_field("attempts/0/rank-1.jsonl", -2, "message", HOSTILE, drop=False)(odd.path)
    (odd.path / "job.yaml").write_text(f"name: {json.dumps(HOSTILE)}\n")
    name = HOSTILE.replace("/", "_") + "-20261115-130000-abcd"
    shutil.copytree(odd.path, runs / name)
    shutil.copytree(odd.path, runs / os.fsdecode(b"\xff\x9b31m-20261115-130001-abcd"))
    look_with_all(runs)
    page = invoke("status", "--runs", str(runs))
    assert "<script" not in page
    assert "&lt;script" in page
    shown = next(run for run in list_runs(runs) if run.path.name == name)
    assert shown.name in invoke("ls", shown.name, "--runs", str(runs))


def test_runs_may_be_a_link_and_so_may_a_run(tmp_path: Path) -> None:
    good_run(tmp_path / "disk", 0)
    moved = good_run(tmp_path / "disk", 1).run.path.rename(tmp_path / "moved")
    (tmp_path / "disk" / GOOD[1]).symlink_to(moved)
    (tmp_path / "runs").symlink_to(tmp_path / "disk")
    listed = json.loads(invoke("ls", "--json", "--runs", str(tmp_path / "runs")))
    assert [(one["run"], one["state"], one["problem"]) for one in listed] == [
        (GOOD[1], "finished", None),
        (GOOD[0], "finished", None),
    ]


def test_an_event_names_no_file_that_is_then_read(tmp_path: Path) -> None:
    run = failed_run(tmp_path / "runs", 2).run
    secret = tmp_path / "secret.txt"
    secret.write_text("the secret\n")
    for file in (str(secret), "/dev/zero", "/dev/stdin"):
        frames: list[Any] = [[file, 1, "f", ""]]
        change_field("attempts/0/rank-1.jsonl", -2, "frames", frames, drop=False)(run.path)
        for command in ("doctor", "logs", "ls"):
            assert "the secret" not in invoke(command, run.name, "--runs", str(run.path.parent))


def test_a_folder_that_is_read_is_never_written_through(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "runs" / GOOD[0])
    good_run(tmp_path / "runs", 0)
    target = tmp_path / "mine"
    target.write_text("mine")
    (run.path / ".run.json.lock").symlink_to(target)
    with pytest.raises(OSError, match="symbolic links"):
        run.update_info(lambda info: None)
    (run.path / ".lock").symlink_to(target)
    with pytest.raises(AllranksError), run.held():
        pass
    (run.path / f".stop.json.{os.getpid()}").symlink_to(target)
    run.ask_to_stop("why", [])
    assert target.read_text() == "mine"


def test_the_doctor_ends_on_endless_input_and_reads_a_pipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("allranks.doctor.log_search.MAX_PIPE_BYTES", 1 << 22)
    with pytest.raises(AllranksError, match="/dev/zero cannot be read: it does not end within"):
        diagnose_logs(log_files(Path("/dev/zero")))
    os.mkfifo(tmp_path / "fifo")
    assert diagnose_logs([tmp_path / "fifo"]) == []  # nobody writes to it
    out, into = os.pipe()
    os.write(into, b"RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB\n")
    os.close(into)
    found = diagnose_logs([Path(f"/dev/fd/{out}")])
    os.close(out)
    assert [one.cause for one in found] == ["cuda-out-of-memory"]
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "a.log").write_text("hello\n")
    (tmp_path / "logs" / "b.log").symlink_to("a.log")
    (tmp_path / "logs" / "c.log").symlink_to("/etc/passwd")
    os.mkfifo(tmp_path / "logs" / "d.log")
    assert [file.name for file in log_files(tmp_path / "logs")] == ["a.log", "b.log"]
