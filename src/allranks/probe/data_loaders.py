"""Hooks in DataLoader that record how long the script waits for a batch, and what is in it."""

from __future__ import annotations

import weakref
from collections import deque
from threading import get_ident
from time import perf_counter
from typing import Any

from allranks.probe.compilers import unseen_by_compilers
from allranks.probe.recorder import Recorder
from allranks.probe.samples import Loader, SampleCounter
from allranks.timing.timeline import COUNT_AFTER, DATA, FORWARD, OTHER

MAP_DATASET = 0  # torch's number for it


class Loaders:
    """The loaders of the script, as the hooks see them."""

    def __init__(self, recorder: Recorder, own_collate: Any) -> None:
        self.recorder = recorder
        self._own_collate = own_collate  # torch's
        self.starting: Loader | None = None  # an iterator's constructor already asks for batches
        # Not on the loaders themselves: scripts copy and send them, or forbid new attributes.
        self._known: weakref.WeakKeyDictionary[Any, Loader] = weakref.WeakKeyDictionary()

    def of(self, iterator: Any) -> Loader:
        try:
            loader: Loader = iterator._allranks_loader
        except AttributeError:
            loader = iterator._allranks_loader = self.starting or Loader(starts=1, epoch=1)
        return loader

    def of_script(self, data_loader: Any) -> Loader:
        try:
            return self._known.setdefault(data_loader, Loader())
        except TypeError:  # no hash, or no weak references
            return Loader()

    def indices_of(self, iterator: Any) -> deque[Any] | None:
        """Where to put the indices of its batches; None if they say nothing about their size."""
        # With an iterable data set, only the batch itself shows how many samples it has.
        if iterator._auto_collation and iterator._dataset_kind == MAP_DATASET:
            loader = self.of(iterator)
            # torch's function includes every sample; a script's own may leave some out.
            loader.is_checked = iterator._collate_fn is not self._own_collate
            return loader.indices
        return None


def hook_loader(recorder: Recorder) -> None:
    from torch.utils.data import dataloader

    loaders = Loaders(recorder, dataloader.default_collate)
    hook_fetching(recorder, loaders, dataloader._BaseDataLoaderIter)
    hook_starting(recorder, loaders, dataloader.DataLoader)


def hook_fetching(recorder: Recorder, loaders: Loaders, iterator: Any) -> None:
    """Record the waiting for a batch, and the indices of its samples."""
    fetch, choose = iterator.__next__, iterator._next_index

    timeline, fingerprints = recorder.timeline, recorder.fingerprints
    append = timeline.marks.append
    has_fetched, has_ended = SampleCounter.fetched, SampleCounter.ended

    @unseen_by_compilers
    def __next__(self: Any) -> Any:
        # Not if one loader reads from another: only the outer one's waiting counts.
        if not timeline.is_on or timeline.label == DATA or get_ident() != timeline.thread:
            return fetch(self)
        timeline.label = DATA  # marks, without the calls
        event = None if timeline.record_event is None else timeline.record_event()
        append((DATA, perf_counter(), event, None))
        try:
            batch = fetch(self)
        except BaseException:
            with recorder.guarded:
                timeline.mark(OTHER, (has_ended, loaders.of(self)))
                timeline.shorten()
            raise
        try:
            try:
                loader = self._allranks_loader
            except AttributeError:
                loader = loaders.of(self)
            samples = loader.fetched(batch, fingerprints)
            timeline.label = FORWARD
            event = None if timeline.record_event is None else timeline.record_event()
            append((FORWARD, perf_counter(), event, (has_fetched, loader, samples)))
            timeline.calls += 1
            if timeline.calls > COUNT_AFTER:
                timeline.shorten()
        except Exception as error:
            recorder.switch_off(error)
        return batch

    def _next_index(self: Any) -> Any:
        index = choose(self)
        try:
            indices = self._allranks_indices
        except AttributeError:
            indices = None
            with recorder.guarded:
                indices = self._allranks_indices = loaders.indices_of(self)
        if indices is not None and timeline.is_on:
            indices.append(index)
        return index

    iterator.__next__, iterator._next_index = __next__, _next_index


def hook_starting(recorder: Recorder, loaders: Loaders, data_loader: Any) -> None:
    """Record the start of an epoch, when workers start and load their first batches."""
    start = data_loader.__iter__

    @unseen_by_compilers
    def __iter__(self: Any) -> Any:
        before = recorder.timeline.label
        if not recorder.is_on or before == DATA or get_ident() != recorder.timeline.thread:
            return start(self)
        with recorder.guarded:
            loader = loaders.starting = loaders.of_script(self)
            loader.started()
            if loader.starts == 1:
                loader.dataset_samples = length(self.dataset)
            recorder.timeline.mark(DATA, (SampleCounter.started, loader))
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


def length(dataset: Any) -> int | None:
    """The length of a data set; None if it has none, or if asking for it fails."""
    try:
        return len(dataset)
    except Exception:
        return None
