"""Floating-point operations of a step, compared with torch's own counter and with arithmetic."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.verdict_runs import HEALTHY, gpu_trace, planted
from torch import nn
from torch.nn.functional import relu, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from allranks.run.record import RankRecord
from allranks.timing.flops import Flops, flops_of
from allranks.timing.mfu import least_seconds, utilisation
from allranks.timing.steps import timing_of
from allranks.timing.trace import STEP_MARK, trace_of
from allranks.timing.verdict import judge

STEPS = 2
TOKENS, WIDTH, HEADS = 6, 8, 2


class Convolutions(nn.Module):
    """With strides, groups, dilation, padding by name, and the other way round."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 8, 5, stride=2, padding=2)
        self.grouped = nn.Conv2d(8, 8, 3, padding=2, dilation=2, groups=4)
        self.same = nn.Conv2d(8, 8, 3, padding="same", groups=8)
        self.up = nn.ConvTranspose2d(8, 4, 4, stride=2, padding=1, groups=2)
        self.line = nn.Conv1d(4, 4, 3, stride=3)
        self.cube = nn.Conv3d(1, 2, 3, stride=(1, 2, 2), padding=1)

    def forward(self, images: torch.Tensor) -> Any:
        up = self.up(self.same(relu(self.grouped(self.down(images)))))
        return self.line(up.flatten(2)).mean() + self.cube(up.unsqueeze(1)).mean()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, tokens: torch.Tensor) -> Any:
        shape = (len(tokens), TOKENS, 3, HEADS, WIDTH // HEADS)
        query, key, value = self.into(tokens).view(shape).permute(2, 0, 3, 1, 4)
        seen = scaled_dot_product_attention(query, key, value, is_causal=True)
        return tokens + self.out(seen.transpose(1, 2).reshape(tokens.shape))


def block_flops(samples: int) -> int:
    """Four products with WIDTH x WIDTH, and two of attention, in full."""
    return 2 * samples * TOKENS * 4 * WIDTH * WIDTH + 2 * samples * TOKENS * TOKENS * 2 * WIDTH


class InOneNode(torch.autograd.Function):
    """A forward pass that autograd sees as one operator, as a compiled one is."""

    @staticmethod
    def forward(ctx: Any, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(one, other)
        return one @ other

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        one, other = ctx.saved_tensors
        return gradients[0] @ other.T, one.T @ gradients[0]


def traced(step: Callable[[], object], folder: Path) -> Flops:
    """What is counted in the average of two steps."""
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, record_shapes=True, acc_events=True) as profiler:
        for number in range(STEPS + 1):
            with torch.profiler.record_function(f"{STEP_MARK}{number}"):
                pass
            if number < STEPS:
                step()
    path = folder / "trace.json"
    profiler.export_chrome_trace(str(path))
    trace = trace_of(json.loads(path.read_text()), 0)
    assert trace is not None
    found = flops_of(trace)
    assert found is not None
    return found


def test_convolutions_count_as_torch_counts_them(tmp_path: Path) -> None:
    model, images = Convolutions(), torch.randn(2, 3, 13, 11)
    with FlopCounterMode(display=False) as counter:
        model(images)
    found = traced(lambda: model(images).backward(), tmp_path)
    assert found == Flops({"float32": 3 * counter.get_total_flops()})


def test_attention_products_and_what_is_recomputed(tmp_path: Path) -> None:
    block, tokens = Block(), torch.randn(3, TOKENS, WIDTH)
    forward = block_flops(3)

    def again(way: bool) -> Callable[[], None]:
        return lambda: (
            checkpoint(block, tokens.requires_grad_(), use_reentrant=way).sum().backward()
        )

    assert traced(lambda: block(tokens).sum().backward(), tmp_path).model == {
        "float32": 3 * forward
    }
    for way in (False, True):
        assert traced(again(way), tmp_path) == Flops({"float32": 3 * forward}, forward)

    def in_half() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = block(tokens).sum()
        loss.backward()

    assert traced(in_half, tmp_path).model == {"bfloat16": 3 * forward}


def test_a_forward_pass_without_a_backward_pass_counts_once(tmp_path: Path) -> None:
    block, frozen, head = Block(), Block().requires_grad_(False), nn.Linear(WIDTH, 5)
    tokens = torch.randn(3, TOKENS, WIDTH)
    forward, of_head = block_flops(3), 2 * 3 * TOKENS * WIDTH * 5

    def step() -> None:
        with torch.no_grad():
            target = block(tokens)  # a teacher
        for _ in range(2):  # accumulates
            (block(tokens) - target).square().sum().backward()
        head(frozen(tokens)).sum().backward()

    expected = (1 + 2 * 3 + 1) * forward + 3 * of_head
    assert traced(step, tmp_path) == Flops({"float32": expected})


def test_one_node_gradients_of_gradients_and_optimizers(tmp_path: Path) -> None:
    one, other = torch.randn(4, 6), torch.randn(6, 5, requires_grad=True)
    product = 2 * 4 * 6 * 5
    whole = traced(lambda: InOneNode.apply(one, other).sum().backward(), tmp_path)  # type: ignore[no-untyped-call]
    assert whole == Flops({"float32": 3 * product})

    # The gradient is one product, which is then differentiated like one of the forward pass.
    def penalty() -> None:
        (gradient,) = torch.autograd.grad((one @ other).sum(), other, create_graph=True)
        (gradient * other).sum().backward()

    assert traced(penalty, tmp_path).recomputed == 0

    class Multiplies(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            if closure is not None:
                closure()
            with torch.no_grad():
                other.sub_(other @ (other.T @ other))

    update = Multiplies([other])

    def gradients() -> None:
        (one @ other).sum().backward()

    def step() -> None:
        gradients()
        update.step()

    assert traced(step, tmp_path) == Flops({"float32": 3 * product})
    # As in Lightning: the forward pass is inside the optimizer's step.
    assert traced(lambda: update.step(gradients), tmp_path) == Flops({"float32": 3 * product})


def test_recurrent_layers(tmp_path: Path) -> None:
    layers, words = nn.LSTM(3, 4, num_layers=2), torch.randn(7, 2, 3)
    found = traced(lambda: layers(words)[0].sum().backward(), tmp_path)
    assert found.model == {"float32": 3 * 2 * 7 * 2 * (16 * 3 + 16 * 4 + 2 * 16 * 4)}


H100 = "NVIDIA H100 80GB HBM3"
STEP = timing_of({0: {n: {"step": n, "seconds": 0.5} for n in range(1, 9)}}, None)


def rank(device: str | None, kind: str, flops: dict[str, float] | None) -> RankRecord:
    start = {"t": 1.0, "event": "start", **({"device": device} if device else {})}
    trace = {"t": 2.0, "event": "trace", "device": kind, **({"flops": flops} if flops else {})}
    return RankRecord(0, [start, trace])


def test_utilisation_is_of_the_peak_of_each_precision() -> None:
    half = {"bfloat16": 989.5e12 / 4, "float32": 67e12 / 8}  # a quarter and an eighth of a second
    ranks = [rank(H100, "cuda", half), rank(H100, "cuda", {"bfloat16": 989.5e12 / 8})]
    assert utilisation(ranks, STEP, {}) == pytest.approx((0.75 + 0.25) / 2)
    script = {"hardware": {"gpus": [{"name": H100, "memory_bytes": 85_520_809_984}]}}
    assert utilisation([rank(None, "cuda", half)], STEP, script) == pytest.approx(0.75)
    not_read = RankRecord(1, [{"t": 1.0, "event": "start", "device": H100}])
    assert utilisation([ranks[0], not_read], STEP, {}) == pytest.approx(0.75)


@pytest.mark.parametrize(
    ("device", "kind", "flops"),
    [
        ("CPU", "cpu", {"float32": 1e9}),
        ("a GPU of the future", "cuda", {"bfloat16": 1e12}),
        ("Tesla V100-SXM2-16GB", "cuda", {"bfloat16": 1e12}),  # which it does not have
        (H100, "cuda", None),
    ],
)
def test_utilisation_is_not_known_without_a_peak_or_a_count(
    device: str, kind: str, flops: dict[str, float] | None
) -> None:
    assert utilisation([rank(device, kind, flops)], STEP, {}) is None


def test_the_judgement_of_a_run_has_it(tmp_path: Path) -> None:
    traces = {0: {**gpu_trace(97.0), "flops": {"bfloat16": 989.5e12 / 100}}}  # a step takes 100 ms
    run = planted(tmp_path, HEALTHY, traces=traces, start={"device": H100})
    assert judge(run).mfu == pytest.approx(0.1, rel=0.05)


def test_a_few_operations_in_another_precision_do_not_hide_it() -> None:
    assert least_seconds({"bfloat16": 989.5e12, "float64": 1e9}, H100) == pytest.approx(1.0)
    assert least_seconds({"tf32": 15.7e12}, "Tesla V100-SXM2-16GB") == pytest.approx(1.0)
