"""Floating-point operations of a training step, counted from the shapes of its operators.

Matrix products, convolutions, attention and recurrent layers count; a multiplication and its
addition are two operations. Attention counts in full, whether it is causal or not. An operator of
the forward pass counts three times if a backward pass follows, once if none does (a teacher, an
evaluation). The backward pass itself is not counted, and what it recomputes is counted separately.
The optimizer, which may multiply matrices too, is not counted. What a CUDA graph computes is
counted at its capture; a replay is one operator, perhaps of a forward or backward pass.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from allranks.timing.trace import Span, Trace

Shapes = Sequence[Sequence[int]]
Formula = Callable[[Shapes, Sequence[str]], float]  # from all arguments: shapes, values

NODE = "autograd::engine::evaluate_function: "  # a node of the backward pass, as the engine runs it
OPTIMIZER = "Optimizer.step#"
GRAPH_MARK = "allranks.graph#"  # as the probe writes it around a replay, with the graph's number
RUNS_GRAPH = re.compile(r"(cuda|hip)GraphLaunch\w*")
SEQUENCE = "Sequence number"  # of an operator that autograd records
# Kernels that torch.compile generates in place of operators: their arguments do not show what they
# compute.
TEMPLATES = ("triton_tem_", "cpp_fused_gemm", "cutlass_")
PRECISIONS = {
    "double": "float64",
    "float": "float32",
    "c10::half": "float16",
    "c10::bfloat16": "bfloat16",
    "c10::float8_e4m3fn": "float8",
    "c10::float8_e5m2": "float8",
    "c10::float8_e4m3fnuz": "float8",
    "c10::float8_e5m2fnuz": "float8",
}


@dataclass(frozen=True, slots=True)
class Flops:
    """Floating-point operations of an average step."""

    model: Mapping[str, float]  # by precision
    recomputed: float = 0.0  # for activations that the backward pass computes again


def product(first: int) -> Formula:
    """Counts a product of two matrices, or of two stacks: the argument `first` and the next."""

    def count(shapes: Shapes, values: Sequence[str]) -> float:
        one, other = shapes[first], shapes[first + 1]
        return 2.0 * math.prod(one) * (other[-1] if len(other) > 1 else 1)

    return count


def grouped_product(shapes: Shapes, values: Sequence[str]) -> float:
    """Products of matrices that each hold some rows or columns of one of the two arguments."""
    one, other = shapes[0], shapes[1]
    stacked = one[0] if len(one) == len(other) == 3 else 1
    return 2.0 * stacked * one[-2] * one[-1] * other[-1]


def convolution(shapes: Shapes, values: Sequence[str]) -> float:
    image, weight, num_dims = shapes[0], shapes[1], len(shapes[1]) - 2
    stride, padding, dilation = (_numbers(values[place], num_dims) for place in (3, 4, 5))
    is_transposed = values[6] == "True"
    places = [
        size if is_transposed else (size + 2 * pad - step * (kernel - 1) - 1) // jump + 1
        for size, kernel, jump, pad, step in zip(
            image[2:], weight[2:], stride, padding, dilation, strict=True
        )
    ]
    return 2.0 * image[0] * math.prod(places) * math.prod(weight)


def attention(shapes: Shapes, values: Sequence[str]) -> float:
    query, key, value = shapes[:3]  # samples, heads, tokens, size of a head
    return 2.0 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def attention_by_token(shapes: Shapes, values: Sequence[str]) -> float:
    query, key, value = shapes[:3]  # samples, tokens, heads, size of a head
    return 2.0 * math.prod(query[:-1]) * key[-3] * (query[-1] + value[-1])


def recurrent(shapes: Shapes, values: Sequence[str]) -> float:
    weights: Any = shapes[1] if isinstance(shapes[1][0], list) else shapes[1:3]  # in one list
    size: int = sum(math.prod(weight) for weight in weights if len(weight) == 2)
    return 2.0 * math.prod(shapes[0][:-1]) * size


def _numbers(text: str, count: int) -> list[int]:
    numbers = [int(number) for number in json.loads(text)]
    return numbers * count if len(numbers) == 1 else numbers


@dataclass(frozen=True, slots=True)
class Operator:
    """How an operator is counted. `operand`: the argument in whose type it computes."""

    count: Formula
    operand: int = 0
    family: str = "matmul"  # whose setting decides whether tf32 is allowed


OPERATORS = {
    **dict.fromkeys(("mm", "bmm", "mv", "_scaled_mm"), Operator(product(0))),
    **dict.fromkeys(("addmm", "baddbmm", "addmv", "_addmm_activation"), Operator(product(1), 1)),
    **dict.fromkeys(("_grouped_mm", "_scaled_grouped_mm"), Operator(grouped_product)),
    "convolution": Operator(convolution, family="convolution"),
    **dict.fromkeys(
        (
            "_scaled_dot_product_flash_attention",
            "_scaled_dot_product_efficient_attention",
            "_scaled_dot_product_cudnn_attention",
            "_scaled_dot_product_flash_attention_for_cpu",
            "_scaled_dot_product_fused_attention_overrideable",
        ),
        Operator(attention),
    ),
    **dict.fromkeys(
        ("_flash_attention_forward", "_efficient_attention_forward"), Operator(attention_by_token)
    ),
    **dict.fromkeys(("_cudnn_rnn", "mkldnn_rnn_layer"), Operator(recurrent, 0, "convolution")),
}


@dataclass(slots=True)
class _Counted:
    """One operator that was found, including those that it called."""

    name: str
    flops: float
    precision: str
    is_trained: bool  # a backward pass follows


@dataclass(slots=True)
class _Node:
    """A node of the backward pass, or a call outside it."""

    is_backward: bool = True
    # Whether it ran operators that autograd does not record, as a backward pass does; those that it
    # does record are then recomputed. If it records all, the script differentiates its gradients.
    has_unwatched: bool = False
    watched: list[_Counted] = field(default_factory=list)


class _Open:
    """An operator that has not ended yet, and what is true of those that it calls."""

    __slots__ = ("counted", "end", "is_left_out", "is_trained", "is_watched", "node")

    def __init__(self, above: _Open | None, span: Span, followed: set[tuple[int, str]]) -> None:
        number = span.args.get(SEQUENCE)
        is_node = span.name.startswith(NODE)
        self.end: float = span.end
        self.node: _Node = _Node() if is_node or above is None else above.node
        if above is None and not is_node:
            self.node.is_backward = False
        self.is_watched = number is not None and not span.args.get("Fwd thread id")
        is_followed = number is not None and (number, _plain(span.name)) in followed
        self.is_trained, self.is_left_out = is_followed, span.name.startswith(OPTIMIZER)
        self.counted: _Counted | None = None
        if above is not None and not is_node:
            self.is_watched |= above.is_watched
            self.is_trained |= above.is_trained
            self.is_left_out |= above.is_left_out
            self.counted = above.counted


def flops_of(
    trace: Trace, tf32: Collection[str] = (), graphs: Sequence[Flops | None] = ()
) -> Flops | None:
    """The operations of a trace's average step; None if not everything could be counted.

    `tf32`: where float32 is computed in tf32: `matmul`, `convolution` or both. `graphs`: what each
    CUDA graph computes, by its number.
    """
    spans = [span for span in trace.host if trace.covers(span.begin)]
    spans += [one for one in trace.annotations if one.name.startswith(OPTIMIZER)]
    replays = [one for one in trace.annotations if one.name.startswith(GRAPH_MARK)]
    replays = [one for one in replays if trace.covers(one.begin)]
    launches = (one.begin for one in trace.runtime if RUNS_GRAPH.fullmatch(one.name))
    if sum(map(trace.covers, launches)) > len(replays):  # some had been captured before we looked
        return None
    spans += replays
    if any(span.name.startswith(TEMPLATES) for span in spans):
        return None
    try:
        nodes = _nodes(spans, tf32, graphs)
    except (KeyError, IndexError, TypeError, ValueError):  # shapes or values were not recorded
        return None
    model: defaultdict[str, float] = defaultdict(float)
    recomputed = 0.0
    for node in nodes:
        for one in node.watched:
            if node.is_backward and node.has_unwatched:
                recomputed += one.flops
            else:
                model[one.precision] += one.flops * (3 if one.is_trained else 1)
    steps = max(1, trace.num_steps)
    per_step = {name: total / steps for name, total in model.items()}
    return Flops(per_step, recomputed / steps)


def _nodes(
    spans: Iterable[Span], tf32: Collection[str], graphs: Sequence[Flops | None]
) -> list[_Node]:
    """Every node of the backward pass and every call outside it, with the operators in it."""
    ordered = sorted(spans, key=lambda span: (span.begin, -span.end))
    followed = {
        (span.args[SEQUENCE], _forward(span.name.removeprefix(NODE)))
        for span in ordered
        if span.name.startswith(NODE) and SEQUENCE in span.args
    }
    stacks: defaultdict[Any, list[_Open]] = defaultdict(list)
    nodes: list[_Node] = []
    for span in ordered:
        stack = stacks[span.thread]
        while stack and stack[-1].end <= span.begin:
            stack.pop()
        here = _Open(stack[-1] if stack else None, span, followed)
        stack.append(here)
        if len(stack) == 1 or span.name.startswith(NODE):
            nodes.append(here.node)
        name = span.name.removeprefix("aten::")
        here.node.has_unwatched |= span.name.startswith("aten::") and not here.is_watched
        is_graph = span.name.startswith(GRAPH_MARK)
        # Autograd records the optimizer's closure, which computes the gradients within its step.
        if not (is_graph or name in OPERATORS) or (here.is_left_out and not here.is_watched):
            continue
        if here.counted is None:
            if here.node.is_backward and not here.is_watched:
                continue  # the backward pass itself
            if is_graph:
                here.node.watched += _replayed(span, graphs, here.is_trained)
                continue
            flops = OPERATORS[name].count(span.args["Input Dims"], span.args["Concrete Inputs"])
            here.counted = _Counted(name, flops, _precision(span, name, tf32), here.is_trained)
            here.node.watched.append(here.counted)
        elif here.counted.name == name:  # autocast calls it again, with other types
            here.counted.precision = _precision(span, name, tf32)
            here.counted.is_trained |= here.is_trained
    return nodes


def _replayed(span: Span, graphs: Sequence[Flops | None], is_trained: bool) -> list[_Counted]:
    """What a graph computes; raises ValueError if that is not known."""
    flops = graphs[int(span.name.removeprefix(GRAPH_MARK))]
    if flops is None:
        raise ValueError(span.name)
    return [_Counted(span.name, total, name, is_trained) for name, total in flops.model.items()]


def _plain(name: str) -> str:
    return name.removeprefix("aten::").replace("_", "").lower()


def _forward(node: str) -> str:
    """The operator whose backward pass a node is: AddmmBackward0 is that of addmm."""
    return _plain(node.rstrip("0123456789").removesuffix("Backward"))


def _precision(span: Span, name: str, tf32: Collection[str]) -> str:
    operator = OPERATORS[name]
    kind = PRECISIONS.get(str(span.args["Input type"][operator.operand]).lower(), "other")
    return "tf32" if kind == "float32" and operator.family in tf32 else kind
