"""Scripts that divide their model in forms of their own: samples count once per share of the data.

Every script says how many samples all its ranks together have trained on.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.scripts import run

from allranks.timing.remarks import remarks
from allranks.timing.result import result

pytestmark = pytest.mark.ranks

STEPS, BATCH = 12, 4
# `share` of `shares`: which part of the data a rank reads.
READ = """
from torch.utils.data.distributed import DistributedSampler
from torch.distributed.device_mesh import init_device_mesh
dist.init_process_group("gloo")
STEPS, BATCH = 12, 4
def batches(share, shares, items=None):
    drawn = torch.randn(48 * shares, 8), torch.randn(48 * shares, 1)
    items = items or TensorDataset(*drawn)
    sampler = DistributedSampler(items, shares, share)
    return DataLoader(items, batch_size=BATCH, sampler=sampler)
"""
END = "\ndist.destroy_process_group()\n"


@dataclass(frozen=True)
class Form:
    """A script on `ranks` ranks, which read `shares` shares of the data."""

    name: str
    text: str
    ranks: int
    shares: int
    counted: str = "measured"
    remark: str | None = None  # the one that says that samples count several times


DTENSOR = """
from torch.distributed.tensor.parallel import (
    ColwiseParallel, RowwiseParallel, parallelize_module)
mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
"""
BY_HAND = """
class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.contiguous()
        dist.all_reduce(x, group=tensor_group)
        return x
    @staticmethod
    def backward(ctx, gradient):
        return gradient
class Divided(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 1, bias=False)
    def forward(self, x):
        return Sum.apply(self.second(self.first(x).relu()))
"""
ALL_TO_ALL = """
class Swap(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        got = torch.empty_like(x)
        dist.all_to_all_single(got, x.contiguous())
        return got
    @staticmethod
    def backward(ctx, gradient):
        return Swap.forward(ctx, gradient)
class Swapped(nn.Module):
    def forward(self, x):
        return Swap.apply(x)
model = DDP(nn.Sequential(nn.Linear(8, 8), Swapped(), nn.Linear(8, 8), Swapped(), nn.Linear(8, 1)))
"""
SHARDED = """
from torch.distributed.fsdp import fully_shard
"""
FORMS = [
    Form(
        "DTensor's tensor parallel, with FSDP2 over the other axis",
        DTENSOR
        + SHARDED
        + """
fully_shard(model, mesh=mesh["dp"])
optimizer = torch.optim.AdamW(model.parameters())
for x, y in batches(rank // 2, 2):
    train(x, y)
""",
        4,
        2,
    ),
    Form(
        "layers divided by hand, in groups of the script's own",
        BY_HAND
        + """
tensor_group = dist.new_group([0, 1])
model = Divided()
optimizer = torch.optim.AdamW(model.parameters())
for x, y in batches(0, 1):
    total = train(x, y).detach()
    dist.all_reduce(total)
""",
        2,
        1,
    ),
    Form(
        "a pipeline, of which only the ends read data",
        """
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
stage = PipelineStage(
    nn.Linear(8, 8) if rank == 0 else nn.Linear(8, 1), rank, 2, torch.device("cpu"))
optimizer = torch.optim.AdamW(stage.submod.parameters())
schedule = ScheduleGPipe(stage, 2, loss_fn=mse_loss)
inputs, targets = torch.randn(48, 8), torch.randn(48, 1)
for (each,) in batches(0, 1, TensorDataset(inputs if rank == 0 else targets)):
    schedule.step(each) if rank == 0 else schedule.step(target=each)
    optimizer.step()
    optimizer.zero_grad()
""",
        2,
        1,
    ),
    Form(
        "ranks that read the same samples by mistake",
        """
model = DDP(model)
loader = DataLoader(data, batch_size=4)
for epoch in range(2):
    for x, y in loader:
        total = train(x, y).detach()
        dist.all_reduce(total)
""",
        2,
        2,
        remark="ranks 0 and 1 read the same samples",
    ),
]
LONGER = [
    Form(
        "FSDP2 over all ranks",
        SHARDED
        + """
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())
for x, y in batches(rank, world):
    train(x, y)
""",
        2,
        2,
    ),
    Form(
        "FSDP2 over two axes",
        SHARDED
        + """
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
for layer in (model[0], model[2]):
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters())
for x, y in batches(rank, world):
    train(x, y)
""",
        4,
        4,
    ),
    Form(
        "FSDP2 whose ranks read the same samples by mistake",
        SHARDED
        + """
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())
for x, y in batches(0, 1):
    train(x, y)
""",
        2,
        2,
        remark="ranks 0 and 1 read the same samples",
    ),
    Form(
        "tensor parallel on samples that were drawn, not loaded",
        DTENSOR
        + """
optimizer = torch.optim.AdamW(model.parameters())
for step in range(12):
    torch.manual_seed(step)
    train(torch.randn(4, 8), torch.randn(4, 1))
""",
        2,
        1,
        counted="about",
    ),
    Form(
        "one rank of each tensor group reads, and broadcasts",
        BY_HAND
        + """
groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
copies = [dist.new_group([0, 2]), dist.new_group([1, 3])]
tensor_group = groups[rank // 2]
model = Divided()
optimizer = torch.optim.AdamW(model.parameters())
read = iter(batches(rank // 2, 2)) if rank % 2 == 0 else None
for step in range(STEPS):
    x, y = next(read) if read else (torch.empty(4, 8), torch.empty(4, 1))
    for each in (x, y):
        dist.broadcast(each, rank // 2 * 2, group=tensor_group)
    mse_loss(model(x), y).backward()
    for p in model.parameters():
        dist.all_reduce(p.grad, group=copies[rank % 2])
    optimizer.step()
    optimizer.zero_grad()
""",
        4,
        2,
    ),
    Form(
        "a pipeline by hand, two times",
        """
part, last = rank // 2, rank % 2 == 1
copies = [dist.new_group([0, 2]), dist.new_group([1, 3])]
net = nn.Linear(8, 1) if last else nn.Linear(8, 8)
optimizer = torch.optim.AdamW(net.parameters())
targets = TensorDataset(torch.randn(96, 1)) if last else TensorDataset(torch.randn(96, 8))
for (each,) in batches(part, 2, targets):
    if last:
        got = torch.empty(4, 8)
        dist.recv(got, rank - 1)
        mse_loss(net(got.requires_grad_()), each).backward()
        dist.send(got.grad, rank - 1)
    else:
        out = net(each)
        dist.send(out.detach(), rank + 1)
        gradient = torch.empty_like(out)
        dist.recv(gradient, rank + 1)
        out.backward(gradient)
    for p in net.parameters():
        dist.all_reduce(p.grad, group=copies[rank % 2])
    optimizer.step()
    optimizer.zero_grad()
""",
        4,
        2,
    ),
    Form(
        "parts of one sequence",
        ALL_TO_ALL
        + """
optimizer = torch.optim.AdamW(model.parameters())
for x, y in batches(0, 1):
    model(x.chunk(2, dim=1)[rank].repeat(1, 2)).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
""",
        2,
        1,
    ),
    Form(
        "experts, of samples that each rank has in a file of its own",
        ALL_TO_ALL
        + """
optimizer = torch.optim.AdamW(model.parameters())
torch.manual_seed(rank)
for x, y in DataLoader(TensorDataset(torch.randn(48, 8), torch.randn(48, 1)), batch_size=4):
    train(x, y)
""",
        2,
        2,
    ),
    Form(
        "tensor parallel, compiled",
        DTENSOR
        + """
model = torch.compile(model)
optimizer = torch.optim.AdamW(model.parameters())
for x, y in batches(0, 1):
    train(x, y)
""",
        2,
        1,
    ),
]


def check(tmp_path: Path, form: Form) -> None:
    found = run(tmp_path, READ + form.text + END, form.ranks)
    told = result(found.run, "finished")
    assert told["counted"]["samples"] == form.counted, told["counted"]
    if form.counted == "measured":
        assert told["samples"] == form.shares * BATCH * len(found.steps())
    timing = found.timing()
    assert timing.samples_per_step == pytest.approx(form.shares * BATCH)
    said = [one.text for one in remarks(found.run, timing) if one.kind == "same-samples"]
    assert len(said) == (form.remark is not None)
    assert all(text.startswith(form.remark or "") for text in said)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_samples_count_once_for_each_share(tmp_path: Path, form: Form) -> None:
    check(tmp_path, form)


@pytest.mark.soak
@pytest.mark.parametrize("form", LONGER, ids=lambda form: form.name)
def test_samples_count_once_for_each_share_in_more_forms(tmp_path: Path, form: Form) -> None:
    check(tmp_path, form)
