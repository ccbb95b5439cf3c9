"""Hooks that record when a backward pass begins, has computed all gradients, and ends."""

from __future__ import annotations

import functools
from collections.abc import Callable
from threading import get_ident
from time import perf_counter
from typing import Any

from allranks.probe.batches import graph_lengths
from allranks.probe.compilers import unseen_by_compilers
from allranks.probe.recorder import Recorder
from allranks.probe.samples import CHECKED_STEPS, SampleCounter
from allranks.timing.timeline import AFTER, BACKWARD, COUNT_AFTER, WAIT

Hook = Callable[..., Any]

TRAINED: tuple[Any, ...] = (SampleCounter.trained,)


class Arrival:
    """The moment in a backward pass when this rank has computed all its gradients.

    The autograd engine runs callbacks when everything is computed, in the order in which they were
    queued. One that is queued before the last gradient exists runs before DDP waits in its own. A
    hook on the loss can queue it, but making one for every loss takes 40 us. So once a parameter is
    known to get a gradient, a permanent hook on it is used instead; if the parameter ever gets
    none, hooks on the losses are used again.

    A pass within a pass, which recomputes activations, has its own callbacks; DDP waits in those of
    the pass that computes the last gradient. So each of them may be waiting at its end.
    """

    __slots__ = (
        *("_arrive", "_is_queued", "_on_parameter", "_parameter", "_queue", "_tensor_type"),
        *("_timeline", "exchange", "later", "recorder"),
    )

    def __init__(self, recorder: Recorder) -> None:
        import torch

        self.recorder = recorder
        self._timeline = recorder.timeline
        self._queue = torch.autograd.Variable._execution_engine.queue_callback
        self._arrive = self.arrive
        self._tensor_type = torch.Tensor
        self._parameter: Any = None
        self._on_parameter: Any = None  # the permanent hook on it
        self._is_queued = False
        self.exchange: str | None = None  # that ranks wait in then, if its name is known
        self.later: list[Callable[[], None]] = []  # install more hooks after the first step

    def expect_if_any(self, tensors: Any) -> Any:
        """`expect`, while it is not known whether there are other ranks."""
        if not self.recorder.has_peers():
            if self.recorder.peers is False:
                self._timeline.expect = None
            return None
        self._timeline.expect = self.expect
        return self.expect(tensors)

    def ask_again(self) -> None:
        """Check again whether there are other ranks: a process group has been created."""
        if self.recorder.peers is False:
            self.recorder.peers = None
            self._timeline.expect = self.expect_if_any

    def expect(self, tensors: Any) -> Any:
        """A backward pass begins; returns the hook to remove after it, if any."""
        was_queued, self._is_queued = self._is_queued, False
        if self._on_parameter is not None:
            if was_queued:
                return None
            self.let_go()
        return self.watch(tensors, self.queue)

    def watch(self, tensors: Any, queue: Hook) -> Any:
        """Put a hook on the tensor from which a pass starts."""
        root = tensors[0] if isinstance(tensors, list | tuple) and tensors else tensors
        if isinstance(root, self._tensor_type) and root.grad_fn is not None:
            return root.grad_fn.register_prehook(queue)
        return None

    def settle(self, optimizer: Any) -> None:
        """Put the permanent hook on a parameter that has a gradient, if there is one."""
        for group in reversed(optimizer.param_groups):
            for parameter in reversed(group["params"]):
                if parameter.grad is not None and parameter.requires_grad:
                    self._parameter = parameter
                    self.take_hold()
                    return

    def take_hold(self) -> None:
        if self._parameter is not None:
            self._on_parameter = self._parameter.register_hook(self.queue)
            self._is_queued = True  # it has not missed a pass yet

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
            timeline.marks.append((WAIT, perf_counter(), event, self.exchange))
        except Exception as error:
            self.recorder.switch_off(error)


def pass_within(recorder: Recorder, arrival: Arrival, original: Hook) -> Hook:
    """Wrap a backward pass that runs within another one; its waiting counts where it happens."""
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
    """Record every backward pass."""
    import torch

    original, timeline = torch.autograd.backward, recorder.timeline
    append = timeline.marks.append
    within = pass_within(recorder, arrival, original)

    # torch's arguments by name: collecting them with * would take as long as everything else.
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
            note = TRAINED
            if timeline.num_steps < CHECKED_STEPS:
                note = (SampleCounter.trained, graph_lengths(tensors))
            append((BACKWARD, perf_counter(), event, note))
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
