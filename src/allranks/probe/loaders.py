"""One DataLoader of the script as the probe sees it, and one pass over its data."""

from __future__ import annotations

from collections import deque
from collections.abc import Sized
from dataclasses import dataclass, field
from typing import Any

from allranks.probe import batches
from allranks.probe.fingerprints import FINGERPRINT_EPOCHS, FINGERPRINTS, Fingerprints

MAX_WAITING = 1024  # batches that are remembered until they arrive or are trained on


@dataclass(slots=True, eq=False)
class Loader:
    """One DataLoader of the script, over all its epochs."""

    pass_samples: int | None = None  # samples that a pass will read, if it says so
    length: int | None = None  # batches of a pass, if it says so
    dataset: int = 0  # the id of its data set
    batch_size: int | None = None  # of an iterable data set, whose batches may be less full
    is_collated: bool = True  # batches are made of samples; the data set does not hold batches
    is_checked: bool = False  # by the script's own function, which may leave some out
    settings: dict[str, Any] = field(default_factory=dict)  # as the script made it
    number: int | None = None  # among the fingerprinted loaders
    starts: int = 0  # how many times it was started
    batches: int = 0  # since it was started
    indices: deque[Any] = field(  # of batches that are being loaded
        default_factory=lambda: deque(maxlen=MAX_WAITING)
    )
    doubt: str | None = None  # why the size of its batches is not certain
    place: tuple[int, int] | None = None  # where its batches show their length
    num_short: int = 0  # batches of this pass with fewer samples than asked for
    # The rest belongs to the SampleCounter.
    first_step: int | None = None  # in which it delivered a batch
    last_step: int | None = None
    num_steps: int = 0  # in which it delivered a batch
    num_trained: int = 0  # batches

    def started(self) -> None:
        self.starts += 1
        self.batches = self.num_short = 0
        self.indices.clear()

    def fetched(self, batch: Any, fingerprints: Fingerprints) -> int:
        """A batch has arrived; returns how many samples it has."""
        indices = self.indices.popleft() if self.indices else None
        if not self.is_collated and indices.__class__ is not list:
            indices = None  # of one item
        is_early = self.batches < FINGERPRINTS and self.starts <= FINGERPRINT_EPOCHS
        # Almost always a list, and isinstance(…, Sized) takes microseconds.
        if indices.__class__ is list and not self.is_checked:
            samples = len(indices)
            if is_early and samples == 1 and self.is_collated and batches.is_nested(batch):
                self.doubt = batches.ITEMS
        else:
            samples = self._size(batch, indices)
        if is_early:
            if samples and batches.is_empty(batch):
                samples, self.indices = 0, deque(maxlen=0)  # its indices do not say what is in it
            fingerprints.look(self, batch, indices, samples)
        self.batches += 1
        return samples

    def _size(self, batch: Any, indices: Any) -> int:
        """Samples of a batch whose indices alone do not show how many it has."""
        if indices.__class__ is list or (self.is_collated and isinstance(indices, Sized)):
            samples = len(indices)
            kept = batches.num_kept(batch, samples) if self.is_checked else samples
            if kept != samples or not batches.has_length(batch, samples):
                self.doubt = batches.REARRANGED
            return kept
        if self.batch_size is not None and self.is_checked:
            return self._size_at_place(batch, self.batch_size)
        samples = batches.num_samples(batch)
        if not self.is_collated and not batches.has_labels(batch, samples):
            self.doubt = batches.ITEMS
        return samples

    def _size_at_place(self, batch: Any, asked: int) -> int:
        """Samples of an iterable data set's batch, from the place where full ones show theirs."""
        if self.place is None:
            self.place = batches.place_of(batch, asked)
        if self.place is None:
            self.doubt = batches.REARRANGED
            return min(asked, batches.num_samples(batch))
        samples = batches.length_at(batch, self.place)
        if self.num_short or samples > asked:  # only the last one may be short
            self.doubt = batches.REARRANGED
        self.num_short += samples != asked
        return samples


@dataclass(slots=True, eq=False)
class Pass:
    """One iteration over a loader, which may be left before the end."""

    loader: Loader
    iterator: Any = None  # a weak reference to what iterates
    batches: int = 0
    trained: int = 0  # of these
    epoch: int | None = None  # that its first trained batch belonged to
    step: int = -1  # it began in
    began: int = -1  # which mark of that step
    ended: int | None = None  # which mark, if it came to its end
    num_backwards: int = 0  # before it began
    is_silent: bool = False  # it ended, and there was no backward pass while it lasted
    is_complete: bool = False

    @property
    def is_read(self) -> bool:
        """Whether all of it was read."""
        return self.ended is not None or self.batches == self.loader.length
