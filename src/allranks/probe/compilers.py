"""Hides the probe's hooks from torch.compile, which compiles a script as if they were not there.

A hook that the compiler may not trace breaks the graph, and fails a script that asks for a full
one. The other files of the probe are hidden by hide_from_compilers.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.compiler import is_compiling

# Modules of the probe that hooks call.
PARTS = (
    *("backward_pass", "batches", "data_loaders", "device_memory", "device_sampler"),
    *("division", "fingerprints", "graphs", "hooks"),
    *("loaders", "memory_use", "model_inputs", "profile", "profilers", "recorder", "sampler"),
    *("samples", "tracing", "window"),
)


def unless_compiled(original: Callable[..., Any], timed: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls `timed` in plain Python, and `original` in compiled code."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs) if is_compiling() else timed(*args, **kwargs)

    return call


def unseen_by_compilers(function: Callable[..., Any]) -> Callable[..., Any]:
    """Keep torch.compile from tracing a function, which it would recompile at every step."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function


@contextmanager
def uncompiled() -> Iterator[None]:
    """Within this, torch.compile looks at no function, whatever is called."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    from torch._C._dynamo.eval_frame import set_eval_frame

    before = set_eval_frame(None)
    try:
        yield
    finally:
        set_eval_frame(before)


class Called:
    """A forward pre-hook, registered `with_kwargs`, that passes on a module's inputs."""

    def __init__(self, tell: Callable[[list[Any]], None]) -> None:
        self.tell = tell

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not is_compiling():
            self.tell([*args, *kwargs.values()])

    def __reduce__(self) -> tuple[Any, ...]:
        # Scripts copy models, and save them whole: the copy gets a hook that does nothing, which
        # Python can load without allranks.
        return functools.partial, (sys.audit, "allranks.called")


def hide_from_compilers() -> None:
    """Make torch.compile skip what the hooks call, if it is imported: importing it takes long."""
    rules: Any = sys.modules.get("torch._dynamo.trace_rules")
    if rules is not None:
        for part in PARTS:
            rules.add(f"allranks.probe.{part}")
        rules.add("allranks.timing.timeline")
        rules.add("allranks.run.events")
