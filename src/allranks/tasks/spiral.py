"""Two noisy spirals and a small MLP: what `allranks run` trains if no job is named."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from allranks.tasks import Task

NUM_SAMPLES = {"train": 7_000, "val": 1_500, "test": 1_500}  # train: as num_samples below
TURNS = 1.5


@dataclass
class Spiral(Task):
    """Decide on which of two interleaved spirals a point lies."""

    # Standard deviation of a point's distance from its spiral, whose radius is 1.
    noise: Annotated[float, Field(ge=0, le=1)] = 0.06

    defaults: ClassVar[Mapping[str, Any]] = {"batch_size": 32, "epochs": 50}
    num_samples: ClassVar[int] = 7_000

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(2, 64),
            nn.ReLU(),
            nn.Linear(64, 32),
            nn.ReLU(),
            nn.Linear(32, 16),
            nn.ReLU(),
            nn.Linear(16, 2),
        )

    def datasets(self) -> Mapping[str, Dataset[Any]]:
        points, labels = spirals(sum(NUM_SAMPLES.values()), self.noise)
        sizes = list(NUM_SAMPLES.values())
        parts = zip(
            NUM_SAMPLES, torch.split(points, sizes), torch.split(labels, sizes), strict=True
        )
        return {name: TensorDataset(*tensors) for name, *tensors in parts}

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets, reduction="none")

    def metrics(self, outputs: Tensor, targets: Tensor) -> Mapping[str, Tensor]:
        return {"accuracy": (outputs.argmax(1) == targets).float()}


def spirals(num_samples: int, noise: float) -> tuple[Tensor, Tensor]:
    """Points `[num_samples, 2]` within a radius of about 1, and their spirals; always the same."""
    generator = torch.Generator().manual_seed(0)  # not the job's, which must not change the data
    labels = torch.randint(2, (num_samples,), generator=generator)
    # The root spreads the points evenly along a spiral whose turns grow longer outwards.
    radius = torch.rand(num_samples, generator=generator).sqrt()
    angle = 2 * math.pi * TURNS * radius + math.pi * labels
    points = radius[:, None] * torch.stack([angle.cos(), angle.sin()], dim=1)
    return points + noise * torch.randn(num_samples, 2, generator=generator), labels
