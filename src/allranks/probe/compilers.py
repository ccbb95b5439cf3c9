"""What torch.compile makes of hooks. To a compiler those here are not there: it goes on as without.

A hook that it may not look into breaks a graph, and fails a script that asks for a whole one. All
other files of the probe are hidden from it (see hide_from_compilers).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from torch.compiler import is_compiling

# Of the probe, that hooks call.
PARTS = (
    *("backward_pass", "data_loaders", "device_sampler", "hooks", "model_inputs", "recorder"),
    *("samples", "window"),
)


def unless_compiled(original: Callable[..., Any], timed: Callable[..., Any]) -> Callable[..., Any]:
    """`timed` where Python runs, `original` where it is compiled."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs) if is_compiling() else timed(*args, **kwargs)

    return call


def unseen_by_compilers(function: Callable[..., Any]) -> Callable[..., Any]:
    """Have torch.compile call this as it is: traced, it would be compiled anew at every step."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function


class Called:
    """Tells what a module is called with; a forward pre-hook, registered `with_kwargs`."""

    def __init__(self, tell: Callable[[list[Any]], None]) -> None:
        self.tell = tell

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not is_compiling():
            self.tell([*args, *kwargs.values()])

    def __reduce__(self) -> tuple[Any, ...]:
        # Scripts copy models, and save them whole: the copy gets a hook that does nothing and
        # that any Python can load.
        return functools.partial, (sys.audit, "allranks.called")


def hide_from_compilers() -> None:
    """Have torch.compile skip what the hooks call, once it is imported: it is big."""
    rules: Any = sys.modules.get("torch._dynamo.trace_rules")
    if rules is not None:
        for part in PARTS:
            rules.add(f"allranks.probe.{part}")
        rules.add("allranks.timing.timeline")
        rules.add("allranks.run.events")
