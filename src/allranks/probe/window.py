"""Ends a script once a benchmark has measured enough steady steps.

Rank 0 decides on the last step before it comes; the other ranks learn of it through the store at
which they met. So all leave the script after the same step, without any exchange that the script
would not make itself.
"""

from __future__ import annotations

import math
import os
import signal
import statistics
import sys
import threading
import time
from contextlib import suppress
from typing import Any

from allranks.probe.recorder import Recorder
from allranks.timing.steps import STEADY_STEPS, is_steady

KEY = "allranks/last_step"
LEFT = "allranks/left"
HEARD = "allranks/heard"  # followed by the rank, which leaves after that step or ends now
LOOK_SECONDS = 0.2
HEAR_SECONDS = 3.0  # for all ranks to learn of the last step before it comes
PATIENCE_STEPS, PATIENCE_SECONDS = 100, 60.0
LEAVE_SECONDS = 20.0  # for the script to end by itself

has_left = False  # whether the script is ended here; see probe/inject/sitecustomize.py


class Window:
    """Ends the script after `num_steps` steady steps."""

    def __init__(self, recorder: Recorder, num_steps: int) -> None:
        self.recorder = recorder
        self.num_steps = num_steps
        self.last_step: int | None = None
        self._seconds: list[float] = []  # of the steps so far, without traced ones
        self._first_end = self._last_end = 0.0
        self._is_leaving = False
        recorder.at_step.append(self.at_step)
        recorder.at_meeting.append(self.at_meeting)

    def at_step(self, step: int) -> None:
        now = time.perf_counter()
        if not self._first_end:
            self._first_end = now
        elif step not in self.recorder.timeline.traced:
            self._seconds.append(now - self._last_end)
        self._last_end = now
        leads = self.recorder.rank == 0 or not self.recorder.has_peers()
        if leads and self.last_step is None:
            self._decide(step)
        if self.last_step is not None and step >= self.last_step and not self._is_leaving:
            self.recorder.leave = self._leave

    def _decide(self, step: int) -> None:
        steady = are_steady(self._seconds)
        patience = step >= PATIENCE_STEPS or self._last_end - self._first_end >= PATIENCE_SECONDS
        if not steady and not (patience and step > 2):
            return
        timeline = self.recorder.timeline
        if timeline.kept is not None or timeline.is_choosing:  # steps are traced, or will be faster
            return
        self.recorder.is_measured = True
        pace = statistics.fmean(self._seconds[-10:])
        to_come = max(self.num_steps, math.ceil(HEAR_SECONDS / max(pace, 1e-6)))
        if not self.recorder.has_peers():
            to_come = self.num_steps
        self.last_step = step + to_come
        if self.recorder.has_peers():
            store().set(KEY, str(self.last_step))
        self.recorder.write("window", first=step + 1, last=self.last_step, steady=steady)

    def at_meeting(self) -> None:
        """Listen from now on, not from the first step: a rank without steps must end too."""
        import torch.distributed as dist

        rank = dist.get_rank()
        if rank > 0:
            threading.Thread(target=self._listen, args=(rank,), name="window", daemon=True).start()

    def _listen(self, rank: int) -> None:
        with suppress(Exception):  # rank 0, and the store with it, may be gone
            known = store()
            while not known.check([KEY]):
                time.sleep(LOOK_SECONDS)
            self.last_step = int(known.get(KEY))
            self.recorder.is_measured = True
            while self.recorder.step == 0 and not known.check([LEFT]):
                time.sleep(LOOK_SECONDS)
            has_steps = self.recorder.step > 0
            if not has_steps:
                what = f"ends here: rank 0 has made {self.last_step} steps, this one none"
                print(f"allranks: this rank {what}", file=sys.stderr, flush=True)
            try:
                known.set(f"{HEARD}/{rank}", "1")
            finally:  # even if the store is gone
                if not has_steps:
                    os._exit(0)

    def _leave(self) -> None:
        """End the script as if it had called sys.exit(), so that it can clean up."""
        global has_left
        recorder = self.recorder
        if recorder.timeline.is_taken:  # by a task's loop, which stops on all ranks together
            recorder.leave, self._is_leaving = None, True
            os.kill(os.getpid(), signal.SIGUSR2)
            return
        if recorder.is_on:
            recorder.timeline.is_on = False
            recorder.flush()
            sys.stdout.flush()
            has_left = True
            threading.Thread(target=_leave_in_any_case, daemon=True).start()
            if recorder.rank == 0 and recorder.has_peers():
                with suppress(Exception):
                    _let_others_end()
        sys.exit(0)


def are_steady(seconds: list[float]) -> bool:
    """Whether the last steps took as long as those before."""
    if len(seconds) < 2 * STEADY_STEPS:
        return False
    return is_steady(seconds[-2 * STEADY_STEPS :])


def store() -> Any:
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


def _let_others_end() -> None:
    """Wait for ranks without steps, which must read the store before this rank ends it."""
    import torch.distributed as dist

    known, until = store(), time.monotonic() + LEAVE_SECONDS / 4
    known.set(LEFT, "1")
    others = [f"{HEARD}/{rank}" for rank in range(1, dist.get_world_size())]
    while not known.check(others) and time.monotonic() < until:
        time.sleep(LOOK_SECONDS / 4)
    time.sleep(LOOK_SECONDS / 4)  # between its answer and its end


def _leave_in_any_case() -> None:
    time.sleep(LEAVE_SECONDS)  # a script can catch SystemExit, or wait for one of its threads
    os._exit(0)
