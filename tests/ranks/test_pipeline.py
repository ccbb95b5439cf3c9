"""A pipeline's stages compute what one rank computes, by every schedule."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.ranks import run_ranks

from allranks.job.job import parse_job
from allranks.layout import Layout
from allranks.run.events import EventLog, read_events
from allranks.run.folder import RunDir
from allranks.tasks import gpt
from allranks.train import build, loop, optim

pytestmark = pytest.mark.ranks

CPU = torch.device("cpu")


@dataclass
class Trained:
    """What one rank saw."""

    losses: list[float]  # rank 0's events
    norms: list[float]  # of the gradients, before clipping
    metrics: list[float]
    samples: int
    weights: dict[str, torch.Tensor]
    sizes: list[int]


def trained(layout: str, folder: Path, settings: dict[str, Any]) -> Trained:
    """Build and train, on a rank of the layout."""
    gpt.SHAPES["tiny"] = replace(gpt.SHAPES["tiny"], layers=6)  # blocks for eight stages
    job = parse_job({"log_every": 1, "precision": "fp32", **settings})
    rank, world_size = dist.get_rank(), dist.get_world_size()
    run = RunDir(folder / f"{layout.replace(':', '-')}-{job.pipeline.schedule}")
    run.path.mkdir(exist_ok=True)
    me = build.Rank(rank, world_size, rank, world_size, run, 0, Layout.parse(layout), "")
    log = EventLog(run.events(0, rank))
    norms = []

    def clip(*args: Any) -> torch.Tensor:
        norms.append(optim.clip_gradients(*args))
        return norms[-1]

    loop.clip_gradients = clip
    t = build.build(me, job, CPU, log)
    t.checkpointer.save = lambda *_: None
    loop.train(t)
    log.close()
    steps = [event for event in read_events(log.path) if event["event"] == "step"]
    return Trained(
        losses=[event["loss"] for event in steps if "loss" in event],
        norms=[norm.item() for norm in norms],
        metrics=[record["value"] for record in t.metrics],
        samples=sum(event["samples"] for event in steps),
        weights={name: optim.local(p.detach()).clone() for name, p in t.model.named_parameters()},
        sizes=t.notes.get("stages", []),
    )


TINY = {
    "task": "language",
    "options": {"context": 16, "tokens": "tokens.bin"},
    "batch_size": 12,
    "steps": 12,
    "optimizer": {"clip": 0.5},
}


def compare(layout: str, folder: Path, pipeline: dict[str, Any], **settings: Any) -> list[Trained]:
    """Train on one rank and on those of the layout; return what the latter saw."""
    tokens = np.random.default_rng(0).integers(0, 256, 17 * 100)
    tokens.astype("<u2").tofile(folder / "tokens.bin")
    options = {**TINY["options"], "tokens": str(folder / "tokens.bin")}
    settings = {**TINY, "options": options, **settings}
    (one,) = run_ranks(trained, 1, folder, "1x1", folder, settings)
    settings["pipeline"] = pipeline
    found = run_ranks(trained, Layout.parse(layout).ranks, folder, layout, folder, settings)
    assert found[0].losses == pytest.approx(one.losses, rel=1e-5)
    assert found[0].losses[-1] != pytest.approx(found[0].losses[0], rel=1e-2)
    for rank in found:
        assert rank.norms == pytest.approx(one.norms, rel=1e-5)
        assert rank.metrics == pytest.approx(one.metrics, rel=1e-5)
        assert rank.weights.keys() <= one.weights.keys()
    assert {name for rank in found for name in rank.weights} == one.weights.keys()
    assert sum(rank.samples for rank in found) == one.samples
    return found


@pytest.mark.parametrize(
    ("layout", "schedule"),
    [
        ("1x2:pp=2", "1f1b"),
        ("1x4:pp=4", "zero-bubble"),
        ("1x4:pp=2,fsdp=2", "interleaved"),
        ("1x4:pp=2,tp=2", "gpipe"),
    ],
)
def test_stages_compute_what_one_rank_does(tmp_path: Path, layout: str, schedule: str) -> None:
    compare(layout, tmp_path, {"schedule": schedule})
