"""One check, of a machine, a node or the way between two: how it came out, and what to type."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Status = Literal["pass", "warn", "fail", "not here"]


@dataclass(frozen=True, slots=True)
class Check:
    """`not here`: there is nothing of the kind to check, or no way to."""

    name: str
    status: Status
    value: str
    fix: str = ""
    more: Mapping[str, Any] = field(default_factory=dict)  # for other programs than this one's

    @property
    def ok(self) -> bool | None:
        """None for a check that was not made."""
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
