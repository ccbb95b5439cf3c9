"""Finds the first step at which this rank's own loss was not finite.

One rank's nan or inf spreads to the mean over all ranks, and after the next update to every rank's
loss. So each rank keeps its last losses, and searches them once a logged loss is not finite.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress

import torch
from torch import Tensor

from allranks.run.events import EventLog

MAX_KEPT, MAX_KEPT_LOSSES = 1024, 1 << 20  # micro-batches, and losses in them


class OwnLosses:
    """This rank's losses since the last step whose loss is known to be finite."""

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self._kept: deque[tuple[int, Tensor]] = deque(maxlen=MAX_KEPT)
        self._has_dropped = False  # whether unchecked losses had to be dropped
        self._pending: _PendingSum | None = None

    def keep(self, step: int, losses: Tensor) -> None:
        """Keep the losses of a micro-batch. Nothing is computed."""
        kept = self._kept
        if kept and (len(kept) == kept.maxlen or len(kept) * losses.numel() > MAX_KEPT_LOSSES):
            kept.popleft()
            self._has_dropped = True
        kept.append((step, losses.detach()))

    def check(self, step: int, logged: Tensor) -> None:
        """Check that the logged losses, up to this step's, are finite; no device waits.

        The result is known immediately or, if a device is still computing, in a later call.
        """
        if self._kept.maxlen and (self._pending is None or self._settle()):
            self._pending = _PendingSum(step, logged)
            self._settle()

    def finish(self) -> None:
        """Wait for the last check."""
        if self._pending is not None:
            with suppress(RuntimeError):  # the device is lost, which others report
                self._pending.wait()
                self._settle()

    def _settle(self) -> bool:
        """Act on the pending check; False if its result is not known yet."""
        pending = self._pending
        if pending is None or not pending.is_ready():
            return False
        self._pending = None
        if pending.is_finite():
            self._has_dropped = False
            while self._kept and self._kept[0][0] <= pending.step:
                self._kept.popleft()
        else:
            self._report_first()
        return True

    def _report_first(self) -> None:
        for number, (step, losses) in enumerate(self._kept):
            bad = losses[~torch.isfinite(losses)]
            if bad.numel():
                if number == 0 and self._has_dropped:
                    break  # a dropped one may have been the first
                self._log.write("nonfinite", step=step, loss=str(float(bad[0])))
                break
        self._kept = deque(maxlen=0)  # only the first matters: keep nothing from now on


class _PendingSum:
    """A sum of losses on its way to the host; it is finite if all of them are."""

    def __init__(self, step: int, logged: Tensor) -> None:
        self.step = step
        self._sum = logged.sum()
        self._event: torch.cuda.Event | None = None
        if logged.is_cuda:
            on_device, self._sum = self._sum, torch.empty((), pin_memory=True)
            self._sum.copy_(on_device, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def is_ready(self) -> bool:
        return self._event is None or bool(self._event.query())

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()

    def is_finite(self) -> bool:
        return bool(torch.isfinite(self._sum))
