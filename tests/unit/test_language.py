"""The language task: its model, how it can be cut, and its token files."""

from __future__ import annotations

import math
import os
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from allranks.errors import AllranksError
from allranks.tasks import language as language_module
from allranks.tasks.gpt import GPT, SHAPES, Attention, Head, Norm, Shape
from allranks.tasks.language import Language, Windows, built_token_file, open_tokens
from allranks.train.dry_step import AsOnGpu


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Everything built goes here, never to the user's own cache."""
    folder = tmp_path_factory.getbasetemp() / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


# --- The model ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "num_parameters"),
    [("tiny", 120_576), ("16m", 16_251_264), ("124m", 124_475_904), ("1.5b", 1_557_686_400)],
)
def test_number_of_parameters(size: Any, num_parameters: int) -> None:
    with torch.device("meta"):
        model = Language(size=size).model()
    assert sum(parameter.numel() for parameter in model.parameters()) == num_parameters
    # Independently: 12 width^2 + 13 width a block; both embeddings; the last norm.
    shape = SHAPES[size]
    block = 12 * shape.width**2 + 13 * shape.width
    rest = (shape.vocabulary + shape.context + 2) * shape.width
    assert num_parameters == shape.layers * block + rest


def test_options_change_the_shape() -> None:
    task = Language(context=16, vocabulary=300)
    assert task.shape == Shape(layers=2, width=64, heads=4, context=16, vocabulary=300)
    outputs = task.model()(torch.zeros(2, 16, dtype=torch.long))
    assert outputs.shape == (2, 16, 300)


def test_initialisation() -> None:
    torch.manual_seed(0)
    model = Language().model()
    assert isinstance(model, GPT)
    assert model.head.logits.weight is model.embedding.tokens.weight
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any()
        elif "norm" in name:
            assert torch.all(parameter == 1)
        else:
            residual = name.endswith(("out.weight", "down.weight"))
            expected = 0.02 / math.sqrt(4) if residual else 0.02
            assert parameter.std().item() == pytest.approx(expected, rel=0.05)


def test_a_fresh_model_guesses_and_its_loss_is_the_mean_over_tokens() -> None:
    torch.manual_seed(0)
    task = Language()
    data = task.datasets()["train"]
    assert isinstance(data, Windows)
    inputs, targets = data.batch([0, 10, 20])
    outputs = task.model()(inputs)
    losses = task.loss(outputs, targets)
    chosen = outputs.log_softmax(2).gather(2, targets[..., None])
    torch.testing.assert_close(losses, -chosen.mean((1, 2)))
    assert losses.mean().item() == pytest.approx(math.log(256), abs=0.2)
    assert task.loss(outputs.bfloat16(), targets).dtype == torch.float32


@pytest.mark.parametrize(
    ("matmuls", "stream"),
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float32),  # a stream can exceed its largest number
        (None, torch.float32),
    ],
)
def test_the_stream_between_blocks_is_as_precise_as_matmuls(
    matmuls: torch.dtype | None, stream: torch.dtype
) -> None:
    model = Language().model()
    seen: list[torch.dtype] = []
    for block in Language().blocks(model)[:-1]:
        block.register_forward_hook(lambda _, inputs, output: seen.append(output.dtype))
    with torch.autocast("cpu", matmuls, enabled=matmuls is not None):
        model(torch.zeros(1, 8, dtype=torch.int64))
    assert seen == [stream] * len(seen) and len(seen) == 3


def test_tensor_parallel_ranks_gather_norms_in_bf16_on_a_gpu_too() -> None:
    with AsOnGpu(), torch.autocast("cpu", torch.bfloat16):
        assert nn.LayerNorm(8)(torch.ones(8)).dtype == torch.float32
        assert Norm(8)(torch.ones(8)).dtype == torch.bfloat16


def test_a_position_sees_only_what_came_before() -> None:
    torch.manual_seed(0)
    model = Language().model()
    ids = torch.randint(256, (1, 64))
    changed = ids.clone()
    changed[0, 40] = (ids[0, 40] + 1) % 256
    difference = (model(ids) - model(changed)).abs().amax(2)[0]
    assert torch.all(difference[:40] == 0)
    assert torch.all(difference[40:] > 0)


def test_dropout_is_only_for_training() -> None:
    torch.manual_seed(0)
    model = Language(dropout=0.5).model()
    ids = torch.randint(256, (1, 64))
    assert not torch.equal(model(ids), model(ids))
    model.eval()
    assert torch.equal(model(ids), model(ids))


def test_language_can_be_learnt() -> None:
    torch.manual_seed(0)
    task = Language(context=32)
    model, data = task.model(), task.datasets()["train"]
    assert isinstance(data, Windows)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(60):
        inputs, targets = data.batch(range(16 * step, 16 * step + 16))
        loss = task.loss(model(inputs), targets).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss.item() < 4.0  # ln 256 = 5.5 at the start; the text differs between Pythons


# --- Cutting the language model -----------------------------------------------------------------


def test_blocks_make_up_the_model() -> None:
    torch.manual_seed(0)
    task = Language()
    model = task.model()
    blocks = task.blocks(model)
    assert len(blocks) == 2 + SHAPES["tiny"].layers
    assert isinstance(blocks[-1], Head)
    ids = torch.randint(256, (2, 64))
    x = ids
    for block in blocks:
        x = block(x)
    assert torch.equal(x, model(ids))
    parameters = {parameter for block in blocks for parameter in block.parameters()}
    assert parameters == set(model.parameters())


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_cut_of_the_columns_keeps_whole_heads(num_ranks: int) -> None:
    torch.manual_seed(0)
    shape = SHAPES["tiny"]
    whole = Attention(shape, dropout=0.0, residual_std=0.02)
    x = torch.randn(2, 64, shape.width)
    parts = []
    for rank in range(num_ranks):
        part = Attention(shape, dropout=0.0, residual_std=0.02)
        part.qkv.weight = nn.Parameter(whole.qkv.weight.chunk(num_ranks, dim=0)[rank])
        part.qkv.bias = nn.Parameter(whole.qkv.bias.chunk(num_ranks)[rank])
        part.out.weight = nn.Parameter(whole.out.weight.chunk(num_ranks, dim=1)[rank])
        parts.append(part(x))
    torch.testing.assert_close(sum(parts), whole(x))


@pytest.fixture
def two_fake_ranks() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=2)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("two_fake_ranks")
def test_tensor_parallel_plan_is_accepted() -> None:
    task = Language()
    task.tp = 2
    model = task.model()
    mesh = init_device_mesh("cpu", (2,))
    parallelize_module(model, mesh, dict(task.tensor_parallel_plan(model)))
    cut = {
        name: p.to_local().shape for name, p in model.named_parameters() if isinstance(p, DTensor)
    }
    for layer in range(2):
        block = f"blocks.{layer}"
        assert cut[f"{block}.attention.qkv.weight"] == (96, 64)
        assert cut[f"{block}.attention.out.weight"] == (64, 32)
        assert cut[f"{block}.mlp.up.weight"] == (128, 64)
        assert cut[f"{block}.mlp.down.weight"] == (64, 128)
    outputs = model(torch.zeros(2, 64, dtype=torch.long))
    outputs.sum().backward()


@pytest.mark.usefixtures("two_fake_ranks")
def test_heads_that_ranks_cannot_share_are_answered() -> None:
    task = Language()
    task.tp = 2
    shape = Shape(layers=1, width=60, heads=5, context=8, vocabulary=256)
    model = GPT(shape)
    plan = dict(task.tensor_parallel_plan(model))
    parallelize_module(model, init_device_mesh("cpu", (2,)), plan)
    with pytest.raises(AllranksError, match="5 attention heads") as caught:
        model(torch.zeros(1, 8, dtype=torch.long))
    assert "1, 5" in caught.value.fix


# --- Token files --------------------------------------------------------------------------------


def token_file(path: Path, ids: Any, dtype: str = "<u2") -> Path:
    array = np.asarray(ids, dtype=dtype)
    if path.suffix == ".npy":
        np.save(path, array)
    else:
        array.tofile(path)
    return path


@pytest.mark.parametrize("name", ["tokens.bin", "tokens.npy"])
def test_windows_are_cut_by_position(tmp_path: Path, name: str) -> None:
    path = token_file(tmp_path / name, np.arange(1_000) % 256)
    data = Language(tokens=str(path), context=9).datasets()
    train, val = data["train"], data["val"]
    assert isinstance(train, Windows)
    assert isinstance(val, Windows)
    assert (len(train), len(val)) == (95, 5)
    inputs, targets = train.batch([3, 0])
    assert inputs.tolist() == [list(range(30, 39)), list(range(9))]
    assert targets.tolist() == [list(range(31, 40)), list(range(1, 10))]
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(train[3][0], inputs[0])
    assert torch.equal(train[3][1], targets[0])
    assert val[0][0][0] == 950 % 256
    with pytest.raises(IndexError):
        train[95]


def test_a_pickled_part_does_not_carry_its_file(tmp_path: Path) -> None:
    path = token_file(tmp_path / "tokens.bin", np.zeros(100_000))
    data = Language(tokens=path).datasets()["val"]
    content = pickle.dumps(data)
    assert len(content) < 1_000
    copy = pickle.loads(content)
    assert len(copy) == len(data)  # type: ignore[arg-type]
    assert torch.equal(copy[1][0], data[1][0])


def test_validation_is_capped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(language_module, "MAX_VAL_TOKENS", 20)
    path = token_file(tmp_path / "tokens.bin", np.arange(1_000) % 256)
    data = Language(tokens=path, context=9).datasets()
    assert isinstance(data["val"], Windows)
    assert data["val"].part == range(95, 97)


@pytest.mark.parametrize("position", [0, 999])
@pytest.mark.parametrize("bad_id", [256, -1])
def test_ids_beyond_the_vocabulary_are_found_at_once(
    tmp_path: Path, position: int, bad_id: int
) -> None:
    ids = np.zeros(1_000)
    ids[position] = bad_id
    path = token_file(tmp_path / "tokens.npy", ids, "int32")
    with pytest.raises(AllranksError) as caught:
        Language(tokens=path, context=9).datasets()
    assert f"token id {bad_id}" in caught.value.what
    assert str(path) in caught.value.what
    assert "256" in caught.value.what


def test_an_id_that_the_first_look_missed_is_found_when_read(tmp_path: Path) -> None:
    ids = np.zeros(10_000)
    ids[1_005] = 50_256
    task = Language(tokens=token_file(tmp_path / "tokens.bin", ids), context=9)
    train = task.datasets()["train"]
    with pytest.raises(AllranksError, match="at least 50257"):
        train[100]
    task.vocabulary = 50_257
    assert task.datasets()["train"][100][0][5] == 50_256


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("missing.bin", None, ["no token file"]),
        ("short.bin", b"\0\0" * 100, ["100 tokens", "65", "at least 130", "at most 49"]),
        ("empty.bin", b"", ["0 tokens"]),
        ("odd.bin", b"\0" * 301, ["cannot be read"]),
        ("tokens.txt", b"hello", ["'.txt'", ".bin"]),
        ("empty.npy", b"", ["cannot be read"]),
        ("wrong.npy", b"hello hello hello", ["cannot be read"]),
    ],
)
def test_a_wrong_token_file_is_answered(
    tmp_path: Path, name: str, content: bytes | None, words: list[str]
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(AllranksError) as caught:
        Language(tokens=path).datasets()
    for word in [str(path), *words]:
        assert word in str(caught.value)


@pytest.mark.parametrize("array", [np.zeros((10, 10), int), np.zeros(100)])
def test_an_array_of_something_else_is_answered(tmp_path: Path, array: Any) -> None:
    np.save(tmp_path / "tokens.npy", array)
    with pytest.raises(AllranksError, match="1-D array of integers"):
        Language(tokens=tmp_path / "tokens.npy").datasets()


def test_staging_replaces_the_path(tmp_path: Path) -> None:
    path = token_file(tmp_path / "tokens.bin", np.zeros(1_000))
    task = Language(tokens=str(path))
    task.stage(lambda source: token_file(tmp_path / f"local-{source.name}", np.ones(1_000)))
    assert task.datasets()["train"][0][0][0] == 1
    with pytest.raises(AllranksError, match="no token file"):
        Language(tokens=tmp_path / "missing.bin").stage(lambda source: source)


# --- The built token file -----------------------------------------------------------------------


def test_racing_ranks_build_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    paths: list[Path] = []
    lengths: list[int] = []

    def build() -> None:
        path = built_token_file()
        paths.append(path)
        lengths.append(len(open_tokens(path)))

    threads = [threading.Thread(target=build) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(paths)) == 1
    assert lengths == [language_module.BUILT_TOKENS] * 8
    assert list((tmp_path / "allranks").iterdir()) == [paths[0]]
    text = open_tokens(paths[0]).astype(np.uint8).tobytes()
    assert b"def " in text
    assert open_tokens(paths[0]).max() < 256


def test_the_built_file_is_kept(cache: Path) -> None:
    first = built_token_file()
    assert first.parent == cache / "allranks"
    modified = first.stat().st_mtime_ns
    assert built_token_file() == first
    assert first.stat().st_mtime_ns == modified


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(AllranksError, match="No space left") as caught:
        Language().datasets()
    assert "XDG_CACHE_HOME" in caught.value.fix
    assert list((tmp_path / "allranks").iterdir()) == []


def test_a_python_without_sources_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    with pytest.raises(AllranksError, match=r"no \.py files") as caught:
        Language().datasets()
    assert "options.tokens" in caught.value.fix
