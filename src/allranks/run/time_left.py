"""Estimates the time that a run has left. `run`, `watch`, its page and `ls` all show this."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

WINDOW_SECONDS = 600.0
MAX_MOMENTS = 256
MIN_PAUSE_SECONDS = 1.0  # shorter pauses count as part of the steps around them
ALIKE = 2.0  # pauses that differ by a smaller factor are of the same kind


class Moment(NamedTuple):
    """The end of a step."""

    step: int
    time: float  # UNIX time
    paused: float  # seconds of pauses before it


@dataclass(slots=True)
class Pauses:
    """Pauses of about the same length: evaluations, or saves."""

    seconds: float  # of all of them
    last: int  # the step that the last one came after
    count: int = 1

    def is_like(self, seconds: float) -> bool:
        mean = self.seconds / self.count
        return mean / ALIKE < seconds < mean * ALIKE

    def per_step(self, origin: int, step: int) -> tuple[float, int]:
        """Their seconds per step, and the step up to which none is outstanding at `step`."""
        begun = max(1, self.last - origin)
        # If one does not come when it is due, they are rarer than they seemed.
        since = max(self.last, step - begun // self.count)
        return self.seconds / max(begun, since - origin), since


class StepClock:
    """How long steps take by the clock, and the pauses between them: evaluations and saves.

    Only the later half of the steps counts, and at most ten minutes, because the first are slow.
    `origin`: the step from which pauses are counted.
    """

    def __init__(self, origin: int = 0) -> None:
        self.origin = origin
        self._moments: deque[Moment] = deque()
        self._own_seconds: float | None = None  # of the last step, as it measured itself
        self._paused = 0.0
        self._kinds: list[Pauses] = []
        self._somewhere = 0.0  # seconds of pauses between steps that were not read

    def take(self, step: int, time: float, seconds: float | None) -> None:
        """Take in the next known step. Steps before it may have been missed."""
        if self._moments:
            before = self._moments[-1]
            if step <= before.step or time < before.time:
                return
            made = step - before.step
            pause = time - before.time - made * seconds if seconds is not None else 0.0
            if seconds is not None and pause >= MIN_PAUSE_SECONDS and pause > seconds:
                self._take_pause(pause, before.step if made == 1 else None)
        self._own_seconds = seconds
        self._moments.append(Moment(step, time, self._paused))
        self._forget()

    def _take_pause(self, seconds: float, step: int | None) -> None:
        self._paused += seconds
        if step is None:
            self._somewhere += seconds
            return
        alike = next((kind for kind in self._kinds if kind.is_like(seconds)), None)
        if alike is None:
            self._kinds.append(Pauses(seconds, step))
        else:
            alike.seconds, alike.last = alike.seconds + seconds, step
            alike.count += 1

    def _forget(self) -> None:
        moments, last = self._moments, self._moments[-1]
        half = (self.origin + last.step) // 2
        while len(moments) > 2 and (
            moments[1].step <= half or moments[1].time <= last.time - WINDOW_SECONDS
        ):
            moments.popleft()
        if len(moments) > MAX_MOMENTS:  # older moments are thinned out further
            self._moments = deque([*list(moments)[:-1:2], last])

    @property
    def step_seconds(self) -> float | None:
        """Average seconds of a step without pauses; None before the first step."""
        if not self._moments:
            return None
        first, last = self._moments[0], self._moments[-1]
        if first is last:
            return self._own_seconds
        return (last.time - first.time - (last.paused - first.paused)) / (last.step - first.step)

    @property
    def seconds_per_step(self) -> float | None:
        """Average seconds of a step with its share of pauses; None before the first step."""
        step = self.step_seconds
        return None if step is None else step + sum(share for share, _ in self._pauses())

    def seconds_left(self, last_step: int | None, now: float) -> float | None:
        """Seconds until `last_step` is done, with all pauses; None if that is not known yet."""
        took = self.step_seconds
        if took is None or last_step is None:
            return None
        last = self._moments[-1]
        left = max(0, last_step - last.step)
        pauses = sum(share * max(0, last_step - since) for share, since in self._pauses())
        # It is in a step now, or in a pause.
        passed = max(0.0, now - last.time)
        return max(max(0, left - 1) * took, left * took + pauses - passed)

    def _pauses(self) -> list[tuple[float, int]]:
        """For each kind, its seconds per step, and the step up to which none is outstanding."""
        step = self._moments[-1].step
        somewhere = self._somewhere / max(1, step - self.origin)
        return [(somewhere, step), *(kind.per_step(self.origin, step) for kind in self._kinds)]
