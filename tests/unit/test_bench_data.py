"""From single measurements to a recommendation with its reason."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from allranks.errors import AllranksError
from allranks.measure import data, data_screen
from allranks.rundir import RunDir
from allranks.timing import Timing

RUN = RunDir(Path("/runs/job-20260101-000000-abcd"))


def found(
    warm: dict[int, float],
    training: dict[int, float] | None = None,
    step: float | None = None,
    cold: dict[int, float] | None = None,
    **more: Any,
) -> dict[str, Any]:
    kinds = {"warm": warm, "training": training or {}, "cold": cold or {}}
    measured = [
        {"kind": kind, "workers": workers, "repeat": 0, "samples_per_second": pace}
        for kind, paces in kinds.items()
        for workers, pace in paces.items()
    ]
    if step is not None:
        measured.append({"kind": "step", "workers": None, "repeat": 0, "samples_per_second": step})
    return {
        "v": 1,
        "measured": measured,
        "world_size": 1,
        "batch_size": 50,
        "num_samples": 1000,
        "device": "cpu",
        "cpus": 4,
        "workers_of_job": 3,
        "is_direct": False,
        "files": {"count": 0, "bytes": 0, "is_all": True, "why_not_cold": "the data are in memory"},
        "disks": [],
        **more,
    }


def test_the_fewest_workers_that_train_as_fast() -> None:
    measured = found(
        {0: 1300, 1: 2600, 2: 5100, 4: 9000}, {0: 1200, 1: 2500, 2: 3850, 4: 3900}, 3900
    )
    answer = data.as_json(measured, RUN)
    assert answer["recommendation"]["num_workers"] == 2
    reason = "2 workers: 5,100 samples/s, the step takes 3,900, training with them makes 3,850"
    assert answer["recommendation"]["reason"] == reason
    assert answer["verdict"] == f"data.num_workers=2 ({reason}): the data keep up"
    assert answer["knee"] == 4
    assert answer["step"]["batches_per_second"] == 78
    assert answer["rows"][2]["batches_per_second"] == 102
    assert answer["rows"][1]["of_step"] == pytest.approx(2500 / 3900)
    assert not answer["is_disturbed"]


def test_data_slower_than_the_step_are_said_to_be_the_limit() -> None:
    answer = data.as_json(found({0: 500, 1: 900, 2: 950}, {0: 450, 1: 800, 2: 820}, 2000), RUN)
    assert answer["recommendation"]["num_workers"] == 1
    assert "the data are the limit, 60% of the step's pace is lost" in answer["verdict"]
    assert answer["knee"] == 1


def test_workers_that_take_the_steps_cpus_are_told_apart() -> None:
    answer = data.as_json(found({0: 5000, 1: 6000}, {0: 1000, 1: 1500}, 2000), RUN)
    assert "fast enough, but 25% of the step's pace is lost to preparing" in answer["verdict"]


def test_what_the_job_does_already_is_said() -> None:
    answer = data.as_json(found({3: 5000}, {3: 1000}, 1000), RUN)
    assert answer["verdict"].startswith("data.num_workers=3, as it is now (")


def test_a_slow_first_epoch_and_a_faster_disk() -> None:
    disks = [
        {"role": "data", "bytes_per_second": 100e6, "is_network": True},
        {"role": "staging", "bytes_per_second": 400e6, "is_network": False},
    ]
    measured = found({0: 5000}, {0: 1990}, 2000, {0: 700}, disks=disks)
    verdict = data.as_json(measured, RUN)["verdict"]
    assert "From the disk they come at 700 samples/s" in verdict
    assert "data.stage=local reads a copy 4.0x as fast" in verdict


def test_only_the_data_were_measured() -> None:
    answer = data.as_json(found({0: 100, 1: 200, 2: 205}), RUN)
    assert answer["step"] is None
    assert answer["recommendation"]["num_workers"] == 1
    assert "the training itself was not measured" in answer["verdict"]
    assert data.as_json(found({}), RUN)["verdict"] == "nothing was measured"


def test_contradictions_are_noticed() -> None:
    assert data.as_json(found({0: 100}, {0: 400}, 200), RUN)["is_disturbed"]
    twice = found({0: 100})
    twice["measured"].append({**twice["measured"][0], "samples_per_second": 300.0})
    answer = data.as_json(twice, RUN)
    assert answer["is_disturbed"]
    assert answer["rows"][0]["range"] == [100, 300]


@pytest.mark.parametrize("text", ["1,x", "-1", "1,,2", "99999"])
def test_workers_that_are_none(text: str) -> None:
    with pytest.raises(AllranksError, match="no list of numbers"):
        data.read_workers(text)


def test_workers_are_read_once_each_in_order() -> None:
    assert data.read_workers("4, 0,4") == [0, 4]
    assert data.read_workers(None) == []


@pytest.mark.parametrize("content", [None, "", "{"])
def test_a_run_without_measurements(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "data.json").write_text(content)
    assert data.read_found(RunDir(tmp_path)) is None


def timing(data_seconds: float | None) -> Timing:
    parts = None
    if data_seconds is not None:
        parts = {"compute": 0.1 - data_seconds, "comm": 0, "straggler": 0, "data": data_seconds}
    return Timing(
        first_step=2,
        last_step=11,
        ranks=1,
        steady=True,
        seconds=1.0,
        samples=1000,
        step_seconds=0.1,
        step_deviation=0.0,
        parts=parts,
        slowest_rank=None,
        slowest_share=0.0,
        slowest_part=None,
    )


def test_a_script_is_measured_as_it_is() -> None:
    answer = data.script_as_json(RUN, timing(0.05), 2)
    assert answer["data_share"] == 0.5
    assert answer["samples_per_second_without_waiting"] == 2000
    assert "steps wait 50.0% of their time for data: give its DataLoader" in answer["verdict"]
    assert "cannot be changed from outside" in answer["verdict"]
    assert answer["verdict"].endswith("as it is: 2 workers a rank")
    assert "the data keep up" in data.script_as_json(RUN, timing(0.001), 0)["verdict"]
    assert "is not known" in data.script_as_json(RUN, timing(None), None)["verdict"]


def drawn(answer: dict[str, Any], width: int) -> str:
    console = Console(file=io.StringIO(), width=width)
    data_screen.show(console, answer)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]  # a StringIO


@pytest.mark.parametrize("width", [60, 100])
def test_tables_fit(width: int) -> None:
    paces = {0: 123456.0, 1: 223456.0, 16: 323456.0}
    disk = {"role": "data", "mount": "/", "kind": "nfs4", "is_network": True, "bytes": 4e6}
    disks = [
        {**disk, "bytes_per_second": 5e8},
        {**disk, "role": "staging", "bytes_per_second": None},
        {**disk, "role": "staging", "bytes_per_second": None, "problem": "no space left"},
    ]
    files = {"count": 2000, "bytes": 5e9, "is_all": False, "why_not_cold": None}
    measured = found(paces, paces, 523456.0, paces, disks=disks, files=files, is_direct=True)
    text = drawn(data.as_json(measured, RUN), width)
    tables = [line for line in text.splitlines() if line.startswith(" ")]
    assert tables and max(map(len, tables)) <= width
    assert "323,456" in text
    assert "data: 2,000 files at least, 5.0 GB" in text
    assert "data on / (nfs4, network): 500 MB/s from the disk, over 4.0 MB" in text
    assert "the same disk" in text and "no space left" in text
    assert "50.0%" in drawn(data.script_as_json(RUN, timing(0.05), None), width)
