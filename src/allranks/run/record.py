"""What is read from a run's folder, one function for each thing that several places show."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def final_step(
    start: Mapping[str, Any], info: Mapping[str, Any], window: Mapping[str, Any] | None
) -> int | None:
    """The step that a run is to end with, as far as it is known.

    A task that is measured is given more steps than it will make: the probe ends it, with the
    last step of the window that it has chosen.
    """
    if "job" not in info.get("bench", {}):
        return start.get("steps")
    return window.get("last") if window else None
