"""What is in a GPU's memory when it runs out: counted through the optimizers, and by line.

Torch can record which line allocated what. It does so in the first steps, in which most runs that
do not fit run out of memory, unless the script records memory itself.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

from allranks.probe.recorder import Recorder
from allranks.run import tracebacks
from allranks.run.tracebacks import Frame, short_path

RECORDED_STEPS = 3
MOST_SECONDS = 60.0  # even without steps: a script may only evaluate, which recording slows
MOST_LINES = 5


class DeviceMemory:
    """Records what allocates memory in the first steps; adds to an error what filled the GPU."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._own: Callable[..., Any] | None = None  # torch's function, once it has recorded
        self._timer: threading.Timer | None = None  # while recording
        self._has_tried = False
        self._is_scripts = False  # whether the script records memory itself
        recorder.at_loading.append(self._at_loading)
        recorder.at_step.append(self._at_step)
        tracebacks.more_about.append(self.what_filled)

    def _at_loading(self) -> None:
        """Record from the first batch on, or after a step, if the model is on a GPU by then."""
        import torch

        if torch.cuda.is_initialized() and not self._has_tried:
            self._has_tried = True
            self._try(self._start)

    def _at_step(self, step: int) -> None:
        if step < RECORDED_STEPS:  # there may be no loader
            self._at_loading()
        if step >= RECORDED_STEPS:
            self.recorder.at_step.remove(self._at_step)
            with suppress(ValueError):
                self.recorder.at_loading.remove(self._at_loading)
            self._try(self._stop)

    def _try(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            self._own = None
            what = f"{type(error).__name__}: {error}".splitlines()[0]
            print(f"allranks: memory is not recorded: {what}", file=sys.stderr, flush=True)

    def _start(self) -> None:
        import torch

        memory: Any = torch.cuda.memory
        self._is_scripts = bool(torch._C._cuda_isHistoryEnabled())
        if self._is_scripts:
            return
        self._own = record = memory._record_memory_history

        def by_the_script(*args: Any, **kwargs: Any) -> Any:
            self._is_scripts = True
            memory._record_memory_history = record
            return record(*args, **kwargs)

        record(enabled="state", context="state", stacks="python")
        memory._record_memory_history = by_the_script
        self._timer = threading.Timer(MOST_SECONDS, self._try, [self._stop])
        self._timer.daemon = True
        self._timer.start()

    def _stop(self) -> None:
        timer, self._timer = self._timer, None
        if timer is None:
            return
        timer.cancel()
        if self._own is not None and not self._is_scripts:
            import torch

            memory: Any = torch.cuda.memory
            memory._record_memory_history = self._own
            self._own(enabled=None)

    def what_filled(self, error: BaseException) -> dict[str, Any]:
        """Fields for an error event; none unless the GPU's memory was full."""
        import torch

        if (
            not tracebacks.is_out_of_memory(f"{type(error).__name__}: {error}")
            or not torch.cuda.is_initialized()
        ):
            return {}
        device = self.recorder.device or torch.device("cuda", torch.cuda.current_device())
        sizes, counted = optimizer_bytes(alive(torch.optim.Optimizer), device)
        rest = torch.cuda.memory_allocated(device) - sum(sizes.values())
        found: dict[str, Any] = {"filled": {**sizes, "rest": max(0, rest)}}
        if self._own is not None and not self._is_scripts:
            lines = recorded_lines(torch.cuda.memory._snapshot(), device.index, counted)
            if lines:
                found["filled_by"] = lines
        return found


def alive(kind: type) -> list[Any]:
    return [one for one in gc.get_objects() if issubclass(type(one), kind)]


def optimizer_bytes(optimizers: Iterable[Any], device: Any) -> tuple[dict[str, int], set[int]]:
    """Bytes of parameters, gradients and optimizer state on a device; and their addresses."""
    import torch

    sizes = {"parameters": 0, "gradients": 0, "optimizer": 0}
    seen: set[int] = set()

    def add(name: str, tensor: Any) -> None:
        if not issubclass(type(tensor), torch.Tensor):
            return
        local = getattr(tensor, "_local_tensor", tensor)  # this rank's part of a DTensor
        storage = local.untyped_storage()
        if local.device == device and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            sizes[name] += storage.nbytes()

    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                add("parameters", parameter)
                add("gradients", parameter.grad)
        for state in optimizer.state.values():
            for value in state.values() if isinstance(state, Mapping) else ():
                add("optimizer", value)
    return sizes, seen


def recorded_lines(
    snapshot: Mapping[str, Any], device: int | None, counted: set[int]
) -> list[tuple[str, int]]:
    """The lines of the user's code that allocated most of what is in use, except `counted`."""
    found: defaultdict[str, int] = defaultdict(int)
    for segment in snapshot.get("segments", ()):
        address = segment.get("address", 0)
        for block in segment["blocks"] if segment.get("device") in (device, None) else ():
            start = block.get("address", address)
            address = start + block["size"]
            if block["state"] != "active_allocated" or start in counted:
                continue
            frames = (Frame(one["filename"], one["line"], "") for one in block.get("frames", ()))
            own = next((frame for frame in frames if frame.is_own), None)  # the innermost
            if own is not None:
                found[f"{short_path(own.file)}:{own.line}"] += block["size"]
    return sorted(found.items(), key=lambda item: -item[1])[:MOST_LINES]
