"""Traces some steps with torch's profiler, if `--profile` asks for it.

One trial step shows how large a trace will be, and absorbs the profiler's start-up. An error here
ends the profile with one line in the rank's log, and affects nothing else.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

from allranks.probe.recorder import Recorder
from allranks.show.numbers import size
from allranks.timing.trace import STEP_MARK

VARIABLE = "ALLRANKS_PROFILE"  # how many steps
SKIP_STEPS = 8  # in which memory is allocated, kernels are chosen and models are compiled
# Between the trial and the trace: an operation that begins under one profiler and ends under
# another writes to freed memory (torch 2.13).
PAUSE_STEPS = 2
FIRST_STEP = SKIP_STEPS + 1 + PAUSE_STEPS + 1  # the first mark is at its end
# Of a trace before compression. Perfetto opens larger ones, but slowly.
MAX_TRACE_BYTES = 1 << 27


class Profile:
    """Traces `num_steps` steps of this rank, once."""

    def __init__(self, recorder: Recorder, num_steps: int) -> None:
        self.recorder = recorder
        self.num_steps = num_steps
        self._next: Callable[[], None] = self._wait
        self._seen = 0  # ends of steps
        self._marked = 0
        self._profiler: Any = None
        self._is_running = False
        self._with_device = False
        recorder.at_step.append(self.at_step)
        # Before the recorder's own finaliser, which writes the events of this one.
        Finalize(None, self.finish, exitpriority=1)

    @property
    def path(self) -> Path:
        return self.recorder.folder / f"rank-{self.recorder.rank}.trace.json.gz"

    def at_step(self, step: int) -> None:
        self._seen += 1
        try:
            self._next()
        except Exception as error:
            self._give_up(error)

    def finish(self) -> None:
        """The script is ending: export what there is, if it was not done."""
        if self._seen and 0 <= self._marked <= 1 and self.recorder.is_on:
            self._say(f"the script made {self._seen} steps, a profile needs {FIRST_STEP + 1}")
            self._seen = 0  # do not repeat it
        try:
            if self._marked > 1:
                self._export()
            elif self._is_running:  # a running profiler would crash at the process's exit
                self._stop()
        except Exception as error:
            self._give_up(error)
        self.recorder.flush()

    def _wait(self) -> None:
        if self._seen >= SKIP_STEPS:
            self._start()
            self._next = self._try_one

    def _try_one(self) -> None:
        self._stop()
        trial = self.path.with_name(f".{self.path.name}.trial.json")
        try:
            self._profiler.export_chrome_trace(str(trial))
            num_bytes = trial.stat().st_size
        finally:
            trial.unlink(missing_ok=True)
        most = max(1, MAX_TRACE_BYTES // max(num_bytes, 1))
        if most < self.num_steps:
            self._say(
                f"{self.num_steps} steps would make {size(self.num_steps * num_bytes)}: "
                f"{most} are traced"
            )
            self.num_steps = most
        self._next = self._pause

    def _pause(self) -> None:
        if self._seen >= SKIP_STEPS + 1 + PAUSE_STEPS:
            self._start()
            self._next = self._trace

    def _trace(self) -> None:
        """Mark the end of a step; the first mark ends a step that the profiler's start slows."""
        import torch

        with torch.profiler.record_function(f"{STEP_MARK}{self.recorder.step}"):
            self._marked += 1
        if self._marked > self.num_steps:
            self._export()

    def _export(self) -> None:
        self._stop()
        steps, self._marked = self._marked - 1, -1
        self.recorder.at_step.remove(self.at_step)
        part = self.path.with_name(f".{self.path.name}")  # .gz makes the profiler compress it
        self._profiler.export_chrome_trace(str(part))
        part.rename(self.path)
        last = self.recorder.step
        self.recorder.write(
            "profile",
            first=last - steps + 1,
            last=last,
            trace=self.path.name,
            with_device=self._with_device,
        )

    def _start(self) -> None:
        import torch

        activities = [torch.profiler.ProfilerActivity.CPU]
        self._with_device = torch.cuda.is_available() and torch.cuda.is_initialized()
        if self._with_device:
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        # One cycle: acc_events only keeps older releases of torch from warning about several.
        self._profiler = torch.profiler.profile(
            activities=activities, record_shapes=True, acc_events=True
        )
        self._profiler.start()
        self._is_running = True

    def _stop(self) -> None:
        self._is_running = False
        self._profiler.stop()

    def _give_up(self, error: Exception) -> None:
        self._marked = -1
        if self.at_step in self.recorder.at_step:
            self.recorder.at_step.remove(self.at_step)
        self._say(f"the profile is off: {type(error).__name__}: {error}".splitlines()[0])

    def _say(self, what: str) -> None:
        print(f"allranks: {what}", file=sys.stderr, flush=True)
        self.recorder.write("profile", problem=what)


def profile_if_asked(recorder: Recorder, env: Mapping[str, str]) -> None:
    """Start a profile if the environment says how many steps to trace."""
    steps = env.get(VARIABLE, "")
    if steps.isdecimal() and int(steps) > 0:
        Profile(recorder, int(steps))
