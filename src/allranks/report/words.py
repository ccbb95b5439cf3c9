"""Numbers as people read them. page/page.js writes them the same way; a test compares the two."""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import ROUND_HALF_UP, Decimal

from allranks.show.tables import NOTHING

DAY, HOUR, MINUTE = 86_400, 3_600, 60


def fixed(value: float, decimals: int) -> str:
    """With thousands separated; halves are rounded away from zero, as JavaScript does."""
    rounded = Decimal(value).quantize(Decimal(1).scaleb(-decimals), rounding=ROUND_HALF_UP)
    return f"{abs(rounded) if rounded == 0 else rounded:,.{decimals}f}"


def number(value: float) -> str:
    """Three digits that count, and never less than the whole part."""
    if value == 0:
        return "0"
    size = math.floor(math.log10(abs(value)))
    if size < -6:
        return "0"  # of whatever is shown here
    return fixed(value, max(0, 2 - size))


def metric(value: float) -> str:
    """Five digits that count: losses of two layouts differ late."""
    size = math.floor(math.log10(abs(value))) if value else 0
    return fixed(value, min(12, max(0, 4 - size)))


def count(value: float) -> str:
    return fixed(value, 0)


def ratio(value: float) -> str:
    return fixed(value, 2) + "×"  # noqa: RUF001  # the sign for times


def percent(value: float) -> str:
    return fixed(value * 100, 1) + "%"


def signed_percent(value: float) -> str:
    return ("+" if value > 0 else "") + percent(value)


def signed(value: float) -> str:
    return ("+" if value > 0 else "") + number(value)


def milliseconds(seconds: float) -> str:
    return number(seconds * 1000) + " ms"


def duration(seconds: float) -> str:
    """Two units at most: 45.2 s, 3 min 20 s, 2 h 5 min, 3 d 4 h."""
    if seconds < MINUTE:
        return number(seconds) + " s"
    for unit, name, part, part_name in ((DAY, "d", HOUR, "h"), (HOUR, "h", MINUTE, "min")):
        if seconds >= unit - part / 2:
            return _two_units(seconds, unit, name, part, part_name)
    return _two_units(seconds, MINUTE, "min", 1, "s")


def _two_units(seconds: float, unit: int, name: str, part: int, part_name: str) -> str:
    whole, rest = divmod(math.floor(seconds / part + 0.5), unit // part)
    return f"{whole} {name}" + (f" {rest} {part_name}" if rest else "")


def dollars(value: float) -> str:
    if 0 < abs(value) < 1:
        return "$" + number(value)
    return "$" + fixed(value, 2 if abs(value) < 1000 else 0)


FORMATS: dict[str, Callable[[float], str]] = {
    "number": number,
    "metric": metric,
    "count": count,
    "ratio": ratio,
    "percent": percent,
    "signed_percent": signed_percent,
    "signed": signed,
    "milliseconds": milliseconds,
    "duration": duration,
    "dollars": dollars,
}


def show(form: str, value: float | None) -> str:
    return NOTHING if value is None else FORMATS[form](value)
