"""Where torch is made to tell the probe what it is doing. Nothing here changes what torch computes.

Every hook catches what fails in its own work: the probe is switched off then, and the script goes
on as if it had never been there. Hooks run cold between a model's kernels, so they make few calls.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from threading import get_ident
from time import perf_counter
from typing import Any

from allranks.probe.loading import hook_loader
from allranks.probe.models import watch_model
from allranks.probe.recorder import Recorder
from allranks.probe.samples import SampleCounter
from allranks.probe.traced import hide_from_compilers, unless_compiled, unseen_by_compilers
from allranks.timeline import AFTER, AROUND, BACKWARD, MAX_MARKS, OPTIMIZER, OTHER, WAIT

Hook = Callable[..., Any]

SYNCHRONOUS = (
    *("all_reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter"),
    *("reduce_scatter_tensor", "broadcast", "reduce", "all_to_all", "all_to_all_single", "barrier"),
)
# The same, and others, as a process group calls them.
EXCHANGES = (
    *("allreduce", "allreduce_coalesced", "allgather", "_allgather_base", "allgather_coalesced"),
    *("allgather_into_tensor_coalesced", "reduce_scatter", "_reduce_scatter_base"),
    *("reduce_scatter_tensor_coalesced", "broadcast", "reduce", "alltoall", "alltoall_base"),
    *("barrier", "gather", "scatter"),
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
    arrival.later.append(hook_waiting(recorder))
    hook_groups(recorder)
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
    for call in arrival.later:
        call()
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

    A pass within a pass, which recomputes activations, has callbacks of its own; DDP waits in those
    of the pass that the last gradient comes from. So each of them may be waiting at its end.
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
        self.depth = 0  # of passes within passes
        self.later: list[Callable[[], None]] = []  # hooks to be made when a step has been made

    def expect(self, tensors: Any) -> Any:
        """A backward pass begins; the hook to be removed after it, if any."""
        was_queued, self._is_queued = self._is_queued, False
        if self._on_parameter is not None:
            if was_queued:
                return None
            self.let_go()
        return self.watch(tensors, self.queue)

    def watch(self, tensors: Any, queue: Hook) -> Any:
        """A hook on what a pass begins with."""
        root = tensors[0] if isinstance(tensors, list | tuple) and tensors else tensors
        if isinstance(root, self._tensor_type) and root.grad_fn is not None:
            return root.grad_fn.register_prehook(queue)
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
            if not self._is_queued and self.depth == 1:
                self._is_queued = True
                self._queue(self._arrive)
        except Exception as error:
            self.recorder.switch_off(error)

    def queue_within(self, gradients: Any) -> None:
        try:
            self._queue(self._arrive)
        except Exception as error:
            self.recorder.switch_off(error)

    def arrive(self) -> None:
        try:
            self._mark(WAIT)
        except Exception as error:
            self.recorder.switch_off(error)


def pass_within(recorder: Recorder, arrival: Arrival, original: Hook) -> Hook:
    """A backward pass within another one; what it waits for at its end is waited for there."""
    timeline = recorder.timeline

    def within(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        handle, before = None, timeline.label
        arrival.depth += 1
        try:
            if recorder.is_on and recorder.peers:
                handle = arrival.watch(tensors, arrival.queue_within)
        except Exception as error:
            recorder.switch_off(error)
        try:
            return original(tensors, *args, **kwargs)
        finally:
            arrival.depth = max(0, arrival.depth - 1)
            if handle is not None:
                handle.remove()
                if timeline.label != before:
                    timeline.mark(before)

    return within


def hook_backward(recorder: Recorder, arrival: Arrival) -> None:
    """Every backward pass."""
    import torch

    original, timeline = torch.autograd.backward, recorder.timeline
    append = timeline.marks.append
    within = pass_within(recorder, arrival, original)

    @unseen_by_compilers
    @functools.wraps(original)
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if arrival.depth:
            return within(tensors, *args, **kwargs)
        if not recorder.is_on or get_ident() != timeline.thread:
            return original(tensors, *args, **kwargs)
        handle = None
        arrival.depth = 1
        try:
            peers = recorder.peers
            if peers or (peers is None and recorder.has_peers()):
                handle = arrival.expect(tensors)
            timeline.label = BACKWARD  # marks, without the calls
            event = None if timeline.record_event is None else timeline.record_event()
            append((BACKWARD, perf_counter(), event, TRAINED))
        except Exception as error:
            recorder.switch_off(error)
        try:
            return original(tensors, *args, **kwargs)
        finally:
            arrival.depth = 0
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


def hook_waiting(recorder: Recorder) -> Callable[[], None]:
    """Waiting for an exchange that the script has started itself.

    What is returned hooks into those that the script has put its own in the place of.
    """
    import torch

    if not torch.distributed.is_available():
        return lambda: None
    from torch.distributed.distributed_c10d import Work

    Work.wait = waiting(recorder, Work.wait)  # type: ignore[method-assign]
    hooked: dict[tuple[Any, str], Hook] = {}

    def hook() -> None:
        for name in SYNCHRONOUS:
            for module in (torch.distributed, torch.distributed.distributed_c10d):
                function = getattr(module, name, None)
                if function is not None and function is not hooked.get((module, name)):
                    timed = unless_compiled(function, around(recorder, function))
                    hooked[module, name] = timed
                    setattr(module, name, timed)

    hook()
    return hook


def hook_groups(recorder: Recorder) -> None:
    """Process groups that the script makes of its own, in Python."""
    import torch

    if not torch.distributed.is_available():
        return
    from torch.distributed import ProcessGroup

    def __init_subclass__(cls: Any, /, **kwargs: Any) -> None:
        super(ProcessGroup, cls).__init_subclass__(**kwargs)
        with recorder.guarded:
            for name in EXCHANGES:
                if name in vars(cls):
                    setattr(cls, name, around(recorder, vars(cls)[name]))

    ProcessGroup.__init_subclass__ = classmethod(__init_subclass__)  # type: ignore[assignment]


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
        return register(self, state, around(recorder, hook) if callable(hook) else hook)

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
        try:
            return begin(self, *args, **kwargs)
        except BaseException:
            with recorder.guarded:
                recorder.pause(False)
            raise

    @functools.wraps(end)
    def capture_end(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return end(self, *args, **kwargs)
        finally:
            with recorder.guarded:
                recorder.pause(False)

    graph.capture_begin, graph.capture_end = capture_begin, capture_end


def around(recorder: Recorder, function: Hook) -> Hook:
    """The same function, the time in which counts as waiting, but not all of it as exchanging.

    What it does before and after the exchange itself is the doing of this rank. With NCCL a call
    waits on the stream, and gives nothing to wait for: there nobody can tell one from the other.
    """
    return waiting(recorder, function, AROUND)


def waiting(recorder: Recorder, function: Hook, label: str = WAIT) -> Hook:
    """The same function, the time in which counts as waiting for other ranks."""

    timeline = recorder.timeline

    @unseen_by_compilers
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        before = timeline.label
        if not recorder.is_on or before in (WAIT, label):
            return function(*args, **kwargs)
        # In a backward pass on a GPU torch calls from a thread of its own; the training waits.
        if get_ident() != timeline.thread and before not in (BACKWARD, AROUND):
            return function(*args, **kwargs)
        if not recorder.has_peers():  # DDP exchanges with itself, too
            return function(*args, **kwargs)
        if before == OPTIMIZER:  # it may have begun without a mark
            timeline.mark(OPTIMIZER)
        timeline.mark(label if recorder.device is None else WAIT)
        try:
            return function(*args, **kwargs)
        finally:
            timeline.mark(before)
            if len(timeline.marks) > MAX_MARKS:  # a script may exchange for ever, and train nothing
                timeline.shorten()

    return call
