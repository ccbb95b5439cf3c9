"""Numbers as people read them, short enough for a column."""

from __future__ import annotations

import math
from itertools import pairwise

SPARKS = "▁▂▃▄▅▆▇█"


def duration(seconds: float) -> str:
    """Two units at most: 12ms, 3.4s, 2m05s, 1h12m, 3d04h."""
    if seconds < 0.9995:
        return f"{seconds * 1e3:.0f}ms" if seconds >= 0.00995 else f"{seconds * 1e3:.1f}ms"
    if seconds < 59.5:
        return f"{seconds:.1f}s" if seconds < 9.95 else f"{seconds:.0f}s"
    whole = round(seconds)
    for unit, smaller, size, upper in (("m", "s", 60, 60), ("h", "m", 3600, 24)):
        if whole < size * upper:
            big, rest = divmod(whole, size)
            return f"{big}{unit}{rest * 60 // size:02d}{smaller}"
    days, rest = divmod(whole, 86400)
    return f"{days}d{rest // 3600:02d}h"


def whole_duration(seconds: float) -> str:
    """Without parts of a second, for what ticks: 1s, 45s, 2m05s."""
    return f"{max(1, round(seconds))}s" if seconds < 59.5 else duration(seconds)


def count(number: float) -> str:
    """1.2, 850, 12.3k, 4.5M."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if number >= limit:
            return f"{number / (1e3 if unit == 'k' else limit):.3g}{unit}"
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"


def hours(number: float) -> str:
    """0.031, 4.25, 113."""
    return f"{number:.3f}" if number < 1 else f"{number:.2f}" if number < 10 else f"{number:.0f}"


def num_bytes(number: float) -> str:
    """In the units that GPUs are sold in: 3K, 512M, 71.2G."""
    if number >= 1 << 30:
        return f"{number / (1 << 30):.1f}G"
    if number >= 1 << 20:
        return f"{number / (1 << 20):.0f}M"
    return f"{number / (1 << 10):.0f}K"


def sparkline(values: list[float | None], width: int) -> str:
    """A curve's shape in one line; `!` where a value is not a number."""
    if not values or width < 1:
        return ""
    width = min(width, len(values))
    edges = [i * len(values) // width for i in range(width + 1)]
    cells = [values[begin:end] for begin, end in pairwise(edges)]
    means: list[float | None] = []
    for cell in cells:
        known = [v for v in cell if v is not None and math.isfinite(v)]
        means.append(sum(known) / len(known) if len(known) == len(cell) else None)
    finite = [value for value in means if value is not None]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    span = (high - low) or 1.0
    return "".join(
        "!" if value is None else SPARKS[min(7, int((value - low) / span * 8))] for value in means
    )
