"""Ranks that run out of memory, and an optimizer whose state is in host memory."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.faults import losses, newest_weights, same_bits, start
from tests.ranks import run_ranks
from tests.training import Trained, trained

from allranks.layout import Layout
from allranks.run.events import read_events
from allranks.run.folder import RunDir

pytestmark = pytest.mark.ranks

# One rank has room for so many samples in training, and perhaps runs out once in spite of that.
FULL = """
import os
from dataclasses import dataclass
from pathlib import Path
import torch
import torch.distributed as dist
from allranks.tasks.spiral import Spiral

@dataclass
class Full(Spiral):
    most: int = 1000
    rank: int = 1
    at: int = 0

    def model(self):
        self.passes = 0
        model = super().model()
        model.register_forward_pre_hook(self.allocate)
        return model

    def allocate(self, model, inputs):
        if not model.training or dist.get_rank() != self.rank:
            return
        self.passes += 1
        is_full = len(inputs[0]) > self.most
        if self.passes == self.at and not is_full:
            once = Path(os.environ["ALLRANKS_RUN_DIR"], "ran-out")
            is_full = not once.exists()
            once.touch()
        if is_full:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")
"""

SETTINGS: dict[str, Any] = {"batch_size": 24, "steps": 8, "checkpoint": {"every": 5}}


def remembering(layout: str, folder: Path, settings: dict[str, Any]) -> Trained:
    """Train, with a cache of this test's own."""
    os.environ["XDG_CACHE_HOME"] = str(folder.parent)
    return trained(layout, folder, settings)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of one rank that never runs out."""
    folder = tmp_path_factory.mktemp("reference")
    code, result = start(folder, *job_of(SETTINGS)).wait()
    assert code == 0
    assert result["micro_batches"] is None
    return losses(Path(result["run_dir"]))


def job_of(settings: dict[str, Any]) -> list[str]:
    return [*(f"{key}={json.dumps(value)}" for key, value in settings.items()), "log_every=1"]


def test_ranks_agree_on_what_fits_and_remember_it(
    tmp_path: Path, reference: dict[int, float]
) -> None:
    settings = {**SETTINGS, "task": "full:Full", "options": {"most": 5}, "micro_batch_size": "auto"}
    for number, (why, too_large, edited) in enumerate(
        (("tried", [12, 6], ""), ("remembered", [], ""), ("tried", [12, 6], "# another model"))
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "full.py").write_text(FULL + edited)
        found = run_ranks(remembering, 2, folder, "1x2", folder, settings)
        assert found[0].losses == pytest.approx([*reference.values()], rel=1e-5)
        run = RunDir(folder / "1x2")
        for begun in (run.start(0, rank) or {} for rank in range(2)):
            assert (begun["micro_batch_size"], begun["accumulation"]) == (4, 3)
        (chosen,) = read_events(run.events(0, 0), kind="micro_batches")
        assert (chosen["size"], chosen["number"], chosen["why"]) == (4, 3, why)
        assert chosen["too_large"] == too_large


@pytest.mark.parametrize(
    ("layout", "options", "size", "attempts", "last"),
    [
        # Saved before it ends: nothing is repeated.
        ("1x1", ["options.rank=0", "options.at=6", "micro_batch_size=12"], 6, 2, 3),
        # Two warm-up passes come before the first step.
        ("1x2", ["options.at=9"], 6, 2, 6),
        # All ranks end where one does not fit; 6 fits, but not always.
        ("1x2:fsdp=2", ["options.most=6", "options.at=16", "micro_batch_size=auto"], 3, 3, 6),
    ],
)
def test_a_run_that_runs_out_goes_on_with_half(
    tmp_path: Path,
    reference: dict[int, float],
    layout: str,
    options: list[str],
    size: int,
    attempts: int,
    last: int,
) -> None:
    (tmp_path / "full.py").write_text(FULL)
    cache = {"XDG_CACHE_HOME": str(tmp_path)}
    job = ["task=full:Full", *job_of(SETTINGS), *options, "--layout", layout]
    code, result = start(tmp_path, *job, env=cache).wait()
    said = (tmp_path / "stderr.txt").read_text()
    assert code == 0, said
    run = RunDir(Path(result["run_dir"]))
    assert (result["state"], result["attempt"]) == ("finished", attempts - 1)
    assert result["micro_batches"]["size"] == size
    assert losses(run.path) == pytest.approx(reference, rel=1e-5)
    steps = [e["step"] for e in read_events(run.events(attempts - 1, 0), kind="step")]
    assert steps == [*range(last, 9)]
    assert f"out of memory with micro-batches of {2 * size}: going on with {size}" in said
    assert "micro_batch_size: auto" in run.job_file.read_text() or "auto" not in str(options)


def test_one_sample_that_does_not_fit_ends_the_run(tmp_path: Path) -> None:
    (tmp_path / "full.py").write_text(FULL)
    job = ["task=full:Full", "options.most=0", "options.rank=0", "micro_batch_size=2"]
    code, result = start(tmp_path, *job, *job_of(SETTINGS), "batch_size=2").wait()
    assert code == 1
    assert "one sample does not fit" in result["error"]["what"]
    for key in ("activation_checkpointing", "optimizer.offload", "fsdp"):
        assert key in result["error"]["fix"]
    assert RunDir(next((tmp_path / "runs").iterdir())).attempts() == [0, 1]


# Optimizer state in host memory.


@pytest.mark.parametrize(
    ("layout", "more"),
    [
        ("1x1", {"precision": "fp16", "steps": 20}),
        ("1x2", {}),
        ("1x2:fsdp=2", {"optimizer": {"name": "sgd"}}),
        pytest.param("1x4:fsdp=2,tp=2", {}, marks=pytest.mark.soak),
        pytest.param("1x2:pp=2", {}, marks=pytest.mark.soak),
    ],
)
def test_an_offloaded_optimizer_computes_the_same_bits(
    tmp_path: Path, layout: str, more: dict[str, Any]
) -> None:
    found = []
    for offload in (False, True):
        folder = tmp_path / str(offload)
        folder.mkdir()
        optimizer = {"clip": 0.5, "offload": offload, **more.get("optimizer", {})}
        ids = np.random.default_rng(0).integers(0, 64, 106 * 17) ** 2 % 256
        ids.astype("<u2").tofile(folder / "tokens.bin")
        options = {"context": 16, "tokens": "tokens.bin"}
        settings = {"task": "language", "options": options, "batch_size": 6, "steps": 12}
        settings = {**settings, **more, "optimizer": optimizer}
        ranks = Layout.parse(layout).ranks
        found.append(run_ranks(trained, ranks, folder, layout, folder, settings))
    assert len(set(found[0][0].norms)) > 4
    assert repr(found[0]) == repr(found[1])  # fp16's first norms are not numbers


def test_a_checkpoint_is_resumed_with_and_without_offloading(tmp_path: Path) -> None:
    job = ["batch_size=24", "optimizer.schedule=constant", "optimizer.warmup=0"]
    job += ["--layout", "1x2:fsdp=2"]
    results = []
    for folder, legs in (("parts", "tft"), ("whole", "f")):
        (tmp_path / folder).mkdir()
        for number, offload in enumerate(legs, start=1):
            words = [f"steps={3 * number if folder == 'parts' else 9}", *job]
            words += [f"optimizer.offload={'true' if offload == 't' else 'false'}"]
            words += ["--resume", "last"] if number > 1 else []
            code, result = start(tmp_path / folder, *words).wait()
            assert code == 0, (tmp_path / folder / "stderr.txt").read_text()
        results.append(newest_weights(Path(result["run_dir"])))
    assert results[0][0] == results[1][0] == 9
    assert same_bits(results[0][1], results[1][1])
