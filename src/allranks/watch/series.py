"""Curves of a run that goes on for days, in bounded memory."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

MAX_BUCKETS = 256
MAX_POINTS = 512


@dataclass(slots=True)
class Series:
    """Means of a value over equal stretches of steps; stretches double when there are too many."""

    width: int = 1  # steps in a stretch
    sums: array[float] = field(default_factory=lambda: array("d"))
    counts: array[int] = field(default_factory=lambda: array("l"))

    def add(self, step: int, value: float) -> None:
        index = (step - 1) // self.width
        if index < 0:
            return
        if index >= len(self.sums):
            while index >= MAX_BUCKETS:
                self._double()
                index = (step - 1) // self.width
            missing = index + 1 - len(self.sums)
            if missing > 0:
                self.sums.extend([0.0] * missing)
                self.counts.extend([0] * missing)
        self.sums[index] += value
        self.counts[index] += 1

    def mean(self) -> float | None:
        """Of all."""
        return sum(self.sums) / sum(self.counts) if self.counts else None

    def means(self, width: int | None = None) -> list[float | None]:
        """The mean of each stretch of `width` steps, a doubling of this one's or its own."""
        factor = (width or self.width) // self.width
        if factor <= 1:
            return [s / c if c else None for s, c in zip(self.sums, self.counts, strict=True)]
        found: list[float | None] = []
        for begin in range(0, len(self.sums), factor):
            count = sum(self.counts[begin : begin + factor])
            found.append(sum(self.sums[begin : begin + factor]) / count if count else None)
        return found

    def _double(self) -> None:
        self.width *= 2
        for values in (self.sums, self.counts):
            if len(values) % 2:
                values.append(0)
        self.sums = array("d", map(sum, zip(self.sums[::2], self.sums[1::2], strict=True)))
        self.counts = array("l", map(sum, zip(self.counts[::2], self.counts[1::2], strict=True)))


@dataclass(slots=True)
class Points:
    """A curve's points in the order of steps, thinned by half whenever there are too many."""

    steps: list[int] = field(default_factory=list)
    values: list[float | None] = field(default_factory=list)  # None: not a number
    _stride: int = 1
    _skipped: int = 0
    last: float | None = None  # the newest value, kept or not

    def add(self, step: int, value: float | None) -> None:
        self.last = value
        if self.steps and step <= self.steps[-1]:
            self.go_back(step - 1)
        self._skipped += 1
        # What is not a number is what people look for.
        if self._skipped < self._stride and value is not None:
            return
        self._skipped = 0
        self.steps.append(step)
        self.values.append(value)
        if len(self.steps) > MAX_POINTS:
            self._thin()
            self._stride *= 2

    def _thin(self) -> None:
        """Of every two points one; the one that is not a number, if there is one."""
        values = self.values
        kept = [
            at + 1 if at + 1 < len(values) and values[at + 1] is None else at
            for at in range(0, len(values), 2)
        ]
        self.steps, self.values = [self.steps[at] for at in kept], [values[at] for at in kept]

    def go_back(self, step: int) -> None:
        """Forget what came after `step`: a later attempt makes these steps anew."""
        while self.steps and self.steps[-1] > step:
            self.steps.pop()
            self.values.pop()
