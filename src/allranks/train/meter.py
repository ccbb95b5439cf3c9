"""What the loop records about each step, at a cost of a few microseconds and no device sync."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from allranks.run.events import SCHEMA_VERSION, EventLog
from allranks.timing import timeline
from allranks.train.data import Batch, Progress
from allranks.train.own_losses import OwnLosses


class Meter:
    """Writes an event for every step; on rank 0 every `log_every`-th has the global loss.

    Losses stay on the device until the ranks' next exchange (see pulse.py), are then summed over
    the ranks in one call, and are written to the event log once they have arrived.
    """

    def __init__(self, log: EventLog, *, log_every: int, last_step: int) -> None:
        self.log = log
        self.log_every = log_every
        self.last_step = last_step
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.step_seconds = 0.0  # sum over this attempt
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

    def end_step(self, progress: Progress, batch: Batch, loss: Tensor | None) -> None:
        step = self._timeline.close()
        seconds = step.host_seconds
        self.step_seconds += seconds
        event: dict[str, Any] = {
            "v": SCHEMA_VERSION,
            "t": time.time(),
            "event": "step",
            "step": progress.step,
            "epoch": batch.epoch,
            "samples": batch.num_samples,
            "seconds": round(seconds, 7),
        }
        if self._has_phases:
            event["phases"] = step
        if loss is not None:
            late = _LateLoss()
            self._waiting.append((late, loss))
            self._waiting_step = progress.step
            if self.rank == 0:
                event["loss"] = late
            if self.world_size == 1:
                self.reduce_losses()
        self.log.append(event)

    def reduce_losses(self) -> None:
        """Start to sum the losses since the last call. Every rank must call it; none waits."""
        if not self._waiting:
            return
        losses = torch.stack([loss for _, loss in self._waiting])
        self.own.check(self._waiting_step, losses)
        work = dist.reduce(losses, dst=0, async_op=True) if self.world_size > 1 else None
        if self.rank == 0:
            arrival = _Arrival(losses, work)
            for index, (late, _) in enumerate(self._waiting):
                late.arrival, late.index = arrival, index
        self._waiting.clear()

    def finish(self) -> None:
        """Call it after the last step."""
        self.own.finish()


class _Arrival:
    """Losses on their way from all ranks to rank 0 and from its device to the host."""

    def __init__(self, losses: Tensor, work: dist.Work | None) -> None:
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

    def value(self, index: int) -> float:
        if self._event is not None:
            self._event.synchronize()
        elif self._work is not None:
            self._work.wait()
        return float(self._losses[index])


class _LateLoss:
    """A loss that is not known yet: an allranks.run.events.Late."""

    arrival: _Arrival | None = None
    index = 0

    def ready(self) -> bool:
        return self.arrival is not None and self.arrival.ready()

    def value(self) -> float | None:
        if self.arrival is None:  # this rank ended before the losses were reduced
            return None
        return self.arrival.value(self.index)
