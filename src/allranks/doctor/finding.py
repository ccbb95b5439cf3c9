"""What the doctor says: findings, each with its evidence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

Confidence = Literal["high", "medium", "low"]
MAX_TEXT = 400  # characters of a line that are shown


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

    def with_evidence(self, *more: Evidence) -> Finding:
        return replace(self, evidence=(*self.evidence, *more))


def as_json(findings: Sequence[Finding]) -> list[dict[str, Any]]:
    """The form that `--json` prints."""
    keys = ("cause", "title", "rank", "node", "confidence", "evidence", "fix")
    return [{key: asdict(found)[key] for key in keys} for found in findings]


def shown_path(path: Path) -> str:
    """A path, relative to the current folder if it is inside it."""
    try:
        return str(path.absolute().relative_to(Path.cwd()))
    except ValueError:
        return str(path)
