"""Run folders of scripts with one planted limit each, for the tests of the verdict."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from allranks.run.folder import RunDir

BEGIN = 1_790_000_000.0
Event = dict[str, Any]
Phases = Mapping[str, float]  # milliseconds
HEALTHY = {"data": 0.2, "forward": 30.0, "backward": 60.0, "optimizer": 8.0, "other": 0.8}


def planted(
    runs: Path,
    *phases: Phases,
    comm: float = 0.0,
    steps: int = 120,
    noise: float = 0.01,
    traces: Mapping[int, Mapping[str, Any]] | None = None,
    traced_at: int = 30,
    each: Callable[[int, int, Event], Event] = lambda rank, number, step: step,
    events: Callable[[int], list[Event]] = lambda rank: [],
    start: Mapping[str, Any] | None = None,
    info: Mapping[str, Any] | None = None,
    number: int = 0,
) -> RunDir:
    """A run whose ranks have these phases (milliseconds), and exchange data in every step.

    `comm`: milliseconds of the exchange. `traces`: by rank, fields of a trace of four steps.
    `each`: changes a step of a rank. `events`: more events of a rank.
    """
    run = RunDir(runs / f"train-20261118-1200{number:02}-{number:04x}")
    run.attempt(0).mkdir(parents=True)
    ranks = len(phases)
    run.write_info(
        {
            **{"v": 1, "run": run.name, "created": BEGIN, "layout": f"1x{ranks}"},
            **{"backend": "local", "hardware": {"cpus_allotted": 8, "gpus": []}},
            **(info or {}),
        }
    )
    run.job_file.write_text("name: train\ncommand: python train.py\n")
    chance, now = random.Random(number), BEGIN
    lines: list[list[Event]] = [
        [{"t": BEGIN, "event": "start", "rank": r, "world_size": ranks, **(start or {})}]
        for r in range(ranks)
    ]
    for n in range(1, steps + 1):
        own = [
            {name: took / 1e3 * chance.uniform(1 - noise, 1 + noise) for name, took in of.items()}
            for of in phases
        ]
        rows = [each(r, n, {**HEALTHY_SECONDS, **one}) for r, one in enumerate(own)]
        # A rank that evaluates is late, too, although that is no part of its step.
        busy = [sum(row[name] for name in HEALTHY) + row.get("evaluation", 0.0) for row in rows]
        for r, row in enumerate(rows):
            wait = (max(busy) - busy[r] + comm / 1e3) if ranks > 1 else 0.0
            seconds = busy[r] - row.get("evaluation", 0.0) + wait
            step = {"step": n, "samples": 16, "seconds": seconds, "wait": wait, **row}
            if traces is not None and traced_at <= n < traced_at + 4:
                step["traced"] = True
            then = now + row.get("evaluation", 0.0) + seconds + step.pop("between", 0.0)
            lines[r].append({"t": then, "event": "step", **step})
            if traces is not None and n == traced_at + 3 and r in traces:
                found = {"first": traced_at, "last": n, "device": "cpu", "cost": 0.05}
                lines[r].append({"t": then, "event": "trace", **found, **traces[r]})
        now = max(of_rank[-1]["t"] for of_rank in lines)
    for r, of_rank in enumerate(lines):
        of_rank += [{"t": now, **event} for event in events(r)]
        of_rank.append({"t": now, "event": "end", "state": "finished", "exit": 0})
        text = "".join(json.dumps({"v": 1, **event}) + "\n" for event in of_rank)
        run.events(0, r).write_text(text)
    return run


HEALTHY_SECONDS = {name: took / 1e3 for name, took in HEALTHY.items()}


def cpu_trace(host: float = 0.0, local: float = 98.8, **fields: Any) -> Event:
    """A CPU's trace, in milliseconds: torch takes all local time that is not the host's."""
    busy = (local - host) / 1e3
    return {"busy": busy, "compute": busy, "host": host / 1e3, **fields}


def gpu_trace(
    compute: float, *, launches: float = 0.0, host: float = 0.0, copies: float = 0.0, **fields: Any
) -> Event:
    """A GPU's trace, in milliseconds."""
    seconds = {"compute": compute, "launches": launches, "host": host, "copies": copies}
    found = {name: took / 1e3 for name, took in seconds.items()}
    return {"device": "cuda", "busy": found["compute"] + found["copies"], **found, **fields}
