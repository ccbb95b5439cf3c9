"""`compile: auto` on a CUDA machine, by hand: `pytest -m gpu`. One GPU is enough."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.faults import losses, newest_weights, same_bits, start

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

SMALL = ["task=digits", "options.network=mlp", "options.dropout=0.1", "log_every=1"]
LANGUAGE = [
    *("task=language", "options.size=16m", "options.context=1024", "batch_size=8", "log_every=1"),
    *("optimizer.schedule=constant", "optimizer.warmup=0"),
]


def trained(cwd: Path, *arguments: str) -> tuple[Path, dict[str, Any]]:
    """The folder and the result of a run that finished."""
    cwd.mkdir(exist_ok=True)
    code, result = start(cwd, *arguments).wait(800)
    assert code == 0, (cwd / "stderr.txt").read_text()[-3000:]
    return Path(result["run_dir"]), result


def events(run: Path, attempt: int = 0) -> list[dict[str, Any]]:
    lines = (run / f"attempts/{attempt}/rank-0.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_a_small_step_becomes_a_graph_with_the_same_losses(tmp_path: Path) -> None:
    job = [*SMALL, "steps=600", "precision=fp32"]
    _, found = trained(tmp_path / "auto", *job)
    auto, plain = Path(found["run_dir"]), trained(tmp_path / "false", *job, "compile=false")[0]
    print(found["compile"])
    assert found["compile"]["form"].endswith("as a CUDA graph"), found["compile"]
    assert found["compile"]["times"]["eager as a CUDA graph"] < found["compile"]["times"]["eager"]
    ours, theirs = losses(auto), losses(plain)
    first = found["compile"]["step"]
    # The rate is a number on the GPU here, rounded to fp32; dropout must draw the same masks.
    for step in range(1, first + 50):
        assert ours[step] == pytest.approx(theirs[step], rel=1e-3)
    replayed = [e for e in events(auto) if e["event"] == "step" and e["step"] > first]
    for event in replayed[:100]:
        assert min(event["forward"], event["backward"], event["optimizer"]) > 0


def test_compiling_beside_the_training_gains_and_keeps_the_curve(tmp_path: Path) -> None:
    auto, found = trained(tmp_path / "auto", *LANGUAGE, "steps=12000")
    plain, _ = trained(tmp_path / "false", *LANGUAGE, "steps=500", "compile=false")
    print(found["compile"])
    assert found["compile"]["form"] == "compiled as a CUDA graph", found["compile"]
    compiled, _ = trained(tmp_path / "true", *LANGUAGE, "steps=500", "compile=true")
    means = [sum(losses(run)[step] for step in range(450, 501)) for run in (plain, auto, compiled)]
    assert means[1:] == pytest.approx([means[0]] * 2, rel=0.01)


@pytest.mark.parametrize("stop", [20, 200])
def test_a_resumed_run_changes_over_at_the_same_step(tmp_path: Path, stop: int) -> None:
    job = [*SMALL, "precision=fp32", "checkpoint.every=20", "checkpoint.keep=100", "steps=400"]
    whole, found = trained(tmp_path / "whole", *job)
    assert found["compile"]["form"] != "eager"
    at, weights = newest_weights(whole)
    # As after a kill: nothing is left of what came after this checkpoint but compile.json.
    for path in (whole / "checkpoints").iterdir():
        if int(path.name.removeprefix("step-")) > stop:
            path.rename(tmp_path / path.name)
    (whole / "attempts/0/rank-0.jsonl").write_text(
        "\n".join(json.dumps(e) for e in events(whole) if e["event"] != "end") + "\n"
    )
    resumed, _ = trained(tmp_path / "whole", "--resume", "last")
    assert newest_weights(resumed)[0] == at
    assert same_bits(newest_weights(resumed)[1], weights)


def test_a_step_that_waits_for_the_gpu_is_no_graph(tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text(
        "from allranks.tasks.digits import Digits\n"
        "class Waits(Digits):\n"
        "    def loss(self, outputs, targets):\n"
        "        losses = super().loss(outputs, targets)\n"
        "        losses.sum().item()\n"
        "        return losses\n"
    )
    job = ["task=waits:Waits", "batch_size=64", "steps=300"]
    _, found = trained(tmp_path, *job)
    assert not found["compile"]["form"].endswith("graph")
    assert "eager as a CUDA graph" in found["compile"]["why"]


@pytest.mark.parametrize("layout", ["1x1", "1x2"])
def test_compile_true_compiles_before_the_first_step_only(tmp_path: Path, layout: str) -> None:
    job = [*LANGUAGE, "steps=100", "compile=true", "--layout", layout, "--oversubscribe"]
    run, found = trained(tmp_path, *job)
    assert found["compile"]["lost"] > 0
    steps = [e["seconds"] for e in events(run) if e["event"] == "step" and not e.get("traced")]
    assert max(steps[5:]) < 2.0  # compiling would take longer
