"""Hooks in torch that tell the probe what torch is doing; none changes what it computes.

Every hook catches errors in its own work: then the probe is switched off, and the script continues
as if it had never been there. Hooks run with cold caches between a model's kernels, so they make
few calls.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from threading import get_ident
from typing import Any

from torch.compiler import is_compiling

from allranks.probe.backward_pass import Arrival, Hook, hook_backward
from allranks.probe.compilers import hide_from_compilers, unless_compiled, unseen_by_compilers
from allranks.probe.data_loaders import hook_loader
from allranks.probe.division import TENSOR_PARALLEL, Division, hook_functional, hook_peers
from allranks.probe.model_inputs import watch_model
from allranks.probe.recorder import Recorder
from allranks.probe.samples import SampleCounter
from allranks.timing.timeline import AFTER, AROUND, BACKWARD, MAX_MARKS, OPTIMIZER, OTHER, WAIT

ALL_REDUCE = "all-reduce"
# torch's functions that wait for other ranks, and what the exchange is called.
SYNCHRONOUS = {
    "all_reduce": ALL_REDUCE,
    # `_single`: the newer name of the same function.
    **dict.fromkeys(("all_gather", "all_gather_into_tensor", "all_gather_single"), "all-gather"),
    **dict.fromkeys(
        ("reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single"), "reduce-scatter"
    ),
    **dict.fromkeys(("all_to_all", "all_to_all_single"), "all-to-all"),
    **{name: name for name in ("broadcast", "reduce", "barrier")},
}
# A process group's names for these collectives, and for others.
EXCHANGES = (
    *("allreduce", "allreduce_coalesced", "allgather", "_allgather_base", "allgather_coalesced"),
    *("allgather_into_tensor_coalesced", "reduce_scatter", "_reduce_scatter_base"),
    *("reduce_scatter_tensor_coalesced", "broadcast", "reduce", "alltoall", "alltoall_base"),
    *("barrier", "gather", "scatter"),
)


def install(recorder: Recorder) -> Arrival:
    """Hook into torch, which has just been imported."""
    from torch.optim import optimizer

    arrival, division = Arrival(recorder), Division(recorder)
    recorder.at_first_step.append(functools.partial(after_first_step, recorder, arrival))
    hook_optimizer(recorder, optimizer)
    hook_backward(recorder, arrival)
    hook_loader(recorder)
    hook_modes(recorder)
    hook_gradients(recorder)
    arrival.later.append(hook_waiting(recorder, division))
    arrival.later.append(functools.partial(hook_functional, division))
    recorder.at_first_step.append(division.look_at_axes)
    hook_peers(division)
    hook_meeting(recorder, arrival)
    hook_groups(recorder)
    hook_ddp(recorder, arrival)
    hook_graphs(recorder)
    hide_from_compilers()
    return arrival


def hook_optimizer(recorder: Recorder, optimizer_module: Any) -> None:
    timeline, stepped = recorder.timeline, recorder.stepped
    around: list[str] = []  # labels to return to after the steps that are under way

    @unseen_by_compilers
    def before(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not timeline.is_on:
            return
        try:
            # Perhaps inside a backward pass, or inside the step of an optimizer that wraps this.
            label = timeline.label
            if label == AFTER:  # the update takes the rest of the step: no mark is needed
                timeline.label = OPTIMIZER
                return
            around.append(label if label in (BACKWARD, OPTIMIZER) else OTHER)
            if len(args) == 1 and not kwargs:  # a closure computes the gradients first
                timeline.mark(OPTIMIZER)
        except Exception as error:
            recorder.switch_off(error)

    @unseen_by_compilers
    def after(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if timeline.is_on:
            try:
                stepped(optimizer)
                label = around.pop() if around else OTHER
                if timeline.label != label:
                    timeline.mark(label)
            except Exception as error:
                recorder.switch_off(error)
        if recorder.leave is not None:  # the script should end here
            recorder.leave()

    optimizer_module.register_optimizer_step_pre_hook(before)
    optimizer_module.register_optimizer_step_post_hook(after)


def after_first_step(recorder: Recorder, arrival: Arrival, optimizer: Any) -> None:
    """Install the hooks that depend on what the script uses, which is known now."""
    hook_tensor_waits(recorder)
    for call in arrival.later:
        call()
    if recorder.peers:
        arrival.settle(optimizer)
    if not recorder.timeline.is_taken:
        recorder.watch_model = functools.partial(watch_model, recorder)
        recorder.counter.wants_model |= recorder.counter.training is None


def hook_modes(recorder: Recorder) -> None:
    """Record when the script switches a model to evaluation, and back."""
    from torch.nn import Module

    switch, timeline = Module.train, recorder.timeline
    is_inside, is_training = False, True

    def timed(self: Any, mode: bool = True) -> Any:
        nonlocal is_inside, is_training
        # A model switches the modules in it; most scripts switch to training again and again.
        if is_inside or not timeline.is_on or (mode and is_training):
            return switch(self, mode)
        is_inside = True
        try:
            return switch(self, mode)
        finally:
            is_inside = False
            if get_ident() == timeline.thread:
                is_training = mode
                with recorder.guarded:
                    timeline.mark(timeline.label, (SampleCounter.switched, mode))

    Module.train = unless_compiled(switch, timed)  # type: ignore[method-assign]


def hook_gradients(recorder: Recorder) -> None:
    """Record when the script switches gradients off between two steps, and on again."""
    import torch

    timeline = recorder.timeline
    outermost: Any = None

    def hook(kind: Any) -> None:
        enter, leave = kind.__enter__, kind.__exit__

        def __enter__(self: Any) -> Any:
            nonlocal outermost
            if is_compiling():
                return enter(self)
            # Between steps only: within one, and before the first, it is done for other reasons.
            if timeline.label == OTHER and outermost is None and timeline.num_steps:
                with recorder.guarded:
                    if timeline.is_on and get_ident() == timeline.thread:
                        outermost = self
                        timeline.mark(OTHER, (SampleCounter.paused,))
            return enter(self)

        def __exit__(self: Any, *args: Any) -> Any:
            nonlocal outermost
            if not is_compiling() and outermost is self:
                outermost = None
                with recorder.guarded:
                    timeline.mark(timeline.label, (SampleCounter.resumed,))
            return leave(self, *args)

        kind.__enter__, kind.__exit__ = __enter__, __exit__

    hook(torch.no_grad)
    hook(torch.inference_mode)


def hook_waiting(recorder: Recorder, division: Division) -> Callable[[], None]:
    """Time the waiting for exchanges that the script starts itself.

    Returns a function that hooks into functions with which the script has since replaced them.
    """
    import torch

    if not torch.distributed.is_available():
        return lambda: None
    from torch.distributed.distributed_c10d import Work

    Work.wait = waiting(recorder, Work.wait)  # type: ignore[method-assign]
    hooked: dict[tuple[Any, str], Hook] = {}

    def hook() -> None:
        for name, exchange in SYNCHRONOUS.items():
            for module in (torch.distributed, torch.distributed.distributed_c10d):
                function = getattr(module, name, None)
                if function is not None and function is not hooked.get((module, name)):
                    watched = division.watch(around(recorder, function, exchange), exchange)
                    timed = unless_compiled(function, watched)
                    hooked[module, name] = timed
                    setattr(module, name, timed)

    hook()
    return hook


def hook_meeting(recorder: Recorder, arrival: Arrival) -> None:
    """Notice ranks that meet late, after each had seemed to train by itself."""
    import torch.distributed as dist

    if not dist.is_available():
        return
    from torch.distributed import distributed_c10d

    original = distributed_c10d.init_process_group

    @unseen_by_compilers
    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        found = original(*args, **kwargs)
        with recorder.guarded:
            arrival.ask_again()
        return found

    dist.init_process_group = distributed_c10d.init_process_group = init_process_group


def hook_groups(recorder: Recorder) -> None:
    """Time the exchanges of process groups that the script defines in Python."""
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
    """Time the waiting for exchanges of divided models, if the script has one."""
    collectives: Any = sys.modules.get("torch.distributed._functional_collectives")
    if collectives is not None:
        wait = collectives.wait_tensor
        timed = waiting(recorder, wait, exchange=TENSOR_PARALLEL)
        collectives.wait_tensor = unless_compiled(wait, timed)
    sharded: Any = sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_param_group")
    group: Any = getattr(sharded, "FSDPParamGroup", None)
    if hasattr(group, "wait_for_unshard"):  # on a GPU it waits on the stream, not for a Work
        unshard = group.wait_for_unshard
        timed_unshard = waiting(recorder, unshard, exchange="all-gather")

        @unseen_by_compilers
        @functools.wraps(unshard)
        def wait_for_unshard(parameters: Any, *args: Any, **kwargs: Any) -> Any:
            # Shards that are the whole, as with tp alone, wait for nobody.
            mesh = getattr(parameters, "mesh_info", None)
            is_whole = getattr(mesh, "shard_mesh_size", 2) == 1
            return (unshard if is_whole else timed_unshard)(parameters, *args, **kwargs)

        group.wait_for_unshard = wait_for_unshard
    schedules: Any = sys.modules.get("torch.distributed.pipelining.schedules")
    if hasattr(schedules, "_wait_batch_p2p"):
        receive = schedules._wait_batch_p2p
        schedules._wait_batch_p2p = waiting(recorder, receive, exchange="pipeline")


def hook_ddp(recorder: Recorder, arrival: Arrival) -> None:
    """Time what DDP exchanges outside its reducer: buffers, and gradients in a user's hook."""
    from torch.nn.parallel import DistributedDataParallel

    ddp: Any = DistributedDataParallel
    register, begin = ddp.register_comm_hook, ddp.__init__

    @functools.wraps(begin)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        arrival.exchange = ALL_REDUCE
        begin(self, *args, **kwargs)

    @functools.wraps(register)
    def register_comm_hook(self: Any, state: object, hook: Hook) -> Any:
        timed = around(recorder, hook, ALL_REDUCE) if callable(hook) else hook
        return register(self, state, timed)

    ddp.__init__, ddp.register_comm_hook = __init__, register_comm_hook
    ddp._sync_buffers = waiting(recorder, ddp._sync_buffers)


def hook_graphs(recorder: Recorder) -> None:
    """Notice when a CUDA graph is captured, during which no other thread may query the device."""
    from torch.cuda import CUDAGraph

    graph: Any = CUDAGraph
    begin, end = graph.capture_begin, graph.capture_end

    @functools.wraps(begin)
    def capture_begin(self: Any, *args: Any, **kwargs: Any) -> Any:
        with recorder.guarded:
            recorder.capture_begins()
        try:
            return begin(self, *args, **kwargs)
        except BaseException:
            with recorder.guarded:
                recorder.capture_ended(None)
            raise

    @functools.wraps(end)
    def capture_end(self: Any, *args: Any, **kwargs: Any) -> Any:
        captured = None
        try:
            result = end(self, *args, **kwargs)
            captured = self
            return result
        finally:
            with recorder.guarded:
                recorder.capture_ended(captured)

    graph.capture_begin, graph.capture_end = capture_begin, capture_end


def around(recorder: Recorder, function: Hook, exchange: str | None = None) -> Hook:
    """Wrap a function so that its time counts as waiting, but not all of it as exchanging.

    What it does before and after the exchange itself is this rank's own work. With NCCL a call
    waits on the stream and returns nothing to wait for, so the two cannot be separated.
    """
    return waiting(recorder, function, AROUND, exchange)


def waiting(
    recorder: Recorder, function: Hook, label: str = WAIT, exchange: str | None = None
) -> Hook:
    """Wrap a function so that its time counts as waiting for other ranks, in this exchange."""

    timeline = recorder.timeline

    @unseen_by_compilers
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        before = timeline.label
        outer = timeline.marks[-1][3] if before in (WAIT, AROUND) else None
        is_known = outer is not None or exchange is None  # by what it is called
        if not timeline.is_on or (before == WAIT and is_known) or before == label == AROUND:
            return function(*args, **kwargs)
        # In a backward pass on a GPU, torch calls this from another thread; the training waits.
        if get_ident() != timeline.thread and before not in (BACKWARD, AROUND, WAIT):
            return function(*args, **kwargs)
        if not recorder.has_peers():  # DDP calls exchanges even on a single rank
            return function(*args, **kwargs)
        if before == OPTIMIZER:  # it may have begun without a mark
            timeline.mark(OPTIMIZER)
        # Other tensors than activations are divided, too, and gathered after the passes.
        is_other = exchange == TENSOR_PARALLEL and before in (OPTIMIZER, AFTER)
        is_inner = before == WAIT or recorder.device is not None
        timeline.mark(WAIT if is_inner else label, None if is_other else exchange or outer)
        try:
            return function(*args, **kwargs)
        finally:
            timeline.mark(before)
            if len(timeline.marks) > MAX_MARKS:  # a script may exchange forever and never train
                timeline.shorten()

    return call
