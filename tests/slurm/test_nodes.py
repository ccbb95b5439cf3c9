"""Nodes that are broken, or break, are named and left out."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.slurm.live import Cluster
from tests.slurm.runs import send

pytestmark = pytest.mark.slurm

TASK = ["task=slow:Slow", "steps=300", "log_every=1", "checkpoint.every=20"]


def test_a_node_that_fails_its_check_is_replaced(cluster: Cluster, tmp_path: Path) -> None:
    if cluster.mode != "netns":
        pytest.skip("nodes share one file system here")
    # node2 does not see what is written into the folder, as if its disk were not mounted.
    cluster.exec("node2", "mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(tmp_path))
    sent = send(cluster, tmp_path, "--layout", "2x1", "slurm.constraint=a100", *TASK)
    cluster.wait(lambda: sent.run.info().get("failed_nodes") or sent.run.attempts(), 120, "a check")
    try:
        assert list(sent.run.info()["failed_nodes"]) == ["node2"], sent.log()
        line = sent.wait_for_end(150)
        assert line["state"] == "finished", sent.log()
        assert "--exclude=node2" in "".join(
            path.read_text() for path in sent.run.path.glob("submit*.sbatch")
        )
        assert "node2" not in sent.log().splitlines()[-1]
        # The launchers found that something was wrong, a step of its own what; then all was well.
        for words in ("checked in a separate step", "1 of 2 nodes failed: node2", "no fault"):
            assert words in sent.log()
        assert sent.run.attempts() == [0] and len(sent.run.info()["attempts"]) == 1
        assert sorted(sent.losses()) == list(range(1, 301))
    finally:
        cluster.exec("node2", "umount", str(tmp_path))


@pytest.mark.soak
def test_a_run_goes_on_elsewhere_when_a_node_crashes(cluster: Cluster, tmp_path: Path) -> None:
    sent = send(cluster, tmp_path, "--layout", "2x1", *TASK)
    sent.wait_for_step(50)
    crashed = sent.listed()["nodes"][-1]
    cluster.crash(crashed)
    line = sent.wait_for_end(200)
    assert line["state"] == "finished", sent.log()
    assert sorted(sent.losses()) == list(range(1, 301))
    assert len(sent.run.attempts()) >= 2
    assert crashed in sent.run.info()["failed_nodes"]
