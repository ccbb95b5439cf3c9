"""What the doctor says: findings with their evidence, and the outcomes of checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

Confidence = Literal["high", "medium", "low"]
Status = Literal["pass", "warn", "fail", "not here"]
WELL = "the doctor found nothing wrong"
UNKNOWN = "no cause that the doctor knows"


@dataclass(frozen=True, slots=True)
class Evidence:
    """One line of one file; line 0 if the source has no lines, such as accounting."""

    file: str
    line: int
    text: str


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong: what, on which rank, how sure, why, and what to type."""

    cause: str
    title: str
    fix: str
    rank: int | None = None
    node: str | None = None
    confidence: Confidence = "medium"
    evidence: tuple[Evidence, ...] = field(default=())
    place: str | None = None  # of the rank, in a layout that divides the model

    def with_evidence(self, *more: Evidence) -> Finding:
        return replace(self, evidence=(*self.evidence, *more))


def as_json(findings: Sequence[Finding]) -> list[dict[str, Any]]:
    """The form that `--json` prints."""
    keys = ("cause", "title", "rank", "place", "node", "confidence", "evidence", "fix")
    return [{key: fields[key] for key in keys} for fields in map(asdict, findings)]


def shown_path(path: Path) -> str:
    """A path, relative to the current folder if it is inside it."""
    try:
        return str(path.absolute().relative_to(Path.cwd()))
    except ValueError:
        return str(path)


@dataclass(frozen=True, slots=True)
class Check:
    """One check of a machine, a node or a connection, with what to type if it failed.

    `not here`: there is nothing to check, or no way to check it.
    """

    name: str
    status: Status
    value: str
    fix: str = ""
    more: Mapping[str, Any] = field(default_factory=dict)  # for programs

    @property
    def ok(self) -> bool | None:
        """None if the check was not made."""
        return None if self.status == "not here" else self.status != "fail"

    def as_json(self) -> dict[str, str]:
        return {"check": self.name, "status": self.status, "value": self.value, "fix": self.fix}


def passed(name: str, value: str, **more: Any) -> Check:
    return Check(name, "pass", value, more=more)


def warned(name: str, value: str, fix: str = "", **more: Any) -> Check:
    return Check(name, "warn", value, fix, more)


def failed(name: str, value: str, fix: str = "", **more: Any) -> Check:
    return Check(name, "fail", value, fix, more)


def not_here(name: str, value: str, **more: Any) -> Check:
    return Check(name, "not here", value, more=more)


def report(checks: Sequence[Check], host: str, seconds: float) -> dict[str, Any]:
    """What `doctor --json` prints for checks."""
    return {
        "host": host,
        "ok": not any(check.status == "fail" for check in checks),
        "seconds": round(seconds, 3),
        "checks": [check.as_json() for check in checks],
    }
