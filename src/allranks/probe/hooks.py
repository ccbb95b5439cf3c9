"""Where torch is made to tell the probe what it is doing. Nothing here changes what torch computes.

Every hook does its own work inside `guarded`: if that fails, the probe is switched off and the
script goes on as if it had never been there.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Callable
from typing import Any

from allranks.probe.recorder import Recorder
from allranks.probe.samples import Loader
from allranks.timeline import AFTER, BACKWARD, DATA, FORWARD, OPTIMIZER, OTHER, WAIT

Hook = Callable[..., Any]


def install(recorder: Recorder) -> None:
    """Hook into torch, which has just been imported."""
    from torch.optim import optimizer

    hook_optimizer(recorder, optimizer)
    hook_backward(recorder)
    hook_loader(recorder)
    hook_waiting(recorder)
    hook_ddp(recorder)


def hook_optimizer(recorder: Recorder, optimizer_module: Any) -> None:
    timeline = recorder.timeline
    around: list[str] = []  # what the steps that are under way interrupt

    @unseen_by_compilers
    def before(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        with recorder.guarded:
            if not recorder.is_on:
                return
            # Within a backward pass, or within the step of an optimizer that holds this one.
            around.append(timeline.label if timeline.label in (BACKWARD, OPTIMIZER) else OTHER)
            closure = args[1] if len(args) > 1 else kwargs.get("closure")
            if closure is None:  # a closure computes the gradients first
                timeline.mark(OPTIMIZER)

    @unseen_by_compilers
    def after(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        with recorder.guarded:
            if recorder.is_on:
                if recorder.step == 0:
                    hook_tensor_waits(recorder)
                    if recorder.counter.training is None:
                        watch_model(recorder, optimizer)
                recorder.stepped(optimizer)
                label = around.pop() if around else OTHER
                if timeline.label != label:
                    timeline.mark(label)
        recorder.leave_if_done()

    optimizer_module.register_optimizer_step_pre_hook(before)
    optimizer_module.register_optimizer_step_post_hook(after)


def hook_backward(recorder: Recorder) -> None:
    """Every backward pass, and the moment in it when this rank has computed all its gradients.

    Callbacks of the autograd engine run when all is computed, in the order in which they were
    queued. The one that is queued first, by a hook on the loss, runs before DDP waits in its own.
    """
    import torch

    original = torch.autograd.backward
    engine = torch.autograd.Variable._execution_engine

    def arrive() -> None:
        with recorder.guarded:
            recorder.timeline.mark(WAIT)

    def queue_arrival(gradient: Any) -> None:
        with recorder.guarded:
            engine.queue_callback(arrive)

    @unseen_by_compilers
    @functools.wraps(original)
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        timeline = recorder.timeline
        # A backward pass within another one recomputes activations.
        if not recorder.is_on or timeline.label == BACKWARD or not timeline.is_mine():
            return original(tensors, *args, **kwargs)
        handle = None
        with recorder.guarded:
            root = tensors[0] if isinstance(tensors, list | tuple) and tensors else tensors
            if recorder.has_peers() and isinstance(root, torch.Tensor) and root.requires_grad:
                handle = root.register_hook(queue_arrival)
            recorder.counter.trained()
            timeline.mark(BACKWARD)
        try:
            return original(tensors, *args, **kwargs)
        finally:
            with recorder.guarded:
                timeline.mark(AFTER)
                if handle is not None:
                    handle.remove()

    torch.autograd.backward = backward


def hook_loader(recorder: Recorder) -> None:
    """Waiting for batches, and what is in them."""
    from torch.utils.data import dataloader

    iterator: Any = dataloader._BaseDataLoaderIter
    fetch, choose, start = iterator.__next__, iterator._next_index, dataloader.DataLoader.__iter__

    starting: list[Loader] = []  # an iterator asks for its first batches while it is being made

    def loader_of(self: Any) -> Loader:
        loader: Loader | None = getattr(self, "_allranks_loader", None)
        return loader or (starting[-1] if starting else Loader(epoch=1))

    def is_elsewhere() -> bool:
        """Not training, or within the loading of a batch for training."""
        timeline = recorder.timeline
        return not recorder.is_on or timeline.label == DATA or not timeline.is_mine()

    @unseen_by_compilers
    def __next__(self: Any) -> Any:
        if is_elsewhere():
            return fetch(self)
        with recorder.guarded:
            recorder.timeline.mark(DATA)
        try:
            batch = fetch(self)
        except BaseException:
            with recorder.guarded:
                loader_of(self).ended = True
                recorder.timeline.mark(OTHER)
            raise
        with recorder.guarded:
            recorder.counter.fetched(loader_of(self), batch)
            recorder.timeline.mark(FORWARD)
        return batch

    def _next_index(self: Any) -> Any:
        index = choose(self)
        with recorder.guarded:
            # Of an iterable data set only the batch itself tells how long it is.
            if recorder.is_on and self._auto_collation and self._dataset_kind == 0:
                loader_of(self).indices.append(index)
        return index

    @unseen_by_compilers
    def __iter__(self: Any) -> Any:
        if is_elsewhere():
            return start(self)
        before = recorder.timeline.label
        with recorder.guarded:
            recorder.timeline.mark(DATA)  # workers are started here, and make a first batch
            loader = vars(self).setdefault("_allranks_loader", Loader())
            loader.indices.clear()
            recorder.counter.started(loader)
            starting.append(loader)
        try:
            iterating: Any = start(self)
        finally:
            with recorder.guarded:
                starting.clear()
                recorder.timeline.mark(before)
        with recorder.guarded:
            iterating._allranks_loader = loader
        return iterating

    iterator.__next__, iterator._next_index = __next__, _next_index
    dataloader.DataLoader.__iter__ = __iter__  # type: ignore[method-assign]


def hook_waiting(recorder: Recorder) -> None:
    """Waiting for an exchange that the script has started itself."""
    import torch

    if not torch.distributed.is_available():
        return
    from torch.distributed.distributed_c10d import Work

    Work.wait = waiting(recorder, Work.wait)  # type: ignore[method-assign]


def hook_tensor_waits(recorder: Recorder) -> None:
    """Waiting for the exchanges of DTensors, if the script has any."""
    collectives: Any = sys.modules.get("torch.distributed._functional_collectives")
    if collectives is None:
        return
    from torch.compiler import is_compiling

    original, timed = collectives.wait_tensor, waiting(recorder, collectives.wait_tensor)

    @functools.wraps(original)
    def wait_tensor(tensor: Any) -> Any:
        # A compiler must see what it saw without us: the operation itself.
        return original(tensor) if is_compiling() else timed(tensor)

    collectives.wait_tensor = wait_tensor


def hook_ddp(recorder: Recorder) -> None:
    """What DDP exchanges outside of its reducer: buffers, and gradients through a user's hook."""
    from torch.nn.parallel import DistributedDataParallel

    ddp: Any = DistributedDataParallel
    register = ddp.register_comm_hook

    @functools.wraps(register)
    def register_comm_hook(self: Any, state: object, hook: Hook) -> Any:
        return register(self, state, waiting(recorder, hook) if callable(hook) else hook)

    ddp.register_comm_hook = register_comm_hook
    ddp._sync_buffers = waiting(recorder, ddp._sync_buffers)


def waiting(recorder: Recorder, function: Hook) -> Hook:
    """The same function, the time in which counts as waiting for other ranks."""

    @unseen_by_compilers
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        timeline = recorder.timeline
        if not recorder.is_on or timeline.label == WAIT or not timeline.is_mine():
            return function(*args, **kwargs)
        before = timeline.label
        with recorder.guarded:
            timeline.mark(WAIT)
        try:
            return function(*args, **kwargs)
        finally:
            with recorder.guarded:
                timeline.mark(before)

    return call


def watch_model(recorder: Recorder, optimizer: Any) -> None:
    """Count samples by what the model is called with, in a script that trains on no DataLoader."""
    import torch

    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    modules = [one for one in gc.get_objects() if issubclass(type(one), torch.nn.Module)]
    owners = [one for one in modules if trained <= {id(p) for p in one.parameters()}]
    inner = {id(child) for one in owners for child in list(one.modules())[1:]}
    outermost = [one for one in owners if id(one) not in inner]

    @unseen_by_compilers
    def called(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        with recorder.guarded:
            if recorder.is_on and torch.is_grad_enabled():
                if recorder.timeline.label in (OTHER, AFTER):
                    recorder.timeline.mark(FORWARD)
                if recorder.counter.training is None:
                    recorder.counter.computed([*args, *kwargs.values()])

    for module in outermost:
        module.register_forward_pre_hook(called, with_kwargs=True)


def unseen_by_compilers(function: Hook) -> Hook:
    """Have torch.compile call this as it is: traced, it would be compiled anew at every step."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function
