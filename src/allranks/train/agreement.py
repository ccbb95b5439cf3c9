"""What all ranks decide together (to stop, to save), without any of them waiting for it.

About three times a second the ranks sum a few numbers over gloo, in the background: started after
one step, read after the next. All ranks start and read at the same steps, so all of them act at the
same step, and the device is never synchronised for it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.autograd import _enable_record_function

PERIOD_SECONDS = 0.3
MAX_STEPS = 100  # between two exchanges, in case steps suddenly get slower


@contextmanager
def unrecorded() -> Iterator[None]:
    """A context in which a profiler does not record exchanges: they may end after it has stopped.

    gloo's threads would then write to memory that the profiler has given back (torch 2.13).
    """
    _enable_record_function(False)
    try:
        yield
    finally:
        _enable_record_function(True)


@dataclass(frozen=True, slots=True)
class Decision:
    """What the ranks have agreed on: the same on every rank."""

    stop: bool = False  # some rank was asked to stop
    save: bool = False  # rank 0's clock says that a checkpoint is due
    failed: bool = False  # some rank's background work failed


NOTHING = Decision()


class Pulse:
    """At most one exchange is in flight. `group`: gloo with all ranks, or None for a single one."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.ready = False  # whether this rank is, for something that all want to begin together
        self.all_ready = False  # the same on every rank, at the same step
        self._numbers = torch.zeros(5, dtype=torch.float64)
        self._work: dist.Work | None = None
        self._steps = 0  # since the last exchange started
        self._interval = 1  # steps between the starts of two exchanges
        self._started = time.perf_counter()

    @property
    def beats_next(self) -> bool:
        """Whether the next call to `step` starts an exchange. The same on every rank."""
        return self._steps + 1 >= self._interval

    def step(self, stop: bool, save: bool, failed: bool) -> Decision:
        """What was agreed, if anything. Every rank must call it after every step."""
        if self.group is None:
            self.all_ready = self.ready
            return Decision(stop, save, failed) if stop or save or failed else NOTHING
        self._steps += 1
        decision = self._read() if self._work is not None else NOTHING
        if self._steps >= self._interval:
            # `save` was computed before this decision, which already includes it.
            self._start(stop, save and not decision.save, failed)
        return decision

    def agree(self, stop: bool, save: bool = False, failed: bool = False) -> Decision:
        """Decide now. Every rank must call it; it waits for all of them."""
        if self.group is None:
            return Decision(stop, save, failed)
        if self._work is not None:
            self._read()
        self._start(stop, save, failed)
        return self._read()

    def _start(self, stop: bool, save: bool, failed: bool) -> None:
        now = time.perf_counter()
        step_seconds = (now - self._started) / max(self._steps, 1)
        numbers = [stop, save, failed, step_seconds, self.ready]
        self._numbers.copy_(torch.tensor(numbers, dtype=torch.float64))
        with unrecorded():
            self._work = dist.all_reduce(self._numbers, group=self.group, async_op=True)
        self._steps = 0
        self._started = now

    def _read(self) -> Decision:
        assert self._work is not None and self.group is not None
        self._work.wait()
        self._work = None
        stop, save, failed, seconds, ready = self._numbers.tolist()
        self.all_ready = ready >= self.group.size()
        # From the sum over all ranks, so that every rank computes the same interval.
        mean_seconds = max(seconds / self.group.size(), 1e-6)
        self._interval = int(min(max(PERIOD_SECONDS / mean_seconds, 1), MAX_STEPS))
        return Decision(stop > 0, save > 0, failed > 0)
