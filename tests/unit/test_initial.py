"""Weights that are drawn later are those that a constructor would draw."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from allranks.tasks.language import Language
from allranks.train import initial


class Odd(nn.Module):
    """Made in every way that people make parameters and buffers."""

    mask: Tensor
    given: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(10, 20)
        nn.init.orthogonal_(self.linear.weight)
        self.largest = self.linear.weight.max().item()
        self.embedding = nn.Embedding(7, 4, padding_idx=2)
        self.convolution = nn.Conv2d(2, 3, 3)
        nn.init.trunc_normal_(self.convolution.weight, std=0.1, a=-0.1, b=0.1)
        self.norm = nn.BatchNorm2d(3)
        self.scaled = nn.Parameter(torch.randn(500, 5) * 0.02 + 1)
        self.doubled = nn.Parameter(self.linear.weight.detach().clone() * 2)
        self.rates = [rate.item() for rate in torch.linspace(0, 1, 3, device="cpu")]
        self.register_buffer("mask", torch.tril(torch.ones(4, 4)))
        self.register_buffer("given", torch.tensor([1.0, 2.0]))
        self.positions = torch.arange(4)  # no buffer
        self.recurrent = nn.LSTM(3, 4)
        self.narrow = nn.Linear(3, 300)
        nn.init.constant_(self.narrow.bias, 0.25)
        self.narrow.bfloat16()
        self.tied = nn.Linear(4, 7, bias=False)
        self.tied.weight = self.embedding.weight


@pytest.fixture(autouse=True)
def all_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(initial, "LARGE_BYTES", 0)


def test_every_way_of_making_weights_is_repeated() -> None:
    model, recording = initial.fresh_model(Odd, seed=3)
    assert recording is not None
    assert isinstance(model, Odd)
    assert model.linear.weight.is_meta
    initial.fill(model, recording)
    assert not any(tensor.is_meta for tensor in model.state_dict().values())
    weight = model.linear.weight
    torch.testing.assert_close(weight.T @ weight, torch.eye(10))
    assert torch.equal(model.doubled, 2 * weight)
    assert not model.embedding.weight[2].any()
    assert model.tied.weight is model.embedding.weight
    assert 0.05 < model.convolution.weight.abs().max() <= 0.1
    assert model.largest == weight.max()
    assert model.scaled.mean().item() == pytest.approx(1, abs=0.01)
    assert model.scaled.std().item() == pytest.approx(0.02, rel=0.1)
    assert torch.equal(model.mask, torch.tril(torch.ones(4, 4)))
    assert torch.equal(model.given, torch.tensor([1.0, 2.0]))
    assert model.positions.tolist() == [0, 1, 2, 3]
    assert model.narrow.weight.dtype == torch.bfloat16
    assert 0.5 < model.narrow.weight.abs().max().item() < 0.6
    assert model.narrow.bias.tolist() == [0.25] * 300
    bound = model.recurrent.get_parameter("weight_hh_l0").abs().max().item()
    assert 0.3 < bound <= 0.5  # uniform up to 1 / sqrt(hidden)


def weights(model: nn.Module, recording: initial.Recording) -> dict[str, Tensor]:
    return {name: recording.whole(t) for name, t in model.state_dict(keep_vars=True).items()}


def test_a_weight_depends_on_the_seed_and_on_nothing_that_was_drawn_before() -> None:
    model, recording = initial.fresh_model(Language().model, seed=3)
    assert recording is not None
    whole = weights(model, recording)
    torch.rand(5)
    backwards = dict(reversed(model.state_dict(keep_vars=True).items()))
    for name, tensor in backwards.items():
        assert torch.equal(recording.whole(tensor), whole[name])
    qkv = [tensor for name, tensor in whole.items() if name.endswith("qkv.weight")]
    assert not torch.equal(qkv[0], qkv[1])
    assert qkv[0].std().item() == pytest.approx(0.02, rel=0.05)
    other, again = initial.fresh_model(Language().model, seed=4)
    assert again is not None
    assert not torch.equal(weights(other, again)["blocks.0.mlp.up.weight"], qkv[0])
    state = torch.get_rng_state()
    recording.whole(model.get_parameter("blocks.0.mlp.up.weight"))
    assert torch.equal(torch.get_rng_state(), state)


def test_small_models_are_built_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(initial, "LARGE_BYTES", 1 << 30)
    torch.manual_seed(0)
    expected = copy.deepcopy(Language().model().state_dict())
    torch.manual_seed(0)
    model, recording = initial.fresh_model(Language().model, seed=0)
    assert recording is None
    found = model.state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_dry_run_is_not_recorded() -> None:
    with FakeTensorMode():
        model, recording = initial.fresh_model(Language().model, seed=0)
    assert recording is None
    assert all(isinstance(parameter, FakeTensor) for parameter in model.parameters())


def test_what_cannot_be_recorded_is_built(capsys: pytest.CaptureFixture[str]) -> None:
    class Numbers(nn.Linear):
        def reset_parameters(self) -> None:
            super().reset_parameters()
            self.weights = self.weight.tolist()

    model, recording = initial.fresh_model(lambda: Numbers(3, 3), seed=0)
    assert recording is None
    assert isinstance(model, Numbers)
    assert not model.weight.is_meta
    assert "every rank builds the whole model" in capsys.readouterr().out
