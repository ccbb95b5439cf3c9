"""Marks: which numbers are good and which need attention, by limits that the user can set."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from allranks.errors import AllranksError
from allranks.show.numbers import count
from allranks.watch.views import RankView

Verdict = Literal["good", "warn", ""]

# Not by colour alone: not every terminal has it, and not everyone sees it.
SIGNS: Mapping[Verdict, str] = {"good": "+", "warn": "!", "": " "}
STYLES: Mapping[Verdict, str] = {"good": "green", "warn": "yellow", "": ""}
LIMIT_SIGNS = {"warn_under": "! under", "good_from": "+ from", "warn_over": "! over"}


@dataclass(frozen=True, slots=True)
class Mark:
    """Limits in percent; None means no such limit."""

    about: str
    warn_under: float | None = None
    good_from: float | None = None
    warn_over: float | None = None

    def judge(self, percent: float | None) -> Verdict:
        if percent is None:
            return ""
        if self.warn_under is not None and percent < self.warn_under:
            return "warn"
        if self.warn_over is not None and percent > self.warn_over:
            return "warn"
        return "good" if self.good_from is not None and percent >= self.good_from else ""

    @property
    def limits(self) -> dict[str, float]:
        """The limits that are set, in the order in which they are typed."""
        named = {name: getattr(self, name) for name in LIMIT_SIGNS}
        return {name: limit for name, limit in named.items() if limit is not None}


DEFAULT_MARKS: Mapping[str, Mark] = {
    "gpu_util": Mark("GPU utilisation", warn_under=80, good_from=90),
    "memory": Mark("GPU memory in use", good_from=80, warn_over=90),
    "power": Mark("power, of its limit", good_from=80),
    "network": Mark("network, of the link's rate", warn_over=90),
    "workers": Mark("loader workers busy", warn_over=90),
}


def parse_marks(texts: Iterable[str]) -> dict[str, Mark]:
    """The default marks, changed by what was typed, such as `gpu_util=70,85`."""
    marks = dict(DEFAULT_MARKS)
    for text in texts:
        name, _, limits = text.partition("=")
        if name not in marks:
            known = ", ".join(marks)
            raise AllranksError(f"there is no mark {name!r}", fix=f"use one of {known}")
        names = list(marks[name].limits)
        try:
            numbers = [float(number) for number in limits.split(",")]
            changed: dict[str, Any] = dict(zip(names, numbers, strict=True))
            marks[name] = replace(marks[name], **changed)
        except ValueError:
            meaning = ", ".join(name.replace("_", " ") for name in names)
            example = ",".join(f"{limit:g}" for limit in marks[name].limits.values())
            raise AllranksError(
                f"the mark {text!r} needs {count(len(names), 'limit')} in percent: {meaning}",
                fix=f"write --mark {name}={example}",
            ) from None
    return marks


def mark_in_words(name: str, mark: Mark) -> tuple[str, str]:
    """`gpu_util=80,90` as it is typed, and `GPU utilisation: ! under 80%, + from 90%`."""
    typed = ",".join(f"{limit:g}" for limit in mark.limits.values())
    said = ", ".join(f"{LIMIT_SIGNS[key]} {limit:g}%" for key, limit in mark.limits.items())
    return f"{name}={typed}", f"{mark.about}: {said}"


def share(part: float | None, whole: float | None) -> float | None:
    """In percent; None if either is unknown."""
    return 100 * part / whole if part is not None and whole else None


def traffic(rank: RankView) -> float | None:
    """Bytes per second of the rank's node, in the busier direction."""
    return max((n for n in (rank.sent, rank.received) if n is not None), default=None)


def judged(rank: RankView, marks: Mapping[str, Mark]) -> dict[str, Verdict]:
    """The verdict of each mark on one rank."""
    percents = {
        "gpu_util": rank.utilization,
        "memory": share(rank.memory, rank.memory_total),
        "power": share(rank.power, rank.power_limit),
        "network": share(traffic(rank), rank.link),
        "workers": share(rank.workers_cpu, rank.num_workers),
    }
    return {name: marks[name].judge(percent) for name, percent in percents.items()}
