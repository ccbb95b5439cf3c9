"""A run that climbs: measured on one layout after another while that pays, trained on the best.

For a task nothing is lost: the steps that are measured are steps of its training, and the next
layout goes on from there. A script is measured on each rung, and trained anew on the last good one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from allranks.layout import Layout
from allranks.rundir import RunDir
from allranks.timing import timing

DEFAULT_STEPS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Ladder:
    """As it stands in run.json."""

    layouts: tuple[str, ...]  # the smallest first
    min_efficiency: float
    steps: int = DEFAULT_STEPS
    speeds: dict[str, float] = field(default_factory=dict)  # samples/s of the rungs so far
    chosen: str | None = None  # the one to train on, once it is known

    @property
    def rung(self) -> str:
        """The layout that comes next: the next to be measured, or the chosen one."""
        return self.chosen or next(one for one in self.layouts if one not in self.speeds)

    def efficiency(self, layout: str) -> float | None:
        first = self.layouts[0]
        if layout not in self.speeds or not self.speeds.get(first):
            return None
        times = Layout.parse(layout).ranks / Layout.parse(first).ranks
        return self.speeds[layout] / self.speeds[first] / times

    def after(self, layout: str, samples_per_second: float) -> Ladder:
        """The ladder once a rung was measured: one higher, or settled."""
        speeds = {**self.speeds, layout: samples_per_second}
        climbed = Ladder(**{**asdict(self), "speeds": speeds})
        efficiency = climbed.efficiency(layout)
        holds = efficiency is not None and efficiency >= self.min_efficiency
        place = self.layouts.index(layout)
        if not holds and place > 0:
            return Ladder(**{**asdict(climbed), "chosen": self.layouts[place - 1]})
        if place + 1 == len(self.layouts):
            return Ladder(**{**asdict(climbed), "chosen": layout})
        return climbed


def of(layouts: Sequence[Layout], *, min_efficiency: float, steps: int = DEFAULT_STEPS) -> Ladder:
    """A ladder of these layouts, nothing of which was measured yet."""
    ordered = sorted(layouts, key=lambda layout: (layout.ranks, layout.nodes))
    rungs = tuple(dict.fromkeys(str(layout) for layout in ordered))
    return Ladder(layouts=rungs, min_efficiency=min_efficiency, steps=steps)


def read(run: RunDir) -> Ladder | None:
    """The run's ladder; None if it has none."""
    content = run.info().get("ladder")
    return Ladder(**{**content, "layouts": tuple(content["layouts"])}) if content else None


def ended_on_rung(run: RunDir) -> bool:
    """Whether the last attempt was only there to be measured."""
    attempts = run.attempts()
    return read(run) is not None and bool(attempts) and run.window(attempts[-1]) is not None


def measured(run: RunDir, layout: str) -> Ladder | None:
    """Take up what the last attempt has measured; None if it did not come to the end of a rung."""
    ladder = read(run)
    attempts = run.attempts()
    if ladder is None or ladder.chosen is not None or not attempts:
        return None
    window = run.window(attempts[-1])
    found = timing(run)
    if window is None or found is None or found.last_step < window["last"]:
        return None
    climbed = ladder.after(layout, found.samples_per_second)
    write(run, climbed)
    return climbed


def write(run: RunDir, ladder: Ladder) -> None:
    content: dict[str, Any] = {**asdict(ladder), "layouts": list(ladder.layouts)}
    run.update_info(lambda info: info.update(ladder=content))
