"""What limited a run, by what evidence, and what to type next: every command shows what is here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from allranks.run.folder import RunDir
from allranks.run.record import RankRecord
from allranks.timing.steps import Timing

Limit = Literal[
    "compute",
    "launches",
    "host",
    "copies",
    "data",
    "communication",
    "straggler",
    "pauses",
    "too-short",
    "unknown",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The part of a run's time whose removal would gain most."""

    limit: Limit
    why: str
    share: float | None = None  # of the time from the first steady step to the last, 0 to 1
    rank: int | None = None  # the one rank that it is about
    sure: bool = False
    next: str | None = None  # what to type
    gain: float | None = None  # at most so many times as fast without it
    line: str | None = None  # of the user's code, such as train.py:52
    shares: Mapping[str, float] = field(default_factory=dict)  # of all parts; they sum to 1
    cause: str | None = None  # under which the doctor publishes it; None for none

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Warning:
    """Something that will go wrong if the run goes on."""

    kind: str
    text: str
    line: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """Everything that is concluded about a run."""

    verdict: Verdict
    warnings: tuple[Warning, ...] = ()
    mfu: float | None = None  # model FLOPs utilisation, 0 to 1
    since: Mapping[str, Any] | None = None  # what changed since the last comparable run; `text`

    def as_json(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict.as_json(),
            "warnings": [asdict(warning) for warning in self.warnings],
            "mfu": self.mfu,
            "since": self.since,
        }


def judge(
    run: RunDir,
    measured: Timing | None = None,
    records: Mapping[int, RankRecord] | None = None,
) -> Judgement:
    """What limited a run. Takes two seconds at most, however long the run.

    `measured`, `records`: if the caller has read them already.
    """
    return Judgement(verdict=Verdict(limit="unknown", why="nothing was measured"))
