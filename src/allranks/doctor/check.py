"""One check of a machine: how it came out, what was seen, and what to type."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["pass", "warn", "fail", "not here"]


@dataclass(frozen=True, slots=True)
class Check:
    """`not here`: there is nothing of the kind to check, or no way to."""

    name: str
    status: Status
    value: str
    fix: str = ""

    def as_json(self) -> dict[str, str]:
        return {"check": self.name, "status": self.status, "value": self.value, "fix": self.fix}


def passed(name: str, value: str) -> Check:
    return Check(name, "pass", value)


def warned(name: str, value: str, fix: str) -> Check:
    return Check(name, "warn", value, fix)


def failed(name: str, value: str, fix: str) -> Check:
    return Check(name, "fail", value, fix)


def not_here(name: str, value: str) -> Check:
    return Check(name, "not here", value)


def in_bytes(size: float) -> str:
    """A size for people: 64 MiB, 3.2 GiB."""
    gib = size / 2**30
    return f"{gib:.1f} GiB" if gib >= 1 else f"{size / 2**20:.0f} MiB"


def speed(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e6:.0f} MB/s"
