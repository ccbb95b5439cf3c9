"""Dumps of the Flight Recorder are pickles: plain data or nothing."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from allranks.doctor.diagnose import diagnose_logs
from allranks.doctor.flight import is_dump, read_dump


def entry(seq: int, state: str, name: str = "nccl:all_reduce", size: int = 8) -> dict[str, Any]:
    return {
        "collective_seq_id": seq,
        "state": state,
        "profiling_name": name,
        "input_sizes": [[size]],
    }


def dump(path: Path, entries: list[dict[str, Any]]) -> Path:
    path.write_bytes(pickle.dumps({"version": "2.5", "entries": entries}))
    return path


class Evil:
    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (self.folder,)


def test_a_pickle_that_would_run_code_is_refused(tmp_path: Path) -> None:
    path, made = tmp_path / "nccl_trace_rank_0", tmp_path / "made"
    path.write_bytes(pickle.dumps({"entries": [Evil(str(made))]}))
    assert is_dump(path)
    assert read_dump(path) is None
    assert not made.exists()


def test_a_dump_of_somebody_else_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = dump(tmp_path / "nccl_trace_rank_0", [entry(1, "completed")])
    assert read_dump(path) is not None
    link = tmp_path / "nccl_trace_rank_1"
    link.symlink_to(path)
    assert read_dump(link) is None
    os.chown(path, 12345, -1) if os.getuid() == 0 else monkeypatch.setattr(os, "getuid", lambda: 1)
    assert read_dump(path) is None


def test_a_truncated_dump_is_nothing(tmp_path: Path) -> None:
    path = dump(tmp_path / "nccl_trace_rank_0", [entry(1, "completed")])
    path.write_bytes(path.read_bytes()[:20])
    assert read_dump(path) is None


def test_the_rank_that_enqueued_least_is_the_one(tmp_path: Path) -> None:
    paths = [
        dump(
            tmp_path / f"nccl_trace_rank_{rank}",
            [entry(seq, "completed") for seq in range(40)]
            + ([entry(40, "started")] if rank != 2 else []),
        )
        for rank in range(4)
    ]
    found = diagnose_logs(paths)
    assert [(one.cause, one.rank) for one in found] == [("rank-missing-from-collective", 2)]


def test_different_calls_at_the_same_place_are_a_mismatch(tmp_path: Path) -> None:
    paths = [
        dump(
            tmp_path / f"nccl_trace_rank_{rank}",
            [entry(7, "started", "nccl:broadcast" if rank else "nccl:all_reduce")],
        )
        for rank in range(2)
    ]
    assert [one.cause for one in diagnose_logs(paths)] == ["collective-mismatch"]
