"""Counts what CUDA graphs compute: a replay does not show it, the capture does.

While a graph is captured, torch's profiler records the operators that are called, on the host only.
It starts before the capture and is read after it, so no call of it is captured.
"""

from __future__ import annotations

import functools
import json
from contextlib import suppress
from time import perf_counter
from typing import Any
from weakref import WeakKeyDictionary

from allranks.probe.compilers import uncompiled, unseen_by_compilers
from allranks.probe.profilers import Profilers, exported
from allranks.timing.flops import GRAPH_MARK, Flops, flops_of
from allranks.timing.trace import STEP_MARK, trace_of

MOST_SECONDS = 1.0  # for all graphs together: a script may capture hundreds
UNKNOWN = "unknown"  # in place of the number of a graph that was not counted


class Graphs:
    """What the script's CUDA graphs compute, and which of them a traced step replays."""

    def __init__(self, profilers: Profilers) -> None:
        self.profilers = profilers
        self.flops: list[Flops | None] = []  # of each graph that was captured, by its number
        self._numbers: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._seconds = 0.0
        self._is_open = False
        self._own_replay: Any = None
        profilers.recorder.at_capture.append(self._begin)
        profilers.recorder.after_capture.append(self._end)

    def close(self) -> None:
        """Count no more."""
        if self._is_open:
            self._stop()
        recorder = self.profilers.recorder
        with suppress(ValueError):
            recorder.at_capture.remove(self._begin)
            recorder.after_capture.remove(self._end)

    def _begin(self) -> None:
        profilers = self.profilers
        if self._seconds > MOST_SECONDS or profilers.is_running or not profilers.is_in_their_thread:
            return
        if profilers.why_not() is not None:
            return
        began = perf_counter()
        try:
            with uncompiled():
                profilers.interrupted = lambda why: self._stop()
                profilers.start(on_device=False)
                self._is_open = True
                mark(0)
        except Exception:  # a graph that is not counted is unknown, and the script is left alone
            self.close()
        self._seconds += perf_counter() - began

    def _end(self, graph: Any) -> None:
        if not self._is_open:
            return
        began = perf_counter()
        try:
            with uncompiled():
                mark(1)
                made = self._stop()
                if graph is not None:
                    self._numbers[graph] = len(self.flops)
                    self.flops.append(counted(made))
        except Exception:
            self.close()
        self._seconds += perf_counter() - began

    def _stop(self) -> Any:
        self._is_open, self.profilers.interrupted = False, None
        return self.profilers.stop()

    def follow(self) -> None:
        """Mark every replay from now on with the number of its graph."""
        from torch.cuda import CUDAGraph

        kind: Any = CUDAGraph
        original = self._own_replay = kind.replay

        @unseen_by_compilers
        @functools.wraps(original)
        def replay(graph: Any, *args: Any, **kwargs: Any) -> Any:
            from torch.profiler import record_function

            with record_function(f"{GRAPH_MARK}{self._numbers.get(graph, UNKNOWN)}"):
                return original(graph, *args, **kwargs)

        kind.replay = replay

    def unfollow(self) -> None:
        if self._own_replay is not None:
            from torch.cuda import CUDAGraph

            CUDAGraph.replay = self._own_replay  # type: ignore[method-assign]
            self._own_replay = None


def mark(number: int) -> None:
    """Begin or end what is counted, which reads like one step."""
    from torch.profiler import record_function

    with record_function(f"{STEP_MARK}{number}"):
        pass


def counted(made: Any) -> Flops | None:
    """The operations of what was captured; None if they cannot be counted."""
    with exported(made) as file:
        trace = trace_of(json.loads(file.read()), 0)
    return flops_of(trace, in_tf32()) if trace is not None else None


def in_tf32() -> list[str]:
    """What torch computes in tf32 where a script has asked for float32."""
    from torch import backends

    allowed = {
        "matmul": backends.cuda.matmul.allow_tf32,
        "convolution": backends.cudnn.allow_tf32,
    }
    return [name for name, is_allowed in allowed.items() if is_allowed]
