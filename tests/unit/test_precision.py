"""Precisions side by side, from what their runs left behind."""

from __future__ import annotations

import io
import math
from pathlib import Path

import pytest
from rich.console import Console

from allranks.bench import precision
from allranks.bench.measure import Ended
from allranks.bench.precision import Trial, as_json, why_unsupported
from allranks.errors import AllranksError
from allranks.machine.gpus import LocalGPU
from allranks.run.events import append_event
from allranks.run.folder import RunDir


def gpu(capability: str) -> LocalGPU:
    return LocalGPU(0, "GPU-0", f"GPU {capability}", 1 << 34, capability, None)


@pytest.mark.parametrize(
    ("name", "capabilities", "is_supported"),
    [
        ("fp32", [], True),
        ("tf32", [], False),
        ("fp16", [], True),
        ("bf16", [], True),
        ("tf32", ["7.0"], False),
        ("bf16", ["7.5"], False),
        ("fp16", ["7.0"], True),
        ("tf32", ["9.0"], True),
        ("bf16", ["9.0", "7.0"], False),
        ("bf16", ["gfx90a"], True),
    ],
)
def test_what_a_machine_can_do(name: str, capabilities: list[str], is_supported: bool) -> None:
    assert (why_unsupported(name, [gpu(one) for one in capabilities]) is None) == is_supported


def test_names_are_read_in_one_order() -> None:
    assert precision.read_precisions("bf16, fp32") == ["fp32", "bf16"]
    assert precision.read_precisions(None) == ["fp32", "tf32", "fp16", "bf16"]
    with pytest.raises(AllranksError, match="fp8 is not a precision"):
        precision.read_precisions("fp32,fp8")


TRIALS = [
    Trial("tf32", problem="there is no GPU here"),
    Trial("fp32", "a", 100.0, 1 << 30, "device", {10: 1.0, 20: 0.5}),
    Trial("bf16", "b", 180.0, 1 << 29, "device", {10: 1.02, 20: 0.51}),
    Trial("fp32", "c", 104.0, 1 << 30, "device", {10: 1.0, 20: 0.5}),
]


def test_rows_are_compared_with_the_first_that_was_measured() -> None:
    found = as_json(TRIALS, steps=20)
    rows = {row["precision"]: row for row in found["rows"]}
    assert list(rows) == ["fp32", "tf32", "bf16"]
    assert rows["fp32"]["samples_per_second"] == 102
    assert rows["fp32"]["range"] == [100, 104]
    assert rows["bf16"]["speedup"] == pytest.approx(180 / 102)
    assert rows["bf16"]["loss_difference"] == pytest.approx(0.01)
    assert rows["bf16"]["largest_loss_difference"] == pytest.approx(0.02)
    assert rows["tf32"]["speedup"] is None and rows["tf32"]["problem"] == "there is no GPU here"
    assert [one["run"] for one in rows["fp32"]["repeats"]] == ["a", "c"]
    assert found["verdict"] == (
        "precision=bf16 is 1.76x as fast as fp32, with 0.50x the memory; "
        "after 20 steps its loss differs by +0.01 (from 0.5)"
    )


def test_verdicts_without_a_choice() -> None:
    slow = Trial("bf16", "b", 10.0, losses={20: 0.5})
    assert "fp32 is the fastest" in as_json([TRIALS[1], slow], steps=20)["verdict"]
    assert "only fp32 could be measured" in as_json(TRIALS[:2], steps=20)["verdict"]
    assert "nothing could be measured: there is" in as_json(TRIALS[:1], steps=20)["verdict"]
    assert "no run was made" in as_json([], steps=20)["verdict"]


@pytest.mark.parametrize("width", [60, 100])
def test_the_table_fits(width: int) -> None:
    console = Console(file=io.StringIO(), width=width)
    host = Trial("fp16", "d", 98765.4, 1 << 35, "host", {20: 0.5})
    precision.show(console, as_json([*TRIALS, host], steps=20))
    text = console.file.getvalue()  # type: ignore[attr-defined]  # a StringIO
    tables = [line for line in text.splitlines() if "  " in line.strip()]
    assert max(map(len, tables)) <= width
    assert "1.76x" in text and "+0.010" in text and "the host's" in text


def test_a_run_is_read_from_its_folder(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "job-20260101-000000-abcd")
    path = run.events(0, 0)
    for step in range(1, 31):
        loss = {"loss": 1 / step} if step % 10 == 0 else {}
        append_event(path, "step", step=step, seconds=0.1, samples=8, **loss)
    append_event(path, "end", state="finished", exit=0, host_memory=1000, memory_peak=500)
    trial = precision.trial_of(Ended("bf16", run))
    assert trial.samples_per_second == pytest.approx(80)
    assert (trial.memory_bytes, trial.memory_of) == (500, "device")
    assert trial.losses == {10: 0.1, 20: 0.05, 30: pytest.approx(1 / 30)}
    assert trial.problem is None


@pytest.mark.parametrize(
    ("state", "problem"), [("stopped", "stopped before"), ("failed", "rank 0 failed: it broke")]
)
def test_a_run_that_came_to_nothing(tmp_path: Path, state: str, problem: str) -> None:
    run = RunDir(tmp_path / "job-20260101-000000-abcd")
    error = {"error": {"what": "it broke", "fix": ""}} if state == "failed" else {}
    append_event(run.events(0, 0), "end", state=state, exit=1, **error)
    trial = precision.trial_of(Ended("fp16", run))
    assert trial.problem is not None and problem in trial.problem
    assert trial.samples_per_second is None


def test_a_loss_that_is_lost_is_never_recommended(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "job-20260101-000000-abcd")
    path = run.events(0, 0)
    append_event(path, "start", rank=0, world_size=1)
    for step in range(1, 31):
        loss = {"loss": 0.5 if step < 20 else math.nan} if step % 10 == 0 else {}
        append_event(path, "step", step=step, seconds=0.1, samples=8, **loss)
    append_event(path, "end", state="finished", exit=0)
    trial = precision.trial_of(Ended("fp16", run))
    assert trial.problem == "its loss is not a number from step 20 on"
    assert trial.samples_per_second is None
