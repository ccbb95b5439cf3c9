"""Starts and stops torch's profiler for the probe, and keeps it away from the script's own.

Two profilers at once, or one that sees the end of an operation that began under another, crash a
script with SIGSEGV (torch 2.13). So ours ends when the script makes one, and we start no other.
"""

from __future__ import annotations

import ctypes
import functools
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from time import perf_counter
from typing import IO, Any

from allranks.machine.processes import outliving_parent
from allranks.probe.compilers import unseen_by_compilers
from allranks.probe.recorder import Recorder

SILENT = 6  # above the highest level of messages in Kineto's log
PREPARE_SECONDS = 0.05  # ten times what torch's thread takes to prepare unloading
LOG_LEVEL = "_ZN9libkineto6Logger14severityLevel_E"
ELSEWHERE = "torch was imported by a thread other than the one that trains"
ITS_OWN = "the script uses a profiler of its own"
ANOTHER = "another program may profile the script ({} is set)"
# Set for torch's own daemon, and by Nsight and the like, which trace the GPU themselves.
OTHERS = ("KINETO_USE_DAEMON", "CUDA_INJECTION64_PATH", "NSYS_PROFILING_SESSION_ID")
FIRST_SAFE_CUDA = 12
UNLOADS = "TEARDOWN_CUPTI"  # 1: the library that traces a GPU is unloaded after a trace


class Profilers:
    """Knows when a profiler may run, and runs one at a time."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.problem: str | None = None  # why there can be no profiler any more
        self.interrupted: Callable[[str], None] | None = None  # called if the running one must end
        self.paused: Callable[[], None] | None = None  # likewise, but a later one may follow
        self._has_graphs = False  # the script captures CUDA graphs
        self._unloading_since: float | None = None
        self._running: Any = None
        self._thread = 0  # in which it runs
        self._importer = threading.get_ident()  # of torch
        self._is_making = False  # one of ours
        self._open: dict[int, Any] = {}  # the script's record_functions that began under ours
        self._hooked: list[tuple[str, Any, Any]] = []
        hook_profilers(self)
        recorder.at_fork.append(self._forget)
        recorder.at_capture.append(self._graph_begins)

    @property
    def is_running(self) -> bool:
        return self._running is not None

    @property
    def is_capturing(self) -> bool:
        """Whether a graph is being captured: a step may be within it, but no profiler may start."""
        import torch

        return self.recorder.device is not None and torch.cuda.is_current_stream_capturing()

    def why_not(self) -> str | None:
        """Why no profiler can be started now."""
        if self.problem is None and not self.is_in_their_thread:
            self.problem = ELSEWHERE
        other = next((name for name in OTHERS if os.environ.get(name)), None)
        if self.problem is None and other is not None:
            self.problem = ANOTHER.format(other)
        return self.problem

    @property
    def is_in_their_thread(self) -> bool:
        """Whether a profiler may run in this thread: in others, torch's would print an error."""
        return threading.get_ident() == self._importer

    def start(self, *, on_device: bool = True) -> None:
        """Trace what this thread does from now on, and what it launches on its device."""
        from torch.autograd import profiler

        self._is_making = True
        try:
            made: Any = profiler.profile(
                use_kineto=True,
                use_device="cuda" if on_device and self.recorder.device is not None else None,
                record_shapes=True,
                experimental_config=only_a_trace(),
            )
        finally:
            self._is_making = False
        # The list of events that people can print takes seconds to make, and nobody prints it.
        made._parse_kineto_results = lambda *args, **kwargs: []
        self._thread = threading.get_ident()
        with silence():
            made._prepare_trace()
        with silence():  # the first time, torch has just set the level
            made._start_trace()
        self._running = made
        self._follow_functions()

    def stop(self, *, waits: bool = True, unloads: bool = False) -> Any:
        """Stop, and return what can be exported; None if nothing is running.

        `waits`: for the device, which may still be at work on what was launched. `unloads`: also
        unload the library that traces a device, which slows every launch; `settle` completes that.
        """
        made, self._running = self._running, None
        if made is None:
            return None
        if not waits:
            made.use_device = None
        unloads &= self.recorder.device is not None
        unloads &= not (self._has_graphs and crashes_with_graphs())
        self._unloading_since = perf_counter() if unloads else None
        with silence(), unloading() if unloads else nullcontext():
            self._end_functions()
            made.__exit__(None, None, None)
        return made

    def settle(self) -> None:
        """Complete the unloading that `stop` began: later, the script may run its own profiler.

        A thread of torch's prepares it, and the next call of the device's library does it.
        """
        if self._unloading_since is not None and not self.is_capturing:
            import torch

            time.sleep(max(0.0, self._unloading_since + PREPARE_SECONDS - perf_counter()))
            self._unloading_since = None
            torch.cuda.current_stream(self.recorder.device).query()

    def end(self, why: str) -> None:
        """No profiler any more; one that is running is stopped."""
        self.problem = self.problem or why
        if self.is_running and threading.get_ident() == self._thread:
            interrupted, self.interrupted = self.interrupted, None
            if interrupted is not None:
                interrupted(why)

    def made_by_script(self) -> None:
        if not self._is_making:
            self.settle()
            self.end(ITS_OWN)

    def _graph_begins(self) -> None:
        """No step is traced while a graph is captured."""
        self.settle()
        self._has_graphs = True
        if self.is_running and threading.get_ident() == self._thread and self.paused is not None:
            self.paused()

    def _forget(self) -> None:
        """Stop recording in a forked process, which would keep all its operators until it ends."""
        from torch.autograd import _enable_record_function

        if self.is_running and threading.get_ident() == self._thread:
            self._running = None
            _enable_record_function(False)

    def _follow_functions(self) -> None:
        """Note which record_functions are open; not before, as torch.jit compiles their methods."""
        from torch.autograd.profiler import record_function as kind

        def opened(function: Any) -> None:
            if threading.get_ident() == self._thread:
                self._open[id(function)] = function

        def closed(function: Any) -> None:
            self._open.pop(id(function), None)

        for name, tell in (("__enter__", opened), ("__exit__", closed)):
            original = getattr(kind, name)
            hooked = told_before(original, self.recorder, tell)
            setattr(kind, name, hooked)
            self._hooked.append((name, hooked, original))

    def _end_functions(self) -> None:
        """End the record_functions that are open: they would crash under another profiler."""
        from torch.autograd.profiler import record_function as kind

        while self._hooked:
            name, hooked, original = self._hooked.pop()
            if vars(kind).get(name) is hooked:
                setattr(kind, name, original)
        while self._open:
            _, function = self._open.popitem()
            if function.record is not None:  # a signal may come before it has begun
                function.__exit__(None, None, None)
                function.run_callbacks_on_exit = False  # when the script ends it


def crashes_with_graphs() -> bool:
    """Whether scripts with CUDA graphs crash if what traces a GPU is unloaded and loaded again.

    With CUDA 12 they do so at the second loading, but we trace a GPU once, and torch does not
    unload after a script's own profiles.
    """
    import torch

    return int((torch.version.cuda or "0").partition(".")[0]) < FIRST_SAFE_CUDA


def only_a_trace() -> Any:
    """Keeps newer releases of torch from making anything but the trace file."""
    from torch._C._profiler import _ExperimentalConfig

    try:
        return _ExperimentalConfig(trace_only=True)
    except TypeError:
        return _ExperimentalConfig()


def export(made: Any, path: Path) -> None:
    """Write what a profiler has seen."""
    with silence():
        made.export_chrome_trace(str(path))


def exported(made: Any) -> IO[bytes]:
    """What a profiler has seen, in an open file that is in no folder any more."""
    # Ranks die with their launcher, but not while there is a folder that would stay.
    with outliving_parent(), tempfile.TemporaryDirectory(prefix="allranks-") as folder:
        path = Path(folder, "trace.json")
        export(made, path)
        return path.open("rb")


def hook_profilers(profilers: Profilers) -> None:
    """Notice the script's own profilers."""
    from torch import profiler as public
    from torch.autograd import profiler

    def told(kind: Any, name: str, tell: Callable[[Any], None]) -> None:
        setattr(kind, name, told_before(getattr(kind, name), profilers.recorder, tell))

    for kind in (profiler.profile, profiler.emit_nvtx, profiler.emit_itt, public._KinetoProfile):
        told(kind, "__init__", lambda _: profilers.made_by_script())


def told_before(
    original: Callable[..., Any], recorder: Recorder, tell: Callable[[Any], None]
) -> Callable[..., Any]:
    """A method that first passes its object to `tell`, then does what it did before."""

    @unseen_by_compilers
    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with recorder.guarded:
            tell(self)
        return original(self, *args, **kwargs)

    return call


@contextmanager
def silence() -> Iterator[None]:
    """Keep torch's profiler from writing to stderr, as it does whenever it starts and stops."""
    level = log_level()
    before = level.value if level is not None else 0
    if level is not None:
        level.value = SILENT
    try:
        yield
    finally:
        if level is not None and level.value == SILENT:  # or else torch has just set it
            level.value = before


@contextmanager
def unloading() -> Iterator[None]:
    """Let torch unload what traces a device, unless the environment already says whether it does.

    Only for a trace of ours: two of the script's own may follow too soon after each other.
    """
    is_ours = UNLOADS not in os.environ
    if is_ours:
        os.environ[UNLOADS] = "1"
    try:
        yield
    finally:
        if is_ours:
            del os.environ[UNLOADS]


@functools.cache
def log_level() -> ctypes.c_int | None:
    """The level of Kineto's log, in its own memory; None if it cannot be found there."""
    import torch

    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        return ctypes.c_int.in_dll(library, LOG_LEVEL)
    except (OSError, ValueError):
        return None
