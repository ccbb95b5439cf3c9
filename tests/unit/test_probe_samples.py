"""Samples of a step are those of the batches that it trained on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from allranks.probe.batches import num_kept, num_samples, tensors
from allranks.probe.fingerprints import (
    FINGERPRINT_EPOCHS,
    FINGERPRINTS,
    MAX_FINGERPRINTS,
    Fingerprints,
)
from allranks.probe.loaders import MAX_WAITING, Loader, Pass
from allranks.probe.samples import CountedStep, SampleCounter
from allranks.run.record import MEASURED
from allranks.timing.timeline import BACKWARD, FORWARD, Timeline


def batch(size: int) -> list[int]:
    return list(range(size))


class Script:
    """Does to a counter what the hooks of a script do."""

    def __init__(self) -> None:
        self.counter = SampleCounter()
        self.fingerprints = Fingerprints()
        self.passes: list[Pass] = []

    def epoch(self, before: Pass | None = None) -> Pass:
        """A new pass, over the loader of a pass that does not go on if there is one."""
        new = Pass(before.loader if before else Loader(dataset=len(self.passes)))
        self.passes.append(new)
        new.loader.started()
        self.counter.started(new, [before] if before else [])
        return new

    def fetch(self, one: Pass, *sizes: int) -> None:
        for size in sizes:
            self.give(one, batch(size))

    def give(self, one: Pass, batch: Any) -> None:
        self.counter.fetched(one, one.loader.fetched(batch, self.fingerprints))

    def step(self, backwards: int = 1) -> int:
        for _ in range(backwards):
            self.counter.trained()
        return self.end()

    def end(self) -> int:
        samples = self.counter.take()
        self.counter.clear()
        return samples


def train(sizes: Sequence[int], *, ahead: int, micro: int, backwards: int = 1) -> list[int]:
    """Samples of each step of an epoch whose loader fetches `ahead` batches ahead."""
    script = Script()
    loader = script.epoch()
    fetched, steps = 0, []
    for first in range(0, len(sizes), micro):
        own = sizes[first : first + micro]
        last = min(len(sizes), first + len(own) + ahead)
        script.fetch(loader, *sizes[fetched:last])
        if first + len(own) + ahead > len(sizes) and loader.ended is None:
            script.counter.ended(loader)
        fetched = last
        steps.append(script.step(backwards * len(own)))
    return steps


sizes_of_batches = st.lists(st.integers(1, 100), min_size=1, max_size=40)


@given(sizes_of_batches, st.integers(0, 1), st.integers(1, 8))
def test_every_batch_counts_once_in_the_step_that_trains_on_it(
    sizes: list[int], ahead: int, micro: int
) -> None:
    expected = [sum(sizes[n : n + micro]) for n in range(0, len(sizes), micro)]
    assert train(sizes, ahead=ahead, micro=micro) == expected


@given(sizes_of_batches, st.integers(2, 4))
def test_further_backward_passes_on_a_batch_count_nothing(sizes: list[int], passes: int) -> None:
    assert train(sizes, ahead=0, micro=1, backwards=passes) == sizes


@given(sizes_of_batches, st.integers(0, 1), st.integers(1, 3))
def test_an_epoch_counts_every_sample_once(sizes: list[int], ahead: int, passes: int) -> None:
    """With one batch fetched ahead, which step it counts in may be off by one."""
    steps = train(sizes, ahead=ahead, micro=1, backwards=passes)
    repeated = [
        n for n, samples in enumerate(steps) if n and samples and sum(steps[:n]) >= sum(sizes)
    ]
    counted = sum(samples for n, samples in enumerate(steps) if n not in repeated)
    assert counted == sum(sizes)


def test_validation_between_steps_does_not_count() -> None:
    script = Script()
    training = script.epoch()
    script.fetch(training, 8)
    assert script.step() == 8
    validation = script.epoch()
    script.fetch(validation, 100, 100)
    script.counter.ended(validation)
    script.fetch(training, 8)
    assert script.step() == 8


def test_validation_before_the_first_step_does_not_count() -> None:
    script = Script()
    validation = script.epoch()
    script.fetch(validation, 100, 100)
    training = script.epoch()
    script.fetch(training, 8)
    assert script.step() == 8
    assert script.counter.training is training.loader


def test_a_last_batch_fetched_ahead_counts_after_a_validation() -> None:
    script = Script()
    training = script.epoch()
    script.fetch(training, 8, 5)
    assert script.step() == 8
    script.counter.ended(training)
    script.fetch(script.epoch(), 100)
    assert script.step() == 5


def test_a_batch_fetched_between_backward_and_update_counts_in_the_next_step() -> None:
    script = Script()
    loader = script.epoch()
    script.fetch(loader, 4)
    steps = []
    for size in (5, 6, 7):
        script.counter.trained()
        script.fetch(loader, size)
        steps.append(script.end())
    assert steps == [4, 5, 6]


def test_a_batch_that_is_only_looked_at_is_forgotten_with_the_next_epoch() -> None:
    script = Script()
    loader = script.epoch()
    script.fetch(loader, 32)
    again = script.epoch(loader)
    script.fetch(again, 16)
    assert script.step() == 16
    assert (again.epoch, script.counter.counted) == (1, MEASURED)


def test_skipped_batches_do_not_make_later_steps_larger() -> None:
    script = Script()
    loader = script.epoch()
    script.fetch(loader, *[8] * 50)  # a script that resumes in the middle of an epoch
    assert script.step(2) == 16
    for _ in range(10):
        script.fetch(loader, 8)
        last = script.step(2)
    assert last == 8


def test_one_batch_over_and_over_counts_every_time() -> None:
    script = Script()
    script.fetch(script.epoch(), 8)
    assert [script.step(), script.step(), script.step(2)] == [8, 8, 8]


def test_batches_kept_in_a_list_count_as_most_of_them_do() -> None:
    script = Script()
    script.fetch(script.epoch(), 32, 32, 32, 8)
    assert [script.step() for _ in range(2)] == [32, 32]
    for _ in range(10):
        last = script.step()
    assert last == 32


def test_an_update_without_a_backward_pass_has_no_samples() -> None:
    script = Script()
    script.fetch(script.epoch(), 8)
    assert script.step() == 8
    assert script.step(backwards=0) == 0


def test_a_skipped_update_leaves_its_samples_to_the_next() -> None:
    script = Script()
    loader = script.epoch()
    script.fetch(loader, 8)
    script.counter.trained()  # the scaler found an infinite gradient: no step
    script.fetch(loader, 8)
    assert script.step() == 16


def test_batches_nobody_trains_on_are_not_kept_for_ever() -> None:
    script = Script()
    loader = script.epoch()
    script.fetch(loader, *[1] * (MAX_WAITING + 100))
    assert len(script.counter._waiting) == MAX_WAITING


def test_indices_tell_the_size_of_a_batch_without_tensors() -> None:
    script = Script()
    loader = script.epoch()
    loader.loader.indices.extend([[3, 1, 2], [4, 5]])
    script.give(loader, object())
    assert script.step() == 3
    script.give(loader, object())
    assert script.step() == 2


def fingerprints(indices: list[list[int]], values: list[float]) -> list[dict[str, Any]]:
    script = Script()
    loader = script.epoch()
    for chosen, value in zip(indices, values, strict=True):
        loader.loader.indices.append(chosen)
        script.give(loader, torch.full((len(chosen), 2), value))
    return script.fingerprints.take(loader.loader)


def test_an_index_may_be_an_array() -> None:
    loader, fingerprints = Loader(), Fingerprints()
    loader.started()
    loader.indices.append([torch.tensor([3, 1]), torch.tensor([2, 5])])
    assert loader.fetched([torch.zeros(2, 4)], fingerprints) == 2
    (seen,) = fingerprints.take(loader)
    assert "indices" in seen and "sorted" not in seen


def test_a_batch_with_nothing_in_it_has_no_samples_whatever_its_indices() -> None:
    script = Script()
    loader = script.epoch()
    for nothing in ([torch.empty(0, 8)], {"x": torch.empty(0, 3), "y": torch.empty(0)}):
        loader.loader.indices.append([1, 2, 3, 4])
        script.give(loader, nothing)
        assert script.step() == 0
    script.give(loader, [torch.empty(5, 8)])
    assert script.step() == 5


def test_an_empty_batch_among_others_counts_for_nothing() -> None:
    script = Script()
    loader = script.epoch()
    steps = []
    for size in (4, 4, 0, 4, 0):
        script.give(loader, torch.zeros(size, 3))
        steps.append(script.step())
    assert steps == [4, 4, 0, 4, 0]


@pytest.mark.parametrize(
    ("batch", "samples", "kept"),
    [
        ([torch.zeros(12, 3), torch.zeros(12)], 16, 12),  # four were left out
        ([torch.zeros(0, 3), torch.zeros(0)], 16, 0),
        ([torch.zeros(16, 3), torch.zeros(16)], 16, 16),
        ([torch.zeros(9, 16), torch.zeros(9, 16)], 16, 16),  # the samples are the second dimension
        ({"ids": torch.zeros(1, 99), "labels": torch.zeros(1, 99)}, 16, 16),  # one after the other
        ([torch.zeros(3, 64, 64), torch.zeros(5, 4)], 4, 4),  # an image and its boxes
        ([torch.zeros(3, 64, 64)] * 4, 4, 4),  # one tensor for each sample
        (["no", "tensors"], 16, 16),
        ([torch.tensor(1.0)], 16, 16),
    ],
)
def test_what_a_collate_function_leaves_out_does_not_count(
    batch: Any, samples: int, kept: int
) -> None:
    assert num_kept(batch, samples) == kept
    loader = Loader(starts=9, is_checked=True)
    loader.indices.append(list(range(samples)))
    assert loader.fetched(batch, Fingerprints()) == kept


def test_fingerprints_tell_the_loader_that_is_trained_on() -> None:
    script = Script()
    training, validation = script.epoch(), script.epoch()
    for loader in (training, validation):
        script.give(loader, torch.ones(2, 2))
    seen = script.fingerprints.take(training.loader)
    assert [(one["loader"], one["trained"]) for one in seen] == [(0, True), (1, False)]
    assert script.fingerprints.take(training.loader) == []


def test_equal_batches_have_equal_fingerprints_and_others_do_not() -> None:
    once = fingerprints([[0, 1], [2, 3]], [0.5, 0.7])
    assert once == fingerprints([[0, 1], [2, 3]], [0.5, 0.7])
    shuffled = fingerprints([[2, 3], [0, 1]], [0.5, 0.7])
    assert [one["indices"] for one in once] != [one["indices"] for one in shuffled]
    assert [one["content"] for one in once] == [one["content"] for one in shuffled]
    assert once[0]["content"] != once[1]["content"]


def test_only_early_batches_are_looked_at() -> None:
    script = Script()
    loader = None
    for _ in range(FINGERPRINT_EPOCHS + 2):
        loader = script.epoch(loader)
        script.fetch(loader, *[2] * (FINGERPRINTS + 3))
    assert len(script.fingerprints.seen) == FINGERPRINT_EPOCHS * FINGERPRINTS


def test_a_new_loader_for_every_epoch_is_not_looked_at_for_ever() -> None:
    script = Script()
    for _ in range(100):
        script.fetch(script.epoch(), 2, 2, 2)
    assert len(script.fingerprints.seen) == MAX_FINGERPRINTS


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(2, 3, dtype=torch.bfloat16),
        torch.zeros(2, 3, dtype=torch.bool),
        torch.arange(12).reshape(3, 4).t(),
        torch.zeros(0, 3),
        torch.eye(3).to_sparse(),
        torch.zeros(2, 3, device="meta"),
        torch.ones(2, 3).requires_grad_(),
    ],
)
def test_no_tensor_is_too_odd_to_be_looked_at(tensor: torch.Tensor) -> None:
    script = Script()
    loader = script.epoch()
    script.give(loader, tensor)
    assert script.step() == tensor.shape[0]
    is_plain = tensor.device.type == "cpu" and not tensor.is_sparse
    assert ("content" in script.fingerprints.take(None)[0]) == is_plain


@dataclass
class Graph:
    """As libraries for graphs have them: an object that holds tensors."""

    x: torch.Tensor
    y: torch.Tensor


class Encoding:
    """As tokenizers give them: a mapping in all but its type."""

    def __init__(self, **data: torch.Tensor) -> None:
        self.data = data

    def items(self) -> Any:
        return self.data.items()


@pytest.mark.parametrize(
    ("given_batch", "expected"),
    [
        (torch.zeros(7, 3), 7),
        ([torch.zeros(7, 3), torch.zeros(7)], 7),
        ((torch.tensor(0.5), torch.zeros(6, 1)), 6),  # a number is nobody's length
        ({"label": "cat", "x": torch.zeros(5, 2)}, 5),
        ({"a": {"b": [torch.zeros(4)]}}, 4),
        (Graph(torch.zeros(3, 2), torch.zeros(1)), 3),
        (Encoding(input_ids=torch.zeros(2, 9)), 2),
        (["a", "b", "c"], 3),
        (torch.zeros(0, 3), 0),
        ([], 0),
        (torch.tensor(1.0), 0),
        (None, 0),
        (17, 0),
    ],
)
def test_the_length_of_a_batch(given_batch: Any, expected: int) -> None:
    assert num_samples(given_batch) == expected


def test_steps_are_counted_when_they_are_taken() -> None:
    counter, loader = SampleCounter(), Pass(Loader())
    timeline = Timeline()
    timeline.restart()
    for samples in (8, 5):
        timeline.mark(FORWARD, (SampleCounter.fetched, loader, samples))
        timeline.mark(BACKWARD, (SampleCounter.trained,))
        timeline.end()
    assert counter.training is None  # nothing was done yet
    taken = [CountedStep(marks, timeline.unix, counter) for marks in timeline.take_steps()]
    assert [(step.epoch, step.samples) for step in taken] == [(1, 8), (1, 5)]
    first, second = (json.loads(step.line()) for step in taken)
    assert (first["event"], first["step"], first["samples"]) == ("step", 1, 8)
    assert first["seconds"] == pytest.approx(taken[0].host_seconds, abs=1e-6)
    assert second["t"] - first["t"] == pytest.approx(second["seconds"], abs=1e-5)


def test_a_device_that_never_comes_to_a_step_leaves_its_number() -> None:
    class Lost:
        def query(self) -> bool:
            return False

    timeline = Timeline()
    timeline.record_event = Lost  # type: ignore[assignment]
    timeline.mark(FORWARD)
    timeline.end()
    (marks,) = timeline.take_steps()
    event = json.loads(CountedStep(marks, timeline.unix, SampleCounter()).line("drop"))
    assert list(event) == ["v", "t", "event", "step"] and event["step"] == 1


def test_indices_without_a_length_leave_the_batch_to_tell() -> None:
    loader = Loader(starts=9)
    loader.indices.append(iter([1, 2, 3]))
    assert loader.fetched(torch.zeros(3, 1), Fingerprints()) == 3


def test_a_batch_that_holds_itself_has_an_end() -> None:
    loop: list[Any] = [torch.zeros(3)]
    loop.append(loop)
    assert num_samples(loop) == 3
    assert len(list(tensors(loop))) <= 5
