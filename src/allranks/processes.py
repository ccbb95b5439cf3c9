"""Signals that stop a run, processes that must not outlive their parent, and their start."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

PR_SET_PDEATHSIG = 1

# What asks a run to stop. USR2, not USR1, for "your time is nearly up": NCCL may handle USR1.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)


def die_with_parent(parent: int | None = None) -> None:
    """Have the kernel kill this process when its parent ends, however that ends (Linux).

    `parent` is the expected parent's process id: if it is gone already, this process ends now.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def quick_imports() -> Iterator[None]:
    """Imports without looks for garbage: of what torch makes all stays, and they take a tenth."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
