"""Made-up entries of torch's traces; times are microseconds."""

from __future__ import annotations

from typing import Any

from allranks.timing.trace import STEP_MARK


def event(name: str, cat: str, ts: float, dur: float, tid: int = 1, **args: Any) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "cat": cat,
        "ts": ts,
        "dur": dur,
        "pid": 1,
        "tid": tid,
        "args": args,
    }


def mark(step: int, ts: float) -> dict[str, Any]:
    return event(f"{STEP_MARK}{step}", "user_annotation", ts, 1)
