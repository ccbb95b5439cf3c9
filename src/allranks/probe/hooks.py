"""Where torch is made to tell the probe what it is doing. Nothing here changes what torch computes.

Every hook catches what fails in its own work: the probe is switched off then, and the script goes
on as if it had never been there. Hooks run cold between a model's kernels, so they make few calls.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Callable
from threading import get_ident
from time import perf_counter
from typing import Any

from allranks.probe.loading import hook_loader
from allranks.probe.recorder import Recorder
from allranks.probe.samples import SampleCounter, num_samples
from allranks.probe.traced import Called, unless_compiled, unseen_by_compilers
from allranks.timeline import AFTER, BACKWARD, FORWARD, MAX_MARKS, OPTIMIZER, OTHER, WAIT

Hook = Callable[..., Any]

SYNCHRONOUS = (
    *("all_reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter"),
    *("reduce_scatter_tensor", "broadcast", "reduce", "all_to_all", "all_to_all_single", "barrier"),
)
TRAINED = (SampleCounter.trained,)


def install(recorder: Recorder) -> Arrival:
    """Hook into torch, which has just been imported."""
    from torch.optim import optimizer

    arrival = Arrival(recorder)
    recorder.at_first_step.append(functools.partial(after_first_step, recorder, arrival))
    hook_optimizer(recorder, optimizer)
    hook_backward(recorder, arrival)
    hook_loader(recorder)
    hook_waiting(recorder)
    hook_ddp(recorder)
    hook_graphs(recorder)
    hide_from_compilers()
    return arrival


def hook_optimizer(recorder: Recorder, optimizer_module: Any) -> None:
    timeline = recorder.timeline
    around: list[str] = []  # what the steps that are under way interrupt, where it is not the end

    @unseen_by_compilers
    def before(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not recorder.is_on:
            return
        try:
            # Within a backward pass, or within the step of an optimizer that holds this one.
            label = timeline.label
            if label == AFTER:  # the rest of the step is the update's: no mark is needed
                timeline.label = OPTIMIZER
                return
            around.append(label if label in (BACKWARD, OPTIMIZER) else OTHER)
            if len(args) == 1 and not kwargs:  # a closure computes the gradients first
                timeline.mark(OPTIMIZER)
        except Exception as error:
            recorder.switch_off(error)

    @unseen_by_compilers
    def after(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if recorder.is_on:
            try:
                recorder.stepped(optimizer)
                label = around.pop() if around else OTHER
                if timeline.label != label:
                    timeline.mark(label)
            except Exception as error:
                recorder.switch_off(error)
        if recorder.leave is not None:  # the script is to end here
            recorder.leave()

    optimizer_module.register_optimizer_step_pre_hook(before)
    optimizer_module.register_optimizer_step_post_hook(after)


def after_first_step(recorder: Recorder, arrival: Arrival, optimizer: Any) -> None:
    """What can be hooked into only now that the script has shown what it uses."""
    hook_tensor_waits(recorder)
    if recorder.peers:
        arrival.settle(optimizer)
    if recorder.counter.training is None and not recorder.timeline.is_taken:
        watch_model(recorder, optimizer)


class Arrival:
    """The moment in a backward pass when this rank has computed all its gradients.

    Callbacks of the autograd engine run when all is computed, in the order in which they were
    queued. One that is queued before the last gradient is there runs before DDP waits in its own.
    A hook on the loss can do that, but making one for every loss takes 40 us: once a parameter is
    known to get a gradient, a hook that stays on it does. If it ever gets none, losses do again.
    """

    def __init__(self, recorder: Recorder) -> None:
        import torch

        self.recorder = recorder
        self._mark = recorder.timeline.mark
        self._queue = torch.autograd.Variable._execution_engine.queue_callback
        self._arrive = self.arrive
        self._tensor_type = torch.Tensor
        self._parameter: Any = None
        self._on_parameter: Any = None  # the hook that stays on it
        self._is_queued = False

    def expect(self, tensors: Any) -> Any:
        """A backward pass begins; the hook to be removed after it, if any."""
        was_queued, self._is_queued = self._is_queued, False
        if self._on_parameter is not None:
            if was_queued:
                return None
            self.let_go()
        root = tensors[0] if isinstance(tensors, list | tuple) and tensors else tensors
        if isinstance(root, self._tensor_type) and root.grad_fn is not None:
            return root.grad_fn.register_prehook(self.queue)
        return None

    def settle(self, optimizer: Any) -> None:
        """Stay on a parameter, if there is one that has got a gradient."""
        for group in reversed(optimizer.param_groups):
            for parameter in reversed(group["params"]):
                if parameter.grad is not None and parameter.requires_grad:
                    self._parameter = parameter
                    self.take_hold()
                    return

    def take_hold(self) -> None:
        if self._parameter is not None:
            self._on_parameter = self._parameter.register_hook(self.queue)
            self._is_queued = True  # nothing to blame it for yet

    def let_go(self) -> None:
        if self._on_parameter is not None:
            self._on_parameter.remove()
            self._on_parameter = None

    def queue(self, gradients: Any) -> None:
        try:
            if not self._is_queued:
                self._is_queued = True
                self._queue(self._arrive)
        except Exception as error:
            self.recorder.switch_off(error)

    def arrive(self) -> None:
        try:
            self._mark(WAIT)
        except Exception as error:
            self.recorder.switch_off(error)


def hook_backward(recorder: Recorder, arrival: Arrival) -> None:
    """Every backward pass."""
    import torch

    original, timeline = torch.autograd.backward, recorder.timeline
    append = timeline.marks.append

    @unseen_by_compilers
    @functools.wraps(original)
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        # A backward pass within another one recomputes activations.
        if not recorder.is_on or timeline.label == BACKWARD or get_ident() != timeline.thread:
            return original(tensors, *args, **kwargs)
        handle = None
        try:
            if recorder.peers is not False and recorder.has_peers():
                handle = arrival.expect(tensors)
            timeline.label = BACKWARD  # marks, without the calls
            event = None if timeline.record_event is None else timeline.record_event()
            append((BACKWARD, perf_counter(), event, TRAINED))
        except Exception as error:
            recorder.switch_off(error)
        try:
            return original(tensors, *args, **kwargs)
        finally:
            try:
                timeline.label = AFTER
                event = None if timeline.record_event is None else timeline.record_event()
                append((AFTER, perf_counter(), event, None))
                if handle is not None:
                    handle.remove()
                if len(timeline.marks) > MAX_MARKS:
                    timeline.shorten()
            except Exception as error:
                recorder.switch_off(error)

    torch.autograd.backward = backward


def hook_waiting(recorder: Recorder) -> None:
    """Waiting for an exchange that the script has started itself."""
    import torch

    if not torch.distributed.is_available():
        return
    from torch.distributed.distributed_c10d import Work

    Work.wait = waiting(recorder, Work.wait)  # type: ignore[method-assign]
    # With NCCL these wait on the stream, and give no Work to wait for.
    for name in SYNCHRONOUS:
        for module in (torch.distributed, torch.distributed.distributed_c10d):
            function = getattr(module, name, None)
            if function is not None:
                setattr(module, name, unless_compiled(function, waiting(recorder, function)))


def hook_tensor_waits(recorder: Recorder) -> None:
    """Waiting for the exchanges of DTensors, if the script has any."""
    collectives: Any = sys.modules.get("torch.distributed._functional_collectives")
    if collectives is not None:
        wait = collectives.wait_tensor
        collectives.wait_tensor = unless_compiled(wait, waiting(recorder, wait))
    sharded: Any = sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_param_group")
    group = getattr(sharded, "FSDPParamGroup", None)
    if group is not None and hasattr(
        group, "wait_for_unshard"
    ):  # on a GPU it waits on the stream, for no Work
        group.wait_for_unshard = waiting(recorder, group.wait_for_unshard)


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


def hook_graphs(recorder: Recorder) -> None:
    """While a CUDA graph is captured, no other thread may ask the device how far it is."""
    from torch.cuda import CUDAGraph

    graph: Any = CUDAGraph
    begin, end = graph.capture_begin, graph.capture_end

    @functools.wraps(begin)
    def capture_begin(self: Any, *args: Any, **kwargs: Any) -> Any:
        with recorder.guarded:
            recorder.pause(True)
        return begin(self, *args, **kwargs)

    @functools.wraps(end)
    def capture_end(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return end(self, *args, **kwargs)
        finally:
            with recorder.guarded:
                recorder.pause(False)

    graph.capture_begin, graph.capture_end = capture_begin, capture_end


def waiting(recorder: Recorder, function: Hook) -> Hook:
    """The same function, the time in which counts as waiting for other ranks."""

    timeline = recorder.timeline

    @unseen_by_compilers
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        before = timeline.label
        if not recorder.is_on or before == WAIT:
            return function(*args, **kwargs)
        # In a backward pass on a GPU torch calls from a thread of its own; the training waits.
        if get_ident() != timeline.thread and before != BACKWARD:
            return function(*args, **kwargs)
        if not recorder.has_peers():  # DDP exchanges with itself, too
            return function(*args, **kwargs)
        if before == OPTIMIZER:  # it may have begun without a mark
            timeline.mark(OPTIMIZER)
        timeline.mark(WAIT)
        try:
            return function(*args, **kwargs)
        finally:
            timeline.mark(before)

    return call


def watch_model(recorder: Recorder, optimizer: Any) -> None:
    """Count samples by what the model is called with, in a script that trains on no DataLoader."""
    import torch

    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    is_module: dict[type, bool] = {}  # there are a million objects, and few types
    modules: list[Any] = []
    for one in gc.get_objects():
        kind = type(one)
        if kind not in is_module:
            is_module[kind] = issubclass(kind, torch.nn.Module)
        if is_module[kind]:
            modules.append(one)
    # Whatever holds all that is trained lies in the outermost module that does: look at no other.
    inner = {id(child) for one in modules for child in one._modules.values()}
    outermost = [
        one
        for one in modules
        if id(one) not in inner and trained <= {id(p) for p in one.parameters()}
    ]

    @unseen_by_compilers
    def called(inputs: list[Any]) -> None:
        with recorder.guarded:
            if recorder.is_on and torch.is_grad_enabled():
                recorder.timeline.mark(FORWARD, (SampleCounter.computed, num_samples(inputs)))

    for module in outermost:
        module.register_forward_pre_hook(Called(called), with_kwargs=True)


def hide_from_compilers() -> None:
    """Have torch.compile skip what the hooks call, once it is imported: it is big."""
    rules: Any = sys.modules.get("torch._dynamo.trace_rules")
    if rules is not None:
        for part in ("hooks", "loading", "recorder", "samples", "surroundings", "window"):
            rules.add(f"allranks.probe.{part}")
        rules.add("allranks.timeline")
        rules.add("allranks.events")
