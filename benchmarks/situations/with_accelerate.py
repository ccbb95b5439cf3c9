"""Training with Accelerate. verdicts.py plants what limits it at the lines that say `plant`."""

import argparse
import os
import time

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

REMOVED = os.environ.get("REMOVED", "").split(",")
NUM_SAMPLES, NUM_FEATURES = 200_000, 64


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--depth", type=int, default=192)
    parser.add_argument("--accumulate", type=int, default=1)
    return parser.parse_args()


def main() -> None:
    args = read_arguments()
    accelerator = Accelerator(gradient_accumulation_steps=args.accumulate)
    if accelerator.device.type == "cpu":
        torch.set_num_threads(1)
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(NUM_FEATURES, args.width)]
    for _ in range(args.depth):
        layers += [nn.ReLU(), nn.Linear(args.width, args.width)]
    model = nn.Sequential(*layers, nn.Linear(args.width, 1))
    data = TensorDataset(torch.randn(NUM_SAMPLES, NUM_FEATURES), torch.randn(NUM_SAMPLES, 1))
    loader = DataLoader(data, args.batch, shuffle=True, drop_last=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    started, step = time.perf_counter(), 0
    while step < args.steps:
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = mse_loss(model(inputs), targets)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            # plant: step
            step += int(accelerator.sync_gradients)
            if step == args.steps:
                break
    accelerator.print(f"trained for {time.perf_counter() - started:.1f} s")
    accelerator.end_training()


if __name__ == "__main__":
    main()
