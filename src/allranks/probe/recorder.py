"""One rank's record of its steps: how long each took, where its time went, on how many samples."""

from __future__ import annotations

import os
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from allranks.events import SCHEMA_VERSION, EventLog
from allranks.probe.samples import SampleCounter
from allranks.timeline import Timeline

REELECT_AFTER = 10  # steps of other optimizers without one of the leader


class Recorder:
    """Takes what the hooks tell, and writes a step event for every optimizer step."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.is_on = True
        self.step = 0
        self.timeline = Timeline()
        self.counter = SampleCounter()
        self.guarded = _Guard(self)
        self.at_step: list[Callable[[int], None]] = []  # called after each step is recorded
        self.leave: Callable[[], None] | None = None  # set when the script is to end here
        self._log: EventLog | None = None
        self._leader: weakref.ref[Any] | None = None  # the optimizer whose steps are counted
        self._others = 0  # steps of other optimizers since its last one
        self._has_peers = False
        self._has_looked = False  # for a model, in a script without a loader

    def has_peers(self) -> bool:
        """Whether this rank exchanges anything with others."""
        if not self._has_peers:
            import torch.distributed as dist

            ready = dist.is_available() and dist.is_initialized()
            self._has_peers = ready and dist.get_world_size() > 1
        return self._has_peers

    def needs_model(self, optimizer: Any) -> bool:
        """Whether the first step is over and no loader has given a batch for it."""
        if self._has_looked:
            return False
        self._has_looked = True
        return self.counter.loader is None and not self.timeline.is_taken

    def stepped(self, optimizer: Any) -> None:
        """An optimizer has made a step; those of one of them are the steps of the training."""
        leader = self._leader() if self._leader is not None else None
        if leader is not optimizer:
            self._others += 1
            if leader is not None and self._others < REELECT_AFTER:
                return
            self._leader = weakref.ref(optimizer)
            self._follow(optimizer)
        self._others = 0
        self.step = self.timeline.num_steps + 1
        if not self.timeline.is_taken:
            self._write_step()
        for call in list(self.at_step):
            call(self.step)

    def _write_step(self) -> None:
        event: dict[str, Any] = {
            "v": SCHEMA_VERSION,
            "t": time.time(),
            "event": "step",
            "step": self.step,
            "phases": self.timeline.close(),
        }
        loader = self.counter.loader
        if loader is not None:
            event["epoch"] = loader.epoch
        event["samples"] = self.counter.take()
        self._write(event)

    def leave_if_done(self) -> None:
        """End the script here, outside of every guard, if that was asked for."""
        if self.leave is not None:
            self.leave()

    def _follow(self, optimizer: Any) -> None:
        """The thread and the device of the optimizer are those of the training."""
        import threading

        self.timeline.thread = threading.get_ident()
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if parameters and parameters[0].is_cuda:
            self.timeline.record_event = record_cuda_event

    def _write(self, event: dict[str, Any]) -> None:
        log = self._open()
        for seen in self.counter.seen:
            log.write("batch", **seen)
        self.counter.seen.clear()
        log.append(event)

    def _open(self) -> EventLog:
        """Made late: most processes that import torch never make a step."""
        if self._log is None:
            self._log = EventLog(self.path)
        return self._log

    def write(self, event: str, **fields: Any) -> None:
        """An event of another part of the probe; only once the script has made a step."""
        if self.step > 0:
            self._open().write(event, **fields)

    def flush(self) -> None:
        if self._log is not None:
            self._log.flush("wait")

    def switch_off(self, error: BaseException) -> None:
        """Leave the script alone from here on; one line says so."""
        if self.is_on:
            self.is_on = False
            what = f"{type(error).__name__}: {error}".splitlines()[0]
            print(f"allranks: the probe is off: {what}", file=sys.stderr, flush=True)


class _Guard:
    """`with recorder.guarded:` nothing that fails inside gets out. Made once: it is used often."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if error is None or not isinstance(error, Exception):
            return False
        self._recorder.switch_off(error)
        return True


def record_cuda_event() -> Any:
    import torch

    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def is_rank(env: os._Environ[str]) -> bool:
    """Whether this process is a rank itself, and not a worker or a launcher that it started."""
    return "RANK" in env and "ALLRANKS_RUN_DIR" in env
