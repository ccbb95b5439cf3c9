"""Whether Amdahl's or the Universal Scalability Law fits measured speedups; what it predicts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from allranks.show.numbers import percent, ratio
from allranks.timing.comparison import Compared, relative_error

UNSURE = 0.1  # half the 95% interval of a serial fraction; with more, it says nothing
FAR = 0.1  # of a measured speedup, beyond its interval: a law that misses by more does not fit
SHOWN = 0.0005  # anything less is shown as 0.0%


@dataclass(frozen=True, slots=True)
class Fit:
    """Both laws, fitted to the measured speedups; beyond those they predict."""

    serial_fraction: float | None  # Amdahl's, which more ranks do not speed up; None: no fit
    contention: float  # USL: waiting for each other
    coherence: float  # USL: everyone talking to everyone
    fastest_at_ranks: float | None  # where USL's speedup is highest; None if it never falls
    half_efficient_at_ranks: float | None  # where USL's efficiency falls below a half
    base_ranks: int = 1  # what the speedups are against
    serial_fraction_error: float | None = None  # half of its 95% interval, if known

    def speedup(self, ranks: float) -> float:
        n = ranks / self.base_ranks
        return n / (1 + self.contention * (n - 1) + self.coherence * n * (n - 1))


def fit_of(rows: Sequence[Compared]) -> Fit | None:
    """Least squares through n/speedup - 1; None if all layouts have the same number of ranks."""
    base = next((row for row in rows if row.speedup), None)
    points = [
        (row.ranks / base.ranks, row.speedup)
        for row in rows
        if base is not None and row.speedup and row.ranks > base.ranks
    ]
    if base is None or not points:
        return None
    excess = [(n, n / speedup - 1) for n, speedup in points]
    serial = sum(y * (n - 1) for n, y in excess) / sum((n - 1) ** 2 for n, _ in excess)
    contention, coherence = nonnegative_fit([(n - 1, n * (n - 1), y) for n, y in excess])
    peak = math.sqrt((1 - contention) / coherence) if coherence > 0 and contention < 1 else None
    half = _half(contention, coherence)
    return Fit(
        serial_fraction=serial,
        contention=contention,
        coherence=coherence,
        fastest_at_ranks=peak * base.ranks if peak is not None else None,
        half_efficient_at_ranks=half * base.ranks if half is not None else None,
        base_ranks=base.ranks,
    )


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
    if doubt := next((row.doubt for row in rows if row.doubt), None):
        return None, doubt
    measured = [row for row in rows if row.speedup]
    fit = fit_of(measured)
    if fit is None:
        return None, "it takes layouts with different numbers of ranks"
    base = next(row for row in measured if row.layout == row.baseline)
    larger = [row for row in measured if row.ranks > base.ranks]
    best, top = max(larger, key=lambda row: row.speedup or 0.0), larger[-1]
    assert fit.serial_fraction is not None and best.speedup is not None
    if best.speedup <= 1 + SHOWN:
        return None, f"no larger layout is faster than {base.layout}"
    if fit.speedup(top.ranks) >= (1 - SHOWN) * top.ranks / base.ranks:
        return None, (
            f"{top.layout} is {ratio(top.speedup)} as fast as {base.layout}: nothing is lost, so "
            "there is no loss to extrapolate"
        )
    error = serial_error(base, larger)
    if error > UNSURE:
        low, high = max(0.0, fit.serial_fraction - error), min(1.0, fit.serial_fraction + error)
        return None, (
            f"the measurements are too noisy: their 95% intervals allow for {percent(low, 0)} to "
            f"{percent(high, 0)} of the work to be serial"
        )
    fit = replace(fit, serial_fraction_error=error or None)
    missed = next((row for row in larger if is_far(fit.speedup(row.ranks), row, base)), None)
    if missed is not None:
        return None, (
            f"the closest law misses {missed.layout}: {ratio(fit.speedup(missed.ranks))} by the "
            f"law, {ratio(missed.speedup)} measured"
        )
    if not is_amdahl(fit, larger, base):
        fit = replace(fit, serial_fraction=None, serial_fraction_error=None)
    return fit, None


def is_amdahl(fit: Fit, larger: Sequence[Compared], base: Compared) -> bool:
    """Whether a serial fraction alone explains the speedups."""
    if fit.serial_fraction is None or not SHOWN < fit.serial_fraction < 1 - SHOWN:
        return False
    amdahl = replace(fit, contention=fit.serial_fraction, coherence=0.0)
    return not any(is_far(amdahl.speedup(row.ranks), row, base) for row in larger)


def is_far(speedup: float, row: Compared, base: Compared) -> bool:
    assert row.speedup is not None
    error = math.hypot(relative_error(row), relative_error(base))
    return abs(speedup / row.speedup - 1) > FAR + error


def serial_error(base: Compared, larger: Sequence[Compared]) -> float:
    """Half of the serial fraction's 95% interval: the errors of the paces, propagated."""
    weights = [(row.ranks / base.ranks - 1, row) for row in larger]
    squares = sum(weight**2 for weight, _ in weights)
    shares = [weight * (weight + 1) / (row.speedup or 1.0) / squares for weight, row in weights]
    own = [share * relative_error(row) for share, (_, row) in zip(shares, weights, strict=True)]
    # The base's error is the same in all of them.
    return math.hypot(*own, sum(shares) * relative_error(base))
