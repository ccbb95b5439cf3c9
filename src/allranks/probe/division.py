"""Notices, in the first steps, which ranks compute one copy of the script's model together.

They exchange activations: tensors of several dimensions, in the forward pass. Gradients are
exchanged after it, and FSDP, DDP and ZeRO gather parameters and buffers as flat tensors. Only
shapes are looked at, never values, so no device is waited for. Exchanges within compiled code are
not seen; there, the names of the axes over which parameters are divided say the same.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from threading import get_ident
from typing import Any

from allranks.probe.batches import tensors
from allranks.probe.compilers import unless_compiled, unseen_by_compilers
from allranks.probe.recorder import EARLY_STEPS, Recorder
from allranks.timing.timeline import FORWARD

LEAST_DIMS = 2  # of activations: an average loss, or a flat parameter, has fewer
LEAST_SEEN = 2  # steps: an initial exchange happens once
SUMS = ("all_reduce", "reduce", "reduce_scatter")  # beginnings of names
PEER_TO_PEER = {"send": "dst", "isend": "dst", "recv": "src", "irecv": "src"}
# Functions with which torch itself divides models (DTensor).
TENSOR_PARALLEL = "tensor-parallel"
TENSOR_AXES = ("tp", "tensor", "tensor_parallel", "mp", "model", "model_parallel")
FUNCTIONAL = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute_tensor")


class Division:
    """Who exchanges activations with whom."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        # By the ranks of an exchange, and whether it sums: in which steps it was seen.
        self._steps: defaultdict[tuple[tuple[int, ...], bool], set[int]] = defaultdict(set)
        self._written: set[tuple[tuple[int, ...], bool]] = set()

    def watch(self, function: Callable[..., Any], exchange: str) -> Callable[..., Any]:
        """Wrap a function that exchanges tensors, to look at its calls in the first steps."""
        timeline, look = self.recorder.timeline, self._look
        name, signature = getattr(function, "__name__", ""), functools.cache(inspect.signature)

        @unseen_by_compilers
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if timeline.num_steps <= EARLY_STEPS and timeline.is_on:
                with suppress(Exception):  # arguments that torch will not accept either
                    look(name, exchange, signature(function).bind(*args, **kwargs).arguments)
            return function(*args, **kwargs)

        return call

    def _look(self, name: str, exchange: str, given: dict[str, Any]) -> None:
        timeline = self.recorder.timeline
        # The stages of a pipeline send and receive in all parts of a step.
        is_forward = timeline.label == FORWARD and get_ident() == timeline.thread
        if not (is_forward or name in PEER_TO_PEER):
            return
        tensor = next(tensors(list(given.values())), None)
        if tensor is None or tensor.dim() < LEAST_DIMS:
            return
        ranks, sums = self._ranks(name, given), name.startswith(SUMS) or name in PEER_TO_PEER
        seen = self._steps[ranks, sums]
        seen.add(timeline.num_steps)
        if len(seen) >= LEAST_SEEN:
            self._write(ranks, exchange, sums)

    def look_at_axes(self, optimizer: Any) -> None:
        """Look at how the parameters are divided, as torch's distributed tensors (DTensor) say."""
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            mesh = getattr(parameter, "device_mesh", None)
            for dim, name in enumerate(getattr(mesh, "mesh_dim_names", None) or ()):
                if name in TENSOR_AXES and parameter.placements[dim].is_shard():
                    with suppress(Exception):  # a mesh that this rank is not part of
                        self._write(tuple(ranks_of((mesh, dim))), TENSOR_PARALLEL, sums=True)

    def _write(self, ranks: tuple[int, ...], exchange: str, sums: bool) -> None:
        """Say once who computes one copy of the model together."""
        key, recorder = (ranks, sums), self.recorder
        is_script = not recorder.timeline.is_taken  # a task knows, and says so itself
        if is_script and key not in self._written and len(ranks) > 1 and recorder.step > 0:
            self._written.add(key)
            recorder.write_past("divided", ranks=[*ranks], exchange=exchange, sums=sums)

    def _ranks(self, name: str, given: dict[str, Any]) -> tuple[int, ...]:
        """The ranks that take part in an exchange with these arguments."""
        import torch.distributed as dist

        ranks = ranks_of(given.get("group"))
        if name in PEER_TO_PEER:
            peer = given.get(PEER_TO_PEER[name])
            within = given.get(f"group_{PEER_TO_PEER[name]}")
            peer = ranks[within] if peer is None and within is not None else peer
            ranks = [dist.get_rank(), *([] if peer is None else [peer])]
        return tuple(sorted(ranks))


def ranks_of(group: Any) -> list[int]:
    """The ranks of a group, in any form that torch accepts; None: the default group."""
    import torch.distributed as dist

    if isinstance(group, list):
        return group
    if isinstance(group, tuple):
        group = group[0].get_group(group[1])  # one dimension of a mesh
    elif isinstance(group, str):
        c10d: Any = dist.distributed_c10d
        group = c10d._resolve_process_group(group)
    elif hasattr(group, "get_group"):
        group = group.get_group()
    return dist.get_process_group_ranks(group)


def hook_peers(division: Division) -> None:
    """Look at what ranks send to each other one by one, as the stages of a pipeline do."""
    import torch

    if not torch.distributed.is_available():
        return
    from torch.distributed import distributed_c10d

    for name in PEER_TO_PEER:
        original = getattr(distributed_c10d, name)
        hooked = unless_compiled(original, division.watch(original, "pipeline"))
        for module in (torch.distributed, distributed_c10d):  # torch checks that both are the same
            setattr(module, name, hooked)


def hook_functional(division: Division) -> None:
    """Look at the exchanges of models that torch divides, if the script has such a model."""
    functional: Any = sys.modules.get("torch.distributed._functional_collectives")
    for name, original in list(vars(functional).items()) if functional is not None else ():
        if not (name.startswith(FUNCTIONAL) and inspect.isfunction(original)):
            continue
        if "group" in inspect.signature(original).parameters:
            watched = division.watch(original, TENSOR_PARALLEL)
            setattr(functional, name, unless_compiled(original, watched))
