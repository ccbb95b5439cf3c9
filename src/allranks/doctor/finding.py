"""What the doctor says: findings, each with its evidence, as people and programs read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

Confidence = Literal["high", "medium", "low"]
MAX_TEXT = 400  # characters of a line that are shown


@dataclass(frozen=True, slots=True)
class Evidence:
    """One line of one file; line 0 where a file has none, as an accounting record."""

    file: str
    line: int
    text: str


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong: what, whose, how sure, why, and what to type."""

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
    """The form that `--json` prints; its keys stay."""
    return [
        {
            "cause": found.cause,
            "title": found.title,
            "rank": found.rank,
            "node": found.node,
            "confidence": found.confidence,
            "evidence": [
                {"file": one.file, "line": one.line, "text": one.text} for one in found.evidence
            ],
            "fix": found.fix,
        }
        for found in findings
    ]


def shown_path(path: Path) -> str:
    """A path as short as it can be typed from here."""
    try:
        return str(path.absolute().relative_to(Path.cwd()))
    except ValueError:
        return str(path)
