"""Runs that are killed, stopped and resumed end with the weights of one that was left alone.

`make test` runs a sample of the trials; `make soak` runs them all.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from tests.faults import (
    Live,
    gone,
    kill_a_rank,
    kill_the_tree,
    losses,
    newest_weights,
    same_bits,
    sample_of,
    start,
)
from tests.ports import free_port
from torch import Tensor

from allranks.run.commits import newest_whole
from allranks.run.events import read_last_events
from allranks.run.folder import RunDir, list_runs

pytestmark = pytest.mark.ranks

# Long enough to be hit, short enough for many trials; a checkpoint is nearly always being written.
STEPS = {"1x1": 1500, "1x2": 150, "1x4": 80}
LAYOUTS = list(STEPS)

Reference = Callable[[str], dict[str, Tensor]]


def job(layout: str) -> list[str]:
    return ["--layout", layout, f"steps={STEPS[layout]}", "checkpoint.every=7"]


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """The tensors of an uninterrupted run of a layout, made when first asked for."""

    @cache
    def reference(layout: str) -> dict[str, Tensor]:
        cwd = tmp_path_factory.mktemp(f"reference-{layout}")
        code, result = start(cwd, *job(layout)).wait()
        assert code == 0
        step, tensors = newest_weights(Path(result["run_dir"]))
        assert step == STEPS[layout]
        return tensors

    return reference


def wait_for_a_moment(live: Live, chance: random.Random, layout: str) -> str:
    """Return at a random moment: while starting, in some step, or while a checkpoint is written."""
    kind = chance.choice(["starting", "step", "writing", "writing"])
    if kind == "starting":
        time.sleep(chance.uniform(0, 4))
        return kind
    target = chance.randrange(5, int(0.8 * STEPS[layout]))

    def has_finished() -> bool:  # while this process had to wait for a CPU: that is a moment, too
        return live.process.poll() == 0

    live.wait_until(lambda: has_finished() or step_of(live) >= target)
    if kind == "writing":
        writing = "*/checkpoints/.step-*.writing"
        live.wait_until(lambda: has_finished() or any(live.runs.glob(writing)))
    time.sleep(chance.uniform(0, 0.01))
    return kind


def step_of(live: Live) -> int:
    runs = list_runs(live.runs)
    events = read_last_events(runs[0].events(0, 0)) if runs else []
    return max((event["step"] for event in events if event["event"] == "step"), default=0)


def resume_to_the_end(cwd: Path, layout: str) -> RunDir:
    """Go on as a user would: resume, or start again if there is nothing to resume yet."""
    started = any(run.job_file.exists() for run in list_runs(cwd / "runs"))
    again = ["--resume", "last"] if started else job(layout)
    code, result = start(
        cwd, *again, *(["--layout", layout] if again[0] == "--resume" else [])
    ).wait(280)
    assert code == 0, (cwd / "stderr.txt").read_text()[-2000:]
    assert result["state"] == "finished"
    return RunDir(Path(result["run_dir"]))


def trial(number: int) -> tuple[str, random.Random]:
    """Layouts in turn; what happens in a trial follows from its number."""
    return LAYOUTS[number % len(LAYOUTS)], random.Random(number)


@pytest.mark.parametrize("number", sample_of(30, 1))
def test_a_rank_is_killed(number: int, tmp_path: Path, references: Reference) -> None:
    layout, chance = trial(number)
    live = start(tmp_path, *job(layout))
    wait_for_a_moment(live, chance, layout)
    processes = live.descendants()
    killed = kill_a_rank(live, chance)
    code, result = live.wait()
    if killed >= 0 and result["state"] != "finished":
        assert code == 1
        assert f"rank {killed} was killed by SIGKILL" in result["error"]["what"]
    assert gone(processes)
    run = resume_to_the_end(tmp_path, layout)
    assert same_bits(newest_weights(run.path)[1], references(layout))


@pytest.mark.parametrize("number", sample_of(30, 4))
def test_everything_is_killed(number: int, tmp_path: Path, references: Reference) -> None:
    layout, chance = trial(number)
    live = start(tmp_path, *job(layout))
    wait_for_a_moment(live, chance, layout)
    processes = live.descendants()
    kill_the_tree(live)
    live.wait()
    assert gone(processes)
    run = resume_to_the_end(tmp_path, layout)
    assert same_bits(newest_weights(run.path)[1], references(layout))


@pytest.mark.parametrize("number", sample_of(30, 7))
def test_it_is_told_to_stop(number: int, tmp_path: Path, references: Reference) -> None:
    """SIGTERM, SIGINT, SIGUSR2, SIGHUP in turn: stopped at a checkpoint, code 75, no step lost."""
    layout, chance = trial(number)
    live = start(tmp_path, *job(layout))
    live.wait_until(lambda: bool(live.ranks()))
    wait_for_a_moment(live, chance, layout)
    processes = live.descendants()
    stops = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR2, signal.SIGHUP]
    live.process.send_signal(stops[number % 4])
    code, result = live.wait()
    assert gone(processes)
    if result["state"] != "finished":
        assert (code, result["state"]) == (75, "stopped")
        assert newest_weights(Path(result["run_dir"]))[0] == result["steps"]
    run = resume_to_the_end(tmp_path, layout)
    assert same_bits(newest_weights(run.path)[1], references(layout))


@pytest.mark.parametrize("number", sample_of(6))
def test_it_goes_on_with_other_numbers_of_ranks(number: int, tmp_path: Path) -> None:
    """Stopped and resumed on 1x1, 1x2 and 1x4 in turn: the losses of one run of the first."""
    chance = random.Random(number)
    common = ["task=language", "steps=240", "log_every=1", "batch_size=17", "checkpoint.every=10"]
    (tmp_path / "whole").mkdir()
    _, whole = start(tmp_path / "whole", *common).wait()
    order = LAYOUTS * 2
    for index, layout in enumerate(order):
        arguments = ["--resume", "last"] if index else common
        live = start(tmp_path, *arguments, "--layout", layout)
        if index + 1 == len(order):
            live.wait(200)
            break
        wait_for_step(live, index, 30 * (index + 1) + chance.randrange(10))
        if chance.random() < 0.5:
            live.process.send_signal(signal.SIGTERM)
        else:
            kill_the_tree(live)
        live.wait()
    run = list_runs(tmp_path / "runs")[0]
    expected, found = losses(Path(whole["run_dir"])), losses(run.path)
    assert found.keys() == expected.keys()
    assert max(abs(found[step] / expected[step] - 1) for step in expected) < 1e-5


def wait_for_step(live: Live, attempt: int, step: int) -> None:
    def is_there() -> bool:
        runs = list_runs(live.runs)
        events = read_last_events(runs[0].events(attempt, 0)) if runs else []
        return any(event["event"] == "step" and event["step"] >= step for event in events)

    live.wait_until(is_there)


DYING = """
import os, signal
from dataclasses import dataclass
from allranks.tasks.spiral import Spiral

@dataclass
class Dying(Spiral):
    calls = 0

    def loss(self, outputs, targets):
        self.calls += 1
        if (os.environ["ALLRANKS_ATTEMPT"], os.environ["RANK"], self.calls) == ("0", "1", 100):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(outputs, targets)
"""


def test_ranks_restart_by_themselves(tmp_path: Path, references: Reference) -> None:
    (tmp_path / "dying.py").write_text(DYING)
    live = start(tmp_path, "task=dying:Dying", *job("1x2"), "--max-restarts", "2")
    code, result = live.wait()
    assert code == 0, result
    assert (code, result["state"], result["attempt"]) == (0, "finished", 1)
    assert same_bits(newest_weights(Path(result["run_dir"]))[1], references("1x2"))


def test_a_second_ctrl_c_stops_at_once(tmp_path: Path) -> None:
    live = start(tmp_path, "epochs=500", "--layout", "1x2")
    live.wait_until(lambda: step_of(live) > 0)
    processes = live.descendants()
    for rank in live.ranks().values():  # or they might be done before the second one comes
        os.kill(rank, signal.SIGSTOP)
    live.process.send_signal(signal.SIGINT)
    # Two that come at once are one.
    live.wait_until(lambda: "SIGINT: stopping" in (tmp_path / "stderr.txt").read_text())
    live.process.send_signal(signal.SIGINT)
    code, _ = live.wait(60)
    assert code == 130
    assert gone(processes)


def test_ranks_die_with_the_launcher(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    temporary = {"TMPDIR": str(tmp_path / "tmp")}
    live = start(tmp_path, "epochs=500", "--layout", "1x2", env=temporary)
    live.wait_until(lambda: step_of(live) > 0)
    processes = live.descendants()
    os.kill(live.process.pid, signal.SIGKILL)
    live.wait()
    assert gone(processes)
    assert list_runs(live.runs)[0].state() == "failed"
    assert list((tmp_path / "tmp").glob("allranks-*")) == []


def test_a_live_run_is_not_resumed(tmp_path: Path) -> None:
    live = start(tmp_path, "epochs=500", "checkpoint.every=20")
    live.wait_until(lambda: step_of(live) > 60)
    code, result = start(tmp_path, "--resume", "last").wait()
    assert code == 2
    assert "is live" in result["error"]["what"]
    takes_over_from(live, tmp_path)


BLIND = """
import fcntl, socket
fcntl.flock = lambda *_: None
socket.gethostname = lambda: "node7"
from allranks.cli.main import main
main()
"""


def takes_over_from(live: Live, cwd: Path) -> None:
    """A process of another machine, which does not see the lock, goes on with the live run.

    What trains it is suspended meanwhile, in whatever it does, and wakes up when it is finished.
    """
    processes = live.descendants()
    for process in processes:
        os.kill(process, signal.SIGSTOP)
    run = list_runs(live.runs)[0]
    newest, _ = newest_whole(run.checkpoints)
    assert newest is not None
    words = ["run", "--resume", "last", f"steps={newest.step + 30}"]
    done = subprocess.run(
        [sys.executable, "-c", BLIND, *words], cwd=cwd, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stdout.split())
    assert f"takes the run from process {live.process.pid} on" in said
    kept = {path.name for path in run.checkpoints.iterdir()}
    for process in processes:
        os.kill(process, signal.SIGCONT)
    code, result = live.wait()
    assert code == 1
    assert "this attempt has lost the run to process" in result["error"]["what"]
    assert "on node7: nothing more is committed" in result["error"]["what"]
    assert gone(processes)
    assert kept <= {path.name for path in run.checkpoints.iterdir()}
    found, damaged = newest_whole(run.checkpoints)
    assert found is not None and (found.step, damaged) == (newest.step + 30, [])
    assert (run.state(), run.attempts()) == ("finished", [0, 1])


def test_a_damaged_checkpoint_is_reported_and_passed_over(tmp_path: Path) -> None:
    _, result = start(tmp_path, "steps=40", "checkpoint.every=10").wait()
    run = RunDir(Path(result["run_dir"]))
    shard = next((run.checkpoints / "step-40").glob("*.distcp"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    code, _ = start(tmp_path, "steps=50", "--resume", "last").wait()
    assert code == 0
    assert "step-40 is damaged" in (tmp_path / "stderr.txt").read_text()
    assert RunDir(run.path).start(1)["step"] == 30  # type: ignore[index]
    assert newest_weights(run.path)[0] == 50
    start(tmp_path, "steps=60", "--resume", "last").wait()
    assert (tmp_path / "stderr.txt").read_text().count("step-40 is damaged") == 1


@pytest.mark.parametrize("layout", [pytest.param("1x1", marks=pytest.mark.soak), "1x2"])
def test_a_full_disk_loses_nothing_committed(tmp_path: Path, layout: str) -> None:
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk takes root")
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=160k", "tmpfs", disk], check=True)
    try:
        arguments = ["--runs", str(disk), "--layout", layout]
        live = start(tmp_path, *arguments, "steps=600", "checkpoint.every=50")
        live.wait_until(lambda: bool(live.ranks()))
        processes = live.descendants()
        code, result = live.wait()
        assert code == 1
        assert "No space left on device" in result["error"]["what"]
        assert gone(processes)
        assert "Traceback" not in (tmp_path / "stderr.txt").read_text()
        subprocess.run(["mount", "-o", "remount,size=30m", disk], check=True)
        code, result = start(tmp_path, *arguments, "--resume", "last").wait()
        assert (code, result["steps"]) == (0, 600)
    finally:
        subprocess.run(["umount", disk], check=True)


def test_a_task_that_raises_on_one_rank_is_named(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(
        "import os\n"
        "from dataclasses import dataclass\n"
        "from allranks.tasks.spiral import Spiral\n\n\n"
        "@dataclass\n"
        "class Broken(Spiral):\n"
        "    calls = 0\n\n"
        "    def loss(self, outputs, targets):\n"
        "        self.calls += 1\n"
        "        if os.environ['RANK'] == '1' and self.calls == 30:\n"
        "            raise ZeroDivisionError('my mistake')\n"
        "        return super().loss(outputs, targets)\n"
    )
    live = start(tmp_path, "task=broken:Broken", "--layout", "1x2")
    live.wait_until(lambda: bool(live.ranks()))
    processes = live.descendants()
    code, result = live.wait()
    assert code == 1
    assert result["error"]["what"].startswith("rank 1 failed: ZeroDivisionError: my mistake")
    assert "broken.py:13" in result["error"]["what"]
    assert "Traceback" not in (tmp_path / "stderr.txt").read_text()
    assert gone(processes)


def test_a_users_script_is_told_and_may_resume(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import pathlib, signal, sys, time\n"
        "def save(*_):\n"
        "    pathlib.Path('last.txt').write_text('saved')\n"
        "    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, save)\n"
        "print('arguments', sys.argv[1:], flush=True)\n"
        "if '--from' in sys.argv: sys.exit(0)\n"
        "time.sleep(300)\n"
    )
    (tmp_path / "job.yaml").write_text(
        "command: python train.py --ranks {ranks}\nlast: last.txt\nresume: --from {last}\n"
    )
    live = start(tmp_path, "job.yaml", "--layout", "1x2")
    live.wait_until(lambda: all("arguments" in log_of(live, rank) for rank in range(2)))
    live.process.send_signal(signal.SIGTERM)
    code, result = live.wait()
    assert (code, result["state"]) == (75, "stopped")
    assert "['--ranks', '2']" in log_of(live)
    code, result = start(tmp_path, "job.yaml", "--resume", "last").wait()
    assert (code, result["state"]) == (0, "finished")
    log = (Path(result["run_dir"]) / "attempts/1/rank-1.log").read_text()
    assert "['--ranks', '2', '--from', 'last.txt']" in log


def log_of(live: Live, rank: int = 0) -> str:
    runs = list_runs(live.runs)
    log = runs[0].log(0, rank) if runs else Path("none")
    return log.read_text() if log.exists() else ""


def test_two_nodes_by_hand(tmp_path: Path) -> None:
    """Typed on each machine; here both are this one."""
    common = ["steps=60", "log_every=1", "--layout", "2x1", "--master", f"127.0.0.1:{free_port()}"]
    nodes = [start(tmp_path, *common, "--node-rank", str(node)) for node in (0, 1)]
    results = [node.wait() for node in nodes]
    assert [code for code, _ in results] == [0, 0]
    assert len(list_runs(tmp_path / "runs")) == 1
    (tmp_path / "one").mkdir()
    _, alone = start(tmp_path / "one", "steps=60", "log_every=1").wait()
    expected = losses(Path(alone["run_dir"]))
    found = losses(Path(results[0][1]["run_dir"]))
    assert max(abs(found[step] / expected[step] - 1) for step in expected) < 1e-5


def test_nodes_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    master = ["--master", f"127.0.0.1:{free_port()}"]
    first = start(tmp_path, "steps=10", "--layout", "2x1", *master, "--node-rank", "0")
    first.wait_until(lambda: bool(list_runs(first.runs)))
    code, result = start(tmp_path, "--layout", "2x2", *master, "--node-rank", "1").wait()
    assert code == 2
    assert "--layout 2x1" in result["error"]["what"]
    assert "2x2" in result["error"]["what"]
    code, result = start(tmp_path, "--layout", "2x1", *master, "--node-rank", "0").wait()
    assert code == 2
    assert str(first.process.pid) in result["error"]["what"]
    second = start(tmp_path, "steps=10", "--layout", "2x1", *master, "--node-rank", "1")
    assert second.wait()[0] == 0
    assert first.wait()[0] == 0


def test_the_events_of_a_run(tmp_path: Path) -> None:
    """Every step once, its loss every log_every steps and at the last, an end."""
    _, result = start(tmp_path, "steps=33", "--layout", "1x2").wait()
    run = RunDir(Path(result["run_dir"]))
    for rank in (0, 1):
        lines = run.events(0, rank).read_text().splitlines()
        events = [json.loads(line) for line in lines]
        assert all(event["v"] == 1 and event["t"] > 1e9 for event in events)
        steps = [event for event in events if event["event"] == "step"]
        assert [event["step"] for event in steps] == list(range(1, 34))
        assert {event["samples"] for event in steps} == {16}
        with_loss = [event["step"] for event in steps if "loss" in event]
        assert with_loss == ([10, 20, 30, 33] if rank == 0 else [])
        # Before that, the probe may say which process it is, where, and what memory it uses.
        early = ("place", "recorder", "memory")
        first = next(e for e in events if e["event"] not in early)
        assert first["event"] == "start"
        assert (events[-1]["event"], events[-1]["state"]) == ("end", "finished")
