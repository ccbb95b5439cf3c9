"""What the loop records about each step, at a cost of a few microseconds and no device sync."""

from __future__ import annotations

import time
from collections import deque
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from allranks.run.events import SCHEMA_VERSION, EventLog
from allranks.timing import timeline
from allranks.train.agreement import unrecorded
from allranks.train.data import Batch, Progress
from allranks.train.mesh import Mesh

MAX_KEPT, MAX_KEPT_LOSSES = 1024, 1 << 20  # micro-batches, and losses in them


class Meter:
    """Writes an event for every step; on rank 0 every `log_every`-th has the global loss.

    Losses stay on the device until the ranks' next exchange (see agreement.py), are then summed
    over the ranks in one call, and are written to the event log once they have arrived.
    """

    def __init__(self, log: EventLog, mesh: Mesh, *, log_every: int, last_step: int) -> None:
        self.log = log
        self.ranks = mesh.world
        self.is_heard = mesh.is_heard  # the losses of ranks that are heard add up to the mean
        self.log_every = log_every
        self.last_step = last_step
        self.step_seconds = 0.0  # sum over this attempt
        self._evaluation = 0.0  # seconds since the last step
        self._waiting: list[tuple[_LateLoss, Tensor]] = []
        self._waiting_step = 0  # the last of their steps
        self.own = OwnLosses(log)
        self._has_phases = timeline.current is not None
        self._timeline = timeline.take()

    def wants_loss(self, step: int) -> bool:
        return step % self.log_every == 0 or step == self.last_step

    def begin_step(self) -> None:
        """Start a step's clock here, because something else was done since the last step."""
        self._timeline.restart()

    def evaluated(self, seconds: float) -> None:
        """Note how long an evaluation took, which is not part of the next step."""
        self._evaluation += seconds

    def end_step(self, progress: Progress, batch: Batch, loss: Tensor | None) -> None:
        step = self._timeline.close()
        self._timeline.offset = progress.step - self._timeline.num_steps
        seconds = step.host_seconds
        self.step_seconds += seconds
        event: dict[str, Any] = {
            "v": SCHEMA_VERSION,
            "t": time.time(),
            "event": "step",
            "step": progress.step,
            "epoch": batch.epoch,
            "samples": batch.num_samples if self.is_heard else 0,
            "seconds": round(seconds, 7),
        }
        if self._evaluation:
            event["evaluation"], self._evaluation = round(self._evaluation, 7), 0.0
        if self._has_phases:
            event["phases"] = step
        if loss is not None:
            late = _LateLoss()
            self._waiting.append((late, loss if self.is_heard else torch.zeros_like(loss)))
            self._waiting_step = progress.step
            if self.ranks.rank == 0:
                event["loss"] = late
            if self.ranks.size == 1:
                self.reduce_losses()
        self.log.append(event)

    def reduce_losses(self) -> None:
        """Start to sum the losses since the last call. Every rank must call it; none waits."""
        if not self._waiting:
            return
        losses = torch.stack([loss for _, loss in self._waiting])
        self.own.check(self._waiting_step, losses)
        work = None
        if self.ranks.size > 1:
            with unrecorded():
                work = dist.reduce(losses, dst=0, group=self.ranks.group, async_op=True)
        if self.ranks.rank == 0:
            arrival = _Arrival(losses, work)
            for index, (late, _) in enumerate(self._waiting):
                late.arrival, late.index = arrival, index
        self._waiting.clear()

    def finish(self) -> None:
        """Call it after the last step."""
        self.own.finish()


class OwnLosses:
    """This rank's losses since the last step whose loss is known to be finite.

    One rank's nan or inf spreads to the mean over all ranks, and after the next update to every
    rank's loss. So each rank keeps its last losses, and searches them for the first that was not
    finite once a logged one is not.
    """

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self._kept: deque[tuple[int, Tensor]] = deque(maxlen=MAX_KEPT)
        self._has_dropped = False  # whether unchecked losses had to be dropped
        self._pending: tuple[int, _Arrival] | None = None  # the sum of the losses up to a step

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
            self._pending = step, _Arrival(logged.sum())  # finite if all of them are
            self._settle()

    def finish(self) -> None:
        """Wait for the last check."""
        if self._pending is not None:
            with suppress(RuntimeError):  # the device is lost, which others report
                self._pending[1].value()
                self._settle()

    def _settle(self) -> bool:
        """Act on the pending check; False if its result is not known yet."""
        if self._pending is None or not self._pending[1].ready():
            return False
        (checked, total), self._pending = self._pending, None
        if torch.isfinite(total.value()):
            self._has_dropped = False
            while self._kept and self._kept[0][0] <= checked:
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


class _Arrival:
    """Losses on their way to the host, once `work`, an exchange of them, is done."""

    def __init__(self, losses: Tensor, work: dist.Work | None = None) -> None:
        self._work = work
        self._event: torch.cuda.Event | None = None
        self._losses = losses
        if losses.is_cuda:
            if work is not None:
                work.wait()  # makes the stream wait, not the host
            self._losses = torch.empty(losses.shape, pin_memory=True)
            self._losses.copy_(losses, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def ready(self) -> bool:
        if self._event is not None:
            return bool(self._event.query())
        return self._work is None or self._work.is_completed()

    def value(self) -> Tensor:
        """The losses, on the host; waits for them."""
        if self._event is not None:
            self._event.synchronize()
        elif self._work is not None:
            self._work.wait()
        return self._losses


class _LateLoss:
    """A loss that is not known yet: an allranks.run.events.Late."""

    arrival: _Arrival | None = None
    index = 0

    def ready(self) -> bool:
        return self.arrival is not None and self.arrival.ready()

    def value(self) -> float | None:
        if self.arrival is None:  # this rank ended before the losses were reduced
            return None
        return float(self.arrival.value()[self.index])
