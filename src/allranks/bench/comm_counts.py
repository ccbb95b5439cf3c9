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

from allranks.errors import AllranksError
from allranks.machine.gpus import GPU

Scope = Literal["node", "nodes", "all"]

ELEMENT_BYTES = 4  # everything is measured in fp32
ALIGNMENT = 16  # bytes to which nccl-tests rounds each rank's part down
STEP_FACTOR = 4  # from one size to the next
DEFAULT_SIZES = "1KiB-1GiB"
SCOPES: Mapping[Scope, str] = {
    "node": "within a node",
    "nodes": "across nodes, one rank each",
    "all": "all ranks",
}


@dataclass(frozen=True, slots=True)
class Collective:
    """How nccl-tests counts one collective over `n` ranks."""

    name: str
    bus_factor: Callable[[int], float]
    is_split: bool  # each rank gives or gets one n-th of the size
    buffers: Callable[[int], float]  # memory of a rank, in sizes
    is_rooted: bool = False  # one rank gives to all, or gets from all


def _all_but_own(n: int) -> float:
    return (n - 1) / n


def _one(n: int) -> float:
    return 1.0


def _two(n: int) -> float:
    return 2.0


def _one_and_a_part(n: int) -> float:
    return 1 + 1 / n


COLLECTIVES: Mapping[str, Collective] = {
    each.name: each
    for each in (
        Collective("all_reduce", lambda n: 2 * (n - 1) / n, False, _one),
        Collective("all_gather", _all_but_own, True, _one_and_a_part),
        Collective("reduce_scatter", _all_but_own, True, _one_and_a_part),
        Collective("broadcast", _one, False, _one, is_rooted=True),
        Collective("reduce", _one, False, _one, is_rooted=True),
        Collective("all_to_all", _all_but_own, True, _two),
        Collective("send_recv", _one, False, _two),  # around a ring: every rank does both
    )
}
OTHER_NAMES = {
    "sendrecv": "send_recv",
    "send/recv": "send_recv",
    "alltoall": "all_to_all",
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
}


def parse_collectives(text: str | None) -> list[str]:
    """Names from a comma list, each once; all of them for None. Raises AllranksError."""
    if text is None:
        return list(COLLECTIVES)
    names: dict[str, None] = {}
    for word in (word.strip().lower().replace("-", "_") for word in text.split(",")):
        name = OTHER_NAMES.get(word, word)
        if name not in COLLECTIVES:
            close = difflib.get_close_matches(name, COLLECTIVES, n=1)
            example = close[0] if close else "all_reduce,all_gather"
            raise AllranksError(
                f'there is no collective "{word}"; there are {", ".join(COLLECTIVES)}',
                fix=f"write --collectives {example}, or leave it out for all",
            )
        names[name] = None
    return list(names)


def parse_sizes(text: str) -> tuple[int, int]:
    """The least and the largest size in bytes: `1KiB-1GiB`, or one size. Raises AllranksError."""
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
    """What nccl-tests makes of a size: whole elements, parts of 16 bytes; 0 if it is too small."""
    if COLLECTIVES[collective].is_split:
        return size // ranks // ALIGNMENT * ALIGNMENT * ranks
    return size // ELEMENT_BYTES * ELEMENT_BYTES


def largest_fitting(collective: str, ranks: int, memory_bytes: float) -> int:
    """The largest size whose buffers fit a rank's memory."""
    return int(memory_bytes / COLLECTIVES[collective].buffers(ranks))


def row(
    collective: str, num_bytes: int, ranks: int, scope: Scope, *, median: float, p99: float
) -> dict[str, Any]:
    """One line of the result; times in seconds go in, the contract's units come out."""
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
    """One time out of each rank's median.

    The mean, as in nccl-tests, where all ranks do the same and wait for each other: what differs
    then is chance, and the highest of many would be the unluckiest. With a root the highest: ranks
    that only give run ahead of those that get.
    """
    return max(medians) if COLLECTIVES[collective].is_rooted else statistics.mean(medians)


def significant(value: float) -> float:
    """Six digits: more would be noise, fewer would not give the bandwidth back from the time."""
    return float(f"{value:.6g}")


def quantile(values: Sequence[float], fraction: float) -> float:
    """With linear interpolation between the two nearest values."""
    ordered = sorted(values)
    position = fraction * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (position - low) * (ordered[high] - ordered[low])


@dataclass(frozen=True, slots=True)
class Line:
    """seconds = latency + bytes / bandwidth; `bandwidth` is None if size did not matter."""

    latency: float
    bandwidth: float | None
    error: float  # median over the sizes of |fit / measured - 1|

    def seconds(self, num_bytes: int) -> float:
        return self.latency + (num_bytes / self.bandwidth if self.bandwidth else 0.0)


def fit_line(points: Sequence[tuple[int, float]]) -> Line | None:
    """Least absolute relative deviations: no size counts for more, and one outlier for little.

    None for fewer than two sizes. Neither part is ever negative.
    """
    if len({num_bytes for num_bytes, _ in points}) < 2:
        return None
    weights = [1.0] * len(points)
    latency = slope = 0.0
    for _ in range(50):  # reweighted least squares; converges in about ten
        latency, slope = _weighted_line(points, weights)
        # A floor on the deviation: without it a point that is met exactly would rule alone.
        weights = [1 / max(abs((latency + slope * x) / y - 1), 1e-3) for x, y in points]
    deviations = [abs((latency + slope * x) / y - 1) for x, y in points]
    return Line(latency, 1 / slope if slope > 0 else None, statistics.median(deviations))


def _weighted_line(
    points: Sequence[tuple[int, float]], weights: Sequence[float]
) -> tuple[float, float]:
    """Latency and seconds per byte that minimise the weighted squares of relative deviations."""
    # A relative deviation is (a + b x) / y - 1 = a u + b v - 1.
    terms = [(w, 1 / y, x / y) for w, (x, y) in zip(weights, points, strict=True)]
    uu = sum(w * u * u for w, u, _ in terms)
    uv = sum(w * u * v for w, u, v in terms)
    vv = sum(w * v * v for w, _, v in terms)
    u1 = sum(w * u for w, u, _ in terms)
    v1 = sum(w * v for w, _, v in terms)
    determinant = uu * vv - uv * uv
    if determinant > 1e-12 * uu * vv:
        latency = (u1 * vv - v1 * uv) / determinant
        slope = (v1 * uu - u1 * uv) / determinant
        if latency >= 0 and slope >= 0:
            return latency, slope
        if latency >= 0:
            return u1 / uu, 0.0
    return 0.0, v1 / vv


def fits(rows: Sequence[Mapping[str, Any]], peaks: Mapping[str, float | None]) -> list[Any]:
    """One line fitted to each collective of each scope; `peaks`: GB/s of a link, by scope."""
    series: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for each in rows:
        series.setdefault((each["scope"], each["collective"]), []).append(each)
    found = []
    for (scope, collective), measured in series.items():
        line = fit_line([(each["bytes"], each["median_us"] * 1e-6) for each in measured])
        if line is None:
            continue
        ranks = measured[0]["ranks"]
        algorithm = line.bandwidth / 1e9 if line.bandwidth else None
        bus = algorithm * COLLECTIVES[collective].bus_factor(ranks) if algorithm else None
        peak = peaks.get(scope)
        found.append(
            {
                "collective": collective,
                "scope": scope,
                "ranks": ranks,
                "latency_us": round(line.latency * 1e6, 3),
                "algbw_GBps": significant(algorithm) if algorithm else None,
                "busbw_GBps": significant(bus) if bus else None,
                "of_peak": significant(bus / peak) if bus and peak else None,
                "error": round(line.error, 4),
                "sizes": len(measured),
            }
        )
    return found


def link_peak(gpu: GPU | None, link: str) -> float | None:
    """GB/s that one GPU can send within its node, by the catalogue; `link` as in gpus.gpu_link."""
    if gpu is None:
        return None
    kind = "nvlink" if link == "NVLink" else "pcie" if link.startswith("PCIe") else None
    offers = [offer for offer in (gpu.link, gpu.bridge) if offer is not None]
    rates = [offer.bytes_per_second for offer in offers if offer.kind == kind]
    return rates[0] / 1e9 if rates else None
