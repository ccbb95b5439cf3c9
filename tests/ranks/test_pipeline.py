"""A pipeline's stages compute what one rank computes, by every schedule."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from tests.training import Trained, Trainings, assert_same, trained

from allranks.job.stages import STAGES_PER_RANK
from allranks.layout import Layout
from allranks.tasks import gpt

pytestmark = pytest.mark.ranks

LANGUAGE: dict[str, Any] = {"micro_batch_size": None}  # as many as keep the stages busy

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


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Trainings:
    return Trainings(tmp_path_factory.mktemp("pipeline"), {"chain.py": CHAIN})


def compare(
    train: Trainings, layout: str, settings: dict[str, Any], *, rel: float = 1e-5, **more: Any
) -> list[Trained]:
    """Train on one rank, and with `more` on those of the layout; return what these saw."""
    one = train("1x1", trained_deeper, **settings)
    found = train(layout, trained_deeper, **settings, **more)
    assert_same(found, one, rel)
    assert all(rank.stages == found[0].stages for rank in found)
    return found


@pytest.mark.parametrize(
    ("layout", "pipeline"),
    [
        ("1x2:pp=2", {"schedule": "1f1b"}),
        ("1x4:pp=4", {"schedule": "zero-bubble"}),
        ("1x4:pp=2,fsdp=2", {"schedule": "interleaved"}),
        ("1x4:pp=2,tp=2", {"schedule": "gpipe", "micro_batches": 2}),
    ],
)
def test_stages_compute_what_one_rank_does(
    train: Trainings, layout: str, pipeline: dict[str, Any]
) -> None:
    found = compare(train, layout, LANGUAGE, pipeline=pipeline)
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
def test_every_layout_and_schedule(train: Trainings, layout: str, schedule: str) -> None:
    compare(train, layout, LANGUAGE, pipeline={"schedule": schedule})


@pytest.mark.soak
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
def test_recomputed_activations(train: Trainings, schedule: str) -> None:
    more: dict[str, Any] = {"activation_checkpointing": "full", "pipeline": {"schedule": schedule}}
    compare(train, "1x4:pp=2,fsdp=2", LANGUAGE, **more)


@pytest.mark.soak
@pytest.mark.parametrize("number", [1, 2, 5])
def test_any_number_of_micro_batches(train: Trainings, number: int) -> None:
    compare(train, "1x4:pp=4", LANGUAGE, pipeline={"micro_batches": number})


@pytest.mark.parametrize(("layout", "norm"), [("1x2:pp=2", True), ("1x4:pp=2", False)])
def test_a_sequence_of_layers_with_weighted_samples(
    train: Trainings, layout: str, norm: bool
) -> None:
    chain = {
        **{"task": "chain:Chain", "options": {"norm": norm}, "optimizer": {"lr": 0.01}},
        "micro_batch_size": 4,  # BatchNorm sees one: they are the same on both layouts
    }
    found = compare(train, layout, chain, rel=1e-4 if norm else 1e-5)
    assert len(found[0].stages) == 2
