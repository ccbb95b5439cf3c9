"""A trace of an unchanged script from outside: how much of the time its GPU is busy."""

import functools
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from time import perf_counter
from typing import Any

FIRST, LAST = 100, 140


def begin() -> None:
    """Profile the GPU from one step of the first optimizer to another, and write its share."""
    import torch
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    profiler = profile(activities=[ProfilerActivity.CUDA])
    out, state = Path(os.environ["VERDICTS_OUTSIDE_TRACE"]), {"steps": 0, "since": 0.0}

    def look() -> None:
        state["steps"] += 1
        if state["steps"] == FIRST:
            profiler.start()
            torch.cuda.synchronize()
            state["since"] = perf_counter()
        elif state["steps"] == LAST:
            torch.cuda.synchronize()
            seconds = perf_counter() - state["since"]
            profiler.stop()
            spans = [
                (event.time_range.start, event.time_range.end)
                for event in profiler.events()
                if event.device_type == DeviceType.CUDA and not event.is_user_annotation
            ]
            out.write_text(json.dumps(covered(spans) / 1e6 / seconds))

    def counted(step: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(step)
        def call(*args: Any, **kwargs: Any) -> Any:
            result = step(*args, **kwargs)
            look()
            return result

        return call

    sgd: Any = torch.optim.SGD
    sgd.step = counted(sgd.step)


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """How much of the time is within at least one span."""
    total = until = 0.0
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total
