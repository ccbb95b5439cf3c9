"""Traces a few steps of every script: what its device does, and what its host does meanwhile.

All ranks trace the same steps. What a trace shows is written as one event, and the trace itself is
not kept. The traced steps are slower, so their events say that they were traced. An error here ends
tracing with one line in the rank's log, and affects nothing else.
"""

from __future__ import annotations

import gc
import itertools
import statistics
import sys
import tempfile
from collections import deque
from collections.abc import Callable
from multiprocessing.util import Finalize
from pathlib import Path
from time import perf_counter
from typing import Any

from allranks.probe.compilers import uncompiled
from allranks.probe.profilers import Profilers
from allranks.probe.recorder import Recorder
from allranks.probe.sampler import Sampler, folder_of_torch
from allranks.timing.flops import flops_of
from allranks.timing.timeline import AFTER, AROUND, DATA, WAIT, Mark
from allranks.timing.trace import STEP_MARK, Interval, read_trace
from allranks.timing.traced_steps import reduce_trace

VARIABLE = "ALLRANKS_TRACE"  # off: no traces
START_AFTER = 11  # steps, in which memory is allocated, kernels are chosen and models compiled
# So many steps are traced, by how long they take; all ranks must find the same.
SHORT_STEP_SECONDS, NUM_SHORT, NUM_LONG = 0.025, 12, 3
MAX_TRACE_BYTES = 1 << 26  # to read more takes seconds


class Tracer:
    """Traces steps of this rank."""

    def __init__(self, recorder: Recorder, profilers: Profilers) -> None:
        self.recorder = recorder
        self.profilers = profilers
        self.is_first_done = False  # or given up
        self._seconds: deque[float] = deque(maxlen=8)  # of the last steps that were not traced
        self._last_end = 0.0
        self._began = 0.0
        self._num_steps = 0  # to be traced
        self._marks: dict[int, float] = {}  # ends of traced steps
        self._sampler: Sampler | None = None
        self._next: Callable[[int], None] = self._wait
        recorder.at_step.append(self.at_step)
        # Before the recorder's own finaliser; a running profiler would crash the process's exit.
        Finalize(None, self.stop, exitpriority=1)

    def at_step(self, step: int) -> None:
        try:
            with uncompiled():
                self._next(step)
        except Exception as error:
            self._give_up(f"tracing failed: {type(error).__name__}: {error}".splitlines()[0])
            print(f"allranks: tracing is off: {error!r}", file=sys.stderr, flush=True)

    def _wait(self, step: int) -> None:
        now = perf_counter()
        if step > 1:
            self._seconds.append(now - self._last_end)
        self._last_end = now
        if step >= START_AFTER:
            self._start(step)

    def _start(self, step: int) -> None:
        why = self.profilers.why_not()
        if self.recorder.device_type not in ("cpu", "cuda"):
            why = f"only CPUs and CUDA devices are traced, not {self.recorder.device_type}"
        if self.recorder.is_measured:
            why = "a benchmark measures these steps"
        if why is not None:
            self._give_up(why)
            return
        self._began = perf_counter()
        usual = statistics.median(self._seconds)
        self._num_steps = NUM_SHORT if usual < SHORT_STEP_SECONDS else NUM_LONG
        self._marks.clear()
        timeline = self.recorder.timeline
        timeline.traced.update((step, step + 1) if timeline.is_taken else (step + 1,))
        timeline.kept = []
        self.profilers.interrupted = self._interrupted
        self.profilers.start()
        self._sampler = Sampler(folder_of_torch())
        self._sampler.start()
        self._next = self._trace

    def _trace(self, step: int) -> None:
        """Mark the end of a step; the first mark ends the step that the start has slowed."""
        import torch

        self.recorder.timeline.traced.add(step + 1)
        if self._sampler is not None and len(self._marks) == self._num_steps:
            self._sampler.stop()
        with torch.profiler.record_function(f"{STEP_MARK}{step}"):
            self._marks[step] = perf_counter()
        if len(self._marks) > self._num_steps:
            self._finish()

    def _finish(self) -> None:
        steps, collects = list(self._marks), gc.isenabled()
        gc.disable()  # it would look through all of torch, again and again
        try:
            fields = self._reduce(self.stop())
        finally:
            if collects:
                gc.enable()
        took = perf_counter() - self._began
        cost = max(0.0, took - len(steps) * statistics.median(self._seconds))
        self.recorder.write("trace", first=steps[1], last=steps[-1], cost=round(cost, 6), **fields)
        self._rest()

    def _reduce(self, made: Any) -> dict[str, Any]:
        with tempfile.TemporaryDirectory(prefix="allranks-") as folder:
            path = Path(folder, "trace.json")
            self.profilers.export(made, path)
            if path.stat().st_size > MAX_TRACE_BYTES:
                raise RuntimeError(f"the trace has {path.stat().st_size >> 20} MiB")
            trace = read_trace(path, self.recorder.rank)
        if trace is None:
            raise RuntimeError("the trace has no steps")
        if trace.is_blind:
            raise RuntimeError("the GPU's driver does not let this user trace it")
        offset = statistics.median(begin - self._marks[step] for step, begin in trace.marks)
        timeline = self.recorder.timeline
        marks, timeline.kept = [*(timeline.kept or ()), *timeline.marks], None
        samples = self._sampler.samples(offset) if self._sampler is not None else []
        fields = reduce_trace(trace, waits(marks, offset), samples)
        counted = flops_of(trace, in_tf32() if trace.device else ())
        if counted is not None:
            fields |= {"flops": dict(counted.model), "recomputed": counted.recomputed}
        return fields

    def _rest(self) -> None:
        self.is_first_done = True
        self.recorder.timeline.kept = None
        self._sampler = None
        self.recorder.at_step.remove(self.at_step)

    def _interrupted(self) -> None:
        """The script makes a profiler of its own, in the middle of this trace."""
        self._give_up(self.profilers.problem or "it was interrupted")

    def _give_up(self, problem: str) -> None:
        self.stop()
        self._rest()
        self.recorder.write("trace", problem=problem)

    def stop(self) -> Any:
        """Stop whatever is running."""
        if self._sampler is not None:
            self._sampler.stop()
        return self.profilers.stop()


def in_tf32() -> list[str]:
    """What torch computes in tf32 where a script has asked for float32."""
    from torch import backends

    allowed = {
        "matmul": backends.cuda.matmul.allow_tf32,
        "convolution": backends.cudnn.allow_tf32,
    }
    return [name for name, is_allowed in allowed.items() if is_allowed]


def waits(marks: list[Mark], offset: float) -> list[Interval]:
    """When the rank waited for its data or for other ranks, in the trace's clock."""
    found = []
    for (label, begin, *_), (following, end, *_) in itertools.pairwise(marks):
        if label in (DATA, WAIT, AROUND) or (label == AFTER and following in (WAIT, AROUND)):
            found.append((begin + offset, end + offset))
    return found
