"""Samples what the training thread is executing, with a timer that does not need Python's lock.

A signal interrupts the thread every half millisecond, no matter which thread holds Python's lock;
Python then calls the handler in that thread before it executes anything else. So a sample shows the
line that was being executed, even if it was waiting or in a C function. faulthandler needs no lock
either, but may read frames that are being freed: run a thousand times a second in a script with
deep calls, it crashed with SIGSEGV within seconds (Python 3.11), both as a watchdog and on signals.
"""

from __future__ import annotations

import ctypes
import os
import re
import resource
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from time import perf_counter, thread_time
from types import CodeType, FrameType
from typing import Any, NamedTuple

from allranks.probe.compilers import unseen_by_compilers
from allranks.run.tracebacks import INSTALLED, OURS, short_path
from allranks.timing.traced_steps import Sample

PERIOD_SECONDS = 0.0005
MAX_SAMPLES = 20_000
STOLEN = 0.5  # of the time between two samples: if the thread ran for less, others took its CPU
# Hardly anyone uses this signal, and a process without a handler ignores it. So the timer never
# kills a script, whatever it does to its handlers; Lightning, for example, restores all at its end.
SIGNAL = signal.SIGURG
CLOCK_MONOTONIC, SIGEV_THREAD_ID, TIMER_ABSTIME = 1, 4, 1  # as Linux has them
OWN, TORCH, LIBRARY = "own", "torch", "library"


class _Event(ctypes.Structure):
    """struct sigevent of Linux."""

    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signal", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("thread", ctypes.c_int),
        ("rest", ctypes.c_char * 44),
    )


class _Times(ctypes.Structure):
    """struct itimerspec."""

    _fields_ = tuple(
        (name, ctypes.c_long)
        for name in ("period_seconds", "period_nanos", "first_seconds", "first_nanos")
    )


class _Seen(NamedTuple):
    """What was seen at one signal."""

    now: float
    cpu: float  # seconds of this thread
    num_switches: int  # involuntary ones, to other threads
    kind: str
    place: tuple[str, int] | None


class Sampler:
    """Samples the thread that starts it, which must be the main thread."""

    def __init__(self, look: Callable[[float], None]) -> None:
        self._look = look  # called with each sample's time, between any two instructions
        self._torch = (folder_of_torch(), "torchinductor")
        self._kinds: dict[CodeType, str] = {}
        self._seen: list[_Seen] = []
        self._timer = ctypes.c_void_p()
        self._began = 0.0
        self.is_running = False

    def start(self) -> bool:
        """Start to sample; False if that is not possible here."""
        if threading.current_thread() is not threading.main_thread() or is_caught(SIGNAL):
            return False
        if wakes_a_loop():
            return False
        libc = library()
        event = _Event(None, SIGNAL, SIGEV_THREAD_ID, threading.get_native_id(), b"")
        if libc is None or libc.timer_create(
            CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(self._timer)
        ):
            return False
        signal.signal(SIGNAL, self._take)
        signal.siginterrupt(SIGNAL, False)  # calls that it interrupts continue
        period = round(PERIOD_SECONDS * 1e9)
        self._began = perf_counter() + PERIOD_SECONDS  # the same clock
        first = round(self._began * 1e9)
        times = _Times(0, period, first // 10**9, first % 10**9)
        self.is_running = True
        libc.timer_settime(self._timer, TIMER_ABSTIME, ctypes.byref(times), None)
        return True

    def stop(self) -> None:
        if not self.is_running:
            return
        self.is_running = False
        libc = library()
        assert libc is not None
        libc.timer_delete(self._timer)
        if signal.getsignal(SIGNAL) == self._take:
            signal.signal(SIGNAL, signal.SIG_DFL)

    @unseen_by_compilers
    def _take(self, number: int, frame: FrameType | None) -> None:
        now, kind, place = perf_counter(), LIBRARY, None
        while frame is not None:
            code = frame.f_code
            kind = self._kinds.get(code) or self._learn(code)
            if kind == OWN:
                place = (code.co_filename, frame.f_lineno)
            if kind != LIBRARY:
                break
            frame = frame.f_back
        if len(self._seen) < MAX_SAMPLES:
            switches = resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw
            self._seen.append(_Seen(now, thread_time(), switches, kind, place))
        self._look(now)

    def _learn(self, code: CodeType) -> str:
        file = code.co_filename
        kind = OWN
        if any(part in file for part in self._torch):
            kind = TORCH
        elif file.startswith(OURS) or any(part in file for part in INSTALLED):
            kind = LIBRARY
        self._kinds[code] = kind
        return kind

    def samples(self, offset: float) -> list[Sample]:
        """One sample for every period, in the time of a clock that is `offset` seconds ahead.

        Signals that arrive during a C function are handled together when it ends. They also arrive
        together after the system has let other programs run in place of this thread: that time does
        not count for the line that it was about to execute.
        """
        found: list[Sample] = []
        due = self._began
        before = _Seen(self._began, 0.0, 0, LIBRARY, None)
        for seen in self._seen:
            line = None if seen.place is None else f"{short_path(seen.place[0])}:{seen.place[1]}"
            is_stolen = (
                seen.now - due > PERIOD_SECONDS
                and seen.num_switches > before.num_switches
                and seen.cpu - before.cpu < STOLEN * (seen.now - before.now)
            )
            while due <= seen.now:
                found.append(Sample(due + offset, is_stolen or seen.kind == TORCH, line))
                due += PERIOD_SECONDS
            before = seen
        return found


def is_caught(number: int) -> bool:
    """Whether the process handles or ignores a signal, even if Python does not know of it."""
    status = Path("/proc/self/status").read_text(errors="replace")
    masks = re.findall(r"^Sig(?:Cgt|Ign):\s*([0-9a-f]+)$", status, re.MULTILINE)
    return any(int(mask, 16) >> (number - 1) & 1 for mask in masks)


def wakes_a_loop() -> bool:
    """Whether signals wake an event loop of the script, whose buffer they would fill."""
    before = signal.set_wakeup_fd(-1)
    if before != -1:
        signal.set_wakeup_fd(before)
    return before != -1


def library() -> Any:
    """The C library, if it has timers."""
    for name in (None, "librt.so.1"):
        try:
            found = ctypes.CDLL(name, use_errno=True)
            if hasattr(found, "timer_create"):
                return found
        except OSError:
            continue
    return None


def folder_of_torch() -> str:
    import torch

    return os.path.dirname(torch.__file__) + os.sep
