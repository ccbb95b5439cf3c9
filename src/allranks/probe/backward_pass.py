"""Where a backward pass tells the probe when it begins, has all gradients, and ends."""

from __future__ import annotations

import functools
from collections.abc import Callable
from threading import get_ident
from time import perf_counter
from typing import Any

from allranks.probe.compilers import unseen_by_compilers
from allranks.probe.recorder import Recorder
from allranks.probe.samples import SampleCounter
from allranks.timing.timeline import AFTER, BACKWARD, COUNT_AFTER, WAIT

Hook = Callable[..., Any]

TRAINED = (SampleCounter.trained,)


class Arrival:
    """The moment in a backward pass when this rank has computed all its gradients.

    Callbacks of the autograd engine run when all is computed, in the order in which they were
    queued. One that is queued before the last gradient is there runs before DDP waits in its own.
    A hook on the loss can do that, but making one for every loss takes 40 us: once a parameter is
    known to get a gradient, a hook that stays on it does. If it ever gets none, losses do again.

    A pass within a pass, which recomputes activations, has callbacks of its own; DDP waits in those
    of the pass that the last gradient comes from. So each of them may be waiting at its end.
    """

    __slots__ = (
        *("_arrive", "_is_queued", "_on_parameter", "_parameter", "_queue", "_tensor_type"),
        *("_timeline", "later", "recorder"),
    )

    def __init__(self, recorder: Recorder) -> None:
        import torch

        self.recorder = recorder
        self._timeline = recorder.timeline
        self._queue = torch.autograd.Variable._execution_engine.queue_callback
        self._arrive = self.arrive
        self._tensor_type = torch.Tensor
        self._parameter: Any = None
        self._on_parameter: Any = None  # the hook that stays on it
        self._is_queued = False
        self.later: list[Callable[[], None]] = []  # hooks to be made when a step has been made

    def expect_if_any(self, tensors: Any) -> Any:
        """For as long as nobody knows whether there are other ranks."""
        if not self.recorder.has_peers():
            if self.recorder.peers is False:
                self._timeline.expect = None
            return None
        self._timeline.expect = self.expect
        return self.expect(tensors)

    def ask_again(self) -> None:
        """Whether there are other ranks: a process group has been made after all."""
        if self.recorder.peers is False:
            self.recorder.peers = None
            self._timeline.expect = self.expect_if_any

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
            if not self._is_queued and self._timeline.depth == 1:
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
        timeline = self._timeline
        try:
            timeline.label = WAIT  # marks, without the call
            event = None if timeline.record_event is None else timeline.record_event()
            timeline.marks.append((WAIT, perf_counter(), event, None))
        except Exception as error:
            self.recorder.switch_off(error)


def pass_within(recorder: Recorder, arrival: Arrival, original: Hook) -> Hook:
    """A backward pass within another one; what it waits for at its end is waited for there."""
    timeline = recorder.timeline

    def within(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        handle, before = None, timeline.label
        timeline.depth += 1
        try:
            if timeline.is_on and recorder.peers:
                handle = arrival.watch(tensors, arrival.queue_within)
        except Exception as error:
            recorder.switch_off(error)
        try:
            return original(tensors, *args, **kwargs)
        finally:
            timeline.depth = max(0, timeline.depth - 1)
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

    # Torch's own arguments, by their names: to collect any there are takes as long as the rest.
    @unseen_by_compilers
    @functools.wraps(original)
    def backward(
        tensors: Any,
        grad_tensors: Any = None,
        retain_graph: Any = None,
        create_graph: Any = False,
        grad_variables: Any = None,
        inputs: Any = None,
        **later: Any,
    ) -> Any:
        if later or timeline.depth or not timeline.is_on or get_ident() != timeline.thread:
            given = (grad_tensors, retain_graph, create_graph, grad_variables, inputs)
            return (within if timeline.depth else original)(tensors, *given, **later)
        handle = None
        timeline.depth = 1
        try:
            if timeline.expect is not None:
                handle = timeline.expect(tensors)
            timeline.label = BACKWARD  # marks, without the calls
            event = None if timeline.record_event is None else timeline.record_event()
            append((BACKWARD, perf_counter(), event, TRAINED))
        except Exception as error:
            recorder.switch_off(error)
        try:
            return original(
                tensors, grad_tensors, retain_graph, create_graph, grad_variables, inputs
            )
        finally:
            timeline.depth = 0
            try:
                timeline.label = AFTER
                event = None if timeline.record_event is None else timeline.record_event()
                append((AFTER, perf_counter(), event, None))
                if handle is not None:
                    handle.remove()
                timeline.calls += 1
                if timeline.calls > COUNT_AFTER:
                    timeline.shorten()
            except Exception as error:
                recorder.switch_off(error)

    timeline.expect = arrival.expect_if_any
    torch.autograd.backward = backward
