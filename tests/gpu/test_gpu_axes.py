"""Layouts with axes over NCCL, by hand on one GPU, which the ranks share: `pytest -m gpu -s`.

It prints what was measured. Times would mean nothing, and are not.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.faults import losses, start
from tests.held import assert_held, measured
from tests.ranks import run_ranks
from tests.training import Trainings, difference

from allranks.job.job import parse_job
from allranks.launch import models
from allranks.layout import Layout

# Ranks that share a GPU take turns on it, and what one test waits for may take longer than usual.
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1200)]

BACKEND = "nccl"
LAYOUTS = (
    *("1x2", "1x2:fsdp=2", "1x2:tp=2", "1x2:pp=2", "1x4", "1x4:fsdp=4", "1x4:tp=4", "1x4:pp=4"),
    *("1x4:fsdp=2", "1x4:fsdp=2,tp=2", "1x4:tp=2,pp=2", "1x4:fsdp=2,pp=2"),
)
FP32: dict[str, Any] = {"precision": "fp32", "steps": 12}
BF16: dict[str, Any] = {"precision": "bf16", "steps": 12}
# Large enough that little is needed only for a moment: logits, and the 32 MiB of cuBLAS in each of
# two threads. A pipeline's micro-batches are an eighth of the batch.
LARGE: dict[str, Any] = {
    **{"task": "language", "options": {"size": "124m", "context": 256, "vocabulary": 256}},
    **{"precision": "bf16", "steps": 4, "data": {"num_workers": 0}},
}


@pytest.mark.parametrize("ranks", [2, 4])
def test_axes_have_the_losses_of_a_cpu(tmp_path: Path, ranks: int) -> None:
    layouts = [layout for layout in LAYOUTS if Layout.parse(layout).ranks == ranks]
    expected = Trainings(tmp_path)("1x1", **FP32)[0]
    found = Trainings(tmp_path, backend=BACKEND).together(layouts, FP32, BF16)
    for (layout, number), seen in found.items():
        apart = {
            what: max(difference(getattr(rank, what), getattr(expected, what)) for rank in of)
            for what, of in (("losses", seen[:1]), ("norms", seen), ("metrics", seen))
        }
        said = ", ".join(f"{what} {value:.0e}" for what, value in apart.items())
        print(f"\n{layout} {('fp32', 'bf16')[number]}: apart from a CPU in fp32: {said}")
        assert max(apart.values()) < (1e-3, 3e-2)[number], layout


def test_a_run_with_axes_over_nccl(tmp_path: Path) -> None:
    job = ["task=language", "batch_size=16", "steps=20", "log_every=1", "precision=fp32"]
    found = []
    for name, more, env in (
        ("cpu", ["--layout", "1x1"], {"CUDA_VISIBLE_DEVICES": ""}),
        ("gpu", ["--layout", "1x4:tp=2,pp=2", "--oversubscribe"], {}),
    ):
        (tmp_path / name).mkdir()
        code, result = start(tmp_path / name, *job, *more, env=env).wait(280)
        assert code == 0, (tmp_path / name / "stderr.txt").read_text()[-3000:]
        found.append([*losses(Path(result["run_dir"])).values()])
    apart = difference(found[1], found[0])
    print(f"\nallranks run --layout 1x4:tp=2,pp=2 --oversubscribe: losses apart {apart:.0e}")
    assert apart < 1e-3


@pytest.mark.parametrize(
    "layout",
    ["1x1", "1x2", "1x2:fsdp=2", "1x2:tp=2", "1x2:pp=2", "1x4:fsdp=2,tp=2", "1x4:tp=2,pp=2"],
)
def test_ranks_hold_what_explain_predicts(tmp_path: Path, layout: str) -> None:
    ranks = Layout.parse(layout).ranks
    settings = {**LARGE, "batch_size": 128 * Layout.parse(layout).data_ranks}
    told = models.explain(parse_job({**settings, "layout": layout}))
    found = run_ranks(
        measured, ranks, tmp_path, layout, tmp_path, settings, timeout=200, backend=BACKEND
    )
    for rank, real in enumerate(found):
        (kind,) = [kind for kind in told["ranks"] if rank in kind["ranks"]]
        apart = kind["peak"] / real["peak"] - 1
        print(
            f"\n{layout} rank {rank}: told {kind['bytes']}, held {real['bytes']}; peak "
            f"{kind['peak']:,} predicted, {real['peak']:,} measured: {apart:+.1%}"
        )
        assert_held(kind["bytes"], real["bytes"])
        assert abs(apart) <= 0.1
