"""`compile: auto` on ranks: it changes over when all agree, resumes to the bit, and refuses.

On a CPU a graph is played by calling its work again. How fast a form is, the tests say.
"""

from __future__ import annotations

import functools
import json
import math
import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.ranks import run_ranks
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from allranks.job.job import load_job, parse_job
from allranks.layout import Layout
from allranks.run.events import EventLog, read_events
from allranks.run.folder import RunDir
from allranks.timing import timeline
from allranks.train import agreement
from allranks.train.build import Rank, build
from allranks.train.choose_step import COMPILED, EAGER, GRAPH, MeasuredStep, Rules
from allranks.train.compile_ahead import NothingToDo
from allranks.train.loop import Training, train

pytestmark = pytest.mark.ranks

DEVICE = torch.device("cpu")
DIGITS = {
    "task": "digits",
    "options": {"network": "mlp", "dropout": 0.1},
    "batch_size": 97,  # the last batch of an epoch has 36 samples
    "steps": 30,
    "log_every": 1,
    "precision": "fp32",
    "checkpoint": {"every": 5, "keep": 10},
}


class Again:
    """A graph that does its work again, with the result in the same place."""

    def __init__(self, device: torch.device) -> None:
        self.replays = 0

    def capture(self, work: Callable[[], Tensor | None]) -> Tensor | None:
        self.work, self.held = work, work()
        return self.held

    def replay(self) -> None:
        self.replays += 1
        result = self.work()
        assert self.held is not None and result is not None
        self.held.copy_(result)

    def record_event(self) -> None:
        return None

    def settle(self) -> None:
        pass

    def no_room(self) -> str | None:
        return None


class WithItsFirstRate(Again):
    """A graph in which the learning rate of its capture is a constant."""

    training: Training

    def capture(self, work: Callable[[], Tensor | None]) -> Tensor | None:
        self.rate = self.training.optimizer.param_groups[0]["lr"]
        return super().capture(work)

    def replay(self) -> None:
        self.training.optimizer.param_groups[0]["lr"] = self.rate
        super().replay()


class WithoutRoom(Again):
    def no_room(self) -> str | None:
        return "its memory is full"


class CannotCapture(Again):
    def capture(self, work: Callable[[], Tensor | None]) -> Tensor | None:
        work()
        raise RuntimeError("operation not permitted when stream is capturing\nmore lines")


def broken(module: Any, inputs: Any) -> Any:
    """A compiler that fails on one rank."""
    if dist.get_rank() == 0:
        raise ValueError("not while compiling")
    return module.forward


@dataclass
class Trained:
    losses: dict[int, float]
    weights: list[Tensor]
    compiles: list[dict[str, Any]]  # events
    steps: list[dict[str, Any]]  # events
    forms: Any


def seconds_of(**seconds: float) -> dict[str, float]:
    return {name.replace("_", " "): value for name, value in seconds.items()}


FASTER = {EAGER: 1.0, EAGER + GRAPH: 0.5, COMPILED: 0.8, COMPILED + GRAPH: 0.3}


@contextmanager
def taking(seconds: dict[str, float], backend: Any = "aot_eager") -> Iterator[None]:
    """Forms take this long; and torch.compile takes less than a second."""

    def time(self: MeasuredStep, t: Training) -> Any:
        for _ in range(3):
            yield
        return seconds[self.form]

    warnings.simplefilter("ignore")  # of torch's compilers, which ranks print
    patch = pytest.MonkeyPatch()
    for name in ("_time", "_glance"):
        patch.setattr(MeasuredStep, name, time)
    patch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    patch.setattr(timeline, "current", timeline.Timeline())
    try:
        yield
    finally:
        patch.undo()


def rules(**more: Any) -> Rules:
    usual = {"measure_from": 2, "make_graph": Again, "start_child": lambda t: NothingToDo()}
    usual |= {"cached_pays": math.inf}  # whatever other tests have compiled
    return Rules(**{**usual, "graph_pays": 0, "child_pays": 0.0, **more})


def a_run(folder: Path, job: dict[str, Any]) -> RunDir:
    run = RunDir(folder)
    folder.mkdir(exist_ok=True)
    run.job_file.write_text(parse_job(job).to_yaml())
    return run


def make(folder: Path, attempt: int, checkpoint: str, rules: Rules | None) -> Training:
    world, rank = dist.get_world_size(), dist.get_rank()
    run = RunDir(folder)
    me = Rank(
        rank=rank,
        world_size=world,
        local_rank=rank,
        local_world_size=world,
        run=run,
        attempt=attempt,
        layout=Layout.parse(f"1x{world}"),
        checkpoint=checkpoint,
    )
    job = load_job(run.job_file, resolved=True)
    return build(me, job, DEVICE, EventLog(run.events(attempt, rank)), rules=rules)


def a_training(
    folder: Path,
    attempt: int = 0,
    checkpoint: str = "",
    rules: Rules | None = None,
    seconds: dict[str, float] | None = None,
    backend: Any = "aot_eager",
) -> Trained:
    """Train to the end, in one process or as one of several ranks."""
    os.environ["ALLRANKS_RANKS_HERE"] = str(dist.get_world_size())
    with taking(seconds or FASTER, backend):
        t = make(folder, attempt, checkpoint, rules)
        if rules is not None and rules.make_graph is WithItsFirstRate:
            WithItsFirstRate.training = t
        assert train(t) == "finished"
    t.meter.log.close()
    events = [*read_events(RunDir(folder).events(attempt, 0))]
    steps = [event for event in events if event["event"] == "step"]
    return Trained(
        {event["step"]: event["loss"] for event in steps if "loss" in event},
        [p.detach().clone() for p in t.model.parameters()],
        [event for event in events if event["event"] == "compile"],
        steps,
        t.notes.get("compile"),
    )


def alone(tmp_path: Path, *args: Any) -> Trained:
    (made,) = run_ranks(a_training, 1, tmp_path, *args, timeout=120)
    return made


def same_bits(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def chain(folder: Path) -> tuple[Trained, Trained, Trained, Trained, list[Any]]:
    """A run without switches, one with all, and that one resumed before and after its last."""
    plain = a_training(a_run(folder / "plain", DIGITS).path)
    run = a_run(folder / "auto", DIGITS)
    whole = a_training(run.path, 0, "", rules())
    stored = json.loads((run.path / "compile.json").read_text())["forms"]
    # Other times: a resumed run does not measure again.
    slower = dict(reversed([*zip(FASTER, reversed(FASTER.values()), strict=True)]))
    before = a_training(run.path, 1, "step-5", rules(), slower)
    after = a_training(run.path, 2, "step-25", rules(), slower)
    return plain, whole, before, after, stored


def test_forms_change_at_steps_that_a_resumed_run_repeats_to_the_bit(tmp_path: Path) -> None:
    made = run_ranks(chain, 1, tmp_path, tmp_path, timeout=200)
    plain, whole, before, after, stored = made[0]
    forms = [form for _, form in stored]
    assert forms == [EAGER, EAGER + GRAPH, COMPILED, COMPILED + GRAPH]
    steps = [step for step, _ in stored]
    assert [event["form"] for event in whole.compiles] == [forms[1], forms[3]]
    assert whole.compiles[-1]["times"] == FASTER
    assert whole.compiles[-1]["lost"] > 0
    assert 5 < steps[1] < steps[2] < steps[3] < 25
    # The graph draws the plain step's masks, the compiled step others.
    until = steps[2]
    assert [whole.losses[n] for n in range(1, until)] == [plain.losses[n] for n in range(1, until)]
    assert whole.losses[30] == pytest.approx(plain.losses[30], rel=0.2)
    for resumed in (before, after):
        assert same_bits(resumed.weights, whole.weights)
        assert resumed.losses == {n: whole.losses[n] for n in resumed.losses}
        assert [list(one) for one in resumed.forms["forms"]] == stored
    assert min(before.losses) == 6 and min(after.losses) == 26
    assert [event["form"] for event in after.compiles] == [COMPILED + GRAPH]


class NoChild:
    """Instead of a process that compiles: the reason why there is none."""

    def __call__(self, t: Training) -> str:
        return "no CPU core is spare"


@pytest.mark.parametrize(
    ("graph", "why"),
    [
        (WithItsFirstRate, "the update differs by 100%"),
        (WithoutRoom, "its memory is full"),
        (CannotCapture, "operation not permitted when stream is capturing"),
    ],
)
def test_a_graph_that_does_not_work_changes_nothing(
    tmp_path: Path, graph: type[Again], why: str
) -> None:
    run = a_run(tmp_path / "auto", DIGITS)
    found = alone(tmp_path, run.path, 0, "", rules(make_graph=graph, start_child=NoChild()))
    plain = alone(tmp_path, a_run(tmp_path / "plain", DIGITS).path)
    assert found.losses == plain.losses
    assert same_bits(found.weights, plain.weights)
    assert found.compiles[-1]["form"] == EAGER
    assert why in found.compiles[-1]["why"]


def after(folder: Path, decided: int, tried: str, seconds: dict[str, float]) -> Trained:
    """A run that an earlier attempt left with such a record."""
    run = a_run(folder / f"{tried}-{decided}", DIGITS)
    stored = {"layout": "1x1", "device": "CPU", "torch": torch.__version__, "decided": decided}
    stored["forms"] = [[1, EAGER], [4, tried]]
    (run.path / "compile.json").write_text(json.dumps(stored))
    return a_training(run.path, 0, "", rules(start_child=NoChild()), seconds)


def all_after(folder: Path, seconds: dict[str, float]) -> list[Trained]:
    tried = (0, COMPILED), (0, EAGER + GRAPH), (20, EAGER + GRAPH), (30, EAGER + GRAPH)
    return [after(folder, *one, seconds) for one in tried]


def test_a_form_that_was_only_tried_or_for_other_steps_is_measured_again(tmp_path: Path) -> None:
    seconds = {**dict.fromkeys(FASTER, 2.0), EAGER: 1.0}
    (found,) = run_ranks(all_after, 1, tmp_path, tmp_path, seconds, timeout=120)
    assert found[0].compiles[-1]["times"] == seconds
    assert found[0].compiles[-1]["form"] == found[0].forms["forms"][-1][1] == EAGER
    for one in found[1:3]:
        assert [form for _, form in one.forms["forms"]] == [EAGER, EAGER + GRAPH, EAGER]
        assert one.compiles[-1]["form"] == EAGER
        assert one.compiles[-1]["times"] == {EAGER: 1.0, EAGER + GRAPH: 2.0}
    assert [list(pair) for pair in found[3].forms["forms"]] == [[1, EAGER], [4, EAGER + GRAPH]]
    assert found[3].compiles[-1]["times"] == {}


def test_nothing_is_compiled_once_the_steps_left_would_not_pay_for_it(tmp_path: Path) -> None:
    run = a_run(tmp_path / "auto", DIGITS)
    asked = rules(make_graph=None, child_pays=15.0, start_child=Slow(polls=12))
    found = alone(tmp_path, run.path, 0, "", asked, {EAGER: 1.0})
    assert [form for _, form in found.forms["forms"]] == [EAGER]
    assert "would not pay" in found.compiles[-1]["why"]


def compiled_before(folder: Path) -> list[list[str]]:
    """The forms of a run's step: before, and after another one has compiled it."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "cache")
    asked = rules(start_child=NoChild(), make_graph=None, foreground_pays=1e9, cached_pays=0.0)
    found = []
    for name, more in ("auto", {}), ("true", {"compile": True, "steps": 2}), ("again", {}):
        run = a_run(folder / name, {**DIGITS, "options": {"network": "mlp"}, **more})
        made = a_training(run.path, rules=None if more else asked)
        found.append([form for _, form in made.forms["forms"]] if made.forms else [])
    return found


def test_a_step_that_was_compiled_before_is_compiled_without_waiting_for_a_child(
    tmp_path: Path,
) -> None:
    (forms,) = run_ranks(compiled_before, 1, tmp_path, tmp_path, timeout=200)
    assert forms == [[EAGER], [], [EAGER, COMPILED]]


def pairs(folder: Path, job: dict[str, Any], backend: Any) -> tuple[Trained, Trained]:
    if dist.get_rank() == 0:
        a_run(folder / "auto", job)
        a_run(folder / "plain", job)
    dist.barrier()
    agreement.PERIOD_SECONDS = 0.0  # an exchange at every step: however fast, there are enough
    found = a_training(folder / "auto", 0, "", rules(start_child=Slow()), None, backend)
    return found, a_training(folder / "plain")


class Slow:
    """Starts a child that is ready after so many polls, on rank 1 later."""

    def __init__(self, polls: int = 0) -> None:
        self.polls = polls

    def __call__(self, t: Training) -> Slow:
        self.polls += 3 * dist.get_rank()
        return self

    def poll(self) -> int | None:
        self.polls -= 1
        return 0 if self.polls < 0 else None

    def kill(self) -> None:
        pass


@pytest.mark.parametrize("compiles", [True, False])
def test_ranks_change_over_together_or_not_at_all(tmp_path: Path, compiles: bool) -> None:
    job, backend = {**DIGITS, "options": {"network": "mlp"}}, "aot_eager" if compiles else broken
    (found, plain), (other, _) = run_ranks(pairs, 2, tmp_path, tmp_path, job, backend, timeout=200)
    assert found.forms == other.forms
    assert same_bits(found.weights, other.weights)
    forms = [form for _, form in found.forms["forms"]]
    assert forms == ([EAGER, COMPILED] if compiles else [EAGER])  # several ranks: no graphs
    assert found.losses == pytest.approx(plain.losses, rel=1e-4)
    if not compiles:
        assert found.losses == plain.losses
        assert "not while compiling" in found.compiles[-1]["why"]


def counted(folder: Path, job: dict[str, Any]) -> tuple[int, int, dict[str, int]]:
    """Graphs compiled at set-up, by the end of the training, and why any was broken."""
    from torch._dynamo.utils import counters

    if dist.get_rank() == 0:
        a_run(folder / "run", job)
    dist.barrier()
    os.environ["ALLRANKS_RANKS_HERE"] = str(dist.get_world_size())
    counters.clear()
    with taking(FASTER):
        t = make(folder / "run", 0, "", None)
        first = counters["stats"]["unique_graphs"]
        assert train(t) == "finished"
    return first, counters["stats"]["unique_graphs"], dict(counters["graph_break"])


@pytest.mark.parametrize(
    ("world", "norm"),
    [
        (1, "none"),
        (1, "batch"),
        (2, "none"),
        pytest.param(2, "batch", marks=pytest.mark.soak),
    ],
)
def test_nothing_is_compiled_later_over_uneven_epochs(
    tmp_path: Path, world: int, norm: str
) -> None:
    job = {**DIGITS, "options": {"network": "mlp", "norm": norm}, "compile": True}
    del job["steps"]
    job |= {"epochs": 3, "micro_batch_size": 20}
    (first, last, breaks), *_ = run_ranks(counted, world, tmp_path, tmp_path, job, timeout=200)
    assert first == last
    if norm == "none":  # one for training, one for evaluation; several ranks: of model and of loss
        assert (last, breaks) == (2 * world, {})


def order_of_backward(folder: Path, job: dict[str, Any]) -> list[str]:
    """What two ranks do in the backward pass of a compiled step: compute, and exchange."""
    from torch._dynamo.backends.common import aot_autograd
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    order: list[str] = []

    def noted(graph: Any, inputs: Any) -> Any:
        def call(args: Any) -> Any:
            order.append("compute")
            return graph(*args)

        call._boxed_call = True  # type: ignore[attr-defined]
        return call

    def exchange(state: Any, bucket: Any) -> Any:
        order.append("exchange")
        return allreduce_hook(state, bucket)

    exchange.__annotations__.clear()  # DDP compares them, and here they are texts
    if dist.get_rank() == 0:
        a_run(folder / "run", job)
    dist.barrier()
    os.environ["ALLRANKS_RANKS_HERE"] = str(dist.get_world_size())
    dist._DEFAULT_FIRST_BUCKET_BYTES = 1  # so that a small model has two buckets
    with taking(FASTER, aot_autograd(fw_compiler=lambda graph, inputs: graph, bw_compiler=noted)):
        t = make(folder / "run", 0, "", None)
        assert isinstance(t.model, DistributedDataParallel)
        t.model.register_comm_hook(None, exchange)
        order.clear()
        t.step(t, next(t.data.batches(t.progress)), False)
    return order


def test_ranks_exchange_gradients_while_a_compiled_backward_pass_goes_on(tmp_path: Path) -> None:
    job = {**DIGITS, "compile": True}
    for order in run_ranks(order_of_backward, 2, tmp_path, tmp_path, job, timeout=200):
        *early, last = [n for n, what in enumerate(order) if what == "compute"]
        assert early and "exchange" in order[early[-1] : last], order


# Products of matrices only, for which there is no C++ to compile.
PRODUCTS = """
from dataclasses import dataclass
import torch
from torch import nn
from torch.utils.data import TensorDataset
from allranks.tasks import Task

class Sums(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4, bias=False)
        self.register_buffer("ones", torch.ones(4, 1))

    def forward(self, inputs):
        return self.layer(inputs) @ self.ones

@dataclass
class Products(Task):
    def model(self):
        return Sums()

    def datasets(self):
        return {name: TensorDataset(torch.ones(33, 4), torch.ones(33)) for name in ("train", "val")}

    def loss(self, outputs, targets):
        return outputs.flatten()
"""


@pytest.mark.parametrize(
    "task",
    [
        {"task": "products:Products", "options": {}},
        pytest.param({"task": "digits", "options": {"network": "mlp"}}, marks=pytest.mark.soak),
    ],
    ids=lambda task: task["task"],
)
def test_what_a_child_compiled_is_found_in_the_cache(tmp_path: Path, task: dict[str, Any]) -> None:
    (tmp_path / "products.py").write_text(PRODUCTS)
    job = {**DIGITS, **task}
    ((child, hits, misses),) = run_ranks(from_cache, 1, tmp_path, tmp_path, job, timeout=280)
    assert child == 0, (tmp_path / "compile.log").read_text()
    assert misses == 0 and hits >= 3  # forward, backward, evaluation


def from_cache(folder: Path, job: dict[str, Any]) -> tuple[int | None, int, int]:
    os.chdir(folder)  # where a task of the test's own is
    warnings.simplefilter("ignore")  # of torch, as it imports its compiler
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "cache")
    from torch._dynamo.utils import calculate_time_spent, counters

    from allranks.train import compile_ahead, fast_step
    from allranks.train.data import Progress

    run = a_run(folder / "run", job)
    os.environ["ALLRANKS_RANKS_HERE"] = "1"
    t = make(run.path, 0, "", None)
    asked = {"share": 1.0, "ranks": 1, "niceness": 0, "micro_batch_size": t.data.cut.largest}
    cost = compile_ahead.CompileCost.of(load_job(run.job_file, resolved=True), Layout(), DEVICE)
    assert cost.seconds() == math.inf
    child = compile_ahead.spawn(run, Layout(), asked, folder / "compile.log", 1)
    began = time.monotonic()
    code = child._process.wait(250)
    assert cost.seconds() < time.monotonic() - began
    counters.clear()
    fast_step.compile_now(t, t.data.example(Progress()))
    found = counters["inductor"]
    print(dict(found), dict(counters["aot_autograd"]))
    assert {"entire_frame_compile", "backend_compile"} <= calculate_time_spent().keys()
    return code, found["fxgraph_cache_hit"], found["fxgraph_cache_miss"]
