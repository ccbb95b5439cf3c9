"""Numbers as people read them: one spelling for each quantity."""

from __future__ import annotations


def count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def duration(seconds: float) -> str:
    """Two units at most: 3.4s, 2m05s, 1h12m, 3d04h."""
    if seconds < 60:
        return f"{seconds:.1f}s" if seconds < 10 else f"{seconds:.0f}s"
    for unit, smaller, size in (("m", "s", 60), ("h", "m", 3600), ("d", "h", 86400)):
        if seconds < size * (60 if unit != "h" else 24) or unit == "d":
            whole, rest = divmod(int(seconds), size)
            return f"{whole}{unit}{rest * (60 if unit != 'd' else 24) // size:02d}{smaller}"
    raise AssertionError("unreachable")
