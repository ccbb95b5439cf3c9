"""Where a DataLoader tells the probe how long it is waited for, and what is in a batch."""

from __future__ import annotations

from typing import Any

from allranks.probe.recorder import Recorder
from allranks.probe.samples import Loader
from allranks.probe.traced import unseen_by_compilers
from allranks.timeline import DATA, FORWARD, OTHER

MAP_DATASET = 0  # torch's number for it


class Loaders:
    """The loaders of the script, as the hooks see them."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.starting: Loader | None = None  # an iterator asks for batches while it is being made

    def of(self, iterator: Any) -> Loader:
        loader: Loader | None = getattr(iterator, "_allranks_loader", None)
        if loader is None:
            loader = iterator._allranks_loader = self.starting or Loader(epoch=1)
        return loader

    def are_elsewhere(self) -> bool:
        """Not training, or within the loading of a batch for training."""
        timeline = self.recorder.timeline
        return not self.recorder.is_on or timeline.label == DATA or not timeline.is_mine()


def hook_loader(recorder: Recorder) -> None:
    from torch.utils.data import dataloader

    loaders = Loaders(recorder)
    hook_fetching(recorder, loaders, dataloader._BaseDataLoaderIter)
    hook_starting(recorder, loaders, dataloader.DataLoader)


def hook_fetching(recorder: Recorder, loaders: Loaders, iterator: Any) -> None:
    """Waiting for a batch, and which samples it was asked to have."""
    fetch, choose = iterator.__next__, iterator._next_index

    @unseen_by_compilers
    def __next__(self: Any) -> Any:
        if loaders.are_elsewhere():
            return fetch(self)
        with recorder.guarded:
            recorder.timeline.mark(DATA)
        try:
            batch = fetch(self)
        except BaseException:
            with recorder.guarded:
                loaders.of(self).ended = True
                recorder.timeline.mark(OTHER)
            raise
        with recorder.guarded:
            recorder.counter.fetched(loaders.of(self), batch)
            recorder.timeline.mark(FORWARD)
        return batch

    def _next_index(self: Any) -> Any:
        index = choose(self)
        with recorder.guarded:
            # Of an iterable data set only the batch itself tells how long it is.
            if recorder.is_on and self._auto_collation and self._dataset_kind == MAP_DATASET:
                loaders.of(self).indices.append(index)
        return index

    iterator.__next__, iterator._next_index = __next__, _next_index


def hook_starting(recorder: Recorder, loaders: Loaders, data_loader: Any) -> None:
    """A new epoch: workers are started, and begin with their first batches."""
    start = data_loader.__iter__

    @unseen_by_compilers
    def __iter__(self: Any) -> Any:
        if loaders.are_elsewhere():
            return start(self)
        before = recorder.timeline.label
        with recorder.guarded:
            recorder.timeline.mark(DATA)
            loaders.starting = vars(self).setdefault("_allranks_loader", Loader())
            loaders.starting.indices.clear()
            recorder.counter.started(loaders.starting)
        try:
            iterating: Any = start(self)
            with recorder.guarded:
                iterating._allranks_loader = loaders.starting
        finally:
            with recorder.guarded:
                loaders.starting = None
                recorder.timeline.mark(before)
        return iterating

    data_loader.__iter__ = __iter__
