"""What decides how a task's model can be divided, read from the model without its weights."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from allranks.errors import AllranksError
from allranks.job.axes import ModelFacts
from allranks.job.job import Job
from allranks.tasks import Task

# How models call the number of their attention heads; each rank of tp needs whole ones.
HEADS = ("heads", "num_heads", "n_heads", "n_head", "num_attention_heads", "num_key_value_heads")


def facts_of(job: Job, task: Task, model: nn.Module) -> ModelFacts:
    """What decides how the model can be divided."""
    task.tp = job.layout.tp
    plan = task.tensor_parallel_plan(model)
    if job.layout.tp > 1 and plan is not None:
        check_names(task, model, plan)
    return ModelFacts(
        task=type(task).__name__,
        divided=divided_sizes(model, plan) if plan is not None else None,
    )


def check_names(task: Task, model: nn.Module, plan: Mapping[str, Any]) -> None:
    """Refuse a plan for modules that the model does not have: torch would only skip them."""
    names = [name for name, _ in model.named_modules()]
    for pattern in plan:
        if any(_matches(name, pattern) for name in names):
            continue
        patterns = dict.fromkeys(re.sub(r"\b\d+\b", "*", name) for name in names if name)
        near = difflib.get_close_matches(pattern, patterns, n=1) or [*patterns][-1:]
        raise AllranksError(
            f"{type(task).__name__}.tensor_parallel_plan names {pattern}, but the model has no "
            "such module",
            fix=f"write the name of one, such as {', '.join(near)}, or leave it out",
        )


def divided_sizes(model: nn.Module, plan: Mapping[str, Any]) -> dict[str, int]:
    """The sizes that the plan divides among the ranks of tp, by their names."""
    sizes: dict[str, int] = {}
    for name, module in model.named_modules():
        for pattern, style in plan.items():
            if not _matches(name, pattern) or not isinstance(
                style, ColwiseParallel | RowwiseParallel
            ):
                continue
            parent = model.get_submodule(name.rpartition(".")[0])
            heads = ((key, getattr(parent, key, None)) for key in HEADS)
            sizes |= {key: number for key, number in heads if isinstance(number, int)}
            is_by_column = isinstance(style, ColwiseParallel)
            if isinstance(module, nn.Embedding):
                key = "embedding_dim" if is_by_column else "num_embeddings"
            else:
                key = "out_features" if is_by_column else "in_features"
            if isinstance(size := getattr(module, key, None), int):
                words = {
                    "num_embeddings": "tokens",
                    "embedding_dim": "values",
                    "in_features": "inputs",
                }
                sizes[f"{words.get(key, 'outputs')} of {pattern}"] = size
    return sizes


def _matches(name: str, pattern: str) -> bool:
    """Whether parallelize_module applies the pattern to the module of that name."""
    names, patterns = name.split("."), pattern.split(".")
    return len(names) == len(patterns) and all(map(fnmatchcase, names, patterns))
