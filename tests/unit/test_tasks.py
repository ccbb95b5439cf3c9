"""The bundled tasks: what they hold, what they refuse, and that they can be learnt."""

from __future__ import annotations

import ast
import importlib
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from allranks.errors import AllranksError
from allranks.job.job import load_job
from allranks.tasks import BUNDLED, Task
from allranks.tasks.digits import Digits
from allranks.tasks.gpt import SHAPES
from allranks.tasks.language import Language
from allranks.tasks.spiral import Spiral
from allranks.train.build import load_task

TASKS = [Spiral(), Digits(), Digits(network="mlp", norm="batch"), Language()]


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Everything built goes here, never to the user's own cache."""
    folder = tmp_path_factory.getbasetemp() / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


def batch_of(dataset: Any, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
    if isinstance(dataset, TensorDataset):
        inputs, targets = dataset.tensors
        return inputs[indices], targets[indices]
    samples = [dataset[index] for index in indices]
    return torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples])


def accuracy_after(task: Task, epochs: int, batch_size: int, lr: float) -> float:
    """Accuracy on the validation set after a plain loop."""
    torch.manual_seed(0)
    model, data = task.model(), task.datasets()
    train, val = data["train"], data["val"]
    assert isinstance(train, TensorDataset)
    assert isinstance(val, TensorDataset)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    for _ in range(epochs):
        for indices in torch.randperm(len(train)).chunk(len(train) // batch_size):
            inputs, targets = batch_of(train, indices.tolist())
            losses = task.loss(model(inputs), targets)
            assert isinstance(losses, Tensor)
            losses.mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        inputs, targets = val.tensors
        return task.metrics(model.eval()(inputs), targets)["accuracy"].mean().item()


# --- Every task ---------------------------------------------------------------------------------


@pytest.mark.parametrize("task", TASKS, ids=repr)
def test_loss_and_metrics_are_one_value_per_sample(task: Task) -> None:
    inputs, targets = batch_of(task.datasets()["train"], [0, 5, 2])
    outputs = task.model()(inputs)
    losses = task.loss(outputs, targets)
    assert isinstance(losses, Tensor)
    assert losses.shape == (3,)
    assert task.metrics(outputs, targets)["accuracy"].shape == (3,)


@pytest.mark.parametrize("task", TASKS, ids=repr)
def test_model_follows_the_seed_alone(task: Task) -> None:
    torch.manual_seed(3)
    first = task.model().state_dict()
    torch.manual_seed(3)
    second = task.model().state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("task", TASKS, ids=repr)
def test_data_is_the_same_whatever_the_seed(task: Task) -> None:
    torch.manual_seed(1)
    first = task.datasets()
    torch.manual_seed(2)
    second = task.datasets()
    for name in first:
        for one, other in zip(first[name][7], second[name][7], strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("name", BUNDLED)
def test_defaults_can_be_read_without_importing_the_task(name: str) -> None:
    module = importlib.import_module(f"allranks.tasks.{name}")
    task = getattr(module, name.capitalize())
    tree = ast.parse(Path(str(module.__file__)).read_text())
    values = [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "defaults"
    ]
    assert len(values) == 1
    assert values[0] is not None
    assert ast.literal_eval(values[0]) == task.defaults


@pytest.mark.parametrize(
    ("task", "option", "value", "words"),
    [
        ("spiral", "noise", -0.1, "greater than or equal to 0, got -0.1"),
        (
            "spiral",
            "noise",
            "much",
            "unable to parse string as a number, got 'much'",
        ),
        ("spiral", "noise", math.nan, "got nan"),
        ("digits", "network", "resnet", "'cnn' or 'mlp', got 'resnet'"),
        ("digits", "norm", None, "'none' or 'batch', got None"),
        ("digits", "dropout", 1, "less than or equal to 0.9, got 1"),
        ("digits", "augment", "perhaps", "got 'perhaps'"),
        ("language", "size", "small", "'tiny', '16m', '124m' or '1.5b', got 'small'"),
        ("language", "context", 0, "greater than or equal to 1"),
        ("language", "vocabulary", 1, "greater than or equal to 2"),
    ],
)
def test_wrong_option_is_answered(task: str, option: str, value: Any, words: str) -> None:
    job = load_job(None, [f"task={task}"]).model_copy(update={"options": {option: value}})
    with pytest.raises(AllranksError) as caught:
        load_task(job)
    assert f"options.{option}: " in caught.value.what and words in caught.value.what
    assert f"{task.title()} takes " in caught.value.fix


def test_the_sizes_of_the_language_model_have_shapes() -> None:
    assert set(SHAPES) == set(get_args(get_type_hints(Language)["size"]))


# --- Spiral and digits --------------------------------------------------------------------------


def test_spiral_sizes() -> None:
    data = Spiral().datasets()
    assert {name: len(part) for name, part in data.items()} == {  # type: ignore[arg-type]
        "train": 7_000,
        "val": 1_500,
        "test": 1_500,
    }
    widths = [layer.out_features for layer in Spiral().model() if isinstance(layer, nn.Linear)]  # type: ignore[attr-defined]
    assert widths == [64, 32, 16, 2]


def test_spiral_can_be_learnt() -> None:
    assert accuracy_after(Spiral(), epochs=12, batch_size=100, lr=5e-3) >= 0.95


def test_spiral_noise_spreads_the_points() -> None:
    assert Spiral(noise=0).datasets()["train"][:][0].norm(dim=1).max() <= 1 + 1e-6
    points, labels = Spiral(noise=0.5).datasets()["train"][:]
    assert points.std() > 0.5
    assert labels.float().mean().item() == pytest.approx(0.5, abs=0.02)


def test_digits_parts_are_all_images_once() -> None:
    data = Digits().datasets()
    parts = [part for part in data.values() if isinstance(part, TensorDataset)]
    assert [len(part) for part in parts] == [1_297, 250, 250]
    images = torch.cat([part.tensors[0] for part in parts])
    assert images.shape == (1_797, 1, 8, 8)
    assert images.min() == 0
    assert images.max() == 1
    assert len(torch.unique(images, dim=0)) == 1_797
    counts = torch.bincount(parts[1].tensors[1], minlength=10)
    assert counts.min() >= 10


@pytest.mark.parametrize("options", [{"network": "mlp"}, {"norm": "batch"}])
def test_digits_can_be_learnt(options: Any) -> None:
    assert accuracy_after(Digits(**options), epochs=6, batch_size=32, lr=1e-3) >= 0.93


@pytest.mark.parametrize("network", ["cnn", "mlp"])
def test_norm_batch_puts_batchnorm_in(network: Any) -> None:
    def norms(norm: Any) -> int:
        modules = Digits(network=network, norm=norm).model().modules()
        return sum(isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d) for module in modules)

    assert norms("none") == 0
    assert norms("batch") == 2


def test_augment_shifts_by_up_to_one_pixel_and_draws_from_the_generator_alone() -> None:
    task = Digits(augment=True)
    image = torch.zeros(1, 8, 8)
    image[0, 4, 4] = 1.0
    seen = set()
    for seed in range(100):
        torch.manual_seed(0)
        before = torch.get_rng_state()
        shifted, label = task.transform(
            (image, torch.tensor(3)), torch.Generator().manual_seed(seed)
        )
        again, _ = task.transform((image, torch.tensor(3)), torch.Generator().manual_seed(seed))
        assert torch.equal(before, torch.get_rng_state())
        assert torch.equal(shifted, again)
        assert shifted.shape == (1, 8, 8)
        assert label == 3
        seen.add(tuple(shifted[0].nonzero()[0].tolist()))
    assert seen == {(row, column) for row in (3, 4, 5) for column in (3, 4, 5)}


def test_only_a_task_that_changes_its_samples_says_so() -> None:
    assert Digits(augment=True).has_transform()
    assert not Digits().has_transform()
    assert not Spiral().has_transform()
    assert not Language().has_transform()


def test_missing_scikit_learn_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(AllranksError, match="pip install scikit-learn"):
        Digits().datasets()


# --- A task of the user's own -------------------------------------------------------------------


def test_the_example_fills_in_the_protocol(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples/01-own-task")
    task: Task = importlib.import_module("task").Sine(noise=0.0)
    monkeypatch.delitem(sys.modules, "task")
    inputs, targets = batch_of(task.datasets()["val"], [0, 1, 2])
    outputs = task.model()(inputs)
    losses = task.loss(outputs, targets)
    assert isinstance(losses, Tensor)
    assert losses.shape == (3,)
    assert task.metrics(outputs, targets)["distance"].shape == (3,)
