"""Numbers as people read them: one spelling for each quantity; None (not known) is a dash.

Sizes of memory and files are in powers of 1024 (GiB), rates of disks and links in powers of 1000
(GB/s, Gbit/s), as their vendors count.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from datetime import datetime
from itertools import groupby

NOTHING = "-"
MOST_NAMES = 5  # of a list
MOST_RANGES = 8  # of ranks


def number(value: float | None, digits: int = 3, *, signed: bool = False) -> str:
    """With that many significant digits, or the whole integer part: 0.0412, 3.40, 12,345."""
    if value is None:
        return NOTHING
    plus = "+" if signed and value > 0 else ""
    if value == 0 or not math.isfinite(value):
        return f"{plus}{value:.0f}"
    size = int(f"{value:.{digits - 1}e}".partition("e")[2])
    if size < -6:
        return f"{plus}{value:.{digits - 1}e}"
    return f"{plus}{value:,.{max(0, digits - 1 - size)}f}"


def metric(value: float | None, *, signed: bool = False) -> str:
    """A loss or an accuracy, with five digits: those of two layouts differ little."""
    return number(value, 5, signed=signed)


def short(value: float | None) -> str:
    """A number in a narrow column: 850, 12.3k, 4.5M."""
    if value is None:
        return NOTHING
    for unit, letter, least in ((1e9, "G", 1e9), (1e6, "M", 1e6), (1e3, "k", 1e4)):
        if abs(value) >= least:
            return f"{value / unit:.3g}{letter}"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def count(value: float | None, noun: str = "") -> str:
    """12,345; with a noun: 1 rank, 4 ranks."""
    if value is None:
        return NOTHING
    return f"{value:,.0f}" + (f" {noun}{'' if value == 1 else 's'}" if noun else "")


def progress(done: int | None, whole: int | None) -> str:
    """1,200/5,000; 120k/2M; only what is done if the whole is not known."""
    if done is None:
        return NOTHING
    if not whole:
        return count(done)
    return "/".join(short(n) if whole >= 100_000 else count(n) for n in (done, whole))


def ratio(value: float | None) -> str:
    """How many times as fast, as large, as expensive: 3.91x."""
    return NOTHING if value is None else f"{value:,.2f}x"


def percent(share: float | None, decimals: int = 1, *, signed: bool = False) -> str:
    """A share of one: 97.4%."""
    if share is None:
        return NOTHING
    text = f"{100 * share:z,.{decimals}f}%"
    return f"+{text}" if signed and text[0] != "-" and share > 0 else text


def between(bounds: Sequence[float] | None) -> str:
    """A range: 118-131."""
    return NOTHING if bounds is None else f"{number(bounds[0])}-{number(bounds[1])}"


def duration(seconds: float | None, *, whole: bool = False) -> str:
    """Two units at most: 84.2µs, 12.6ms, 3.42s, 2m05s, 1h12m, 3d04h; as in a job file.

    `whole`: no fractions of a second, for limits and for times that are counting.
    """
    if seconds is None:
        return NOTHING
    if abs(seconds) < 59.5 if whole else abs(seconds) < 59.95:
        if whole:
            return f"{seconds:.0f}s"
        for unit, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
            if abs(seconds) >= 0.9995 * unit:
                return f"{number(seconds / unit)}{name}"
        return f"{number(seconds * 1e6, 1)}µs" if seconds else "0s"
    left = round(seconds)
    if left < 3600:
        size, name, part, part_name = 60, "m", 1, "s"
    elif left < 86400:
        size, name, part, part_name = 3600, "h", 60, "m"
    else:
        size, name, part, part_name = 86400, "d", 3600, "h"
    rest = left % size // part
    return f"{left // size}{name}" + (f"{rest:02d}{part_name}" if rest else "")


def size(num_bytes: float | None, *, narrow: bool = False) -> str:
    """Of memory and files: 4 KiB, 512 MiB, 71.2 GiB; in a narrow column 71.2Gi."""
    if num_bytes is None:
        return NOTHING
    for unit, power in (("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if num_bytes >= 1 << power:
            text = _three(num_bytes / (1 << power))
            return f"{text}{unit[:2]}" if narrow else f"{text} {unit}"
    return f"{num_bytes:.0f}B" if narrow else f"{num_bytes:.0f} B"


def rate(bytes_per_second: float | None) -> str:
    """Of disks, links and collectives: 12.5 GB/s, 850 MB/s."""
    return _decimal(bytes_per_second, "B/s")


def bit_rate(bits_per_second: float | None) -> str:
    """Of networks, as they are sold: 100 Gbit/s."""
    return _decimal(bits_per_second, "bit/s")


def _decimal(value: float | None, unit: str) -> str:
    if value is None:
        return NOTHING
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{_three(value / size)} {letter}{unit}"
    return f"{_three(value)} {unit}"


def _three(value: float) -> str:
    """Three significant digits without trailing zeros, or the whole integer part."""
    return f"{value:.3g}" if value < 999.5 else f"{value:,.0f}"


def dollars(value: float | None) -> str:
    """$0.0412, $3.90, $1,234."""
    if value is None:
        return NOTHING
    if 0 < abs(value) < 1:
        return "$" + number(value)
    return f"${value:,.{2 if abs(value) < 1000 else 0}f}"


def moment(when: float | str | None, now: float | None = None) -> str:
    """A time of today, or a day and time: 16:40, 15 Nov 16:40. Local, as SLURM's text is."""
    if when is None:
        return NOTHING
    try:
        then = datetime.fromisoformat(when) if isinstance(when, str) else None
    except ValueError:
        return str(when)
    then = then or datetime.fromtimestamp(float(when))
    today = datetime.fromtimestamp(now) if now is not None else datetime.now()
    return f"{then:%H:%M}" if then.date() == today.date() else f"{then:%d %b %H:%M}"


def listed(names: Iterable[object]) -> str:
    """`a`, `a, b and c`, `a, b, c, d and 60 more`."""
    known = [str(name) for name in names]
    if len(known) > MOST_NAMES:
        known[MOST_NAMES - 1 :] = [f"{len(known) - MOST_NAMES + 1} more"]
    return " and ".join(filter(None, (", ".join(known[:-1]), known[-1])))


def ranks_in_words(ranks: Iterable[int]) -> str:
    """`rank 1`, `ranks 0, 2 and 3`, `ranks 0-7 and 12`, `32 ranks`."""
    numbers = sorted(ranks)
    ranges: list[str] = []
    for _, group in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        row = [number for _, number in group]
        ranges += [f"{row[0]}-{row[-1]}"] if len(row) > 2 else [str(number) for number in row]
    if len(numbers) == 1:
        return f"rank {ranges[0]}"
    if len(ranges) > MOST_RANGES:
        return f"{len(numbers)} ranks"
    *most, last = ranges
    return f"ranks {', '.join(most)} and {last}" if most else f"ranks {last}"
