"""Every axis computes what one rank computes: losses, norms of gradients, evaluations."""

from __future__ import annotations

import os
from dataclasses import dataclass
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


def trained(layout: str, folder: Path, settings: dict[str, Any]) -> Trained:
    """Build and train, on a rank of the layout."""
    job = parse_job({"log_every": 1, "precision": "fp32", **settings})
    rank, world_size = dist.get_rank(), dist.get_world_size()
    run = RunDir(folder / layout.replace(":", "-"))
    run.path.mkdir(exist_ok=True)
    os.chdir(folder)
    me = build.Rank(rank, world_size, rank, world_size, run, 0, Layout.parse(layout), "")
    log = EventLog(run.events(0, rank))
    norms = []

    def clip(*args: Any) -> torch.Tensor:
        norms.append(optim.clip_gradients(*args))
        return norms[-1]

    vars(loop)["clip_gradients"] = clip
    t = build.build(me, job, CPU, log)
    t.checkpointer.save = lambda *_: None  # type: ignore[method-assign]  # others test it
    loop.train(t)
    log.close()
    steps = [event for event in read_events(log.path) if event["event"] == "step"]
    return Trained(
        losses=[event["loss"] for event in steps if "loss" in event],
        norms=[norm.item() for norm in norms],
        metrics=[record["value"] for record in t.metrics],
        samples=sum(event["samples"] for event in steps),
    )


TINY = {
    "task": "language",
    "options": {"context": 16, "tokens": "tokens.bin"},
    "batch_size": 12,
    "micro_batch_size": 2,  # so that gradients are accumulated
    "steps": 12,
    "optimizer": {"clip": 0.5},  # which most steps exceed
}


@pytest.fixture(autouse=True)
def tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """101 windows to train on: the last batch of an epoch has 5. And 5 to validate on."""
    ids = np.random.default_rng(0).integers(0, 64, 106 * 17) ** 2 % 256
    (tmp_path / "tokens.bin").write_bytes(ids.astype("<u2").tobytes())


LAYOUTS = [
    *("1x2", "1x2:fsdp=2", "1x2:tp=2", "1x4:fsdp=2", "1x4:tp=2", "1x4:fsdp=2,tp=2"),
    *("1x4:fsdp=4", "1x4:tp=4"),
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_axes_do_not_change_the_losses(tmp_path: Path, layout: str) -> None:
    (one,) = run_ranks(trained, 1, tmp_path, "1x1", tmp_path, TINY)
    found = run_ranks(trained, Layout.parse(layout).ranks, tmp_path, layout, tmp_path, TINY)
    print(max(abs(a / b - 1) for a, b in zip(found[0].losses, one.losses, strict=True)))
    print(max(abs(a / b - 1) for a, b in zip(found[0].norms, one.norms, strict=True)))
    assert found[0].losses == pytest.approx(one.losses, rel=1e-5)
    for rank in found:
        assert rank.norms == pytest.approx(one.norms, rel=1e-5)
        assert rank.metrics == pytest.approx(one.metrics, rel=1e-5)
    assert sum(rank.samples for rank in found) == one.samples
