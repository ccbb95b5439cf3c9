"""Repeats of a measurement together: their median, their range, and a confidence interval."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

# Student's t, 97.5%, for 1 to 30 degrees of freedom.
T_975 = (
    *(12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281),
    *(2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860),
    *(2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423),
)


@dataclass(frozen=True, slots=True)
class Spread:
    """Repeats of one quantity."""

    median: float  # what is shown of them
    mean: float
    min: float
    max: float
    n: int
    ci95: tuple[float, float] | None  # None for a single value


def spread(values: Sequence[float], *, lowest: float = -math.inf) -> Spread:
    """The spread of one value or more; no interval goes below `lowest`.

    The interval is Student's of the mean, widened to hold the median that it is shown with.
    """
    mean, median = statistics.fmean(values), statistics.median(values)
    interval = None
    if len(values) > 1:
        half = t_975(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
        interval = (min(max(lowest, mean - half), median), max(mean + half, median))
    return Spread(median, mean, min(values), max(values), len(values), interval)


def t_975(freedom: int) -> float:
    """The 97.5% quantile of Student's t: 95% of it lies between minus this and this."""
    if freedom <= len(T_975):
        return T_975[freedom - 1]
    z = statistics.NormalDist().inv_cdf(0.975)  # Cornish and Fisher's expansion around it
    first = (z**3 + z) / (4 * freedom)
    second = (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    return z + first + second
