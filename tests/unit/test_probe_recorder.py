"""Steps come from a rank's timeline into its file, whatever the device and the disk do."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from allranks.probe import model_inputs
from allranks.probe.device_sampler import host_memory
from allranks.probe.recorder import Recorder
from allranks.probe.samples import SampleCounter
from allranks.run.events import read_events
from allranks.timing import timeline
from allranks.timing.timeline import FORWARD


def test_memory_in_use_falls_again_and_its_peak_stays() -> None:
    before = host_memory()
    held = b"x" * (64 << 20)
    during = host_memory()
    del held
    after = host_memory()
    now = [cast(int, each["host_memory_now"]) for each in (before, during, after)]
    assert now[1] - now[0] > 48 << 20 and now[1] - now[2] > 48 << 20
    assert cast(int, after["host_memory"]) > now[2] + (32 << 20)
    assert 0 < cast(int, after["host_memory_shared"]) < now[2]


class Optimizer:
    """What is used of an optimizer."""

    param_groups: tuple[Any, ...] = ()


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[Recorder]:
    made = Recorder(tmp_path, 0)
    yield made
    log = made._log
    made.forget()
    if log is not None:
        log.close()


def steps_in(folder: Path) -> list[int]:
    events = read_events(folder / "rank-0.jsonl")
    return [event["step"] for event in events if event["event"] == "step"]


def test_steps_before_a_device_was_lost_are_written(recorder: Recorder, tmp_path: Path) -> None:
    class Event:
        is_lost = False

        def query(self) -> bool:
            if Event.is_lost:
                raise RuntimeError("CUDA error: device-side assert triggered")
            return True

        def synchronize(self) -> None:
            self.query()

        def elapsed_time(self, end: Any) -> float:
            return 1.0

    optimizer = Optimizer()
    recorder.timeline.record_event = Event
    for _ in range(3):
        recorder.timeline.mark(FORWARD)
        recorder.stepped(optimizer)
    Event.is_lost = True
    recorder.timeline.mark(FORWARD)
    recorder.stepped(optimizer)
    recorder.flush()
    assert steps_in(tmp_path) == [1, 2, 3, 4]


def test_steps_are_told_by_the_world_s_clock_after_the_machine_has_slept(
    recorder: Recorder, tmp_path: Path
) -> None:
    optimizer = Optimizer()
    recorder.timeline.mark(FORWARD)
    recorder.stepped(optimizer)
    recorder.flush()
    recorder.timeline.unix -= 3600  # the clock of marks stood still for an hour
    recorder.timeline.mark(FORWARD)
    recorder.stepped(optimizer)
    recorder.flush()
    told = [event["t"] for event in read_events(tmp_path / "rank-0.jsonl")]
    assert told[-1] == pytest.approx(time.time(), abs=5)


def test_the_steps_of_a_loop_of_our_own_are_the_loop_s(
    recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeline, "current", recorder.timeline)
    taken = timeline.take()
    recorder.step = 1
    recorder.write("device", cpu=1.0)  # opens the file, beside the loop's own
    before, is_over = sys.getswitchinterval(), threading.Event()

    def write() -> None:
        while not is_over.is_set():
            recorder.flush()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        sys.setswitchinterval(1e-6)
        for _ in range(3000):
            taken.mark(FORWARD)
            assert taken.close().host_seconds >= 0
    finally:
        sys.setswitchinterval(before)
        is_over.set()
        writer.join()
    assert steps_in(tmp_path) == []


def test_a_module_whose_making_failed_is_passed_over(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_inputs, "hide_from_scripting", lambda: None)
    half = torch.nn.Linear.__new__(torch.nn.Linear)  # somebody caught what its __init__ raised
    model = torch.nn.Linear(2, 1)
    optimizer = Optimizer()
    optimizer.param_groups = ({"params": [*model.parameters()]},)
    model_inputs.watch_model(recorder, optimizer)
    model(torch.zeros(3, 2))
    assert recorder.timeline.marks[-1][3] == (SampleCounter.computed, 3)
    assert recorder.is_on and half is not model
