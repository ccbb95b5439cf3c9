"""A model made ready for ranks computes what it computed before."""

from __future__ import annotations

import copy
from datetime import timedelta
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from allranks.errors import AllranksError
from allranks.job.job import parse_job
from allranks.layout import NESTING, Layout
from allranks.tasks.digits import Digits
from allranks.tasks.language import Language
from allranks.train import build
from allranks.train.checkpoint import model_tensors, named_parameters
from allranks.train.mesh import Mesh, Ranks
from allranks.train.parallelize import (
    SynchronisedBatchNorm,
    autocast,
    batch_norms,
    norms_count,
    parallelize,
    plain,
    resolve_precision,
    shard,
    synchronise_batch_norm,
    without_sync,
)

CPU = torch.device("cpu")
Checkpointing = Literal["off", "full", "selective"]


# --- Activation checkpointing -------------------------------------------------------------------


def one_pass(
    model: nn.Module, inputs: Tensor, checkpointing: Checkpointing
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and the gradients of a copy of the model."""
    prepared = parallelize(
        copy.deepcopy(model), Mesh(), CPU, activation_checkpointing=checkpointing
    )
    torch.manual_seed(7)  # for dropout
    loss = prepared(inputs).float().square().mean()
    loss.backward()
    gradients = {}
    for name, parameter in named_parameters(prepared):
        assert parameter.grad is not None
        gradients[name] = parameter.grad
    return loss.detach(), gradients


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("checkpointing", ["full", "selective"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_recomputed_activations_give_the_same_gradients(
    checkpointing: Checkpointing, dropout: float
) -> None:
    torch.manual_seed(0)
    model = Language(dropout=dropout).model()
    ids = torch.randint(256, (3, 32))
    loss, gradients = one_pass(model, ids, "off")
    again, others = one_pass(model, ids, checkpointing)
    assert torch.equal(loss, again)
    assert gradients.keys() == others.keys()
    for name in gradients:
        torch.testing.assert_close(others[name], gradients[name], rtol=1e-6, atol=1e-9)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("checkpointing", ["full", "selective"])
def test_recomputed_norms_count_the_samples_that_they_counted(checkpointing: Checkpointing) -> None:
    torch.manual_seed(0)
    inputs, counted = torch.randn(5, 4), torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0])

    def gradients(of: nn.Module, kind: Checkpointing) -> list[Tensor]:
        model = parallelize(copy.deepcopy(of), Mesh(), CPU, activation_checkpointing=kind)
        with norms_count(batch_norms(model), counted):
            loss = model(inputs).square()[:3].mean()
        loss.backward()  # recomputes what was counted, when something else may be counted
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    block = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh())
    model = nn.Sequential(block, copy.deepcopy(block))
    torch.testing.assert_close(gradients(model, checkpointing), gradients(model, "off"))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("checkpointing", ["full", "selective"])
def test_recomputing_keeps_the_names_in_a_checkpoint(checkpointing: Checkpointing) -> None:
    model = Language().model()
    names = list(model_tensors(model))
    trained = [name for name, _ in named_parameters(model)]
    wrapped = parallelize(model, Mesh(), CPU, activation_checkpointing=checkpointing)
    assert list(model_tensors(wrapped)) == names
    assert [name for name, _ in named_parameters(wrapped)] == trained


@pytest.mark.usefixtures("alone")
def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(AllranksError, match="no ModuleList or Sequential") as refusal:
        parallelize(nn.Linear(2, 2), Mesh(), CPU, activation_checkpointing="full")
    assert "off" in refusal.value.fix


@pytest.mark.usefixtures("alone")
def test_one_rank_needs_no_wrapper() -> None:
    model = parallelize(nn.Linear(2, 2), Mesh(), CPU)
    assert plain(model) is model
    with without_sync(model):
        model(torch.ones(1, 2)).sum().backward()
    assert model.weight.grad is not None


# --- Shards -------------------------------------------------------------------------------------


class Scaled(nn.Linear):
    def __init__(self, scale: Tensor) -> None:
        super().__init__(2, 2)
        self.scale = nn.Parameter(scale)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("scale", "why"),
    [
        (torch.tensor(1.0), "scalar parameters. Change scale to a 1D tensor"),
        (torch.ones(1).double(), "weights of torch.float32 and torch.float64 would be sent"),
    ],
)
def test_what_cannot_be_sharded_is_refused(scale: Tensor, why: str) -> None:
    devices = DeviceMesh("cpu", [[[[0]]]], mesh_dim_names=NESTING)
    with pytest.raises(AllranksError) as raised:
        shard(Scaled(scale), [], Mesh(layout=Layout(1, 2, fsdp=2), devices=devices), None)
    assert why in raised.value.what
    assert raised.value.fix == "change the model, or write --layout 1x2"


@pytest.mark.usefixtures("alone")
def test_groups_of_a_mesh_wait_as_long_as_the_job_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
        monkeypatch.setattr(distributed_c10d, name, timedelta(seconds=1))  # and put back
    monkeypatch.setattr(dist, "init_process_group", lambda **_: None)
    me: Any = None  # of no use here
    build.join_world(me, parse_job({"timeout": "77s"}), CPU)
    DeviceMesh("cpu", [[0]], mesh_dim_names=("dp", "tp"))
    groups = [group for group in distributed_c10d._world.pg_map if group is not dist.group.WORLD]
    waits = [group._get_backend(CPU).options._timeout for group in (*groups, dist.new_group([0]))]
    assert set(waits) == {timedelta(seconds=77)}


# --- BatchNorm ----------------------------------------------------------------------------------

NORMS: list[tuple[type[nn.Module], dict[str, Any], tuple[int, ...]]] = [
    (nn.BatchNorm1d, {}, (8, 5)),
    (nn.BatchNorm1d, {}, (8, 5, 3)),
    (nn.BatchNorm2d, {"momentum": 0.3}, (4, 5, 3, 2)),
    (nn.BatchNorm2d, {"momentum": None}, (4, 5, 3, 2)),
    (nn.BatchNorm2d, {"affine": False, "eps": 1e-3}, (4, 5, 3, 2)),
    (nn.BatchNorm3d, {}, (2, 5, 2, 2, 2)),
    (nn.BatchNorm1d, {"track_running_stats": False}, (8, 5)),
]


def outputs_and_gradients(norm: nn.Module, batches: list[Tensor]) -> list[Tensor]:
    """Everything that three training passes and an evaluation show."""
    shown = []
    for batch in batches:
        inputs = batch.clone().requires_grad_()
        outputs = norm(inputs)
        (outputs * torch.linspace(-1, 2, outputs.numel()).view(outputs.shape)).sum().backward()
        assert inputs.grad is not None
        shown += [outputs.detach(), inputs.grad]
    shown += [parameter.grad for parameter in norm.parameters() if parameter.grad is not None]
    shown += list(norm.buffers())
    norm.eval()
    with torch.no_grad():
        shown.append(norm(batches[0]))
    return shown


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("kind", "options", "shape"), NORMS)
def test_on_one_rank_it_is_torchs_batchnorm(
    kind: type[nn.Module], options: dict[str, Any], shape: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    theirs = kind(5, **options)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter)
    ours = synchronise_batch_norm(copy.deepcopy(theirs), Ranks())
    assert isinstance(ours, SynchronisedBatchNorm)
    batches = [3 + 2 * torch.randn(shape) for _ in range(3)]
    expected = outputs_and_gradients(theirs, batches)
    shown = outputs_and_gradients(ours, batches)
    assert len(shown) == len(expected)
    for one, other in zip(shown, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_every_batchnorm_is_replaced_and_keeps_its_state() -> None:
    model = Digits(norm="batch").model()
    for buffer in model.buffers():
        buffer.add_(3)
    before = copy.deepcopy(model.state_dict())
    model.eval()
    replaced = synchronise_batch_norm(model, Ranks())
    assert len(batch_norms(replaced)) == 2
    assert not any(isinstance(module, nn.BatchNorm2d) for module in replaced.modules())
    assert all(not norm.training for norm in batch_norms(replaced))
    after = replaced.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_a_large_mean_costs_no_digits() -> None:
    """The difference of two large sums would be wrong in the first digit here."""
    norm = SynchronisedBatchNorm(1, momentum=1.0)
    inputs = 10_000 + torch.linspace(-1, 1, 64).view(64, 1)
    inputs64 = inputs.double()
    import torch.distributed as dist

    dist.init_process_group("fake", rank=0, world_size=1)
    norm(inputs)
    dist.destroy_process_group()
    assert norm.running_var is not None
    expected = inputs64.var().item()
    assert norm.running_var.item() == pytest.approx(expected, rel=1e-2)


def test_other_layers_are_left_alone() -> None:
    model = nn.Sequential(nn.LayerNorm(4), nn.InstanceNorm1d(4), nn.Linear(4, 4))
    kinds = [type(module) for module in model.modules()]
    assert [type(module) for module in synchronise_batch_norm(model, Ranks()).modules()] == kinds


def test_a_frozen_norm_stays_frozen() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model[1].requires_grad_(False)
    frozen = [
        parameter.requires_grad for parameter in synchronise_batch_norm(model, Ranks()).parameters()
    ]
    assert frozen == [True, True, False, False]


def test_a_norm_under_two_names_stays_one() -> None:
    norm = nn.BatchNorm1d(4)
    model = synchronise_batch_norm(nn.ModuleDict({"a": norm, "b": norm}), Ranks())
    assert isinstance(model, nn.ModuleDict)
    assert model["a"] is model["b"]


@pytest.mark.usefixtures("alone")
def test_a_norm_of_doubles_stays_one_of_doubles() -> None:
    inputs = torch.randn(8, 4).double()
    expected = nn.BatchNorm1d(4).double()(inputs)
    found = synchronise_batch_norm(nn.BatchNorm1d(4).double(), Ranks())(inputs)
    torch.testing.assert_close(found, expected)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_recomputed_norms_count_a_batch_once(mode: Literal["full", "selective"]) -> None:
    torch.manual_seed(0)
    model, inputs = Digits(norm="batch").model(), torch.randn(8, 1, 8, 8)
    once, twice = copy.deepcopy(model), copy.deepcopy(model)
    parallelize(once, Mesh(), CPU)(inputs).square().sum().backward()
    parallelize(twice, Mesh(), CPU, activation_checkpointing=mode)(inputs).square().sum().backward()
    for expected, found in zip(once.buffers(), twice.buffers(), strict=True):
        torch.testing.assert_close(found, expected)


# --- Precision ----------------------------------------------------------------------------------


def test_auto_is_fp32_on_a_cpu() -> None:
    assert resolve_precision("auto", CPU) == "fp32"
    assert resolve_precision("bf16", CPU) == "bf16"


def test_tf32_needs_a_gpu() -> None:
    with pytest.raises(AllranksError, match="tf32 needs"):
        resolve_precision("tf32", CPU)


@pytest.mark.parametrize(
    ("precision", "dtype"), [("fp32", None), ("fp16", torch.float16), ("bf16", torch.bfloat16)]
)
def test_the_forward_pass_can_be_entered_again_and_again(
    precision: Literal["fp32", "fp16", "bf16"], dtype: torch.dtype | None
) -> None:
    context = autocast(precision, CPU)
    for _ in range(2):
        with context:  # looked at, not computed in: not every CPU may do that
            assert torch.is_autocast_enabled("cpu") is (dtype is not None)
            assert dtype in (None, torch.get_autocast_dtype("cpu"))
        assert not torch.is_autocast_enabled("cpu")
