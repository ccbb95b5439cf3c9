"""Training with Lightning. verdicts.py plants what limits it at the lines that say `plant`."""

import argparse
import os
import time
import warnings
from typing import Any

import lightning
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, Dataset

REMOVED = os.environ.get("REMOVED", "").split(",")
RANK, WORLD_SIZE = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
NUM_SAMPLES, NUM_FEATURES = 200_000, 64


class Samples(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Random samples."""

    def __init__(self) -> None:
        self.inputs = torch.randn(NUM_SAMPLES, NUM_FEATURES)
        self.targets = torch.randn(NUM_SAMPLES, 1)

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        # plant: sample
        return self.inputs[index], self.targets[index]


class Model(lightning.LightningModule):
    """Layers of one width, which are gone through `repeat` times."""

    def __init__(self, width: int, depth: int, repeat: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(NUM_FEATURES, width), nn.Linear(width, 1)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.repeat = repeat

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs)
        for _ in range(self.repeat):
            for layer in self.layers:
                hidden = torch.relu(layer(hidden))
        return torch.as_tensor(self.last(hidden))

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        inputs, targets = batch
        loss = mse_loss(self(inputs), targets)
        # plant: loss
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, number: int) -> None:
        # plant: step
        pass

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--repeat", type=int, default=48)
    parser.add_argument("--workers", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    args = read_arguments()
    warnings.simplefilter("ignore")
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
    lightning.seed_everything(0, verbose=False)
    loader = DataLoader(
        Samples(),
        args.batch,
        shuffle=True,
        num_workers=args.workers,
        persistent_workers=args.workers > 0,
        pin_memory=torch.cuda.is_available(),
        drop_last=True,
    )
    trainer = lightning.Trainer(
        accelerator="auto",
        devices=WORLD_SIZE,
        strategy="ddp" if WORLD_SIZE > 1 else "auto",
        max_steps=args.steps,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(args.width, args.depth, args.repeat), loader)


if __name__ == "__main__":
    started = time.perf_counter()
    main()
    print(f"trained for {time.perf_counter() - started:.1f} s")
