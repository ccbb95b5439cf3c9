"""BatchNorm over ranks is BatchNorm over the whole batch, however it is shared out."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.ranks import run_ranks
from torch import Tensor, nn

from allranks.train.mesh import Ranks
from allranks.train.parallelize import SynchronisedBatchNorm, norms_count

pytestmark = pytest.mark.ranks

STEPS = 3
SHAPE = (8, 5, 3)  # of the whole batch: samples, features, places


def whole_batches() -> list[tuple[Tensor, Tensor]]:
    """Inputs, and what the loss weighs each output by."""
    generator = torch.Generator().manual_seed(0)
    draw = [torch.randn(2, *SHAPE, generator=generator) for _ in range(STEPS)]
    return [(3 + 2 * inputs, weights) for inputs, weights in draw]


def start(norm: nn.Module) -> None:
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.copy_(torch.linspace(0.5, 2, parameter.numel()))


def of_one_rank(momentum: float | None) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients of the inputs of each step; then those of the parameters, and the buffers."""
    norm = nn.BatchNorm1d(SHAPE[1], momentum=momentum)
    start(norm)
    gradients = []
    for inputs, weights in whole_batches():
        inputs.requires_grad_()
        (norm(inputs) * weights).sum().backward()
        assert inputs.grad is not None
        gradients.append(inputs.grad)
    return gradients, [*(p.grad for p in norm.parameters() if p.grad is not None), *norm.buffers()]


def of_this_rank(shares: list[int], momentum: float | None) -> tuple[list[Tensor], list[Tensor]]:
    norm = SynchronisedBatchNorm(SHAPE[1], momentum=momentum)
    start(norm)
    rank = dist.get_rank()
    norm.ranks = Ranks(dist.get_world_size(), rank, dist.group.WORLD)
    high = list(accumulate(shares))[rank]
    low = high - shares[rank]
    gradients = []
    size = max(shares)  # what is missing is borrowed, and counts for nothing
    for inputs, weights in whole_batches():
        mine = torch.cat([inputs[low:high], inputs[:1].expand(size - high + low, -1, -1)])
        mine = mine.clone().requires_grad_()
        counted = (torch.arange(size) < high - low).float()
        weights = torch.cat([weights[low:high], torch.zeros(size - high + low, *SHAPE[1:])])
        with norms_count([norm], counted):
            (norm(mine) * weights).sum().backward()
        assert mine.grad is not None
        gradients.append(mine.grad[: high - low])
    parameters = []
    for parameter in norm.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        parameters.append(parameter.grad)
    return gradients, [*parameters, *norm.buffers()]


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize(
    "shares", [[4, 4], [1, 7], [8, 0], [3, 3, 2], [5, 0, 3], [0, 8, 0]], ids=str
)
def test_ranks_with_uneven_shares_are_one_rank_with_all(
    tmp_path: Path, shares: list[int], momentum: float | None
) -> None:
    expected, state = of_one_rank(momentum)
    results = run_ranks(of_this_rank, len(shares), tmp_path, shares, momentum)
    for step in range(STEPS):
        found = torch.cat([gradients[step] for gradients, _ in results])
        torch.testing.assert_close(found, expected[step], rtol=1e-4, atol=1e-5)
    for _, found_state in results:
        for one, other in zip(found_state, state, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    for _, found_state in results[1:]:  # to the bit: ranks must not drift apart
        assert all(map(torch.equal, found_state, results[0][1]))
