"""The cluster of these tests does what clusters do, faults included."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from tests.slurm.live import Cluster

pytestmark = pytest.mark.slurm


def has_ended(cluster: Cluster, job: str) -> bool:
    return cluster.job(job)["JobState"] not in ("PENDING", "RUNNING", "COMPLETING")


def is_running(cluster: Cluster, job: str) -> bool:
    return cluster.job(job)["JobState"] == "RUNNING"


def test_a_job_of_two_nodes_sees_its_hosts_and_gpus(cluster: Cluster, tmp_path: Path) -> None:
    job = cluster.sbatch(
        *(
            "-N",
            "2",
            "--ntasks-per-node=1",
            "--gres=gpu:2",
            "-C",
            "eth",
            "-o",
            "out",
            "-J",
            "a b|c",
        ),
        cwd=tmp_path,
        script="#!/bin/bash\nsrun sh -c 'echo $(hostname) $CUDA_VISIBLE_DEVICES'\n",
    )
    cluster.wait(lambda: has_ended(cluster, job), 60, "the job's end")
    told = cluster.job(job)
    assert told["JobState"] == "COMPLETED" and told["JobName"] == "a b|c"
    lines = sorted((tmp_path / "out").read_text().splitlines())
    hosts = ["node3", "node4"] if cluster.mode == "netns" else [os.uname().nodename] * 2
    assert lines == [f"{host} 0,1" for host in hosts]


def test_commands_of_the_test_itself_talk_to_the_cluster(cluster: Cluster) -> None:
    partitions = subprocess.run(["sinfo", "-h", "-o", "%P %l"], capture_output=True, text=True)
    assert set(partitions.stdout.split("\n")) >= {"gpu* 1-00:00:00", "debug 5:00"}


def test_the_queue_outlives_the_controller(cluster: Cluster) -> None:
    running = cluster.sbatch("--exclusive", "-N4", "-o", "/dev/null", "--wrap", "sleep 100")
    cluster.wait(lambda: is_running(cluster, running), 60, "a running job")
    waiting = cluster.sbatch("-N", "4", "-o", "/dev/null", "-J", "next", "--wrap", "true")
    cluster.stop_controller()
    assert cluster.run("squeue").returncode != 0
    cluster.start_controller()
    jobs = {job["id"]: job for job in cluster.squeue()}
    assert jobs[running]["state"] == "RUNNING" and jobs[running]["nodes"] == "node[1-4]"
    assert jobs[waiting]["state"] == "PENDING" and jobs[waiting]["name"] == "next"


@pytest.mark.soak
def test_a_job_on_a_node_that_crashes_starts_again_elsewhere(cluster: Cluster) -> None:
    job = cluster.sbatch("--requeue", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 300")
    cluster.wait(lambda: is_running(cluster, job), 60, "a running job")
    crashed = cluster.job(job)["NodeList"]
    cluster.crash(crashed)
    assert cluster.exec(crashed, "true").returncode != 0

    def is_elsewhere() -> bool:
        told = cluster.job(job)
        return told["JobState"] == "RUNNING" and told["NodeList"] != crashed

    cluster.wait(is_elsewhere, 90, "another start")
    assert cluster.job(job)["Restarts"] == "1"
    assert cluster.node_states()[crashed].startswith("down")
    cluster.wait(lambda: len(cluster.sacct(job)) == 2, 60, "both starts in the accounting")
    assert [row["State"] for row in cluster.sacct(job)] == ["NODE_FAIL", "RUNNING"]


@pytest.mark.soak
def test_a_killed_slurmd_leaves_its_job_running(cluster: Cluster) -> None:
    job = cluster.sbatch("-w", "node2", "-o", "/dev/null", "--wrap", "sleep 300")
    cluster.wait(lambda: is_running(cluster, job), 60, "a running job")
    cluster.kill_slurmd("node2")
    assert "sleep 300" in cluster.exec("node2", "pgrep", "-a", "sleep").stdout
    cluster.boot("node2")
    assert cluster.job(job)["JobState"] == "RUNNING"


def test_every_test_finds_the_cluster_idle(cluster: Cluster) -> None:
    """Also after those that stopped, crashed or drained something."""
    assert cluster.squeue() == [] and set(cluster.node_states().values()) == {"idle"}
    cluster.read("scontrol", "update", "nodename=node1", "state=drain", "reason=test")
    cluster.stop_controller()
    cluster.kill_slurmd("node3")
    cluster.clean()
    assert set(cluster.node_states().values()) == {"idle"}


def test_the_accounting_knows_an_ended_job(cluster: Cluster) -> None:
    job = cluster.sbatch("-o", "/dev/null", "--wrap", "exit 3")

    def rows() -> list[dict[str, str]]:  # at first it may be one without a name
        return [row for row in cluster.sacct(job) if row["JobName"] == "wrap"]

    cluster.wait(rows, 60, "the job in the accounting")
    cluster.wait(lambda: rows()[0]["State"] == "FAILED", 60, "its end in the accounting")
    (row,) = rows()
    assert row["ExitCode"] == "3:0" and row["Account"] == "main"
