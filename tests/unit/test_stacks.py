"""Stacks of ranks: found by their environment, read from py-spy and from faulthandler."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

import allranks
from allranks.run import stacks
from allranks.run.folder import RunDir
from allranks.run.stacks import Stack, parse_dump, parse_py_spy, processes_of, takes_signal
from allranks.run.tracebacks import OURS, Frame

TORCH = "/env/lib/python3.11/site-packages/torch"

DUMP = f"""step 3 done
Thread 0x00007fa71f7fe6c0 (most recent call first):
  File "/env/lib/python3.11/threading.py", line 331 in wait
  File "/env/lib/python3.11/threading.py", line 1002 in _bootstrap

Current thread 0x00007fa74c81ab80 (most recent call first):
  File "{TORCH}/distributed/distributed_c10d.py", line 3000 in all_reduce
  File "{TORCH}/distributed/c10d_logger.py", line 83 in wrapper
  File "/home/me/train.py", line 12 in step
  File "/home/me/train.py", line 40 in <module>
"""


def stack(*frames: tuple[str, int, str]) -> Stack:
    return Stack(1, tuple(Frame(*frame) for frame in frames), "test")


# Which thread gets a signal is the kernel's choice.
IN_ANOTHER = DUMP.replace("Current thread", "Thread").replace("Thread", "Current thread", 1)


@pytest.mark.parametrize(
    "text", [DUMP, DUMP.replace("Current thread", "Thread"), IN_ANOTHER], ids=["main", "C", "other"]
)
def test_the_main_thread_is_found_whichever_took_the_signal(text: str) -> None:
    found = parse_dump(7, text)
    assert found is not None
    assert found.place == Frame("/home/me/train.py", 12, "step")
    assert found.waits is True
    assert len(found.frames) == 4


def test_a_crash_is_that_of_the_thread_that_took_the_signal() -> None:
    found = parse_dump(7, IN_ANOTHER, crashed=True)
    assert found is not None and found.frames[0].function == "wait"


def test_the_newer_heads_with_thread_names_are_read_too() -> None:
    text = DUMP.replace("ab80 (most", "ab80 [MainThread] (most")
    assert parse_dump(7, text) == parse_dump(7, DUMP)


def test_a_log_without_a_dump_has_none() -> None:
    assert (
        parse_dump(7, 'Traceback (most recent call last):\n  File "x.py", line 1, in f\n') is None
    )
    assert parse_dump(7, "") is None


def test_what_a_launcher_put_into_a_log_can_be_left_out() -> None:
    printed = f"allranks: 2026-11-16: no step for 4s{stacks.FOLLOW}\n{DUMP}\n{stacks.END}\n"
    assert stacks.without_dumps(f"one\n{printed}two\n{printed}") == "one\ntwo\n"
    assert stacks.without_dumps(DUMP) == DUMP


def test_a_dump_is_complete_when_the_main_thread_is() -> None:
    assert stacks.is_complete(DUMP) and stacks.is_complete(DUMP + "step 4 done\n")
    as_module = DUMP.replace("<module>", "_run_module_as_main")
    assert stacks.is_complete(as_module)
    assert not any(stacks.is_complete(DUMP[:end]) for end in range(len(DUMP)))


def test_py_spy_s_main_thread_is_taken() -> None:
    frames = [{"filename": "/home/me/train.py", "line": 9, "name": "Mine.stuck"}]
    threads = [
        {"os_thread_id": 8, "thread_name": "events", "frames": [{**frames[0], "line": 1}]},
        {"os_thread_id": 7, "thread_name": "MainThread", "frames": frames},
    ]
    found = parse_py_spy(7, threads)
    assert found is not None and str(found.place) == "/home/me/train.py:9 in stuck"
    assert parse_py_spy(7, threads[:1]) is None


@pytest.mark.parametrize(
    ("frames", "waits"),
    [
        ([("/home/me/train.py", 3, "f")], False),
        ([(f"{TORCH}/utils/data/dataloader.py", 3, "f"), ("/home/me/train.py", 3, "f")], False),
        ([(f"{TORCH}/distributed/distributed_c10d.py", 3, "barrier"), ("/me/t.py", 1, "f")], True),
        ([(f"{OURS}probe/hooks.py", 3, "call"), ("/home/me/train.py", 3, "f")], True),
        # A backward pass may compute or wait: only the rank's own word tells.
        ([(f"{TORCH}/autograd/graph.py", 3, "run"), ("/home/me/train.py", 3, "f")], None),
        ([], None),
    ],
)
def test_a_stack_tells_whether_a_rank_waits(
    frames: list[tuple[str, int, str]], waits: bool | None
) -> None:
    assert stack(*frames).waits is waits


def test_without_code_of_ones_own_the_innermost_line_is_the_place() -> None:
    only = stack((f"{TORCH}/a.py", 1, "inner"), (f"{TORCH}/b.py", 2, "outer"))
    assert only.place == Frame(f"{TORCH}/a.py", 1, "inner")


@pytest.mark.parametrize(
    ("frames", "call"),
    [
        ([("/home/me/train.py", 3, "f")], None),
        (
            [
                (f"{TORCH}/distributed/distributed_c10d.py", 3, "all_reduce"),
                (f"{TORCH}/distributed/c10d_logger.py", 83, "wrapper"),
                (f"{OURS}probe/hooks.py", 240, "call"),
                ("/home/me/train.py", 12, "step"),
            ],
            "all_reduce",
        ),
        (
            [
                (f"{TORCH}/autograd/graph.py", 3, "_engine_run_backward"),
                (f"{TORCH}/_tensor.py", 3, "backward"),
                (f"{OURS}train/loop.py", 3, "train"),
                ("/env/lib/python3.11/runpy.py", 3, "_run_code"),
            ],
            "backward",
        ),
    ],
)
def test_the_call_is_what_the_user_s_own_line_is_in(
    frames: list[tuple[str, int, str]], call: str | None
) -> None:
    assert stack(*frames).library_call == call


def test_a_short_place_leaves_out_folders_that_say_nothing() -> None:
    assert Frame("/home/me/train.py", 9, "f").brief == "train.py:9 in f"
    assert Frame(f"{TORCH}/_dynamo/a.py", 1, "g").brief == "torch/_dynamo/a.py:1 in g"


def make_process(proc: Path, pid: int, parent: int, env: dict[str, str]) -> None:
    folder = proc / str(pid)
    folder.mkdir(parents=True)
    (folder / "stat").write_text(f"{pid} (py (x) thon) S {parent} 1 1")
    text = "\0".join(f"{key}={value}" for key, value in env.items())
    (folder / "environ").write_bytes(text.encode())


def test_ranks_are_known_by_their_environment_and_workers_by_their_parent(tmp_path: Path) -> None:
    run = RunDir(Path("/runs/digits-1"))
    rank = {"ALLRANKS_RUN_DIR": "/mnt/other/digits-1", "ALLRANKS_ATTEMPT": "2"}
    make_process(tmp_path, 10, 1, {"HOME": "/root"})
    make_process(tmp_path, 11, 10, {**rank, "RANK": "0"})
    make_process(tmp_path, 12, 10, {**rank, "RANK": "1"})
    make_process(tmp_path, 13, 12, {**rank, "RANK": "1"})  # a loader worker
    make_process(tmp_path, 14, 10, {**rank, "RANK": "0", "ALLRANKS_ATTEMPT": "1"})
    make_process(tmp_path, 15, 10, {**rank, "RANK": "0", "ALLRANKS_RUN_DIR": "/runs/other"})
    (tmp_path / "16").mkdir()  # one that has just ended
    assert processes_of(run, 2, tmp_path) == {0: 11, 1: 12}
    assert processes_of(run, 3, tmp_path) == {}


def test_a_signal_is_sent_only_to_who_expects_it(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    status = tmp_path / "7/status"
    status.write_text(f"Name:\tpython\nSigCgt:\t{1 << (stacks.DUMP_SIGNAL - 1):016x}\n")
    assert takes_signal(7, tmp_path)
    status.write_text("Name:\tpython\nSigCgt:\t0000000000000000\n")
    assert not takes_signal(7, tmp_path)
    assert not takes_signal(os.getpid())  # no handler in this process: it would end here


def test_a_process_writes_its_stack_beside_its_log_and_goes_on(tmp_path: Path) -> None:
    """Without py-spy: the real handler and the real signal."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import time
        def waits_for_godot():
            time.sleep(60)
        waits_for_godot()
        """)
    )
    log = tmp_path / "rank-0.log"
    env = {**os.environ, "RANK": "0", stacks.VARIABLE: str(stacks.DUMP_SIGNAL)}
    inject = Path(allranks.__file__).parent / "probe/inject"
    env["PYTHONPATH"] = f"{inject}{os.pathsep}{env.get('PYTHONPATH', '')}"
    with log.open("w") as output:
        process = subprocess.Popen([sys.executable, script], env=env, stderr=output)
    try:
        until = time.monotonic() + 60
        found: dict[int, Stack] = {}
        while not found and time.monotonic() < until:
            found = stacks.by_signal({0: process.pid})
            is_there = found and found[0].place is not None
            found = found if is_there and "godot" in str(found[0].place) else {}
            time.sleep(0.05)
        assert found[0].place == Frame(str(script), 4, "waits_for_godot")
        assert found[0].waits is False
        assert process.poll() is None and log.read_text() == ""
    finally:
        process.kill()
        process.wait()
