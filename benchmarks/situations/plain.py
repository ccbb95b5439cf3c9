"""A plain training loop. verdicts.py plants what limits it at the lines that say `plant`."""

import argparse
import os
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, default_collate

REMOVED = os.environ.get("REMOVED", "").split(",")
RANK, WORLD_SIZE = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
NUM_SAMPLES, NUM_FEATURES = 200_000, 64


def python_work(seconds: float) -> dict[int, int]:
    """Pure Python, as tokenizers and metrics can be."""
    counts: dict[int, int] = {}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:  # planted
        counts[len(counts) % 100] = counts.get(len(counts) % 100, 0) + 1  # planted
    return counts  # planted


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


def collate(samples: list[Any]) -> Any:
    """A batch of samples."""
    # plant: collate
    return default_collate(samples)


class Model(nn.Module):
    """Layers of one width, which are gone through `repeat` times."""

    def __init__(self, width: int, depth: int, repeat: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(NUM_FEATURES, width), nn.Linear(width, 1)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.repeat = repeat

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs)
        # plant: forward
        for _ in range(self.repeat):
            for layer in self.layers:
                hidden = torch.relu(layer(hidden))
        return torch.as_tensor(self.last(hidden))


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--repeat", type=int, default=48)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--compile", action="store_true")
    return parser.parse_args()


def main() -> None:
    args = read_arguments()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device.type == "cuda"
    if not on_gpu:
        torch.set_num_threads(1)
    if WORLD_SIZE > 1:
        dist.init_process_group("nccl" if on_gpu else "gloo")
    torch.manual_seed(0)
    data = Samples()
    sampler: Any = DistributedSampler(data) if WORLD_SIZE > 1 else None
    loader = DataLoader(
        data,
        args.batch,
        shuffle=sampler is None,
        sampler=sampler,
        num_workers=args.workers,
        persistent_workers=args.workers > 0,
        pin_memory=on_gpu,
        collate_fn=collate,
        drop_last=True,
    )
    model: Any = Model(args.width, args.depth, args.repeat)
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    model = model.to(device)
    if WORLD_SIZE > 1:
        model = DistributedDataParallel(model)
    if args.compile:
        model = torch.compile(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    # plant: begin
    step = 0
    while step < args.steps:
        for number, (inputs, targets) in enumerate(loader, start=1):
            # plant: batch
            inputs = inputs.to(device, non_blocking=True)
            targets = targets.to(device, non_blocking=True)
            outputs = model(inputs)
            loss = mse_loss(outputs, targets) / args.accumulate
            # plant: loss
            loss.backward()
            # plant: backward
            if number % args.accumulate:
                continue
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            # plant: step
            if step == args.steps:
                break
    if WORLD_SIZE > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
