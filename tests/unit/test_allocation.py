"""A job that holds a run: who may, what it does again, and what comes after it."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.fake_slurm import FakeSlurm, silence

import allranks.launch.prepare
from allranks.errors import AllranksError
from allranks.job.job import parse_job
from allranks.launch.backends.slurm import allocation, submit
from allranks.launch.backends.slurm.allocation import (
    STEP_TRIES,
    Allocation,
    take_claim,
)
from allranks.launch.backends.slurm.in_job import (
    FIRST_PORT,
    NUM_PORTS,
    SlurmNodes,
    free_port,
    job_state,
    no_progress,
    record_failed,
    step_environment,
    time_to_limit,
    while_silent,
)
from allranks.launch.backends.slurm.node_gate import ENDED, OPEN, Verdict
from allranks.launch.backends.slurm.relay import nodes_failed
from allranks.launch.backends.slurm.sbatch import Racer
from allranks.launch.prepare import Prepared, Request, prepare, read_attempt
from allranks.run import claims, run_state
from allranks.run.claims import Claim
from allranks.run.events import append_event
from allranks.run.folder import RunDir
from allranks.slurm import commands as slurm
from allranks.slurm.reasons import waiting_reason

RACER = Racer.parse("1x2")


def place_of(job: str, restart: int = 0, nodes: tuple[str, ...] = ("n1",)) -> SlurmNodes:
    return SlurmNodes(job=job, restart=restart, nodes=nodes, cpus_per_node=4)


def make_run(folder: Path, **values: Any) -> RunDir:
    run = RunDir(folder / "job-20261115-120000-aaaa")
    run.path.mkdir()
    run.job_file.write_text(parse_job({"layout": "1x2", **values}).to_yaml())
    run.write_info({"run": run.name, "backend": "slurm", "jobs": []})
    return run


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    return FakeSlurm(sbatch="500", squeue="RUNNING").install(monkeypatch)


@pytest.fixture
def hold(tmp_path: Path, answers: FakeSlurm) -> Callable[..., Allocation]:
    """`hold(**job)`: job 100 has just taken a run."""

    def make(restart: int = 0, **values: Any) -> Allocation:
        run = make_run(tmp_path, **values)
        place = place_of("100", restart)
        claim = take_claim(run, place, RACER, 0)
        assert claim is not None
        return Allocation(run, place, RACER, claim)

    return make


# --- Taking the run -----------------------------------------------------------------------------


def test_the_first_job_takes_the_run(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    claim = take_claim(run, place_of("100", nodes=("n1", "n2")), Racer.parse("2x1@a40"), 0)
    assert claim is not None
    assert (claim.number, claim.job, claim.layout, claim.nodes) == (0, "100", "2x1", ("n1", "n2"))
    assert claims.newest(run.claims) == claim


def test_a_racer_that_lost_ends_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path)
    assert take_claim(run, place_of("100"), RACER, 0) is not None
    before = sorted(run.path.rglob("*"))
    assert take_claim(run, place_of("101"), Racer.parse("2x1"), 0) is None
    assert sorted(run.path.rglob("*")) == before
    assert "was taken by job 100 (1x2): this job (2x1) ends" in capsys.readouterr().out


def test_a_racer_that_looked_before_the_winner_came_ends_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path)
    assert take_claim(run, place_of("100"), RACER, 0) is not None
    looks = iter([None, claims.newest(run.claims)])
    monkeypatch.setattr(claims, "newest", lambda folder: next(looks))
    assert take_claim(run, place_of("101"), RACER, 0) is None


def test_a_requeued_job_takes_what_was_its_own(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    for restart in range(3):
        claim = take_claim(run, place_of("100", restart), RACER, 0)
        assert claim is not None
        assert (claim.number, claim.restart) == (restart, restart)


def test_the_next_job_of_a_run_takes_the_next_claim_and_a_stale_script_none(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    assert take_claim(run, place_of("100"), RACER, 0) is not None
    assert take_claim(run, place_of("101"), RACER, 1) is not None
    for stale in (0, 1, 3):
        assert take_claim(run, place_of("102"), RACER, stale) is None
    # The first job, requeued after a node came back: another one has the run.
    assert take_claim(run, place_of("100", 1), RACER, 0) is None
    assert [claim.job for claim in claims.all_of(run.claims)] == ["100", "101"]


def test_a_job_that_finds_the_run_taken_ends_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path)
    assert take_claim(run, place_of("100"), RACER, 0) is not None
    info = run.info()
    assert start(run, "101", monkeypatch) == 0
    assert run.info() == info
    assert run.attempts() == []


def start(run: RunDir, job: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """What the script of a job does, on a node."""
    monkeypatch.setenv("SLURM_JOB_ID", job)
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n2")
    words = ["allocation", str(run.path), "--racer", "2x1", "--claim", "0"]
    monkeypatch.setattr("sys.argv", words)
    return allocation.main()


def test_a_job_that_was_asked_to_stop_before_it_began_takes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path)
    run.ask_to_stop("stopped by its user", ["100", "101"])
    assert start(run, "101", monkeypatch) == 0
    assert claims.all_of(run.claims) == []
    assert run.info()["ended"] == {"state": "stopped", "reason": "stopped by its user"}
    assert "stopped by its user" in capsys.readouterr().out


def test_a_job_that_was_asked_to_stop_does_not_begin_again_when_slurm_requeues_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path)
    assert take_claim(run, place_of("100"), RACER, 0) is not None
    run.ask_to_stop("stopped by its user", ["100"])
    assert start(run, "100", monkeypatch) == 0
    assert [claim.number for claim in claims.all_of(run.claims)] == [0]
    assert run.state() == "stopped"


@pytest.mark.parametrize("moves", [True, False])
def test_a_job_that_was_asked_to_stop_says_nothing_of_a_run_that_others_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moves: bool
) -> None:
    run = make_run(tmp_path)
    assert take_claim(run, place_of("100" if moves else "101"), RACER, 0) is not None
    info = run.info()
    run.ask_to_stop("moves to 2x1" if moves else "stopped by its user", ["100"], moves=moves)
    assert start(run, "100", monkeypatch) == 0
    assert run.info() == info


def test_the_next_job_of_a_run_that_was_stopped_begins(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.ask_to_stop("stopped by its user", ["100"])
    assert not allocation.is_stopped(run, "101")
    assert allocation.is_stopped(run, "100")  # nobody has taken the word back


# --- Rivals -------------------------------------------------------------------------------------


def test_only_waiting_jobs_of_its_own_claim_or_an_older_one_are_cancelled(
    hold: Callable[..., Allocation], answers: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    held = hold()
    held.claim = Claim(number=1, job="100")
    jobs = {"98": 0, "99": 1, "100": 1, "101": 2}
    racers = {job: {"layout": "1x2", "claim": claim} for job, claim in jobs.items()}
    held.run.update_info(lambda info: info.update(racers=racers))
    held._cancel_rivals()
    assert answers.calls == [("scancel", "--state=PENDING", "98", "99")]


def test_rivals_that_are_recorded_later_and_a_deaf_controller_are_not_forgotten(
    hold: Callable[..., Allocation], answers: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = hold()
    slept: list[float] = []

    def add(job: str) -> None:
        record = {"layout": "1x2", "claim": 0}
        held.run.update_info(lambda info: info.setdefault("racers", {}).update({job: record}))

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 2:
            answers.said["scancel"] = ""
            add("102")

    add("101")
    answers.said["scancel"] = silence("scancel")
    monkeypatch.setattr(time, "sleep", sleep)
    held._cancel_rivals()
    assert [words[2:] for words in answers.calls] == [("101",), ("101",), ("101", "102")]
    assert slept[:3] == [1.0, 2.0, 4.0]
    assert max(slept) == 60.0


def test_rivals_that_have_left_the_queue_are_not_asked_for_again(
    hold: Callable[..., Allocation], answers: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    held = hold()
    racers = {"101": {"layout": "1x2", "claim": 0}}
    held.run.update_info(lambda info: info.update(racers=racers))
    answers.said["scancel"] = slurm.SlurmError("scancel", "Invalid job id specified")
    held._cancel_rivals()
    assert len(answers.calls) == 1


# --- What comes after ---------------------------------------------------------------------------


def ended(held: Allocation, *ends: dict[str, Any] | None) -> Prepared:
    """The attempt of this job, and how its ranks ended."""
    prepared = held._open()
    for rank, end in enumerate(ends):
        append_event(held.run.events(prepared.attempt, rank), "start", rank=rank, host="n7")
        if end is not None:
            append_event(held.run.events(prepared.attempt, rank), "end", **end)
    return prepared


STOPPED = {"state": "stopped", "exit": 75}
KILLED = {"state": "stopped", "exit": None, "signal": "SIGUSR2"}
FINISHED = {"state": "finished", "exit": 0}
FAILED = {"state": "failed", "exit": 1}


def test_a_finished_run_is_left_alone(hold: Callable[..., Allocation], answers: FakeSlurm) -> None:
    held = hold()
    assert held._what_next(ended(held, FINISHED, FINISHED), 0) == 0
    assert answers.calls == []
    assert held.run.state() == "finished"


def test_a_run_that_was_stopped_short_is_requeued(
    hold: Callable[..., Allocation], answers: FakeSlurm
) -> None:
    held = hold()
    assert held._what_next(ended(held, STOPPED, STOPPED), 0) == 0
    assert answers.of("scontrol") == [("scontrol", "requeue", "100")]
    assert answers.of("sbatch") == []
    assert held.run.state() == "queued"


def test_a_run_that_fails_while_it_is_being_stopped_says_what_failed(
    hold: Callable[..., Allocation],
) -> None:
    held = hold()
    prepared = ended(held, STOPPED, {"state": "failed", "exit": -9, "signal": "SIGKILL"})
    held.run.ask_to_stop("stopped by its user", ["100"])
    assert held._what_next(prepared, 0) == 0
    reason = "rank 1 was killed by SIGKILL; stopped by its user"
    assert held.run.info()["ended"] == {"state": "failed", "reason": reason}


def test_a_move_that_has_no_successor_goes_on_where_it_is(
    hold: Callable[..., Allocation], answers: FakeSlurm
) -> None:
    held = hold()
    held.run.ask_to_stop("moves to 2x1", ["100"], moves=True)
    assert held._what_next(ended(held, STOPPED, STOPPED), 0) == 0
    assert answers.of("scontrol") == [("scontrol", "requeue", "100")]


def test_a_limit_that_was_reached_while_saving_is_followed_by_another_job(
    hold: Callable[..., Allocation], answers: FakeSlurm
) -> None:
    held = hold()
    answers.said["squeue"] = "COMPLETING|TimeLimit"
    assert held._what_next(ended(held, STOPPED, STOPPED), 0) == 0
    assert answers.of("scontrol") == []  # SLURM does not requeue what is over
    assert len(answers.of("sbatch")) == 1
    assert held.run.info()["racers"]["500"]["after"] == "100"


def test_a_stop_reaches_the_job_that_goes_on(
    hold: Callable[..., Allocation], answers: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked of the first while it was sending the second, which nobody knew of."""
    held = hold()
    held._resubmit("continues")
    held.run.ask_to_stop("stopped by its user", ["100"])
    assert start(held.run, "500", monkeypatch) == 0
    assert [claim.job for claim in claims.all_of(held.run.claims)] == ["100"]
    assert held.run.info()["ended"] == {"state": "stopped", "reason": "stopped by its user"}


def test_a_successor_is_not_sent_twice_when_its_answer_got_lost(
    hold: Callable[..., Allocation], answers: FakeSlurm
) -> None:
    held = hold()
    script = held.run.path / submit.script_name(held.run, RACER)
    answers.said["squeue"] = f"499|/elsewhere\n501|{script}"
    assert held._resubmit("continues")
    assert answers.of("sbatch") == []
    assert held.run.info()["jobs"] == ["501"]


@pytest.mark.parametrize("values", [{}, {"command": "python train.py"}])
def test_ranks_that_never_begin_are_tried_in_two_jobs_and_no_more(
    hold: Callable[..., Allocation], answers: FakeSlurm, values: dict[str, Any]
) -> None:
    held = hold(**values)
    prepared = held._open()
    held.said.append("srun: error: Unable to create step")
    assert held._what_next(prepared, 1) == 0
    assert answers.of("scontrol") == [("scontrol", "requeue", "100")]
    prepared = held._open()
    assert held._what_next(prepared, 1) == 1
    assert answers.of("scontrol") == [("scontrol", "requeue", "100")]
    reason = "srun could not start the ranks, twice: srun: error: Unable to create step"
    assert held.run.info()["ended"] == {"state": "failed", "reason": reason}


def test_a_run_that_is_trained_outside_of_slurm_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path)
    with run.held():
        assert start(run, "100", monkeypatch) == 0
    assert claims.all_of(run.claims) == []
    assert f"is being trained by process {os.getpid()} on" in capsys.readouterr().out


def test_where_requeuing_is_refused_another_job_follows(
    hold: Callable[..., Allocation], answers: FakeSlurm
) -> None:
    held = hold()
    held.run.update_info(lambda info: info.update(failed_nodes={"n7": "lost"}))
    answers.said["scontrol"] = slurm.SlurmError(
        "scontrol", "Requested operation is presently disabled"
    )
    assert held._what_next(ended(held, STOPPED, STOPPED), 0) == 0
    ((_, _, script),) = answers.of("sbatch")
    text = Path(script).read_text()
    assert "#SBATCH --dependency=afterany:100\n" in text
    assert "#SBATCH --exclude=n7\n" in text
    assert "--racer 1x2 --claim 1\n" in text
    info = held.run.info()
    assert (info["jobs"], info["racers"]["500"]["claim"]) == (["500"], 1)
    assert info["racers"]["500"]["continues"] == "continues"
    assert held.run.state() == "queued"


@pytest.mark.parametrize("restarts", [0, 1])
@pytest.mark.parametrize("said", ["no answer: it was killed by signal 15", "Job is pending"])
def test_a_requeue_that_ended_its_own_scontrol_is_known_to_be_done(
    hold: Callable[..., Allocation],
    answers: FakeSlurm,
    monkeypatch: pytest.MonkeyPatch,
    said: str,
    restarts: int,
) -> None:
    held = hold()
    prepared = ended(held, STOPPED, STOPPED)

    shown = f"JobId=100 JobState=COMPLETING Requeue=1 Restarts={restarts} ExitCode=0:0"
    requeue = "scontrol requeue"
    answers.said |= {requeue: slurm.SlurmError("scontrol", said), "scontrol show": shown}
    monkeypatch.setattr(time, "sleep", lambda seconds: answers.said.pop(requeue))
    assert held._what_next(prepared, 0) == 0
    is_asked_again = not restarts and "no answer" in said
    is_refused = not restarts and not is_asked_again
    assert len([words for words in answers.calls if words[1] == "requeue"]) == 1 + is_asked_again
    assert len(answers.of("sbatch")) == is_refused
    assert held.run.state() == "queued"


def test_a_run_that_can_go_on_nowhere_says_so(
    hold: Callable[..., Allocation], answers: FakeSlurm
) -> None:
    held = hold()
    answers.said["scontrol"] = slurm.SlurmError("scontrol", "Access/permission denied")
    answers.said["sbatch"] = slurm.SlurmError("sbatch", "Invalid account")
    assert held._what_next(ended(held, STOPPED, STOPPED), 0) == 0
    assert held.run.state() == "failed"
    assert "neither requeued nor sent again" in held.run.info()["ended"]["reason"]


def test_a_run_that_its_user_stopped_stays_stopped(
    hold: Callable[..., Allocation], answers: FakeSlurm
) -> None:
    held = hold()
    prepared = ended(held, STOPPED, STOPPED)
    held.run.ask_to_stop("stopped by its user", ["100"])
    assert held._what_next(prepared, 0) == 0
    assert answers.calls == []
    assert held.run.info()["ended"] == {"state": "stopped", "reason": "stopped by its user"}


def test_a_run_that_moves_is_left_to_the_job_that_waits(
    hold: Callable[..., Allocation], answers: FakeSlurm
) -> None:
    held = hold()
    prepared = ended(held, STOPPED, STOPPED)
    held.run.ask_to_stop("moves to 2x1", ["100"], moves=True)
    submit.record_job(held.run, "101", Racer.parse("2x1"), 1)
    assert held._what_next(prepared, 0) == 0
    assert answers.calls == []
    assert "ended" not in held.run.info()


def test_a_request_to_earlier_jobs_does_not_stop_a_run(
    hold: Callable[..., Allocation], answers: FakeSlurm
) -> None:
    held = hold()
    prepared = ended(held, STOPPED, STOPPED)
    held.run.ask_to_stop("stopped by its user", ["98", "99"])
    assert held._what_next(prepared, 0) == 0
    assert answers.of("scontrol") == [("scontrol", "requeue", "100")]
    assert held.run.state() == "queued"


@pytest.mark.parametrize("state", ["COMPLETING", "PENDING", ""])
def test_a_job_that_slurm_is_ending_does_nothing_more(
    hold: Callable[..., Allocation], answers: FakeSlurm, state: str
) -> None:
    held = hold()
    answers.said["squeue"] = state
    assert held._what_next(ended(held, STOPPED, STOPPED), 0) == 0
    assert answers.of("scontrol") == answers.of("sbatch") == []


def test_a_run_whose_rank_failed_has_failed_with_those_that_it_silenced(
    hold: Callable[..., Allocation], answers: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    held = hold()
    prepared = ended(held, FAILED, None)
    held.relay.first_end = ("n1", "Exited with exit code 1")
    assert held._what_next(prepared, 1) == 1
    end = held.run.end(0, 1)
    assert end is not None and end["state"] == "failed"
    assert answers.of("scontrol") == answers.of("sbatch") == []
    assert "error: rank 0 ended with code 1" in capsys.readouterr().out


GONE = {"what": "Connection closed by peer", "fix": "", "echo": True}
ECHO = {**FAILED, "error": GONE}


@pytest.mark.parametrize(
    ("ends", "code", "first", "lost"),
    [
        ([None, None], -9, None, "srun was killed by SIGKILL on n1"),
        ([FINISHED, None], -9, None, "srun was killed by SIGKILL on n1"),
        ([ECHO, None], 137, ("n2", "Killed"), "the launcher on n2 was killed, with rank 1"),
        ([STOPPED, None], 137, None, "the launcher on n7 was killed, with rank 1"),
        # Of what a script makes of a lost peer, nothing is known: srun says who was first.
        ([FAILED, None], 137, ("n2", "Killed"), "the launcher on n2 was killed, with rank 1"),
    ],
)
@pytest.mark.parametrize("values", [{}, {"command": "python train.py"}])
def test_what_is_killed_besides_ranks_is_named_and_the_run_goes_on(
    hold: Callable[..., Allocation],
    answers: FakeSlurm,
    capsys: pytest.CaptureFixture[str],
    values: dict[str, Any],
    ends: list[dict[str, Any] | None],
    code: int,
    first: tuple[str, str] | None,
    lost: str,
) -> None:
    held = hold(**values)
    prepared, held.relay.first_end = ended(held, *ends), first
    assert held._what_next(prepared, code) == 0
    assert answers.of("scontrol") == [("scontrol", "requeue", "100")]
    said = capsys.readouterr().out
    assert f"attempt 0 is lost (srun: {code})\nallranks: {lost}\n" in said
    assert "failed" not in said
    job = run_state.QueuedJob(
        "100", "PENDING", "BeginTime", None, (), why=waiting_reason("BeginTime")
    )
    queue = run_state.Queue({"100": job})
    held.run.update_info(lambda info: info.update(jobs=["100"]))
    listed = run_state.describe(held.run, queue)
    assert listed["state"] == "queued"
    assert listed["reason"].startswith(f"attempt 0 was lost: {lost}; not before its begin time")
    assert run_state.lost_words(held.run) == f"attempt 0 was lost: {lost}"
    for attempt in (1, 2):
        append_event(held.run.events(attempt, 0), "start", rank=0)
    assert run_state.lost_words(held.run) is None  # long ago


def test_a_run_that_loses_its_launcher_again_and_again_gives_up_with_the_reason(
    hold: Callable[..., Allocation], answers: FakeSlurm
) -> None:
    held = hold()
    for _ in range(2):
        assert held._what_next(ended(held, None, None), -9) == 0
    held.place = place_of("100", restart=2)
    with pytest.raises(AllranksError) as error:
        held._check_progress()
    assert error.value.what == (
        "no progress in two attempts: no checkpoint was committed in either; "
        "attempt 1 was lost: srun was killed by SIGKILL on n1"
    )


@pytest.mark.parametrize(
    ("state", "first"), [("COMPLETING|None", None), ("RUNNING", ("", "Out Of Memory"))]
)
def test_what_slurm_ends_or_what_takes_too_much_memory_is_no_kill(
    hold: Callable[..., Allocation],
    answers: FakeSlurm,
    capsys: pytest.CaptureFixture[str],
    state: str,
    first: tuple[str, str] | None,
) -> None:
    held = hold()
    answers.said["squeue"], held.relay.first_end = state, first
    held._what_next(ended(held, None, None), 137)
    assert answers.of("scontrol") == answers.of("sbatch") == []
    assert "killed" not in capsys.readouterr().out
    assert "lost" not in held.run.info()


def test_a_lost_run_that_may_not_be_requeued_says_what_was_killed(
    hold: Callable[..., Allocation], answers: FakeSlurm
) -> None:
    held = hold(slurm={"requeue": False})
    assert held._what_next(ended(held, None, None), -9) == 1
    reason = "srun was killed by SIGKILL on n1, and slurm.requeue is false"
    assert held.run.info()["ended"] == {"state": "failed", "reason": reason}
    assert answers.of("scontrol") == []


def test_a_run_whose_srun_was_killed_after_all_ranks_had_ended_is_finished(
    hold: Callable[..., Allocation], answers: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    held = hold()
    assert held._what_next(ended(held, FINISHED, FINISHED), -9) == 0
    assert answers.calls == []
    said = capsys.readouterr().out
    assert "attempt 0 is finished (srun: -9)" in said and "state" in said


def test_who_lost_the_run_touches_nothing(
    hold: Callable[..., Allocation], answers: FakeSlurm
) -> None:
    held = hold()
    prepared = ended(held, STOPPED, None)
    assert take_claim(held.run, place_of("101"), RACER, 1) is not None
    with pytest.raises(AllranksError, match="lost the run to job 101"):
        held._what_next(prepared, 0)
    assert held.run.end(0, 1) is None
    assert answers.calls == []


def test_a_deaf_controller_does_not_end_a_run(
    hold: Callable[..., Allocation], answers: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = hold()
    monkeypatch.setattr(allocation, "job_state", lambda job: ("UNKNOWN", ""))
    assert held._what_next(ended(held, STOPPED, STOPPED), 0) == 0
    assert answers.of("scontrol") == [("scontrol", "requeue", "100")]


def test_another_job_is_sent_once_the_controller_answers(
    hold: Callable[..., Allocation], answers: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = hold()
    answers.said["sbatch"] = silence("sbatch")
    monkeypatch.setattr(time, "sleep", lambda seconds: answers.said.update(sbatch="500"))
    assert held._resubmit("continues")
    assert len(answers.of("sbatch")) == 2
    assert held.run.info()["jobs"] == ["500"]


@pytest.mark.parametrize("values", [{}, {"command": "python train.py"}])
def test_without_requeue_a_run_ends_at_its_limit(
    hold: Callable[..., Allocation], answers: FakeSlurm, values: dict[str, Any]
) -> None:
    held = hold(slurm={"requeue": False}, **values)
    assert held._what_next(ended(held, STOPPED, STOPPED), 0) == (1 if values else 0)
    assert answers.of("scontrol") == []
    assert "slurm.requeue is false" in held.run.info()["ended"]["reason"]
    assert held.run.state() == ("failed" if values else "stopped")


@pytest.mark.parametrize(
    ("ends", "age", "saved"),
    [
        ([STOPPED, STOPPED], None, True),  # it said so by its exit code
        ([STOPPED, {"state": "stopped", "exit": 0}], None, True),
        ([KILLED, STOPPED], None, False),
        ([KILLED, KILLED], -10, True),  # written since this job began
        ([KILLED, KILLED], 10, False),
    ],
)
def test_a_script_goes_on_if_it_has_saved(
    hold: Callable[..., Allocation],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ends: list[dict[str, Any]],
    age: float | None,
    saved: bool,
) -> None:
    monkeypatch.chdir(tmp_path)
    held = hold(command="python train.py", last="{run}-{ranks}.ckpt")
    last = Path(f"{held.run.name}-2.ckpt")
    if age is not None:
        last.touch()
        os.utime(last, (0, held.claim.time - age))
    prepared = ended(held, *ends)
    assert held._what_next(prepared, 0) == (0 if saved else 1)
    if not saved:
        assert held.run.info()["ended"]["reason"] == (
            "the script did not save when it was told to stop: "
            f"nothing new is at {held.run.name}-2.ckpt"
        )


def test_a_script_that_names_no_checkpoint_is_told_how(hold: Callable[..., Allocation]) -> None:
    held = hold(command="python train.py")
    prepared = ended(held, KILLED, KILLED)
    assert held._what_next(prepared, 0) == 1
    reason = held.run.info()["ended"]["reason"]
    assert reason.endswith("the job does not say where (last: PATH)")


# --- Steps that did not begin -------------------------------------------------------------------


class Steps:
    """In place of srun: for each step its code, and how its ranks end if they begin."""

    def __init__(self, run: RunDir, ends: Sequence[tuple[int, dict[str, Any] | None]]) -> None:
        self.run, self.ends, self.num_run = run, ends, 0

    def run_step(
        self,
        command: Sequence[str],
        *,
        attempt: int,
        variables: Mapping[str, str],
        judge: Callable[[], bool | None] = bool,
    ) -> int:
        assert command[0] == "srun"
        code, end = self.ends[min(self.num_run, len(self.ends) - 1)]
        self.num_run += 1
        for rank in range(2 if end else 0):
            append_event(self.run.events(attempt, rank), "start", rank=rank)
            append_event(self.run.events(attempt, rank), "end", **(end or {}))
        return code


ToEnd = Callable[..., tuple[int, int]]


@pytest.fixture
def to_end(monkeypatch: pytest.MonkeyPatch) -> ToEnd:
    """`to_end(held, *ends)`: the job's exit code, and how many steps it took."""

    def run(held: Allocation, *ends: tuple[int, dict[str, Any] | None]) -> tuple[int, int]:
        steps = Steps(held.run, ends)
        monkeypatch.setattr(signal, "signal", lambda number, handler: None)
        monkeypatch.setattr(held, "_cancel_rivals", lambda: None)
        monkeypatch.setattr(held.relay, "run_step", steps.run_step)
        return held.run_to_end(), steps.num_run

    return run


NOT_BEGUN = (1, None)


def test_a_step_that_ends_before_any_rank_began_is_tried_again(
    hold: Callable[..., Allocation], to_end: ToEnd, capsys: pytest.CaptureFixture[str]
) -> None:
    held = hold(preflight=False)
    assert to_end(held, NOT_BEGUN, (0, FINISHED)) == (0, 2)
    assert held.run.state() == "finished"
    assert (
        "srun ended with code 1 before any rank had begun: trying again" in capsys.readouterr().out
    )


def test_a_step_that_never_begins_is_tried_in_another_attempt(
    hold: Callable[..., Allocation], answers: FakeSlurm, to_end: ToEnd
) -> None:
    held = hold(preflight=False)
    assert to_end(held, NOT_BEGUN) == (0, STEP_TRIES)
    assert answers.of("scontrol") == [("scontrol", "requeue", "100")]
    assert held.run.state() == "queued"


def test_a_step_whose_ranks_failed_is_not_tried_again(
    hold: Callable[..., Allocation], answers: FakeSlurm, to_end: ToEnd
) -> None:
    held = hold(preflight=False)
    assert to_end(held, (1, FAILED)) == (1, 1)
    assert answers.of("scontrol") == answers.of("sbatch") == []
    assert held.run.state() == "failed"


@pytest.mark.parametrize("state", ["COMPLETING", "PENDING", ""])
def test_a_step_that_slurm_ended_is_not_tried_again(
    hold: Callable[..., Allocation], answers: FakeSlurm, to_end: ToEnd, state: str
) -> None:
    answers.said["squeue"] = state
    assert to_end(hold(preflight=False), NOT_BEGUN) == (0, 1)
    assert answers.of("scontrol") == answers.of("sbatch") == []


# --- Nodes that are checked by their launchers --------------------------------------------------


class CheckedSteps(Steps):
    """The first step's launchers check their node n1; `well`: and find no fault."""

    well = True

    def run_step(
        self,
        command: Sequence[str],
        *,
        attempt: int,
        variables: Mapping[str, str],
        judge: Callable[[], bool | None] = bool,
    ) -> int:
        check = read_attempt(Path(command[-1])).check
        if not check:
            return super().run_step(command, attempt=attempt, variables=variables)
        assert judge() is None and self.run.info().get("attempts") is None
        folder = Path(check[check.index("--folder") + 1])
        write = {"name": "write", "ok": self.well, "detail": "cannot write"}
        (folder / "n1.json").write_text(json.dumps({"checks": [write]}))
        (folder / ENDED).touch()
        if not judge():
            return -signal.SIGTERM
        assert (folder / OPEN).exists() and len(self.run.info()["attempts"]) == 1
        return super().run_step(command, attempt=attempt, variables=variables)


@pytest.fixture
def to_checked_end(to_end: ToEnd, monkeypatch: pytest.MonkeyPatch) -> ToEnd:
    monkeypatch.setitem(globals(), "Steps", CheckedSteps)
    return to_end


def test_launchers_check_their_nodes_and_start_ranks(
    hold: Callable[..., Allocation], to_checked_end: ToEnd, capsys: pytest.CaptureFixture[str]
) -> None:
    held = hold()
    assert to_checked_end(held, (0, FINISHED)) == (0, 1)
    info = held.run.info()
    assert (info["checked_nodes"], len(info["attempts"])) == (["n1"], 1)
    assert "preflight: 1 node checked in" in capsys.readouterr().out


def test_a_checked_step_that_does_not_begin_is_tried_again_without_checks(
    hold: Callable[..., Allocation], to_checked_end: ToEnd
) -> None:
    held = hold()
    assert to_checked_end(held, NOT_BEGUN, (0, FINISHED)) == (0, 2)
    assert len(held.run.info()["attempts"]) == 1


@pytest.mark.parametrize("failed", [{"n1": "cannot write"}, {}])
def test_what_launchers_find_wrong_is_checked_on_its_own(
    hold: Callable[..., Allocation],
    answers: FakeSlurm,
    to_checked_end: ToEnd,
    monkeypatch: pytest.MonkeyPatch,
    failed: dict[str, str],
) -> None:
    held = hold()
    monkeypatch.setattr(CheckedSteps, "well", False)
    verdict = Verdict(("n1",), failed)
    monkeypatch.setattr(held, "_check_nodes", lambda *, tries: verdict)
    assert to_checked_end(held, (0, FINISHED)) == (0, 0 if failed else 1)
    info = held.run.info()
    assert info.get("failed_nodes", {}) == failed
    assert len(info.get("attempts", [])) == (0 if failed else 1)
    assert len(answers.of("sbatch")) == (1 if failed else 0)


@pytest.mark.parametrize("end", [FAILED, STOPPED])
def test_a_job_is_not_judged_by_an_earlier_attempt(
    hold: Callable[..., Allocation], answers: FakeSlurm, end: dict[str, Any]
) -> None:
    held = hold()
    ended(held, end, end)
    prepared = held._open()
    assert held._what_next(prepared, 1) == 0
    assert answers.of("scontrol") == [("scontrol", "requeue", "100")]
    assert held.run.events(0, 0).read_text().count('"end"') == 1


# --- A run that is finished ---------------------------------------------------------------------


def test_a_finished_run_is_not_trained_again(
    hold: Callable[..., Allocation], to_end: ToEnd
) -> None:
    held = hold(preflight=False)
    ended(held, FINISHED, FINISHED)
    assert to_end(held, NOT_BEGUN) == (0, 0)
    layout = {"key": "layout", "before": "2x1", "now": "1x2"}
    held.run.update_info(lambda info: info.update(changes=[layout]))
    assert to_end(held, NOT_BEGUN) == (0, 0)


def test_a_finished_run_that_was_extended_trains(
    hold: Callable[..., Allocation], answers: FakeSlurm, to_end: ToEnd
) -> None:
    held = hold(preflight=False)
    ended(held, FINISHED, FINISHED)
    change = {"key": "epochs", "before": 20, "now": 40}
    held.run.update_info(lambda info: info.update(changes=[change]))
    assert to_end(held, NOT_BEGUN) == (0, STEP_TRIES)
    # Requeued, since no rank began: what it was sent for is still to be done.
    assert answers.of("scontrol") == [("scontrol", "requeue", "100")]
    assert to_end(held, (0, FINISHED)) == (0, 1)
    assert held.run.info()["attempts"][1]["changes"] == [change]
    assert to_end(held, (0, FINISHED)) == (0, 0)


# --- Progress and nodes -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("starts", "newest", "stuck"),
    [
        ([], None, False),
        ([None], None, False),
        ([None, None], None, True),
        ([None, None], "step-10", False),
        (["step-10", "step-10"], "step-10", True),
        (["step-10", "step-20"], "step-20", False),
        (["step-10", "step-10"], "step-20", False),
        ([None, "step-10", "step-10"], "step-10", True),
    ],
)
def test_two_attempts_from_the_same_checkpoint_are_no_progress(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    starts: list[str | None],
    newest: str | None,
    stuck: bool,
) -> None:
    run = make_run(tmp_path)
    attempts = [{"checkpoint": start} for start in starts]
    run.update_info(lambda info: info.update(attempts=attempts))
    monkeypatch.setattr(allranks.launch.prepare, "newest_checkpoint", lambda run: newest)
    assert no_progress(run, parse_job({})) is stuck


@pytest.mark.parametrize(
    ("starts", "newest", "stuck"),
    [
        ([None], None, False),
        ([None, None], None, True),
        ([None, None], 10.0, False),
        ([10.0, 10.0], 10.0, True),
        ([10.0, 20.0], 20.0, False),
        ([10.0, 10.0], 20.0, False),
    ],
)
def test_two_attempts_of_a_script_from_the_same_file_are_no_progress(
    tmp_path: Path, starts: list[float | None], newest: float | None, stuck: bool
) -> None:
    last = tmp_path / "2.ckpt"
    run = make_run(tmp_path, command="python train.py", last=f"{tmp_path}/{{ranks}}.ckpt")
    attempts = [{"checkpoint": None, "last_changed": start} for start in starts]
    run.update_info(lambda info: info.update(attempts=attempts))
    if newest is not None:
        last.touch()
        os.utime(last, (0, newest))
    assert no_progress(run, allranks.launch.prepare.load_resolved(run)) is stuck


def test_a_run_without_progress_stops_unless_somebody_asked_for_this_attempt(
    hold: Callable[..., Allocation],
) -> None:
    held = hold(restart=2)
    for _ in range(2):
        ended(held, STOPPED)
    with pytest.raises(AllranksError, match="no progress in two attempts"):
        held._check_progress()
    held.place = place_of("100", 0)
    held._check_progress()
    racers = {"100": {"layout": "1x2", "claim": 0, "continues": "continues"}}
    held.run.update_info(lambda info: info.update(racers=racers))
    with pytest.raises(AllranksError, match="no progress in two attempts"):
        held._check_progress()


@pytest.mark.parametrize("last", [None, "{run}.ckpt"])
def test_a_script_without_progress_stops_if_it_says_where_it_saves(
    hold: Callable[..., Allocation],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    last: str | None,
) -> None:
    monkeypatch.chdir(tmp_path)
    held = hold(restart=2, command="python train.py", **({"last": last} if last else {}))
    Path(f"{held.run.name}.ckpt").touch()
    for _ in range(2):
        held._check_progress()
        ended(held, STOPPED)
    if last is None:
        return held._check_progress()  # nobody can know
    with pytest.raises(AllranksError, match="no progress in two attempts"):
        held._check_progress()
    os.utime(f"{held.run.name}.ckpt", (0, 1))
    held._check_progress()


def test_attempts_are_bounded(hold: Callable[..., Allocation]) -> None:
    held = hold(slurm={"max_attempts": 2})
    for _ in range(2):
        held._check_progress()
        ended(held, STOPPED)
    with pytest.raises(AllranksError, match=r"2 attempts were made") as error:
        held._check_progress()
    assert "slurm.max_attempts=4" in error.value.fix


def test_a_node_that_failed_this_run_is_left(
    hold: Callable[..., Allocation], answers: FakeSlurm
) -> None:
    held = hold()
    assert not held._leave_failed_nodes()
    record_failed(held.run, {"n1": "lost"})
    assert held._leave_failed_nodes()
    ((_, _, script),) = answers.of("sbatch")
    assert "#SBATCH --exclude=n1\n" in Path(script).read_text()
    answers.said["sbatch"] = slurm.SlurmError(
        "sbatch", "Requested node configuration is not available"
    )
    assert not held._leave_failed_nodes()


def test_nodes_are_replaced_once(hold: Callable[..., Allocation], answers: FakeSlurm) -> None:
    held = hold()
    assert held._replace_nodes({"n1": "clock is off"}) is False
    assert held.run.info()["failed_nodes"] == {"n1": "clock is off"}
    with pytest.raises(AllranksError, match="a second time: n1: clock is off"):
        held._replace_nodes({"n1": "clock is off"})


@pytest.mark.parametrize(
    ("said", "nodes"),
    [
        ("srun: error: Node failure on node3\n", ["node3"]),
        ("srun: error: Node failure on n[1-2],m7\n", ["n1", "n2", "m7"]),
        ("x\nsrun: error: Node failure on a\nsrun: error: Node failure on b\n", ["a", "b"]),
        ("all is well on node3\n", []),
        ("rank 3: Node failure on purpose, said the script!\n", []),
        ("Node failure on [[\n", []),
        ("Node failure on \n", []),
        ("", []),
    ],
)
def test_nodes_that_srun_names_as_lost(said: str, nodes: list[str]) -> None:
    assert nodes_failed(said) == nodes


# --- Inside a job -------------------------------------------------------------------------------


def test_the_place_is_what_slurm_says() -> None:
    env = {
        "SLURM_JOB_ID": "17",
        "SLURM_RESTART_COUNT": "2",
        "SLURM_JOB_NODELIST": "n[01-02],m",
        "SLURM_JOB_CPUS_PER_NODE": "8(x2),4",
    }
    place = SlurmNodes.from_environment(env)
    assert place == SlurmNodes(job="17", restart=2, nodes=("n01", "n02", "m"), cpus_per_node=4)
    few = SlurmNodes.from_environment({"SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "n1"})
    assert (few.restart, few.cpus_per_node) == (0, 1)


def test_outside_of_a_job_there_is_no_place() -> None:
    with pytest.raises(AllranksError, match="only works inside a SLURM job") as error:
        SlurmNodes.from_environment({})
    assert "allranks submit" in error.value.fix


def test_a_port_follows_from_the_job_and_the_next_is_taken_if_it_is_busy() -> None:
    port = free_port("12345")
    assert FIRST_PORT <= port < FIRST_PORT + NUM_PORTS
    with socket.socket() as busy:
        busy.bind(("", port))
        busy.listen()
        other = free_port("12345")
        assert other != port
        assert FIRST_PORT <= other < FIRST_PORT + NUM_PORTS
    assert FIRST_PORT <= free_port("9" * 12, offset=NUM_PORTS) < FIRST_PORT + NUM_PORTS


def test_srun_finds_no_options_of_ours_in_the_environment() -> None:
    env = {"SLURM_NTASKS": "1", "SLURM_CPU_BIND": "x", "SRUN_DEBUG": "1", "SLURM_JOB_ID": "7"}
    assert step_environment(env) == {"SLURM_JOB_ID": "7"}


def test_the_state_of_a_job_is_asked_for_until_the_controller_answers(
    answers: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert job_state("100")[0] == "RUNNING"
    assert answers.calls == [("squeue", "-h", "-j", "100", "-o", "%T|%r")]
    answers.said["squeue"] = silence("squeue")
    monkeypatch.setattr(time, "sleep", lambda seconds: answers.said.update(squeue="PENDING\n"))
    assert job_state("100")[0] == "PENDING"
    answers.said["squeue"] = slurm.SlurmError("squeue", "Invalid job id specified")
    assert job_state("100")[0] == "GONE"
    answers.said["squeue"] = ""
    assert job_state("100")[0] == "GONE"
    answers.said["squeue"] = slurm.SlurmError("squeue", "Protocol authentication error")
    assert job_state("100")[0] == "UNKNOWN"  # which is no reason to let a run die
    answers.said["squeue"] = "COMPLETING|TimeLimit\n"
    assert job_state("100") == ("COMPLETING", "TimeLimit")


def test_the_state_of_a_job_is_unknown_when_the_controller_stays_silent(
    answers: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = iter(range(0, 100_000, 1000))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(now)))
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    answers.said["squeue"] = silence("squeue")
    assert job_state("100")[0] == "UNKNOWN"


def test_the_time_that_a_job_has_and_its_limit(answers: FakeSlurm) -> None:
    end = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + 90))
    answers.said["squeue"] = f"{end}|1-02:00:00\n"
    left, limit = time_to_limit("100")
    assert left is not None and 80 < left <= 91
    assert limit == 26 * 3600
    assert answers.calls == [("squeue", "-h", "-j", "100", "-o", "%e|%l")]
    for said in ("N/A|UNLIMITED\n", f"{end}|UNLIMITED\n", f"{end}\n", ""):
        answers.said["squeue"] = said
        assert time_to_limit("100") == (None, None)
    answers.said["squeue"] = silence("squeue")
    assert time_to_limit("100") == (None, None)


def test_a_silent_controller_is_asked_again_and_a_refusal_is_not(
    answers: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            answers.said["scontrol"] = "done"

    def ask() -> str:
        return while_silent(lambda: slurm.call("scontrol", "requeue", "100"))

    monkeypatch.setattr(time, "sleep", sleep)
    answers.said["scontrol"] = silence("scontrol")
    assert ask() == "done"
    assert slept == [1.0, 2.0, 4.0]
    answers.said["scontrol"] = slurm.SlurmError("scontrol", "Invalid job id specified")
    with pytest.raises(slurm.SlurmError, match="left the queue"):
        ask()
    assert len(slept) == 3


def test_an_attempt_in_another_layout_is_prepared_for_it(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    held = Allocation(run, place_of("100"), Racer.parse("2x1"), Claim(number=0, job="100"))
    assert str(held.job.layout) == "2x1"
    assert str(held._open().layout) == "2x1"
    assert str(prepare(Request(resume=str(run.path))).layout) == "2x1"
    assert [one["layout"] for one in run.info()["attempts"]] == ["2x1"]
