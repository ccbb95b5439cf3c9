"""Traces a few steps of every script: what its device does, and what its host does meanwhile.

All ranks trace the same steps. What a trace shows is written as one event, and the trace itself is
not kept. The traced steps are slower, so their events say that they were traced. An error here ends
tracing with one line in the rank's log, and affects nothing else.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import json
import math
import os
import statistics
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.util import Finalize
from time import perf_counter
from typing import Any

from allranks.probe.compilers import uncompiled
from allranks.probe.graphs import Graphs, in_tf32
from allranks.probe.profilers import Profilers, exported
from allranks.probe.recorder import Recorder
from allranks.probe.sampler import Sampler, folder_of_torch
from allranks.run.folder import write_atomically
from allranks.timing.flops import flops_of
from allranks.timing.timeline import AFTER, AROUND, BACKWARD, DATA, WAIT, Mark
from allranks.timing.trace import STEP_MARK, Interval, Trace, trace_of
from allranks.timing.traced_steps import reduce_trace

VARIABLE = "ALLRANKS_TRACE"  # off: no traces
DECIDE_AFTER = 8  # steps: then rank 0 decides for all ranks how many are traced
START_AFTER = 11  # steps, in which memory is allocated, kernels are chosen and models compiled
# How many seconds of steps are traced: where one operator follows the other without a gap, reading
# more would take over a second.
TRACED_SECONDS, MOST_STEPS = 0.08, 12
LEAST_STEPS = 2  # if a trace is interrupted after fewer, it is made again
MAX_ATTEMPTS = 3
# What takes this many times as long as a usual step, plus this many seconds, is an evaluation or a
# checkpoint, of which a profiler might record gigabytes.
PAUSE, PAUSE_SECONDS = 5, 0.1
LONGEST_PAUSE = 2.0  # seconds that are worth reading
# Not meanwhile: what other threads exchange must not end after the profiler.
EXCHANGING = (BACKWARD, WAIT, AROUND)
MAX_TRACE_BYTES = 1 << 26  # reading more takes seconds
# A later trace is made whenever the training has lasted this many times as long as at the last one,
# provided that all later ones together take less than this share of it.
LATER, LATER_SHARE = 2, 0.005
# How long in advance rank 0 announces a trace to ranks on its own machine, and to others, which see
# its files late.
AHEAD_SECONDS, AHEAD_ELSEWHERE_SECONDS = 5.0, 90.0
ANNOUNCED = ".next-trace.json"  # in the attempt's folder
GRAPHS = "a CUDA graph was captured during every trace"
INTERRUPTED = "every trace was interrupted by something like an evaluation or a checkpoint"


class Session:
    """One trace of some steps, from its start until it is reduced to an event."""

    def __init__(
        self,
        recorder: Recorder,
        profilers: Profilers,
        graphs: Graphs,
        usual_seconds: float | None = None,
        *,
        is_last: bool = True,
    ) -> None:
        self.recorder = recorder
        self.profilers = profilers
        self.graphs = graphs
        self.usual_seconds = usual_seconds  # of a step; None: a trace may take any time
        self.is_last = is_last  # no other follows even if this one is interrupted
        self.ends: dict[int, float] = {}  # of the traced steps
        self.made: Any = None  # what has been traced, once it has ended
        self.is_too_large = False  # whether something long, such as compiling, is in it
        self.is_before_graph = False  # whether it ended because a CUDA graph was captured
        self._began = 0.0
        self._start_seconds = 0.0
        self._sampler = Sampler(self._look)

    @property
    def num_steps(self) -> int:
        """How many steps were traced; the first end is that of the step before them."""
        return len(self.ends) - 1

    def start(
        self, step: int, interrupted: Callable[[str], None], *, at_once: bool = False
    ) -> None:
        """Trace from here on. `step` has just ended, or is about to.

        `at_once`: the next step counts, although the start may slow it a bit.
        """
        self._began = perf_counter()
        timeline = self.recorder.timeline
        timeline.kept = []
        timeline.traced.update((step, step + 1) if timeline.is_taken else (step + 1,))
        self.profilers.interrupted = interrupted
        self.profilers.paused = self._end_before_graph
        self.profilers.start()
        self.graphs.follow()
        self._sampler.start()
        self._start_seconds = perf_counter() - self._began
        if at_once:
            self.end_step(step)

    def end_step(self, step: int) -> None:
        """Mark the end of a step."""
        import torch

        self.recorder.timeline.traced.add(step + 1)
        if self.made is None:
            with torch.profiler.record_function(f"{STEP_MARK}{step}"):
                self.ends[step] = perf_counter()

    def end(self, *, waits: bool = True) -> None:
        """Stop: its steps are over, or something has come in between."""
        is_enough = self.is_last or self.num_steps >= LEAST_STEPS
        self.stop(waits=waits, unloads=is_enough)

    def stop(self, *, waits: bool = True, unloads: bool = False) -> None:
        """Stop whatever is running. What runs later is not this trace."""
        self._sampler.stop()
        self.graphs.unfollow()
        if self.made is None:
            self.made = self.profilers.stop(waits=waits, unloads=unloads)

    def _end_before_graph(self) -> None:
        self.is_before_graph = True
        self.end(waits=False)

    def _look(self, now: float) -> None:
        """Stop if a step takes too long. Called from a signal handler, so it does nothing else."""
        usual, last = self.usual_seconds, next(reversed(self.ends.values()), self._began)
        if usual is None or now - last <= PAUSE * usual + PAUSE_SECONDS:
            return
        if self.recorder.timeline.label not in EXCHANGING and not is_within_torch():
            self.is_too_large = now - last > LONGEST_PAUSE
            self.end(waits=False)

    def reduce(self, trace: Trace) -> dict[str, Any]:
        """The fields of the trace's event."""
        steps = sorted(self.ends)
        offset = statistics.median(begin - self.ends[step] for step, begin in trace.marks)
        timeline = self.recorder.timeline
        away = waits([*(timeline.kept or ()), *timeline.marks], offset)
        fields = reduce_trace(trace, away, self._sampler.samples(offset))
        counted = flops_of(trace, in_tf32() if trace.device else (), self.graphs.flops)
        if counted is not None and counted.model:
            fields |= {"flops": dict(counted.model), "recomputed": counted.recomputed}
        first, last = steps[1] + timeline.offset, steps[-1] + timeline.offset
        return {"first": first, "last": last, "cost": round(self._cost(), 6), **fields}

    def _cost(self) -> float:
        """What this trace has cost so far: starting it, slower steps, reading it."""
        ended = max(self.ends.values())
        traced = ended - self._began - self._start_seconds
        slower = traced - len(self.ends) * (self.usual_seconds or 0.0)
        return self._start_seconds + max(0.0, slower) + perf_counter() - ended

    def close(self) -> None:
        """Forget everything."""
        self.stop()
        self.profilers.settle()
        self.profilers.interrupted = self.profilers.paused = None
        self.made = None
        self.recorder.timeline.kept = None


class Tracer:
    """Traces steps of this rank."""

    def __init__(self, recorder: Recorder, profilers: Profilers, *, once: bool = False) -> None:
        self.recorder = recorder
        self.profilers = profilers
        self.graphs = Graphs(profilers)
        self._once = once
        self._began = 0.0
        self._traced_after = 0.0  # seconds of training: the last trace
        self._cost, self._later_cost = 0.0, 0.0  # of the last trace; of all after the first
        self._to_announce: str | None = None
        self._heard = ""
        self._seconds: deque[float] = deque(maxlen=8)  # of the last steps that were not traced
        self._last_end = 0.0
        self._start_after: int | None = START_AFTER
        self._attempts = 0
        self._num_steps = 0  # to be traced
        self._session: Session | None = None
        recorder.at_step.append(self.at_step)
        if not once:
            recorder.at_writing.append(self._tell_or_hear)
        # Before the recorder's own finaliser; a running profiler would crash the process's exit.
        Finalize(None, self.finish, exitpriority=1)

    def at_step(self, step: int) -> None:
        try:
            if self._session is None:
                self._wait(step)
            else:
                with uncompiled():
                    self._trace(step, self._session)
        except Exception as error:
            self.give_up(f"tracing failed: {type(error).__name__}: {error}".splitlines()[0])

    def finish(self) -> None:
        """The script is ending."""
        if self._session is not None:
            self._session.stop()

    def _wait(self, step: int) -> None:
        now = perf_counter()
        self._began = self._began or now
        if self._last_end and step not in self.recorder.timeline.traced:
            self._seconds.append(now - self._last_end)
        self._last_end = now
        if self._start_after is None:
            if now - self._began >= LATER * self._traced_after:
                self._plan(step, now - self._began)
        elif step >= self._start_after:
            is_followed = step + 1 in self.recorder.timeline.traced  # for lines that keep memory
            if is_followed or self.profilers.is_capturing:
                return
            with uncompiled():
                self._start(step)
        elif step == DECIDE_AFTER and self.recorder.has_peers() and self.recorder.rank == 0:
            self._num_steps = num_steps(statistics.median(self._seconds))
            self._to_announce = f"{START_AFTER} {self._num_steps}"
            self._tell_or_hear()

    def _plan(self, step: int, trained: float) -> None:
        """Decide on a later trace, if this rank is the one that does."""
        has_peers = self.recorder.has_peers()
        if has_peers and self.recorder.rank > 0:
            return
        if self._later_cost + self._cost > LATER_SHARE * trained:
            return
        self._start_after = step + 1
        if has_peers:
            is_here = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
            ahead = AHEAD_SECONDS if is_here else AHEAD_ELSEWHERE_SECONDS
            self._start_after += math.ceil(ahead / statistics.median(self._seconds))
            self._to_announce = f"{self._start_after} {self._num_steps}"

    def _tell_or_hear(self) -> None:
        """Announce the next trace, or learn of it. Mostly by the writing thread: disks are slow."""
        path = self.recorder.folder / ANNOUNCED
        with suppress(Exception):
            if self._to_announce is not None:
                text, self._to_announce = self._to_announce, None
                write_atomically(path, text)
            elif self.recorder.rank > 0 and self.recorder.peers and path.exists():
                text = path.read_text()
                if text != self._heard:
                    self._heard = text
                    self._announced(*map(int, text.split()))

    def _announced(self, start_after: int, num_steps: int) -> None:
        self._num_steps = num_steps
        if self.recorder.step <= start_after:
            self._start_after = start_after
        else:  # too late, but the others' traces slow this rank's steps too
            last = start_after + num_steps + 2
            self.recorder.timeline.traced.update(range(start_after + 1, last + 1))

    def _start(self, step: int) -> None:
        why = self.profilers.why_not()
        if self.recorder.device_type not in ("cpu", "cuda"):
            why = f"only CPUs and CUDA devices are traced, not {self.recorder.device_type}"
        if self.recorder.is_measured:
            why = "a benchmark measures these steps"
        if why is not None:
            self.give_up(why)
            return
        usual = statistics.median(self._seconds)
        if not self._num_steps and self.recorder.has_peers():
            self._tell_or_hear()
        self._num_steps = self._num_steps or num_steps(usual)
        self._attempts += 1
        is_last = self._attempts >= MAX_ATTEMPTS
        self._session = Session(self.recorder, self.profilers, self.graphs, usual, is_last=is_last)
        # At once, unless a GPU may still be working on the step before.
        self._session.start(step, self.give_up, at_once=self.recorder.device is None)

    def _trace(self, step: int, session: Session) -> None:
        session.end_step(step)
        if session.made is None and session.num_steps < self._num_steps:
            return
        session.end()
        if session.is_before_graph:  # the steps that it replays are not like these
            self._try_again(step, GRAPHS)
            return
        if session.num_steps < LEAST_STEPS or session.is_too_large:
            self._try_again(step, INTERRUPTED)
            return
        collects = gc.isenabled()
        gc.disable()  # it would go through all of torch's objects again and again
        try:
            fields = session.reduce(self._read(session.made))
        finally:
            if collects:
                gc.enable()
        self._rest()
        give_back_memory()
        self.recorder.write("trace", **fields)
        self._cost = fields["cost"]
        self._later_cost += self._cost if self._traced_after else 0.0
        self._traced_after = perf_counter() - self._began
        if self._is_last():
            self.recorder.at_step.remove(self.at_step)
            self.graphs.close()
            with suppress(ValueError):
                self.recorder.at_writing.remove(self._tell_or_hear)

    def _is_last(self) -> bool:
        """Whether no other trace follows this one."""
        # On a GPU, CUPTI would have to be attached again, which is not known to be safe.
        return self._once or self.recorder.device is not None

    def _try_again(self, step: int, why: str) -> None:
        self._rest()
        if self._traced_after:
            self._traced_after = perf_counter() - self._began
        elif self._attempts < MAX_ATTEMPTS:
            self._start_after = step + 1
        else:
            self.give_up(why)

    def _read(self, made: Any) -> Trace:
        with exported(made) as file:
            size = os.fstat(file.fileno()).st_size
            if size > MAX_TRACE_BYTES:
                raise RuntimeError(f"the trace of {size >> 20} MiB is too large")
            trace = trace_of(json.loads(file.read()), self.recorder.rank)
        if trace is None:
            raise RuntimeError("the trace has no steps")
        if trace.is_blind or (self.recorder.device is not None and not trace.device):
            raise RuntimeError("the GPU's driver does not let this user trace it")
        return trace

    def give_up(self, problem: str) -> None:
        """Trace no more; if there was no trace yet, an event says why."""
        self._rest()
        self.graphs.close()
        if self.at_step in self.recorder.at_step:
            self.recorder.at_step.remove(self.at_step)
        if not self._traced_after:
            self.recorder.write("trace", problem=problem)
        if problem.startswith("tracing failed"):
            print(f"allranks: {problem}", file=sys.stderr, flush=True)

    def _rest(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None
        self._start_after, self._last_end = None, 0.0


def is_within_torch() -> bool:
    """Whether torch is at work: its profiler must not stop in the middle of noting an operator.

    Compilers, for example, run Python code while an operator's inputs are noted.
    """
    folder, frame = folder_of_torch(), sys._getframe()
    while not frame.f_code.co_filename.startswith(folder):
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return True


def num_steps(seconds: float) -> int:
    """How many steps to trace if each takes this many seconds."""
    return max(LEAST_STEPS, min(MOST_STEPS, round(TRACED_SECONDS / max(seconds, 1e-6))))


def give_back_memory() -> None:
    """Return to the system what reading a trace has used: it would hide memory that grows."""
    with suppress(OSError, AttributeError):  # only in glibc
        ctypes.CDLL(None).malloc_trim(0)


def waits(marks: list[Mark], offset: float) -> list[Interval]:
    """When the rank waited for its data or for other ranks, in the trace's clock."""
    found = []
    for (label, begin, *_), (following, end, *_) in itertools.pairwise(marks):
        if label in (DATA, WAIT, AROUND) or (label == AFTER and following in (WAIT, AROUND)):
            found.append((begin + offset, end + offset))
    return found
