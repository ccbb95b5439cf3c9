"""A run that climbs a ladder of layouts: measured on each while that pays, trained on the best.

For a task nothing is lost: the steps that are measured are steps of its training, and the next
layout goes on from there. A script is measured on each rung, and trained anew on the last good one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from allranks.launch.backends.slurm.sbatch import Racer
from allranks.run.folder import RunDir
from allranks.timing.comparison import Compared, Pace, compare
from allranks.timing.remarks import SPEEDUP, Remark, forbidding, remarks
from allranks.timing.steps import timing

DEFAULT_STEPS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Ladder:
    """A ladder as run.json records it."""

    layouts: tuple[str, ...]  # the smallest first; with a type of GPU where one was named
    min_efficiency: float
    steps: int = DEFAULT_STEPS
    speeds: dict[str, float] = field(default_factory=dict)  # samples/s of the rungs so far
    doubts: dict[str, str] = field(default_factory=dict)  # why a rung must not be compared
    chosen: str | None = None  # the one to train on, once it is known

    @property
    def rung(self) -> str:
        """The layout that comes next: the next to be measured, or the chosen one."""
        return self.chosen or next(one for one in self.layouts if one not in self.speeds)

    def compared(self, rung: str) -> Compared:
        """A measured rung, compared with the smallest one."""
        runs = [
            Pace("", one, pace, remarks=[Remark("", self.doubts[one], (SPEEDUP,))])
            if one in self.doubts
            else Pace("", one, pace)
            for one, pace in self.speeds.items()
        ]
        return next(row for row in compare(runs) if row.layout == rung)

    def after(self, samples_per_second: float, doubt: str | None = None) -> Ladder:
        """The ladder once its rung was measured: one higher, or settled.

        `doubt`: why that must not be compared. If it cannot be compared, the run climbs no higher:
        it trains on the rung below, or on this one if this is too fast to be true.
        """
        rung, place = self.rung, self.layouts.index(self.rung)
        climbed = replace(
            self,
            speeds={**self.speeds, rung: samples_per_second},
            doubts={**self.doubts, **({rung: doubt} if doubt else {})},
        )
        row, below = climbed.compared(rung), self.layouts[max(0, place - 1)]
        if row.efficiency is None:
            is_too_fast = bool(row.doubt) and not climbed.doubts
            return replace(climbed, chosen=rung if is_too_fast else below)
        if row.efficiency < self.min_efficiency:
            return replace(climbed, chosen=below)
        is_top = rung == self.layouts[-1]
        return replace(climbed, chosen=climbed.fastest_beside(rung)) if is_top else climbed

    def fastest_beside(self, rung: str) -> str:
        """Of the measured rungs with as many ranks as this one, the fastest."""
        ranks = Racer.parse(rung).layout.ranks
        beside = [one for one in self.speeds if Racer.parse(one).layout.ranks == ranks]
        return max(beside, key=lambda one: self.speeds[one])

    def in_words(self, rung: str) -> str:
        """What was measured on a rung, and what comes next."""
        row = self.compared(rung)
        said = f"ladder: {rung} makes {self.speeds[rung]:,.1f} samples/s"
        if row.efficiency is not None:
            said += f" ({row.efficiency:.0%} efficient, measured)"
        elif row.doubt:
            said += f", which cannot be compared ({row.doubt})"
        else:
            said = f"ladder: {rung} cannot be compared, as its samples could not be counted"
        return f"{said}; " + (f"trains on {self.chosen}" if self.chosen else f"next is {self.rung}")


def of(layouts: Sequence[Racer], *, min_efficiency: float, steps: int = DEFAULT_STEPS) -> Ladder:
    """A ladder of these layouts, nothing of which was measured yet."""
    ordered = sorted(layouts, key=lambda racer: (racer.layout.ranks, racer.layout.nodes))
    rungs = tuple(dict.fromkeys(str(racer) for racer in ordered))
    return Ladder(layouts=rungs, min_efficiency=min_efficiency, steps=steps)


def read(run: RunDir) -> Ladder | None:
    """The run's ladder; None if it has none."""
    content = run.info().get("ladder")
    return Ladder(**{**content, "layouts": tuple(content["layouts"])}) if content else None


def ended_on_rung(run: RunDir) -> bool:
    """Whether the last attempt was only there to be measured."""
    attempts = run.attempts()
    return read(run) is not None and bool(attempts) and run.window(attempts[-1]) is not None


def measured(run: RunDir, racer: Racer) -> tuple[str, Ladder] | None:
    """Take up what the last attempt has measured, in `racer`: the rung, and the ladder after it.

    None if it did not come to the end of a rung.
    """
    ladder = read(run)
    attempts = run.attempts()
    if ladder is None or ladder.chosen is not None or not attempts:
        return None
    if Racer.parse(ladder.rung).layout != racer.layout:
        return None  # somebody has moved the run
    window = run.window(attempts[-1])
    found = timing(run)
    if window is None or found is None or found.last_step < window["last"]:
        return None
    said = forbidding(SPEEDUP, remarks(run, found))
    climbed = ladder.after(found.pace or 0.0, said.text if said else None)
    write(run, climbed)
    return ladder.rung, climbed


def write(run: RunDir, ladder: Ladder) -> None:
    content: dict[str, Any] = {**asdict(ladder), "layouts": list(ladder.layouts)}
    run.update_info(lambda info: info.update(ladder=content))
