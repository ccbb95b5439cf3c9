"""Removes the probe from torch and puts it back, for benchmarks with and without it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer as optimizers
from torch.utils.data import DataLoader, Dataset, dataloader

from allranks.probe import backward_pass, hooks
from allranks.probe.recorder import Recorder

# Where the probe puts functions of its own in place of torch's.
PLACES: list[tuple[Any, str]] = [
    (torch.autograd, "backward"),
    (dataloader._BaseDataLoaderIter, "__next__"),
    (dataloader._BaseDataLoaderIter, "_next_index"),
    (dataloader.DataLoader, "__iter__"),
    (dist.Work, "wait"),
    (DistributedDataParallel, "_sync_buffers"),
]
REGISTRIES: list[Any] = [
    optimizers._global_optimizer_pre_hooks,
    optimizers._global_optimizer_post_hooks,
]
Function = Callable[..., Any]


class Switch:
    """The probe in torch, to be taken out and put back between steps."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        own = [getattr(holder, name) for holder, name in PLACES]
        self._arrival = hooks.install(recorder)
        self._places = [
            (holder, name, getattr(holder, name), before)
            for (holder, name), before in zip(PLACES, own, strict=True)
        ]
        changed = [name for _, name, hooked, before in self._places if hooked is not before]
        assert len(changed) == len(PLACES), changed
        self._registered = [dict(registry) for registry in REGISTRIES]
        assert all(self._registered)

    def turn(self, *, on: bool) -> None:
        for holder, name, hooked, before in self._places:
            setattr(holder, name, hooked if on else before)
        for registry, registered in zip(REGISTRIES, self._registered, strict=True):
            registry.clear()
            if on:
                registry.update(registered)
        self._arrival.let_go()
        if on:
            self._arrival.take_hold()
            self.recorder.timeline.restart()


@dataclass(frozen=True, slots=True)
class Functions:
    """What is called in the places where a plain loop meets the probe."""

    arrival: backward_pass.Arrival | None  # of the probe that these are of
    backward: Function
    next_batch: Function
    next_index: Function
    iterate: Function
    before_step: Function | None = None
    after_step: Function | None = None

    @classmethod
    def in_place(cls, arrival: backward_pass.Arrival | None = None) -> Functions:
        """The functions that are there now."""
        of_steps = (next(iter(registry.values()), None) for registry in REGISTRIES)
        in_torch = (getattr(holder, name) for holder, name in PLACES[:4])
        return cls(arrival, *in_torch, *of_steps)

    def put(self) -> None:
        """Put them in place, so that the probe can be installed over them."""
        for (holder, name), function in zip(PLACES[:4], self._of_torch(), strict=True):
            setattr(holder, name, function)
        for registry in REGISTRIES:
            registry.clear()

    def within(self, wrap: Callable[[Function], Function]) -> Functions:
        """Each of them wrapped; a function that does nothing where there is none."""
        of_steps = (self.before_step or nothing_of, self.after_step or nothing_of)
        return Functions(self.arrival, *map(wrap, (*self._of_torch(), *of_steps)))

    def loader(self) -> type[DataLoader[Any]]:
        """A loader that calls these, as torch's own does when they are put in it."""

        class Batches(dataloader._SingleProcessDataLoaderIter):
            __next__, _next_index = self.next_batch, self.next_index

        class Loader(DataLoader[Any]):
            __iter__ = self.iterate

            def _get_iterator(self) -> Any:
                return Batches(self)

        return Loader

    def _of_torch(self) -> tuple[Function, ...]:
        return self.backward, self.next_batch, self.next_index, self.iterate


class Turns:
    """Functions that take turns from step to step.

    Python remembers what it has found in a class until the class is changed, and then needs 200 us
    to find it again in the next steps. So no class is changed: each set has its own loaders.
    """

    def __init__(self, *functions: Functions) -> None:
        self._functions = functions
        self._now = 0

    def take(self, number: int) -> None:
        """Put the functions with this number in place."""
        self._now = number
        functions = self._functions[number]
        torch.autograd.backward = functions.backward
        of_steps = (functions.before_step, functions.after_step)
        for registry, function in zip(REGISTRIES, of_steps, strict=True):
            registry.clear()
            if function is not None:
                registry[0] = function
        for other in self._functions:
            if other.arrival is not None:
                other.arrival.let_go()
        if functions.arrival is not None:
            functions.arrival.take_hold()
            functions.arrival.recorder.timeline.restart()

    def batches(self, data: Dataset[Any], batch_size: int) -> Iterator[Any]:
        """Batches without end, each from the loader whose turn it is."""
        loaders = [one.loader()(data, batch_size=batch_size) for one in self._functions]
        iterators = [iter(loader) for loader in loaders]
        while True:
            number = self._now
            try:
                yield next(iterators[number])
            except StopIteration:
                iterators[number] = iter(loaders[number])


def nothing_of(*_: Any) -> None:
    pass
