"""What a rank really holds and sends in a step, to compare with what explain predicts."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.training import device_of_ranks
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from allranks.job.job import parse_job
from allranks.layout import Layout
from allranks.run.events import EventLog
from allranks.run.folder import RunDir
from allranks.train import build, loop
from allranks.train.counted import KINDS, LiveTensors, SavedTensors, state_of
from allranks.train.data import Batch, Progress


class Sent(TorchDispatchMode):
    """Counts what a rank really sends, by kind."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kinds: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented
        name = func.__name__ if func.namespace in ("c10d", "_c10d_functional") else ""
        kind = next((kind for word, kind in KINDS.items() if word in name), None)
        if kind is not None:
            self.kinds[kind] += 1
        return func(*args, **(kwargs or {}))


def measured(layout: str, folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """What this rank holds after one step, and sent in it."""
    job = parse_job({**settings, "layout": layout})
    rank, world_size = dist.get_rank(), dist.get_world_size()
    run = RunDir(folder / layout.replace(":", "-"))
    run.path.mkdir(exist_ok=True)
    me = build.Rank(rank, world_size, rank, world_size, run, 0, Layout.parse(layout), "")
    log = EventLog(run.events(0, rank))
    live = LiveTensors()
    with live:
        t = build.build(me, job, device_of_ranks(), log)
        t.model.train()
        batches = t.data.batches(Progress())
        loop.one_step(t, next(batches), False)  # DDP then asks all ranks how to divide
        batch = next(batches)
    saved = SavedTensors(t.model)
    on_host = held([*t.checkpointer._staged.values()])
    with live, Sent() as sent:
        live.start()
        with saved.counted():
            t.forward_backward(t, batch, False)
        gradients = held([p.grad for p in t.parameters if p.grad is not None])
        loop.update(t)
    peak = live.most - on_host
    if t.device.type == "cuda":
        peak = peak_of(t, next(batches))
    log.close()
    return {
        "bytes": {
            "parameters": held([*t.model.parameters()]),
            "buffers": held([*t.model.buffers()]),
            "gradients": gradients,
            "optimizer": held(state_of(t.optimizer)),
            "activations": saved.most,
        },
        "sent": dict(sent.kinds),
        "peak": peak,
    }


def held(tensors: list[Tensor]) -> int:
    return sum((x.to_local() if isinstance(x, DTensor) else x).nbytes for x in tensors)


def peak_of(t: loop.Training, batch: Batch) -> int:
    """The most bytes that a step has on the GPU at once."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    loop.one_step(t, batch, False)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def assert_held(told: dict[str, int], real: dict[str, int]) -> None:
    """Fail where explain predicted something else than a rank really held."""
    exact = {name for name in real if name != "activations"}
    assert {name: told[name] for name in exact} == {name: real[name] for name in exact}
    assert abs(told["activations"] - real["activations"]) <= 0.1 * real["activations"]
