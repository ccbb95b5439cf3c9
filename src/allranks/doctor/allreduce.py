"""An all-reduce across the nodes, one rank per node: is the sum right, and how fast is it?"""

from __future__ import annotations

import math
import os
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from allranks.doctor.check import Check, failed, passed
from allranks.show.numbers import rate

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

SIZES = (1 << 16, 1 << 20, 1 << 23, 1 << 26, 1 << 28)  # bytes
SECONDS_PER_SIZE = 0.06
SECONDS_IN_ALL = 0.3  # the training waits for it
MOST_REPEATS = 50


def all_reduce(
    store: dist.Store, rank: int, num_nodes: int, backend: str, seconds_left: float
) -> Check:
    """Sum over all nodes, checked and timed. Every node must call it."""
    import torch
    import torch.distributed as dist

    device = torch.device("cpu")
    if backend == "nccl":
        # Our own deadline comes first: torch would kill the process before it reports anything.
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
        try:
            device = torch.device("cuda", 0)
            torch.cuda.set_device(device)
            torch.zeros(1, device=device)
        except RuntimeError as error:
            words = str(error).splitlines()[0]
            return failed("allreduce", f"GPU 0 cannot be used: {words}", fault="own")
    torch.set_num_threads(1)
    dist.init_process_group(
        backend,
        store=dist.PrefixStore("allreduce", store),
        rank=rank,
        world_size=num_nodes,
        timeout=timedelta(seconds=max(1.0, seconds_left)),
    )
    rows, wrong = _measure(device, rank, num_nodes, min(SECONDS_IN_ALL, seconds_left / 2))
    more: dict[str, Any] = {"backend": backend, "sizes": rows}
    if wrong:
        return failed("allreduce", wrong, **more)
    best = max(row["bus_bandwidth"] for row in rows)
    more["bus_bandwidth"] = best
    detail = f"right sums over {num_nodes} nodes with {backend}, bus bandwidth {rate(best)}"
    return passed("allreduce", detail, **more)


def _measure(
    device: torch.device, rank: int, num_nodes: int, seconds: float
) -> tuple[list[dict[str, float]], str]:
    """Seconds and bandwidth of the sizes there was time for; and what was wrong, if anything."""
    import torch
    import torch.distributed as dist

    _slowest(0.0, device)  # the first call opens the connections
    start = time.monotonic()
    rows: list[dict[str, float]] = []
    expected = num_nodes * (num_nodes + 1) / 2
    for size in SIZES:
        tensor = torch.full((size // 4,), rank + 1.0, device=device)
        begun = time.monotonic()
        dist.all_reduce(tensor)
        is_right = bool((tensor == expected).all())  # waits for the GPU too
        once = _slowest(time.monotonic() - begun if is_right else math.inf, device)
        if once == math.inf:  # wrong on some node: all stop together
            where = "another node" if is_right else "this node"
            return rows, f"an all-reduce of {size} bytes gave a wrong sum on {where}"
        repeats = max(1, min(MOST_REPEATS, int(SECONDS_PER_SIZE / once)))
        tensor.zero_()
        _synchronize(device)
        begun = time.monotonic()
        for _ in range(repeats):
            dist.all_reduce(tensor)
        _synchronize(device)
        each = _slowest((time.monotonic() - begun) / repeats, device)
        bus = size / each * 2 * (num_nodes - 1) / num_nodes
        rows.append({"bytes": size, "seconds": each, "bus_bandwidth": bus})
        # The next size takes at least four times as long, twice. All ranks must agree to stop.
        if _slowest(time.monotonic() - start, device) + 8 * each > seconds:
            break
    return rows, ""


def _slowest(seconds: float, device: torch.device) -> float:
    """The largest over all ranks. Every rank must call it."""
    import torch
    import torch.distributed as dist

    value = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return max(1e-9, value.item())


def _synchronize(device: torch.device) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)
