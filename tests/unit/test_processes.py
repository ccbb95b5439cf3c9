"""Signals, terminals that go away, and who is signalled: the edges of a launcher's life."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from allranks.errors import AllranksError
from allranks.launch import backends
from allranks.launch.backends import local
from allranks.machine.processes import has_ended, listening, outlive_terminal
from allranks.run.folder import RunDir


@pytest.mark.parametrize(("before", "received"), [("", "SIGTERM"), ("trap '' HUP; ", "none")])
def test_a_hangup_is_a_request_to_end_but_under_nohup(before: str, received: str) -> None:
    code = (
        "import os, signal, sys; from allranks.machine.processes import listening\n"
        "with listening() as signals:\n"
        "    os.kill(os.getpid(), signal.SIGHUP)\n"
        "    os.kill(os.getpid(), signal.SIGHUP)\n"  # from the shell, and from the kernel
        "print(*[one.name for one in signals.received] or ['none'])"
    )
    command = f'{before}exec {sys.executable} -c "$CODE"'
    env = {**os.environ, "CODE": code}
    as_before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # these tests may be under nohup
    try:
        done = subprocess.run(["sh", "-c", command], env=env, capture_output=True, text=True)
    finally:
        signal.signal(signal.SIGHUP, as_before)
    assert done.stdout.strip() == received, done.stderr


def test_who_dies_with_its_parent_first_ends_what_outlives_it() -> None:
    """Killed are the parent, and after the block the child: the pipe ends without its last word."""
    code = (
        "import os, time; from allranks.machine.processes import *\n"
        "parent = os.getpid()\n"
        "if os.fork(): time.sleep(600)\n"
        "die_with_parent(parent)\n"
        "with outliving_parent():\n"
        "    print('within', flush=True)\n"
        "    while os.getppid() == parent: time.sleep(0.001)\n"
        "    print('outlived', flush=True)\n"
        "print('after', flush=True)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None and parent.stdout.readline() == b"within\n"
        parent.kill()
        assert parent.stdout.read() == b"outlived\n"


def test_before_there_are_ranks_a_second_signal_ends_all() -> None:
    with listening() as signals:
        with signals.leaving():
            os.kill(os.getpid(), signal.SIGTERM)
            with pytest.raises(SystemExit) as caught:
                os.kill(os.getpid(), signal.SIGTERM)
        assert caught.value.code == 130
        os.kill(os.getpid(), signal.SIGTERM)  # now the ranks are told


def test_what_is_printed_on_a_vanished_terminal_fails_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    master, slave = os.openpty()
    with open(slave, "w") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        outlive_terminal()
        print("read")
        assert os.read(master, 100) == b"read\r\n"
        os.close(master)
        print("not read", flush=True)
        assert sys.stdout is not terminal and sys.stdout.fileno() == slave
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            os.write(slave, b"x")
        monkeypatch.undo()


# Holds a run as a launcher does, and takes signals as `argument` says.
HOLDER = """
import signal, sys, time
from pathlib import Path
from allranks.run.folder import RunDir
if sys.argv[2] == "deaf":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
with RunDir(Path(sys.argv[1])).held():
    print("held", flush=True)
    time.sleep(300)
"""


def holder(run: RunDir, how: str) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", HOLDER, str(run.path), how]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def test_only_a_runs_own_launcher_is_signalled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lock file may name any process: one that got the number, or that somebody wrote there."""
    run = RunDir(tmp_path)
    monkeypatch.setattr(local, "AT_ONCE_SECONDS", 0.3)
    with holder(run, "deaf") as launcher, subprocess.Popen(["sleep", "300"]) as other:
        lock = tmp_path / ".lock"
        said = lock.read_text()
        lock.write_text(said.replace(str(launcher.pid), str(other.pid)))
        for now in (False, True):
            with pytest.raises(AllranksError, match=f"but process {other.pid}"):
                backends.stop([run], now=now)
        assert other.poll() is None and launcher.poll() is None
        lock.write_text(said)
        with pytest.raises(AllranksError, match=f"process {launcher.pid} still holds it"):
            backends.stop([run], now=True)
        assert backends.stop([run])[0]["done"] == "saves a checkpoint and stops"
        launcher.wait(60)
        assert backends.stop([run])[0]["done"] == "already failed"
        other.kill()
    with holder(run, "hears") as launcher:
        assert backends.stop([run], now=True)[0]["done"] == "stopped at once"
        assert launcher.wait(60) != 0


def test_a_child_that_has_ended_is_left_to_who_started_it() -> None:
    child = subprocess.Popen(["sh", "-c", "read line; exit 3"], stdin=subprocess.PIPE)
    assert not has_ended(child.pid)
    child.communicate(b"\n", timeout=60)
    other = subprocess.Popen(["sh", "-c", "exit 3"])
    while not has_ended(other.pid):
        time.sleep(0.01)
    assert (other.wait(), child.returncode) == (3, 3)
    assert has_ended(other.pid)  # when it is reaped, too
