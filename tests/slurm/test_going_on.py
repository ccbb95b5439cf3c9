"""Runs go on by themselves: after time limits, preemption and lost nodes, and when moved."""

from __future__ import annotations

import itertools
import json
import random
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
from tests.faults import losses, newest_weights, same_bits
from tests.forked import run_forked
from tests.slurm.live import Cluster
from tests.slurm.runs import LOST, Sent, check_words, kill, send, steps_of_attempts

from allranks.layout import Layout
from allranks.run.events import read_events
from allranks.train.stages import FILE

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(500)]

TASK = ["task=slow:Slow", "log_every=1", "checkpoint.every=50"]


def uninterrupted(folder: Path, *arguments: str) -> Path:
    """The same job on this machine, without the pauses: sleeping changes no weight."""
    done = run_forked(
        *("run", "--json", *arguments, "options.seconds=0.0", "--runs", "reference"),
        cwd=folder,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return Path(json.loads(done.stdout)["run_dir"])


def uninterrupted_with_stages(folder: Path, stages: Path, *arguments: str) -> Path:
    """The same job on this machine, in a run that finds its model divided already."""
    run = uninterrupted(folder, *arguments, "steps=1")
    shutil.rmtree(run / "checkpoints")
    shutil.copy(stages, run / FILE)
    steps = next(word for word in arguments if word.startswith("steps="))
    done = run_forked("resume", str(run), steps, "--json", cwd=folder, timeout=200)
    assert done.returncode == 0, done.stderr
    return run


def check(sent: Sent, reference: Path, steps: int) -> None:
    """It has finished, with every step recorded once in order, and the weights of the other."""
    assert sent.listed()["state"] == "finished", sent.log()
    assert sorted(sent.losses()) == list(range(1, steps + 1))
    step, weights = newest_weights(sent.run.path)
    assert step == steps
    assert same_bits(weights, newest_weights(reference)[1])


def test_runs_outlive_limits_preemption_and_lost_daemons(cluster: Cluster, tmp_path: Path) -> None:
    """Four runs at once, since all of it is waiting: SLURM looks at limits every 30 seconds."""
    steps = 700
    common = [*TASK, f"steps={steps}"]
    minute = ["slurm.time=1", "options.seconds=0.1"]
    limited = send(cluster, tmp_path, *common, "name=limited", *minute)
    limited.wait_for_step(1)  # of its minute, little is left where four runs start at once
    unchecked = [*common, "preflight=false"]
    requeued = send(cluster, tmp_path, *unchecked, "name=requeued")
    killed = send(cluster, tmp_path, *unchecked, "name=killed")
    lost = send(cluster, tmp_path, *unchecked, "name=lost", "slurm.exclusive=true")
    for sent in (requeued, killed, lost):
        sent.wait_for_step(60)
    cluster.run("scontrol", "requeue", requeued.jobs[0])
    kill(killed, "job", random.Random(0))
    (node,) = lost.listed()["nodes"]
    cluster.kill_slurmd(node)
    cluster.wait(lambda: "was lost" in str(killed.listed()["reason"]), 60, "the kill in the list")
    reference = uninterrupted(tmp_path, *common)  # while SLURM makes them wait
    for sent in (requeued, limited, killed, lost):
        sent.wait_for_end(300)
        check(sent, reference, steps)
    assert len(limited.run.attempts()) >= 2
    assert "DUE TO TIME LIMIT" not in limited.log()
    assert len(requeued.run.attempts()) >= 2
    check_words(killed, LOST["job"])
    assert len(killed.run.attempts()) == 2 and killed.listed()["jobs"] == killed.jobs
    # Nothing was done twice where there was time to save.
    assert [*itertools.chain(*steps_of_attempts(limited))] == list(range(1, steps + 1))


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("layout", ["2x2:tp=2", "2x2:pp=2", "2x1:fsdp=2"])
def test_a_divided_model_outlives_time_limits(
    layout: str, cluster: Cluster, tmp_path: Path
) -> None:
    steps = 120
    ids = np.random.default_rng(0).integers(0, 16, 400 * 17) ** 2
    ids.astype("<u2").tofile(tmp_path / "tokens.bin")
    common = ["task=slow:SlowLanguage", "options.context=16", "options.tokens=tokens.bin"]
    common += ["batch_size=16", "pipeline.micro_batches=2", f"steps={steps}", "log_every=1"]
    shape, _, axis = layout.partition(":")
    # Of each two minutes, one is left for a checkpoint: too little for all steps, however fast.
    slowly = ["slurm.time=2", f"options.seconds={0.35 if axis == 'pp=2' else 0.7}"]
    sent = send(cluster, tmp_path, *common, *slowly, "--layout", layout)
    line = sent.wait_for_end(600)
    assert (line["state"], line["step"]) == ("finished", steps), sent.log()
    assert len(sent.run.attempts()) >= 2
    assert [*itertools.chain(*steps_of_attempts(sent))] == list(range(1, steps + 1))
    one = losses(uninterrupted(tmp_path, *common))
    found = sent.losses()
    assert all(abs(found[step] / one[step] - 1) < 1e-5 for step in one)
    here = [*common, "--layout", f"1x{Layout.parse(shape).ranks}:{axis}"]
    if axis == "pp=2":  # stages are divided by what blocks took, which is never the same twice
        reference = uninterrupted_with_stages(tmp_path, sent.run.path / FILE, *here)
    else:
        reference = uninterrupted(tmp_path, *here)
    check(sent, reference, steps)
    assert found == losses(reference)


@pytest.mark.soak
def test_a_signal_to_the_ranks_ends_an_attempt_and_not_the_run(
    cluster: Cluster, tmp_path: Path
) -> None:
    common = [*TASK, "steps=200"]
    sent = send(cluster, tmp_path, *common)
    sent.wait_for_step(60)
    cluster.run("scancel", "--signal=TERM", sent.jobs[0])
    sent.wait_for_end(200)
    check(sent, uninterrupted(tmp_path, *common), 200)
    assert len(sent.run.attempts()) >= 2
    assert [*itertools.chain(*steps_of_attempts(sent))] == list(range(1, 201))


@pytest.mark.soak
def test_a_running_run_moves_to_another_layout(cluster: Cluster, tmp_path: Path) -> None:
    steps = 600
    common = [*TASK, f"steps={steps}"]
    sent = send(cluster, tmp_path, *common)
    reference = uninterrupted(tmp_path, *common)
    sent.wait_for_step(100)
    told = json.loads(sent.allranks("resume", sent.run.name, "--layout", "2x2", "--json"))
    assert told["run"] == sent.run.name and told["jobs"] != sent.jobs
    line = sent.wait_for_end(150)
    assert (line["state"], line["layout"], line["step"]) == ("finished", "2x2", steps), sent.log()
    first, second = steps_of_attempts(sent)
    assert 100 <= first[-1] < steps
    assert [*first, *second] == list(range(1, steps + 1))
    samples = [
        sum(
            e["samples"]
            for rank in sent.run.ranks(1)
            for e in read_events(sent.run.events(1, rank))
            if e["event"] == "step" and e["step"] == step
        )
        for step in second
    ]
    assert set(samples) <= {32, 7000 % 32}
    expected = {
        e["step"]: e["loss"]
        for e in read_events(reference / "attempts" / "0" / "rank-0.jsonl")
        if e["event"] == "step" and e["step"] <= 500
    }
    found = sent.losses()
    assert all(abs(found[s] - expected[s]) <= 1e-5 * abs(expected[s]) for s in expected)


def kill_attempt(sent: Sent, attempt: int) -> None:
    """Kill everything of an attempt once it trains, and have SLURM start the job again."""
    cluster, (job,) = sent.cluster, sent.jobs
    cluster.wait(lambda: sent.run.ranks(attempt), 90, f"the rank of attempt {attempt}")
    (node,) = sent.listed()["nodes"]
    cluster.exec(node, "pkill", "-9", "-f", "allranks.launch")
    cluster.wait(lambda: cluster.job(job)["JobState"] == "FAILED", 30, "the job's end")
    cluster.run("scontrol", "requeue", job)


@pytest.mark.soak
def test_a_run_without_progress_gives_up_with_the_reason(cluster: Cluster, tmp_path: Path) -> None:
    common = ["task=slow:Slow", "steps=100000", "checkpoint.every=99999", "preflight=false"]
    sent = send(cluster, tmp_path, *common)
    for attempt in range(2):
        kill_attempt(sent, attempt)
    line = sent.wait_for_end(90)
    assert line["state"] == "failed"
    assert "no progress in two attempts" in line["reason"]


@pytest.mark.soak
def test_a_finished_run_can_be_extended(cluster: Cluster, tmp_path: Path) -> None:
    sent = send(cluster, tmp_path, *TASK, "steps=20")
    assert sent.wait_for_end(60)["state"] == "finished"
    sent.allranks("resume", sent.run.name, "steps=60")
    cluster.wait(lambda: len(sent.run.attempts()) == 2, 60, "a second attempt")
    line = sent.wait_for_end(60)
    assert (line["state"], line["step"]) == ("finished", 60), sent.log()
    assert sent.run.info()["attempts"][1]["changes"] == [{"key": "steps", "before": 20, "now": 60}]


@pytest.mark.soak
def test_a_run_is_moved_in_its_first_second(cluster: Cluster, tmp_path: Path) -> None:
    sent = send(cluster, tmp_path, *TASK, "steps=200", "preflight=false")
    cluster.wait(lambda: sent.run.info().get("attempts"), 60, "its first second")
    sent.allranks("resume", sent.run.name, "--layout", "2x2")
    line = sent.wait_for_end(120)
    assert (line["state"], line["layout"]) == ("finished", "2x2"), sent.log()
    assert [*itertools.chain(*steps_of_attempts(sent))] == list(range(1, 201))


@pytest.mark.soak
def test_a_controller_that_is_deaf_when_a_job_starts(cluster: Cluster, tmp_path: Path) -> None:
    sent = send(cluster, tmp_path, *TASK, "steps=100", "preflight=false")
    cluster.wait(lambda: cluster.job(sent.jobs[0])["JobState"] == "RUNNING", 30, "a start")
    cluster.stop_controller()
    time.sleep(25)
    cluster.start_controller()
    assert sent.wait_for_end(120)["state"] == "finished", sent.log()
    assert sorted(sent.losses()) == list(range(1, 101))


@pytest.mark.soak
def test_a_script_on_a_node_that_slurm_has_lost_is_ended(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import os, time\n"
        "while True:\n"
        "    restart = os.environ.get('SLURM_RESTART_COUNT', '0')\n"
        "    print(restart, time.time(), file=open('beats', 'a'))\n"
        "    time.sleep(0.5)\n"
    )
    sent = send(cluster, tmp_path, "preflight=false", "--", "python", "train.py")
    beats = tmp_path / "beats"
    cluster.wait(beats.exists, 60, "a first beat")
    cluster.kill_slurmd(sent.listed()["nodes"][0])

    def restarted() -> float | None:
        lines = [line.split() for line in beats.read_text().splitlines()]
        return next((float(when) for restart, when in lines if restart == "1"), None)

    again = cluster.wait(restarted, 120, "a beat elsewhere") or 0.0
    time.sleep(15)
    lines = [line.split() for line in beats.read_text().splitlines()]
    last = max(float(when) for restart, when in lines if restart == "0")
    assert last < again + 10
    assert max(float(when) for _, when in lines) > again + 12
    sent.allranks("stop", sent.run.name, "--now")


@pytest.mark.soak
def test_a_ladder_is_climbed_and_left_where_it_does_not_pay(
    cluster: Cluster, tmp_path: Path
) -> None:
    # A step takes as long on any layout, so that two ranks are half as efficient as one.
    task = ["task=slow:Slow", "steps=400", "log_every=1"]
    sent = send(cluster, tmp_path, "--ladder", "1x2,1x1", "--steps", "20", *task)
    line = sent.wait_for_end(280)
    assert line["state"] == "finished", sent.log()
    climbed = sent.run.info()["ladder"]
    assert list(climbed["speeds"]) == ["1x1", "1x2"]
    assert climbed["chosen"] == "1x1"
    layouts = [attempt["layout"] for attempt in sent.run.info()["attempts"]]
    assert layouts == ["1x1", "1x2", "1x1"]
    assert sorted(sent.losses()) == list(range(1, 401))
    assert "% efficient, measured); trains on 1x1" in sent.log()
