"""One rank's record of its steps: how long each took, where its time went, on how many samples."""

from __future__ import annotations

import functools
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from multiprocessing.util import Finalize
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from allranks.probe.rank_claim import claim_rank
from allranks.probe.samples import CountedStep, Fingerprints, SampleCounter
from allranks.run.events import EventLog, WhatIsLate, is_ready
from allranks.timing.timeline import Timeline

REELECT_AFTER = 10  # steps of another optimizer without one of the leader
EXIT_SECONDS = 5.0  # for a device to come to the end of the last steps
# The thread that writes holds Python's lock: the training gets it in between. Half a second's
# lines at once would hold up a step by milliseconds, and with it those of all other ranks.
LINES_AT_ONCE, BREATH_SECONDS = 10, 0.0002
MEET_WITHIN = 20  # steps; ranks that have not met by then train each for itself


class Recorder:
    """Takes what the hooks tell, and writes a step event for every optimizer step."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder = folder
        self.rank = rank  # as the launcher counts it; see `_open`
        self.step = 0
        self.timeline = Timeline()
        self.counter = SampleCounter(self.switch_off)
        self.fingerprints = Fingerprints()
        self.guarded = _Guard(self)
        self.device: Any = None  # the GPU that is trained on
        self.at_first_step: list[Callable[[Any], None]] = []  # called with the optimizer
        self.at_step: list[Callable[[int], None]] = []  # called after each step is recorded
        self.at_meeting: list[Callable[[], None]] = []  # called once ranks are known to have met
        self.leave: Callable[[], None] | None = None  # set when the script is to end here
        self._log: EventLog | None = None
        self._ended: deque[CountedStep] = deque()  # steps that are to be written
        self._taking = threading.Lock()
        self._leader = 0  # id of the optimizer whose steps are counted, while there is one
        self._end_of_leader: weakref.ref[Any] | None = None
        self._others: dict[int, int] = {}  # steps of each other one since its last
        self._claim: IO[bytes] | None = None  # held open: its lock keeps other processes out
        self.peers: bool | None = None  # whether there are any; unknown before ranks have met

    @property
    def is_on(self) -> bool:
        return self.timeline.is_on

    def has_peers(self) -> bool:
        """Whether this rank exchanges anything with others."""
        if self.peers is None:
            import torch.distributed as dist

            if not (dist.is_available() and dist.is_initialized()):
                if self.step >= MEET_WITHIN:
                    self.peers = False
                return False
            self.peers = dist.get_world_size() > 1
            if self.peers:
                for call in self.at_meeting:
                    call()
        return self.peers

    def stepped(self, optimizer: Any) -> None:
        """An optimizer has made a step; those of one of them are the steps of the training."""
        if id(optimizer) != self._leader and not self._takes_over(optimizer):
            return
        timeline = self.timeline
        step = timeline.num_steps + 1
        if not timeline.is_taken:
            timeline.end()
        self.step = step
        if step == 1:
            self._begin(optimizer)
        if self._others:
            self._others.clear()
        if self.at_step:
            for call in list(self.at_step):
                call(step)

    def _takes_over(self, optimizer: Any) -> bool:
        """Whether this optimizer's steps are those of the training from here on."""
        others = self._others.get(id(optimizer), 0) + 1
        self._others[id(optimizer)] = others
        if self._leader and others < REELECT_AFTER:
            return False
        leader = self._leader = id(optimizer)
        self._follow(optimizer)

        def gone(_: object) -> None:
            if self._leader == leader:
                self._leader = 0

        self._end_of_leader = weakref.ref(optimizer, gone)
        return True

    def _begin(self, optimizer: Any) -> None:
        """After the first step: what the script trains on is asked for now."""
        if not self.timeline.is_taken:
            log = self._open()
            self._take_steps()
            training = self.counter.training
            if training is not None and training.dataset_samples is not None:
                log.write("dataset", samples_per_epoch=training.dataset_samples)
        for call in self.at_first_step:
            call(optimizer)

    def _take_steps(self) -> None:
        with self._taking:
            self.timeline.follow_clock()
            for marks in self.timeline.take_steps():
                self._ended.append(CountedStep(marks, self.timeline.unix, self.counter))

    def _lines(self, late: WhatIsLate) -> Iterator[str]:
        """What is to be written: of steps that are over, and that the device is through with."""
        if not self.timeline.is_taken:  # else its loop takes them, and writes them itself
            self._take_steps()
        num_lines = 0
        while self._ended and (late != "hold" or is_ready(self._ended[0])):
            yield self._ended.popleft().line(late)
            num_lines += 1
            if late == "hold" and num_lines % LINES_AT_ONCE == 0:
                time.sleep(BREATH_SECONDS)
        if self._log is not None:
            for seen in self.fingerprints.take(self.counter.training):
                self._log.write("batch", **seen)

    def _follow(self, optimizer: Any) -> None:
        """The thread and the device of the optimizer are those of the training."""
        self.timeline.thread = threading.get_ident()
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if parameters and parameters[0].is_cuda:
            self.device = parameters[0].device
            self.timeline.record_event = functools.partial(record_cuda_event, self.device)

    def _open(self) -> EventLog:
        """The rank's own file. A script may start its ranks itself: then each knows its number."""
        if self._log is not None:
            return self._log
        if self.has_peers():
            import torch.distributed as dist

            self.rank = dist.get_rank()
        path = self.folder / f"rank-{self.rank}.jsonl"
        self._claim = claim_rank(path, self.rank)
        # Not atexit: a rank that the script has started with multiprocessing never comes to it.
        Finalize(None, self.flush, exitpriority=0)
        self._log = EventLog(path, self._lines)
        return self._log

    def forget(self) -> None:
        """In a forked process: what is recorded is its parent's to write."""
        self.timeline.is_on = False
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
        """Write everything; what a device that hangs never comes to is written without it."""
        if self._log is None:
            return
        self._log.flush("hold")
        deadline = time.monotonic() + EXIT_SECONDS
        while self._ended and time.monotonic() < deadline:
            time.sleep(0.01)
            self._log.flush("hold")
        self._log.flush("drop")

    def pause(self, paused: bool) -> None:
        """Ask no device anything from another thread, or do again."""
        if self._log is not None:
            self._log.pause(paused)

    def switch_off(self, error: BaseException) -> None:
        """Leave the script alone from here on; one line says so."""
        if self.is_on:
            self.timeline.is_on = False
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


def record_cuda_event(device: Any) -> Any:
    """On the stream that the device of the training is at; None while a graph is captured."""
    import torch

    try:
        if torch.cuda.is_current_stream_capturing():
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(device))
    except RuntimeError:  # the device is lost: the script is to hear of it from its own calls
        return None
    return event
