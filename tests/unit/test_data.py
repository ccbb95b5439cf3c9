"""Which sample goes where: the same samples in the same order on any layout, from any position."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Generator, Tensor
from torch.utils.data import Dataset, TensorDataset

from allranks.tasks import Task
from allranks.train.data import Batch, Cut, EvaluationData, MicroBatch, Progress, TrainingData
from allranks.train.loop import advance, weigh

CPU = torch.device("cpu")
LAYOUTS = [(1, None), (2, None), (4, None), (2, 3), (3, 1), (7, None)]  # ranks, micro-batch size

# More workers than cores is what these tests ask for.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


class Numbers(Dataset[Any]):
    """Samples one by one: needs a loader."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if not 0 <= index < self.size:
            raise IndexError(index)
        return torch.tensor([float(index), -float(index)]), index


class Batches(Numbers):
    """Whole batches in one call."""

    def batch(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        numbers = torch.tensor(indices)
        return torch.stack([numbers.float(), -numbers.float()], dim=1), numbers


def tensors(size: int) -> TensorDataset:
    numbers = torch.arange(size)
    return TensorDataset(torch.stack([numbers.float(), -numbers.float()], dim=1), numbers)


class Plain(Task):
    pass


class Coupled(Task):
    couples_samples = True


@dataclass
class Noisy(Task):
    """Adds noise to every sample."""

    def transform(self, sample: Any, generator: Generator) -> Any:
        inputs, target = sample
        return inputs + torch.rand(2, generator=generator), target


def training(
    dataset: Dataset[Any],
    cut: Cut,
    *,
    seed: int = 0,
    task: Task | None = None,
    num_workers: Any = "auto",
) -> TrainingData:
    return TrainingData(
        dataset, task or Plain(), cut, seed=seed, device=CPU, num_workers=num_workers
    )


@dataclass
class Seen:
    """What one rank got of one global batch."""

    indices: list[int]
    inputs: list[Tensor]
    weights: list[float]
    micro_batches: int
    empty: int
    batch: Batch
    shapes: set[Any] = field(default_factory=set)


def see(batch: Batch) -> Seen:
    seen = Seen([], [], [], 0, 0, batch)
    for micro in batch.micro_batches:
        assert len(micro.inputs) == len(micro.targets) == len(micro.weights)
        seen.micro_batches += 1
        seen.shapes.add(micro.inputs.shape)
        count = int(micro.counted.sum())
        assert micro.counted.tolist() == [1.0] * count + [0.0] * (len(micro.counted) - count)
        assert not micro.weights[count:].any()
        seen.empty += count == 0
        seen.indices += micro.targets[:count].tolist()
        seen.inputs += list(micro.inputs[:count])
        seen.weights += micro.weights[:count].tolist()
    assert seen.micro_batches == batch.num_micro_batches
    assert len(seen.indices) == batch.num_samples
    return seen


def stream(data: TrainingData, num_steps: int, progress: Progress | None = None) -> list[Seen]:
    batches = data.batches(progress or Progress())
    return [see(batch) for batch in islice(batches, num_steps)]


# --- Cut ----------------------------------------------------------------------------------------


CUTS = {
    "size": st.integers(1, 300),
    "batch": st.integers(1, 100),
    "ranks": st.integers(1, 17),
    "micro": st.one_of(st.none(), st.integers(1, 40)),
}


@given(**CUTS)
def test_every_position_is_seen_exactly_once_and_in_order(
    size: int, batch: int, ranks: int, micro: int | None
) -> None:
    cuts = [Cut(batch, rank, ranks, micro) for rank in range(ranks)]
    seen: list[int] = []
    for start in range(0, size, batch):
        stop = min(start + batch, size)
        for cut in cuts:
            for low, high in cut.micro_batches(start, stop):
                assert low <= high
                seen += range(low, high)
    assert seen == list(range(size))


@given(**CUTS)
def test_a_batch_is_cut_evenly_into_equally_many_micro_batches(
    size: int, batch: int, ranks: int, micro: int | None
) -> None:
    for start in range(0, size, batch):
        stop = min(start + batch, size)
        shares = [
            Cut(batch, rank, ranks, micro).micro_batches(start, stop) for rank in range(ranks)
        ]
        sizes = [sum(high - low for low, high in share) for share in shares]
        assert max(sizes) - min(sizes) <= 1
        assert len({len(share) for share in shares}) == 1
        pieces = [high - low for share in shares for low, high in share]
        assert max(pieces) <= (micro or batch)
        largest = Cut(batch, 0, ranks, micro).largest
        assert max(pieces) <= largest <= (micro or batch)
        # As few as do: one fewer could not hold the largest share.
        assert (len(shares[0]) - 1) * largest < max(sizes)


# --- The stream ---------------------------------------------------------------------------------


@given(**CUTS, seed=st.integers(0, 5))
@settings(max_examples=40, deadline=None)
def test_an_epoch_on_any_layout_is_the_epoch_of_one_rank(
    size: int, batch: int, ranks: int, micro: int | None, seed: int
) -> None:
    dataset = tensors(size)
    parts = [training(dataset, Cut(batch, r, ranks, micro), seed=seed) for r in range(ranks)]
    steps = parts[0].steps_per_epoch
    streams = [stream(part, 2 * steps) for part in parts]
    for epoch in range(2):
        order = parts[0].order(epoch).tolist()
        assert sorted(order) == list(range(size))
        for step in range(steps):
            shares = [rank[epoch * steps + step] for rank in streams]
            expected = order[step * batch : (step + 1) * batch]
            assert [index for share in shares for index in share.indices] == expected
            weights = [weight for share in shares for weight in share.weights]
            assert weights == pytest.approx([ranks / len(expected)] * len(expected))
            assert len({share.micro_batches for share in shares}) == 1
            for share in shares:
                assert share.batch.epoch == epoch + 1
                assert share.batch.global_samples == len(expected)
                assert share.batch.ends_epoch == (step == steps - 1)


def test_the_order_depends_on_seed_and_epoch_only() -> None:
    first = training(tensors(500), Cut(32, 0, 1), seed=3)
    torch.manual_seed(99)
    other = training(Numbers(500), Cut(7, 2, 5, 1), seed=3, task=Noisy(), num_workers=1)
    for epoch in range(3):
        assert torch.equal(first.order(epoch), other.order(epoch))
    assert not torch.equal(first.order(0), first.order(1))
    assert not torch.equal(first.order(0), training(tensors(500), Cut(32, 0, 1), seed=4).order(0))


@pytest.mark.parametrize(("ranks", "micro"), LAYOUTS)
@pytest.mark.parametrize("batch", [10, 7])
def test_a_resumed_stream_goes_on_at_the_very_next_sample(
    ranks: int, micro: int | None, batch: int
) -> None:
    for rank in range(ranks):
        data = training(tensors(23), Cut(batch, rank, ranks, micro))
        whole = stream(data, 10)
        progress = Progress()
        for step in range(9):
            rest = stream(data, 10 - step, progress)
            assert [seen.indices for seen in rest] == [seen.indices for seen in whole[step:]]
            assert [seen.weights for seen in rest] == [seen.weights for seen in whole[step:]]
            advance(progress, whole[step].batch)
            assert progress.step == step + 1


def test_a_stream_goes_on_with_another_batch_size_and_layout() -> None:
    data = training(tensors(23), Cut(10, 0, 1))
    progress = Progress()
    for seen in stream(data, 3):
        advance(progress, seen.batch)
    assert progress == Progress(step=3, epoch=1, position=0, samples=23)
    advance(progress, stream(data, 1, progress)[0].batch)
    rest = [stream(training(tensors(23), Cut(4, rank, 2)), 4, progress) for rank in range(2)]
    seen_then = [index for step in range(4) for rank in rest for index in rank[step].indices]
    assert seen_then == data.order(1).tolist()[10:]


@pytest.mark.parametrize("num_workers", [0, 1, 2])
@pytest.mark.parametrize("kind", [Numbers, Batches])
def test_loaders_give_the_same_batches_as_direct_access(
    kind: type[Numbers], num_workers: int
) -> None:
    cut = Cut(10, 1, 2, 3)
    expected = stream(training(tensors(23), cut), 7)
    seen = stream(training(kind(23), cut, num_workers=num_workers), 7)
    assert [one.indices for one in seen] == [one.indices for one in expected]
    for one, other in zip(seen, expected, strict=True):
        assert torch.equal(torch.stack(one.inputs), torch.stack(other.inputs))
        assert (one.empty, one.weights) == (other.empty, other.weights)


def test_a_loader_resumes_like_direct_access() -> None:
    cut = Cut(10, 0, 2)
    progress = Progress(step=4, epoch=1, position=10, samples=33)
    expected = stream(training(tensors(23), cut), 4, progress)
    seen = stream(training(Numbers(23), cut, num_workers=1), 4, progress)
    assert [one.indices for one in seen] == [one.indices for one in expected]


# --- Fetched ahead by a thread -------------------------------------------------------------------


class Odd(Batches):
    """Has a sample that cannot be read, and must be read from one thread at a time."""

    def __init__(self, size: int, bad: int = -1) -> None:
        super().__init__(size)
        self.bad, self.threads, self.readers = bad, set[str](), 0

    def batch(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        self.threads.add(threading.current_thread().name)
        self.readers += 1
        time.sleep(0.001)
        assert self.readers == 1
        self.readers -= 1
        if self.bad in indices:
            raise ValueError(f"sample {self.bad}")
        return super().batch(indices)


def ahead(dataset: Odd, cut: Cut) -> TrainingData:
    data = training(dataset, cut)
    assert data.num_ahead == 0  # on a CPU
    data.num_ahead = 4
    return data


@pytest.mark.parametrize(("ranks", "micro"), LAYOUTS)
def test_a_thread_makes_the_same_batches_from_any_position_and_ends_with_the_stream(
    ranks: int, micro: int | None
) -> None:
    cut = Cut(10, ranks - 1, ranks, micro)
    expected = stream(training(tensors(23), cut), 7)
    dataset, progress = Odd(23), Progress()
    for step in range(6):
        seen = stream(ahead(dataset, cut), 7 - step, progress)
        for one, other in zip(seen, expected[step:], strict=True):
            assert (one.indices, one.weights) == (other.indices, other.weights)
            assert all(map(torch.equal, one.inputs, other.inputs))
        assert "batches" not in {thread.name for thread in threading.enumerate()}
        advance(progress, expected[step].batch)
    assert dataset.threads == {"batches"}


def test_an_error_of_the_thread_is_raised_where_its_batch_is_due() -> None:
    cut = Cut(4, 0, 1)
    order = training(tensors(23), cut).order(0).tolist()
    batches = ahead(Odd(23, bad=order[9]), cut).batches(Progress())
    assert [see(batch).indices for batch in islice(batches, 2)] == [order[:4], order[4:8]]
    with pytest.raises(ValueError, match=f"sample {order[9]}"):
        see(next(batches))


def test_evaluation_reads_while_the_thread_does_not() -> None:
    dataset, cut = Odd(23), Cut(2, 0, 1)
    batches = ahead(dataset, cut).batches(Progress())
    for _ in range(10):
        see(next(batches))
        assert len(list(EvaluationData(dataset, cut, device=CPU))) == 12
    assert dataset.threads == {"batches", "MainThread"}


# --- Transforms ---------------------------------------------------------------------------------


def transformed(ranks: int, micro: int | None, num_workers: int) -> dict[tuple[int, int], Tensor]:
    """Every sample of two epochs as the model sees it, by epoch and index."""
    seen: dict[tuple[int, int], Tensor] = {}
    for rank in range(ranks):
        cut = Cut(10, rank, ranks, micro)
        data = training(Numbers(23), cut, task=Noisy(), seed=5, num_workers=num_workers)
        for step in stream(data, 2 * data.steps_per_epoch):
            for index, inputs in zip(step.indices, step.inputs, strict=True):
                key = (step.batch.epoch, index)
                assert key not in seen
                seen[key] = inputs
    return seen


def test_transforms_depend_on_neither_workers_nor_ranks() -> None:
    reference = transformed(1, None, 0)
    assert len(reference) == 46
    noise = {
        tuple((inputs - torch.tensor([i, -i])).tolist()) for (_, i), inputs in reference.items()
    }
    assert len(noise) == 46  # a draw of its own for every sample and epoch
    for ranks, micro, num_workers in ((1, None, 2), (2, None, 1), (3, 2, 0), (4, 1, 0)):
        seen = transformed(ranks, micro, num_workers)
        assert seen.keys() == reference.keys()
        assert all(torch.equal(seen[key], reference[key]) for key in seen)


def test_transforms_apply_to_in_memory_data_too() -> None:
    data = training(tensors(23), Cut(23, 0, 1), task=Noisy(), num_workers=0)
    inputs = torch.stack(stream(data, 1)[0].inputs)
    assert not torch.equal(inputs, inputs.round())


# --- Too few samples to go round ----------------------------------------------------------------


def test_a_rank_without_samples_has_borrowed_ones_of_no_weight() -> None:
    ranks = [training(tensors(9), Cut(3, rank, 5, 1)) for rank in range(5)]
    for step in zip(*(stream(rank, 3) for rank in ranks), strict=True):
        assert [seen.micro_batches for seen in step] == [1] * 5
        assert sum(seen.empty for seen in step) == 2
        assert sum(len(seen.indices) for seen in step) == 3
        assert sum(sum(seen.weights) for seen in step) == pytest.approx(5)


@pytest.mark.parametrize(("ranks", "micro"), LAYOUTS)
@pytest.mark.parametrize("kind", [tensors, Numbers, Batches])
def test_every_micro_batch_of_training_and_evaluation_has_one_shape(
    kind: Any, ranks: int, micro: int | None
) -> None:
    shapes, passes = set(), set()
    for rank in range(ranks):
        cut = Cut(10, rank, ranks, micro)
        data = training(kind(23), cut, num_workers=0)
        for seen in stream(data, 3 * data.steps_per_epoch):
            shapes |= seen.shapes
        evaluated = list(EvaluationData(kind(11), cut, device=CPU))
        shapes |= {inputs.shape for inputs, _, _ in evaluated}
        passes.add(len(evaluated))
    assert len(shapes) == len(passes) == 1
    assert data.borrows


def test_samples_that_a_task_couples_are_not_joined_by_borrowed_ones() -> None:
    data = training(tensors(23), Cut(10, 0, 2), task=Coupled())
    assert [{len(s) for s in seen.shapes} for seen in stream(data, 3)] == [{2}, {2}, {2}]
    sizes = [sum(shape[0] for shape in seen.shapes) for seen in stream(data, 3)]
    assert sizes == [5, 5, 1]
    alone = training(tensors(3), Cut(1, 0, 2), task=Coupled())
    assert [seen.empty for seen in stream(alone, 3)] == [1, 1, 1]


def test_the_example_is_the_next_micro_batch_and_takes_nothing_from_the_stream() -> None:
    for dataset, num_workers in ((tensors(23), 0), (Numbers(23), 1), (Batches(23), 1)):
        data = training(dataset, Cut(10, 1, 2, 3), num_workers=num_workers)
        example = data.example(Progress())
        seen = stream(data, 1)[0]
        count = int(example.counted.sum())
        assert count > 0
        assert example.targets[:count].tolist() == seen.indices[:count]
        assert example.weights.shape == (len(example.targets),)


# --- Evaluation ---------------------------------------------------------------------------------


def evaluated(dataset: Dataset[Any], cut: Cut, num_workers: int = 0) -> Iterator[int]:
    data = EvaluationData(dataset, cut, device=CPU, num_workers=num_workers)
    for _, targets, count in data:
        yield from targets[:count].tolist()


@pytest.mark.parametrize("kind", [tensors, Numbers, Batches])
@pytest.mark.parametrize("ranks", [1, 3, 30])
def test_every_sample_is_evaluated_once(kind: Any, ranks: int) -> None:
    seen: list[int] = []
    for rank in range(ranks):
        seen += evaluated(kind(23), Cut(4, rank, ranks))
    assert seen == list(range(23))


def test_evaluation_can_be_repeated_with_workers() -> None:
    data = EvaluationData(Numbers(23), Cut(4, 0, 1), device=CPU, num_workers=1)
    passes = [[i for _, targets, n in data for i in targets[:n].tolist()] for _ in range(2)]
    assert passes == [list(range(23))] * 2


@pytest.mark.parametrize("of_weights", [torch.float32, torch.float64])
@pytest.mark.parametrize("of_losses", [torch.bfloat16, torch.float32, torch.float64])
def test_losses_of_any_type_are_weighted(of_weights: torch.dtype, of_losses: torch.dtype) -> None:
    weights, losses = torch.ones(3, dtype=of_weights), torch.ones(3, dtype=of_losses)
    micro = MicroBatch(None, None, weights, weights)
    for one in (losses, (losses, losses)):
        found, weighted, _ = weigh(one, micro)
        assert torch.dot(found, weighted) == 3 and found.dtype == of_weights
