"""The probe in torch, taken out and put back: for benchmarks with it and without it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer as optimizers
from torch.utils.data import dataloader

from allranks.probe import hooks
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
