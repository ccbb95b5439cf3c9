"""Signals that stop a run, processes that must not outlive their parent, and their start."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

PR_SET_PDEATHSIG = 1

# What asks a run to stop. "Your time is nearly up" is USR2, since NCCL may handle USR1, but for
# scripts that listen to USR1 (slurm.signal).
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


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

    @property
    def at_once(self) -> bool:
        """A second signal, a Ctrl-C: the user does not want to wait."""
        return signal.SIGINT in self.received[1:]

    @property
    def is_due(self) -> bool:
        """Whether they are to be passed on now."""
        return time.monotonic() >= self._last + self._delay

    def note(self, number: int, frame: FrameType | None) -> None:
        self.received.append(signal.Signals(number))
        self._last = time.monotonic()


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


@contextmanager
def quick_imports() -> Iterator[None]:
    """Imports without garbage collection.

    It takes a tenth of their time, and frees nothing: all that torch creates stays.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
