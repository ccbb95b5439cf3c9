"""A rank's trace by torch's profiler, read as spans of time. Pure functions.

Times are seconds from the trace's own start. A category says whether a span ran on a GPU or on the
host; work on a GPU belongs to the step in which the host launched it.
"""

from __future__ import annotations

import bisect
import gzip
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from allranks.run.folder import RunDir

STEP_MARK = "allranks.step#"  # as the probe writes it, at the end of every step
HOST_EXCHANGE = re.compile(r"(gloo|mpi|ucc|xccl):(\w+)")
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver", "hip_runtime")
# Bytes of an element, by the names of its type in ATen and C++.
ELEMENT_BYTES = {
    **dict.fromkeys(("double", "long", "long int", "int64_t", "c10::complex<float>"), 8),
    **dict.fromkeys(("float", "int", "int32_t"), 4),
    **dict.fromkeys(("half", "bfloat16", "c10::half", "c10::bfloat16", "short", "short int"), 2),
    **dict.fromkeys(("byte", "char", "bool", "unsigned char", "signed char"), 1),
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2"), 1),
    **dict.fromkeys(("complexdouble", "c10::complex<double>"), 16),
}
SHORT_TYPES = {"c10::half": "half", "c10::bfloat16": "bfloat16", "long int": "long"}
# The labels of NCCL's kernels, and what torch.distributed calls them.
COLLECTIVES = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "allgather": "all_gather",
    "_allgather_base": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "all_to_allv": "all_to_all",
}

Interval = tuple[float, float]


class Span(NamedTuple):
    """Something that took time."""

    name: str
    kind: str  # cpu_op, kernel, user_annotation, …
    begin: float
    end: float
    thread: Any  # of the host; a stream of a device
    args: Mapping[str, Any]

    @property
    def seconds(self) -> float:
        return self.end - self.begin


@dataclass(slots=True)
class Trace:
    """The steps of one rank, and what happened in them."""

    rank: int
    marks: list[tuple[int, float]]  # number of a step, and when it ended
    main_thread: Any
    host: list[Span]  # operators
    annotations: list[Span]
    device: list[Span]  # empty without a GPU
    launched: dict[int, float] = field(default_factory=dict)  # index in `device` -> when
    runtime: list[Span] = field(default_factory=list)  # the host's calls of the device's library
    group_sizes: set[int] = field(default_factory=set)
    is_blind: bool = False  # kernels were launched, but none was seen

    @property
    def num_steps(self) -> int:
        return len(self.marks) - 1

    @property
    def begin(self) -> float:
        return self.marks[0][1]

    @property
    def end(self) -> float:
        return self.marks[-1][1]

    def covers(self, moment: float) -> bool:
        return self.begin <= moment < self.end


def trace_files(run: RunDir, attempt: int) -> dict[int, Path]:
    """The trace of each rank that made one."""
    paths = run.attempt(attempt).glob("rank-*.trace.json.gz")
    return {int(path.name.split(".")[0].removeprefix("rank-")): path for path in sorted(paths)}


def read_trace(path: Path, rank: int) -> Trace | None:
    """A trace from its file; None if it is not whole or has no whole step."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            content = json.loads(file.read())
    except (OSError, EOFError, ValueError):
        return None
    return trace_of(content, rank)


def trace_of(content: Mapping[str, Any], rank: int) -> Trace | None:
    """A trace from the JSON of its file; None if it has no whole step."""
    events = [event for event in content.get("traceEvents", []) if event.get("ph") == "X"]
    if not events:
        return None
    start = min(event["ts"] for event in events)
    spans = [
        Span(
            event["name"],
            event.get("cat", ""),
            (event["ts"] - start) / 1e6,
            (event["ts"] + event.get("dur", 0) - start) / 1e6,
            (event.get("pid"), event.get("tid")),
            event.get("args", {}),
        )
        for event in events
    ]
    marks = [span for span in spans if span.name.startswith(STEP_MARK)]
    marks = sorted((mark for mark in marks if mark.kind == "user_annotation"), key=begin_of)
    if len(marks) < 2:
        return None
    launches = {
        span.args["correlation"]: span.begin
        for span in spans
        if span.kind in LAUNCHES and "correlation" in span.args
    }
    device = sorted((span for span in spans if span.kind in ON_DEVICE), key=begin_of)
    groups = content.get("distributedInfo", {}).get("pg_config", [])
    return Trace(
        rank=rank,
        marks=[(int(mark.name.removeprefix(STEP_MARK)), mark.begin) for mark in marks],
        main_thread=marks[0].thread,
        host=sorted((span for span in spans if span.kind == "cpu_op"), key=begin_of),
        annotations=sorted((s for s in spans if s.kind == "user_annotation"), key=begin_of),
        device=device,
        launched={
            number: launches.get(span.args.get("correlation"), span.begin)
            for number, span in enumerate(device)
        },
        runtime=sorted((span for span in spans if span.kind in LAUNCHES), key=begin_of),
        group_sizes={group["pg_size"] for group in groups if "pg_size" in group},
        is_blind=bool(launches) and not device,
    )


def begin_of(span: Span) -> float:
    return span.begin


# Intervals.


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The time that any of them covers: sorted, and no two of the results touch."""
    joined: list[Interval] = []
    for begin, end in sorted(intervals):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return joined


def length(intervals: Iterable[Interval]) -> float:
    return math.fsum(end - begin for begin, end in intervals)


def within(intervals: Iterable[Interval], begin: float, end: float) -> list[Interval]:
    """The parts of them between two moments."""
    cut = ((max(low, begin), min(high, end)) for low, high in intervals)
    return [(low, high) for low, high in cut if low < high]


def overlap(ours: Sequence[Interval], theirs: Sequence[Interval]) -> float:
    """How much time is in both; each must be a union."""
    total, number = 0.0, 0
    for begin, end in ours:
        while number < len(theirs) and theirs[number][1] <= begin:
            number += 1
        for low, high in theirs[number:]:
            if low >= end:
                break
            total += min(end, high) - max(begin, low)
    return total


def gaps(busy: Sequence[Interval], begin: float, end: float) -> list[Interval]:
    """The time between two moments that is in none of them; `busy` is a union."""
    edges = [begin, *(edge for low, high in within(busy, begin, end) for edge in (low, high)), end]
    return [(low, high) for low, high in zip(edges[::2], edges[1::2], strict=True) if high > low]


def self_seconds(spans: Sequence[Span]) -> list[tuple[Span, float]]:
    """How long each operator itself took, without those that it called."""
    own = [span.seconds for span in spans]
    open_ones: dict[Any, list[int]] = {}
    for number in sorted(range(len(spans)), key=lambda n: (spans[n].begin, -spans[n].end)):
        span = spans[number]
        stack = open_ones.setdefault(span.thread, [])
        while stack and spans[stack[-1]].end <= span.begin:
            stack.pop()
        if stack:
            own[stack[-1]] -= span.seconds
        stack.append(number)
    return list(zip(spans, (max(0.0, seconds) for seconds in own), strict=True))


# Exchanges between ranks.


@dataclass(frozen=True, slots=True)
class Exchange:
    """One collective, as one rank saw it."""

    name: str
    num_bytes: int | None  # the larger of what goes in and what comes out
    dtype: str | None
    group_size: int | None
    group: str | None  # as the script or torch describes it
    begin: float
    end: float
    is_on_device: bool
    asked: float  # when the host asked for it


def exchanges_of(trace: Trace) -> list[Exchange]:
    """Every collective, in the order in which the host asked for them."""
    found = [
        device_exchange(span, trace.launched[number])
        for number, span in enumerate(trace.device)
        if is_exchange(span)
    ]
    size = min(trace.group_sizes) if len(trace.group_sizes) == 1 else None
    for span in trace.annotations:
        if match := HOST_EXCHANGE.fullmatch(span.name):
            found.append(host_exchange(span, match[2], size))
    return sorted(found, key=lambda one: one.asked)


def is_exchange(span: Span) -> bool:
    name = span.name.lower()
    return "Collective name" in span.args or "nccldevkernel" in name or "ncclkernel" in name


def device_exchange(span: Span, asked: float) -> Exchange:
    args = span.args
    dtype = str(args["dtype"]).lower() if args.get("dtype") else None
    counts = [args[key] for key in ("In msg nelems", "Out msg nelems") if key in args]
    element = ELEMENT_BYTES.get(dtype or "")
    label = str(args.get("Collective name", ""))
    if not label:  # an older torch: the kernel's own name has to do
        match = re.search(r"nccl(?:Dev)?Kernel_([A-Za-z]+)", span.name)
        label = match[1].lower() if match else "exchange"
    return Exchange(
        name=COLLECTIVES.get(label, label),
        num_bytes=max(counts) * element if counts and element else None,
        dtype=dtype,
        group_size=args.get("Group size"),
        group=args.get("Process Group Description"),
        begin=span.begin,
        end=span.end,
        is_on_device=True,
        asked=asked,
    )


def host_exchange(span: Span, name: str, group_size: int | None) -> Exchange:
    types = [str(kind).lower() for kind in span.args.get("Input type", [])]
    sizes = [
        math.prod(dims) * ELEMENT_BYTES[kind]
        for dims, kind in zip(span.args.get("Input Dims", []), types, strict=False)
        if kind in ELEMENT_BYTES and all(isinstance(size, int) for size in dims)
    ]
    known = [kind for kind in types if kind in ELEMENT_BYTES]
    return Exchange(
        name=COLLECTIVES.get(name, name),
        num_bytes=sum(sizes) if sizes else None,
        dtype=SHORT_TYPES.get(known[0], known[0]) if known else None,
        group_size=group_size,
        group=None,
        begin=span.begin,
        end=span.end,
        is_on_device=False,
        asked=span.begin,
    )


def step_at(trace: Trace, moment: float) -> int | None:
    """Which of its steps a moment is in, counted from 0; None before the first, after the last."""
    place = bisect.bisect_right([when for _, when in trace.marks], moment) - 1
    return place if 0 <= place < trace.num_steps else None
