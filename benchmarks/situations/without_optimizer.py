"""A loop that no optimizer of torch steps: its own update, or none at all."""

import argparse

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--update", action="store_true", help="the parameters, by hand")
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.Linear(512, 1))
    data = TensorDataset(torch.randn(16384, 64), torch.randn(16384, 1))
    loader = DataLoader(data, 64, shuffle=True)
    for step, (inputs, targets) in enumerate(loader, start=1):
        loss = mse_loss(model(inputs), targets)
        if args.update:
            loss.backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter.sub_(1e-3 * parameter.grad)
            model.zero_grad()
        if step == args.steps:
            break
    print(f"loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
