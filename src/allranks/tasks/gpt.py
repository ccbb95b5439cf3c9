"""A GPT-2-shaped decoder, whose heads, hidden units and layers can be divided among ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from allranks.errors import AllranksError

INIT_STD = 0.02  # GPT-2's, for everything but biases, norms and residual projections


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The sizes that determine the number of parameters."""

    layers: int
    width: int
    heads: int
    context: int  # tokens seen at once
    vocabulary: int


# GPT-2's vocabulary is 50,257, rounded up here to a multiple of 128 as matmuls like it. The two
# small sizes are for bytes: with GPT-2's vocabulary they would be little but embeddings.
SHAPES = {
    "tiny": Shape(layers=2, width=64, heads=4, context=64, vocabulary=256),
    "16m": Shape(layers=4, width=576, heads=8, context=256, vocabulary=256),
    "124m": Shape(layers=12, width=768, heads=12, context=1024, vocabulary=50_304),
    "1.5b": Shape(layers=48, width=1600, heads=25, context=1024, vocabulary=50_304),
}


class GPT(nn.Module):
    """Token ids `[batch, length]` -> logits `[batch, length, vocabulary]`."""

    def __init__(self, shape: Shape, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = Embeddings(shape, dropout)
        self.blocks = nn.ModuleList(Block(shape, dropout) for _ in range(shape.layers))
        self.head = Head(shape.width, self.embedding.tokens)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


class Embeddings(nn.Module):
    """The token's embedding plus its position's."""

    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.tokens = Embedding(shape.vocabulary, shape.width)
        self.positions = Embedding(shape.context, shape.width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.dropout(self.tokens(ids) + self.positions.weight[: ids.shape[1]])
        return as_precise_as_matmuls(x)


class Block(nn.Module):
    """Attention, then an MLP, each on a normalised copy and added to the stream."""

    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        # 2 x layers branches add up in the stream: this scale keeps its variance from growing.
        residual_std = INIT_STD / math.sqrt(2 * shape.layers)
        self.attention_norm = Norm(shape.width)
        self.attention = Attention(shape, dropout, residual_std)
        self.mlp_norm = Norm(shape.width)
        self.mlp = MLP(shape.width, dropout, residual_std)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        x = x + self.mlp(self.mlp_norm(x))
        return x


class Attention(nn.Module):
    """Causal self-attention.

    One matmul makes queries, keys and values, because one large is faster than three small. Its
    output is laid out head by head (each head's query, key and value side by side), so that a cut
    of its columns by tensor-parallel ranks leaves whole heads to each.
    """

    def __init__(self, shape: Shape, dropout: float, residual_std: float) -> None:
        super().__init__()
        self.heads = shape.heads
        self.head_dim = shape.width // shape.heads
        self.dropout = dropout
        self.qkv = Linear(shape.width, 3 * shape.width)
        self.out = Linear(shape.width, shape.width, std=residual_std)
        self.residual_dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        qkv = self.qkv(x)
        # The number of heads comes from the tensor: a tensor-parallel rank has its share of them.
        if qkv.shape[-1] % (3 * self.head_dim):
            raise AllranksError(
                f"{self.heads} attention heads cannot be divided evenly by the layout's tp",
                fix=f"choose a layout whose tp is one of: {_divisors(self.heads)}",
            )
        heads = qkv.view(batch, length, -1, 3, self.head_dim).transpose(1, 2)
        query, key, value = heads.unbind(3)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        y = self.out(y.transpose(1, 2).flatten(2))
        return self.residual_dropout(y)  # type: ignore[no-any-return]


class MLP(nn.Module):
    """Applies to each position separately: four times as wide, GELU, and back."""

    def __init__(self, width: int, dropout: float, residual_std: float) -> None:
        super().__init__()
        self.up = Linear(width, 4 * width)
        self.down = Linear(4 * width, width, std=residual_std)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.up(x), approximate="tanh")
        return self.dropout(self.down(x))  # type: ignore[no-any-return]


class Head(nn.Module):
    """From the stream to logits, with the matrix that also embeds the tokens."""

    def __init__(self, width: int, embedding: nn.Embedding) -> None:
        super().__init__()
        self.norm = Norm(width)
        self.logits = nn.Linear(width, embedding.num_embeddings, bias=False, device="meta")
        self.logits.weight = embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.logits(self.norm(x))  # type: ignore[no-any-return]


class Norm(nn.LayerNorm):
    """A layer norm whose output is as precise as the matmuls that take it.

    A GPU's autocast leaves it in float32, as which tensor-parallel ranks would gather it.
    """

    def forward(self, x: Tensor) -> Tensor:
        return as_precise_as_matmuls(super().forward(x))


class Linear(nn.Linear):
    """A linear layer with GPT-2's initialisation."""

    def __init__(self, inputs: int, outputs: int, std: float = INIT_STD) -> None:
        self.std = std  # before the rest: the constructor resets the parameters
        super().__init__(inputs, outputs)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)
        nn.init.zeros_(self.bias)


class Embedding(nn.Embedding):
    """An embedding with GPT-2's initialisation."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=INIT_STD)


def as_precise_as_matmuls(x: Tensor) -> Tensor:
    """The stream, in bf16 if matmuls are: half as much to move, and to send to other ranks.

    Not in fp16, whose largest number a stream can exceed.
    """
    kind = x.device.type
    is_bf16 = torch.get_autocast_dtype(kind) is torch.bfloat16
    return x.bfloat16() if is_bf16 and torch.is_autocast_enabled(kind) else x


def _divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)
