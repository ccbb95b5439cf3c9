"""A pipeline's stages compute what one rank computes, by every schedule."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.ranks import run_ranks
from tests.training import Trained, trained

from allranks.job.stages import STAGES_PER_RANK
from allranks.layout import Layout
from allranks.tasks import gpt

pytestmark = pytest.mark.ranks

LANGUAGE = {
    "task": "language",
    "options": {"context": 16, "tokens": "tokens.bin"},
    "batch_size": 12,
    "steps": 12,
    "optimizer": {"clip": 0.5},  # which most steps exceed
}

# A chain with BatchNorm and blocks without weights, whose loss weights its samples.
CHAIN = """
from dataclasses import dataclass
import torch
from torch import nn
from torch.utils.data import TensorDataset
from allranks.tasks import Task

@dataclass
class Chain(Task):
    norm: bool = True

    def model(self):
        layers = [nn.Flatten()]
        for _ in range(4):
            layers += [nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Dropout(0.0)]
            layers += [nn.BatchNorm1d(8)] if self.norm else []
        return nn.Sequential(*layers, nn.Linear(8, 3))

    def datasets(self):
        draw = torch.Generator().manual_seed(0)
        def made(number):
            inputs = torch.randn(number, 2, 4, generator=draw)
            return TensorDataset(inputs, inputs.sum(1)[:, :3].argmax(1))
        return {"train": made(96), "val": made(11)}

    def loss(self, outputs, targets):
        losses = nn.functional.cross_entropy(outputs, targets, reduction="none")
        return losses, 1.0 + targets
"""


def trained_deeper(layout: str, folder: Path, settings: dict[str, Any]) -> Trained:
    gpt.SHAPES["tiny"] = dataclasses.replace(gpt.SHAPES["tiny"], layers=6)  # 8 blocks
    return trained(layout, folder, settings)


def compare(
    layout: str, folder: Path, settings: dict[str, Any], *, rel: float = 1e-5, **more: Any
) -> list[Trained]:
    """Train on one rank, and with `more` on those of the layout; return what these saw."""
    # 101 windows to train on: the last batch of an epoch has 5. And 5 to validate on.
    ids = np.random.default_rng(0).integers(0, 64, 106 * 17) ** 2 % 256
    ids.astype("<u2").tofile(folder / "tokens.bin")
    (folder / "chain.py").write_text(CHAIN)
    (one,) = run_ranks(trained_deeper, 1, folder, "1x1", folder, settings)
    settings, ranks = {**settings, **more}, Layout.parse(layout).ranks
    found = run_ranks(trained_deeper, ranks, folder, layout, folder, settings, timeout=240)
    assert found[0].losses == pytest.approx(one.losses, rel=rel)
    assert one.losses[-1] < one.losses[0]
    for rank in found:
        assert rank.norms == pytest.approx(one.norms, rel=rel)
        assert rank.metrics == pytest.approx(one.metrics, rel=rel)
        assert rank.metrics
        assert rank.stages == found[0].stages
    assert set.union(*(rank.parameters for rank in found)) == one.parameters
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
    found = compare(layout, tmp_path, LANGUAGE, pipeline={"schedule": schedule})
    # Only the first stage has all of the embeddings, and the last shares one of them.
    with_tokens = [rank for rank in found if "embedding.tokens.weight" in rank.parameters]
    assert len(with_tokens) == 2 * len(found) // Layout.parse(layout).pp
    assert sum(found[0].stages) == 8


@pytest.mark.soak
@pytest.mark.parametrize("schedule", STAGES_PER_RANK)
@pytest.mark.parametrize(
    "layout",
    [
        *("1x2:pp=2", "1x4:pp=4", "1x4:pp=2", "1x4:pp=2,tp=2", "1x4:pp=2,fsdp=2"),
        "1x8:pp=2,fsdp=2,tp=2",
    ],
)
def test_every_layout_and_schedule(tmp_path: Path, layout: str, schedule: str) -> None:
    compare(layout, tmp_path, LANGUAGE, pipeline={"schedule": schedule})


@pytest.mark.soak
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
def test_recomputed_activations(tmp_path: Path, schedule: str) -> None:
    more: dict[str, Any] = {"activation_checkpointing": "full", "pipeline": {"schedule": schedule}}
    compare("1x4:pp=2,fsdp=2", tmp_path, LANGUAGE, **more)


@pytest.mark.soak
@pytest.mark.parametrize("number", [1, 2, 5])
def test_any_number_of_micro_batches(tmp_path: Path, number: int) -> None:
    compare("1x4:pp=4", tmp_path, LANGUAGE, pipeline={"micro_batches": number})


@pytest.mark.parametrize(("layout", "norm"), [("1x2:pp=2", True), ("1x4:pp=2", False)])
def test_a_sequence_of_layers_with_weighted_samples(
    tmp_path: Path, layout: str, norm: bool
) -> None:
    chain = {
        **{"task": "chain:Chain", "options": {"norm": norm}, "optimizer": {"lr": 0.01}},
        # BatchNorm sees one micro-batch: they are the same on both layouts.
        **{"batch_size": 12, "micro_batch_size": 4, "steps": 12},
    }
    found = compare(layout, tmp_path, chain, rel=1e-4 if norm else 1e-5)
    assert len(found[0].stages) == 2
