"""Whose loss stopped being a number first: each rank looks at its own, when losses are sent anyway.

Of a loss that is no number the mean over all ranks is none either, and after the next update so is
every rank's own. So the last ones are kept, and looked through once one that is logged is bad.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress

import torch
from torch import Tensor

from allranks.run.events import EventLog

MAX_KEPT, MAX_KEPT_LOSSES = 1024, 1 << 20  # micro-batches, and what is in them; the last ones


class OwnLosses:
    """This rank's losses since the last one that was known to be a number."""

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self._kept: deque[tuple[int, Tensor]] = deque(maxlen=MAX_KEPT)
        self._has_lost = False  # some that nobody has asked about
        self._asked: _Asked | None = None

    def saw(self, step: int, losses: Tensor) -> None:
        """Keep the losses of a micro-batch. Nothing is computed."""
        kept = self._kept
        if kept and (len(kept) == kept.maxlen or len(kept) * losses.numel() > MAX_KEPT_LOSSES):
            kept.popleft()
            self._has_lost = True
        kept.append((step, losses.detach()))

    def look(self, step: int, logged: Tensor) -> None:
        """Ask whether the losses of logged steps, up to this one, are numbers; no device waits.

        What one call asks is answered in it or, where a device is still at it, in a later one.
        """
        if self._kept.maxlen and (self._asked is None or self._answer()):
            self._asked = _Asked(step, logged)
            self._answer()

    def finish(self) -> None:
        """Wait for what was asked last."""
        if self._asked is not None:
            with suppress(RuntimeError):  # the device is lost: others tell of it
                self._asked.wait()
                self._answer()

    def _answer(self) -> bool:
        """Whether what was asked is known now."""
        asked = self._asked
        if asked is None or not asked.is_ready():
            return False
        self._asked = None
        if asked.is_finite():
            self._has_lost = False
            while self._kept and self._kept[0][0] <= asked.step:
                self._kept.popleft()
        else:
            self._tell()
        return True

    def _tell(self) -> None:
        for number, (step, losses) in enumerate(self._kept):
            bad = losses[~torch.isfinite(losses)]
            if bad.numel():
                if number == 0 and self._has_lost:
                    break  # one that is lost may have been the first
                self._log.write("nonfinite", step=step, loss=str(float(bad[0])))
                break
        self._kept = deque(maxlen=0)  # the first one is what counts


class _Asked:
    """A sum of losses on its way to the host."""

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
