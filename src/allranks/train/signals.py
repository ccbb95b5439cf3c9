"""Stop signals only set a flag; the ranks then agree on a step to stop at (agreement.py)."""

from __future__ import annotations

import signal
from types import FrameType

from allranks.machine.processes import STOP_SIGNALS

_received: list[str] = []


def listen() -> None:
    """Handle stop signals from now on, including those that the launcher has blocked so far."""
    for number in STOP_SIGNALS:
        signal.signal(number, _note)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def stop_requested() -> str | None:
    """The name of the first stop signal that this rank received, or None."""
    return _received[0] if _received else None


def _note(number: int, frame: FrameType | None) -> None:
    _received.append(signal.Signals(number).name)
