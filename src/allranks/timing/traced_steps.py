"""What a rank's device did in a few traced steps, and what the host did while it was idle.

Pure functions of a trace (see trace.py), of the times when the rank waited for data or other ranks,
and of samples of what its training thread was executing. All times are seconds of the trace's own
clock.
"""

from __future__ import annotations

import bisect
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from allranks.timing.trace import (
    Interval,
    Span,
    Trace,
    gaps,
    is_exchange,
    length,
    union,
    within,
)

# Shorter gaps between operators are in any model's Python code: it is how torch is called.
SHORT_GAP_SECONDS = 50e-6
# Without samples, gaps longer than this are taken for code other than torch's.
LONG_GAP_SECONDS = 500e-6
MAX_LINES = 5
# Calls in which the host waits until the device has finished.
SYNCHRONISES = ("Synchronize", "cudaMemcpy", "cuMemcpy", "hipMemcpy")
ASYNCHRONOUS = ("Async", "hipMemcpyWithStream")


Lines = dict[str, float]  # of the user's code, and seconds that are spent there


class Sample(NamedTuple):
    """What the training thread was executing at some moment."""

    moment: float
    in_torch: bool  # Python code of torch, or of a model in a library that torch has called
    line: str | None  # of the user's code that was being executed, or that called a library


@dataclass(slots=True)
class HostTime:
    """Time of the training thread outside torch's operators."""

    own: float = 0.0
    in_torch: float = 0.0
    lines: Lines = field(default_factory=dict)  # of `own`

    def add(self, seconds: float, *, in_torch: bool, line: str | None = None) -> None:
        if in_torch:
            self.in_torch += seconds
            return
        self.own += seconds
        if line is not None:
            self.lines[line] = self.lines.get(line, 0.0) + seconds


def reduce_trace(
    trace: Trace, away: Iterable[Interval], samples: Sequence[Sample]
) -> dict[str, Any]:
    """The fields of the trace event; `away`: when the rank waited for data or for other ranks."""
    reduce = on_device if trace.device else on_cpu
    totals, tables = reduce(trace, union(away), samples)
    steps = trace.num_steps
    return {
        "device": "cuda" if trace.device else "cpu",
        **{name: round(total / steps, 7) for name, total in totals.items()},
        **{name: longest(lines, steps) for name, lines in tables.items()},
    }


def longest(lines: Lines, steps: int) -> list[list[Any]]:
    """The lines that took longest, with their seconds in a step."""
    taken = {line: seconds for line, seconds in lines.items() if seconds > 0}
    found = sorted(taken.items(), key=lambda item: -item[1])[:MAX_LINES]
    return [[line, round(seconds / steps, 7)] for line, seconds in found]


def on_cpu(
    trace: Trace, away: list[Interval], samples: Sequence[Sample]
) -> tuple[dict[str, float], dict[str, Lines]]:
    """A CPU is busy unless its training thread waits, or executes code other than torch's."""
    in_torch = (
        (span.begin, span.end)
        for span in trace.host
        if span.thread == trace.main_thread and is_operator(span.name)
    )
    outside = gaps(union([*in_torch, *away]), trace.begin, trace.end)
    host = host_time(outside, samples)
    waited = length(within(away, trace.begin, trace.end))
    busy = trace.end - trace.begin - waited - host.own
    return {"busy": busy, "compute": busy, "host": host.own}, {"lines": host.lines}


def is_operator(name: str) -> bool:
    """Whether a span is torch's own work; autograd's nodes may call Python functions."""
    return ("::" in name and not name.startswith("autograd::")) or "Compiled" in name


def host_time(intervals: Iterable[Interval], samples: Sequence[Sample]) -> HostTime:
    """How much of these intervals, outside torch's operators, is the user's code and torch's own.

    Samples that fall into an interval divide it. Intervals that were too short to have one are
    divided like those that had exactly one.
    """
    found, unseen, seen = HostTime(), 0.0, Counter[tuple[bool, str | None]]()
    moments = [sample.moment for sample in samples]
    for begin, end in intervals:
        seconds = end - begin
        inside = samples[bisect.bisect_left(moments, begin) : bisect.bisect_left(moments, end)]
        if seconds < SHORT_GAP_SECONDS:
            found.add(seconds, in_torch=True)
        elif not samples:
            found.add(seconds, in_torch=seconds < LONG_GAP_SECONDS)
        elif not inside:
            unseen += seconds
        else:
            for sample in inside:
                found.add(seconds / len(inside), in_torch=sample.in_torch, line=sample.line)
            if len(inside) == 1:
                seen[inside[0].in_torch, inside[0].line] += 1
    for (in_torch, line), number in seen.items():
        found.add(unseen * number / seen.total(), in_torch=in_torch, line=line)
    if not seen:
        found.add(unseen, in_torch=True)
    return found


def on_device(
    trace: Trace, away: list[Interval], samples: Sequence[Sample]
) -> tuple[dict[str, float], dict[str, Lines]]:
    """What a GPU did for these steps, and what the host did while it was idle."""
    ours = [s for n, s in enumerate(trace.device) if trace.covers(trace.launched[n])]
    before = [s.end for n, s in enumerate(trace.device) if trace.launched[n] < trace.begin]
    begin = max(before, default=trace.begin)  # when the device began these steps
    end = max([begin, *(span.end for span in ours)])
    copies = [span for span in ours if is_copy(span)]
    exchanges = [span for span in ours if is_exchange(span)]
    kernels = [span for span in ours if not is_copy(span) and not is_exchange(span)]
    computing = within(union((s.begin, s.end) for s in kernels), begin, end)
    working = union([*computing, *within(((s.begin, s.end) for s in copies), begin, end)])
    busy = union([*working, *within(((s.begin, s.end) for s in exchanges), begin, end)])
    host, waited = idle_host(trace, without(gaps(busy, begin, end), away), samples)
    copying = copying_lines(trace, computing, samples)
    # Where a line has waited for a copy, the idle time that follows is the copy's as well.
    around = {line: took for line, took in waited.items() if took < copying.get(line, 0.0)}
    for line, took in around.items():
        host.lines[line] -= took
    totals = {
        "busy": length(busy),
        "compute": length(computing),
        "copies": length(working) - length(computing) + sum(around.values()),
        "exchanges": length(busy) - length(working),
        "launches": host.in_torch,
        "host": host.own - sum(around.values()),
        "copied": sum(num_bytes(span) for span in copies),
        "copied_back": sum(num_bytes(span) for span in copies if "DtoH" in span.name),
        "pageable": sum(num_bytes(span) for span in copies if "Pageable" in span.name),
        "kernels": sum(span.kind == "kernel" for span in kernels),
    }
    copying = {line: seconds + around.get(line, 0.0) for line, seconds in copying.items()}
    return totals, {"lines": host.lines, "copying": copying}


def idle_host(
    trace: Trace, idle: Sequence[Interval], samples: Sequence[Sample]
) -> tuple[HostTime, Lines]:
    """What the host did while the device was idle, and how much of that follows waits, by line.

    Once the host has waited for the device, the device is idle whatever the host does next: the
    whole gap is host time, at the lines that wait.
    """
    waits = union((s.begin, s.end) for s in trace.runtime if synchronises(s.name))
    ends = [end for _, end in waits]
    follows: list[Interval] = []
    others: list[Interval] = []
    for low, high in idle:
        place = bisect.bisect_left(ends, low)
        (follows if place < len(ends) and ends[place] < high else others).append((low, high))
    outside = without(others, host_calls(trace))
    found = host_time(outside, samples)
    found.add(length(others) - length(outside), in_torch=True)
    lines = Counter(s.line for s in within_any(samples, union([*follows, *waits])) if s.line)
    waited = {line: length(follows) * n / lines.total() for line, n in lines.items()}
    for line, took in waited.items():
        found.add(took, in_torch=False, line=line)
    if not waited:
        found.add(length(follows), in_torch=False)
    return found, waited


def copying_lines(trace: Trace, computing: Sequence[Interval], samples: Sequence[Sample]) -> Lines:
    """The lines that waited while the device only copied, as they do if memory is not pinned."""
    lines: Lines = {}
    moments = [sample.moment for sample in samples]
    ends = {span.begin: span.end for span in trace.runtime}
    for number, span in enumerate(trace.device):
        asked = trace.launched[number]
        if not is_copy(span) or not trace.covers(asked):
            continue
        low, high = (bisect.bisect_left(moments, when) for when in (asked, ends.get(asked, asked)))
        seen = [sample.line for sample in samples[low:high] if sample.line is not None]
        if not seen:
            continue
        alone = length(without([(span.begin, span.end)], computing))
        took = min(alone, ends.get(asked, asked) - asked)
        for line in seen:
            lines[line] = lines.get(line, 0.0) + took / len(seen)
    return lines


def is_copy(span: Span) -> bool:
    """Whether a span copies to or from the device; copies within it count as computing."""
    return span.kind == "gpu_memcpy" and "DtoD" not in span.name


def num_bytes(span: Span) -> int:
    return int(span.args.get("bytes", 0))


def without(ours: Iterable[Interval], theirs: Sequence[Interval]) -> list[Interval]:
    """The time that is in ours but not in theirs; each must be sorted, as `union` returns it."""
    parts, first = [], 0
    for low, high in ours:
        while first < len(theirs) and theirs[first][1] <= low:
            first += 1
        for begin, end in itertools.islice(theirs, first, None):
            if begin >= high or low >= high:
                break
            if begin > low:
                parts.append((low, begin))
            low = max(low, end)
        if low < high:
            parts.append((low, high))
    return parts


def host_calls(trace: Trace) -> list[Interval]:
    """When the host was in torch's operators or in the device's library, in training threads."""
    threads = {trace.main_thread}
    threads |= {s.thread for s in trace.host if s.name.startswith("autograd::engine")}
    calls = [s for s in trace.host if s.thread in threads and is_operator(s.name)]
    calls += [s for s in trace.runtime if s.thread in threads]
    return union((span.begin, span.end) for span in calls)


def synchronises(name: str) -> bool:
    return any(word in name for word in SYNCHRONISES) and not any(w in name for w in ASYNCHRONOUS)


def within_any(samples: Iterable[Sample], intervals: Sequence[Interval]) -> Iterator[Sample]:
    """The samples in any of these intervals, which must be sorted, as `union` returns them."""
    begins = [begin for begin, _ in intervals]
    for sample in samples:
        place = bisect.bisect_right(begins, sample.moment) - 1
        if place >= 0 and sample.moment < intervals[place][1]:
            yield sample
