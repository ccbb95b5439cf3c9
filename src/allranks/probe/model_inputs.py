"""Counts samples by the model's inputs, for scripts that train without a DataLoader."""

from __future__ import annotations

import functools
import gc
import weakref
from typing import Any

from allranks.probe.batches import num_samples
from allranks.probe.compilers import Called, unseen_by_compilers
from allranks.probe.recorder import Recorder
from allranks.probe.samples import SampleCounter
from allranks.timing.timeline import FORWARD

HOOKS = ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs")  # of a module, by their numbers


def watch_model(recorder: Recorder, optimizer: Any) -> None:
    """Count samples by the inputs of the model whose parameters the optimizer trains."""
    import torch

    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    is_module: dict[type, bool] = {}  # there are a million objects, and few types
    modules: list[Any] = []
    for one in gc.get_objects():
        kind = type(one)
        if kind not in is_module:
            is_module[kind] = issubclass(kind, torch.nn.Module)
        if is_module[kind] and "_modules" in vars(one):  # absent if its constructor failed
            modules.append(one)
    # Only the outermost modules that hold all trained parameters: their inputs are the batch.
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
        handle = module.register_forward_pre_hook(Called(called), with_kwargs=True)
        hide_from_copies(module, handle.id)
    hide_from_scripting()


def hide_from_copies(module: Any, hook: int) -> None:
    """Keep the hook out of copies and saved files of a module."""
    known = weakref.ref(module)

    def __getstate__() -> Any:
        module = known()
        kind: Any = type(module)
        state = kind.__getstate__(module)
        if isinstance(state, dict):
            state = {name: value for name, value in state.items() if name != "__getstate__"}
            for name in HOOKS:
                if hook in state.get(name, ()):
                    state[name] = type(state[name])(state[name])
                    del state[name][hook]
        return state

    vars(module)["__getstate__"] = __getstate__


def hide_from_scripting() -> None:
    """Hide our hooks from torch.jit, which compiles a module's hooks and cannot compile these."""
    import torch.jit._recursive as jit

    for name in ("get_hook_stubs", "infer_concrete_type_builder"):
        setattr(jit, name, without_hooks(getattr(jit, name)))


def without_hooks(function: Any) -> Any:
    """Wrap a function of a module so that it does not see our hooks."""

    @functools.wraps(function)
    def call(module: Any, *args: Any, **kwargs: Any) -> Any:
        hooks = getattr(module, "_forward_pre_hooks", {})
        ours = {key: hook for key, hook in hooks.items() if isinstance(hook, Called)}
        if not ours:
            return function(module, *args, **kwargs)
        state = vars(module).pop("__getstate__", None)
        for key in ours:
            del hooks[key]
        try:
            return function(module, *args, **kwargs)
        finally:
            hooks.update(ours)
            if state is not None:
                vars(module)["__getstate__"] = state

    return call
