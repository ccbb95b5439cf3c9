"""Starts and stops torch's profiler for the probe, and keeps it away from the script's own.

Two profilers at once, or one that sees the end of an operation that began under another, end a
script in SIGSEGV (torch 2.13). So ours ends when the script makes one, and none is started after.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakSet

from allranks.probe.compilers import unseen_by_compilers
from allranks.probe.recorder import Recorder

SILENT = 6  # above the highest level of Kineto's log
LOG_LEVEL = "_ZN9libkineto6Logger14severityLevel_E"
ITS_OWN = "the script has a profiler of its own"
GRAPHS = "the script uses CUDA graphs, which a profiler that comes and goes can crash"
KEPT_OPEN = "a record_function of the script has been open since an earlier trace"
CAPTURING = "a CUDA graph is being captured"


class Profilers:
    """Knows when a profiler may run, and runs one at a time."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.problem: str | None = None  # why there will be no profiler any more
        self.interrupted: Callable[[], None] | None = None  # called if ours has to end
        self._running: Any = None
        self._is_making = False  # one of ours
        self._open: WeakSet[Any] = WeakSet()  # record_functions that began under ours
        self._thread = 0
        hook_profilers(self)

    @property
    def is_running(self) -> bool:
        return self._running is not None

    def why_not(self) -> str | None:
        """Why no profiler can be started now."""
        import torch

        if self.problem is None and self.recorder.device is not None:
            if torch.cuda.is_current_stream_capturing():
                return CAPTURING
            if os.environ.get("TEARDOWN_CUPTI") == "0":  # torch sets it for compiled graphs
                self.problem = GRAPHS
        if self.problem is None and os.environ.get("KINETO_USE_DAEMON"):
            self.problem = "a daemon may profile the script"
        return self.problem or (KEPT_OPEN if self._open else None)

    def start(self) -> None:
        """Trace what this thread does from now on, and what it launches."""
        from torch.autograd import profiler

        if self.recorder.device is not None:
            # Otherwise CUPTI stays attached, and every launch takes longer until the script ends.
            os.environ.setdefault("TEARDOWN_CUPTI", "1")
        device = None if self.recorder.device is None else "cuda"
        self._is_making = True
        try:
            made: Any = profiler.profile(use_kineto=True, use_device=device, record_shapes=True)
        finally:
            self._is_making = False
        # The list of events that people can print takes seconds to make; nobody prints it.
        made._parse_kineto_results = lambda *args, **kwargs: []
        self._thread = threading.get_ident()
        with silence():
            made._prepare_trace()
        with silence():  # the first time, the level was read from the environment just now
            made._start_trace()
        self._running = made

    def stop(self) -> Any:
        """Stop, and return what can be exported; None if nothing is running."""
        made, self._running = self._running, None
        if made is not None:
            with silence():
                made.__exit__(None, None, None)
        return made

    @staticmethod
    def export(made: Any, path: Path) -> None:
        with silence():
            made.export_chrome_trace(str(path))

    def end(self, why: str) -> None:
        """No profiler any more; one that is running is stopped."""
        self.problem = self.problem or why
        if self.is_running and threading.get_ident() == self._thread:
            interrupted, self.interrupted = self.interrupted, None
            if interrupted is not None:
                interrupted()

    def made_by_script(self) -> None:
        if not self._is_making:
            self.end(ITS_OWN)

    def opened(self, function: Any) -> None:
        if self.is_running:
            self._open.add(function)

    def closed(self, function: Any) -> None:
        self._open.discard(function)


def hook_profilers(profilers: Profilers) -> None:
    """Notice the script's own profilers, and the operations that it names."""
    from torch import profiler as public
    from torch.autograd import profiler

    recorder = profilers.recorder
    kinds: tuple[Any, ...] = (
        profiler.profile,
        profiler.emit_nvtx,
        profiler.emit_itt,
        public._KinetoProfile,
    )
    for kind in kinds:
        before(kind, "__init__", recorder, lambda _: profilers.made_by_script())
    before(profiler.record_function, "__enter__", recorder, profilers.opened)
    before(profiler.record_function, "__exit__", recorder, profilers.closed)


def before(kind: Any, name: str, recorder: Recorder, tell: Callable[[Any], None]) -> None:
    """Call a function with the object before a method of its class."""
    original = getattr(kind, name)

    @unseen_by_compilers
    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with recorder.guarded:
            tell(self)
        return original(self, *args, **kwargs)

    setattr(kind, name, call)


@contextmanager
def silence() -> Iterator[None]:
    """Keep torch's profiler from writing lines to stderr, as it does at every start and stop."""
    level = log_level()
    before = level.value if level is not None else 0
    if level is not None:
        level.value = SILENT
    try:
        yield
    finally:
        if level is not None:
            level.value = before


@functools.cache
def log_level() -> ctypes.c_int | None:
    """The level of Kineto's log, in its own memory; None if it cannot be found there."""
    import torch

    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        return ctypes.c_int.in_dll(library, LOG_LEVEL)
    except (OSError, ValueError):
        return None
