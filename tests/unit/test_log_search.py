"""How logs are read: each part once, however often somebody asks."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest

from allranks.doctor.diagnose import diagnose_logs
from allranks.doctor.log_search import GrowingLogs, Scanned, Source, num_lines, scan

LINES = [
    *("starting", "[rank1]: Traceback (most recent call last):", '  File "a.py", line 3, in f'),
    "[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
    *("step 3 loss nan", "done"),
]
TEXT = "\n".join(LINES).encode() + b"\n"


def told(found: Scanned) -> list[tuple[str, int, int]]:
    return [(hit.cause.slug, hit.number, hit.offset) for hit in found.hits]


@pytest.mark.parametrize("piece", [7, 40, 1000])
def test_a_log_that_grows_gives_what_the_whole_gives(tmp_path: Path, piece: int) -> None:
    path = tmp_path / "rank-1.log"
    logs, source = GrowingLogs(), Source(path, "a log", rank=1)
    for end in [*range(piece, len(TEXT), piece), len(TEXT)]:
        path.write_bytes(TEXT[:end])  # a line may end in the middle of a word
        found = logs.scan(source)
        whole = scan(source)
        assert told(found) == told(whole)
        assert (found.num_lines, found.num_bytes) == (whole.num_lines, whole.num_bytes)
        assert num_lines(path) == whole.num_lines
    assert len(told(found)) >= 2


def test_a_log_that_was_started_over_is_read_anew(tmp_path: Path) -> None:
    path, logs = tmp_path / "rank-1.log", GrowingLogs()
    path.write_bytes(TEXT)
    assert told(logs.scan(Source(path, "a log")))
    path.write_bytes(b"fine\n")
    assert not told(logs.scan(Source(path, "a log")))
    assert num_lines(path) == 1
    path.unlink()
    assert logs.scan(Source(path, "a log")).problem


@pytest.mark.parametrize("missing", [0, 9], ids=["whole", "torn"])
def test_a_packed_log_is_unpacked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: int
) -> None:
    calls: list[Any] = []

    def unpack(*args: Any) -> Any:
        calls.append(args)
        return right(*args)

    right = gzip.open
    monkeypatch.setattr("allranks.doctor.log_search.gzip.open", unpack)
    path, plain = tmp_path / "job.log.gz", tmp_path / "job.log"
    packed = gzip.compress(20 * TEXT)
    path.write_bytes(packed[: len(packed) - missing])
    plain.write_bytes(20 * TEXT)
    (tmp_path / "other.log").write_text("fine\n")
    found = [
        [(one.cause, len(one.evidence)) for one in diagnose_logs([log, tmp_path / "other.log"])]
        for log in (path, plain)
    ]
    assert found[0] == found[1] != []
    assert len(calls) == 1
    assert bool(scan(Source(path, "a log", is_named=True)).problem) == bool(missing)
