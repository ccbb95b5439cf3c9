"""What traced steps show: of a CPU and of a GPU, from made-up traces and samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from tests.traces import event, mark

from allranks.timing.trace import trace_of
from allranks.timing.traced_steps import Sample, reduce_trace, without

MICRO = 1e-6


def reduced(
    events: Sequence[dict[str, Any]],
    away: Sequence[tuple[float, float]] = (),
    samples: Sequence[tuple[float, bool, str | None]] = (),
) -> dict[str, Any]:
    """The event of a trace; all times are microseconds."""
    trace = trace_of({"traceEvents": [event("first", "cpu_op", 0, 1), *events]}, 0)
    assert trace is not None
    at = [Sample(moment * MICRO, in_torch, line) for moment, in_torch, line in samples]
    return reduce_trace(trace, [(low * MICRO, high * MICRO) for low, high in away], at)


def micros(found: dict[str, Any], *names: str) -> list[Any]:
    return [pytest.approx(found[name] / MICRO, abs=0.2) for name in names]


def test_without() -> None:
    assert without([(0, 10)], [(1, 2), (3, 4), (9, 12)]) == [(0, 1), (2, 3), (4, 9)]
    assert without([(0, 2), (3, 5)], [(1, 4)]) == [(0, 1), (4, 5)]
    assert without([(0, 2), (3, 5)], []) == [(0, 2), (3, 5)]
    assert without([(1, 2)], [(0, 3)]) == []


def cpu_steps() -> list[dict[str, Any]]:
    """Two steps of 10 ms: 2 of data, 1 of Python, 40 short operators, 3 of torch's own Python."""
    events = [mark(20, 10)]
    for step in range(2):
        at = 10 + 10_000 * step
        events += [event("aten::mm", "cpu_op", at + 3000 + 100 * n, 80) for n in range(40)]
        events += [
            event("autograd::engine::evaluate_function: F", "cpu_op", at + 3000, 7000),
            event("MyFunctionBackward", "cpu_op", at + 3000, 7000),
            mark(21 + step, at + 10_000),
        ]
    return events


def test_a_cpu_is_busy_in_torch_and_in_the_python_between_its_operators() -> None:
    waits = [(10, 2010), (10_010, 12_010)]
    samples: list[tuple[float, bool, str | None]] = []
    for at in (10, 10_010):
        samples += [(at + 100 + 500 * n, True, None) for n in range(4)]
        samples += [(at + 2100 + 500 * n, False, "train.py:7") for n in range(2)]
        samples += [(at + 7100 + 500 * n, True, None) for n in range(6)]
    found = reduced(cpu_steps(), waits, samples)
    assert found["device"] == "cpu"
    assert micros(found, "busy", "compute", "host") == [7000, 7000, 1000]
    assert found["lines"] == [["train.py:7", pytest.approx(0.001, abs=1e-6)]]


def test_without_samples_only_long_gaps_are_the_hosts() -> None:
    found = reduced(cpu_steps(), [(10, 2010), (10_010, 12_010)])
    assert micros(found, "busy", "host") == [4000 - 20, 4000 + 20]
    assert found["lines"] == []


def test_gaps_too_short_for_a_sample_are_divided_as_others_like_them() -> None:
    operators = [event("aten::mm", "cpu_op", 10 + 400 * n, 200) for n in range(10)]
    events = [mark(1, 10), *operators, mark(2, 4010)]
    samples = [(250.0, False, "a.py:1"), (1050.0, True, None), (2250.0, False, "b.py:2")]
    samples += [(2650.0, False, "a.py:1"), (20.0, False, "never.py:9")]
    found = reduced(events, samples=sorted(samples))
    assert micros(found, "host", "busy") == [1500, 2500]
    assert found["lines"] == [["a.py:1", 0.001], ["b.py:2", 0.0005]]


def gpu_events(*, waits: bool) -> list[dict[str, Any]]:
    """Two steps of 1,000 µs on the device; the first kernel is of the step before them."""
    kernel, stream = "void gemm()", 7
    events = [
        event("cudaLaunchKernel", "cuda_runtime", 1, 2, correlation=1),
        event(kernel, "kernel", 50, 50, stream, correlation=1),  # ends at 100
        mark(30, 10),
    ]
    for step in range(2):
        at, number = 1000.0 * step, 10 * (step + 1)
        if waits:
            events += [event("cudaStreamSynchronize", "cuda_runtime", at + 20, 90)]
        events += [
            event("aten::copy_", "cpu_op", at + 290, 20),
            event("cudaMemcpyAsync", "cuda_runtime", at + 300, 5, correlation=number),
            event("aten::mm", "cpu_op", at + 310, 20),
            event("cudaLaunchKernel", "cuda_runtime", at + 320, 5, correlation=number + 1),
            event("cudaLaunchKernel", "cuda_runtime", at + 330, 40, correlation=number + 2),
            event("aten::add", "cpu_op", at + 750, 130),
            event("cudaLaunchKernel", "cuda_runtime", at + 880, 5, correlation=number + 3),
            event(
                *("Memcpy HtoD (Pageable -> Device)", "gpu_memcpy", at + 400, 100, stream),
                correlation=number,
                bytes=4000,
            ),
            event(kernel, "kernel", at + 500, 200, stream, correlation=number + 1),
            event("ncclDevKernel_AllReduce", "kernel", at + 600, 150, 9, correlation=number + 2),
            event(kernel, "kernel", at + 900, 200, stream, correlation=number + 3),
            mark(31 + step, at + 1010),
        ]
    return events


def test_a_gpu_and_what_its_host_does_while_it_is_idle() -> None:
    # Idle from 100 to 400 (the host in its own code until 290) and from 750 to 900.
    own = [(150.0, False, "train.py:52"), (1150.0, False, "train.py:52")]
    copies = [(302.0, False, "train.py:60"), (1302.0, False, "train.py:60")]
    samples = sorted([*own, *copies])
    found = reduced(gpu_events(waits=False), samples=samples)
    assert (found["device"], found["kernels"], found["copied"]) == ("cuda", 2, 4000)
    assert (found["pageable"], found["copied_back"]) == (4000, 0)
    assert found["copying"] == [["train.py:60", pytest.approx(5e-6)]]  # the call took no longer
    assert micros(found, "busy", "compute", "copies", "exchanges") == [550, 400, 100, 50]
    launching = 80 + 30 + 150  # calls, a short gap after them, and one operator
    assert micros(found, "host", "launches") == [450 - launching, launching]
    assert found["lines"] == [["train.py:52", pytest.approx(found["host"])]]


def test_after_the_host_has_waited_for_the_device_its_idle_time_is_the_hosts() -> None:
    samples = [(30.0, False, "train.py:9"), (1030.0, False, "train.py:9")]
    found = reduced(gpu_events(waits=True), samples=samples)
    assert micros(found, "host", "launches") == [300, 150]
    assert found["lines"] == [["train.py:9", pytest.approx(300e-6, abs=1e-6)]]


def test_waiting_for_data_is_not_the_hosts() -> None:
    found = reduced(gpu_events(waits=False), [(100, 290), (1100, 1290)])
    assert micros(found, "host", "launches") == [0, 260]
