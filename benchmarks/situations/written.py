"""Runs with made-up events, for hardware that cannot be slowed down on demand.

Four ranks on four GPUs; rank 2 computes longer than the others in every step, which wait for it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from situations.table import Situation

from allranks.run.folder import RunDir

BEGIN = 1_790_000_000.0
NUM_RANKS, NUM_STEPS, SLOW = 4, 400, 2
GPU = {"name": "NVIDIA H100 80GB HBM3", "memory_bytes": 85_520_809_984}
COMPUTE = {"forward": 0.010, "backward": 0.020}
SLOWER = 1.5
EXCHANGE = 0.002
REST = {"data": 0.0005, "optimizer": 0.002, "other": 0.0005}
STEP_SECONDS = sum(COMPUTE.values()) * SLOWER + EXCHANGE + sum(REST.values())
HEALTHY: dict[str, Any] = {
    **{"cpu": 1.0, "cpu_wait": 0.5, "cpus_allotted": 16, "utilization": 97, "neighbours": 0},
    **{"memory": 21 << 30, "memory_total": GPU["memory_bytes"], "memory_peak": 20 << 30},
    **{"power": 560.0, "power_limit": 700.0, "temperature": 58, "clock": 1965, "clock_max": 1980},
    "slowed_by": [],
}
# What the device events of rank 2 say instead, and a word of the reason.
REASONS: dict[str, tuple[str, dict[str, Any]]] = {
    "clock": ("MHz", {"clock": 1275, "power": 390.0}),
    "heat": ("hot", {"clock": 1275, "temperature": 88, "slowed_by": ["thermal slowdown"]}),
    "power": ("power limit", {"clock": 1290, "power": 398.0, "power_limit": 400.0}),
    "power-cap": ("power limit", {"clock": 1290, "power": 698.0, "slowed_by": ["power cap"]}),
    "neighbour": ("another process", {"neighbours": 1, "memory": 62 << 30}),
    "cores": ("CPUs", {"cpus_allotted": 2}),
}
WRITTEN = {
    Situation(
        name=f"written-{name}", limit="straggler", ranks=NUM_RANKS, rank=SLOW, reason=reason
    ): slow
    for name, (reason, slow) in REASONS.items()
}


def write_run(runs: Path, name: str, slow: Mapping[str, Any]) -> RunDir:
    """A finished run of a script; `slow`: what the device events of the slow rank say."""
    run = RunDir(runs / f"{name}-20260921-120000-0000")
    run.attempt(0).mkdir(parents=True)
    run.job_file.write_text(yaml.safe_dump({"name": name, "command": "python train.py"}))
    info = {"v": 1, "run": run.name, "created": BEGIN, "layout": f"1x{NUM_RANKS}"}
    info |= {"backend": "local", "hardware": {"gpus": [GPU] * NUM_RANKS}}
    run.write_info({**info, "attempts": [{"attempt": 0, "layout": f"1x{NUM_RANKS}"}]})
    for rank in range(NUM_RANKS):
        device = {**HEALTHY, **(slow if rank == SLOW else {})}
        lines = [json.dumps({"v": 1, **event}) for event in events(rank, device)]
        run.events(0, rank).write_text("\n".join(lines) + "\n")
    return run


def events(rank: int, device: Mapping[str, Any]) -> list[dict[str, Any]]:
    """All events of a rank, in order of time."""
    factor = SLOWER if rank == SLOW else 1.0
    phases = {name: seconds * factor for name, seconds in COMPUTE.items()} | REST
    phases["wait"] = STEP_SECONDS - sum(phases.values())
    start = {"rank": rank, "world_size": NUM_RANKS, "layout": f"1x{NUM_RANKS}", "host": "node1"}
    found = [{"t": BEGIN, "event": "start", **start}]
    for step in range(1, NUM_STEPS + 1):
        end = BEGIN + step * STEP_SECONDS
        arrive = end - phases["optimizer"] - phases["other"] - phases["wait"]
        timed = {"step": step, "samples": 64, "seconds": STEP_SECONDS, **phases, "arrive": arrive}
        found.append({"t": end, "event": "step", **timed})
    busy = STEP_SECONDS - REST["data"] - REST["other"]
    exchanges = phases["wait"]
    trace = {"first": 22, "last": 24, "device": "cuda", "cost": 0.4, "busy": busy}
    trace |= {"compute": busy - exchanges, "copies": 0.0, "exchanges": exchanges}
    trace |= {"launches": 0.0002, "host": 0.0002, "kernels": 400, "copied": 0, "pageable": 0}
    found.append({"t": BEGIN + 25 * STEP_SECONDS, "event": "trace", **trace})
    seconds = int(NUM_STEPS * STEP_SECONDS)
    found += [{"t": BEGIN + t, "event": "device", **device} for t in range(2, seconds, 2)]
    found.append({"t": BEGIN + seconds + 1, "event": "end", "state": "finished", "exit": 0})
    return sorted(found, key=lambda event: event["t"])
