"""The search for the largest micro-batch that fits, and what is kept of it."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from allranks.errors import AllranksError
from allranks.job.job import parse_job
from allranks.job.stages import num_micro_batches
from allranks.layout import Layout
from allranks.run.folder import RunDir
from allranks.run.micro_batches import Search, counts_for, goes_on
from allranks.train.build import Rank
from allranks.train.data import Cut, TrainingData
from allranks.train.micro_batches import MicroBatches, is_in, is_out_of_memory


def searched(share: int, most: int, guess: int = 0) -> tuple[Search, list[int]]:
    """A search on a device on which micro-batches of so many samples fit; what it tried."""
    search, tried = Search(about="", counts=counts_for(share), guess=guess), []
    while (count := search.next) is not None:
        tried.append(count)
        search.tried(count, fits=-(-share // count) <= most)
    return search, tried


@pytest.mark.parametrize("share", [1, 2, 7, 24, 97, 1000])
def test_the_least_number_of_micro_batches_that_fits_is_found_in_few_trials(share: int) -> None:
    for most in {1, 2, 3, 5, 8, share // 3 + 1, share - 1 or 1, share}:
        search, tried = searched(share, most)
        assert search.enough == -(-share // most)
        assert len(tried) == len({*tried}) <= 2 + 2 * math.ceil(math.log2(share + 1))


def test_a_size_that_was_found_before_is_tried_first() -> None:
    assert searched(24, most=5, guess=5)[1] == [5]
    # It no longer fits: what is larger need not be tried.
    search, tried = searched(24, most=3, guess=5)
    assert (search.enough, tried[0]) == (8, 5)
    assert min(tried) == 5


def test_what_never_fits_ends_the_search() -> None:
    search, tried = searched(24, most=0)
    assert (search.next, search.enough, tried[-1]) == (None, None, 24)


def test_half_of_what_ran_out_in_training_is_used_without_a_search(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    search, _ = searched(24, most=8)
    assert search.ran_out(3) == 6
    search.keep(run, ended=4)
    assert goes_on(run, 4)
    assert not goes_on(run, 5)
    later = Search(about="", counts=counts_for(24))
    later.resume(run)
    assert (later.next, later.enough) == (None, 6)
    other = Search(about="another batch", counts=counts_for(24))
    other.resume(run)
    assert other.next == 1
    assert later.ran_out(24) is None  # one sample


def test_a_search_that_a_rank_has_ended_goes_on_in_the_next_attempt(tmp_path: Path) -> None:
    run, tried = RunDir(tmp_path), []
    for attempt in range(9):
        search = Search(about="", counts=counts_for(24))
        search.resume(run)
        if search.next is None:
            break
        tried.append(search.next)
        search.tried(search.next, fits=search.next >= 6)
        search.keep(run, ended=attempt)
    assert (search.enough, tried) == (6, searched(24, most=4)[1])


def test_a_file_that_is_damaged_is_as_good_as_none(tmp_path: Path) -> None:
    for text in ("", "[]", "{", '{"about": "", "too_few": "x", "enough": 1}'):
        (tmp_path / "micro_batches.json").write_text(text)
        search = Search(about="", counts=counts_for(4))
        search.resume(RunDir(tmp_path))
        assert search.next == 1
        assert not goes_on(RunDir(tmp_path), 0)


def begun(layout: str, *, pads: bool = True, **settings: Any) -> tuple[MicroBatches, Any]:
    """What rank 0 of an untouched run knows, and its data."""
    job = parse_job({"batch_size": 56, **settings})
    me = SimpleNamespace(
        layout=Layout.parse(layout), run=RunDir(Path("none")), rank=0, world_size=1
    )
    number = num_micro_batches(job, me.layout, 56) if me.layout.pp > 1 else None
    size = None if job.micro_batch_size == "auto" else job.micro_batch_size
    cut = Cut(56, 0, me.layout.data_ranks, size, number)
    data = SimpleNamespace(cut=cut, pads=pads, device=torch.device("cpu"))
    found = MicroBatches(cast(Rank, me), job)
    found.begin(cast(TrainingData, data), "fp32")
    return found, data


def test_a_pipeline_is_given_only_numbers_that_its_rounds_allow() -> None:
    pipeline = {"schedule": "interleaved", "micro_batches": 7}
    found, data = begun("1x4:pp=4", micro_batch_size="auto", pipeline=pipeline)
    assert found.search is not None
    assert list(found.search.counts) == [7, 15, 32]
    assert data.cut.num_micro_batches == 7


def test_what_the_job_says_comes_first() -> None:
    found, data = begun("1x2", micro_batch_size=13)
    assert (data.cut.num_of_whole, found.size) == (3, 10)
    assert found.search is not None
    assert (found.search.next, found.search.ran_out(3)) == (None, 6)


def test_a_loss_that_compares_samples_is_not_cut_smaller() -> None:
    with pytest.raises(AllranksError, match="couples_samples"):
        begun("1x1", pads=False, micro_batch_size="auto")
    found, _ = begun("1x1", pads=False, micro_batch_size=8)
    assert found.search is not None
    assert found.search.ran_out(7) is None


def raised_by(work: nn.Module) -> Exception:
    try:
        work(torch.zeros(2))
    except Exception as error:
        return error
    raise AssertionError


class Raises(nn.Module):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        raise self.error


@pytest.mark.parametrize(
    ("error", "is_full"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), False),
        (ValueError("the cache is out of memory"), False),
    ],
)
def test_only_a_full_device_is_out_of_memory(error: Exception, is_full: bool) -> None:
    found = raised_by(Raises(error))
    assert is_out_of_memory(found) == is_full
    assert is_in(found, (Raises.forward,))
    assert not is_in(found, (Raises.__init__,))
