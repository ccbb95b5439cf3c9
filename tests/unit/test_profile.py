"""What is read from traces: made-up ones of a CPU and of a GPU."""

from __future__ import annotations

import gzip
import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.traces import event, mark

from allranks.bench import profile
from allranks.run.folder import RunDir
from allranks.timing import trace


def gloo(ts: float, dur: float, elements: int = 1000) -> dict[str, Any]:
    shapes = {"Input Dims": [[elements]], "Input type": ["float"]}
    return event("gloo:all_reduce", "user_annotation", ts, dur, tid=2, **shapes)


def cpu_trace(*, slower: float = 0.0) -> dict[str, Any]:
    """Two steps of 1,000 µs: 400 waiting for data, 500 computing, 200 exchanging, half hidden."""
    events = [mark(10, 0)]
    for step in range(2):
        at = step * 1000.0
        events += [
            event("enumerate(DataLoader)#Iter.__next__", "user_annotation", at + 2, 396),
            event("aten::linear", "cpu_op", at + 400, 500 + slower),
            event("aten::mm", "cpu_op", at + 450, 300),
            gloo(at + 800, 200),
            event("c10d::allreduce_", "cpu_op", at + 900 + slower, 100 - slower),
            mark(11 + step, at + 1000),
        ]
    groups = [{"pg_size": 2}, {"pg_size": 2}]
    return {"traceEvents": events, "distributedInfo": {"pg_config": groups}}


def nccl(ts: float, dur: float, corr: int, **args: Any) -> dict[str, Any]:
    label = {
        "Collective name": "_allgather_base",
        "In msg nelems": 500,
        "Out msg nelems": 1000,
        "dtype": "BFloat16",
        "Group size": 2,
        "Process Group Description": "shards",
    }
    name = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
    return event(name, "kernel", ts, dur, tid=20, correlation=corr, **(args or label))


def gpu_trace() -> dict[str, Any]:
    """One step whose kernels run long after the host has launched them."""
    launches = [
        event("cudaLaunchKernel", "cuda_runtime", 10.0 * number, 5, correlation=number)
        for number in range(1, 6)
    ]
    gemm = "void cutlass::Kernel2<cutlass_80_tensorop(float)>"
    return {
        "traceEvents": [
            mark(3, 0),
            mark(4, 100),
            *launches,
            event("cudaLaunchKernel", "cuda_runtime", 150, 5, correlation=6),
            event(
                "Memcpy HtoD (Pinned -> Device)", "gpu_memcpy", 500, 50, 7, correlation=1, bytes=800
            ),
            event(gemm, "kernel", 550, 200, 7, correlation=2),
            nccl(700, 100, 3),
            event(gemm, "kernel", 900, 100, 7, correlation=4),
            nccl(1000, 50, 5, **{"x": 1}),
            event(gemm, "kernel", 1050, 500, 7, correlation=6),  # of the next step
        ]
    }


def test_intervals() -> None:
    assert trace.union([(3, 4), (0, 1), (1, 2), (3.5, 5)]) == [(0, 2), (3, 5)]
    assert trace.overlap([(0, 2), (3, 5)], [(1, 4)]) == 2
    assert trace.overlap([(0, 10)], [(1, 2), (3, 4), (12, 13)]) == 2
    assert trace.gaps([(1, 2), (4, 9)], 0, 8) == [(0, 1), (2, 4)]
    assert trace.gaps([], 0, 1) == [(0, 1)]
    assert trace.within([(0, 2), (5, 6)], 1, 5) == [(1, 2)]


def test_operators_count_without_those_they_call() -> None:
    spans = [
        trace.Span("outer", "cpu_op", 0, 10, 1, {}),
        trace.Span("inner", "cpu_op", 2, 5, 1, {}),
        trace.Span("innermost", "cpu_op", 3, 4, 1, {}),
        trace.Span("other thread", "cpu_op", 2, 5, 2, {}),
    ]
    own = {span.name: seconds for span, seconds in trace.self_seconds(spans)}
    assert own == {"outer": 7, "inner": 2, "innermost": 1, "other thread": 3}


def read(content: dict[str, Any], rank: int = 0) -> trace.Trace:
    found = trace.trace_of(content, rank)
    assert found is not None
    return found


def test_a_rank_without_a_gpu() -> None:
    found = profile.rank_summary(read(cpu_trace()))
    assert (found["device"], found["steps"]) == ("cpu", 2)
    assert (found["first_step"], found["last_step"]) == (11, 12)
    assert found["step_seconds"] == pytest.approx(1000e-6)
    assert found["compute_seconds"] == pytest.approx(500e-6)
    assert found["communication_seconds"] == pytest.approx(200e-6)
    assert found["hidden_share"] == pytest.approx(0.5)
    assert found["exposed_seconds"] == pytest.approx(100e-6)
    assert found["idle_seconds"] == pytest.approx(400e-6)
    gap = found["gaps"][0]
    assert (gap["during"], gap["before"], gap["count"]) == ("waiting for data", "aten::linear", 1)
    operators = {row["name"]: row["seconds"] for row in found["operators"]}
    assert operators["aten::mm"] == pytest.approx(300e-6)
    assert operators["aten::linear"] == pytest.approx(200e-6)
    assert found["communication"][0]["bytes"] == 4000
    (one,) = found["collectives_of_a_step"]
    assert (one["name"], one["bytes"], one["dtype"]) == ("all_reduce", 4000, "float")
    assert (one["group_size"], one["count"]) == (2, 1)
    assert found["copies"] == found["kernels"] == []


def test_a_rank_with_a_gpu_is_judged_by_what_was_launched_in_its_steps() -> None:
    found = profile.rank_summary(read(gpu_trace()))
    assert found["device"] == "cuda"
    assert found["compute_seconds"] == pytest.approx(300e-6)
    assert found["communication_seconds"] == pytest.approx(150e-6)
    assert found["hidden_share"] == pytest.approx(50 / 150)
    assert found["idle_seconds"] == pytest.approx(100e-6)  # from 800 to 900
    (kernel,) = found["kernels"]
    assert (kernel["name"], kernel["count"]) == ("cutlass::Kernel2", 2)
    (copy,) = found["copies"]
    assert (copy["name"], copy["bytes"]) == ("Memcpy HtoD (Pinned -> Device)", 800)
    named, bare = found["collectives_of_a_step"]
    assert named == {
        "name": "all_gather",
        "bytes": 2000,
        "dtype": "bfloat16",
        "group_size": 2,
        "group": "shards",
        "count": 1,
        "seconds": pytest.approx(100e-6),
    }
    assert (bare["name"], bare["bytes"]) == ("all_gather", None)


def write(run: RunDir, rank: int, content: bytes) -> None:
    path = run.attempt(0) / f"rank-{rank}.trace.json.gz"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    run.events(0, rank).touch()  # an attempt without ranks has not begun


def test_ranks_are_compared(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    for rank, slower in enumerate((0.0, 90.0, 0.0)):
        write(run, rank, gzip.compress(json.dumps(cpu_trace(slower=slower)).encode()))
    write(run, 3, b"\x1f\x8b torn")
    console = Console(file=io.StringIO())
    found = profile.show_profile(run, console)
    assert found is not None
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1, 2]
    slow = [one for one in found["differences"] if one["part"] == "compute_seconds"]
    assert [one["rank"] for one in slow] == [1]
    assert slow[0]["seconds"] == pytest.approx(90e-6)
    assert "of the communication is hidden" in found["verdict"]
    text = profile.markdown(found)
    assert (run.path / "profile.md").read_text() == text
    assert "rank 1 computes 90.0µs longer per step" in text
    assert "https://ui.perfetto.dev" in text
    assert json.loads((tmp_path / "profile.json").read_text())["steps"] == 2


@pytest.mark.parametrize("width", [60, 100])
def test_the_summary_fits(tmp_path: Path, width: int) -> None:
    run = RunDir(tmp_path)
    write(run, 0, gzip.compress(json.dumps(gpu_trace()).encode()))
    found = profile.summarise(run)
    assert found is not None
    console = Console(file=io.StringIO(), width=width)
    profile.show(console, found)
    text = console.file.getvalue()  # type: ignore[attr-defined]  # a StringIO
    tables = [line for line in text.splitlines() if not line.startswith(("limited by", "traces"))]
    assert max(len(line) for line in tables if str(tmp_path) not in line) <= width
    for words in ("cutlass::Kernel2", "all_gather", "2 (shards)", "Memcpy HtoD", "800 B"):
        assert words in text


@pytest.mark.parametrize("events", [[], [mark(1, 0)], [event("aten::mm", "cpu_op", 0, 1)]])
def test_a_trace_without_a_whole_step_says_nothing(
    tmp_path: Path, events: list[dict[str, Any]]
) -> None:
    assert trace.trace_of({"traceEvents": events}, 0) is None
    run = RunDir(tmp_path)
    assert profile.summarise(run) is None
    write(run, 0, gzip.compress(json.dumps({"traceEvents": events}).encode()))
    assert profile.summarise(run) is None


def test_a_gpu_that_may_not_be_profiled_is_noticed() -> None:
    content = cpu_trace()
    content["traceEvents"].append(event("cudaLaunchKernel", "cuda_runtime", 500, 5, correlation=1))
    found = profile.together([{**profile.rank_summary(read(content)), "trace_bytes": 1}])
    assert any("missing from the traces" in line for line in profile.remarks(found))
