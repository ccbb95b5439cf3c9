"""What watch tells others: a command, a pipe, a page, and what it asks of a foreign job's nodes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.commandline import Allranks, ask_allranks
from tests.watch_runs import GrowingRun

from allranks.run.run_state import Queue, QueuedJob
from allranks.slurm import commands as slurm
from allranks.slurm.reasons import waiting_reason
from allranks.timing.remarks import SPEEDUP, Remark
from allranks.timing.verdict import Judgement, Verdict, Warning
from allranks.watch import sampler
from allranks.watch.cells import DEFAULT_MARKS, plain_line
from allranks.watch.job_screen import (
    SAMPLER,
    JobFacts,
    Pieces,
    job_lines,
    parse_job,
    srun_command,
    stack_lines,
    times,
)
from allranks.watch.live import Watcher
from allranks.watch.modes import follow
from allranks.watch.notify import Notifier
from allranks.watch.status import (
    RunStatus,
    commands,
    gather,
    job_setting,
    limit_lines,
    next_lines,
    next_steps,
    place_of,
    resource_lines,
    resources,
    shown_override,
    status_page,
)
from allranks.watch.views import RankView, RunView

GOLDEN = Path(__file__).with_name("golden") / "status.md"
BEGIN = 1_794_750_000.0
RESOURCES = {
    "slurm": {"cluster": "hal", "version": "24.05"},
    "nodes": {"total": 4, "up": 3},
    "gpus": {"total": 8, "free": 2},
    "partitions": [{"name": "gpu", "nodes": {"total": 4, "idle": 1}}],
    "machine": {"host": "login1", "cpus": 16, "memory_bytes": 64 << 30, "gpus": []},
    "notes": [],
}


def view(state: str, **fields: object) -> RunView:
    known = {"run": "a-20261115-120000-0000", "run_dir": "/x", "job": "a", "state": state}
    return RunView(**known | fields)  # type: ignore[arg-type]


def test_each_change_is_told_once() -> None:
    notifier = Notifier("true")
    told: list[str] = []
    for run in (
        view("queued"),
        view("running"),
        view("running", stalled=True),
        view("running", stalled=True),
        view("running"),
        view("finished"),
        view("finished"),
        view("running"),  # resumed
        view("failed", reason="rank 1"),
    ):
        told += notifier.look([run]).values()
    notifier.close()
    assert told == ["stalled", "finished", "failed"]


def test_what_ended_before_is_no_news() -> None:
    notifier = Notifier("true")
    assert notifier.look([view("failed")]) == notifier.look([view("failed")]) == {}


def test_the_command_gets_variables_and_json(tmp_path: Path) -> None:
    said_by = 'echo "$ALLRANKS_RUN $ALLRANKS_STATE: $ALLRANKS_REASON"'
    notifier = Notifier(f"{said_by} > {tmp_path}/said; cat > {tmp_path}/json")
    notifier.look([view("running", losses=(1.0,))])
    notifier.look([view("failed", reason="rank 3: out of memory", losses=(1.0,))])
    notifier.close()
    said = (tmp_path / "said").read_text()
    assert said == "a-20261115-120000-0000 failed: rank 3: out of memory\n"
    content = json.loads((tmp_path / "json").read_text())
    assert content["state"] == "failed" and content["run_dir"] == "/x" and "losses" not in content
    assert notifier.problems == []


def test_a_command_that_fails_is_told() -> None:
    notifier = Notifier("echo no such channel >&2; exit 3")
    notifier.look([view("running")])
    notifier.look([view("failed")])
    notifier.close()
    assert notifier.problems == ["--notify ended with code 3: no such channel"]


def test_lines_are_printed_when_they_change_and_until_all_is_over(tmp_path: Path) -> None:
    grown = GrowingRun(tmp_path, "1x2", steps=100)
    live = grown.live()
    live.__enter__()
    grown.begin()
    grown.steps(10)
    lines: list[str] = []
    pauses = 0

    def sleep(seconds: float) -> None:
        nonlocal pauses
        pauses += 1
        for followed in watcher._followed.values():
            followed.due = 0.0
        if pauses == 2:
            grown.steps(90)
            grown.end()
            live.__exit__(None, None, None)

    watcher = Watcher(tmp_path)
    runs = follow(watcher, lines.append, None, sleep=sleep, now=lambda: grown.now)
    watcher.close()
    assert [run.state for run in runs] == ["finished"]
    assert pauses == 2 and len(lines) == 2
    assert "running  1x2  epoch 1/10  step 10/100" in lines[0] and "1280 samples/s" in lines[0]
    assert "finished  1x2  epoch 10/10  step 100/100" in lines[1]


def test_a_line_of_a_run_that_waits() -> None:
    waiting = view("queued", layout="2x8", reason="priority", expected_start="2026-11-15T16:40:00")
    said = plain_line(waiting, time.mktime((2026, 11, 15, 12, 0, 0, 0, 0, -1)))
    assert said.endswith("queued  2x8  (priority; expected to start 16:40)")


def made_runs(folder: Path) -> None:
    """A run that goes on, its baseline, one that failed and one that waits."""
    base = GrowingRun(folder, "1x1", number=1, begin=BEGIN, step_seconds=0.4)
    base.begin()
    base.steps(100)
    base.end(metrics={"val_accuracy": 0.97})
    info = {
        "overrides": ["optimizer.lr=3e-4", "env.HF_TOKEN=hf_abcdefghijklmnopqrstuvwx"],
        "code": {"commit": "953e4c83bb154f6c4966c6cd25b476207cf44616", "dirty": True},
        "packages": {"allranks": "0.1.0", "torch": "2.13.0", "numpy": "2"},
        "hardware": {"host": "node1"},
    }
    ended = GrowingRun(folder, "1x4", number=2, begin=BEGIN, step_seconds=0.125, info=info)
    ended.begin()
    ended.steps(50)
    ended.end("failed", error={"what": "CUDA out of memory | tried 2 GiB", "fix": "less"})
    queued = {"backend": "slurm", "jobs": ["77"], "queued": True}
    GrowingRun(folder, "2x4", number=3, name="language", begin=BEGIN, info=queued)


def test_the_status_page(tmp_path: Path) -> None:
    made_runs(tmp_path)
    why = waiting_reason("Priority")
    job = QueuedJob("77", "PENDING", "Priority", "2026-11-15T16:40:00", (), why=why)
    watcher = Watcher(tmp_path, old=True, ask=lambda runs: Queue(jobs={"77": job}))
    found = gather(watcher)
    watcher.close()
    page = status_page(found, RESOURCES, DEFAULT_MARKS, BEGIN, Path("/home/ada/my runs/runs"))
    head, page = page.split("\n", 1)
    assert re.fullmatch(r"# Status, 2026-11-1\d \d\d:\d\d", head)
    assert "hf_abc" not in page
    if os.environ.get("ALLRANKS_WRITE_GOLDEN"):
        GOLDEN.write_text(page)
    assert page == GOLDEN.read_text()


@pytest.mark.parametrize(
    ("num_nodes", "where"),
    [(2, "a0, a1 (CPU)"), (12, "a0, a1, a2, a3, a4, a5, a6, a7, … (12 nodes) (CPU)")],
)
def test_a_run_is_on_all_its_nodes(num_nodes: int, where: str) -> None:
    ranks = [RankView(rank=n, node=f"a{n // 2}") for n in range(2 * num_nodes)]
    view = RunView(run="r", run_dir="r", job="r", state="finished", device="CPU")
    info = {"hardware": {"host": "a0"}}  # of the first node's launcher
    assert place_of(RunStatus(view=view, info=info, ranks=ranks)) == where


def test_what_was_ended_by_a_benchmark_or_cannot_go_on_is_not_to_be_resumed() -> None:
    assert "allranks resume" in next_steps(RunStatus(view=view("stopped")))[0]
    assert next_steps(RunStatus(view=view("stopped"), info={"bench": {"id": "b"}})) == []
    assert "allranks resume" in next_steps(RunStatus(view=view("failed")))[0]
    (said,) = next_steps(RunStatus(view=view("failed"), job={"command": ["python", "train.py"]}))
    assert "doctor" in said and "resume" not in said
    script = {"command": ["python", "train.py"]}
    assert next_steps(RunStatus(view=view("stopped"), job=script)) == []
    for state in ("failed", "stopped"):
        saves = RunStatus(view=view(state), job={**script, "last": "last.pt"})
        assert "allranks resume" in next_steps(saves)[0]


@pytest.mark.parametrize(
    ("words", "meaning"),
    [
        (
            "slurm_load_ctl_conf error: Unable to contact slurm controller (connect failure)",
            "the controller of the cluster did not answer",
        ),
        ("scontrol: error: odd", "scontrol: odd"),
    ],
)
def test_a_slurm_that_does_not_answer_is_one_sentence_of_the_page(
    monkeypatch: pytest.MonkeyPatch, words: str, meaning: str
) -> None:
    def refuse(only: str | None = None) -> None:
        raise slurm.SlurmError("scontrol", words)

    monkeypatch.setattr("allranks.watch.status.describe_cluster", refuse)
    lines = resource_lines(resources())
    assert lines[-1] == f"\nSLURM: {meaning}."
    assert lines[0].startswith("This machine (") and len(lines) == 2


def test_the_page_says_what_limits_a_run_and_what_to_type() -> None:
    verdict = Verdict(limit="data", why="rank 1 waits", sure=True, next="num_workers=4", gain=3.84)
    found = Judgement(
        verdict=verdict, warnings=(Warning(kind="memory", text="it grows", line="a.py:5"),)
    )
    run = RunStatus(view=view("running", world_size=4, step=5, judgement=found))
    assert limit_lines([run]) == [
        f"- {run.view.run}",
        "  - limited by data: rank 1 waits (sure)",
        "  - next: num_workers=4 (up to 3.8x)",
        "  - warning: it grows (a.py:5)",
    ]
    assert run.view.as_json()["verdict"]["gain"] == 3.84
    assert "--layout 1x1" in next_steps(run)[0]


def test_only_runs_that_can_be_compared_are_to_be_compared() -> None:
    def finished(name: str, compared_as: str, *remarks: Remark) -> RunStatus:
        run = view("finished", run=name, remarks=remarks)
        return RunStatus(view=run, compared_as=compared_as)

    alone = finished("alone", "job", Remark("alone", "its ranks train alone", (SPEEDUP,)))
    one, two, other = finished("one", "job"), finished("two", "job"), finished("other", "else")
    doctor = "- alone cannot be compared with others: `allranks doctor alone` shows why."
    assert next_lines([one, alone, other]) == [doctor]
    report = "- Compare the finished runs: `allranks report one two`."
    assert next_lines([one, two, alone, other]) == [doctor, report]
    assert "Compare" not in next_lines([one])[0]


def test_commands_say_where_the_runs_are() -> None:
    assert commands([], Path("/data/my runs/runs"))[:2] == ["cd '/data/my runs'", "allranks watch"]
    assert "allranks ls --runs old" in commands([], Path("/data/old"))


def test_status_and_watch_on_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made_runs(tmp_path / "runs")
    said = ask_allranks("status", "--md", "page.md", "--all", cwd=tmp_path)
    assert said == "wrote page.md\n"
    page = (tmp_path / "page.md").read_text()
    assert page.startswith("# Status, ") and "digits-20261115-120002-0002" in page
    runs = json.loads(ask_allranks("watch", "--json", "--all", cwd=tmp_path))
    assert [run["state"] for run in runs if run["job"] == "digits"] == ["failed", "finished"]
    one = json.loads(ask_allranks("watch", "digits-20261115-120002", "--json", cwd=tmp_path))
    assert [rank["rank"] for rank in one[0]["ranks"]] == [0, 1, 2, 3]
    assert one[0]["efficiency"] == pytest.approx(0.8)
    once = ask_allranks("watch", "--once", "--all", cwd=tmp_path)
    assert "rank 0: CUDA out of memory" in once and "\x1b" not in once
    assert ask_allranks("watch", "--stacks", cwd=tmp_path) == ""
    assert "without a SLURM job" in capsys.readouterr().err
    assert ask_allranks("watch", "--runs", "elsewhere", cwd=tmp_path) == ""
    assert "no runs here" in capsys.readouterr().err


def test_watch_in_a_pipe_ends_with_the_runs(allranks: Allranks, tmp_path: Path) -> None:
    grown = GrowingRun(tmp_path / "runs", "1x2", begin=time.time())
    grown.begin()
    grown.steps(20)
    grown.end()
    done = allranks("watch", "--notify", "touch told")
    assert done.returncode == 0 and "finished  1x2" in done.stdout
    assert not (tmp_path / "told").exists(), "it had ended before"


# Jobs that allranks did not start.

FACTS = JobFacts("42", "RUNNING", "None", ("n1", "n2"), "1:02", "58:58", "me", "train|it")


def test_a_line_of_squeue_about_one_job() -> None:
    assert parse_job("42|RUNNING|None|n[1-2]|1:02|58:58|me|train|it\n") == FACTS
    assert parse_job("") is None


@pytest.mark.parametrize(
    ("elapsed", "left", "said"),
    [
        ("1:05", "58:55", "running for 1m15s, 58m45s left of its time limit"),
        ("1-02:03:04", "UNLIMITED", "running for 1d02h, without a time limit"),
        ("0:00", "0:05", "running for 10s, 0s left of its time limit"),
        ("", "INVALID", "running"),
    ],
)
def test_the_clock_of_a_job_goes_on(elapsed: str, left: str, said: str) -> None:
    facts = JobFacts("7", "RUNNING", "", ("n1",), elapsed, left, "ada", "train")
    assert times(facts, passed=10.0) == said


def test_a_node_that_has_gone_silent_is_seen() -> None:
    facts = JobFacts("7", "RUNNING", "", ("n1",), "1:00", "1:00", "ada", "train")
    sample = {"node": "n1", "t": 1000.0, "cpus": 8, "memory_total": 4 << 30} | {
        "memory_available": 1 << 30,
        "processes": [],
    }
    fresh = job_lines(facts, [sample], DEFAULT_MARKS, 80, now=1006.0)
    silent = job_lines(facts, [sample], DEFAULT_MARKS, 80, now=1060.0)
    assert "ago" not in fresh[1].plain and silent[1].plain.endswith("1m ago")


def test_the_step_beside_a_job() -> None:
    command = srun_command("42", 2, "/venv/bin/python", interval=5, count=10, mode="samples")
    assert command[:6] == [
        *("srun", "--jobid=42", "--overlap", "--nodes=2", "--ntasks=2", "--ntasks-per-node=1")
    ]
    script = command[command.index("-c") + 1]
    assert script.endswith("exec python3 - 42 5 10 samples") and command[-1] == "/venv/bin/python"
    # What the nodes would run, here: with this Python, and with one that is not there.
    probe = script.replace("- 42 5 10 samples", "-c 'print(1)'")
    for python in (sys.executable, "/not/there"):
        done = subprocess.run(["sh", "-c", probe, python], capture_output=True, text=True)
        assert done.stdout == "1\n"


def test_the_sampler_needs_nothing_but_an_old_python() -> None:
    import ast

    tree = ast.parse(SAMPLER.read_text(), feature_version=(3, 7))
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported == {"__future__", "pathlib", "typing"}


def test_a_sample_of_this_machine() -> None:
    env = {**os.environ, "SLURM_JOB_ID": "4242", "RANK": "3"}
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"], env=env)
    try:
        done = subprocess.run(
            [sys.executable, "-", "4242", "1", "1", "samples"],
            input=SAMPLER.read_text(),
            capture_output=True,
            text=True,
            timeout=120,
        )
    finally:
        busy.kill()
        busy.wait()
    pieces = Pieces()
    *_, sample = [pieces.take(line) for line in done.stdout.splitlines()]
    assert sample is not None, done.stderr
    process = next(one for one in sample["processes"] if one["pid"] == busy.pid)
    assert process["rank"] == "3" and process["cpu"] > 0.02 and process["memory"] > 1 << 20
    lines = [line.plain for line in job_lines(FACTS, [sample, {"node": "n2"}], DEFAULT_MARKS, 80)]
    assert lines[0] == "job 42 train|it  running for 1m02s, 58m58s left of its time limit"
    assert lines[2] == "n2: no answer" and max(map(len, lines)) <= 80
    assert any(f"{busy.pid}" in line and "while True" in line for line in lines)


def test_what_nvidia_smi_does_not_know_is_none() -> None:
    gpu = sampler.gpu_of("0, NVIDIA A100, 93, 70000, 81920, [N/A], 400.00, 55")
    assert gpu["power"] is None and gpu["memory"] == 70000 << 20 and gpu["name"] == "NVIDIA A100"
    sample = {"node": "n1", "cpus": 8, "memory_total": 2, "memory_available": 1, "gpus": [gpu]}
    lines = [x.plain for x in job_lines(FACTS, [{**sample, "processes": []}], DEFAULT_MARKS, 80)]
    assert any("93+" in line and "68.4Gi+" in line for line in lines)


def test_stacks_say_whose_they_are_and_what_is_missing() -> None:
    process = {"pid": 7, "rank": "1", "command": "python train.py"}
    dumped = {
        **process,
        "by": "py-spy",
        "stack": 'Thread 7 (idle): "MainThread"\n    wait (x.py:4)',
    }
    guessed = {
        **process,
        "by": "kernel",
        "trouble": "py-spy is not on this node",
        "stack": "p: futex",
    }
    lines = stack_lines([{"node": "n1", "stacks": [dumped]}, {"node": "n2", "stacks": [guessed]}])
    assert lines[0] == "n1: rank 1, process 7: python train.py"
    assert "      wait (x.py:4)" in lines
    assert any("pip install py-spy" in line for line in lines)
    assert stack_lines([{"node": "n3"}])[0] == "n3: no Python process of the job was found"


def test_variables_are_told_by_name_unless_they_are_known_to_be_settings() -> None:
    env = {"NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": 4, "MY_LOGIN": "hunter2"}
    assert job_setting("env", env) == "NCCL_DEBUG=INFO, OMP_NUM_THREADS=4, MY_LOGIN"
    assert job_setting("optimizer", {"lr": 0.1}) == "lr=0.1"
    assert shown_override("env.MY_LOGIN=hunter2") == "env.MY_LOGIN"
    assert [shown_override(word) for word in ("env.NCCL_DEBUG=INFO", "seed=1")] == [
        "env.NCCL_DEBUG=INFO",
        "seed=1",
    ]


def test_samples_of_several_nodes_that_come_mixed_are_whole(
    capsys: pytest.CaptureFixture[str],
) -> None:
    samples = [{"node": node, "processes": [{"command": node * 900}]} for node in ("n1", "n2")]
    told = []
    for sample in samples:
        sampler.tell(sample)
        told.append(capsys.readouterr().out.splitlines())
    assert all(len(line) < 1024 for lines in told for line in lines)
    pieces = Pieces()
    mixed = ["Welcome to the cluster", *(line for pair in zip(*told, strict=True) for line in pair)]
    assert [found for line in mixed if (found := pieces.take(line))] == samples
    assert pieces.take("n1 2/2 the end of one whose beginning is lost") is None


def test_command_lines_and_stacks_of_a_job_have_no_secrets() -> None:
    process = {"pid": 7, "rank": "0", "command": "python train.py --api-key k9-very-long"}
    stack = {**process, "by": "py-spy", "stack": "main (a.py:3)\n  password: 'a b'\n\x1b]0;x\x07"}
    text = json.dumps({"node": "n1", "processes": [process], "stacks": [stack]})
    sample = Pieces().take(f"n1 1/1 {text}\n")
    assert sample is not None and sample["node"] == "n1" and sample["processes"][0]["pid"] == 7
    said = json.dumps(sample) + "\n".join(stack_lines([sample]))
    assert "k9-very" not in said and "a b" not in said and "main (a.py:3)" in said
    assert "\x1b" not in "".join(stack_lines([sample]))
