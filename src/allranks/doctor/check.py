"""One check of a machine, a node or a connection: its outcome, and what to type if it failed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Status = Literal["pass", "warn", "fail", "not here"]


@dataclass(frozen=True, slots=True)
class Check:
    """`not here`: there is nothing to check, or no way to check it."""

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
