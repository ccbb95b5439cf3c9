"""On a CUDA machine, by hand: `pytest -m gpu`. One GPU is enough: ranks share it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.commandline import run_allranks
from tests.faults import losses, newest_weights, same_bits, start

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1200)]  # of several runs, each within 280 s


def trained(cwd: Path, *arguments: str) -> Path:
    """The folder of a run that finished."""
    cwd.mkdir(exist_ok=True)
    code, result = start(cwd, *arguments).wait(280)
    assert code == 0, (cwd / "stderr.txt").read_text()[-3000:]
    assert result["state"] == "finished"
    return Path(result["run_dir"])


def start_event(run: Path) -> dict[str, object]:
    events = (run / "attempts/0/rank-0.jsonl").read_text().splitlines()
    return next(event for event in map(json.loads, events) if event["event"] == "start")


def worst(run: dict[int, float], reference: dict[int, float]) -> float:
    assert run.keys() == reference.keys()
    return max(abs(run[step] / reference[step] - 1) for step in reference)


def test_precision_auto_is_bf16(tmp_path: Path) -> None:
    run = trained(tmp_path, "steps=20")
    assert start_event(run)["precision"] == "bf16"
    assert start_event(run)["backend"] == "nccl"


@pytest.mark.parametrize("precision", ["fp32", "tf32", "fp16", "bf16"])
def test_every_precision_trains(tmp_path: Path, precision: str) -> None:
    run = trained(tmp_path, "task=language", "batch_size=16", "steps=60", f"precision={precision}")
    found = losses(run)
    assert found[60] < 0.8 * found[10]


@pytest.mark.parametrize("task", ["spiral", "language"])
def test_layouts_agree_over_nccl(tmp_path: Path, task: str) -> None:
    job = [f"task={task}", "batch_size=97", "steps=100", "log_every=1", "precision=fp32"]
    one = losses(trained(tmp_path / "1", *job))
    two = losses(trained(tmp_path / "2", *job, "--layout", "1x2", "--oversubscribe"))
    assert worst(two, one) < 1e-5


def test_resume_is_identical_to_the_bit(tmp_path: Path) -> None:
    job = ["precision=fp32", "optimizer.schedule=constant", "optimizer.warmup=0"]
    whole = trained(tmp_path / "whole", *job, "steps=300")
    trained(tmp_path / "parts", *job, "steps=100")
    resumed = trained(tmp_path / "parts", "steps=300", "--resume", "last")
    assert newest_weights(resumed)[0] == 300
    assert same_bits(newest_weights(resumed)[1], newest_weights(whole)[1])


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_activation_checkpointing_changes_no_loss(tmp_path: Path, mode: str) -> None:
    job = ["task=language", "batch_size=16", "steps=30", "log_every=1", "precision=fp32"]
    plain = losses(trained(tmp_path / "off", *job))
    checkpointed = trained(tmp_path / "on", *job, f"activation_checkpointing={mode}")
    assert worst(losses(checkpointed), plain) < 1e-5


def test_compiled_trains_the_same(tmp_path: Path) -> None:
    job = ["task=language", "batch_size=16", "steps=30", "log_every=1", "precision=fp32"]
    eager = losses(trained(tmp_path / "eager", *job, "compile=false"))
    compiled = losses(trained(tmp_path / "compiled", *job, "compile=true"))
    assert worst(compiled, eager) < 1e-4


def test_too_many_ranks_are_refused_without_oversubscribe(tmp_path: Path) -> None:
    code, result = start(tmp_path, "--layout", "1x64").wait()
    assert code == 2
    assert "GPU" in result["error"]["what"]


def test_a_profile_shows_kernels_copies_and_collectives(tmp_path: Path) -> None:
    job = ["task=language", "batch_size=16", "steps=60", "compile=false", "--profile", "10"]
    run = trained(tmp_path, *job, "--layout", "1x2", "--oversubscribe")
    found = json.loads((run / "profile.json").read_text())
    assert found["device"] == "cuda"
    assert [rank["steps"] for rank in found["ranks"]] == [10, 10]
    assert found["kernels"] and any("HtoD" in copy["name"] for copy in found["copies"])
    reduces = [one for one in found["collectives_of_a_step"] if one["name"] == "all_reduce"]
    assert any(one["bytes"] > 100_000 and one["group_size"] == 2 for one in reduces)
    for rank in found["ranks"]:
        assert 0 <= rank["hidden_share"] <= 1


def test_precisions_side_by_side(tmp_path: Path) -> None:
    job = ["task=language", "batch_size=16", "--steps", "60", "--repeats", "1", "--json"]
    outcome = run_allranks("bench", "precision", *job, cwd=tmp_path, timeout=280)
    assert outcome.returncode == 0, outcome.stderr
    rows = {row["precision"]: row for row in json.loads(outcome.stdout)["rows"]}
    assert list(rows) == ["fp32", "tf32", "fp16", "bf16"]
    assert all(row["memory_of"] == "device" for row in rows.values())
    assert all(abs(row["loss_difference"]) < 0.2 for row in rows.values())


def test_data_are_measured_against_the_step(tmp_path: Path) -> None:
    job = ["task=language", "--workers", "0,2", "--seconds-each", "0.5", "--repeats", "1", "--json"]
    outcome = run_allranks("bench", "data", *job, cwd=tmp_path, timeout=280)
    assert outcome.returncode == 0, outcome.stderr
    found = json.loads(outcome.stdout)
    assert found["device"] == "cuda"
    assert all(row["training_samples_per_second"] > 0 for row in found["rows"])
