"""What changed since the last run of the same job, layout and device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.verdict_runs import HEALTHY, planted

from allranks.run.folder import RunDir
from allranks.timing import since
from allranks.timing.verdict import judge

SLOW = {**HEALTHY, "data": 300.0}


def test_the_limit_then_and_now(tmp_path: Path) -> None:
    planted(tmp_path, SLOW, number=1)
    then = planted(tmp_path, SLOW, number=2)
    short = planted(tmp_path, HEALTHY, number=3, steps=8)  # too short to compare
    assert judge(short).since is None
    found = judge(planted(tmp_path, HEALTHY, number=4)).since
    assert found is not None
    assert (found["run"], found["limit"]) == (then.name, "data")
    assert found["share"] == pytest.approx(0.75, abs=0.01)
    assert found["samples_per_second"] == pytest.approx(40, abs=1)
    assert found["text"].startswith("train-...-0002: data 75% -> 0%, 40")
    assert found["text"].endswith("-> 162 samples/s")


def test_only_runs_that_are_alike(tmp_path: Path) -> None:
    planted(tmp_path, SLOW, SLOW, number=1)  # two ranks
    planted(tmp_path, SLOW, number=2, info={"bench": {"kind": "scaling", "id": "x"}})
    planted(tmp_path, SLOW, number=3, start={"device": "NVIDIA H100 80GB HBM3"})
    planted(tmp_path, SLOW, number=9)  # later
    (tmp_path / "other-20261118-120001-0001").mkdir()
    assert judge(planted(tmp_path, HEALTHY, number=4)).since is None


def test_few_files_are_read_in_a_folder_of_many_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(500):
        (tmp_path / f"train-20261117-12{number // 60:02}{number % 60:02}-{number:04x}").mkdir()
    run = planted(tmp_path, HEALTHY)
    read: list[Path] = []
    info = RunDir.info

    def counted(self: RunDir) -> dict[str, Any]:
        read.append(self.path)
        return info(self)

    monkeypatch.setattr(RunDir, "info", counted)
    assert not list(since.comparable_before(run))
    assert len(set(read)) <= since.MOST_LOOKED_AT + 1
