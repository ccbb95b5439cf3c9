"""Measurements on the cluster: what the ranks find comes home in the run's folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.commandline import run_allranks
from tests.slurm.live import Cluster
from tests.slurm.runs import Sent

from allranks.rundir import RunDir

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
    found = json.loads(run.allranks("bench", "comm", "--show", sent["run"], "--json"))
    assert found == json.loads((run.run.path / "comm.json").read_text())
    assert (found["backend"], found["played"], found["complete"]) == ("slurm", False, True)
    assert {(row["scope"], row["ranks"]) for row in found["rows"]} == {
        *(("node", 2), ("nodes", 2), ("all", 4))
    }
    assert found["transport"]["nodes"]["words"].startswith("TCP over ")
