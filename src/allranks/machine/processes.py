"""Signals that stop a run; processes: how they start, what they print, how they end."""

from __future__ import annotations

import ctypes
import errno
import gc
import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any

from allranks.errors import STOPPED_AT_ONCE

PR_SET_PDEATHSIG, PR_GET_PDEATHSIG = 1, 2

# Signals that ask a run to stop. "Your time is nearly up" is USR2, since NCCL may handle USR1; USR1
# is for scripts that listen to it (slurm.signal). HUP, sent when a terminal is closed, means TERM;
# under nohup it stays ignored.
STOP_SIGNALS: tuple[signal.Signals, ...] = (
    *(signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2),
    *([] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]),
)


@dataclass(frozen=True, slots=True)
class Setting:
    """An environment variable for the ranks of this machine, and why it is set."""

    name: str
    value: str
    reason: str


def die_with_parent(parent: int | None = None) -> None:
    """Make the kernel kill this process when its parent ends in any way (Linux).

    `parent`: the process id of the expected parent. If it has already ended, so does this process.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def outliving_parent() -> Iterator[None]:
    """If the parent ends within this block, `die_with_parent` waits for the end of it."""
    if sys.platform != "linux":
        yield
        return
    system, parent, number = ctypes.CDLL(None), os.getppid(), ctypes.c_int()
    system.prctl(PR_GET_PDEATHSIG, ctypes.byref(number))
    system.prctl(PR_SET_PDEATHSIG, 0)
    try:
        yield
    finally:
        if number.value:
            die_with_parent(parent)


def signal_name(number: int) -> str:
    """SIGKILL, or `signal 77` where there is no name for it."""
    known = number in {int(one) for one in signal.Signals}
    return signal.Signals(number).name if known else f"signal {number}"


def output_of(
    command: Sequence[str], seconds: float, env: Mapping[str, str] | None = None
) -> str | None:
    """What a program prints; None if it is not installed, fails, or takes more than so long."""
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
            check=True,
        ).stdout
    return None


class Signals:
    """Stop signals that this process gets, kept until they can be passed on to the ranks.

    `delay`: seconds before that, if the ranks also get them in another way. A second signal would
    kill a rank that is already stopping.
    """

    def __init__(self, delay: float = 0.0) -> None:
        self.received: list[signal.Signals] = []
        self._delay = delay
        self._last = 0.0
        self._leaves = False

    @property
    def at_once(self) -> bool:
        """Whether there was a second Ctrl-C: the user does not want to wait."""
        return signal.SIGINT in self.received[1:]

    @property
    def is_due(self) -> bool:
        """Whether it is time to pass them on."""
        return time.monotonic() >= self._last + self._delay

    def note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP and self.received:
            return  # the shell sends it, and the kernel again when the shell has ended
        # Scripts know what to do on TERM.
        self.received.append(signal.Signals(signal.SIGTERM if number == signal.SIGHUP else number))
        self._last = time.monotonic()
        if self._leaves and len(self.received) > 1:
            sys.exit(STOPPED_AT_ONCE)

    @contextmanager
    def leaving(self) -> Iterator[None]:
        """While there are no ranks, a second signal ends this process immediately."""
        self._leaves = True
        try:
            yield
        finally:
            self._leaves = False


@contextmanager
def listening(delay: float = 0.0) -> Iterator[Signals]:
    """Note stop signals, and restore their handlers afterwards."""
    signals = Signals(delay)
    before = {number: signal.signal(number, signals.note) for number in STOP_SIGNALS}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


@contextmanager
def blocked_signals() -> Iterator[None]:
    """Hold stop signals back, so that none hits a rank before it can handle one."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _LastingTerminal(io.FileIO):
    """A terminal that may be closed: writing to it then does nothing."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return memoryview(data).nbytes


def outlive_terminal() -> None:
    """Make printing never fail after the terminal was closed."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None or not stream.isatty():
            continue
        raw = _LastingTerminal(stream.fileno(), "w", closefd=False)
        lasting = io.TextIOWrapper(
            io.BufferedWriter(raw), stream.encoding, stream.errors, line_buffering=True
        )
        setattr(sys, name, lasting)


@contextmanager
def quick_imports(*, with_warnings: bool = True) -> Iterator[None]:
    """Import torch without looking for garbage among what it creates, all of which stays.

    That would take a quarter of a second, and another one when Python ends. Whatever exists after
    the first import is never collected, so nothing large may exist before. Torch's own warnings are
    long C++ stacks, about what a launcher says in one line.
    """
    is_first = "torch" not in sys.modules
    name = "TORCH_CPP_LOG_LEVEL"
    hides = not with_warnings and name not in os.environ
    if hides:
        os.environ[name] = "ERROR"
    gc.disable()
    try:
        yield
    finally:
        if is_first:
            gc.freeze()
        gc.enable()
        if hides:
            del os.environ[name]


def has_ended(child: int) -> bool:
    """Whether a child has ended, from any thread: it is left to `Popen` to reap it.

    While one thread does that, `poll` says in another that it runs, and a signal finds nobody.
    """
    try:
        return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True
