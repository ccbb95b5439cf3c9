"""A rank's memory at the ends of steps, and the line that keeps what is never given back."""

from __future__ import annotations

import gc
import math
import os
import sys
import tracemalloc
import weakref
from collections import Counter, defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from types import FrameType
from typing import Any

from allranks.probe.compilers import uncompiled
from allranks.probe.recorder import Recorder
from allranks.run.tracebacks import Frame
from allranks.timing.memory import Point, Where, steady_growth
from allranks.timing.timeline import DATA

LEAST_SECONDS, SHARE = 0.02, 1 / 50  # between two samples, and of the time since the first
CHECK_SECONDS, CHECK_FACTOR = 1.0, 1.5  # when to look for growth first, and how much later again
MOST_LOOKS = 3  # what grows at first may be a cache
COUNTED_STEPS = 3  # over which there come to be more tensors of the kinds that are kept
WATCHED_STEPS, LATER_STEPS = 4, 2  # made in the former, still there after the latter: it is kept
LEAST_SHARE = 0.3  # of the growth: a line that keeps less does not explain it
# Following stops after this many executed lines, or this many seconds: some scripts run very many,
# and where garbage collection is off, the youngest objects are all objects.
MOST_LINES, MOST_SECONDS = 20_000, 0.6
MOST_BARREN = 20  # times that a line makes nothing: then it is not looked at any more
MOST_WATCH_SECONDS = 5.0  # in all, since following makes the script slower as well
MOST_CALLS = 20  # of the stack in which an object is made, from the innermost outwards
STATM = Path("/proc/self/statm")
PAGE = os.sysconf("SC_PAGE_SIZE")


class MemoryUse:
    """Writes `memory` events, less and less often; if memory grows, finds out where."""

    def __init__(self, recorder: Recorder, *, looks_for_lines: bool) -> None:
        self.recorder = recorder
        self.looks_for_lines = looks_for_lines
        self._points: dict[Where, list[Point]] = {"host": [], "device": []}
        self._first = self._last = 0.0
        self._check = CHECK_SECONDS
        self._watch: LineWatch | None = None
        self._looks: dict[Where, int] = {"host": 0, "device": 0}
        self._statm = os.open(STATM, os.O_RDONLY | os.O_CLOEXEC)
        recorder.at_step.append(self.at_step)
        recorder.at_writing.append(self.at_writing)
        recorder.at_fork.append(self._forget)

    def at_step(self, step: int) -> None:
        if self._watch is not None:
            try:
                with uncompiled():
                    self._follow(self._watch, step)
            except Exception:  # odd tensors: only their line is not found
                self._watch.leave()
                self._watch = None
            return
        now = perf_counter()
        self._first = self._first or now
        if now - self._last < max(LEAST_SECONDS, SHARE * (now - self._first)):
            return
        self._last = now
        self._sample(step, now)
        if now - self._first > self._check:
            self._check *= CHECK_FACTOR
            if self.looks_for_lines:
                with uncompiled():
                    self._look_for_growth(step)

    def at_writing(self) -> None:
        """Called now and then by the thread that writes: a watch may be in the way of no steps."""
        if self._watch is not None and self._watch.is_late:
            self._watch.leave()

    def _sample(self, step: int, now: float) -> None:
        used: dict[Where, int] = {"host": self.host_bytes()}
        if self.recorder.device is not None:
            used["device"] = self.device_bytes()
        for where, num_bytes in used.items():
            self._points[where].append(Point(step, now, num_bytes))
        self.recorder.write("memory", step=step, **used)

    def _look_for_growth(self, step: int) -> None:
        timeline = self.recorder.timeline
        # Not during a trace, a benchmark, debugging or coverage: perhaps next time.
        if timeline.kept is not None or self.recorder.is_measured or sys.gettrace() is not None:
            return
        for where, points in self._points.items():
            growth = steady_growth(points) if self._looks[where] < MOST_LOOKS else None
            if growth is None:
                continue
            self._looks[where] += 1
            self._watch = LineWatch(where, growth[0], self.recorder)
            watched = step + 1 + COUNTED_STEPS
            timeline.traced.add(step + 1)  # which counting has delayed
            timeline.traced.update(range(watched, watched + WATCHED_STEPS + LATER_STEPS))
            return

    def _follow(self, watch: LineWatch, step: int) -> None:
        if not watch.next_step(sys._getframe()):
            return
        watch.stop()
        self._watch = None
        kept = watch.kept()
        most = max(kept, key=lambda place: kept[place], default=None)
        if most is not None and kept[most] >= LEAST_SHARE * watch.bytes_per_step:
            file, number, is_loading = most
            self.recorder.write(
                "kept",
                step=step,
                where=watch.where,
                line=f"{shown_path(file)}:{number}",
                loading=is_loading,
            )

    def _forget(self) -> None:
        """Stop watching, in a forked process."""
        if self._watch is not None:
            self._watch.leave()

    def host_bytes(self) -> int:
        """What this process uses and shares with no other."""
        resident, shared = os.pread(self._statm, 128, 0).split()[1:3]
        return (int(resident) - int(shared)) * PAGE

    def device_bytes(self) -> int:
        import torch

        return int(torch.cuda.memory_allocated(self.recorder.device))


def own_references() -> int:
    """How many references a function has to an object that only it holds, and counts."""
    one = object()
    return sys.getrefcount(one)


OWN_REFERENCES = own_references()  # fewer since Python 3.14
Place = tuple[str, int, bool]  # file, line, and whether data is being loaded
Kind = tuple[tuple[int, ...], Any]  # of a tensor: shape, type of its elements


@dataclass(slots=True)
class _Tensor:
    """A tensor, and for each reference to it the line at which that reference was made."""

    reference: weakref.ref[Any]
    step: int  # in which it was made
    holders: list[Place | None] = field(default_factory=list)

    def count_holders(self, at: Place | None) -> bool:
        """After a line: update the references that exist now; whether there are others.

        A line that runs again, or that a call returns to, drops the references that it made; a
        function that ends drops the variables that it set first.
        """
        one = self.reference()
        if one is None:
            return False
        more = sys.getrefcount(one) - OWN_REFERENCES - len(self.holders)
        self.holders += [at] * more
        for _ in range(-more):
            self.holders.remove(at if at in self.holders else self.holders[0])
        return more != 0


class LineWatch:
    """Which lines of the user's code make or keep what still exists some steps later.

    Tensors are found among Python's youngest objects, after each line: large ones, and those of the
    kinds of which some steps have left more; all, if there is no such kind. tracemalloc knows
    everything else that Python allocates, and numpy's arrays.
    """

    def __init__(self, where: Where, bytes_per_step: float, recorder: Recorder) -> None:
        self.where, self.bytes_per_step = where, bytes_per_step
        self._timeline = recorder.timeline
        self._before = count_tensors(where)
        self._kinds: set[Kind] = set()  # that are kept
        self._step = -COUNTED_STEPS  # of those whose lines are followed
        self._at: Place | None = None
        self._types: dict[type, bool] = {}  # whether they are tensors
        self._known: dict[int, weakref.ref[Any]] = {}  # tensors, by their identity
        self._tensors: dict[int, _Tensor] = {}  # those of the kinds that are kept
        self._arrays: dict[Place, float] = {}
        self._places: set[Place] = set()
        self._barren: dict[Place | None, int] = {}  # how often a line has made nothing in a row
        self._num_lines, self._seconds = 0, 0.0
        self._until = math.inf  # by then it ends, whatever the script does
        self._own: dict[str, bool] = {}  # by file
        self._frames: list[FrameType] = []
        self._is_on = False
        self._has_tracemalloc = False

    def start(self, frame: FrameType | None) -> None:
        """Follow the lines of the user's code from here on, unless it is being debugged by now."""
        if sys.gettrace() is not None:
            return
        self._until = perf_counter() + MOST_WATCH_SECONDS
        more = count_tensors(self.where) - self._before
        self._kinds = {kind for kind, number in more.items() if number >= COUNTED_STEPS - 1}
        self._harvest()  # what exists already
        self._tensors.clear()
        self._is_on = True
        if self.where == "host" and not tracemalloc.is_tracing():
            self._has_tracemalloc = True
            tracemalloc.start(MOST_CALLS)
        gc.callbacks.append(self._at_collection)
        while frame is not None:
            if self._is_own(frame) and frame.f_trace is None:
                frame.f_trace = self._in_own
                self._frames.append(frame)
            frame = frame.f_back
        sys.settrace(self._at_call)

    def next_step(self, frame: FrameType | None) -> bool:
        """Count a step that has ended, in this frame; returns whether it was the last one."""
        self._step += 1
        if self._step == 0:
            self.start(frame)
        elif self._step == WATCHED_STEPS and self._is_on:
            self._stop_following()
        return self._step >= WATCHED_STEPS + LATER_STEPS

    def kept(self) -> dict[Place, float]:
        """Bytes of a step that are still in use, by the line that made them.

        The last tensor of a step with a graph may keep everything that no line explains: no Python
        object shows what a graph keeps.
        """
        found: defaultdict[Place, float] = defaultdict(float, self._arrays)
        seen: set[int] = set()
        graphs: dict[int, Place] = {}  # by step
        with only_torchs_code():
            for one in self._tensors.values():
                tensor, place = one.reference(), one.holders[-1] if one.holders else None
                # Not of the first step, which was not followed from its beginning.
                if tensor is None or place is None or not one.step:
                    continue
                with suppress(Exception):  # one without a storage
                    storage = tensor.untyped_storage()
                    is_there = (self.where == "device") == tensor.is_cuda
                    if is_there and storage.data_ptr() not in seen:
                        seen.add(storage.data_ptr())
                        found[place] += storage.nbytes() / (WATCHED_STEPS - 1)
                        if tensor.grad_fn is not None:
                            graphs[one.step] = place
        unexplained = max(0.0, self.bytes_per_step - math.fsum(found.values()))
        for place in graphs.values():
            found[place] += unexplained / (WATCHED_STEPS - 1)
        return found

    def stop(self) -> None:
        self._stop_following()
        if self._has_tracemalloc:
            self._take_arrays()
        self.leave()

    @property
    def is_late(self) -> bool:
        return perf_counter() > self._until

    def leave(self) -> None:
        """Leave nothing behind."""
        self._stop_following()
        if self._has_tracemalloc:
            self._has_tracemalloc = False
            tracemalloc.stop()

    def _stop_following(self) -> None:
        self._is_on = False
        if sys.gettrace() == self._at_call:
            sys.settrace(None)
        if self._at_collection in gc.callbacks:
            gc.callbacks.remove(self._at_collection)
        for frame in self._frames:
            frame.f_trace = None
        self._frames.clear()

    def _take_arrays(self) -> None:
        steps = WATCHED_STEPS + LATER_STEPS
        for one in tracemalloc.take_snapshot().statistics("traceback"):
            own = [(at.filename, at.lineno) for at in one.traceback if self._is_file(at.filename)]
            if own:
                *_, (file, line) = own  # the innermost
                place = (file, line, self._was_loading(file, line))
                self._arrays[place] = self._arrays.get(place, 0.0) + one.size / steps

    def _was_loading(self, file: str, line: int) -> bool:
        return (file, line, True) in self._places

    def _at_call(self, frame: FrameType, event: str, arg: Any) -> Any:
        if not self._is_on or self.is_late:
            self._stop_following()
            return None
        return self._in_own if self._is_own(frame) else None

    def _in_own(self, frame: FrameType, event: str, arg: Any) -> Any:
        try:
            self._num_lines += 1
            is_much = self._num_lines > MOST_LINES or self._seconds > MOST_SECONDS
            if not self._is_on or is_much:
                self._stop_following()
                return None
            if self._barren.get(self._at, 0) < MOST_BARREN:
                begin = perf_counter()
                has_found = self._harvest()
                self._seconds += perf_counter() - begin
                self._barren[self._at] = 0 if has_found else self._barren.get(self._at, 0) + 1
            if event == "line":
                self._at = self._place(frame)
            elif event == "return":
                self._at = self._caller(frame)
        except Exception:  # Python would raise it in the script
            self._stop_following()
            return None
        return self._in_own

    def _at_collection(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start" and self._is_on:
            with suppress(Exception):
                self._harvest()

    def _harvest(self) -> bool:
        """Note the tensors that were made or kept since the last line; whether there are any."""
        import torch

        # Nothing is allocated for objects that are no tensors: tracemalloc makes that slow.
        for one in gc.get_objects(generation=0):
            kind = type(one)
            is_tensor = self._types.get(kind)
            if is_tensor is None:  # not isinstance, which may run code of the object
                is_tensor = self._types[kind] = issubclass(kind, torch.Tensor)
            if not is_tensor:
                continue
            known = self._known.get(id(one))
            if known is None or known() is not one:
                self._known[id(one)] = reference = weakref.ref(one)
                if self._is_followed(one):
                    self._tensors[id(one)] = _Tensor(reference, self._step)
        one = None
        recent = [tensor for tensor in self._tensors.values() if tensor.step >= self._step - 1]
        return any([tensor.count_holders(self._at) for tensor in recent])  # of all of them

    def _is_followed(self, tensor: Any) -> bool:
        if not self._kinds:
            return True
        with suppress(Exception), only_torchs_code():  # one without a size
            is_large = tensor.nbytes >= LEAST_SHARE * self.bytes_per_step > 0
            return is_large or kind_of(tensor) in self._kinds
        return False

    def _caller(self, frame: FrameType) -> Place | None:
        back = frame.f_back
        while back is not None and not self._is_own(back):
            back = back.f_back
        return None if back is None else self._place(back)

    def _place(self, frame: FrameType) -> Place:
        place = (frame.f_code.co_filename, frame.f_lineno, self._timeline.label == DATA)
        self._places.add(place)
        return place

    def _is_own(self, frame: FrameType) -> bool:
        return self._is_file(frame.f_code.co_filename)

    def _is_file(self, file: str) -> bool:
        """Whether a file is the user's own."""
        known = self._own.get(file)
        if known is None:
            known = self._own[file] = Frame(file, 0, "").is_own
        return known


def count_tensors(where: Where) -> Counter[Kind]:
    """How many tensors there are on the host or on devices, by kind."""
    import torch

    found: Counter[Kind] = Counter()
    types: dict[type, bool] = {}
    with only_torchs_code():
        for one in gc.get_objects():
            kind = type(one)
            if kind not in types:
                types[kind] = issubclass(kind, torch.Tensor)
            if types[kind]:
                with suppress(Exception):  # one without a size
                    if one.is_cuda == (where == "device"):
                        found[kind_of(one)] += 1
    return found


def kind_of(tensor: Any) -> Kind:
    return tuple(tensor.shape), tensor.dtype


def only_torchs_code() -> Any:
    """A context in which tensors are read without the script's own subclasses and modes."""
    import torch

    return torch._C.DisableTorchFunction()


def shown_path(file: str) -> str:
    """A path as in the lines of a trace: relative to the working directory if it is below that."""
    absolute = os.path.abspath(file)
    relative = os.path.relpath(absolute)
    return absolute if relative.startswith("..") else relative
