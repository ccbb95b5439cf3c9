"""How many samples a step has trained on, and whether ranks and epochs read the same ones."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

FINGERPRINTS = 4  # batches of an epoch that are looked at
FINGERPRINT_EPOCHS = 2
FINGERPRINT_VALUES = 4096


@dataclass(slots=True)
class Loader:
    """One DataLoader of the script, over all its epochs."""

    epoch: int = 0  # how often it was started
    batches: int = 0  # of this epoch
    waiting: deque[int] = field(default_factory=deque)  # samples of batches nobody trained on yet
    indices: deque[Any] = field(default_factory=deque)  # of batches that are being loaded
    ended: bool = False
    trains: bool = False  # whether a backward pass ever followed one of its batches


class SampleCounter:
    """Counts a batch when a backward pass follows it: those of a validation never count."""

    def __init__(self) -> None:
        self.step_samples = 0
        self.seen: list[dict[str, Any]] = []  # fingerprints to be written
        self.loader: Loader | None = None  # the one that gave the last batch
        self._is_fresh = False  # a batch has come since the last backward pass

    def started(self, loader: Loader) -> None:
        loader.epoch += 1
        loader.batches = 0
        loader.ended = False
        loader.waiting.clear()

    def fetched(self, loader: Loader, batch: Any) -> None:
        """A batch has come."""
        indices = loader.indices.popleft() if loader.indices else None
        loader.waiting.append(num_samples(batch) if indices is None else len(indices))
        if loader.epoch <= FINGERPRINT_EPOCHS and loader.batches < FINGERPRINTS:
            self.seen.append(self._fingerprint(loader, batch, indices))
        loader.batches += 1
        self.loader = loader
        self._is_fresh = True

    def trained(self) -> None:
        """A backward pass begins, on the oldest batch that has come and was not trained on.

        A loader that fetches ahead has one more; a second backward pass on a batch has none.
        """
        loader = self.loader
        if loader is None or not loader.waiting or not (self._is_fresh or loader.ended):
            return
        loader.trains = True
        self.step_samples += loader.waiting.popleft()
        self._is_fresh = False

    def computed(self, inputs: Any) -> None:
        """A model was called, in a script that has no loader."""
        self.step_samples += num_samples(inputs)

    def take(self) -> int:
        """The samples of the step that ends here."""
        samples, self.step_samples = self.step_samples, 0
        return samples

    def _fingerprint(self, loader: Loader, batch: Any, indices: Any) -> dict[str, Any]:
        found = {"epoch": loader.epoch, "batch": loader.batches, "samples": loader.waiting[-1]}
        if indices is not None:
            found["indices"] = zlib.crc32(repr(list(indices)[:FINGERPRINT_VALUES]).encode())
        tensor = next(tensors(batch), None)
        if tensor is not None and tensor.device.type == "cpu" and tensor.numel():
            values = tensor.detach().reshape(-1)[:FINGERPRINT_VALUES].tolist()
            found["content"] = zlib.crc32(repr(values).encode())
        return found


def num_samples(batch: Any) -> int:
    """The length of the first tensor in a batch; of a batch without one, its own."""
    for tensor in tensors(batch):
        if tensor.dim() > 0:
            return int(tensor.shape[0])
    try:
        return len(batch)
    except TypeError:
        return 0


def tensors(batch: Any, depth: int = 4) -> Iterator[Any]:
    """The tensors in nested lists, tuples, mappings and plain objects, in their order."""
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
