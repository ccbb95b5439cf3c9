"""Counts the samples of each step, and fingerprints batches to compare ranks and epochs."""

from __future__ import annotations

import itertools
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sized
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from allranks.run.events import SCHEMA_VERSION, WhatIsLate
from allranks.timing.timeline import Mark, Step

FINGERPRINTS = 4  # batches per epoch
FINGERPRINT_EPOCHS = 2
MAX_FINGERPRINTS = 64  # of a rank: a script may make a new loader for every epoch
FINGERPRINT_VALUES = 4096
MAX_SIZES = 1000  # distinct batch sizes that are counted
MAX_WAITING = 1024  # batches per loader that are remembered until they arrive or are trained on


@dataclass(slots=True)
class Loader:
    """One DataLoader of the script, over all its epochs."""

    dataset_samples: int | None = None  # if its data set has a length
    number: int | None = None  # among the fingerprinted loaders
    is_checked: bool = False  # whether its batches may be shorter than their indices
    starts: int = 0  # how many times it was started
    batches: int = 0  # since it was started
    indices: deque[Any] = field(  # of batches that are being loaded
        default_factory=lambda: deque(maxlen=MAX_WAITING)
    )
    # The rest belongs to the SampleCounter.
    epoch: int = 0
    waiting: deque[int] = field(  # sizes of batches that were not trained on yet
        default_factory=lambda: deque(maxlen=MAX_WAITING)
    )
    ended: bool = False

    def started(self) -> None:
        self.starts += 1
        self.batches = 0
        self.indices.clear()

    def fetched(self, batch: Any, fingerprints: Fingerprints) -> int:
        """A batch has arrived; returns how many samples it has."""
        indices = self.indices.popleft() if self.indices else None
        # Almost always a list, and isinstance(…, Sized) takes microseconds.
        if indices.__class__ is list:
            samples = len(indices)
        else:
            samples = len(indices) if isinstance(indices, Sized) else num_samples(batch)
        if self.is_checked and indices is not None:
            samples = num_kept(batch, samples)
        if self.batches < FINGERPRINTS and self.starts <= FINGERPRINT_EPOCHS:
            if samples and is_empty(batch):
                samples, self.indices = 0, deque(maxlen=0)  # its indices do not say what is in it
            fingerprints.look(self, batch, indices, samples)
        self.batches += 1
        return samples


class Fingerprints:
    """Fingerprints of early batches, to be written with the next step."""

    def __init__(self) -> None:
        self.seen: list[tuple[Loader, dict[str, Any]]] = []
        self._num_seen = 0
        self._num_loaders = 0

    def look(self, loader: Loader, batch: Any, indices: Any, samples: int) -> None:
        if self._num_seen >= MAX_FINGERPRINTS:
            return
        self._num_seen += 1
        if loader.number is None:
            loader.number, self._num_loaders = self._num_loaders, self._num_loaders + 1
        found = {"epoch": loader.starts, "batch": loader.batches, "samples": samples}
        if indices is not None:
            values = list(indices)[:FINGERPRINT_VALUES]
            found["indices"] = zlib.crc32(repr(values).encode())
            with suppress(Exception):  # an index may be anything, an array too
                found["sorted"] = values == sorted(values)
        tensor = next(tensors(batch), None)
        if tensor is not None and tensor.device.type == "cpu":  # the probe never waits for a device
            with suppress(Exception):  # not every tensor can be read as bytes
                found["content"] = content(tensor)
        self.seen.append((loader, found))

    def take(self, training: Loader | None) -> list[dict[str, Any]]:
        """Fingerprints since the last call; `training` is the loader that is trained on."""
        seen, self.seen = self.seen, []
        return [
            {**found, "loader": loader.number, "trained": training is None or loader is training}
            for loader, found in seen
        ]


class SampleCounter:
    """Counts a batch when a backward pass follows it, so validation batches never count.

    Its methods are called from notes on the timeline, some time after the step.
    """

    def __init__(self, switch_off: Callable[[Exception], None] | None = None) -> None:
        self.switch_off = switch_off  # called if anything fails here
        self.step_samples = 0
        self.loader: Loader | None = None  # the one that gave the last batch
        self.training: Loader | None = None  # the one that gave the last trained batch
        self._fresh = 0  # batches that may still be trained on before the step ends
        self._last_batch = 0  # samples of the last trained batch
        self._sizes: Counter[int] = Counter()  # number of batches of each size
        self._has_trained = False  # whether this step had a backward pass
        self._has_batch = False  # whether that was on a new batch, even an empty one

    def started(self, loader: Loader) -> None:
        loader.epoch += 1
        loader.ended = False
        loader.waiting.clear()

    def ended(self, loader: Loader) -> None:
        loader.ended = True

    def fetched(self, loader: Loader, samples: int) -> None:
        """A batch has arrived."""
        loader.waiting.append(samples)
        self.loader = loader
        self._fresh += 1

    def trained(self) -> None:
        """A backward pass begins, on the oldest batch that was not trained on.

        With a loader that fetches ahead there are more; a second pass on the same batch has none.
        """
        self._has_trained = True
        loader, before = self.loader, self.training
        # The last batch, fetched ahead, may be used after a validation with another loader.
        if before is not None and before is not loader and before.ended and before.waiting:
            loader = before
        if loader is None or not loader.waiting or not (self._fresh or loader.ended):
            return
        self.training = loader
        self._last_batch = loader.waiting.popleft()
        self._has_batch = True
        self.step_samples += self._last_batch
        if len(self._sizes) < MAX_SIZES or self._last_batch in self._sizes:
            self._sizes[self._last_batch] += 1
        self._fresh = max(0, self._fresh - 1)

    def computed(self, samples: int) -> None:
        """A model was called; this counts only in scripts that train without a DataLoader."""
        if self.training is None:
            self.step_samples += samples

    def take(self) -> int:
        """The samples of the step that ends here."""
        samples = self.step_samples
        if not samples and self._has_trained and not self._has_batch:
            # The script trains on the same batch repeatedly, or on batches that it keeps.
            samples = max(self._sizes, key=self._sizes.__getitem__, default=self._last_batch)
        self.step_samples, self._has_trained, self._has_batch = 0, False, False
        # One batch may have been fetched ahead. Any more were never trained on.
        self._fresh = min(self._fresh, 1)
        return samples


class CountedStep(Step):
    """A finished step and its samples. Must be created in the order of the steps."""

    __slots__ = ("epoch", "samples")

    def __init__(self, marks: list[Mark], unix: float, counter: SampleCounter) -> None:
        super().__init__(marks, unix)
        self.epoch: int | None = None
        self.samples = 0
        try:
            for _, _, _, note in marks:
                if note.__class__ is tuple:
                    note[0](counter, *note[1:])
            self.samples = counter.take()
            self.epoch = counter.training.epoch if counter.training else None
        except Exception as error:
            if counter.switch_off is None:
                raise
            counter.switch_off(error)

    def line(self, late: WhatIsLate = "wait") -> str:
        """The step's event, without times that the device never delivered."""
        _, end, _, step = self._marks[-1]
        line = f'{{"v":{SCHEMA_VERSION},"t":{self._unix + end:.6f},"event":"step","step":{step}'
        try:
            if late == "wait" or self.ready():
                epoch = "" if self.epoch is None else f'"epoch":{self.epoch},'
                line += f',{epoch}"samples":{self.samples},{self.text()}'
        except Exception:  # the device is lost; this is faster than contextlib.suppress
            pass
        return line + "}\n"


def content(tensor: Any) -> int:
    """A checksum of a tensor's first values."""
    values = tensor.detach().reshape(-1)[:FINGERPRINT_VALUES]
    if str(values.dtype) == "torch.bfloat16":  # NumPy does not have it
        values = values.float()
    return zlib.crc32(values.numpy().tobytes())


def num_samples(batch: Any) -> int:
    """The length of the first tensor in a batch; if it has none, the length of the batch."""
    for tensor in tensors(batch):
        if tensor.dim() > 0:
            return int(tensor.shape[0])
    try:
        return len(batch)
    except TypeError:
        return 0


def num_kept(batch: Any, samples: int) -> int:
    """How many of `samples` a script's own collate function has put into a batch.

    Fewer only if all its tensors are shorter and equally long. If there is one tensor per sample,
    or the samples are in another dimension or concatenated, `samples` is the best answer.
    """
    shapes = [tensor.shape for tensor in itertools.islice(tensors(batch), samples)]
    lengths = {shape[0] if shape else -1 for shape in shapes}
    if len(lengths) != 1 or len(shapes) == samples or any(samples in shape for shape in shapes):
        return samples
    kept = int(lengths.pop())
    return kept if kept == 0 or 1 < kept < samples else samples


def is_empty(batch: Any) -> bool:
    """Whether a batch has tensors and all of them are empty."""
    found = list(tensors(batch))
    return bool(found) and all(0 in tensor.shape for tensor in found)


def tensors(batch: Any, depth: int = 4) -> Iterator[Any]:
    """The tensors in nested lists, tuples, mappings and plain objects, in order."""
    if hasattr(batch, "shape") and hasattr(batch, "dim"):
        yield batch
    elif depth == 0 or isinstance(batch, str | bytes):
        return
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from tensors(value, depth - 1)
    elif isinstance(batch, list | tuple):
        for value in batch:
            yield from tensors(value, depth - 1)
    elif hasattr(batch, "items") or hasattr(batch, "__dict__"):
        values = batch.data if isinstance(getattr(batch, "data", None), Mapping) else vars(batch)
        for value in list(values.values()):
            yield from tensors(value, depth - 1)
