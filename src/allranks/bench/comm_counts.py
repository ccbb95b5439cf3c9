"""Collectives as nccl-tests counts them: sizes, bandwidths, the fit of latency and bandwidth.

Checked against nccl-tests (doc/PERFORMANCE.md, and GetCollByteCount and GetBw in src/*.cu): the
size is that of the larger of a rank's two buffers, algorithm bandwidth is size over time, and bus
bandwidth is that times a factor, which makes it comparable with what a link can carry.
"""

from __future__ import annotations

import difflib
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from allranks.bench.laws import nonnegative_fit
from allranks.errors import AllranksError
from allranks.machine.gpus import GPU

Scope = Literal["node", "nodes", "all"]

ELEMENT_BYTES = 4  # everything is measured in fp32
ALIGNMENT = 16  # bytes to which nccl-tests rounds each rank's part down
STEP_FACTOR = 4  # from one size to the next
DEFAULT_SIZES = "1KiB-1GiB"
LEAST_SIZES = 3  # any two are on a line
FAR = 0.2  # of the measured time: a line that is off by more does not fit a size
SAME = 1.01  # times the best measured bandwidth: a fitted one up to this is taken to be equal
SCOPES: Mapping[Scope, str] = {
    "node": "within a node",
    "nodes": "across nodes, one rank each",
    "all": "all ranks",
}


@dataclass(frozen=True, slots=True)
class Collective:
    """How nccl-tests counts one collective over `n` ranks."""

    bus_factor: Callable[[int], float]
    buffers: Callable[[int], float] = lambda n: 1.0  # memory of a rank, in sizes
    is_split: bool = False  # each rank gives or gets one n-th of the size
    is_rooted: bool = False  # one rank gives to all, or gets from all


def _all_but_own(n: int) -> float:
    return (n - 1) / n


COLLECTIVES: Mapping[str, Collective] = {
    "all_reduce": Collective(lambda n: 2 * (n - 1) / n),
    "all_gather": Collective(_all_but_own, lambda n: 1 + 1 / n, is_split=True),
    "reduce_scatter": Collective(_all_but_own, lambda n: 1 + 1 / n, is_split=True),
    "broadcast": Collective(lambda n: 1.0, is_rooted=True),
    "reduce": Collective(lambda n: 1.0, is_rooted=True),
    "all_to_all": Collective(_all_but_own, lambda n: 2.0, is_split=True),
    "send_recv": Collective(lambda n: 1.0, lambda n: 2.0),  # around a ring: every rank does both
}


def parse_collectives(text: str | None) -> list[str]:
    """Names from a comma list, each once; all of them for None. Raises AllranksError."""
    if text is None:
        return list(COLLECTIVES)
    by_letters = {name.replace("_", ""): name for name in COLLECTIVES}  # allreduce, send/recv
    names: dict[str, None] = {}
    for word in (word.strip().lower() for word in text.split(",")):
        name = by_letters.get(re.sub(r"[^a-z]", "", word))
        if name is None:
            close = difflib.get_close_matches(word, COLLECTIVES, n=1)
            example = close[0] if close else "all_reduce,all_gather"
            raise AllranksError(
                f'there is no collective "{word}"; there are {", ".join(COLLECTIVES)}',
                fix=f"write --collectives {example}, or leave it out for all",
            )
        names[name] = None
    return list(names)


def parse_sizes(text: str) -> tuple[int, int]:
    """The smallest and the largest size in bytes of `1KiB-1GiB`, or of a single size."""
    least, dash, largest = (part.strip() for part in text.partition("-"))
    found = _parse_size(text, least), _parse_size(text, largest if dash else least)
    if found[0] > found[1]:
        raise AllranksError(
            f"--sizes {text} begins with the larger size", fix=f"write --sizes {largest}-{least}"
        )
    if found[0] < ALIGNMENT:
        raise AllranksError(
            f"--sizes {text} begins below {ALIGNMENT} bytes",
            fix=f"write --sizes {DEFAULT_SIZES}, or any from {ALIGNMENT} bytes on",
        )
    return found


def _parse_size(text: str, part: str) -> int:
    match = re.fullmatch(r"(\d+)\s*(?:(B?)|([KMG])(?:i?B)?)", part, re.IGNORECASE)
    if match is None or len(match[1]) > 12:
        raise AllranksError(
            f'--sizes {text}: "{part}" is not a size', fix=f"write for example {DEFAULT_SIZES}"
        )
    # As in nccl-tests, K is 1024 with or without an i.
    power = "KMG".index(match[3].upper()) + 1 if match[3] else 0
    return int(match[1]) << (10 * power)


def sizes_between(least: int, largest: int) -> list[int]:
    """From `least` on, each four times the one before; `largest` is always the last."""
    sizes = [least]
    while sizes[-1] * STEP_FACTOR <= largest:
        sizes.append(sizes[-1] * STEP_FACTOR)
    return sizes if sizes[-1] == largest else [*sizes, largest]


def counted_bytes(collective: str, size: int, ranks: int) -> int:
    """A size as nccl-tests rounds it: whole elements, parts of 16 bytes; 0 if it is too small."""
    if COLLECTIVES[collective].is_split:
        return size // ranks // ALIGNMENT * ALIGNMENT * ranks
    return size // ELEMENT_BYTES * ELEMENT_BYTES


def largest_fitting(collective: str, ranks: int, memory_bytes: float) -> int:
    """The largest size whose buffers fit a rank's memory."""
    return int(memory_bytes / COLLECTIVES[collective].buffers(ranks))


def row(
    collective: str, num_bytes: int, ranks: int, scope: Scope, *, median: float, p99: float
) -> dict[str, Any]:
    """One row of comm.json; `median` and `p99` in seconds."""
    algorithm = num_bytes / median / 1e9
    return {
        "collective": collective,
        "bytes": num_bytes,
        "ranks": ranks,
        "median_us": round(median * 1e6, 3),
        "p99_us": round(p99 * 1e6, 3),
        "algbw_GBps": significant(algorithm),
        "busbw_GBps": significant(algorithm * COLLECTIVES[collective].bus_factor(ranks)),
        "scope": scope,
    }


def over_ranks(collective: str, medians: Sequence[float]) -> float:
    """One time for all ranks, from the median of each.

    The mean, as in nccl-tests, where all ranks do the same and wait for each other: they differ
    only by chance, and the maximum of many would be the unluckiest. With a root it is the maximum:
    ranks that only send run ahead of those that receive.
    """
    return max(medians) if COLLECTIVES[collective].is_rooted else statistics.mean(medians)


def significant(value: float) -> float:
    """Six digits: more would be noise; with fewer, bandwidth and time would not agree."""
    return float(f"{value:.6g}")


@dataclass(frozen=True, slots=True)
class Line:
    """seconds = latency + bytes / bandwidth, for the sizes from `first` to `last`."""

    latency: float
    bandwidth: float | None  # None if size did not matter
    best: float  # the highest bandwidth measured at these sizes
    error: float  # the largest |fit / measured - 1| over these sizes
    first: int  # bytes
    last: int
    sizes: int  # how many

    @property
    def is_extrapolated(self) -> bool:
        """Whether the bandwidth is higher than any that was measured at these sizes."""
        return self.bandwidth is not None and self.bandwidth > self.best


Points = Sequence[tuple[int, float]]  # bytes and seconds


def fit_lines(points: Points) -> list[Line]:
    """A line for the widest range of sizes that one fits, and lines for the sizes around it.

    A line fits if it is off by no more than FAR at any size. There are several lines if the library
    changes its protocol, or messages outgrow a cache. Some sizes may be on none.
    """
    for count in range(len(points), LEAST_SIZES - 1, -1):
        for start in range(len(points) - count, -1, -1):  # of equally wide ones, the largest sizes
            end = start + count
            line = fit_line(points[start:end])
            if line.error <= FAR:
                return [*fit_lines(points[:start]), line, *fit_lines(points[end:])]
    return []


def fit_line(points: Points) -> Line:
    """Least squares of the relative errors: every size counts the same, nothing is negative."""
    latency, slope = nonnegative_fit([(1 / y, x / y, 1.0) for x, y in points])
    best = max(x / y for x, y in points)
    if 1 / SAME <= slope * best < 1:
        slope = 1 / best
    return Line(
        latency,
        1 / slope if slope > 0 else None,
        best,
        error=max(abs((latency + slope * x) / y - 1) for x, y in points),
        first=points[0][0],
        last=points[-1][0],
        sizes=len(points),
    )


def fits(rows: Sequence[Mapping[str, Any]], peaks: Mapping[str, float | None]) -> list[Any]:
    """The lines of each collective in each scope; `peaks`: GB/s of a link, by scope."""
    series: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for each in rows:
        series.setdefault((each["scope"], each["collective"]), []).append(each)
    found = []
    for (scope, collective), measured in series.items():
        ranks, peak = measured[0]["ranks"], peaks.get(scope)
        bus_factor = COLLECTIVES[collective].bus_factor(ranks)
        for line in fit_lines([(each["bytes"], each["median_us"] * 1e-6) for each in measured]):
            algorithm = line.bandwidth / 1e9 if line.bandwidth else None
            bus = algorithm * bus_factor if algorithm else None
            share = bus / peak if bus and peak and not line.is_extrapolated else None
            found.append(
                {
                    "collective": collective,
                    "scope": scope,
                    "ranks": ranks,
                    "first_bytes": line.first,
                    "last_bytes": line.last,
                    "latency_us": round(line.latency * 1e6, 3),
                    "algbw_GBps": significant(algorithm) if algorithm else None,
                    "busbw_GBps": significant(bus) if bus else None,
                    "extrapolated": line.is_extrapolated,
                    "measured_busbw_GBps": significant(line.best / 1e9 * bus_factor),
                    "of_peak": significant(share) if share else None,
                    "error": round(line.error, 4),
                    "sizes": line.sizes,
                }
            )
    return found


def on_no_line(
    rows: Sequence[Mapping[str, Any]], fitted: Sequence[Mapping[str, Any]]
) -> dict[str, list[int]]:
    """The sizes of each collective that none of its lines fits; `rows` are of one scope."""
    left: dict[str, list[int]] = {}
    for row in rows:
        own = [fit for fit in fitted if fit["collective"] == row["collective"]]
        if not any(fit["first_bytes"] <= row["bytes"] <= fit["last_bytes"] for fit in own):
            left.setdefault(row["collective"], []).append(row["bytes"])
    return left


def link_peak(gpu: GPU | None, link: str) -> float | None:
    """GB/s that one GPU can send within its node, by the catalogue; `link` as in gpus.gpu_link."""
    if gpu is None:
        return None
    kind = "nvlink" if link == "NVLink" else "pcie" if link.startswith("PCIe") else None
    offers = [offer for offer in (gpu.link, gpu.bridge) if offer is not None]
    rates = [offer.bytes_per_second for offer in offers if offer.kind == kind]
    return rates[0] / 1e9 if rates else None
