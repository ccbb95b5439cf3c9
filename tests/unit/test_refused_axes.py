"""Axes that a job, or its model, cannot have are refused in one message with those that it can."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.commandline import call_allranks
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.utils.data import Dataset, TensorDataset

from allranks.errors import AllranksError
from allranks.job.job import parse_job
from allranks.launch import models
from allranks.tasks import Task
from allranks.train.explain import answer, check


class Couples(Task):
    """A chain whose loss compares samples."""

    couples_samples = True

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))

    def datasets(self) -> dict[str, Dataset[Any]]:
        return {"train": TensorDataset(torch.zeros(64, 4), torch.zeros(64))}


class Unknown(Couples):
    """A model that nothing is known about."""

    couples_samples = False

    def model(self) -> nn.Module:
        return nn.ModuleDict({"one": nn.Linear(4, 4)})


class Misnamed(Unknown):
    """Its plan names a module that the model does not have."""

    def tensor_parallel_plan(self, model: nn.Module) -> dict[str, Any]:
        return {"on": ColwiseParallel()}


@pytest.fixture(autouse=True)
def answered_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is looked at in this process, which has torch already."""

    def ask(question: str, jobs: str, seconds: float | None) -> Any:
        found = answer([parse_job(job, resolved=True) for job in json.loads(jobs)], check)
        assert isinstance(found, dict), "not refused"
        error = found["error"]
        raise AllranksError(error["what"], fix=error["fix"], exit_code=error["exit_code"])

    monkeypatch.setattr(models, "_ask", ask)


@pytest.mark.parametrize(
    "command", ["run --oversubscribe", "submit --dry-run", "explain", "bench scaling"]
)
@pytest.mark.parametrize(
    ("layout", "settings", "what", "fix"),
    [
        ("1x4:tp=3", "task=language", "does not divide 4", "1x4:tp=2 or 1x4:tp=4"),
        ("1x8:dp=4", "task=language", "needs 4 ranks, not 8", "1x8:fsdp=2"),
        ("1x4:tpp=2", "task=language", "dp, fsdp, tp and pp", "1x4:tp=2"),
        ("1x4:tp=0", "task=language", "positive integer", "1x4:tp=2 or 1x4:tp=4"),
        ("1x4:tp=-2", "task=language", "positive integer", "1x4:tp=2"),
        ("1x8:tp=8", "task=language", "the model's 4 heads", "1x8:fsdp=2,tp=4; this model can"),
        ("1x8:pp=8", "task=language", "has only 4 blocks", "write --layout 1x8:pp=4"),
        (
            "1x4:pp=4",
            "task=language pipeline.schedule=interleaved",
            "8 stages, 2 for each rank",
            "pipeline.schedule=1f1b or --layout 1x4:pp=2",
        ),
        ("1x2:pp=2", "task=language pipeline.micro_batches=17", "has 16 samples", "=15 or 16"),
        ("1x2:tp=2", "task=HERE:Unknown", "Unknown has none", "--layout 1x2:fsdp=2"),
        ("1x2:tp=2", "task=HERE:Misnamed", "plan names on, but", "such as one"),
        ("1x2:pp=2", "task=HERE:Unknown", "of which blocks", "fsdp in place of pp"),
        ("1x4:pp=2", "task=HERE:Couples", "couples_samples", "--layout 1x4:fsdp=2"),
        ("1x2:fsdp=2", "task=language compress.name=powersgd", "divides the model", "1x2, or comp"),
    ],
)
def test_refused_before_anything_is_written(
    tmp_path: Path, command: str, layout: str, settings: str, what: str, fix: str
) -> None:
    option = "--layouts" if command == "bench scaling" else "--layout"
    settings = settings.replace("HERE", "tests.unit.test_refused_axes")
    words = [*command.split(), *settings.split(), "batch_size=16", "steps=3", option, layout]
    done = call_allranks(*words, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    said, _, advice = done.stderr.partition("fix: ")
    assert what in said and said.count("error: ") == 1 and "Traceback" not in done.stderr
    assert fix in advice
    assert not done.stdout
    assert [*tmp_path.iterdir()] == []


def test_ctrl_c_does_not_reach_the_process_that_builds_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would print where it was; it ends with the command anyway."""
    monkeypatch.undo()
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nread jobs\nset -- $(cat /proc/$$/stat)\necho [$5]\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    jobs = json.dumps([parse_job({"task": "language"}).to_mapping()])
    assert models._ask("explain", jobs, None) not in (None, [os.getpgrp()])
