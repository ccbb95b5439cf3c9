"""Memory that grows with every step: what is growth, when it is full, and which line it is."""

from __future__ import annotations

import math
import random
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.verdict_runs import HEALTHY, planted
from torch.overrides import TorchFunctionMode

from allranks.probe import memory_use
from allranks.probe.memory_use import LineWatch
from allranks.run.record import RankRecord
from allranks.timing.memory import STEADY_AT_LINE, Point, growing_memory, steady_growth
from allranks.timing.verdict import judge

MIB = 1 << 20
HOST = {"hardware": {"memory_allotted_bytes": 16 << 30}}


def points(used: Callable[[int], float], steps: int = 600) -> list[Point]:
    """Ten samples a second of steps of 20 ms; `used`: MiB by step, besides some noise."""
    noise = random.Random(0)
    return [
        Point(step, step * 0.02, (1000 + used(step) + noise.uniform(0, 2)) * MIB)
        for step in range(1, steps, 5)
    ]


def test_a_leak_is_steady_growth() -> None:
    growth = steady_growth(points(lambda step: 0.5 * step))
    assert growth is not None
    assert growth[0] == pytest.approx(0.5 * MIB, rel=0.05)
    assert growth[1] == pytest.approx(25 * MIB, rel=0.05)


@pytest.mark.parametrize(
    "used",
    [
        lambda step: 0.0,
        lambda step: 0.01 * step,  # a list of losses
        lambda step: 500 * (1 - math.exp(-step / 60)),  # caches fill
        lambda step: 2000 * (1 - math.exp(-step / 300)),
        lambda step: 40 * math.log(step),  # shapes that are seen for the first time
        lambda step: min(step, 300),  # a data set keeps what it reads in the first epoch
        lambda step: 100.0 * (step // 250),  # an allocator takes more, now and then
        lambda step: step % 150,  # results that are kept until an epoch's end
        lambda step: 700.0 * (step % 100 > 90),  # evaluations
        lambda step: -0.5 * step,
    ],
)
def test_healthy_loops_do_not_grow(used: Callable[[int], float]) -> None:
    assert steady_growth(points(used)) is None
    assert steady_growth(points(used), STEADY_AT_LINE) is None
    assert steady_growth(points(lambda step: step, steps=40)) is None  # too short to say


def grown(where: str = "host", mib: float = 1.0, rank: int = 0, **more: Any) -> RankRecord:
    """A rank of a script whose memory grows by so much a step of 20 ms."""
    events: list[dict[str, Any]] = [{"t": 0.0, "event": "start", "host": "node1"}]
    events += [
        {"t": point.time, "event": "memory", "step": point.step, where: point.num_bytes}
        for point in points(lambda step: mib * step)
    ]
    events.append({"t": 12.0, "event": "device", "memory_total": 80 << 30})
    events += [{"t": 12.0, "event": kind, **fields} for kind, fields in more.items()]
    return RankRecord(rank, events)


def test_how_long_until_it_is_full_and_where() -> None:
    kept = {"where": "host", "line": "train.py:52", "loading": False}
    (found,) = growing_memory({0: grown(kept=kept)}, HOST)
    # 16 GiB less 1600 MiB, at 50 MiB a second.
    assert found.text == "host memory grows by 1 MiB a step: full in about 5 minutes (train.py:52)"
    (found,) = growing_memory({0: grown("device", 2.0)}, {})
    assert found.text.startswith("device memory grows by 2 MiB a step: full in about 13 minutes")
    # Two ranks on a node fill it in half the time.
    two = growing_memory({0: grown(), 1: grown(rank=1)}, HOST)
    assert two[0].full_in == pytest.approx(((16 << 30) - 3200 * MIB) / (100 * MIB), rel=0.05)


def test_searching_for_the_line_is_not_in_the_time_until_it_is_full() -> None:
    growing = grown()
    for n in range(2, 600):
        is_slow = n in range(100, 110)
        took = 1.0 if is_slow else 0.02
        growing.take({"t": n * 0.02 + (n >= 110) * 10, "event": "step", "step": n, "seconds": took,
                      "traced": is_slow})  # fmt: skip
    (found,) = growing_memory({0: growing}, HOST)
    assert found.full_in == pytest.approx(((16 << 30) - 1600 * MIB) / (50 * MIB), rel=0.05)


def test_growth_that_does_no_harm_is_not_reported() -> None:
    assert not growing_memory({0: grown(mib=0.05)}, {"hardware": {"memory_bytes": 4 << 40}})
    reads = {"rank_samples": 100_000}
    loads = {"where": "host", "line": "data.py:7", "loading": True}
    # In its first epoch a data set may fill a cache; afterwards, or elsewhere, it is a leak.
    assert not growing_memory({0: grown(dataset=reads)}, HOST)
    assert not growing_memory({0: grown(dataset=reads, kept=loads)}, HOST)
    assert growing_memory({0: grown(dataset=reads, kept={**loads, "loading": False})}, HOST)
    assert growing_memory({0: grown(dataset=reads, kept=loads, epoch={"epoch": 1})}, HOST)


def test_the_judgement_warns(tmp_path: Path) -> None:
    def memory(rank: int) -> list[dict[str, Any]]:
        kept = {"event": "kept", "where": "host", "line": "train.py:9"}
        return [kept, *({"event": "memory", "step": p.step, "host": p.num_bytes, "t": p.time}
                        for p in points(lambda step: step))]  # fmt: skip

    run = planted(tmp_path, HEALTHY, events=memory, info=HOST)
    (warning,) = judge(run).warnings
    assert (warning.kind, warning.line) == ("memory-grows", "train.py:9")
    assert not judge(planted(tmp_path, HEALTHY, number=1, info=HOST)).warnings


class Recorder:
    """What a watch uses of the probe's."""

    class timeline:
        label = "other"


def test_tensors_are_counted_without_the_scripts_own_code() -> None:
    called = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):  # type: ignore[no-untyped-def]
            called.append(function)
            return function(*args, **(kwargs or {}))

    one = torch.ones(3, 5, 7)
    with Mode():
        counted = memory_use.count_tensors("host")
    assert counted[tuple(one.shape), one.dtype] >= 1 and not called


def test_a_watch_leaves_a_debugger_alone_and_ends_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder: Any = Recorder

    def debugger(*event: Any) -> None:
        return None

    before = sys.gettrace()
    watch = LineWatch("host", 1.0, recorder)
    sys.settrace(debugger)
    try:
        watch.start(None)
        assert sys.gettrace() is debugger and not tracemalloc.is_tracing()
    finally:
        sys.settrace(before)
        watch.leave()
    monkeypatch.setattr(memory_use, "MOST_WATCH_SECONDS", -1.0)
    step = own_code("def step(kept):\n    a = 1\n", tmp_path)
    watch = LineWatch("host", 1.0, recorder)
    watch.start(None)
    try:
        step([])
        assert watch.is_late and sys.gettrace() is None
    finally:
        watch.leave()


def test_lines_that_make_nothing_are_soon_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "def step(kept):\n    n = sum(i for i in range(500))\n    kept.append(torch.ones(999))\n"
    step, kept, looks = own_code(text, tmp_path), list[Any](), []
    look = LineWatch._harvest

    def counted(watch: LineWatch) -> bool:
        looks.append(1)
        return look(watch)

    monkeypatch.setattr(LineWatch, "_harvest", counted)
    recorder: Any = Recorder
    watch = LineWatch("host", 4000.0, recorder)
    follow(watch, step, kept)
    found = watch.kept()
    assert max(found, key=lambda place: found[place])[1] == 3
    assert len(looks) < 200  # of 4,000 lines


def test_a_watch_that_takes_long_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = own_code("def step(kept):\n    a = 1\n    kept.append(a)\n", tmp_path)
    monkeypatch.setattr(memory_use, "MOST_SECONDS", -1.0)
    recorder: Any = Recorder
    watch = LineWatch("host", 1.0, recorder)
    watch.start(None)
    try:
        step([])
        assert sys.gettrace() is None
    finally:
        watch.leave()
    assert sys.gettrace() is None and not tracemalloc.is_tracing()


def follow(watch: LineWatch, step: Callable[[list[Any]], None], kept: list[Any]) -> None:
    """Make steps until the watch has seen enough."""
    try:
        while True:
            step(kept)
            if watch.next_step(None):
                break
    finally:
        watch.stop()


def own_code(text: str, tmp_path: Path) -> Callable[[list[Any]], None]:
    """A function `step(kept)` of a script of the user's own."""
    path = tmp_path / "train.py"
    path.write_text(text)
    names: dict[str, Any] = {"torch": torch}
    exec(compile(text, str(path), "exec"), names)
    step: Callable[[list[Any]], None] = names["step"]
    return step


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (4, "def step(kept):\n    a = torch.ones(64, 64)\n    b = a @ a\n    kept.append(b + 1)\n"),
        (4, "def step(kept):\n    a = torch.ones(999)\n    b = a * 2\n    kept.append(b)\n"),
        (
            3,
            "def step(kept):\n    a = torch.ones(999)\n    kept += [a * 2]\n    b = a + 1\n",
        ),
        (
            2,
            "def step(kept):\n    a = bytearray(1 << 16)\n    b = torch.ones(99)\n    kept += a,\n",
        ),
        (  # a loss keeps a graph too, but nothing of it after its backward pass
            3,
            "w = torch.ones(250_000, requires_grad=True)\ndef step(kept):\n"
            "    kept.append(w.detach() * 2)\n    loss = w.sum()\n    loss.backward()\n"
            "    kept.append(loss)\n",
        ),
        (  # what is large is in its graph
            4,
            "def step(kept):\n    w = torch.ones(999, requires_grad=True)\n    y = w.exp()\n"
            "    kept.append(y.sum())\n    big = torch.ones(500)\n",
        ),
        (
            2,
            "def make(n):\n    return torch.zeros(n)\n\n"
            "def step(kept):\n    x = torch.ones(9999)\n    kept.append(make(500))\n",
        ),
    ],
)
def test_the_line_that_makes_what_is_kept(tmp_path: Path, line: int, text: str) -> None:
    step, kept = own_code(text, tmp_path), list[Any]()
    recorder: Any = Recorder
    watch = LineWatch("host", 1e6 if "requires_grad" in text else 0.0, recorder)
    follow(watch, step, kept)
    found = watch.kept()
    at = max(found, key=lambda place: found[place])
    assert (Path(at[0]).name, at[1]) == ("train.py", line)
    assert sys.gettrace() is None and not tracemalloc.is_tracing()
