"""Fingerprints of early batches, to compare what ranks and epochs read."""

from __future__ import annotations

import zlib
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from allranks.probe.batches import tensors

if TYPE_CHECKING:
    from allranks.probe.loaders import Loader

FINGERPRINTS = 4  # batches per epoch
FINGERPRINT_EPOCHS = 2
MAX_FINGERPRINTS = 64  # of a rank: a script may make a new loader for every epoch
FINGERPRINT_VALUES = 4096


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


def content(tensor: Any) -> int:
    """A checksum of a tensor's first values."""
    values = tensor.detach().reshape(-1)[:FINGERPRINT_VALUES]
    if str(values.dtype) == "torch.bfloat16":  # NumPy does not have it
        values = values.float()
    return zlib.crc32(values.numpy().tobytes())
