"""Decides which rank trains on which sample, and fetches the samples.

The order of samples is a function of (seed, epoch, position). A global batch is the next
`batch_size` positions, divided into ranks and micro-batches as evenly as possible. So on any layout
each sample is seen exactly once per epoch, including those of the last, smaller batch.

Every micro-batch has the same shape, so that nothing is compiled twice: what is missing is padded
with borrowed samples, which count for nothing.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from allranks.errors import AllranksError
from allranks.machine.processes import die_with_parent
from allranks.tasks import Task
from allranks.timing import timeline

ON_DEVICE_BYTES = 1 << 28  # in-memory data sets up to this size live on the device
MOST_WORKERS = 8  # unless the job asks for more
GATHER_BYTES, GATHER_BATCHES = 1 << 22, 64  # small batches are fetched ahead up to either
FETCHING = threading.Lock()  # data sets may share a file, and read it from one thread at a time
MASK = (1 << 64) - 1


def mix(*values: int) -> int:
    """A 63-bit seed from several integers; every bit of each matters (SplitMix64's finaliser).

    What is drawn is a function of what it is for: no layout and no restart changes it.
    """
    state = 0x9E3779B97F4A7C15
    for value in values:
        state = (state ^ value) & MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
        state = ((state ^ (state >> 31)) + 0x9E3779B97F4A7C15) & MASK
    return state >> 1


@dataclass(frozen=True, slots=True)
class Cut:
    """How a global batch is divided: into `parts` ranks, this one being `part`, then by size."""

    batch_size: int
    part: int
    parts: int
    micro_batch_size: int | None = None
    num_micro_batches: int | None = None  # in place of a size: so many of every global batch

    @property
    def num_of_whole(self) -> int:
        """Micro-batches of a whole global batch, on each rank."""
        share = -(-self.batch_size // self.parts)
        return self.num_micro_batches or -(-share // (self.micro_batch_size or share))

    @property
    def largest(self) -> int:
        """Samples in the largest micro-batch of a whole global batch, over all ranks."""
        return -(-self.batch_size // (self.parts * self.num_of_whole))

    @property
    def is_even(self) -> bool:
        """Whether all micro-batches of a whole global batch are equally large, on all ranks."""
        return self.batch_size % (self.parts * self.num_of_whole) == 0

    def share(self, start: int, stop: int) -> tuple[int, int]:
        """This rank's positions in a global batch; two ranks' shares differ by at most one."""
        count = stop - start
        low, high = self.part * count // self.parts, (self.part + 1) * count // self.parts
        return start + low, start + high

    def micro_batches(self, start: int, stop: int) -> list[tuple[int, int]]:
        """The positions of each of this rank's micro-batches in a global batch.

        Every rank has the same number of them, because forward passes may be collective. If there
        are too few samples for all, some are empty.
        """
        low, high = self.share(start, stop)
        size, largest_share = high - low, -(-(stop - start) // self.parts)
        count = self.num_micro_batches or -(-largest_share // self.largest)
        return [(low + i * size // count, low + (i + 1) * size // count) for i in range(count)]


@dataclass(slots=True)
class Progress:
    """How far the training is. Saved with every checkpoint; the same on every rank."""

    step: int = 0  # optimizer steps done
    epoch: int = 0  # epochs completed
    position: int = 0  # samples seen in the current epoch
    samples: int = 0  # samples seen in total


class MicroBatch(NamedTuple):  # created at every step: a frozen dataclass takes three times as long
    """The samples of one backward pass, and padding: borrowed samples of weight 0."""

    inputs: Any
    targets: Any
    weights: Tensor  # per sample; over the global batch they add up to the number of ranks
    counted: Tensor  # per sample: 1.0, or 0.0 for padding


class Batch(NamedTuple):
    """This rank's share of one global batch."""

    epoch: int  # counted from 1
    num_samples: int  # this rank's
    global_samples: int
    ends_epoch: bool
    micro_batches: Iterator[MicroBatch]
    num_micro_batches: int


class TrainingData:
    """An endless stream of global batches, starting at any position."""

    def __init__(
        self,
        dataset: Dataset[Any],
        task: Task,
        cut: Cut,
        *,
        seed: int,
        device: torch.device,
        num_workers: int | Literal["auto"] = "auto",
        prefetch: int = 4,
        num_cpus: int = 1,
    ) -> None:
        self.num_samples = len(dataset)  # type: ignore[arg-type]  # map-style: it has a length
        if self.num_samples == 0:
            raise AllranksError(
                f"the training data of {type(task).__name__} has no samples",
                fix="check the paths and options of the task's data",
            )
        self.dataset = dataset
        self.cut = cut
        self.seed = seed
        self.device = device
        self.dtype = torch.float32  # of the weights: the model's, if that is float64
        self.pads = not task.couples_samples
        self._weights: dict[tuple[int, int, float], Tensor] = {}
        has_transform = task.has_transform()
        self._samples = _Samples(dataset, task.transform if has_transform else None, seed)
        self._fetch = None if has_transform else direct_fetch(dataset, device)
        if num_workers == "auto":
            spare = min(num_cpus - 1, MOST_WORKERS)  # one CPU is for the rank itself
            num_workers = 0 if self._fetch else spare
        if num_workers > 0:
            self._fetch = None
        # By a thread, so that a GPU never waits for the host; on a CPU it takes a core from the
        # training, and gains nothing.
        self.num_ahead = prefetch if device.type == "cuda" and self._fetches_on_host else 0
        self._loader_options = loader_options(num_workers, prefetch, device)
        self._loader_options["collate_fn"] = self._samples.collate
        self.num_workers = num_workers

    @property
    def is_direct(self) -> bool:
        """Whether whole batches are fetched without a DataLoader."""
        return self._fetch is not None

    @property
    def _fetches_on_host(self) -> bool:
        return self._fetch is not None and self._fetch.index_device.type == "cpu"

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.num_samples // self.cut.batch_size)

    @property
    def borrows(self) -> bool:
        """Whether some micro-batches have borrowed samples."""
        return not self.cut.is_even or self.num_samples % self.cut.batch_size > 0

    def order(self, epoch: int) -> Tensor:
        """The index of the sample at each position of an epoch, counted from 0."""
        generator = torch.Generator().manual_seed(mix(self.seed, epoch))
        return torch.randperm(self.num_samples, generator=generator)

    def batches(self, progress: Progress) -> Iterator[Batch]:
        """Global batches, starting with the next sample, without end."""
        fetched = self._fetched(progress)
        if self.num_ahead:
            fetched = in_background(fetched, self.num_ahead)
        if not is_there(self._fetch, self.device):
            fetched = ahead_on_device(fetched, self.device)
        for epoch, start, stop in self._spans(progress):
            low, high = self.cut.share(start, stop)
            pieces = self.cut.micro_batches(start, stop)
            yield Batch(
                epoch=epoch + 1,
                num_samples=high - low,
                global_samples=stop - start,
                ends_epoch=stop == self.num_samples,
                num_micro_batches=len(pieces),
                micro_batches=self._micro_batches(fetched, pieces, self.cut.parts / (stop - start)),
            )

    def example(self, progress: Progress) -> MicroBatch:
        """A copy of the next micro-batch, which the stream will still return."""
        epoch, indices = next(self._indices(progress))
        if self._fetch is not None:
            batch = self._fetch(indices)
        else:
            batch = self._samples.collate([self._samples[epoch, i] for i in indices.tolist()])
        _, start, stop = next(self._spans(progress))
        low, high = self.cut.micro_batches(start, stop)[0]
        return self._micro_batch(on_device(batch, self.device), high - low, len(indices), 1.0)

    def _fetched(self, progress: Progress) -> Iterator[Any]:
        if self._fetch is not None:
            return self._fetch.many(indices for _, indices in self._indices(progress))
        # A loader's worker needs the epoch too: transforms are seeded by it.
        keys = ([(e, i) for i in indices.tolist()] for e, indices in self._indices(progress))
        return iter(DataLoader(self._samples, batch_sampler=keys, **self._loader_options))

    def _micro_batches(
        self, fetched: Iterator[Any], pieces: list[tuple[int, int]], weight: float
    ) -> Iterator[MicroBatch]:
        for low, high in pieces:
            timeline.mark(timeline.DATA)
            pair = next(fetched)
            timeline.mark(timeline.FORWARD)
            yield self._micro_batch(pair, high - low, self._padded(high - low), weight)

    def _padded(self, count: int) -> int:
        """Samples in a micro-batch of so many that count. An empty one needs one in any case."""
        return self.cut.largest if self.pads else max(1, count)

    def _micro_batch(self, pair: Any, count: int, size: int, weight: float) -> MicroBatch:
        inputs, targets = pair
        weights = self._first(count, size, weight)
        return MicroBatch(inputs, targets, weights, self._first(count, size, 1.0))

    def _first(self, count: int, size: int, value: float) -> Tensor:
        """A value for each of the first samples, and 0 for the others."""
        key = (count, size, value)
        if key not in self._weights:
            made = torch.zeros(size, dtype=self.dtype)
            made[:count] = value
            self._weights[key] = made.to(self.device)
        return self._weights[key]

    def _spans(self, progress: Progress) -> Iterator[tuple[int, int, int]]:
        """Epoch (from 0), start and stop position of every global batch after `progress`."""
        position = progress.position
        for epoch in itertools.count(progress.epoch):
            while position < self.num_samples:
                stop = min(position + self.cut.batch_size, self.num_samples)
                yield epoch, position, stop
                position = stop
            position = 0

    def _indices(self, progress: Progress) -> Iterator[tuple[int, Tensor]]:
        """Epoch and sample indices of every micro-batch of this rank after `progress`."""
        ordered_epoch, order = -1, torch.empty(0)
        for epoch, start, stop in self._spans(progress):
            if epoch != ordered_epoch:
                ordered_epoch, order = epoch, self.order(epoch)
                if self._fetch is not None:
                    order = on_device(order, self._fetch.index_device)
            for low, high in self.cut.micro_batches(start, stop):
                yield epoch, padded(order, low, high, start, self._padded(high - low))


def padded(order: Tensor, low: int, high: int, borrowed: int, size: int) -> Tensor:
    """The indices at these positions and, up to `size` of them, the one at `borrowed`."""
    indices, missing = order[low:high], size - (high - low)
    return torch.cat([indices, order[borrowed].expand(missing)]) if missing else indices


class EvaluationData:
    """This rank's share of a whole data set, in order, in equally many batches on every rank."""

    def __init__(
        self,
        dataset: Dataset[Any],
        cut: Cut,
        *,
        device: torch.device,
        num_workers: int = 0,
        pads: bool = True,
    ) -> None:
        self.device = device
        num_samples: int = len(dataset)  # type: ignore[arg-type]  # map-style: it has a length
        if num_samples == 0:
            raise AllranksError(
                "a data set to evaluate on has no samples", fix="leave it out of datasets()"
            )
        low, high = cut.share(0, num_samples)
        size, largest_share = cut.largest, -(-num_samples // cut.parts)
        num_batches = -(-largest_share // size)
        spans = [
            (min(low + i * size, high), min(low + (i + 1) * size, high)) for i in range(num_batches)
        ]
        self._counts = [stop - start for start, stop in spans]
        sizes = [size if pads else max(1, count) for count in self._counts]
        order = torch.arange(num_samples)
        self._indices = [
            padded(order, *span, 0, size) for span, size in zip(spans, sizes, strict=True)
        ]
        self._fetch = direct_fetch(dataset, device)
        self._loader: DataLoader[Any] | None = None
        if self._fetch is None:
            options = loader_options(num_workers, 2, device)
            indices = [indices.tolist() for indices in self._indices]
            self._loader = DataLoader(dataset, batch_sampler=indices, **options)

    def __iter__(self) -> Iterator[tuple[Any, Any, int]]:
        """Inputs, targets and how many of the samples count, the first ones, of each batch."""
        if self._fetch is None:
            assert self._loader is not None
            fetched: Iterator[Any] = iter(self._loader)
        else:
            device = self._fetch.index_device
            fetched = map(self._fetch, (indices.to(device) for indices in self._indices))
        is_here = is_there(self._fetch, self.device)
        pairs = fetched if is_here else ahead_on_device(fetched, self.device)
        for count, (inputs, targets) in zip(self._counts, pairs, strict=True):
            yield inputs, targets, count


class _Samples(Dataset[Any]):
    """A data set whose transforms draw from a generator per (seed, epoch, sample)."""

    def __init__(
        self,
        dataset: Dataset[Any],
        transform: Callable[[Any, torch.Generator], Any] | None,
        seed: int,
    ) -> None:
        self.dataset = dataset
        self.transform = transform
        self.seed = seed
        self.batch: Callable[[list[int]], Any] | None = getattr(dataset, "batch", None)

    def __getitem__(self, key: tuple[int, int]) -> Any:
        epoch, index = key
        if self.batch is not None and self.transform is None:
            return index
        sample = self.dataset[index]
        if self.transform is None:
            return sample
        generator = torch.Generator().manual_seed(mix(self.seed, epoch, index))
        return self.transform(sample, generator)

    def collate(self, samples: list[Any]) -> Any:
        """Make a batch of samples. Called in the loader's worker."""
        if self.batch is not None and self.transform is None:
            return self.batch(samples)
        return torch.utils.data.default_collate(samples)


class TensorFetch:
    """Indexes an in-memory data set once per batch; on the device if the data fits there."""

    def __init__(self, dataset: TensorDataset, device: torch.device) -> None:
        fits = sum(tensor.nbytes for tensor in dataset.tensors) <= ON_DEVICE_BYTES
        self.index_device = device if fits else torch.device("cpu")
        self._tensors = [tensor.to(self.index_device) for tensor in dataset.tensors]

    def __call__(self, indices: Tensor) -> Any:
        return [tensor.index_select(0, indices) for tensor in self._tensors]

    def many(self, batches: Iterator[Tensor]) -> Iterator[Any]:
        """Fetch small batches many at a time: slicing is cheaper than gathering each of them."""
        first = next(batches)
        batch_bytes = sum(tensor[:1].nbytes for tensor in self._tensors) * len(first)
        count = max(1, min(GATHER_BATCHES, GATHER_BYTES // max(batch_bytes, 1)))
        batches = itertools.chain([first], batches)
        while chunk := list(itertools.islice(batches, count)):
            gathered = self(torch.cat(chunk))
            sizes = [indices.numel() for indices in chunk]
            yield from zip(*(tensor.split(sizes) for tensor in gathered), strict=True)


class BatchFetch:
    """Fetches batches from a data set that has a method `batch(indices)`."""

    index_device = torch.device("cpu")

    def __init__(self, batch: Callable[[list[int]], Any]) -> None:
        self._batch = batch

    def __call__(self, indices: Tensor) -> Any:
        with FETCHING:
            return self._batch(indices.tolist())

    def many(self, batches: Iterator[Tensor]) -> Iterator[Any]:
        return map(self, batches)


def direct_fetch(dataset: Dataset[Any], device: torch.device) -> TensorFetch | BatchFetch | None:
    """How to fetch a whole batch in one call; None for data sets that need a DataLoader."""
    if isinstance(dataset, TensorDataset):
        return TensorFetch(dataset, device)
    batch = getattr(dataset, "batch", None)
    return BatchFetch(batch) if batch is not None else None


def is_there(fetch: TensorFetch | BatchFetch | None, device: torch.device) -> bool:
    """Whether what it fetches is on the device already."""
    return fetch is not None and fetch.index_device == device


def loader_options(num_workers: int, prefetch: int, device: torch.device) -> dict[str, Any]:
    """Arguments that every DataLoader here gets."""
    options: dict[str, Any] = {"num_workers": num_workers, "pin_memory": device.type == "cuda"}
    if num_workers > 0:
        options["persistent_workers"] = True
        options["prefetch_factor"] = prefetch
        options["worker_init_fn"] = _end_with_rank
    return options


def in_background(batches: Iterator[Any], most: int) -> Iterator[Any]:
    """The same batches, made by a thread up to so many ahead; it ends when this is closed.

    An error in it is raised here, in the order of the batches.
    """
    made: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
    room = threading.Semaphore(most)
    is_closed = False

    def make() -> None:
        try:
            while room.acquire() and not is_closed:
                made.put((next(batches), None))
        except BaseException as error:
            made.put((None, error))

    thread = threading.Thread(target=make, name="batches", daemon=True)
    thread.start()
    try:
        while True:
            batch, error = made.get()
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            room.release()
            yield batch
    finally:
        is_closed = True
        room.release()
        thread.join()


def ahead_on_device(batches: Iterator[Any], device: torch.device) -> Iterator[Any]:
    """Copy each batch to a CUDA device one batch ahead of its use, on a separate stream."""
    if device.type != "cuda":
        return batches
    return _ahead_on_cuda(batches, device)


def _ahead_on_cuda(batches: Iterator[Any], device: torch.device) -> Iterator[Any]:
    stream = torch.cuda.Stream(device)
    ready: Any = None
    for batch in batches:
        with torch.cuda.stream(stream):
            copied = on_device(batch, device)
        if ready is not None:
            yield ready
        torch.cuda.current_stream(device).wait_stream(stream)
        mapped(_used_by_current_stream, copied)
        ready = copied
    if ready is not None:
        yield ready


def on_device(value: Any, device: torch.device) -> Any:
    """A batch with every tensor copied to the device, without waiting."""

    def copied(tensor: Tensor) -> Tensor:
        if tensor.device.type == "cpu" and device.type == "cuda" and not tensor.is_pinned():
            tensor = tensor.pin_memory()
        return tensor.to(device, non_blocking=True)

    return mapped(copied, value)


def mapped(function: Callable[[Tensor], Any], value: Any) -> Any:
    """A batch with what a function makes of each of its tensors."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: mapped(function, item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        items = [mapped(function, item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def _used_by_current_stream(tensor: Tensor) -> None:
    # The allocator must not give the memory to the copying stream while this one still reads it.
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))


def _end_with_rank(worker: int) -> None:
    die_with_parent()
