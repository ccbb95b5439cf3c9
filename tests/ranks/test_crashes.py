"""Crashes that are planted: the first screen tells which rank, where in its code, and why."""

from __future__ import annotations

import json
import multiprocessing.connection
import os
import runpy
import sys
import time
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from tests.commandline import Allranks
from tests.crashes import CRASHES, Crash
from tests.fork_server import fork_server
from tests.forked import EXECUTED
from tests.ports import free_port

from allranks.errors import AllranksError
from allranks.launch.node import end_of
from allranks.launch.rank_env import INJECT
from allranks.launch.rank_output import WithoutTraceback
from allranks.machine.processes import die_with_parent
from allranks.run import failures
from allranks.run.events import append_event
from allranks.run.folder import RunDir

pytestmark = pytest.mark.ranks

COLUMNS, ROWS = 80, 24
BY_COMMAND = ("own_hook", "worker", "segfault")  # in a Python of their own, through the launcher
LEAVE_SECONDS = 20.0


def check(crash: Crash, shown: str) -> None:
    """The first screen holds it all."""
    rows = [line[i : i + COLUMNS] for line in shown.splitlines() for i in range(0, len(line), 80)]
    assert len(rows) <= ROWS, shown
    screen = "".join(rows)
    ranks = [crash.rank] if crash.rank is not None else [0, 1]
    assert any(f"error: rank {rank} " in shown for rank in ranks), shown
    assert crash.says in screen, shown
    assert f"train.py:{crash.line}" in screen, shown
    assert f"{Path(failures.__file__).parents[1]}/" not in shown, shown
    if crash.rank is not None:
        assert f"rank {1 - crash.rank} went down with it" in shown, shown


@pytest.mark.parametrize(
    "crash", [one for one in CRASHES if one.name not in BY_COMMAND], ids=lambda crash: crash.name
)
def test_a_crash(crash: Crash, tmp_path: Path) -> None:
    run = fail_on_two_ranks(crash, tmp_path / "train-20261116-120000-abcd")
    failed = failures.failure(run)
    assert failed is not None
    error = AllranksError(
        failures.failure_in_words(failed), fix="x" * 200, lines=failures.failure_lines(failed)
    )
    printed = WithoutTraceback(run, 0, 0)
    before = printed(run.log(0, 0).read_text()) + printed.rest()
    check(crash, f"train-20261116-120000-abcd: starting 1x2\n{before}{error.shown}")


@pytest.mark.parametrize(
    "name", [pytest.param("own_hook", marks=pytest.mark.soak), *BY_COMMAND[1:]]
)
def test_a_crash_by_command(name: str, allranks: Allranks, tmp_path: Path) -> None:
    crash = next(one for one in CRASHES if one.name == name)
    (tmp_path / "train.py").write_text(crash.script)
    words = ["--layout", "1x2", "--oversubscribe", "--json", "--", sys.executable, "train.py"]
    done = allranks("run", *words, env={"OMP_NUM_THREADS": "1", **EXECUTED})
    assert done.returncode == 1, done.stderr
    notes = [line for line in done.stderr.splitlines() if line.startswith("note: ")]
    check(crash, "\n".join(line for line in done.stderr.splitlines() if line not in notes))
    error = json.loads(done.stdout)["error"]
    assert (error["rank"], error["line"]) == (1, crash.line)
    assert Path(error["file"]).name == "train.py" and error["traceback"]
    if name != "worker":
        return
    assert f"train.py:{crash.line}" in json.loads(allranks("ls", "--json").stdout)[0]["reason"]
    assert error["what"] in allranks("logs", "last").stderr


def fail_on_two_ranks(crash: Crash, folder: Path) -> RunDir:
    """As a launcher would, from a server that has torch imported."""
    run = RunDir(folder)
    run.attempt(0).mkdir(parents=True)
    script = folder / "train.py"
    script.write_text(crash.script)
    context = fork_server()
    env = {
        **{"ALLRANKS_RUN_DIR": str(folder), "ALLRANKS_ATTEMPT": "0", "WORLD_SIZE": "2"},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"},
    }
    ranks: list[BaseProcess] = [
        context.Process(target=be_rank, args=(script, run.log(0, rank), {**env, "RANK": str(rank)}))
        for rank in range(2)
    ]
    try:
        for rank, process in enumerate(ranks):
            process.start()
            append_event(run.events(0, rank), "start", rank=rank, pid=process.pid)
        multiprocessing.connection.wait([process.sentinel for process in ranks], LEAVE_SECONDS)
        until = time.monotonic() + LEAVE_SECONDS
        for rank, process in enumerate(ranks):
            process.join(max(0.0, until - time.monotonic()))
            end = end_of(process.exitcode, is_command=True, stopped=False)
            append_event(run.events(0, rank), "end", **end)
    finally:
        for process in ranks:
            process.kill()
            process.join()
            process.close()
    return run


def be_rank(script: Path, log: Path, env: dict[str, str]) -> None:
    """In the rank's process: as Python runs a script."""
    import torch

    from allranks.probe.start import start

    die_with_parent()
    os.environ.update(env)
    os.chdir(script.parent)
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(output, stream)
    for text in (sys.stdout, sys.stderr):
        text.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # text streams
    leave = os._exit
    sys.orig_argv = [sys.executable, str(script)]
    runpy.run_path(str(INJECT / "sitecustomize.py"))
    torch.set_num_threads(1)
    start()
    code: object = 0
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as error:
        code = error.code
    except BaseException as error:
        code = 1
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename != str(script):
            trace = trace.tb_next
        with suppress(Exception):
            sys.excepthook(type(error), error.with_traceback(trace), trace)
    finally:
        if isinstance(code, str):
            print(code, file=sys.stderr)
            code = 1
        leave(int(str(code or 0)))
