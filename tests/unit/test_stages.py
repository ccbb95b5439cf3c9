"""How a model's blocks are divided into stages, and what is refused."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from allranks.errors import AllranksError
from allranks.job.job import parse_job
from allranks.job.stages import check_stages, num_micro_batches
from allranks.layout import Layout
from allranks.run.folder import RunDir
from allranks.tasks import Task
from allranks.tasks.language import Language
from allranks.train import stages
from allranks.train.data import Cut, MicroBatch
from allranks.train.dry_step import kinds_of_places
from allranks.train.mesh import Mesh
from allranks.train.pipeline import Passed
from allranks.train.stages import blocks_of, divide, divide_blocks, measure


def test_the_largest_stage_is_as_small_as_possible() -> None:
    draw = random.Random(0)
    for _ in range(200):
        costs = [draw.choice([0.1, 1.0, 2.0, 5.0]) for _ in range(draw.randint(1, 9))]
        num_stages = draw.randint(1, len(costs))
        sizes = divide(costs, num_stages)
        assert sum(sizes) == len(costs)
        assert len(sizes) == num_stages
        assert min(sizes) >= 1

        def largest(ends: list[int], costs: list[float] = costs) -> float:
            return max(sum(costs[a:b]) for a, b in itertools.pairwise([0, *ends, len(costs)]))

        cuts = itertools.combinations(range(1, len(costs)), num_stages - 1)
        best = min(largest(list(cut)) for cut in cuts)
        assert largest(list(itertools.accumulate(sizes))[:-1]) == pytest.approx(best)


def test_equal_blocks_are_divided_evenly_and_a_costly_one_is_alone() -> None:
    assert divide([1.0] * 8, 4) == [2, 2, 2, 2]
    assert sorted(divide([1.0] * 6, 4)) == [1, 1, 2, 2]
    assert divide([1, 1, 1, 1, 4], 2) == [4, 1]


def test_blocks_without_weights_stay_with_the_one_before() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2), nn.ReLU())
    sizes = [len(list(block.children())) for block in blocks_of(Task(), model)]
    assert sizes == [3, 2]
    assert len(blocks_of(Language(), Language().model())) == 4


class Odd(Task):
    """Whose blocks leave something out."""

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        return list(model.children())[1:]


def test_a_model_that_is_no_chain_is_refused() -> None:
    with pytest.raises(AllranksError, match=r"does not say of which blocks") as unknown:
        blocks_of(Task(), nn.Linear(2, 2))
    assert "blocks(model)" in unknown.value.fix
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(AllranksError, match=r"no block has 0\.weight, 0\.bias"):
        blocks_of(Odd(), model)
    same = nn.Linear(2, 2)
    with pytest.raises(AllranksError, match="twice"):
        blocks_of(Task(), nn.Sequential(same, nn.ReLU(), same))


def test_more_stages_than_blocks_are_refused_with_what_is_possible() -> None:
    assert check_stages(Layout(1, 4, pp=4), "1f1b", 4) == 4
    assert check_stages(Layout(1, 4, pp=2), "interleaved", 4) == 4
    with pytest.raises(AllranksError, match="has 8 stages, but the model has only 6") as error:
        check_stages(Layout(1, 8, pp=8), "1f1b", 6)
    assert error.value.fix == "write --layout 1x8:pp=4"
    with pytest.raises(AllranksError, match="8 stages, 2 for each rank") as error:
        check_stages(Layout(2, 4, pp=4, tp=2), "interleaved", 6)
    assert error.value.fix == "write pipeline.schedule=1f1b or --layout 2x4:tp=2,pp=2"


def number(
    layout: Layout, batch: int, schedule: str = "1f1b", wanted: int | None = None, **keys: int
) -> int:
    pipeline = {"schedule": schedule, "micro_batches": wanted}
    return num_micro_batches(parse_job({"pipeline": pipeline, **keys}), layout, batch)


def test_micro_batches_follow_from_the_batch() -> None:
    pipeline = Layout(1, 4, pp=4)
    assert number(pipeline, 64) == 16
    assert number(pipeline, 6) == 6
    assert number(pipeline, 64, micro_batch_size=10) == 7
    assert number(pipeline, 64, wanted=1, micro_batch_size=10) == 1
    assert number(pipeline, 9, "interleaved") == 8  # 9 are not in rounds
    assert number(pipeline, 90, "zero-bubble", micro_batch_size=10) == 10
    assert number(Layout(1, 4, pp=2), 6, "gpipe", micro_batch_size=1) == 3  # of two data ranks
    with pytest.raises(AllranksError, match="share of the batch has 6 samples") as error:
        number(pipeline, 6, wanted=8)
    assert error.value.fix == "write pipeline.micro_batches=5 or 6"
    with pytest.raises(AllranksError, match="rounds") as error:
        number(pipeline, 64, "interleaved", wanted=9)
    assert error.value.fix == "write pipeline.micro_batches=8 or 10"


def test_every_batch_is_cut_into_as_many_micro_batches() -> None:
    for samples, parts, count in itertools.product((1, 3, 7, 16), (1, 2), (1, 4, 8)):
        cuts = [Cut(16, part, parts, num_micro_batches=count) for part in range(parts)]
        pieces = [piece for cut in cuts for piece in cut.micro_batches(0, samples)]
        assert len(pieces) == parts * count
        assert sum(high - low for low, high in pieces) == samples
        assert max(high - low for low, high in pieces) <= cuts[0].largest
        whole = {high - low for cut in cuts for low, high in cut.micro_batches(0, 16)}
        assert cuts[0].is_even == (whole == {cuts[0].largest})


@dataclass
class Saved:
    """A checkpoint, as far as it matters here."""

    stages: list[int]

    def manifest(self) -> dict[str, Any]:
        return {"stages": self.stages}


def test_a_resumed_run_divides_its_model_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task, run = Language(), RunDir(tmp_path)
    data: Any = SimpleNamespace(example=lambda _: None, device=torch.device("cpu"))

    def divided(pp: int, costs: Sequence[float], commit: Any = None) -> list[int]:
        monkeypatch.setattr(stages, "measure", lambda *_: [*costs])
        job = parse_job({"task": "language", "layout": f"1x{pp}:pp={pp}"})
        mesh = Mesh(layout=job.layout)
        return divide_blocks(job, mesh, task, task.model(), data, nullcontext(), run, commit)

    assert divided(2, [1, 1, 1, 4]) == [3, 1]  # nothing was committed
    assert divided(4, [1, 1, 1, 1]) == [1, 1, 1, 1]  # other stages
    assert divided(2, [1, 1, 1, 1], Saved([1, 1, 1, 1])) == [3, 1]  # as before
    assert json.loads((tmp_path / stages.FILE).read_text()) == {"2": [3, 1], "4": [1, 1, 1, 1]}
    (tmp_path / stages.FILE).unlink()
    assert divided(2, [1, 1, 1, 1], Saved([1, 3])) == [1, 3]
    (tmp_path / stages.FILE).write_text('{"2": [4, 1]}')  # of another model
    assert divided(2, [1, 1, 1, 1]) == [2, 2]


def test_costs_are_measured_of_each_block_and_equal_for_equal_blocks() -> None:
    width = 64
    layers = [nn.Linear(width, width), nn.Linear(width, 60 * width), nn.Linear(60 * width, width)]
    inputs = torch.randn(256, width)
    weights = torch.ones(256)
    micro = MicroBatch(inputs, inputs, weights, weights)
    model = nn.Sequential(*layers, nn.Linear(width, width))

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (outputs - targets).square().mean(1)

    costs = measure(blocks_of(Task(), model), micro, loss, nullcontext(), torch.device("cpu"))
    assert costs[0] == costs[3] < min(costs[1:3])
    assert all(parameter.grad is None for parameter in model.parameters())


def test_tied_weights_are_in_two_of_languages_blocks() -> None:
    blocks = blocks_of(Language(), Language().model())
    first, last = ({id(p) for p in block.parameters()} for block in (blocks[0], blocks[-1]))
    assert len(first & last) == 1


def test_places_of_a_pipeline_that_are_explained_alike() -> None:
    blocks, peaks = [nn.Linear(4, 4) for _ in range(6)], [1] * 6
    same = Passed(tensors=(((2, 4), torch.float32),))

    def kinds(num_ranks: int, passed: Mapping[int, Passed]) -> list[Any]:
        return kinds_of_places(blocks, [1] * 6, passed, num_ranks, peaks)

    passed = dict.fromkeys(range(1, 6), same)
    first, *middle, last = kinds(6, passed)
    assert middle == [middle[0]] * 4 and first not in middle and last not in middle
    (first, *middle, last) = kinds(3, passed)  # two stages each
    assert len(middle) == 1 and first != last
    other = {**passed, 3: Passed(tensors=(((1, 4), torch.float32),))}
    assert [kinds(6, other).count(kind) for kind in kinds(6, other)] == [1, 2, 1, 1, 2, 1]
    blocks[2].bias.requires_grad_(False)
    assert [kinds(6, passed).count(kind) for kind in kinds(6, passed)] == [1, 3, 1, 3, 3, 1]
    blocks[2].bias.requires_grad_(True)
    blocks[1].weight = blocks[2].weight  # the sum of their gradients is exchanged
    assert [kinds(6, passed).count(kind) for kind in kinds(6, passed)] == [1, 1, 1, 2, 2, 1]
