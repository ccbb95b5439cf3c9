"""One rank's record of its steps: how long each took, where its time went, on how many samples."""

from __future__ import annotations

import fcntl
import sys
import time
import weakref
from collections.abc import Callable
from multiprocessing.util import Finalize
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from allranks.events import SCHEMA_VERSION, EventLog
from allranks.probe.samples import SampleCounter
from allranks.timeline import Timeline

REELECT_AFTER = 10  # steps of another optimizer without one of the leader
MEET_WITHIN = 20  # steps; ranks that have not met by then train each for itself


class Recorder:
    """Takes what the hooks tell, and writes a step event for every optimizer step."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder = folder
        self.rank = rank  # as the launcher counts it; see `_open`
        self.is_on = True
        self.step = 0
        self.timeline = Timeline()
        self.counter = SampleCounter()
        self.guarded = _Guard(self)
        self.at_step: list[Callable[[int], None]] = []  # called after each step is recorded
        self.at_meeting: list[Callable[[], None]] = []  # called once ranks are known to have met
        self.leave: Callable[[], None] | None = None  # set when the script is to end here
        self._log: EventLog | None = None
        self._leader: weakref.ref[Any] | None = None  # the optimizer whose steps are counted
        self._others: dict[int, int] = {}  # steps of each other one since its last
        self._claim: IO[bytes] | None = None  # held open: its lock keeps other processes out
        self._has_peers: bool | None = None  # unknown before ranks have met

    def has_peers(self) -> bool:
        """Whether this rank exchanges anything with others."""
        if self._has_peers is None:
            import torch.distributed as dist

            if not (dist.is_available() and dist.is_initialized()):
                if self.step >= MEET_WITHIN:
                    self._has_peers = False
                return False
            self._has_peers = dist.get_world_size() > 1
            if self._has_peers:
                for call in self.at_meeting:
                    call()
        return self._has_peers

    def stepped(self, optimizer: Any) -> None:
        """An optimizer has made a step; those of one of them are the steps of the training."""
        leader = self._leader() if self._leader is not None else None
        if leader is not optimizer:
            others = self._others.get(id(optimizer), 0) + 1
            self._others[id(optimizer)] = others
            if leader is not None and others < REELECT_AFTER:
                return
            self._leader = weakref.ref(optimizer)
            self._follow(optimizer)
        self._others.clear()
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
        }
        if self.counter.training is not None:
            event["epoch"] = self.counter.training.epoch
        event["samples"] = self.counter.take()
        log = self._open()
        if self.counter.seen:
            for seen in self.counter.seen:
                log.write("batch", **seen)
            self.counter.seen.clear()
        # Last of all: what the probe itself takes is no part of the step to come.
        event["phases"] = self.timeline.close()
        log.append(event)

    def _follow(self, optimizer: Any) -> None:
        """The thread and the device of the optimizer are those of the training."""
        import threading

        self.timeline.thread = threading.get_ident()
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if parameters and parameters[0].is_cuda:
            self.timeline.record_event = record_cuda_event

    def _open(self) -> EventLog:
        """The rank's own file. A script may start its ranks itself: then each knows its number."""
        if self._log is not None:
            return self._log
        if self.has_peers():
            import torch.distributed as dist

            self.rank = dist.get_rank()
        path = self.folder / f"rank-{self.rank}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        self._claim = path.open("ab")
        try:
            fcntl.flock(self._claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RuntimeError(f"another process already records rank {self.rank}") from None
        except OSError:
            pass  # a disk without locks
        # Not atexit: a rank that the script has started with multiprocessing never comes to it.
        Finalize(None, self.flush, exitpriority=0)
        self._log = EventLog(path)
        return self._log

    def forget(self) -> None:
        """In a forked process: what is recorded is its parent's to write."""
        self.is_on = False
        self._log = None
        if self._claim is not None:
            self._claim.close()

    def write(self, event: str, **fields: Any) -> None:
        """An event of another part of the probe; only once the script has made a step."""
        if self.step > 0:
            self._open().write(event, **fields)

    def write_past(self, event: str, **fields: Any) -> None:
        """The same at once, although a step before it may still have to be waited for."""
        if self.step > 0:
            self._open().write_past(event, **fields)

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
