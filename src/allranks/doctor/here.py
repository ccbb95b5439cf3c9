"""Checks of this machine before a run: what `allranks doctor` alone does."""

from __future__ import annotations

from allranks.errors import AllranksError


def check_here(*, as_json: bool) -> int:
    """Check, print, and return the exit code."""
    raise AllranksError(
        "name what to look at",
        fix="write allranks doctor RUN, allranks doctor LOGFILE, or allranks doctor --list",
    )
