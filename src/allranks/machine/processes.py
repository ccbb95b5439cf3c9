"""Signals that stop a run, processes that must not outlive their parent, and their start."""

from __future__ import annotations

import ctypes
import errno
import gc
import io
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

PR_SET_PDEATHSIG = 1

# What asks a run to stop. "Your time is nearly up" is USR2, since NCCL may handle USR1, but for
# scripts that listen to USR1 (slurm.signal). HUP, when a terminal is closed, is as good as TERM;
# under nohup it is ignored, and stays so.
STOP_SIGNALS: tuple[signal.Signals, ...] = (
    *(signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2),
    *([] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]),
)


@dataclass(frozen=True, slots=True)
class Setting:
    """A variable for the ranks of this machine, and why."""

    name: str
    value: str
    reason: str


def die_with_parent(parent: int | None = None) -> None:
    """Have the kernel kill this process when its parent ends, however that ends (Linux).

    `parent` is the expected parent's process id: if it is gone already, this process ends now.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


class Signals:
    """Stop signals that this process gets, kept until the ranks can be told.

    `delay`: seconds before they are passed on, where the ranks get them in another way, too. One
    that comes while a rank is on its way out would kill it.
    """

    def __init__(self, delay: float = 0.0) -> None:
        self.received: list[signal.Signals] = []
        self._delay = delay
        self._last = 0.0
        self._leaves = False

    @property
    def at_once(self) -> bool:
        """A second signal, a Ctrl-C: the user does not want to wait."""
        return signal.SIGINT in self.received[1:]

    @property
    def is_due(self) -> bool:
        """Whether they are to be passed on now."""
        return time.monotonic() >= self._last + self._delay

    def note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP and self.received:
            return  # the shell sends it, and then the kernel when the shell is gone
        # Scripts know what to do at TERM.
        self.received.append(signal.Signals(signal.SIGTERM if number == signal.SIGHUP else number))
        self._last = time.monotonic()
        if self._leaves and len(self.received) > 1:
            sys.exit(130)

    @contextmanager
    def leaving(self) -> Iterator[None]:
        """As long as there are no ranks: a second signal ends this process wherever it is."""
        self._leaves = True
        try:
            yield
        finally:
            self._leaves = False


@contextmanager
def listening(delay: float = 0.0) -> Iterator[Signals]:
    """Stop signals are noted here; afterwards they do again what they did before."""
    signals = Signals(delay)
    before = {number: signal.signal(number, signals.note) for number in STOP_SIGNALS}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


@contextmanager
def blocked_signals() -> Iterator[None]:
    """No stop signal can hit a rank before it is able to take one."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _LastingTerminal(io.FileIO):
    """A terminal that may be closed, or its connection lost: nobody reads what is written then."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return memoryview(data).nbytes


def outlive_terminal() -> None:
    """Have what this process prints on a terminal never fail once that is gone."""
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
def quick_imports() -> Iterator[None]:
    """A launcher's imports of torch: without garbage collection, and without torch's warnings.

    Collection takes a tenth of their time, and frees nothing: all that torch creates stays. The
    warnings are stacks of C++ frames about what the launcher says in one line. Ranks keep theirs.
    """
    name = "TORCH_CPP_LOG_LEVEL"
    is_set = name in os.environ
    os.environ.setdefault(name, "ERROR")
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        if not is_set:
            del os.environ[name]
