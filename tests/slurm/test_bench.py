"""Measurements on the cluster: what the ranks find comes home in the run's folder."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.commandline import run_allranks
from tests.rank_states import WRITE_DOWN, differences, states
from tests.slurm.live import Cluster
from tests.slurm.runs import Sent

from allranks.run.folder import RunDir

pytestmark = pytest.mark.slurm


@pytest.mark.soak
def test_collectives_are_measured_within_and_across_real_nodes(
    cluster: Cluster, tmp_path: Path
) -> None:
    sizes = ["--sizes", "1KiB-64KiB", "--seconds", "6", "--collectives", "all_reduce,all_gather"]
    done = run_allranks(
        *("bench", "comm", "--layout", "2x2", "--backend", "slurm", "--json", *sizes),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    sent = json.loads(done.stdout)
    run = Sent(cluster, tmp_path, RunDir(Path(sent["run_dir"])), sent["jobs"])
    assert run.wait_for_end(180)["state"] == "finished"
    found = json.loads(run.allranks("bench", "comm", "--from", sent["run"], "--json"))
    assert found == json.loads((run.run.path / "comm.json").read_text())
    assert (found["backend"], found["played"], found["complete"]) == ("slurm", False, True)
    assert {(row["scope"], row["ranks"]) for row in found["rows"]} == {
        *(("node", 2), ("nodes", 2), ("all", 4))
    }
    assert found["transport"]["nodes"]["words"].startswith("TCP over ")


TRAIN = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
data = TensorDataset(torch.randn(64000, 8), torch.randint(0, 2, (64000,)))
loader = DataLoader(
    data, batch_size=32 // dist.get_world_size(), sampler=DistributedSampler(data)
)
model = DistributedDataParallel(torch.nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for inputs, targets in loader:
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(inputs), targets).backward()
    optimizer.step()
"""


@pytest.mark.soak
def test_a_script_is_measured_on_the_nodes_of_a_cluster(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    layouts = ["--layouts", "1x1,2x1", "--steps", "20", "--repeats", "1", "--backend", "slurm"]
    done = run_allranks(
        *("bench", "scaling", *layouts, "--json", "--", "python", "train.py"), cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    one, two = json.loads(done.stdout)["rows"]
    assert (one["layout"], two["layout"], two["ranks"]) == ("1x1", "2x1", 2)
    ratio = two["samples_per_second"] / one["samples_per_second"]
    # On a busy machine twenty steps may not carry a speedup: then a doubt is said.
    assert two["speedup"] == (None if two["doubt"] else pytest.approx(ratio))
    assert sum(two["parts"].values()) == pytest.approx(two["step_seconds"], rel=0.02)


@pytest.mark.soak
def test_what_was_measured_before_a_ctrl_c_is_kept(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    layouts = ["--layouts", "1x1,2x1", "--steps", "20", "--repeats", "2", "--backend", "slurm"]
    words = ["bench", "scaling", *layouts, "--json", "--", "python", "train.py"]
    benching = subprocess.Popen(
        [sys.executable, "-m", "allranks", *words],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        told = []
        assert benching.stderr is not None
        for line in benching.stderr:  # the first that has ended
            told.append(line)
            if "samples/s" in line:
                break
        benching.send_signal(signal.SIGINT)
        out, rest = benching.communicate(timeout=30)
    finally:
        benching.kill()
    assert benching.returncode == 130, "".join(told) + rest
    found = json.loads(out)
    assert found["interrupted"] and any(row["repeats"] for row in found["rows"])
    assert "of 4 runs were measured" in rest
    assert "Traceback" not in rest


@pytest.mark.soak
def test_every_rank_of_a_measured_layout_is_as_under_submit(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "sitecustomize.py").write_text(WRITE_DOWN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    script = ("--", "python", "train.py")
    layouts = ["--layouts", "2x1,1x1", "--steps", "20", "--repeats", "1", "--backend", "slurm"]
    done = run_allranks("bench", "scaling", *layouts, "--json", *script, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for row in json.loads(done.stdout)["rows"]:
        sent = run_allranks("submit", "--layout", row["layout"], "--json", *script, cwd=tmp_path)
        assert sent.returncode == 0, sent.stderr
        said = json.loads(sent.stdout)
        typed = Sent(cluster, tmp_path, RunDir(Path(said["run_dir"])), said["jobs"])
        assert typed.wait_for_end(180)["state"] == "finished"
        measured = RunDir(tmp_path / "runs" / row["repeats"][0]["run"])
        ours, theirs = given(measured), given(typed.run)
        assert len(ours) == row["ranks"] and not differences(ours, theirs)


def given(run: RunDir) -> list[dict[str, Any]]:
    """What its ranks were given, less what SLURM says of one job, its nodes and its GPUs."""
    found = states(run)
    of_job = (
        "SLURM",
        "VISIBLE_DEVICES",
        "DEVICE_ORDINAL",
        "AFFINITY_MASK",
        "MASTER_ADDR",
        "HOSTNAME",
        "TMPDIR",
    )
    for state in found:
        env = state["environment"]
        own = (name for name in env if not any(word in name for word in of_job))
        state["environment"] = {name: env[name] for name in sorted(own)}
    return found
