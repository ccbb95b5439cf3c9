"""Model and loss as one function: where the last block may get the batch in parts."""

from __future__ import annotations

import importlib
import math
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from allranks.job.job import parse_job
from allranks.layout import Layout
from allranks.run.folder import RunDir
from allranks.tasks import Task
from allranks.train import choose_step, compile_ahead
from allranks.train.choose_step import MeasuredStep, Record, Rules
from allranks.train.compile_ahead import CompileCost
from allranks.train.data import Cut, MicroBatch
from allranks.train.fast_step import PARTS, Refused, compare_compiled, losses_in_parts, shape_of
from allranks.train.parallelize import buffers_unchanged

WIDTH, CLASSES, SIZE = 8, 200, 6


class Last(nn.Module):
    """A wide block; `how` changes what it is made of."""

    def __init__(self, how: str = "") -> None:
        super().__init__()
        self.how, self.calls = how, 0
        self.matrix = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Any) -> Tensor:
        self.calls += 1
        x = x[0] if self.how == "tuple" else x
        if self.how == "sees the batch":
            x = x - x.mean(0)
        y: Tensor = self.matrix(x)
        return y


class Pair(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


class Model(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), Pair() if how == "tuple" else nn.ReLU())
        self.last = Last(how)
        if how == "a weight is left out":
            self.scale = nn.Parameter(torch.ones(()))
        self.how = how

    def forward(self, x: Tensor) -> Any:
        y = self.last(self.body(x))
        return y * (1.005 if self.how == "more than its blocks" else getattr(self, "scale", 1.0))


class Wide(Task):
    def loss(self, outputs: Tensor, targets: Tensor) -> Any:
        return F.cross_entropy(outputs, targets, reduction="none"), 1.0 + targets % 2

    def blocks(self, model: nn.Module) -> Any:
        return [model.body, model.last]


class Coupled(Wide):
    couples_samples = True


class Chainless(Wide):
    def blocks(self, model: nn.Module) -> None:
        return None


def passed(task: Task, how: str) -> tuple[int, list[Tensor], list[Tensor]]:
    """How many times a pass calls the last block; its losses and gradients, and the model's own."""
    torch.manual_seed(1)
    model = Model(how)
    inputs, targets = torch.randn(SIZE, WIDTH), torch.randint(CLASSES, (SIZE,))
    micro = MicroBatch(inputs, targets, torch.ones(SIZE), torch.ones(SIZE))
    data = SimpleNamespace(example=lambda progress: micro)
    t: Any = SimpleNamespace(task=task, model=model, data=data, autocast=nullcontext())
    losses_of, random = losses_in_parts(t), torch.get_rng_state()
    found: list[list[Tensor]] = []
    calls = model.last.calls
    for function in (losses_of, lambda *pair: task.loss(model(pair[0]), pair[1])):
        torch.set_rng_state(random)
        losses, weights = function(inputs, targets)
        losses.backward(weights)
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        found.append([losses.detach(), weights, *grads])
        model.zero_grad()
    return model.last.calls - calls - 1, found[0], found[1]


def test_a_wide_last_block_gets_parts_of_the_batch() -> None:
    calls, parts, whole = passed(Wide(), "")
    assert calls == len(torch.arange(SIZE).chunk(PARTS)) > 1
    torch.testing.assert_close(parts, whole)


@pytest.mark.parametrize(
    ("task", "how"),
    [
        (Wide(), "more than its blocks"),
        (Wide(), "a weight is left out"),
        (Wide(), "tuple"),
        (Wide(), "sees the batch"),
        (Coupled(), ""),
        (Chainless(), ""),
    ],
)
def test_a_model_that_would_not_compute_the_same_stays_whole(task: Task, how: str) -> None:
    calls, found, own = passed(task, how)
    assert calls == 1
    torch.testing.assert_close(found, own, rtol=0, atol=0)


def test_a_pass_that_fails_leaves_buffers_as_they_were() -> None:
    norm = nn.BatchNorm1d(WIDTH)
    model = nn.Sequential(norm, nn.Linear(WIDTH + 1, 1))
    with pytest.raises(RuntimeError, match="shapes cannot"), buffers_unchanged(model):
        model(torch.randn(SIZE, WIDTH))
    assert all(map(torch.equal, norm.buffers(), nn.BatchNorm1d(WIDTH).buffers()))


def test_a_compiled_loss_may_differ_by_as_much_as_dropout_varies_it() -> None:
    varied, steady = torch.tensor([1e-3, 3e-3, 2e-3, 1.5e-3]), torch.full((4,), 2.0)
    for loss, plain in ((4e-3, varied), (2.1, steady), (math.nan, torch.tensor([math.nan]))):
        compare_compiled(torch.tensor(loss), plain)
    for loss, plain in ((2e-2, varied), (2.3, steady), (math.nan, steady)):
        with pytest.raises(Refused, match="instead of"):
            compare_compiled(torch.tensor(loss), plain)


@pytest.mark.parametrize(("left", "timed"), [(30, 20), (600, 128), (10**6, 608)])
def test_timing_a_form_does_not_outlast_a_short_run(left: int, timed: int) -> None:
    meter = SimpleNamespace(step_seconds=0.0, begin_step=lambda: None)
    t: Any = SimpleNamespace(
        meter=meter,
        pulse=SimpleNamespace(group=None),
        mesh=SimpleNamespace(world=SimpleNamespace(size=1)),
        device=torch.device("cpu"),
        progress=SimpleNamespace(step=0),
        last_step=left,
    )
    record = Record(layout="1x1", device="CPU")
    step = MeasuredStep(Rules(), record, Path("compile.json"), CompileCost(None))
    steps = 0
    for _ in step._time(t):
        steps += 1
        meter.step_seconds += 0.001
    assert steps == pytest.approx(timed, abs=choose_step.BLOCKS)


def test_batches_of_one_shape_are_those_that_one_graph_can_read() -> None:
    def shape(*batch: Any) -> Any:
        return shape_of(batch, [])

    one, other = torch.zeros(2, 3), torch.ones(2, 3)
    assert shape({"a": one, "b": [other]}, None) == shape({"a": other, "b": [one]}, None)
    different = [one[:1], one.double(), [one], {"a": one}, None, 1]
    shapes = [shape(one), *map(shape, different), shape(one, one)]
    assert all(a != b for n, a in enumerate(shapes) for b in shapes[:n])
    # The order in which a graph was given them is the order in which it reads them.
    assert shape({"a": one, "b": other}) != shape({"b": other, "a": one})


def test_a_compiler_that_cannot_be_started_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_ahead, "cpus_allotted", lambda: 4)
    t: Any = SimpleNamespace(
        data=SimpleNamespace(num_workers=0, cut=Cut(8, 0, 1)),
        mesh=SimpleNamespace(layout=Layout()),
        device=torch.device("cpu"),
    )
    log = tmp_path / "missing" / "compile.log"
    why = compile_ahead.start(t, RunDir(tmp_path), log, ranks_here=1, local_rank=0)
    assert "no process could be started" in str(why)


def test_what_compiling_took_is_not_known_of_a_task_that_was_edited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(tmp_path)
    source = tmp_path / "edited_task.py"
    source.write_text("from allranks.tasks.spiral import Spiral as Mine\n")
    job = parse_job({"task": "edited_task:Mine"})
    importlib.import_module("edited_task")

    def known() -> bool:
        cost = compile_ahead.CompileCost.of(job, Layout(), torch.device("cpu"))
        return math.isfinite(cost.seconds())

    with compile_ahead.CompileCost.of(job, Layout(), torch.device("cpu")).noted():
        pass
    assert known()
    source.write_text("from allranks.tasks.digits import Digits as Mine\n")
    assert not known()


def test_what_compiling_took_leaves_out_what_the_cache_will_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spent = {"entire_frame_compile": 1040.0, "backend_compile": 1036.0, "total_wall_time": 1050.0}
    seen = iter([{}, {**spent, "inductor_compile": 30.0}, {}, spent])
    monkeypatch.setattr("torch._dynamo.utils.calculate_time_spent", lambda: next(seen))
    clock = iter([0.0, 1055.0, 0.0, 1055.0])
    monkeypatch.setattr(compile_ahead, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    cost = compile_ahead.CompileCost(tmp_path / "cost.json")
    with cost.noted():
        pass
    assert cost.seconds() == 5 + 2 * 4  # besides compiling, and following the Python code
    with cost.noted():  # all of it was in the cache
        pass
    assert cost.seconds() == 1055
