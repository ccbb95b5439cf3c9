"""Hooks in DataLoader that record how long the script waits for a batch, and what is in it."""

from __future__ import annotations

import weakref
from collections import deque
from threading import get_ident
from time import perf_counter
from typing import Any

from torch import is_grad_enabled as has_gradients
from torch.utils.data import BatchSampler

from allranks.probe.compilers import unseen_by_compilers
from allranks.probe.loaders import Loader, Pass
from allranks.probe.recorder import Recorder
from allranks.probe.samples import SampleCounter
from allranks.timing.timeline import COUNT_AFTER, DATA, FORWARD, OTHER

MAP_DATASET = 0  # torch's number for it
SETTINGS = ("num_workers", "batch_size", "pin_memory", "persistent_workers", "prefetch_factor")


class Loaders:
    """The loaders of the script, as the hooks see them."""

    def __init__(self, own_collate: Any) -> None:
        self._own_collate = own_collate  # torch's
        self.starting: Pass | None = None  # an iterator's constructor already asks for batches
        self._open: list[Pass] = []  # passes that may continue
        # Not on the loaders themselves: scripts copy and send them, or forbid new attributes.
        self._known: weakref.WeakKeyDictionary[Any, Loader] = weakref.WeakKeyDictionary()

    def of(self, iterator: Any) -> Pass:
        try:
            one: Pass = iterator._allranks_pass
        except AttributeError:
            one = iterator._allranks_pass = self.starting or Pass(Loader(starts=1))
        return one

    def start(self, data_loader: Any) -> tuple[Pass, list[Pass]]:
        """A new pass over a loader, and the passes that can no longer continue."""
        try:
            loader = self._known.setdefault(data_loader, Loader())
        except TypeError:  # no hash, or no weak references
            loader = Loader()
        if not loader.starts:
            self._look(loader, data_loader)
        loader.started()
        again = getattr(data_loader, "_iterator", None)  # workers that stay are started again
        iterators = [(one, one.iterator and one.iterator()) for one in self._open]
        left = [one for one, iterator in iterators if iterator is None or iterator is again]
        new = self.starting = Pass(loader)
        self._open = [*(one for one in self._open if one not in left), new]
        return new, left

    def _look(self, loader: Loader, data_loader: Any) -> None:
        """What a loader says about itself."""
        loader.dataset = id(data_loader.dataset)
        loader.settings = settings_of(data_loader)
        loader.is_collated = data_loader._auto_collation
        loader.is_checked = data_loader.collate_fn is not self._own_collate
        if data_loader._dataset_kind != MAP_DATASET:
            loader.batch_size = data_loader.batch_size
            return
        loader.length = length(data_loader)
        loader.pass_samples = None
        if loader.is_collated and type(data_loader.batch_sampler) is BatchSampler:
            drops, size = data_loader.drop_last, data_loader.batch_size
            whole = loader.length and size and loader.length * size
            loader.pass_samples = whole if drops else length(data_loader.sampler)

    def indices_of(self, iterator: Any) -> deque[Any] | None:
        """Where to put the indices of its batches; None if they say nothing about their size."""
        # With an iterable data set, only the batch itself shows how many samples it has.
        if iterator._dataset_kind == MAP_DATASET:
            return self.of(iterator).loader.indices
        return None


def hook_loader(recorder: Recorder) -> None:
    from torch.utils.data import dataloader

    loaders = Loaders(dataloader.default_collate)
    hook_fetching(recorder, loaders, dataloader._BaseDataLoaderIter)
    hook_starting(recorder, loaders, dataloader.DataLoader)


def hook_fetching(recorder: Recorder, loaders: Loaders, iterator: Any) -> None:
    """Record the waiting for a batch, and the indices of its samples."""
    fetch, choose = iterator.__next__, iterator._next_index

    timeline, fingerprints = recorder.timeline, recorder.fingerprints
    append = timeline.marks.append
    has_fetched, has_ended = SampleCounter.fetched, SampleCounter.ended

    fetch_elsewhere = fetching_elsewhere(recorder, loaders, fetch)

    @unseen_by_compilers
    def __next__(self: Any) -> Any:
        if not timeline.is_on:
            return fetch(self)
        if get_ident() != timeline.thread:
            return fetch_elsewhere(self)
        if timeline.label == DATA:  # one loader reads from another: only the outer one counts
            return fetch(self)
        timeline.label = DATA  # marks, without the calls
        event = None if timeline.record_event is None else timeline.record_event()
        append((DATA, perf_counter(), event, None))
        try:
            batch = fetch(self)
        except BaseException as error:
            with recorder.guarded:
                ended = (has_ended, loaders.of(self)) if type(error) is StopIteration else None
                timeline.mark(OTHER, ended)
                timeline.shorten()
            raise
        try:
            try:
                one = self._allranks_pass
            except AttributeError:
                one = loaders.of(self)
            samples = one.loader.fetched(batch, fingerprints)
            timeline.label = FORWARD
            event = None if timeline.record_event is None else timeline.record_event()
            append((FORWARD, perf_counter(), event, (has_fetched, one, samples, has_gradients())))
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


def fetching_elsewhere(recorder: Recorder, loaders: Loaders, fetch: Any) -> Any:
    """Wrap the fetching of batches in a thread other than the training thread."""
    told = recorder.counter.elsewhere.append

    def fetch_elsewhere(self: Any) -> Any:
        try:
            batch = fetch(self)
        except StopIteration:
            with recorder.guarded:
                told((SampleCounter.ended, loaders.of(self)))
            raise
        with recorder.guarded:
            one = loaders.of(self)
            told((SampleCounter.fetched, one, one.loader.fetched(batch, recorder.fingerprints)))
        return batch

    return fetch_elsewhere


def hook_starting(recorder: Recorder, loaders: Loaders, data_loader: Any) -> None:
    """Record the start of an epoch, when workers start and load their first batches."""
    start, timeline = data_loader.__iter__, recorder.timeline

    @unseen_by_compilers
    def __iter__(self: Any) -> Any:
        before, is_elsewhere = timeline.label, get_ident() != timeline.thread
        if not timeline.is_on or (before == DATA and not is_elsewhere):
            return start(self)
        with recorder.guarded:
            for call in list(recorder.at_loading):
                call()
            new, left = loaders.start(self)
            if is_elsewhere:
                recorder.counter.elsewhere.append((SampleCounter.started, new, left))
            else:
                timeline.mark(DATA, (SampleCounter.started, new, left, has_gradients()))
        try:
            iterating: Any = start(self)
            with recorder.guarded:
                iterating._allranks_pass = new
                new.iterator = weakref.ref(iterating)
        finally:
            with recorder.guarded:
                loaders.starting = None
                if not is_elsewhere:
                    timeline.mark(before)
        return iterating

    data_loader.__iter__ = __iter__


def settings_of(data_loader: Any) -> dict[str, Any]:
    """How a loader was made, as far as that matters for its speed; a subclass may lack some."""
    found = {name: getattr(data_loader, name, None) for name in SETTINGS}
    context = getattr(data_loader, "multiprocessing_context", None)
    found["multiprocessing_context"] = getattr(context, "_name", None)
    found["iterable"] = getattr(data_loader, "_dataset_kind", MAP_DATASET) != MAP_DATASET or None
    kinds = (bool, int, str)
    return {name: value for name, value in found.items() if isinstance(value, kinds)}


def length(counted: Any) -> int | None:
    """The length of an object; None if it has none, or if len() fails."""
    try:
        return len(counted)
    except Exception:
        return None
