"""scikit-learn's 1,797 handwritten digits of 8x8 pixels, and a small classifier."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Generator, Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from allranks.errors import AllranksError
from allranks.tasks import Task

NUM_SAMPLES = {"train": 1_297, "val": 250, "test": 250}  # train: as num_samples below


@dataclass
class Digits(Task):
    """Recognise a handwritten digit."""

    network: Literal["cnn", "mlp"] = "cnn"
    norm: Literal["none", "batch"] = "none"  # batch: BatchNorm after every hidden layer
    dropout: Annotated[float, Field(ge=0, le=0.9)] = 0.0  # before the last layer
    augment: bool = False  # shift each training image by up to one pixel

    defaults: ClassVar[Mapping[str, Any]] = {"batch_size": 64, "epochs": 30}
    num_samples: ClassVar[int] = 1_297

    def model(self) -> nn.Module:
        layers: list[nn.Module] = []
        if self.network == "cnn":
            for channels, filters in ((1, 32), (32, 64)):
                layers += [nn.Conv2d(channels, filters, kernel_size=3, padding=1)]
                layers += [nn.BatchNorm2d(filters)] if self.norm == "batch" else []
                layers += [nn.ReLU(), nn.MaxPool2d(2)]
            layers += [nn.Flatten()]
        else:
            layers += [nn.Flatten()]
            for inputs, outputs in ((64, 256), (256, 256)):
                layers += [nn.Linear(inputs, outputs)]
                layers += [nn.BatchNorm1d(outputs)] if self.norm == "batch" else []
                layers += [nn.ReLU()]
        # Both networks end with 256 values: the cnn's are 64 images of 2x2.
        return nn.Sequential(*layers, nn.Dropout(self.dropout), nn.Linear(256, 10))

    def datasets(self) -> Mapping[str, Dataset[Any]]:
        images, labels = _load()
        # Neighbours are often by the same writer: a fixed shuffle puts all writers in every part.
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        parts = zip(NUM_SAMPLES, torch.split(order, list(NUM_SAMPLES.values())), strict=True)
        return {name: TensorDataset(images[part], labels[part]) for name, part in parts}

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets, reduction="none")

    def metrics(self, outputs: Tensor, targets: Tensor) -> Mapping[str, Tensor]:
        return {"accuracy": (outputs.argmax(1) == targets).float()}

    def has_transform(self) -> bool:
        return self.augment

    def transform(self, sample: tuple[Tensor, Tensor], generator: Generator) -> Any:
        image, label = sample
        down, right = torch.randint(3, (2,), generator=generator).tolist()
        return F.pad(image, (1, 1, 1, 1))[:, down : down + 8, right : right + 8], label


def _load() -> tuple[Tensor, Tensor]:
    """Images `[1797, 1, 8, 8]` from 0 to 1, and their labels."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise AllranksError(
            f"the task digits gets its images from scikit-learn, which is missing ({error})",
            fix="pip install scikit-learn",
        ) from error
    pixels, labels = load_digits(return_X_y=True)
    images = torch.from_numpy(pixels).float().view(-1, 1, 8, 8) / 16
    return images, torch.from_numpy(labels).long()
