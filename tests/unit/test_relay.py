"""A step of srun: when its ranks are told to stop, what it is given, and when it ends by itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from tests.fake_slurm import FakeSlurm

from allranks.errors import AllranksError
from allranks.job.job import parse_job
from allranks.launch import network
from allranks.launch import node as node_module
from allranks.launch.backends.slurm import relay, step
from allranks.launch.backends.slurm.in_job import (
    SlurmNodes,
    check_command,
    step_command,
)
from allranks.launch.backends.slurm.relay import LOOK_SECONDS, Relay, stop_signal
from allranks.launch.prepare import Attempt, Prepared, Request, write_attempt
from allranks.layout import Layout
from allranks.machine.processes import STOP_SIGNALS, blocked_signals
from allranks.run import claims
from allranks.run.claims import Claim
from allranks.run.events import append_event
from allranks.run.folder import RunDir, create_run

GRACE = 120  # of a limit of an hour
HOUR = 3600
PLACE = SlurmNodes(job="100", restart=0, nodes=("n1", "n2"), cpus_per_node=4)
TOLD = Attempt(
    number=0,
    layout="2x1",
    checkpoint="",
    threads=None,
    claim=0,
    nodes=PLACE.nodes,
    port=20000,
)


class Clock:
    """The time, and what SLURM says of this job's limit."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.left: float | None = None
        self.limit: int | None = HOUR
        self.num_asked = 0

    def time_to_limit(self, job: str) -> tuple[float | None, int | None]:
        assert job == "100"
        self.num_asked += 1
        return (None, None) if self.left is None else (self.left, self.limit)

    def pass_by(self, seconds: float) -> None:
        self.now += seconds
        self.left = None if self.left is None else self.left - seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(relay, "time_to_limit", made.time_to_limit)
    return made


@pytest.fixture
def stands_still(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: clock.now)


@pytest.fixture
def make(tmp_path: Path, clock: Clock) -> Callable[..., Relay]:
    """`make(*signals, **job)`: a relay of job 100, which has had these."""

    def relay_of(*signals: signal.Signals, **values: Any) -> Relay:
        run = RunDir(tmp_path / "job-20261115-120000-aaaa")
        run.path.mkdir()
        job = parse_job({"layout": "2x1", **values})
        run.job_file.write_text(job.to_yaml())
        run.write_info({"run": run.name, "backend": "slurm", "jobs": ["100"]})
        return Relay(run, PLACE, job, list(signals), deque())

    return relay_of


# --- When the ranks must stop -------------------------------------------------------------------


@pytest.mark.usefixtures("stands_still")
@pytest.mark.parametrize(
    ("left", "wait"),
    [
        (170.0, 50.0),  # SLURM warns up to a minute early
        (209.0, 89.0),  # and looks every 30 s
        (120.0, 0.0),
        (40.0, 0.0),
        (211.0, 0.0),  # it was no warning of the limit
        (None, 0.0),
    ],
)
def test_an_early_warning_of_the_limit_is_held_back_to_the_grace_time(
    make: Callable[..., Relay], clock: Clock, left: float | None, wait: float
) -> None:
    clock.left = left
    told = make(signal.SIGUSR2)
    if wait:
        assert not told.must_stop()
        clock.pass_by(wait - 1)
        assert not told.must_stop()
        clock.pass_by(1)
    assert told.must_stop()
    assert clock.num_asked == 1


@pytest.mark.usefixtures("stands_still")
def test_what_is_no_warning_is_passed_on_at_once(make: Callable[..., Relay], clock: Clock) -> None:
    clock.left = 170.0
    told = make(signal.SIGUSR2)
    assert not told.must_stop()
    told.signals.append(signal.SIGTERM)
    assert told.must_stop()


@pytest.mark.usefixtures("stands_still")
def test_without_any_signal_the_ranks_are_told_when_the_limit_is_near(
    make: Callable[..., Relay], clock: Clock
) -> None:
    clock.left = 1000.0
    told = make()
    assert told._watch_limit()
    clock.pass_by(879)
    assert not told.must_stop()
    assert clock.num_asked == 1  # not at every look
    clock.pass_by(1)
    assert told.must_stop()


@pytest.mark.usefixtures("stands_still")
def test_a_job_that_was_given_more_time_goes_on(make: Callable[..., Relay], clock: Clock) -> None:
    clock.left = 1000.0
    told = make()
    assert told._watch_limit()
    clock.pass_by(880)
    clock.left = 500.0
    assert not told.must_stop()
    clock.pass_by(379)
    assert not told.must_stop()
    clock.pass_by(1)
    assert told.must_stop()


@pytest.mark.usefixtures("stands_still")
def test_a_limit_that_was_near_is_believed_while_the_controller_is_silent(
    make: Callable[..., Relay], clock: Clock
) -> None:
    clock.left = 1000.0
    told = make()
    assert told._watch_limit()
    clock.pass_by(880)
    clock.left = None
    assert told.must_stop()


@pytest.mark.usefixtures("stands_still")
def test_a_limit_that_slurm_did_not_tell_is_asked_for_again(
    make: Callable[..., Relay], clock: Clock
) -> None:
    told = make()
    assert not told._watch_limit()
    clock.left = 1000.0
    clock.pass_by(relay.ASK_SECONDS)
    assert not told.must_stop()
    clock.pass_by(clock.left - 120)
    assert told.must_stop()


@pytest.mark.usefixtures("stands_still")
def test_a_job_without_a_limit_stops_only_when_it_is_asked(
    make: Callable[..., Relay], clock: Clock
) -> None:
    told = make()
    assert not told._watch_limit()
    clock.pass_by(1e9)
    assert not told.must_stop()


@pytest.mark.usefixtures("stands_still")
def test_a_request_is_found_without_a_signal_within_seconds(
    make: Callable[..., Relay], clock: Clock
) -> None:
    told = make()
    told.run.ask_to_stop("stopped by its user", ["98", "99"])  # an earlier one, of other jobs
    assert not told.must_stop()
    told.run.ask_to_stop("stopped by its user", ["99", "100"])
    clock.pass_by(LOOK_SECONDS - 0.1)
    assert not told.must_stop()  # a network disk is not asked twice a second
    clock.pass_by(0.1)
    assert told.must_stop()


@pytest.mark.usefixtures("stands_still")
def test_a_request_is_not_held_back_as_an_early_warning_is(
    make: Callable[..., Relay], clock: Clock
) -> None:
    clock.left = 170.0
    told = make(signal.SIGUSR2)
    assert not told.must_stop()
    told.run.ask_to_stop("moves to 1x2", ["100"], moves=True)
    clock.pass_by(LOOK_SECONDS)
    assert told.must_stop()


@pytest.mark.parametrize(
    ("slurm", "limit", "grace"),
    [
        ({}, HOUR, 120),
        ({"time": "4h"}, 240, 60),  # what SLURM says counts, not what was asked for
        ({"grace": "5m"}, HOUR, 300),
        ({"grace": "5m"}, 400, 100),  # more than half of the partition's own limit
    ],
)
def test_the_grace_time_follows_from_the_limit_that_slurm_enforces(
    make: Callable[..., Relay], clock: Clock, slurm: dict[str, str], limit: int, grace: int
) -> None:
    clock.left, clock.limit = 300.0, limit
    assert make(slurm=slurm)._left_and_grace() == (300.0, grace)


def test_the_grace_time_grows_with_the_checkpoints_of_this_attempt(
    make: Callable[..., Relay], clock: Clock
) -> None:
    clock.left = 1000.0
    told = make()
    append_event(told.run.events(0, 0), "checkpoint", step=1, seconds=70)
    assert told._left_and_grace() == (1000.0, 210)


def test_ranks_listen_when_all_of_this_attempt_have_written_something(
    make: Callable[..., Relay],
) -> None:
    told = make()
    for rank in range(2):
        append_event(told.run.events(0, rank), "start", rank=rank)
    assert told._listen(0)
    assert not told._listen(1)  # those of an earlier attempt
    append_event(told.run.events(1, 0), "start", rank=0)
    assert not told._listen(1)
    append_event(told.run.events(1, 1), "start", rank=1)
    assert told._listen(1)
    append_event(told.run.events(2, 0), "start", rank=0)  # restarted in the same job
    assert not told._listen(1)


# --- A step -------------------------------------------------------------------------------------

# In place of srun. A rank's file is there when it listens; the code is how often it was told.
STEP = r"""
told=0
trap 'told=$((told + 1))' "$2"
mkdir -p "$0"
touch "$0"/rank-0.jsonl
[ "$1" = 2 ] && touch "$0"/rank-1.jsonl
for _ in $(seq 300); do
    [ $told -gt 0 -o "$1" = 1 ] && break
    sleep 0.1
done
sleep 1.2
exit $told
"""


def step_of(told: Relay, num_listening: int, name: str = "USR2") -> list[str]:
    return ["bash", "-c", STEP, str(told.run.attempt(0)), str(num_listening), name]


@pytest.mark.parametrize("name", ["USR1", "USR2"])
def test_the_ranks_of_a_step_are_told_once(make: Callable[..., Relay], name: str) -> None:
    told = make(signal.SIGTERM, command="python train.py", slurm={"signal": name})
    assert told.run_step(step_of(told, 2, name), attempt=0) == 1
    assert signal.Signals[f"SIG{name}"] in STOP_SIGNALS  # or it would kill who started the ranks


LIGHTNING = "from lightning.pytorch import Trainer\n"


@pytest.mark.parametrize(
    ("command", "files", "name"),
    [
        ("python train.py", {"train.py": "import lightningrod\n"}, "USR2"),
        ("python -u train.py", {"train.py": f"import torch\n{LIGHTNING}"}, "USR1"),
        (
            "python a/train.py",
            {"a/train.py": "def f():\n    import pytorch_lightning as pl"},
            "USR1",
        ),
        ("python a/train.py", {"a/train.py": "from src import m\n", "src/m.py": LIGHTNING}, "USR1"),
        ("python a/train.py", {"a/train.py": "import net.m\n", "a/net/m.py": LIGHTNING}, "USR1"),
        ("python -m a.train", {"a/train.py": "from .m import X\n", "a/m.py": LIGHTNING}, "USR1"),
        ("python train.py", {"train.py": f"{LIGHTNING}signal.signal(signal.SIGUSR2, f)\n"}, "USR2"),
        (
            "python gone.py",
            {"train.py": LIGHTNING, "lightning_like.py": "import lightningrod"},
            "USR2",
        ),
    ],
)
def test_a_script_gets_the_signal_that_it_listens_to(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    files: dict[str, str],
    name: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    for path, text in files.items():
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text)
    chosen, why = stop_signal(parse_job({"command": command}))
    assert chosen.name == f"SIG{name}" and bool(why) == (name == "USR1")
    other = "USR2" if name == "USR1" else "USR1"
    told = parse_job({"command": command, "slurm": {"signal": other}})
    assert stop_signal(told) == (signal.Signals[f"SIG{other}"], "")


def test_ranks_that_do_not_listen_yet_are_not_told(make: Callable[..., Relay]) -> None:
    told = make(signal.SIGTERM)
    assert told.run_step(step_of(told, 1), attempt=0) == 0


def test_a_step_without_ranks_is_not_told(make: Callable[..., Relay]) -> None:
    told = make(signal.SIGTERM)
    for rank in range(2):
        append_event(told.run.events(0, rank), "start", rank=rank)
    assert told.run_step(["bash", "-c", "sleep 1.2; exit 7"]) == 7


def test_a_step_has_its_limit_watched_from_the_start(
    make: Callable[..., Relay], clock: Clock
) -> None:
    clock.left = GRACE - 1.0
    told = make()
    assert told.run_step(step_of(told, 2), attempt=0) == 1


def test_a_step_that_takes_too_long_is_ended(make: Callable[..., Relay]) -> None:
    assert make().run_step(["sleep", "60"], seconds=0.1) == -signal.SIGTERM


def test_a_step_that_is_judged_badly_is_ended(make: Callable[..., Relay]) -> None:
    answers = iter([None, None, False])
    assert make().run_step(["sleep", "60"], judge=lambda: next(answers)) == -signal.SIGTERM


def test_a_step_that_is_judged_well_goes_on(make: Callable[..., Relay]) -> None:
    answers = iter([None, True])
    assert make().run_step(["bash", "-c", "sleep 1.2; exit 7"], judge=lambda: next(answers)) == 7


def test_what_srun_says_is_repeated_and_lost_nodes_are_recorded_at_once(
    make: Callable[..., Relay], capsys: pytest.CaptureFixture[str]
) -> None:
    told = make()
    words = "echo hello >&2; printf 'srun: error: Node failure on n[1-2]\\n\\377\\n' >&2; exit 1"
    assert told.run_step(["bash", "-c", words]) == 1
    assert list(told.run.info()["failed_nodes"]) == ["n1", "n2"]
    assert capsys.readouterr().out.splitlines()[:2] == [
        "hello",
        "srun: error: Node failure on n[1-2]",
    ]


def test_a_step_finds_no_options_of_the_batch_script(
    make: Callable[..., Relay], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_DISTRIBUTION", "cyclic")
    monkeypatch.setenv("SLURM_JOB_ID", "100")
    words = '[ -z "$SLURM_DISTRIBUTION" -a "$SLURM_JOB_ID" = 100 ]'
    assert make().run_step(["bash", "-c", words]) == 0


# --- What srun starts ---------------------------------------------------------------------------


def test_the_ranks_of_a_node_follow_each_other(make: Callable[..., Relay]) -> None:
    told = make()
    words = step_command(told.job, PLACE, Path("x/attempts/3/attempt.json"))
    assert "--distribution=block" in words
    assert "--distribution=block" in check_command(PLACE, Path("x"), 1, 0, 9)
    assert words[-1] == "x/attempts/3/attempt.json"
    assert {"--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--kill-on-bad-exit=1"} <= set(words)
    assert "--wait=0" in words  # whatever a site's WaitTime is


def test_a_step_has_the_layout_of_its_job_while_the_run_moves_to_another(
    make: Callable[..., Relay], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = make(layout="1x4")  # what the file says: the job that comes next
    seen: list[Prepared] = []
    monkeypatch.setattr(network, "variables", lambda nodes: {})
    monkeypatch.setattr(step, "end_with_claim", lambda run, number, seconds: None)
    monkeypatch.setattr(step, "run_node", lambda prepared, told: seen.append(prepared))
    job = told.job.model_copy(update={"layout": Layout(2, 2)})
    sent = Prepared(request=Request(), job=job, run=told.run, attempt=1, claim=5)
    sent.checkpoint = "step-7"
    path = write_attempt(sent, told.run, nodes=("n1", "n2"), port=20000)
    monkeypatch.setattr("sys.argv", ["step", str(path)])
    step.main()
    (one,) = seen
    assert (str(one.layout), one.claim, one.attempt, one.checkpoint) == ("2x2", 5, 1, "step-7")
    assert told.run.attempts() == []  # none has begun before it has a rank


@pytest.mark.parametrize(
    ("states", "is_told", "code"),
    [({"finished"}, False, 0), ({"stopped"}, True, 0), ({"finished", "failed"}, False, 1)],
)
@pytest.mark.parametrize("node", [0, 1])
def test_a_launcher_speaks_of_its_own_ranks_alone(
    make: Callable[..., Relay],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    node: int,
    states: set[str],
    is_told: bool,
    code: int,
) -> None:
    """The folder has no end of the other node's ranks: that is for the job to judge."""

    class Launch:
        disk_error = None

        def __init__(self, prepared: Prepared, *args: Any) -> None:
            self.signals = args[2]

        def run_ranks(self) -> set[str]:
            self.signals.received += [signal.SIGUSR2] if is_told else []
            return states

    told = make()
    prepared = Prepared(request=Request(), job=told.job, run=told.run, claim=0)
    monkeypatch.setenv("SLURM_NODEID", str(node))
    monkeypatch.setattr(node_module, "Launch", Launch)
    monkeypatch.setattr(step, "watching_job", lambda *args: nullcontext())
    assert step.run_node(prepared, TOLD) == code
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("states", "is_told", "code"),
    [({"finished"}, False, 0), ({"failed"}, True, 0), ({"failed"}, False, 3)],
)
def test_a_launcher_whose_wait_is_in_vain_fails_only_with_its_ranks(
    make: Callable[..., Relay],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    states: set[str],
    is_told: bool,
    code: int,
) -> None:
    class Launch:
        def __init__(self, prepared: Prepared, *args: Any) -> None:
            self.signals = args[2]

        def run_ranks(self) -> set[str]:
            self.signals.received += [signal.SIGUSR2] if is_told else []
            raise AllranksError("node 0 is silent", fix="look at it", exit_code=3)

        def own_states(self) -> set[str]:
            return states

    told = make()
    prepared = Prepared(request=Request(), job=told.job, run=told.run, claim=0)
    monkeypatch.setenv("SLURM_NODEID", "1")
    monkeypatch.setattr(node_module, "Launch", Launch)
    assert step.run_node(prepared, TOLD) == code
    assert "node 0 is silent" in capsys.readouterr().out


class Ended(BaseException):
    """In place of the end of the process."""


def test_a_step_ends_itself_when_a_newer_attempt_has_the_run(
    make: Callable[..., Relay],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = make().run
    assert claims.take(run.claims, Claim(number=0, job="100"))
    slept: list[float] = []
    raise_if_lost = claims.raise_if_lost

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 4:
            assert claims.take(run.claims, Claim(number=1, job="101", host="n7"))

    def look(folder: Path, number: int) -> None:
        if len(slept) == 2:
            raise OSError("stale file handle")
        raise_if_lost(folder, number)

    def leave(code: int) -> None:
        raise Ended(code)

    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(claims, "raise_if_lost", look)
    monkeypatch.setattr(os, "_exit", leave)
    with pytest.raises(Ended, match="1"):
        step.end_with_claim(run, 0, 5.0)
    assert len(slept) == 4 and all(4.0 <= seconds <= 6.0 for seconds in slept)
    assert "lost the run to job 101 on n7" in capsys.readouterr().out


@pytest.mark.parametrize("why_not", ["", "cancelled", "stopped by its user", "sent again", "old"])
@pytest.mark.parametrize("is_told", [True, False])
def test_a_job_whose_first_process_is_killed_is_requeued_by_its_first_task(
    make: Callable[..., Relay], monkeypatch: pytest.MonkeyPatch, is_told: bool, why_not: str
) -> None:
    """Unless somebody has ended it on purpose, or has seen to what comes next."""
    run = make().run
    reason = "None" if why_not == "cancelled" else "JobLaunchFailure"
    fake = FakeSlurm(squeue=f"COMPLETING|{reason}").install(monkeypatch)
    monkeypatch.setenv("SLURM_JOB_ID", "100")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    append_event(run.events(0, 0), "start", rank=0)
    racers = {"100": {"layout": "2x1", "claim": 0}}
    run.update_info(lambda info: info.update(racers=racers, queued=why_not == "sent again"))
    waits = [sys.executable, "-c", "import time; time.sleep(600)", f"/link/{run.name}"]
    with subprocess.Popen(waits) as first:
        assert claims.take(run.claims, Claim(number=0, job="100", pid=first.pid))
        if why_not == "old":
            assert claims.take(run.claims, Claim(number=1, job="101", pid=first.pid))
        if why_not == "stopped by its user":
            run.ask_to_stop(why_not, ["100"])
        # Its rank ends at once, of the same signal that SLURM sends to the rest of the job.
        with step.watching_job(run, 0, True, lambda: is_told or why_not == "cancelled"):
            first.kill()
            first.wait()
    assert fake.of("scontrol", "sbatch") == ([] if why_not else [("scontrol", "requeue", "100")])
    lost = {"attempt": 0, "what": "the job's first process was killed on n1"}
    assert run.info().get("lost") == (None if why_not else lost)


def test_a_task_that_does_not_see_the_jobs_first_process_waits_for_nothing(
    make: Callable[..., Relay], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make().run
    monkeypatch.setenv("SLURM_JOB_ID", "100")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    assert claims.take(run.claims, Claim(number=0, job="100"))  # this process, which is no job
    monkeypatch.setattr(step, "watch", pytest.fail)
    with step.watching_job(run, 0, True, lambda: False):
        pass


def test_srun_says_which_task_ended_badly_first(make: Callable[..., Relay]) -> None:
    said = "srun: error: n2: task 1: Killed\nsrun: error: n1: task 0: Exited with exit code 1"
    told = make()
    assert told.run_step(["bash", "-c", f"echo '{said}' >&2"]) == 0
    assert told.first_end == ("n2", "Killed")
    told.run_step(["true"])
    assert told.first_end is None
    said = "slurmstepd-n1: error: Detected 1 oom_kill event in StepId=9.0. Some of your processes"
    told.run_step(["bash", "-c", f"echo '{said}\nsrun: error: n1: task 0: Killed' >&2"])
    assert told.first_end == ("", "Out Of Memory")


def test_a_variable_that_keeps_gloo_on_one_node_is_not_passed_on_to_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, str] = {}

    def start(words: list[str], env: dict[str, str], **options: object) -> None:
        given.update(env)
        raise Ended(0)

    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setenv("SLURM_PROCID", "1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    run = create_run(tmp_path, "script")
    job = parse_job({"command": "true", "layout": "2x1"})
    with blocked_signals(), pytest.raises(Ended):  # which it leaves blocked
        step.run_rank(Prepared(request=Request(), job=job, run=run), run, TOLD)
    assert given["RANK"] == "1" and "GLOO_SOCKET_IFNAME" not in given
