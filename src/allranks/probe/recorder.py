"""Records one rank's steps: how long each took, where its time went, and its samples."""

from __future__ import annotations

import fcntl
import functools
import itertools
import os
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.util import Finalize
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from allranks.probe.fingerprints import Fingerprints
from allranks.probe.samples import CountedStep, SampleCounter
from allranks.run.events import EventLog, WhatIsLate, append_event, is_ready, read_events, to_json
from allranks.run.folder import TWICE, write_atomically
from allranks.run.record import MEASURED
from allranks.timing.timeline import DATA, END, Timeline

EARLY_STEPS = 8  # which show how a script trains
EXIT_SECONDS = 5.0  # for a device to finish the last steps
MOST_LOADERS = 8  # how many loaders' settings are written
MEET_WITHIN = 20  # steps; ranks that have not met by then train independently

STARTED_AS = "ALLRANKS_RANK"  # the rank that the launcher started, whatever that rank then starts
EARLY_BYTES = 1 << 16
MOST_PARENTS = 100


class Recorder:
    """Collects what the hooks report, and writes a step event for every optimizer step."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder = folder
        self.rank = rank  # as the launcher counts it; see `_open`
        self.step = 0
        self.timeline = Timeline()
        self.counter = SampleCounter(self.switch_off)
        self.fingerprints = Fingerprints()
        self.guarded = _Guard(self)
        self.device: Any = None  # the GPU used for training
        self.device_type = "cpu"  # of the trained parameters
        self.at_first_step: list[Callable[[Any], None]] = []  # called with the optimizer
        self.at_loading: list[Callable[[], None]] = []  # called when a loader starts
        self.at_step: list[Callable[[int], None]] = []  # called after each step is recorded
        self.at_writing: list[Callable[[], None]] = []  # called now and then by the writing thread
        self.at_meeting: list[Callable[[], None]] = []  # called once ranks are known to have met
        self.at_fork: list[Callable[[], None]] = []  # called in a forked process
        self.at_capture: list[Callable[[], None]] = []  # called before a CUDA graph is captured
        # Called with the graph that was captured; with None if it failed.
        self.after_capture: list[Callable[[Any], None]] = []
        self.leave: Callable[[], None] | None = None  # set when the script should end here
        # Called with the optimizer to see what its model is given.
        self.watch_model: Callable[[Any], None] | None = None
        self._log: EventLog | None = None
        self._ended: deque[CountedStep] = deque()  # steps to be written
        self._taking = threading.Lock()
        self._stepped: set[int] = set()  # ids of the optimizers that made the last step
        self._loaders: list[dict[str, Any]] = []  # the settings that were written
        self._is_alone = False  # whether one optimizer alone made the last two steps
        self._followed = 0  # id of the optimizer that `_follow` was called with
        self._claim: IO[bytes] | None = None  # held open: its lock keeps other processes out
        self.is_measured = False  # by a benchmark, from now on
        self.peers: bool | None = None  # whether there are other ranks; None until they meet

    @property
    def is_on(self) -> bool:
        return self.timeline.is_on

    def has_peers(self) -> bool:
        """Whether this rank exchanges data with other ranks."""
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
        """An optimizer has made a step. Several that take turns make one step together."""
        number = id(optimizer)
        if self._stepped and number not in self._stepped and not self._takes_over():
            self._stepped.add(number)
            self._is_alone = False
            self.counter.has_models = True
            return
        self._is_alone = self._stepped == {number}
        self._stepped = {number}
        if number != self._followed:
            self.counter.has_models |= self._followed != 0
            self._followed = number
            self._follow(optimizer)
        timeline = self.timeline
        step = timeline.num_steps + 1
        if not timeline.is_taken:
            timeline.end()
        self.step = step
        if step == 1:
            self._begin(optimizer)
        elif step <= EARLY_STEPS and not timeline.is_taken:
            self._take_steps()
        if self.counter.wants_model and self.watch_model is not None:
            watch, self.watch_model = self.watch_model, None
            watch(optimizer)
        if self.at_step:
            for call in list(self.at_step):
                call(step)

    def _takes_over(self) -> bool:
        """Whether an optimizer follows one that was alone: with a batch of its own it does."""
        if not self._is_alone:
            return False
        labels = (label for label, *_ in reversed(self.timeline.marks))
        return any(label == DATA for label in itertools.takewhile(lambda one: one != END, labels))

    def _begin(self, optimizer: Any) -> None:
        """After the first step, record what the script trains on."""
        if not self.timeline.is_taken:
            log = self._open()
            self._take_steps()
            training = self.counter.training
            if training is not None and training.pass_samples and self.counter.counted == MEASURED:
                log.write("dataset", rank_samples=training.pass_samples)
        for call in self.at_first_step:
            call(optimizer)

    def _take_steps(self) -> None:
        with self._taking:
            self.timeline.follow_clock()
            for marks in self.timeline.take_steps():
                is_traced = marks[-1][3] in self.timeline.traced
                self._ended.append(CountedStep(marks, self.timeline.unix, self.counter, is_traced))

    def _lines(self, late: WhatIsLate) -> Iterator[str]:
        """Lines of steps that are over and that the device has finished."""
        for call in self.at_writing if late == "hold" else ():
            call()
        if not self.timeline.is_taken:  # otherwise the task's loop writes the steps itself
            self._take_steps()
        while self._ended and (late != "hold" or is_ready(self._ended[0])):
            yield self._ended.popleft().line(late)
        if self._log is not None:
            for seen in self.fingerprints.take(self.counter.training):
                self._log.write("batch", **seen)
            self._write_loader(self._log)
            self._write_counts(self._log)

    def _write_loader(self, log: EventLog) -> None:
        """How the training loader was made, once for each: scripts may make one in every epoch."""
        training = self.counter.training
        if training is None or training.settings in self._loaders:
            return
        if training.settings and len(self._loaders) < MOST_LOADERS:
            self._loaders.append(training.settings)
            log.write("loader", **training.settings)

    def _write_counts(self, log: EventLog) -> None:
        counter = self.counter
        ended, counter.ended_epochs = counter.ended_epochs, []
        changes, counter.changes = counter.changes, []
        for epoch in ended:
            log.write("epoch", **epoch)
        for known in changes:
            why = {} if known.why is None else {"why": known.why}
            log.write("counted", samples=known.samples, epochs=known.epochs, **why)

    def _finish(self) -> None:
        """Complete the epoch that ended after the last step, if one did."""
        self._take_steps()
        with self._taking:
            marks = list(self.timeline.marks)
            self.counter.finish([note for *_, note in marks if note.__class__ is tuple])

    def _follow(self, optimizer: Any) -> None:
        """Take the training's thread and device from this optimizer."""
        if self.timeline.thread != threading.get_ident():
            self.timeline.thread = threading.get_ident()
            self.counter.elsewhere.clear()
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if parameters:
            self.device_type = parameters[0].device.type
        if self.device_type == "cuda":
            self.device = parameters[0].device
            self.timeline.record_event = functools.partial(record_cuda_event, self.device.index)

    def _open(self) -> EventLog:
        """The rank's event log. The rank is torch's, since a script may start ranks itself."""
        if self._log is not None:
            return self._log
        if self.has_peers():
            import torch.distributed as dist

            self.rank = dist.get_rank()
        path = self.folder / f"rank-{self.rank}.jsonl"
        self._claim = claim_rank(path, self.rank)
        # Not atexit, which does not run in ranks that the script starts with multiprocessing.
        Finalize(None, self.flush, exitpriority=0)
        self._log = EventLog(path, self._lines)
        return self._log

    def forget(self) -> None:
        """Record nothing more in a forked process: the parent writes what was recorded."""
        self.timeline.is_on = False
        self._log = None
        if self._claim is not None:
            self._claim.close()
        for call in self.at_fork:
            call()

    def write(self, event: str, **fields: Any) -> None:
        """Write an event of another part of the probe, once the script has made a step."""
        if self.step > 0:
            log = self._open()
            # A task writes its end itself, after which nothing may follow.
            (log.write_past if self.timeline.is_taken else log.write)(event, **fields)

    def write_past(self, event: str, **fields: Any) -> None:
        """Write an event immediately, even before earlier steps that are not complete yet."""
        if self.step > 0:
            self._open().write_past(event, **fields)

    def flush(self) -> None:
        """Write everything; steps that a hanging device never finishes lack their times."""
        if self._log is None:
            return
        if not self.timeline.is_taken:
            self._finish()
        self._log.flush("hold")
        deadline = time.monotonic() + EXIT_SECONDS
        while self._ended and time.monotonic() < deadline:
            time.sleep(0.01)
            self._log.flush("hold")
        self._log.flush("drop")

    def capture_begins(self) -> None:
        """A CUDA graph is about to be captured: no other thread may query the device."""
        self._pause(True)
        for call in self.at_capture:
            call()

    def capture_ended(self, graph: Any) -> None:
        self._pause(False)
        for call in self.after_capture:
            call(graph)

    def _pause(self, paused: bool) -> None:
        """Stop querying devices from another thread, or resume."""
        if self._log is not None:
            self._log.pause(paused)

    def switch_off(self, error: BaseException) -> None:
        """Leave the script alone from now on, and say so in one line."""
        if self.is_on:
            self.timeline.is_on = False
            what = f"{type(error).__name__}: {error}".splitlines()[0]
            print(f"allranks: the probe is off: {what}", file=sys.stderr, flush=True)


class _Guard:
    """`with recorder.guarded:` lets no exception out. Created once, because it is used often."""

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


def record_cuda_event(device: int) -> Any:
    """An event on the training device's current stream; None while a graph is captured.

    By the device's number: torch takes longer to find it from a torch.device than to record.
    """
    import torch

    try:
        if torch.cuda.is_current_stream_capturing():
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(device))
    except RuntimeError:  # the device is lost: the script's own calls will report it
        return None
    return event


def claim_rank(path: Path, rank: int) -> IO[bytes]:
    """Open and lock the rank's file, to keep other processes out for as long as it is open.

    Raises RuntimeError if another process has recorded the rank: a second one is a second training.
    The launcher then ends the run, unless that process started this one, say for an evaluation that
    trains something small.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("ab")
    own = {"pid": os.getpid(), "host": socket.gethostname(), "of": os.environ.get(STARTED_AS)}
    is_free = True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        is_free = False
    except OSError:
        pass  # a disk without locks
    if is_free:
        append_event(path, "recorder", **own, threads=torch_threads())
    before = [*read_events(path, EARLY_BYTES, kind="recorder")]
    others = [one for one in before if (one["pid"], one["host"]) != (own["pid"], own["host"])]
    # A script may train several things in sequence, each in its own process.
    if is_free and all(one["of"] == own["of"] for one in others):
        return file
    file.close()
    if not any(one["host"] == own["host"] and one["pid"] in ancestors() for one in others):
        write_atomically(path.parent / TWICE, to_json({"rank": rank, **own}))
    raise RuntimeError(f"another process is already recording rank {rank}")


def torch_threads() -> int:
    """Threads that torch computes with on a CPU."""
    import torch

    return torch.get_num_threads()


def ancestors() -> list[int]:
    """The ids of this process's ancestors, as far as the system shows them."""
    found = [os.getppid()]
    with suppress(OSError, ValueError, IndexError):
        while found[-1] > 1 and len(found) < MOST_PARENTS:
            stat = Path(f"/proc/{found[-1]}/stat").read_text()
            found.append(int(stat.rpartition(")")[2].split()[1]))
    return found
