"""What ranks read, from the events that the probe writes of early batches and of steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from allranks.run.events import append_event
from allranks.run.folder import RunDir
from allranks.run.record import RankRecord
from allranks.run.shares import fingerprints
from allranks.timing.remarks import APART, remarks
from allranks.timing.steps import timing

BATCHES = 3
LENGTH = ("too-short", "early-end")  # these runs are made up of a few steps, and have no end


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "job-20261101-120000-aaaa")


def batch(loader: int, epoch: int, number: int, value: int, **more: Any) -> dict[str, Any]:
    fields = {"loader": loader, "epoch": epoch, "batch": number, "samples": 8, "sorted": False}
    return {**fields, "indices": value, "content": value, **more}


def write(
    run: RunDir,
    *,
    same: bool = False,
    reorder: bool = True,
    samples: tuple[int, int] = (8, 8),
    wait: float = 0.01,
    validation: bool = True,
) -> None:
    """Two ranks, two epochs, and a validation that all ranks do alike."""
    for rank in range(2):
        path = run.events(0, rank)
        for epoch in (1, 2):
            for number in range(BATCHES):
                value = number + 10 * (0 if same else rank) + 100 * (epoch if reorder else 1)
                fields = batch(0, epoch, number, value, trained=True)
                append_event(path, "batch", **fields)
                if validation:
                    fields = batch(1, epoch, number, 7000 + number, trained=False)
                    append_event(path, "batch", **fields)
        for step in range(1, 31):
            phases = {"data": 0.0, "forward": 0.02, "backward": 0.06 - wait, "wait": wait}
            phases |= {"optimizer": 0.02, "other": 0.0}
            append_event(path, "step", step=step, samples=samples[rank], seconds=0.1, **phases)


def told(run: RunDir) -> list[str]:
    return [
        f"{one.kind}: {one.text}" for one in remarks(run, timing(run)) if one.kind not in LENGTH
    ]


def test_nothing_is_said_of_ranks_that_share_the_data(run: RunDir) -> None:
    write(run)
    assert told(run) == []


@pytest.mark.parametrize("validation", [False, True])
def test_ranks_that_read_the_same_samples(run: RunDir, validation: bool) -> None:
    write(run, same=True, validation=validation)
    (remark,) = told(run)
    assert remark.startswith("same-samples: ranks 0 and 1 read the same samples")


@pytest.mark.parametrize("validation", [False, True])
def test_an_order_that_repeats_every_epoch(run: RunDir, validation: bool) -> None:
    write(run, reorder=False, validation=validation)
    (remark,) = told(run)
    assert "set_epoch" in remark


def test_uneven_samples(run: RunDir) -> None:
    write(run, samples=(8, 6))
    assert told(run) == [
        "uneven-ranks: rank 0 trains on 8.0 samples a step, rank 1 on 6.0; "
        "give every rank the same number"
    ]


def test_ranks_that_exchange_nothing(run: RunDir) -> None:
    write(run, wait=0.0)
    (remark,) = told(run)
    assert remark.startswith(f"alone: {APART}")


def test_a_loader_for_every_epoch_is_another_loader() -> None:
    events = [{"event": "batch", "t": 1.0, **batch(number, 1, 0, number)} for number in range(3)]
    assert list(fingerprints(RankRecord(0, events))) == [(1, 0)]
    without = [{"event": "batch", "t": 1.0, "epoch": 1, "batch": 0, "content": n} for n in (1, 2)]
    assert (
        fingerprints(RankRecord(0, without)) == {}
    )  # of an earlier version: they cannot be told apart
