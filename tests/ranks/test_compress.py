"""Sending less between ranks: nothing is lost but what an error remembers, and runs resume exactly.

What torch's hooks send is compared with theory, and with what the kernel says was sent.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.commandline import Allranks
from tests.faults import losses, newest_weights, same_bits
from tests.ranks import run_ranks
from torch import Tensor, nn

from allranks.job.job import Compress, Optimizer
from allranks.run import commits
from allranks.run.events import EventLog
from allranks.train.checkpoint import Checkpointer, named_parameters
from allranks.train.compress import AveragedWeights, CompressedGradients, plain_bytes
from allranks.train.data import Progress
from allranks.train.mesh import Ranks
from allranks.train.optim import Schedule, allocate_state
from allranks.train.parallelize import data_parallel, plain

pytestmark = pytest.mark.ranks

BYTES_SENT = 200  # where the kernel's struct tcp_info has it, and how many of them were repeated
WIDTHS = (300, 500, 200)
PARAMETERS = 300 * 500 + 500 + 500 * 200 + 200


def all_ranks() -> Ranks:
    return Ranks(dist.get_world_size(), dist.get_rank(), dist.group.WORLD)


def compression(settings: dict[str, Any]) -> tuple[nn.Module, CompressedGradients]:
    torch.manual_seed(0)
    first, hidden, last = WIDTHS
    model = nn.Sequential(nn.Linear(first, hidden), nn.Tanh(), nn.Linear(hidden, last))
    return model, CompressedGradients(Compress(**settings), model, all_ranks(), seed=0)


def bytes_by_the_kernel() -> int:
    """What this process has sent over TCP, gloo's headers included."""
    dist.barrier()  # until the others have it, some may still be in this process's buffers
    total = 0
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError), socket.socket(fileno=os.dup(int(number))) as one:
            info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            sent, repeated = struct.unpack_from("QQ", info, BYTES_SENT)
            total += sent - repeated  # on a busy machine, the kernel does not wait long for a rank
    return total


def flat(tensors: list[Tensor | None]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors if tensor is not None])


def exchange(settings: dict[str, Any], folder: str, passes: int = 3) -> list[dict[str, Any]]:
    """Some passes, each with this rank's own gradient, what came of it, and the error left over."""
    model, compressed = compression(settings)
    model = data_parallel(model, all_ranks(), torch.device("cpu"))
    parameters = [*model.parameters()]
    found = []
    for number in range(passes + 2):
        torch.manual_seed(10 * number + dist.get_rank())
        inputs = torch.randn(20, WIDTHS[0])
        own = torch.autograd.grad(plain(model)(inputs).square().mean(), parameters)
        before, by_kernel = compressed.wire.sent, bytes_by_the_kernel()
        model(inputs).square().mean().backward()
        _, saved = compressed.divide({})
        prefix = f"compress.error.rank-{dist.get_rank()}."
        names = [name for name, _ in named_parameters(plain(model))]
        found.append(
            {
                "own": flat([*own]),
                "exchanged": flat([p.grad for p in parameters]),
                "error": flat([saved.get(prefix + name) for name in names]) if saved else None,
                "weight": torch.as_tensor(parameters[0].grad).clone(),
                "sent": compressed.wire.sent - before,
                "kernel": bytes_by_the_kernel() - by_kernel,
                "plain": plain_bytes(model, all_ranks()),
            }
        )
        if number == 1:  # DDP has made its final buckets
            compressed.begin(model, 0, Schedule(Optimizer(warmup=0.0), num_steps=9))
        for parameter in parameters:
            parameter.grad = None
    save(folder, plain(model), compressed)
    return found[1:]


def save(folder: str, model: nn.Module, compressed: CompressedGradients) -> None:
    group = dist.group.WORLD
    assert group is not None
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    allocate_state(optimizer)
    log = EventLog(Path(folder).parent / f"rank-{dist.get_rank()}.jsonl")
    checkpointer = Checkpointer(
        Path(folder), model, optimizer, keep=1, group=group, log=log, divide=compressed.divide
    )
    checkpointer.save(Progress(step=3), {"metrics": []})
    checkpointer.finish()
    log.close()
    dist.barrier()


def load_errors(settings: dict[str, Any], folder: str, num_saved: int) -> Tensor:
    model, compressed = compression(settings)
    compressed.load(commits.commits(Path(folder))[0], num_saved)
    return flat([compressed._loaded[name] for name, _ in named_parameters(model)])


def mean(found: list[list[dict[str, Any]]], at: int, key: str) -> Tensor:
    return torch.stack([rank[at][key] for rank in found]).mean(0)


def theory(settings: dict[str, Any]) -> int:
    if settings["name"] in ("bf16", "fp16"):
        return 2 * PARAMETERS
    if settings["name"] == "topk":
        kept: int = round(settings["keep"] * PARAMETERS)
        return 8 * kept
    rows_and_columns = (300 + 500) + (500 + 200)
    rank: int = settings["rank"]
    return 4 * (rank * rows_and_columns + 500 + 200)  # biases are sent as they are


METHODS = [
    {"name": "bf16"},
    {"name": "fp16"},
    {"name": "powersgd", "rank": 4},
    {"name": "powersgd", "rank": 1},
    {"name": "topk", "keep": 0.02},
]


@pytest.mark.parametrize("settings", METHODS, ids=lambda one: "-".join(map(str, one.values())))
def test_what_is_exchanged_and_what_is_left_over(tmp_path: Path, settings: dict[str, Any]) -> None:
    folder = tmp_path / "checkpoints"
    found = run_ranks(exchange, 2, tmp_path, settings, str(folder))
    uncompressed = found[0][0]
    assert uncompressed["sent"] == 0 and uncompressed["plain"] == 4 * PARAMETERS
    assert 1 <= uncompressed["kernel"] / uncompressed["plain"] < 1.02
    assert torch.allclose(uncompressed["exchanged"], mean(found, 0, "own"), atol=1e-7)
    for at in range(1, 4):
        one, other = found[0][at], found[1][at]
        assert torch.equal(one["exchanged"], other["exchanged"])
        assert one["sent"] == theory(settings)
        # More by gloo's headers, and by the barrier.
        assert one["sent"] <= one["kernel"] < 1.05 * one["sent"] + 4000
        exchanged, wanted = one["exchanged"], mean(found, at, "own")
        if settings["name"] in ("bf16", "fp16"):
            assert one["error"] is None
            assert not torch.equal(exchanged, wanted)
            assert torch.allclose(exchanged, wanted, rtol=2**-7, atol=1e-5)
            continue
        before = mean(found, at - 1, "error") if at > 1 else torch.zeros(PARAMETERS)
        kept = exchanged + mean(found, at, "error")
        assert torch.allclose(kept, wanted + before, atol=1e-6)
        assert mean(found, at, "error").norm() > 0.1 * wanted.norm()
        if settings["name"] == "powersgd":
            singular = torch.linalg.svdvals(one["weight"].double())
            assert int((singular > 1e-6 * singular[0]).sum()) == settings["rank"]
        else:
            assert 0 < int((exchanged != 0).sum()) <= 2 * round(settings["keep"] * PARAMETERS)
    if found[0][-1]["error"] is None:
        return
    # The same ranks take back their own errors; of another number, each takes the mean.
    for rank, error in enumerate(run_ranks(load_errors, 2, tmp_path, settings, str(folder), 2)):
        assert torch.equal(error, found[rank][-1]["error"])
    for error in run_ranks(load_errors, 3, tmp_path, settings, str(folder), 2):
        assert torch.allclose(error, mean(found, -1, "error"), atol=1e-8)


SGD = ["optimizer.name=sgd", "optimizer.lr=0.1", "optimizer.clip=null", "precision=fp32"]


def run(allranks: Allranks, *words: str) -> Path:
    done = allranks("run", *words, "--json", env={"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    return Path(json.loads(done.stdout)["run_dir"])


def test_averaging_after_every_step_of_sgd_is_plain_data_parallelism(allranks: Allranks) -> None:
    words = ["task=spiral", "batch_size=33", "steps=40", "log_every=1", *SGD, "--layout", "1x2"]
    expected = losses(run(allranks, *words))
    for compress in (
        "{name: local-sgd, every: 1}",
        "{name: diloco, every: 1, outer_lr: 1, outer_momentum: 0}",
    ):
        found = losses(run(allranks, *words, f"compress={compress}"))
        assert found.keys() == expected.keys()
        assert found == pytest.approx(expected, rel=1e-5), compress


def test_the_outer_step_of_diloco_is_torchs_nesterov() -> None:
    torch.manual_seed(0)
    model, reference = nn.Linear(3, 2), nn.Linear(3, 2)
    reference.load_state_dict(model.state_dict())
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    outer = torch.optim.SGD(reference.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    averaged = AveragedWeights(Compress(name="diloco", every=2), model, inner, Ranks())
    averaged.begin(model, 0, Schedule(Optimizer(), num_steps=100))
    for step in range(1, 9):
        (model(torch.randn(4, 3)) - 1).square().mean().backward()
        inner.step()
        inner.zero_grad()
        if step % 2 == 0:  # the way back to where the round began is its gradient
            for start, weight in zip(reference.parameters(), model.parameters(), strict=True):
                start.grad = (start - weight).detach()
            outer.step()
        averaged.after_step(step)
        if step % 2 == 0:
            for start, weight in zip(reference.parameters(), model.parameters(), strict=True):
                torch.testing.assert_close(weight, start)


def cut_short(run_dir: Path, step: int) -> None:
    """As if the run had been killed after the checkpoint of this step."""
    for path in (run_dir / "checkpoints").iterdir():
        if path.name != f"step-{step}":
            shutil.rmtree(path)
    for path in (run_dir / "attempts" / "0").glob("rank-*.jsonl"):
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(line for line in lines if json.loads(line)["event"] != "end"))


@pytest.mark.parametrize(
    ("compress", "task"),
    [
        ("{name: powersgd, rank: 1, start_step: 2}", ["task=spiral"]),
        ("{name: topk, keep: 0.05}", ["task=spiral"]),
        pytest.param(
            "{name: local-sgd, every: 3}",
            ["task=digits", "options.norm=batch"],
            marks=pytest.mark.soak,
        ),
        ("{name: diloco, every: 3}", ["task=digits", "options.norm=batch"]),
    ],
)
def test_a_resumed_run_continues_to_the_bit(
    allranks: Allranks, compress: str, task: list[str]
) -> None:
    words = [*task, "batch_size=66", "precision=fp32", "steps=16", "log_every=1"]
    saved = ["checkpoint.every=7", "checkpoint.keep=9", f"compress={compress}"]
    run_dir = run(allranks, *words, *saved, "--layout", "1x2")
    step, expected = newest_weights(run_dir)
    expected_losses = losses(run_dir)
    assert step == 16 and any(name.startswith("compress.") for name in expected)
    cut_short(run_dir, 7)
    assert run(allranks, "--resume", str(run_dir), "--layout", "1x2") == run_dir
    assert (run_dir / "attempts" / "1").exists()
    assert same_bits(newest_weights(run_dir)[1], expected)
    assert losses(run_dir) == expected_losses
    # On more ranks it goes on, too.
    cut_short(run_dir, 7)
    shutil.rmtree(run_dir / "attempts" / "1")
    run(allranks, "--resume", str(run_dir), "--layout", "1x3")
    apart = losses(run_dir)[16] / expected_losses[16]
    assert 0.8 < apart < 1.25


def test_saving_between_two_averages_changes_nothing(allranks: Allranks) -> None:
    words = ["task=spiral", "steps=10", "precision=fp32", "compress={name: diloco, every: 4}"]
    often = run(allranks, *words, "checkpoint.every=3", "--layout", "1x2")
    never = run(allranks, *words, "checkpoint.every=100", "--layout", "1x2")
    assert same_bits(newest_weights(often)[1], newest_weights(never)[1])


def test_methods_side_by_side(allranks: Allranks) -> None:
    options = ["--methods", "diloco", "--steps", "40", "--batch-sizes", "16", "--json"]
    words = ("bench", "comm-opt", "task=spiral", "--layout", "1x2", *options)
    done = allranks(*words, timeout=280)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    rows = {row["method"]: row for row in found["rows"]}
    assert list(rows) == ["plain", "diloco"]
    assert found["batch_sizes"] == [16, 32]
    assert rows["diloco"]["ratio"] == pytest.approx(20)
    for row in rows.values():
        shares = row["communication_to_computation"]
        assert all(shares[batch] > 0 for batch in ("16", "32"))
    assert 0 < abs(rows["diloco"]["relative_loss_difference"]) < 0.5
