"""Dumps of the Flight Recorder are pickles: plain data or nothing."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from allranks.doctor.diagnose import diagnose_logs
from allranks.doctor.flight_recorder import is_dump, read_dump


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


def test_groups_are_not_compared_with_each_other(tmp_path: Path) -> None:
    """Ranks 0, 1 and 2, 3 are two groups of tensor parallelism; rank 3 does not come."""
    paths = []
    for rank in range(4):
        tp, num = ("tp0", 90) if rank < 2 else ("tp1", 40)
        entries = [entry(seq, "completed") | {"process_group": ("0", "default_pg")} for seq in (1,)]
        entries += [entry(seq, "completed") | {"process_group": (tp, "tp")} for seq in range(num)]
        if rank == 2:
            entries += [entry(num, "started") | {"process_group": (tp, "tp")}]
        if rank < 2:  # they wait for rank 2, which waits for rank 3
            entries += [entry(2, "started") | {"process_group": ("0", "default_pg")}]
        paths.append(dump(tmp_path / f"nccl_trace_rank_{rank}", entries))
    found = diagnose_logs(paths)[0]
    assert (found.cause, found.rank, found.confidence) == (
        "rank-missing-from-collective",
        3,
        "high",
    )


def test_equal_numbers_of_two_groups_are_no_mismatch(tmp_path: Path) -> None:
    paths = [
        dump(
            tmp_path / f"nccl_trace_rank_{rank}",
            [entry(7, "started", name) | {"process_group": (f"tp{rank}", "tp")}],
        )
        for rank, name in enumerate(("nccl:broadcast", "nccl:all_reduce"))
    ]
    assert "collective-mismatch" not in [one.cause for one in diagnose_logs(paths)]


def test_the_numbers_of_an_older_torch_are_read_and_are_less_sure(tmp_path: Path) -> None:
    paths = []
    for rank in range(2):
        entries = [entry(seq, "completed") for seq in range(4)]
        entries += [entry(4, "started")] if rank == 0 else []
        for one in entries:
            one["seq_id"] = one.pop("collective_seq_id")
        paths.append(dump(tmp_path / f"nccl_trace_rank_{rank}", entries))
    found = diagnose_logs(paths)[0]
    assert (found.cause, found.rank) == ("rank-missing-from-collective", 1)
    assert found.confidence == "medium"


@pytest.mark.parametrize(
    "entries",
    [
        {"a": 1},
        7,
        "text",
        [None, 3, "x"],
        [{"state": "completed"}],
        [{"state": "completed", "collective_seq_id": "x"}],
        [{"state": "started", "collective_seq_id": 1, "input_sizes": 5}],
        [{"state": "started", "collective_seq_id": 1, "input_sizes": {"a": 1}}],
        [{"state": "started", "collective_seq_id": 1, "input_sizes": [["x", float("inf")]]}],
        [{"state": [1], "collective_seq_id": 1, "profiling_name": [], "process_group": []}],
        [{"state": "started", "seq_id": 1, "process_group": ([], {})}],
    ],
)
def test_a_dump_of_another_form_never_breaks_the_doctor(tmp_path: Path, entries: Any) -> None:
    diagnose_logs([dump(tmp_path / "nccl_trace_rank_0", entries)])
