"""A GPT-2-shaped language model on a memory-mapped file of tokens, or on Python's own sources."""

from __future__ import annotations

import os
import platform
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn
from torch.utils.data import Dataset

from allranks.errors import AllranksError
from allranks.tasks import Task
from allranks.tasks.gpt import GPT, SHAPES, Shape

BUILT_TOKENS = 2_000_000  # in the file that is built if none is given: 4 MB on disk
VAL_SHARE = 0.05
# 5% of a large file could take longer to evaluate than the training steps in between.
MAX_VAL_TOKENS = 1_000_000
CHECKED_WINDOWS = 64  # before training starts; the others are checked when they are read

Tokens = np.ndarray[tuple[int], np.dtype[np.integer[Any]]]


@dataclass
class Language(Task):
    """Predict the next token. The perplexity is `exp(loss)` of the mean, not a mean of exps."""

    size: Literal["tiny", "16m", "124m", "1.5b"] = "tiny"  # 124m: GPT-2 small; 1.5b: GPT-2 XL
    tokens: str | Path | None = None  # .bin: uint16, little-endian; or .npy; null: build one
    # Tokens seen at once, and the number of token ids; null: the size's.
    context: Annotated[int, Field(ge=1, le=1_048_576)] | None = None
    vocabulary: Annotated[int, Field(ge=2, le=16_777_216)] | None = None
    dropout: Annotated[float, Field(ge=0, le=0.9)] = 0.0

    defaults: ClassVar[Mapping[str, Any]] = {"batch_size": 32, "steps": 500}

    @property
    def shape(self) -> Shape:
        """The size's shape, with the options that change it."""
        shape = SHAPES[self.size]
        return replace(
            shape,
            context=self.context or shape.context,
            vocabulary=self.vocabulary or shape.vocabulary,
        )

    def model(self) -> nn.Module:
        return GPT(self.shape, self.dropout)

    def datasets(self) -> Mapping[str, Dataset[Any]]:
        path, context, vocabulary = self._token_file(), self.shape.context, self.shape.vocabulary
        num_tokens = len(open_tokens(path))
        num_windows = num_tokens // (context + 1)
        if num_windows < 2:
            raise AllranksError(
                f"{path} has {num_tokens:,} tokens, too few for a training and a validation window"
                f" of {context + 1:,} tokens each",
                fix=f"give options.tokens at least {2 * (context + 1):,} tokens,"
                f" or set options.context to at most {max(1, num_tokens // 2 - 1):,}",
            )
        num_val = max(1, int(num_windows * VAL_SHARE))
        num_train = num_windows - num_val
        num_val = min(num_val, max(1, MAX_VAL_TOKENS // (context + 1)))
        everything = Windows(path, context, vocabulary, range(num_windows))
        everything.batch(np.linspace(0, num_windows - 1, CHECKED_WINDOWS, dtype=int).tolist())
        return {
            "train": Windows(path, context, vocabulary, range(num_train)),
            "val": Windows(path, context, vocabulary, range(num_train, num_train + num_val)),
        }

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        # Always in float32: bfloat16 would leave the loss only three digits.
        logits = outputs.float().flatten(0, 1)
        losses = F.cross_entropy(logits, targets.flatten(), reduction="none")
        return losses.view(targets.shape).mean(1)

    def metrics(self, outputs: Tensor, targets: Tensor) -> Mapping[str, Tensor]:
        return {"accuracy": (outputs.argmax(2) == targets).float().mean(1)}

    def stage(self, local: Callable[[Path], Path]) -> None:
        self.tokens = local(self._token_file())

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        # The first and the last share one Parameter, the token embedding. On different ranks each
        # has its own copy: they start equal, and stay equal if both get the sum of their two
        # gradients before every optimizer step (and count once in the gradient norm).
        assert isinstance(model, GPT)
        return [model.embedding, *model.blocks, model.head]

    def tensor_parallel_plan(self, model: nn.Module) -> Mapping[str, Any]:
        from torch.distributed.tensor import Replicate, Shard
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            PrepareModuleOutput,
            RowwiseParallel,
            SequenceParallel,
        )

        plan: dict[str, Any] = {
            "blocks.*.attention.qkv": ColwiseParallel(),
            "blocks.*.attention.out": RowwiseParallel(),
            "blocks.*.mlp.up": ColwiseParallel(),
            "blocks.*.mlp.down": RowwiseParallel(),
            "embedding.tokens": RowwiseParallel(input_layouts=Replicate()),
            "head.logits": ColwiseParallel(output_layouts=Replicate()),
        }
        # The stream between the blocks and its norms: each rank has a part of the positions. With
        # dropout it stays whole, as the ranks would draw the same masks for different positions.
        if self.shape.context % self.tp == 0 and self.dropout == 0:
            part = Shard(1)
            plan |= {
                "embedding": PrepareModuleOutput(
                    output_layouts=Replicate(), desired_output_layouts=part
                ),
                "blocks.*.attention_norm": SequenceParallel(),
                "blocks.*.attention.qkv": ColwiseParallel(input_layouts=part),
                "blocks.*.attention.out": RowwiseParallel(output_layouts=part),
                "blocks.*.mlp_norm": SequenceParallel(),
                "blocks.*.mlp.up": ColwiseParallel(input_layouts=part),
                "blocks.*.mlp.down": RowwiseParallel(output_layouts=part),
                "head.norm": SequenceParallel(),
                "head.logits": ColwiseParallel(input_layouts=part, output_layouts=Replicate()),
            }
        return plan

    def _token_file(self) -> Path:
        if self.tokens is None:
            return built_token_file()
        path = Path(self.tokens).expanduser()
        if not path.is_file():
            raise AllranksError(
                f"there is no token file {path.absolute()}",
                fix="correct options.tokens, or set it to null to train on Python's own sources",
            )
        return path


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Non-overlapping windows of a token file: `(tokens, the tokens that follow each)`."""

    def __init__(self, path: Path, context: int, vocabulary: int, part: range) -> None:
        self.path, self.context, self.vocabulary, self.part = path, context, vocabulary, part
        length = context + 1
        tokens = open_tokens(path)[part.start * length : part.stop * length]
        self.windows = tokens.reshape(len(part), length)  # a view: nothing is read yet

    def __reduce__(self) -> tuple[Any, ...]:
        # A pickled memory map would copy the whole file to each worker process.
        return Windows, (self.path, self.context, self.vocabulary, self.part)

    def __len__(self) -> int:
        return len(self.part)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, targets = self.batch([index])
        return inputs[0], targets[0]

    def batch(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """These samples, collated, in one read: inputs and targets `[batch, context]`."""
        windows = self.windows[np.asarray(indices)]
        lowest, highest = windows.min(), windows.max()
        # On a GPU, an id out of range fails in an assertion that names neither the id nor the file.
        if lowest < 0 or highest >= self.vocabulary:
            raise AllranksError(
                f"{self.path} has the token id {lowest if lowest < 0 else highest}, but the"
                f" vocabulary is {self.vocabulary:,}: ids from 0 to {self.vocabulary - 1:,}",
                fix=f"set options.vocabulary to at least {int(highest) + 1}, options.size to one"
                " with a larger vocabulary, or options.tokens to a file of this vocabulary",
            )
        tokens = torch.from_numpy(windows.astype(np.int64))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def open_tokens(path: Path) -> Tokens:
    """The file's token ids, memory-mapped."""
    try:
        if path.suffix == ".npy":
            tokens = np.load(path, mmap_mode="r")
        elif path.suffix == ".bin":
            # An empty file cannot be mapped.
            empty = path.stat().st_size == 0
            tokens = np.empty(0, "<u2") if empty else np.memmap(path, "<u2", mode="r")
        else:
            raise ValueError(f"the name ends in {path.suffix!r}")
        if not isinstance(tokens, np.ndarray) or tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise ValueError("not a 1-D array of integers")
    except (OSError, EOFError, ValueError) as error:
        raise AllranksError(
            f"{path} cannot be read as a token file: {error}",
            fix="set options.tokens to a .bin of little-endian uint16 ids, as nanoGPT writes,"
            " or a .npy with a 1-D array of integers",
        ) from error
    return np.asarray(tokens)  # not np.memmap, which makes every slice a little slower


def built_token_file() -> Path:
    """The bytes of Python's own sources as tokens, in the user's cache; built if missing.

    Ranks may call it at the same time: each writes its own file, with the same content.
    """
    # sys.stdlib_module_names leaves out what differs between machines of one Python version.
    folder = Path(sysconfig.get_path("stdlib"))
    sources = [folder / f"{name}.py" for name in sorted(sys.stdlib_module_names)]
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "allranks"
        path = cache / f"python-{platform.python_version()}-{BUILT_TOKENS}.bin"
        if path.is_file():
            return path
        text = b"".join(source.read_bytes() for source in sources if source.is_file())
        if not text:
            raise FileNotFoundError("there are no .py files")
        cache.mkdir(parents=True, exist_ok=True)
        _write(path, np.frombuffer(text[:BUILT_TOKENS], np.uint8).astype("<u2").tobytes())
    except (OSError, RuntimeError) as error:
        raise AllranksError(
            f"no token file could be built from Python's sources in {folder}: {error}",
            fix="set XDG_CACHE_HOME to a folder that can be written, or options.tokens to a file",
        ) from error
    return path


def _write(path: Path, content: bytes) -> None:
    """Write the whole file or nothing."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name, delete=False) as file:
        try:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            # Others may have mapped a faster rank's file: on NFS, a replaced file goes stale.
            if path.exists():
                os.unlink(file.name)
            else:
                os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise
