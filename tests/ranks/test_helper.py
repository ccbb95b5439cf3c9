"""`run_ranks` itself: results in order, and three kinds of failure told apart."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.ranks import run_ranks

pytestmark = pytest.mark.ranks


def mean_rank() -> float:
    value = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(value)
    return (value / dist.get_world_size()).item()


def rank_and(word: str) -> tuple[int, str, torch.Tensor]:
    return dist.get_rank(), word, torch.full((2,), float(dist.get_rank()))


def raise_on(culprit: int) -> None:
    if dist.get_rank() == culprit:
        raise ValueError("no such spiral")
    dist.barrier()


def die_on(culprit: int, how: int, pids: str) -> None:
    note_pid(pids)
    if dist.get_rank() == culprit:
        if how < 0:
            os.kill(os.getpid(), -how)
        os._exit(how)
    dist.barrier()


def hang_on(culprit: int, pids: str) -> None:
    note_pid(pids)
    if dist.get_rank() == culprit:
        stuck_here()
    dist.barrier()


def stuck_here() -> None:
    time.sleep(1000)


def note_pid(folder: str) -> None:
    Path(folder, str(os.getpid())).touch()
    dist.barrier()


def alive(folder: Path) -> list[int]:
    return [int(path.name) for path in folder.iterdir() if Path("/proc", path.name).exists()]


def test_every_rank_sees_the_same_mean(tmp_path: Path) -> None:
    assert run_ranks(mean_rank, 4, tmp_path) == [1.5] * 4


def test_results_are_in_order_of_rank_and_may_be_tensors(tmp_path: Path) -> None:
    results = run_ranks(rank_and, 3, tmp_path, "here")
    assert [(rank, word) for rank, word, _ in results] == [(0, "here"), (1, "here"), (2, "here")]
    assert all(tensor.tolist() == [rank, rank] for rank, _, tensor in results)


def test_one_rank_is_a_world_too(tmp_path: Path) -> None:
    assert run_ranks(mean_rank, 1, tmp_path) == [0.0]


def test_a_rank_that_raised_is_told_first_with_its_traceback(tmp_path: Path) -> None:
    with pytest.raises(AssertionError) as failure:
        run_ranks(raise_on, 2, tmp_path, 1)
    message = str(failure.value)
    assert message.startswith("rank 1 raised:\nTraceback")
    assert "in raise_on" in message
    assert "ValueError: no such spiral" in message
    assert "died" not in message


@pytest.mark.parametrize(
    ("how", "words"), [(7, "rank 0 died with 7"), (-signal.SIGKILL, "rank 0 died by SIGKILL")]
)
def test_a_rank_that_died_is_told_with_its_exit_code(tmp_path: Path, how: int, words: str) -> None:
    pids = tmp_path / "pids"
    pids.mkdir()
    started = time.monotonic()
    with pytest.raises(AssertionError, match=words):
        run_ranks(die_on, 2, tmp_path, 0, how, str(pids))
    assert time.monotonic() - started < 50  # before anybody is called silent
    assert len(list(pids.iterdir())) == 2
    assert alive(pids) == []


def test_silent_ranks_are_named_and_ended(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    pids.mkdir()
    with pytest.raises(AssertionError) as failure:
        run_ranks(hang_on, 3, tmp_path, 2, str(pids), timeout=3)
    message = str(failure.value)
    for rank in range(3):
        assert f"rank {rank} was silent (limit 3 s)" in message
    assert "in stuck_here" in message
    assert "raised" not in message
    assert "died" not in message
    assert alive(pids) == []


def test_only_the_silent_rank_is_called_silent(tmp_path: Path) -> None:
    with pytest.raises(AssertionError) as failure:
        run_ranks(hang_alone, 2, tmp_path, timeout=3)
    assert "rank 1 was silent" in str(failure.value)
    assert "rank 0" not in str(failure.value)


def hang_alone() -> None:
    if dist.get_rank() == 1:
        stuck_here()


def test_warnings_are_errors_on_ranks_too(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="UserWarning: careful"):
        run_ranks(warn, 1, tmp_path)


def warn() -> None:
    import warnings

    warnings.warn("careful", stacklevel=1)
