"""Traces some steps with torch's profiler, if `--profile` asks for it.

One trial step shows how large a trace will be, and absorbs the profiler's start-up. An error here
ends the profile with one line in the rank's log, and affects nothing else.
"""

from __future__ import annotations

import gzip
import json
import shutil
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.util import Finalize
from pathlib import Path

from allranks.probe.compilers import uncompiled
from allranks.probe.graphs import Graphs
from allranks.probe.profilers import Profilers, export
from allranks.probe.recorder import Recorder
from allranks.probe.tracing import GRAPHS, MAX_ATTEMPTS, Session
from allranks.show.numbers import size
from allranks.timing.trace import read_trace

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

    def __init__(self, recorder: Recorder, profilers: Profilers, num_steps: int) -> None:
        self.recorder = recorder
        self.profilers = profilers
        self.graphs = Graphs(profilers)
        self.num_steps = num_steps
        self._next: Callable[[int], None] = self._wait
        self._seen = 0  # ends of steps
        self._tries = 0
        self._session: Session | None = None
        self._is_over = False
        recorder.at_step.append(self.at_step)
        # Before the recorder's own finaliser, which writes the events of this one.
        Finalize(None, self.finish, exitpriority=1)

    @property
    def path(self) -> Path:
        return self.recorder.folder / f"rank-{self.recorder.rank}.trace.json.gz"

    def at_step(self, step: int) -> None:
        self._seen += 1
        try:
            with uncompiled():
                self._next(step)
        except Exception as error:
            self._give_up(f"{type(error).__name__}: {error}".splitlines()[0])

    def finish(self) -> None:
        """The script is ending: export what there is, if it was not done."""
        num_steps = self._session.num_steps if self._session is not None else 0
        try:
            if not self._is_over and num_steps > 0:
                self._export()
            elif not self._is_over and self._seen and self.recorder.is_on:
                needed = FIRST_STEP + 1
                self._end()
                self._say(f"the script made {self._seen} steps, a profile needs {needed}")
        except Exception as error:
            self._give_up(f"{type(error).__name__}: {error}".splitlines()[0])
        self.recorder.flush()

    def _wait(self, step: int) -> None:
        if self._seen >= SKIP_STEPS and not self.profilers.is_capturing:
            self._start(step)
            self._next = self._try_one

    def _try_one(self, step: int) -> None:
        session = self._started()
        session.end_step(step)
        session.stop()
        trial = self.path.with_name(f".{self.path.name}.trial.json")
        try:
            export(session.made, trial)
            num_bytes = trial.stat().st_size
        finally:
            trial.unlink(missing_ok=True)
        session.close()
        self._session = None
        most = max(1, MAX_TRACE_BYTES // max(num_bytes, 1))
        if most < self.num_steps:
            self._say(
                f"{self.num_steps} steps would make {size(self.num_steps * num_bytes)}: "
                f"{most} are traced"
            )
            self.num_steps = most
        self._next = self._pause

    def _pause(self, step: int) -> None:
        if self._seen >= SKIP_STEPS + 1 + PAUSE_STEPS and not self.profilers.is_capturing:
            self._start(step)
            self._next = self._trace

    def _trace(self, step: int) -> None:
        session = self._started()
        if session.is_before_graph:
            self._tries += 1
            if self._tries >= MAX_ATTEMPTS:
                self._give_up(GRAPHS)
                return
            session.close()
            self._next = self._pause
            return
        session.end_step(step)
        if session.num_steps >= self.num_steps:
            session.end()
            self._export()

    def _export(self) -> None:
        session = self._started()
        session.stop()
        part = self.path.with_name(f".{self.path.name}.json")
        export(session.made, part)
        pressed = self.path.with_name(f".{self.path.name}")
        with part.open("rb") as plain, gzip.open(pressed, "wb", compresslevel=1) as file:
            shutil.copyfileobj(plain, file)
        pressed.rename(self.path)
        first, *_, last = sorted(session.ends)
        self.recorder.write(
            "profile",
            first=first + 1,
            last=last,
            trace=self.path.name,
            with_device=self.recorder.device is not None,
        )
        try:
            trace = read_trace(part, self.recorder.rank)
            if trace is not None and not trace.is_blind:
                self.recorder.write("trace", **session.reduce(trace))
        finally:
            part.unlink(missing_ok=True)
            self._end()

    def _start(self, step: int) -> None:
        why = self.profilers.why_not()
        if why is not None:
            self._give_up(why)
            return
        self._session = Session(self.recorder, self.profilers, self.graphs)
        self._session.start(step, self._give_up)
        with suppress(ImportError, AttributeError):
            describe_groups()

    def _started(self) -> Session:
        assert self._session is not None
        return self._session

    def _end(self) -> None:
        self._is_over = True
        self.graphs.close()
        if self._session is not None:
            self._session.close()
            self._session = None
        if self.at_step in self.recorder.at_step:
            self.recorder.at_step.remove(self.at_step)

    def _give_up(self, why: str) -> None:
        self._end()
        self._say(f"the profile is off: {why}")

    def _say(self, what: str) -> None:
        print(f"allranks: {what}", file=sys.stderr, flush=True)
        self.recorder.write("profile", problem=what)


def describe_groups() -> None:
    """Add to the running trace which process groups there are."""
    import torch
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        groups = dist.distributed_c10d._get_all_pg_configs()
        torch.autograd._add_metadata_json("distributedInfo", json.dumps({"pg_config": groups}))


def profile_if_asked(recorder: Recorder, profilers: Profilers, env: Mapping[str, str]) -> bool:
    """Start a profile if the environment says how many steps to trace."""
    steps = env.get(VARIABLE, "")
    if not steps.isdecimal() or int(steps) == 0:
        return False
    Profile(recorder, profilers, int(steps))
    return True
