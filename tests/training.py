"""Whole trainings on ranks of `run_ranks`, and what each rank saw."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from allranks.job.job import parse_job
from allranks.layout import Layout
from allranks.run.events import EventLog, read_events
from allranks.run.folder import RunDir
from allranks.train import build, loop, optim


@dataclass
class Trained:
    """What one rank saw."""

    losses: list[float]  # rank 0's events
    norms: list[float]  # of the gradients, before clipping
    metrics: list[float]
    samples: int
    parameters: set[str]  # names of those that it holds
    stages: list[int]  # how many blocks each stage has
    state_bytes: int  # of the optimizer, on this rank
    scale: float | None  # of fp16's losses, at the end
    shared: float  # sum of the weights that other ranks of its replica hold too, at the end


def trained(layout: str, folder: Path, settings: dict[str, Any]) -> Trained:
    """Build and train, on a rank of the layout. Nothing is saved."""
    os.chdir(folder)  # where a task of the test's own is
    job = parse_job({"log_every": 1, "precision": "fp32", **settings})
    rank, world_size = dist.get_rank(), dist.get_world_size()
    run = RunDir(folder / layout.replace(":", "-"))
    me = build.Rank(rank, world_size, rank, world_size, run, 0, Layout.parse(layout), "")
    log = EventLog(run.events(0, rank))
    norms = []

    def clip(*args: Any) -> torch.Tensor:
        norms.append(optim.clip_gradients(*args))
        return norms[-1]

    vars(loop)["clip_gradients"] = clip
    t = build.build(me, job, torch.device("cpu"), log)
    if t.scaler is not None:
        t.scaler._init_scale = 2.0**30  # which overflows: the first steps are skipped
    t.checkpointer.save = lambda *_: None  # type: ignore[method-assign]  # others test it
    loop.train(t)
    log.close()
    steps = [event for event in read_events(log.path) if event["event"] == "step"]
    states = [value for state in t.optimizer.state.values() for value in state.values()]
    return Trained(
        losses=[event["loss"] for event in steps if "loss" in event],
        norms=[norm.item() for norm in norms],
        metrics=[record["value"] for record in t.metrics],
        samples=sum(event["samples"] for event in steps),
        parameters={name for name, _ in t.model.named_parameters()},
        stages=t.notes.get("stages", []),
        state_bytes=sum(optim.local(value).nbytes for value in states if value.dim()),
        scale=t.scaler.get_scale() if t.scaler is not None else None,
        shared=sum(
            optim.local(parameter).double().sum().item()
            for parameter, copies in zip(t.parameters, t.copies, strict=True)
            if copies > 1
        ),
    )
