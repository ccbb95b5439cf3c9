"""Which ranks of a script count their samples, from what they exchange and what they read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from allranks.run.events import append_event
from allranks.run.folder import RunDir
from allranks.run.record import (
    counted_of,
    read_ranks,
    samples_by_rank,
    samples_per_epoch,
    samples_trained,
)
from allranks.timing.remarks import remarks
from allranks.timing.steps import timing
from allranks.watch.reader import RunReader

Reads = tuple[int | None, int | None]  # of a rank: content and indices, in some code
SUMS, GATHERS = True, False
NOTHING: Reads = (None, None)


def write(
    folder: Path, reads: list[Reads | None], divided: list[tuple[list[int], bool]] | None = None
) -> RunDir:
    """Ranks that read these (None: without a loader), and exchange activations in these groups."""
    run = RunDir(folder / "job-20261101-120000-aaaa")
    for rank, read in enumerate(reads):
        path = run.events(0, rank)
        for ranks, sums in divided or ():
            if rank in ranks:
                append_event(path, "divided", ranks=ranks, exchange="all-reduce", sums=sums)
        for number in range(3 if read is not None else 0):
            known = zip(("content", "indices"), read or (), strict=False)
            seen: dict[str, Any] = {k: 10 * v + number for k, v in known if v is not None}
            append_event(path, "batch", loader=0, epoch=1, batch=number, samples=8, **seen)
        for step in range(1, 31):
            phases = {"data": 0.0, "forward": 0.02, "backward": 0.05, "wait": 0.01}
            phases |= {"optimizer": 0.02, "other": 0.0}
            append_event(path, "step", step=step, samples=8, seconds=0.1, **phases)
        append_event(path, "epoch", epoch=1, step=30, samples=240)
    return run


@pytest.mark.parametrize(
    ("reads", "divided", "counting", "certainty"),
    [
        ([(1, 1), (1, 1)], [([0, 1], SUMS)], [0], "measured"),
        ([(1, 1), (2, 2)], [([0, 1], SUMS)], [0, 1], "measured"),  # codebooks, averaged by ranks
        ([(1, 1), (1, 1)], [([0, 1], GATHERS)], [0], "measured"),  # parts of one sequence
        ([(1, 1), (2, 1)], [([0, 1], GATHERS)], [0, 1], "measured"),  # experts, and a file each
        ([(1, 1), (2, 1)], [([0, 1], SUMS)], [0], "measured"),  # a pipeline's inputs and labels
        ([None, None, None, (1, 1)], [([n, n + 1], SUMS) for n in range(3)], [3], "measured"),
        ([None, (1, 1)], [([0, 1], SUMS), ([0, 1], GATHERS)], [1], "measured"),
        ([None, (1, 1), (2, 2)], [([0, 1, 2], SUMS)], [0, 1, 2], "about"),
        ([None, None], [([0, 1], SUMS)], [0], "about"),
        ([None, (1, 1)], [([0, 1], GATHERS)], [0, 1], "about"),
        ([NOTHING, NOTHING], [([0, 1], SUMS)], [0], "about"),  # what it reads has no fingerprint
        ([(1, 1)] * 2 + [(2, 2)] * 2, [([0, 1], SUMS), ([2, 3], SUMS)], [0, 2], "measured"),
        ([(1, 1), (1, 1)], [], [0, 1], "measured"),  # a mistake
    ],
)
def test_samples_of_one_copy_of_the_model_count_once(
    tmp_path: Path,
    reads: list[Reads | None],
    divided: list[tuple[list[int], bool]],
    counting: list[int],
    certainty: str,
) -> None:
    run = write(tmp_path, reads, divided)
    records = read_ranks(run, 0)
    assert [rank for rank in records if records[rank].counts] == counting
    assert [bool(sum(e["samples"] for e in one.steps)) for one in records.values()] == [
        rank in counting for rank in records
    ]
    measured, known = timing(run), counted_of(run)
    assert measured is not None
    assert measured.samples_per_step == pytest.approx(8 * len(counting))
    assert (measured.counted, known.samples) == (known, certainty)
    assert samples_trained(run, records) == samples_per_epoch(run) == 240 * len(counting)
    assert set(samples_by_rank(records).values()) == {8.0}  # none is idle
    reader = RunReader(run)
    reader.look(all_ranks=False)
    if 0 in counting:  # the rank that `watch` follows
        assert reader.samples_per_second(len(reads)) == pytest.approx(80 * len(counting))


def test_copies_of_the_model_that_read_the_same_are_named_by_one_rank_each(tmp_path: Path) -> None:
    run = write(tmp_path, [(1, 1)] * 4, [([0, 1], SUMS), ([2, 3], SUMS)])
    (same,) = (one for one in remarks(run, timing(run)) if one.kind == "same-samples")
    assert same.text.startswith("ranks 0 and 2 read the same samples")


def test_an_assumption_about_samples_is_an_estimate_that_says_so(tmp_path: Path) -> None:
    run = write(tmp_path, [None] * 4, [([0, 1, 2, 3], SUMS)])
    (about,) = (one for one in remarks(run, timing(run)) if one.kind == "about-samples")
    assert about.text == (
        "samples/s is an estimate: ranks 0-3 exchange activations, but may or may not work on "
        "the same samples: counted once"
    )
