"""What filled a GPU: through the optimizers, by recorded lines, and in the doctor's words."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from allranks.doctor.out_of_memory import what_filled
from allranks.probe import device_memory
from allranks.probe.device_memory import DeviceMemory, optimizer_bytes, recorded_lines
from allranks.run import tracebacks
from allranks.run.events import append_event
from allranks.run.folder import RunDir

FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def test_parameters_gradients_and_state_are_counted_through_the_optimizer() -> None:
    model = nn.Linear(10, 20)  # 220 numbers
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 10)).sum().backward()
    before, _ = optimizer_bytes([optimizer], torch.device("cpu"))
    assert before == {"parameters": 880, "gradients": 880, "optimizer": 0}
    optimizer.step()
    after, counted = optimizer_bytes([optimizer, optimizer], torch.device("cpu"))
    assert after["optimizer"] == pytest.approx(2 * 880, abs=8)  # two moments, and a few counters
    assert model.weight.data_ptr() in counted
    assert not any(optimizer_bytes([optimizer], torch.device("cuda", 0))[0].values())


def block(address: int, size: int, line: int | None, state: str = "active_allocated") -> Any:
    torch_s = {"filename": "/x/site-packages/torch/nn/functional.py", "line": 1, "name": "linear"}
    own = {"filename": f"{Path.cwd()}/train.py", "line": line, "name": "step"}
    frames = [] if line is None else [torch_s, own, {**own, "line": 99, "name": "<module>"}]
    return {"address": address, "size": size, "state": state, "frames": frames}


def test_the_lines_that_allocated_the_rest() -> None:
    blocks = [
        *(block(0, 100, 7), block(100, 300, 52), block(400, 50, None), block(450, 30, 7)),
        *(block(480, 1000, 7, "inactive"), block(1480, 900, 8)),
    ]
    segments = [{"device": 0, "blocks": blocks}, {"device": 1, "blocks": [block(0, 5000, 3)]}]
    found = recorded_lines({"segments": segments}, 0, counted={1480})
    assert found == [("train.py:52", 300), ("train.py:7", 130)]


class Recorder:
    """What it uses of the probe's."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", 0)
        self.at_loading: list[Any] = []
        self.at_step: list[Any] = []


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Calls of torch's recording, on a machine that has no GPU."""
    made: list[Any] = []

    def record(enabled: Any = "all", **kwargs: Any) -> None:
        made.append(enabled)

    monkeypatch.setattr(tracebacks, "more_about", [])
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 1000)
    monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: False, raising=False)
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", record)
    snapshot = {"segments": [{"device": 0, "blocks": [block(0, 600, 52)]}]}
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: snapshot)
    return made


def begin() -> tuple[Any, DeviceMemory]:
    recorder: Any = Recorder()
    memory = DeviceMemory(recorder)
    recorder.at_loading[0]()
    return recorder, memory


def test_the_first_steps_are_recorded(calls: list[Any]) -> None:
    recorder, memory = begin()
    assert memory.what_filled(FULL)["filled_by"] == [("train.py:52", 600)]
    assert memory.what_filled(ValueError("no")) == {}
    for step in (1, 2, 3):
        for call in list(recorder.at_step):
            call(step)
    assert calls == ["state", None] and not recorder.at_step and not recorder.at_loading


def test_without_steps_recording_ends_too(
    calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_memory, "MOST_SECONDS", 0.0)
    recorder, memory = begin()
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer):
            thread.join()
    assert calls == ["state", None]
    recorder.at_step[0](3)
    assert calls == ["state", None] and memory.what_filled(FULL)["filled_by"]


def test_what_the_script_records_is_left_alone(
    calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder, memory = begin()
    torch.cuda.memory._record_memory_history()  # by the script
    recorder.at_step[0](3)
    assert calls == ["state", "all"]
    assert "filled_by" not in memory.what_filled(FULL)
    monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: True)
    begin()
    assert calls == ["state", "all"]


def test_an_error_in_it_is_one_line(
    calls: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **kwargs: 1 / 0)
    begin()
    said = "allranks: memory is not recorded: ZeroDivisionError: division by zero\n"
    assert capsys.readouterr().err == said


def test_the_doctor_says_what_filled_it(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "train-20261118-120000-0001")
    run.attempt(0).mkdir(parents=True)
    sizes = {"parameters": 4 << 30, "gradients": 4 << 30, "optimizer": 8 << 30, "rest": 60 << 30}
    error = SimpleNamespace(type="OutOfMemoryError", message=str(FULL), echo=False, filled=sizes)
    append_event(run.events(0, 1), "error", **vars(error))
    found = what_filled(run, 0, 1)
    assert found is not None
    assert found.text == (
        "in the GPU's memory: parameters 4 GiB, gradients 4 GiB, optimizer state 8 GiB; "
        "the rest 60 GiB (not recorded)"
    )
    append_event(run.events(0, 1), "error", **vars(error), filled_by=[["train.py:52", 50 << 30]])
    found = what_filled(run, 0, 1)
    assert found is not None and found.text.endswith("the rest 60 GiB (train.py:52 50 GiB)")
    append_event(run.events(0, 1), "kept", where="device", line="train.py:9")
    found = what_filled(run, 0, 1)
    assert found is not None and found.text.endswith("(it grew with every step, at train.py:9)")
