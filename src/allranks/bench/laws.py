"""Whether Amdahl's or the Universal Scalability Law fits measured speedups, and what it predicts.

A law is about more ranks of one kind: the layouts that it is fitted to differ in one axis alone.
A law fits if it misses no layout by more than that layout's 95% interval or `FAR`, whichever is
wider. Amdahl's, which has one parameter, is preferred. The other has two, so it fits any two
layouts beyond the base exactly, and needs three.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from allranks.layout import AXES
from allranks.show.numbers import percent, ratio
from allranks.timing.comparison import Compared, relative_error

AMDAHL, USL = "Amdahl's law", "Universal Scalability Law"
UNSURE = 0.1  # half the 95% interval of a serial fraction; with more, it says nothing
FAR = 0.05  # of a measured speedup
SHOWN = 0.0005  # anything less is shown as 0.0%
USL_POINTS = 3  # layouts beyond the base


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A law that fits the measured speedups, and predicts those of more ranks."""

    law: str
    serial_fraction: float | None  # what more ranks do not speed up; None unless Amdahl's
    contention: float  # waiting for each other; the serial fraction in Amdahl's law
    coherence: float  # everyone talking to everyone; 0 in Amdahl's law
    fastest_at_ranks: float | None  # where the speedup is highest; None if it never falls
    half_efficient_at_ranks: float | None  # where the efficiency falls below a half
    base_ranks: int = 1  # what the speedups are against
    serial_fraction_error: float | None = None  # half of its 95% interval, and how far it is off
    error: float = 0.0  # relative error of a predicted speedup
    axis: str = "dp"  # in which the layouts differ
    layouts: tuple[str, ...] = ()  # to which it is fitted
    most_ranks: int = 1  # of these

    def speedup(self, ranks: float) -> float:
        n = ranks / self.base_ranks
        return n / (1 + self.contention * (n - 1) + self.coherence * n * (n - 1))

    def prediction(self, ranks: int) -> dict[str, Any]:
        """What the law predicts for a layout that was not measured, with its range."""
        speedup = self.speedup(ranks)
        low, high = speedup * (1 - self.error), speedup * (1 + self.error)
        if self.serial_fraction is not None and self.serial_fraction_error:
            n, error = ranks / self.base_ranks, self.serial_fraction_error
            most, fewest = min(1.0, self.contention + error), max(0.0, self.contention - error)
            low, high = (n / (1 + serial * (n - 1)) for serial in (most, fewest))
        return {"ranks": ranks, "speedup": speedup, "range": [low, high], "law": self.law}


def laws_of(base: Compared, larger: Sequence[Compared]) -> list[Fit]:
    """Both laws, fitted by least squares to n/speedup - 1; the simpler one first."""
    points = [(row.ranks / base.ranks, row.speedup or 1.0) for row in larger]
    excess = [(n, n / speedup - 1) for n, speedup in points]
    serial = sum(y * (n - 1) for n, y in excess) / sum((n - 1) ** 2 for n, _ in excess)
    contention, coherence = nonnegative_fit([(n - 1, n * (n - 1), y) for n, y in excess])
    peak = math.sqrt((1 - contention) / coherence) if coherence > 0 and contention < 1 else None
    half = _half(contention, coherence)
    amdahl = Fit(
        law=AMDAHL,
        serial_fraction=serial,
        contention=serial,
        coherence=0.0,
        fastest_at_ranks=None,
        half_efficient_at_ranks=base.ranks * (1 + 1 / serial) if serial > 0 else None,
        base_ranks=base.ranks,
        serial_fraction_error=serial_error(base, larger, serial) or None,
    )
    usl = Fit(
        law=USL,
        serial_fraction=None,
        contention=contention,
        coherence=coherence,
        fastest_at_ranks=peak * base.ranks if peak is not None else None,
        half_efficient_at_ranks=half * base.ranks if half is not None else None,
        base_ranks=base.ranks,
    )
    usl = replace(usl, error=max(math.hypot(error_of(r, base), miss(usl, r)) for r in larger))
    return [amdahl, usl] if len(larger) >= USL_POINTS else [amdahl]


def nonnegative_fit(terms: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """The a and b, neither below 0, that minimise the sum of (a u + b v - y)² over all (u, v, y).

    Where u and v are proportional, all of it is a.
    """
    uu = sum(u * u for u, _, _ in terms)
    uv = sum(u * v for u, v, _ in terms)
    vv = sum(v * v for _, v, _ in terms)
    uy = sum(u * y for u, _, y in terms)
    vy = sum(v * y for _, v, y in terms)
    determinant = uu * vv - uv * uv
    if determinant > 1e-12 * uu * vv:
        a, b = (vv * uy - uv * vy) / determinant, (uu * vy - uv * uy) / determinant
        if a >= 0 and b >= 0:
            return a, b
        if a < 0:
            return 0.0, max(0.0, vy / vv)
    return max(0.0, uy / uu), 0.0


def _half(contention: float, coherence: float) -> float | None:
    """The n with 1 + contention (n-1) + coherence n (n-1) = 2."""
    b = contention - coherence
    divisor = b + math.sqrt(b * b + 4 * coherence * (1 + contention))
    return 2 * (1 + contention) / divisor if divisor > 0 else None


def law_of(rows: Sequence[Compared]) -> tuple[Fit | None, str | None]:
    """The law that these speedups follow; or None, and why no law can be fitted."""
    base = next((row for row in rows if row.pace and row.layout == row.baseline), None)
    axis, larger = beyond(base, rows) if base is not None else ("dp", [])
    if doubt := next((row.doubt for row in (*larger, base) if row and row.doubt), None):
        return None, doubt
    if base is None or not larger:
        return None, "it takes layouts with different numbers of ranks along one axis"
    best, top = max(larger, key=lambda row: row.speedup or 0.0), larger[-1]
    assert best.speedup is not None
    if best.speedup <= 1 + SHOWN:
        return None, f"no larger layout is faster than {base.layout}"
    names, most = tuple(row.layout for row in (base, *larger)), max(row.ranks for row in larger)
    laws = [
        replace(law, axis=axis, layouts=names, most_ranks=most) for law in laws_of(base, larger)
    ]
    if all(fit.contention + fit.coherence * top.ranks <= SHOWN for fit in laws):
        return None, (
            f"{top.layout} is {ratio(top.speedup)} as fast as {base.layout}: nothing is lost, so "
            "there is no loss to extrapolate"
        )
    fit = next((fit for fit in laws if not missed(fit, larger, base)), None)
    if fit is None:
        return None, "; ".join(
            f"{fit.law} misses {', '.join(missed(fit, larger, base))}" for fit in laws
        )
    serial, error = fit.serial_fraction, fit.serial_fraction_error or 0.0
    if serial is not None and error > UNSURE:
        low, high = max(0.0, serial - error), min(1.0, serial + error)
        return None, (
            f"the measurements are too noisy: their 95% intervals allow for {percent(low, 0)} to "
            f"{percent(high, 0)} of the work to be serial"
        )
    return fit, None


def beyond(base: Compared, rows: Sequence[Compared]) -> tuple[str, list[Compared]]:
    """The axis along which most rows are larger than the base, and these rows."""
    along = {
        axis: [row for row in rows if row.pace and row.whole.axis_beyond(base.whole) == axis]
        for axis in AXES
    }
    axis = max(along, key=lambda axis: len({row.ranks for row in along[axis]}))
    return axis, along[axis]


def missed(fit: Fit, larger: Sequence[Compared], base: Compared) -> list[str]:
    """The layouts that a law misses, each with its predicted and its measured speedup."""
    if fit.serial_fraction is not None and not 0.0 <= fit.serial_fraction < 1 - SHOWN:
        return [f"all layouts, with a serial fraction of {percent(fit.serial_fraction)}"]
    return [
        f"{row.layout} ({ratio(fit.speedup(row.ranks))} predicted, {ratio(row.speedup)} measured)"
        for row in larger
        if miss(fit, row) > max(FAR, error_of(row, base))
    ]


def miss(fit: Fit, row: Compared) -> float:
    """How far a law is off, relative to the measured speedup."""
    return abs(fit.speedup(row.ranks) / (row.speedup or 1.0) - 1)


def error_of(row: Compared, base: Compared) -> float:
    """Half of the 95% interval of a speedup, relative to it."""
    return math.hypot(relative_error(row), relative_error(base))


def serial_error(base: Compared, larger: Sequence[Compared], serial: float) -> float:
    """Half of the serial fraction's 95% interval: the errors of the paces, and how far it is off.

    It is off by its largest difference from the serial fraction of a single layout.
    """
    weights = [(row.ranks / base.ranks - 1, row) for row in larger]
    squares = sum(weight**2 for weight, _ in weights)
    shares = [weight * (weight + 1) / (row.speedup or 1.0) / squares for weight, row in weights]
    own = [share * relative_error(row) for share, (_, row) in zip(shares, weights, strict=True)]
    single = [((weight + 1) / (row.speedup or 1.0) - 1) / weight for weight, row in weights]
    misses = max(abs(each - serial) for each in single)
    # The base's error is the same in all of them.
    return math.hypot(*own, sum(shares) * relative_error(base), misses)
