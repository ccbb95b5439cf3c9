"""Which rank failed first, and the lines that are shown of it, from plain data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from allranks.launch.rank_output import WithoutTraceback
from allranks.run import tracebacks
from allranks.run.events import append_event
from allranks.run.failures import (
    COLUMNS,
    failure,
    failure_in_words,
    failure_lines,
    lacked_memory,
    traceback_lines,
)
from allranks.run.folder import RunDir
from allranks.run.logs import last_line
from allranks.run.tracebacks import Frame, read_tracebacks
from allranks.show.numbers import ranks_in_words

TORCH = "/venv/lib/python3.11/site-packages/torch/nn/modules/module.py"


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "job-20261101-120000-aaaa")


def start(run: RunDir, attempt: int = 0, ranks: int = 2) -> None:
    for rank in range(ranks):
        append_event(run.events(attempt, rank), "start", rank=rank, pid=100 + rank, host="node1")


def fail(
    run: RunDir, rank: int, t: float, error: dict[str, Any] | None = None, **more: Any
) -> None:
    fields = {**({"error": error} if error else {}), **more}
    append_event(run.events(0, rank), "end", state="failed", exit=1, t=t, **fields)


def error(what: str, *, echo: bool = False) -> dict[str, Any]:
    return {"what": what, "fix": "", "echo": echo}


def test_the_first_to_fail_is_the_one(run: RunDir) -> None:
    start(run, ranks=3)
    fail(run, 0, 12.0, error("later"))
    fail(run, 1, 11.0, error("first"))
    fail(run, 2, 13.0, error("last"))
    failed = failure(run)
    assert failed is not None
    assert (failed["rank"], failed["error"]["what"]) == (1, "first")
    assert failed["log"] == str(run.log(0, 1))


@pytest.mark.parametrize(
    ("what", "fields", "lacked"),
    [
        ("OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB.", {}, True),
        ("RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried", {}, True),
        ("", {"signal": "SIGKILL", "memory_kills": 1}, True),
        ("", {"signal": "SIGKILL"}, False),  # by whom, nobody knows
        ("ValueError: no such data", {}, False),
    ],
)
def test_whether_a_rank_ran_out_of_memory(
    run: RunDir, what: str, fields: dict[str, Any], lacked: bool
) -> None:
    start(run, ranks=2)
    fail(run, 1, 11.0, error(what) if what else None, **fields)
    failed = failure(run)
    assert failed is not None and lacked_memory(failed) == lacked


def test_echoes_are_passed_over_though_they_came_first(run: RunDir) -> None:
    start(run, ranks=3)
    fail(run, 0, 10.0, error("Connection closed by peer", echo=True))
    fail(run, 1, 11.0, error("Connection closed by peer", echo=True))
    fail(run, 2, 12.0, error("ValueError: no such spiral"))
    failed = failure(run)
    assert failed is not None
    assert failed["rank"] == 2


def test_a_killed_rank_is_found_among_echoes(run: RunDir) -> None:
    start(run)
    fail(run, 0, 10.0, error("Connection closed by peer", echo=True))
    append_event(run.events(0, 1), "end", state="failed", exit=-9, signal="SIGKILL")
    failed = failure(run)
    assert failed is not None
    assert (failed["rank"], failed["signal"]) == (1, "SIGKILL")


def test_echoes_alone_are_still_told(run: RunDir) -> None:
    start(run)
    fail(run, 1, 10.0, error("Connection closed by peer", echo=True))
    failed = failure(run)
    assert failed is not None
    assert failed["rank"] == 1


def test_only_the_last_attempt_counts(run: RunDir) -> None:
    start(run)
    fail(run, 0, 10.0, error("old"))
    start(run, attempt=1)
    for rank in range(2):
        append_event(run.events(1, rank), "end", state="finished")
    assert failure(run) is None


# --- What it says itself ------------------------------------------------------------------------


def told(run: RunDir, rank: int, name: str, message: str = "", **fields: Any) -> None:
    at = {"file": "/home/me/train.py", "line": 31, "function": "forward", "frames": []}
    event = {"type": name, "message": message, "pid": 100 + rank, **at, **fields}
    append_event(run.events(0, rank), "error", **{"echo": False, **event})


def end(run: RunDir, rank: int, code: int | None = 1, **fields: Any) -> None:
    append_event(run.events(0, rank), "end", state="failed", exit=code, **fields)


def gone(what: str = "ended because another rank failed") -> dict[str, Any]:
    return {"error": {"what": what, "fix": "", "echo": True}}


def in_words(run: RunDir) -> str:
    failed = failure(run)
    assert failed is not None
    return "\n".join([failure_in_words(failed), *failure_lines(failed)])


def test_a_rank_that_was_ended_before_it_told_its_host_is_not_on_another(run: RunDir) -> None:
    append_event(run.events(0, 1), "start", rank=1, pid=101, host="node1")
    told(run, 1, "KeyError", "'label'", t=10.0)
    end(run, 0, None, **gone())
    end(run, 1)
    assert in_words(run).startswith("rank 1 failed: KeyError")


def test_a_rank_that_was_about_to_end_by_itself_is_the_culprit(run: RunDir) -> None:
    """The launcher saw rank 0 end first, and ended rank 1, which was printing its traceback."""
    start(run)
    told(run, 1, "KeyError", "'label'", t=10.0)
    told(run, 0, "RuntimeError", "Connection closed by peer", echo=True, t=10.1)
    end(run, 0)
    end(run, 1, None, **gone())
    said = in_words(run)
    assert said.startswith("rank 1 failed: KeyError: 'label'  (/home/me/train.py:31 in forward)")
    assert said.endswith("rank 0 went down with it")
    failed = failure(run)
    assert failed is not None and failed["exit"] == 1


def test_a_rank_that_took_the_launchers_signal_in_its_own_way_is_no_culprit(run: RunDir) -> None:
    start(run)
    told(run, 0, "SystemExit", exit=143, t=9.0)
    end(run, 0, None, **gone())
    told(run, 1, "ValueError", "no", t=10.0)
    end(run, 1)
    assert in_words(run).startswith("rank 1 failed: ValueError: no")


def test_ranks_that_fail_alike_and_differently(run: RunDir) -> None:
    start(run, ranks=5)
    for rank in (0, 1, 2):
        told(run, rank, "AssertionError", f"rank {rank}", t=10.0 + rank)
        end(run, rank)
    told(run, 3, "OSError", "disk", t=20.0)
    end(run, 3)
    end(run, 4, None, **gone())
    others = in_words(run).splitlines()[-1]
    assert others.startswith(
        "  ranks 0-2 failed with the same error; rank 4 went down with it; "
        "rank 3 failed differently: OSError: disk"
    )


def test_an_exit_that_the_script_survived_is_not_its_end(run: RunDir) -> None:
    start(run, ranks=1)
    told(run, 0, "SystemExit", exit=2)
    end(run, 0, 7)
    assert in_words(run) == "rank 0 ended with code 7"


def test_the_error_of_a_process_that_the_rank_waits_for(run: RunDir) -> None:
    """`conda run python train.py`: the rank is a Python of its own, that passes the code on."""
    start(run, ranks=1)
    told(run, 0, "KeyError", "'label'", pid=555)
    told(run, 0, "SystemExit", exit=1)
    end(run, 0, 1)
    assert in_words(run).startswith("rank 0 failed: KeyError: 'label'")


def test_a_killed_rank_was_last_seen_somewhere(run: RunDir) -> None:
    start(run, ranks=1)
    append_event(run.events(0, 0), "place", step=1, at=["/home/me/train.py", 3, "main"])
    append_event(run.events(0, 0), "step", step=7)
    append_event(run.events(0, 0), "device", at=["/home/me/train.py", 9, "load"])
    end(run, 0, -9, signal="SIGKILL", memory_kills=1)
    assert in_words(run).startswith(
        "rank 0 was killed by SIGKILL for its memory  "
        "(after step 7, last seen at /home/me/train.py:9 in load)"
    )


def test_a_log_tells_where_no_event_does(run: RunDir) -> None:
    start(run, ranks=1)
    end(run, 0, 1)
    run.log(0, 0).write_text(
        "[rank0]: Traceback (most recent call last):\n"
        '[rank0]:   File "/home/me/train.py", line 4, in <module>\n'
        "[rank0]:     main()\n"
        f'[rank0]:   File "{TORCH}", line 9, in call\n'
        "[rank0]: torch.OutOfMemoryError: CUDA out of memory.\n[W1116 c10d] a warning\n"
    )
    said = in_words(run).splitlines()
    assert said[0] == (
        "rank 0 failed: OutOfMemoryError: CUDA out of memory.  (/home/me/train.py:4 in <module>)"
    )
    assert said[-1] == "  ... 1 frame in torch"


def test_a_crash_in_c_is_told_by_the_handler_in_c(run: RunDir) -> None:
    start(run, ranks=1)
    end(run, 0, -11, signal="SIGSEGV")
    run.log(0, 0).write_text(
        "Fatal Python error: Segmentation fault\n\nThread 0x01 (most recent call first):\n"
        f'  File "{TORCH}", line 9 in call\n\nCurrent thread 0x02 (most recent call first):\n'
        '  File "/home/me/train.py", line 4 in step\n  File "/home/me/train.py", line 9 in main\n'
    )
    said = in_words(run)
    assert said.startswith("rank 0 was killed by SIGSEGV  (/home/me/train.py:4 in step)")
    assert said.index("in main") < said.rindex("in step")


def test_an_exception_whose_end_a_thread_turns_into_an_abort(run: RunDir) -> None:
    start(run, ranks=1)
    run.log(0, 0).write_text(
        'Traceback (most recent call last):\n  File "/home/me/train.py", line 4, in step\n'
        "    raise ValueError(name)\nValueError: no label\n"
        "terminate called without an active exception\nFatal Python error: Aborted\n\n"
        + "Thread 0x00007f (most recent call first):\n  <no Python frame>\n\n"
        * 40
    )
    end(run, 0, -6, signal="SIGABRT")
    assert (
        in_words(run).splitlines()[0]
        == "rank 0 failed: ValueError: no label  (/home/me/train.py:4 in step)"
    )


def test_the_last_words_of_a_rank_that_failed(run: RunDir) -> None:
    log = run.log(0, 0)
    log.parent.mkdir(parents=True)
    assert last_line(log) == ""  # there is no log
    log.write_bytes(b"epoch 1\n\x1b[31mValueError: no such data\x1b[0m\n\n")
    assert last_line(log) == "ValueError: no such data"
    log.write_bytes(b"x" * 100_000)
    assert len(last_line(log)) < 200


# --- Lines --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "words"),
    [([1], "rank 1"), ([0, 2, 3], "ranks 0, 2 and 3"), ([*range(8), 12], "ranks 0-7 and 12")],
)
def test_lists_of_ranks(ranks: list[int], words: str) -> None:
    assert ranks_in_words(ranks) == words
    assert ranks_in_words(range(0, 64, 2)) == "32 ranks"


def test_a_traceback_fits_its_rows(tmp_path: Path) -> None:
    deep = str(tmp_path / ("long" * 20) / "train.py")
    own = [Frame(deep, number, f"f{number}", "call()" * 30) for number in range(50)]
    libraries = [Frame(TORCH, 1, "g")] * 3
    lines = traceback_lines([*own[:25], *libraries, *own[25:], *libraries], 12)
    assert sum(-(-len(line) // COLUMNS) for line in lines) <= 12
    assert f'{deep}", line 0, in f0' in lines[0]
    assert f'{deep}", line 49, in f49' in lines[-3]
    assert lines[-1] == "  ... 3 frames in torch"


def test_calls_above_the_users_first_are_not_shown() -> None:
    frames = [Frame("<frozen runpy>", 1, "run"), Frame("/me/a.py", 2, "f", "g()")]
    assert traceback_lines(frames) == ['  File "/me/a.py", line 2, in f', "    g()"]


# --- Exceptions ---------------------------------------------------------------------------------


def caught(call: Any) -> dict[str, Any]:
    try:
        call()
    except BaseException as error:
        return tracebacks.describe(error)
    raise AssertionError


def test_an_exception_as_plain_data() -> None:
    def fail() -> None:
        try:
            dict[str, int]()["a"]
        except KeyError as error:
            raise ValueError("b\n" * 5000) from error

    found = caught(fail)
    assert (found["type"], found["function"], found["echo"]) == ("ValueError", "fail", False)
    assert found["file"] == __file__ and len(found["message"]) < 2100
    assert found["cause"].startswith("KeyError: 'a' (") and found["cause"].endswith(" in fail)")
    assert found["frames"][-1][3].startswith("raise ValueError")


def test_the_exception_of_a_loaders_worker_is_that_of_its_own_line() -> None:
    text = (
        "Caught KeyError in DataLoader worker process 0.\nOriginal Traceback (most recent call "
        f'last):\n  File "{TORCH}", line 3, in fetch\n    data = f()\n'
        '  File "/me/data.py", line 7, in __getitem__\n    return x["label"]\n'
        "           ~^^^\nKeyError: 'label'\n"
    )

    class Said(KeyError):
        def __str__(self) -> str:
            return text

    def fail_as_torch_does() -> None:
        raise Said

    found = caught(fail_as_torch_does)
    assert (found["type"], found["message"]) == ("KeyError", "'label'")
    assert (found["file"], found["line"], found["function"]) == ("/me/data.py", 7, "__getitem__")
    assert read_tracebacks(text)[0].frames[1].source == 'return x["label"]'


@pytest.mark.parametrize(
    ("name", "message", "echo"),
    [
        ("RuntimeError", "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]", True),
        ("DistBackendError", "NCCL error: remote process exited or there was a network", True),
        ("DistBackendError", "unhandled system error: Connection closed by remote peer n2", True),
        ("DistBackendError", "NCCL communicator was aborted on rank 1", True),
        ("DistStoreError", "Timed out after 61 seconds waiting for clients. 1/2 clients", True),
        ("DistNetworkError", "The server socket has failed to listen on any address", False),
        ("ConnectionResetError", "[Errno 104] Connection reset by peer", False),
        ("RuntimeError", "CUDA error: device-side assert triggered", False),
    ],
)
def test_echoes(name: str, message: str, echo: bool) -> None:
    assert tracebacks.is_echo(name, message) is echo


def test_an_exception_that_cannot_be_printed() -> None:
    class Odd(Exception):
        def __str__(self) -> str:
            raise TypeError

    def fail() -> None:
        raise Odd

    assert caught(fail)["type"] == "Odd"


# --- The screen ---------------------------------------------------------------------------------


def test_a_traceback_is_kept_from_the_screen_if_the_rank_ends_with_it(run: RunDir) -> None:
    start(run)
    shown = WithoutTraceback(run, 0, 0)
    assert shown("epoch 1\n") == "epoch 1\n"
    told(run, 0, "RuntimeError", "Connection closed by peer")
    assert shown("epoch 2\n[rank0]: Traceback (most recent call last):\n") == "epoch 2\n"
    assert shown('  File "train.py", line 3\nRuntimeError: no\n') == ""


def test_a_traceback_that_the_script_survives_is_shown(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(run)
    shown = WithoutTraceback(run, 0, 0)
    text = "Traceback (most recent call last):\nValueError: caught\n"
    assert shown(f"epoch 1\n{text}") == "epoch 1\n"
    assert shown("epoch 2\n") == ""
    monkeypatch.setattr("allranks.launch.rank_output.HOLD_SECONDS", 0.0)
    assert shown("") == f"{text}epoch 2\n"
    monkeypatch.undo()
    assert shown(text) == ""
    assert shown.rest() == text


def test_what_a_rank_that_failed_held_back_is_not_shown(run: RunDir) -> None:
    start(run)
    shown = WithoutTraceback(run, 0, 0)
    assert shown("Traceback (most recent call last):\n") == ""
    end(run, 0)
    assert shown.rest() == ""
    assert WithoutTraceback(run, 0, 1)("Fatal Python error: Aborted\n") == ""
