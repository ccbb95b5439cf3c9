"""What SLURM refuses is told in its own words, with their meaning and what to change."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.commandline import ask_allranks, run_allranks
from tests.slurm.live import Cluster
from tests.slurm.runs import send

from allranks.run.folder import list_runs

pytestmark = pytest.mark.slurm


BAD, IMPOSSIBLE = "slurm-bad-option", "slurm-request-impossible"


@pytest.mark.parametrize(
    ("setting", "words", "meaning", "fix", "cause"),
    [
        ("slurm.account=nobody", "Invalid account", "not yours", "slurm.account=NAME", BAD),
        ("slurm.partition=fast", "invalid partition", "no such partition", "allranks cluster", BAD),
        ("slurm.qos=urgent", "Invalid qos", "QOS does not exist", "slurm.qos", BAD),
        ("slurm.gpus=9", "not available", "that many GPUs", "fewer GPUs", IMPOSSIBLE),
        ("slurm.mem=9000G", "memory", "that much memory", "smaller slurm.mem", IMPOSSIBLE),
        ("slurm.constraint=gold", "feature", "no node has these features", "slurm.constraint", ""),
    ],
)
def test_a_refusal_is_explained_and_the_run_says_it_was_never_queued(
    setting: str, words: str, meaning: str, fix: str, cause: str, cluster: Cluster, tmp_path: Path
) -> None:
    done = run_allranks("submit", setting, cwd=tmp_path)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    for part in (words, meaning, fix):
        assert part.lower() in done.stderr.lower()
    (run,) = list_runs(tmp_path / "runs")
    assert run.state() == "failed"
    listed = json.loads(ask_allranks("ls", "--json", cwd=tmp_path))[0]
    assert (listed["state"], listed["jobs"]) == ("failed", [])
    assert listed["reason"].startswith("never queued: sbatch: ")
    assert cluster.squeue() == []
    (tmp_path / "sbatch.txt").write_text(done.stderr)
    for subject in ("last", "sbatch.txt") if cause else ():
        found = json.loads(ask_allranks("doctor", subject, "--json", cwd=tmp_path))
        assert found[0]["cause"] == cause


def test_a_limit_that_is_only_found_in_the_queue_is_told_there(
    cluster: Cluster, tmp_path: Path
) -> None:
    sent = send(cluster, tmp_path, "slurm.partition=debug", "slurm.time=10m")
    reason = cluster.wait(lambda: sent.listed()["reason"], 60, "a reason")
    assert "time" in reason and "partition" in reason
    assert sent.listed()["state"] == "queued"
    assert "taken out of the queue" in sent.allranks("stop", sent.run.name)
    assert sent.listed()["state"] == "stopped"


def test_a_type_of_gpu_that_is_not_here_is_refused_before_anything_is_written(
    cluster: Cluster, tmp_path: Path
) -> None:
    done = run_allranks("submit", "--race", "1x2@h100", cwd=tmp_path)
    assert done.returncode == 2
    assert "no GPU of type h100; it has a100" in done.stderr
    assert list_runs(tmp_path / "runs") == []


@pytest.mark.soak
def test_a_silent_controller_is_told(cluster: Cluster, tmp_path: Path) -> None:
    sent = send(cluster, tmp_path, "task=slow:Slow", "steps=100000", "preflight=false")
    sent.wait_for_step(5)
    cluster.stop_controller()
    done = run_allranks("submit", cwd=tmp_path)
    assert done.returncode == 1
    assert "controller" in done.stderr and "try again" in done.stderr
    listed = run_allranks("ls", sent.run.name, "--json", cwd=tmp_path)
    line = json.loads(listed.stdout)[0]
    assert line["state"] == "running" and "SLURM does not answer" in line["reason"]
    assert run_allranks("stop", sent.run.name, cwd=tmp_path).returncode == 1
    cluster.start_controller()
    sent.allranks("stop", sent.run.name, "--now")
    assert sent.wait_for_end(60)["state"] == "stopped"
