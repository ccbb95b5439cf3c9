"""A task of your own: a network learns sin(x) from noisy samples."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn
from torch.utils.data import TensorDataset

from allranks.tasks import Task


@dataclass
class Sine(Task):
    noise: float = 0.1  # a field is an option: `options: {noise: 0.2}` in job.yaml

    defaults: ClassVar = {"batch_size": 100, "epochs": 40}  # where job.yaml says nothing

    def model(self):
        return nn.Sequential(
            nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)
        )

    def datasets(self):
        generator = torch.Generator().manual_seed(0)  # every rank must see the same data
        x = 8 * torch.rand(2_500, 1, generator=generator) - 4
        y = torch.sin(x) + self.noise * torch.randn(x.shape, generator=generator)
        return {
            "train": TensorDataset(x[:2_000], y[:2_000]),
            "val": TensorDataset(x[2_000:], y[2_000:]),
        }

    def loss(self, outputs, targets):
        return (outputs - targets).square().mean(1)  # one per sample: the loop takes the mean

    def metrics(self, outputs, targets):
        return {"distance": (outputs - targets).abs().mean(1)}
