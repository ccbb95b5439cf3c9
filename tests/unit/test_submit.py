"""Runs in a queue: sent, raced, resumed, moved, stopped and listed, with SLURM's commands faked."""

from __future__ import annotations

import fcntl
import io
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.commandline import call_allranks
from tests.fake_slurm import DENIED, QOS, SENDING, FakeSlurm, silence

from allranks.bench.measure import Series
from allranks.bench.scaling import Repeat, repeat_of
from allranks.cli import cluster as cli_slurm
from allranks.errors import AllranksError
from allranks.launch import backends
from allranks.launch.backends import Options, Submitted
from allranks.launch.backends.slurm import jobs, submit
from allranks.launch.backends.slurm.sbatch import Racer, parse_race, racers_of
from allranks.launch.prepare import Request, hold_run, load_resolved, open_run, prepare
from allranks.launch.screen import show_runs
from allranks.run import claims, run_state
from allranks.run.claims import Claim
from allranks.run.events import append_event
from allranks.run.folder import RunDir
from allranks.slurm.commands import SlurmError


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeSlurm]:
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    cluster = FakeSlurm().install(monkeypatch)
    yield cluster
    cluster.let_go()


def send(*racers: str, overrides: list[str] | None = None) -> Submitted:
    layout = racers[0].partition("@")[0] if racers else None
    prepared = prepare(Request(overrides=overrides or [], layout=layout))
    return submit.submit(
        prepared, racers_of(prepared.job, parse_race(",".join(racers)) if racers else [])
    )


def again(run: RunDir, *racers: str, overrides: list[str] | None = None) -> Submitted:
    layout = racers[0].partition("@")[0] if racers else None
    request = Request(resume=str(run.path), layout=layout, overrides=overrides or [])
    options = Options(race=",".join(racers) or None)
    return jobs.move(jobs.check(request, options), options)


def begin(run: RunDir, slurm: FakeSlurm, job: str, layout: str, *, number: int = 0) -> None:
    """What a job does first: the claim, and an attempt with some steps."""
    slurm.change(job, state="RUNNING", reason="None", nodes="n[1-2]")
    assert claims.take(run.claims, Claim(number=number, job=job, layout=layout))
    slurm.hold(run, number)
    run.update_info(lambda info: info.update(queued=False))
    append_event(run.events(number, 0), "start", rank=0, steps=200, samples_per_epoch=1000)
    for step, ago in ((1, 0.5), (2, 0.0)):
        append_event(run.events(number, 0), "step", t=time.time() - ago, step=step, seconds=0.5)


def end(run: RunDir, slurm: FakeSlurm, job: str, state: str, *, number: int = 0) -> None:
    append_event(run.events(number, 0), "end", state=state, exit=0)
    slurm.change(job, state="COMPLETED")
    slurm.let_go()


def look(run: RunDir) -> dict[str, Any]:
    return run_state.describe(run, backends.look([run]))


# --- Sending ------------------------------------------------------------------------------------


def test_a_submitted_run_waits_with_everything_in_its_folder(slurm: FakeSlurm) -> None:
    done = send("1x2")
    run, info = done.run, done.run.info()
    assert done.jobs == info["jobs"] == ["100"]
    assert {path.name for path in run.path.iterdir() if not path.name.startswith(".")} == {
        *("job.yaml", "run.json", "submit.sbatch"),
    }
    assert (info["backend"], info["layout"], info["queued"]) == ("slurm", "1x2", True)
    assert info["cwd"] == os.getcwd()
    assert info["racers"]["100"]["layout"] == "1x2"
    assert info["racers"]["100"]["claim"] == 0
    assert str(load_resolved(run).layout) == "1x2"
    assert slurm.script("100") == (run.path / "submit.sbatch").read_text()
    assert f"allocation {run.path} --racer 1x2 --claim 0\n" in slurm.script("100")
    assert run.state() == look(run)["state"] == "queued"


def test_what_was_refused_was_never_queued_and_its_folder_says_so(slurm: FakeSlurm) -> None:
    slurm.said[SENDING] = QOS
    with pytest.raises(SlurmError, match="Invalid qos specification") as error:
        send("1x2", overrides=["slurm.qos=wrong"])
    assert "slurm.qos=" in error.value.fix
    assert "send it again with allranks resume " in error.value.fix
    (path,) = Path("runs").absolute().iterdir()
    run = RunDir(path)
    assert run.state() == look(run)["state"] == "failed"
    assert look(run)["reason"].startswith("never queued: sbatch: ")
    assert "Invalid qos specification" in look(run)["reason"]
    assert run.info()["jobs"] == []


def test_without_slurm_no_folder_is_made(slurm: FakeSlurm) -> None:
    slurm.said["sbatch"] = SlurmError("sbatch", "no such command")
    with pytest.raises(SlurmError, match="sbatch: no such command"):
        send("1x2")
    assert not Path("runs").exists()


def test_what_cannot_be_written_makes_no_folder(slurm: FakeSlurm) -> None:
    for wrong in (["slurm.directives.gres=x"], ["slurm.grace=1h", "slurm.time=1h"]):
        with pytest.raises(AllranksError):
            send("1x2", overrides=wrong)
    assert not Path("runs").exists()
    assert "--parsable" not in str(slurm.of("sbatch"))


def test_the_clusters_own_name_of_a_gpu_is_sent(slurm: FakeSlurm) -> None:
    slurm.said["sinfo"] = "gpu:a100_sxm4_80gb:4(S:0-1),nvme:1\ngpu:A40:8\n(null)"
    assert submit.gpu_types() == ["a100_sxm4_80gb", "A40"]
    send("1x2@a40", "1x2@a100_sxm4_80gb")
    assert "--gres=gpu:A40:2\n" in slurm.script("100")
    assert "--gres=gpu:a100_sxm4_80gb:2\n" in slurm.script("101")
    with pytest.raises(AllranksError, match="has no GPU of type v100; it has a100_sxm4_80gb, A40"):
        send("1x2@v100")


def test_a_cluster_that_does_not_name_its_gpus_is_believed(slurm: FakeSlurm) -> None:
    slurm.said["sinfo"] = silence("sinfo")
    assert submit.gpu_types() == []
    assert submit.resolve_type(Racer.parse("1x2@a40"), []) == Racer.parse("1x2@a40")


# --- Races --------------------------------------------------------------------------------------


def test_a_race_is_one_run_with_a_job_for_each_layout(slurm: FakeSlurm) -> None:
    done = send("1x4", "4x1@a40")
    assert done.jobs == ["100", "101"]
    assert [path.name for path in Path("runs").iterdir()] == [done.run.name]
    assert done.run.info()["layout"] == "1x4,4x1@a40"
    racers = done.run.info()["racers"]
    assert {job: racers[job]["layout"] for job in racers} == {"100": "1x4", "101": "4x1@a40"}
    assert {racers[job]["claim"] for job in racers} == {0}
    assert (done.run.path / "submit.sbatch").read_text() == slurm.script("100")
    assert (done.run.path / "submit-4x1@a40.sbatch").read_text() == slurm.script("101")
    assert "--racer 4x1@a40 --claim 0" in slurm.script("101")
    assert slurm.states() == {"100": "PENDING", "101": "PENDING"}


def test_a_racer_that_is_refused_does_not_stop_the_others(slurm: FakeSlurm) -> None:
    slurm.said[SENDING] = [QOS]
    done = send("1x4", "4x1")
    assert done.jobs == ["100"]
    assert done.remarks[0].startswith("1x4 was refused: sbatch: ")
    assert done.run.state() == "queued"
    assert "ended" not in done.run.info()


def test_a_racer_that_starts_while_others_are_sent_is_the_only_one(slurm: FakeSlurm) -> None:
    slurm.winners = {"101": "100"}
    done = send("1x4", "4x1", "2x2")
    assert done.jobs == ["100", "101"]
    assert done.remarks == ["2x2 was not sent: the run has started"]
    assert slurm.states() == {"100": "RUNNING", "101": "CANCELLED by 1000"}
    assert slurm.of("scancel") == [("scancel", "--state=PENDING", "101")]
    slurm.hold(done.run, 0)
    assert look(done.run)["state"] == "running"


def test_a_loser_does_not_put_a_run_back_into_the_queue(slurm: FakeSlurm) -> None:
    slurm.winners = {"101": "100"}
    run = send("1x4", "4x1").run
    # Job 100 started first and said so, before the record of 101 was written.
    run.update_info(lambda info: info.update(queued=False))
    submit.record_job(run, "101", Racer.parse("4x1"), 0)
    assert run.info()["queued"] is False
    submit.record_job(run, "102", Racer.parse("4x1"), 1)
    assert run.info()["queued"] is True


def test_a_racer_that_starts_at_once_needs_no_record_of_waiting(slurm: FakeSlurm) -> None:
    slurm.winners = {"100": "100"}
    run = send("1x4").run
    assert not run.info().get("queued")
    assert run.info()["jobs"] == ["100"]
    assert slurm.of("scancel") == []


def test_one_more_layout_for_a_run_that_waits(slurm: FakeSlurm) -> None:
    run = send("1x4").run
    done = jobs.race(run, "2x2")
    assert done.jobs == ["101"]
    assert run.info()["jobs"] == ["100", "101"]
    assert (run.path / "submit-2x2.sbatch").read_text() == slurm.script("101")


def test_one_more_layout_that_is_refused_leaves_the_run_waiting(slurm: FakeSlurm) -> None:
    run = send("1x4").run
    slurm.said[SENDING] = QOS
    with pytest.raises(SlurmError, match="Invalid qos"):
        jobs.race(run, "2x2")
    assert "ended" not in run.info()
    assert run.state() == look(run)["state"] == "queued"


def test_a_layout_races_once(slurm: FakeSlurm) -> None:
    run = send("1x4").run
    jobs.race(run, "2x2,1x4")
    assert len(slurm.jobs) == 2
    assert run.info()["layout"] == "1x4,2x2"
    with pytest.raises(AllranksError, match="is already waiting in layout 1x4 and 2x2"):
        jobs.race(run, "2x2")


def test_a_run_that_runs_takes_no_further_racer(slurm: FakeSlurm) -> None:
    run = send("1x4").run
    begin(run, slurm, "100", "1x4")
    end(run, slurm, "100", "finished")
    with pytest.raises(AllranksError, match="is not waiting in a queue: it is finished") as error:
        jobs.race(run, "2x2")
    assert f"allranks resume {run.name} --layout 2x2" in error.value.fix
    assert len(slurm.jobs) == 1


def test_a_run_that_starts_while_its_state_is_looked_at_is_not_robbed(
    slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = send("1x4").run

    def describe(run: RunDir, queue: run_state.Queue) -> dict[str, str]:
        assert claims.take(run.claims, Claim(number=0, job="100", layout="1x4"))
        return {"state": "queued"}

    monkeypatch.setattr(run_state, "describe", describe)
    done = jobs.race(run, "2x2")
    assert (done.jobs, done.remarks) == ([], ["2x2 was not sent: the run has started"])
    assert list(slurm.states()) == ["100"]


def test_a_racer_may_take_the_claim_that_its_sender_saw(slurm: FakeSlurm) -> None:
    run = send("1x4").run
    job = load_resolved(run)
    assert submit.send_all(job, [Racer.parse("2x2")], run, claim=0).jobs == ["101"]
    assert "--racer 2x2 --claim 0\n" in slurm.script("101")
    assert claims.take(run.claims, Claim(number=0, job="100"))
    assert submit.send_all(job, [Racer.parse("4x1")], run, claim=0).jobs == []
    assert submit.send(job, Racer.parse("4x1"), run, claim=1) == "102"
    assert "--racer 4x1 --claim 1\n" in slurm.script("102")


# --- Going on -----------------------------------------------------------------------------------


def test_a_stopped_run_goes_on_as_its_next_claim(slurm: FakeSlurm) -> None:
    run = send("1x2").run
    begin(run, slurm, "100", "1x2")
    backends.stop([run])
    end(run, slurm, "100", "stopped")
    assert look(run)["state"] == "stopped"
    done = again(run, "2x1")
    assert done.jobs == ["101"]
    assert run.info()["jobs"] == ["100", "101"]
    assert run.info()["racers"]["101"]["claim"] == 1
    assert "--racer 2x1 --claim 1" in slurm.script("101")
    assert "--dependency" not in slurm.script("101")
    assert run.asked_to_stop("100") is not None  # it may still be requeued
    assert run.asked_to_stop("101") is None
    assert str(load_resolved(run).layout) == "2x1"
    assert "no committed checkpoint yet: starting at step 0" in done.remarks
    assert look(run)["state"] == "queued"


def test_a_resumption_that_is_refused_changes_nothing(slurm: FakeSlurm) -> None:
    run = send("1x2").run
    begin(run, slurm, "100", "1x2")
    end(run, slurm, "100", "stopped")
    before, info = run.job_file.read_text(), run.info()
    slurm.said[SENDING] = QOS
    with pytest.raises(SlurmError):
        again(run, "2x1", overrides=["slurm.qos=wrong"])
    assert run.job_file.read_text() == before
    assert run.info() == {**info, "changes": []}
    assert look(run)["state"] == "stopped"


def test_a_run_that_another_resumption_has_started_is_left_to_it(
    slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = send("1x2").run
    begin(run, slurm, "100", "1x2")
    end(run, slurm, "100", "stopped")
    before, info = run.job_file.read_text(), run.info()
    found = backends.look([run])

    def look_slowly(runs: list[RunDir]) -> run_state.Queue:
        claims.take(run.claims, Claim(number=1, job="101", layout="1x2"))
        return found

    monkeypatch.setattr(jobs, "look", look_slowly)
    with pytest.raises(AllranksError, match="has just started"):
        again(run, "2x1", overrides=["epochs=40"])
    assert list(slurm.states()) == ["100"]
    assert run.job_file.read_text() == before
    assert run.info() == {**info, "changes": []}


def test_what_was_changed_for_a_job_that_never_started_still_holds(slurm: FakeSlurm) -> None:
    run = send("1x2").run
    begin(run, slurm, "100", "1x2")
    end(run, slurm, "100", "finished")
    assert again(run, overrides=["epochs=40"]).jobs == ["101"]
    (change,) = run.info()["changes"]
    assert change["key"] == "epochs"
    slurm.change("101", state="CANCELLED by 1000")
    slurm.said[SENDING] = QOS
    with pytest.raises(SlurmError):
        again(run)
    assert run.info()["changes"] == [change]
    slurm.said.clear()
    assert again(run, "2x1").jobs == ["102"]
    assert [one["key"] for one in run.info()["changes"]] == ["epochs", "layout"]
    request = Request(resume=str(run.path), layout="4x1", leads=False, force=True)
    open_run(prepare(request), backend="slurm")
    opened = run.info()["attempts"][-1]["changes"]
    assert [one["key"] for one in opened] == ["epochs", "layout", "layout"]
    assert "changes" not in run.info()


def test_a_run_that_waits_is_not_resumed(slurm: FakeSlurm) -> None:
    run = send("1x2").run
    with pytest.raises(
        AllranksError, match=r"is already waiting in the queue \(job 100\)"
    ) as error:
        again(run, "2x1")
    assert f"allranks race {run.name}" in error.value.fix
    assert len(slurm.jobs) == 1


def test_a_finished_run_is_reported_again(slurm: FakeSlurm) -> None:
    run = send("1x2").run
    begin(run, slurm, "100", "1x2")
    end(run, slurm, "100", "finished")
    done = again(run, "2x1")
    assert (done.jobs, done.remarks) == ([], [f"run {run.name} has already finished"])
    assert again(run, overrides=["epochs=40"]).jobs == ["101"]


def test_the_grace_time_grows_with_the_checkpoints_that_were_measured(slurm: FakeSlurm) -> None:
    run = send("1x2", overrides=["slurm.time=1h"]).run
    assert "--signal=B:USR2@120\n" in slurm.script("100")
    begin(run, slurm, "100", "1x2")
    for seconds in (70, 80, 500):
        append_event(run.events(0, 0), "checkpoint", step=1, seconds=seconds)
    end(run, slurm, "100", "stopped")
    again(run, "1x2")
    assert "--signal=B:USR2@240\n" in slurm.script("101")


# --- Moving -------------------------------------------------------------------------------------


def test_a_running_run_moves_when_the_new_job_is_in_the_queue(slurm: FakeSlurm) -> None:
    run = send("1x2").run
    begin(run, slurm, "100", "1x2")
    done = again(run, "2x1")
    assert done.jobs == ["101"]
    assert "#SBATCH --dependency=afterany:100\n" in slurm.script("101")
    assert "--racer 2x1 --claim 1" in slurm.script("101")
    last = [call for call in slurm.of("sbatch", "scancel") if call[1] != "--version"][-2:]
    assert last[0][:2] == ("sbatch", "--parsable")
    assert last[1] == ("scancel", "--batch", "--signal=USR2", "100")
    word = {"why": "moves to 2x1 (job 101)", "jobs": ["100"], "moves": True}
    assert run.asked_to_stop("100") == word
    assert run.asked_to_stop("101") is None
    assert done.remarks == ["job 100 saves a checkpoint and ends first"]
    assert look(run)["state"] == "running"
    assert look(run)["reason"] == "moves to 2x1 (job 101) after a checkpoint"


def test_a_move_that_is_refused_leaves_the_running_job_alone(slurm: FakeSlurm) -> None:
    run = send("1x2").run
    begin(run, slurm, "100", "1x2")
    before, info = run.job_file.read_text(), run.info()
    slurm.said[SENDING] = QOS
    with pytest.raises(SlurmError):
        again(run, "2x1")
    assert slurm.of("scancel") == []
    assert run.asked_to_stop("100") is None
    assert run.job_file.read_text() == before
    assert run.info() == {**info, "changes": []}
    assert look(run)["state"] == "running"


def test_a_running_job_that_begins_anew_while_it_is_to_be_moved_is_left_alone(
    slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = send("1x2").run
    begin(run, slurm, "100", "1x2")
    found = backends.look([run])

    def look_slowly(runs: list[RunDir]) -> run_state.Queue:
        claims.take(run.claims, Claim(number=1, job="100", restart=1, layout="1x2"))
        slurm.hold(run, 1)
        return found

    monkeypatch.setattr(jobs, "look", look_slowly)
    with pytest.raises(AllranksError, match="has just started"):
        again(run, "2x1")
    assert run.asked_to_stop("100") is None  # nobody would go on with it
    assert slurm.of("scancel") == []
    assert str(load_resolved(run).layout) == "1x2"


def test_of_several_running_jobs_the_holder_is_signalled_and_followed(slurm: FakeSlurm) -> None:
    run = send("1x2", "2x1").run
    begin(run, slurm, "101", "2x1")
    slurm.change("100", state="COMPLETING")  # a racer that lost, and ends
    assert again(run, "4x1").jobs == ["102"]
    assert "#SBATCH --dependency=afterany:101\n" in slurm.script("102")
    assert slurm.of("scancel") == [("scancel", "--batch", "--signal=USR2", "101")]
    assert run.asked_to_stop("100") is not None
    assert run.asked_to_stop("101") is not None


def test_a_move_to_where_it_is_is_refused(slurm: FakeSlurm) -> None:
    run = send("1x2").run
    begin(run, slurm, "100", "1x2")
    with pytest.raises(AllranksError, match="is running in layout 1x2"):
        again(run, "1x2")
    assert slurm.of("scancel") == []


def test_nothing_is_moved_while_the_controller_is_silent(slurm: FakeSlurm) -> None:
    run = send("1x2").run
    slurm.said["squeue"] = silence("squeue")
    with pytest.raises(AllranksError, match="did not answer"):
        again(run, "2x1")
    with pytest.raises(AllranksError, match="did not answer"):
        backends.stop([run])
    assert look(run)["state"] == "queued"
    assert look(run)["reason"].startswith("SLURM does not answer: squeue: ")


# --- Stopping -----------------------------------------------------------------------------------


def test_a_run_that_waits_is_taken_out_of_the_queue(slurm: FakeSlurm) -> None:
    run = send("1x4", "4x1").run
    assert backends.stop([run]) == [{"run": run.name, "done": "taken out of the queue"}]
    assert slurm.of("scancel") == [("scancel", "100", "101")]
    assert run.state() == look(run)["state"] == "stopped"
    assert look(run)["reason"] == "stopped by its user before it started"
    assert backends.stop([run]) == [{"run": run.name, "done": "already stopped"}]


def test_a_running_run_saves_first(slurm: FakeSlurm) -> None:
    run = send("1x2").run
    begin(run, slurm, "100", "1x2")
    assert backends.stop([run])[0]["done"] == "saves a checkpoint and stops"
    assert slurm.of("scancel") == [("scancel", "--batch", "--signal=USR2", "100")]
    word = {"why": "stopped by its user", "jobs": ["100"], "moves": False}
    assert run.asked_to_stop("100") == word
    assert (look(run)["state"], look(run)["reason"]) == ("running", "was asked to stop")


def test_a_script_is_not_said_to_save_anything(slurm: FakeSlurm) -> None:
    prepared = prepare(Request(command=["python", "train.py"], layout="1x2"))
    run = submit.submit(prepared, racers_of(prepared.job, [])).run
    begin(run, slurm, "100", "1x2")
    assert backends.stop([run])[0]["done"] == "its script was asked to stop"
    end(run, slurm, "100", "CANCELLED")
    (remark,) = again(run).remarks
    assert remark.startswith("the script starts from its beginning")


def test_a_stopped_run_whose_script_is_sent_by_hand_is_not_stopped(slurm: FakeSlurm) -> None:
    run = send("1x2").run
    backends.stop([run])
    slurm.jobs["555"] = {**slurm.jobs["100"], "state": "RUNNING"}
    claims.take(run.claims, Claim(number=0, job="555", layout="1x2"))
    submit.record_job(run, "555", Racer.parse("1x2"), 0)
    assert look(run)["state"] == "running"


def test_runs_that_were_on_this_machine_are_slurms_once_a_job_is_sent(slurm: FakeSlurm) -> None:
    """Or `stop` would not find the job, and `run --resume` would train beside it."""
    prepared = prepare(Request(layout="1x2"))
    run = open_run(prepared)
    run.update_info(lambda info: info.update(jobs=[]))
    assert again(run).jobs == ["100"]
    assert run.info()["backend"] == "slurm"
    slurm.change("100", state="RUNNING")
    claims.take(run.claims, Claim(number=0, job="100", layout="1x2"))
    with ExitStack() as held, pytest.raises(AllranksError, match="is being trained by job 100"):
        hold_run(prepare(Request(resume=str(run.path))), held)
    slurm.change("100", state="PENDING")
    with ExitStack() as held:
        taken = hold_run(prepare(Request(resume=str(run.path))), held)
        assert taken.claim == 1  # job 100 will find the run taken
        assert run.is_held
    assert not run.is_held
    assert backends.stop([run])[0]["done"] == "taken out of the queue"


def test_a_job_whose_answer_got_lost_is_found(slurm: FakeSlurm) -> None:
    slurm.loses_answers = True
    run = send("1x2").run
    assert run.info()["jobs"] == ["100"]
    assert look(run)["state"] == "queued"


def test_all_runs_are_stopped_but_the_one_that_cannot_be(slurm: FakeSlurm) -> None:
    run, other = send("1x1").run, send("1x1").run
    run.update_info(lambda info: info.update(backend="local"))
    (run.path / ".lock").write_text("process 1 on elsewhere")
    with (run.path / ".lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = [one["done"] for one in backends.stop([run, other])]
    assert done == [
        f"could not be stopped: run {run.name} is on elsewhere, not on this machine",
        "taken out of the queue",
    ]


def test_a_job_in_a_state_that_nobody_has_heard_of_waits(slurm: FakeSlurm) -> None:
    run = send("1x2").run
    slurm.change("100", state="RESV_DEL_HOLD")
    assert look(run)["state"] == "queued"
    assert backends.stop([run])[0]["done"] == "taken out of the queue"
    assert slurm.states()["100"].startswith("CANCELLED")


def test_the_reasons_of_losers_are_not_the_runs(slurm: FakeSlurm) -> None:
    run = send("1x2", "2x1").run
    begin(run, slurm, "100", "1x2")
    slurm.change("101", state="CANCELLED by 1000")
    end(run, slurm, "100", "failed")
    slurm.change("100", state="OUT_OF_MEMORY")
    assert "cancelled" not in look(run)["reason"]


def test_a_run_that_slurm_has_requeued_takes_another_racer(slurm: FakeSlurm) -> None:
    run = send("1x2").run
    begin(run, slurm, "100", "1x2")
    slurm.let_go()
    slurm.change("100", state="PENDING")
    assert jobs.race(run, "2x1").jobs == ["101"]


def test_of_several_running_jobs_the_one_that_trains_is_told(slurm: FakeSlurm) -> None:
    run = send("1x2", "2x1").run
    begin(run, slurm, "100", "1x2")
    slurm.change("101", state="RUNNING")  # has just started, and will find the run taken
    backends.stop([run])
    assert slurm.of("scancel") == [("scancel", "--batch", "--signal=USR2", "100")]
    assert jobs.holder_of(run, ["100", "101"]) == "100"
    assert jobs.holder_of(run, ["101"]) == "101"  # no claim: it has none yet


def test_one_run_that_cannot_be_stopped_does_not_keep_the_others(slurm: FakeSlurm) -> None:
    runs = [send("1x1").run for _ in range(3)]
    slurm.said["scancel"] = [None, DENIED]
    done = [one["done"] for one in backends.stop(runs)]
    assert done[0] == done[2] == "taken out of the queue"
    assert done[1].startswith("could not be stopped: scancel: ")
    assert list(slurm.states().values()) == ["CANCELLED by 1000", "PENDING", "CANCELLED by 1000"]
    slurm.said["scancel"] = DENIED
    with pytest.raises(SlurmError):
        backends.stop([runs[1]])


def test_a_running_run_is_stopped_at_once_if_that_is_asked(slurm: FakeSlurm) -> None:
    run = send("1x2").run
    begin(run, slurm, "100", "1x2")
    assert backends.stop([run], now=True)[0]["done"] == "stopped at once"
    assert slurm.of("scancel") == [("scancel", "100")]
    slurm.let_go()
    assert look(run)["state"] == "stopped"


def test_a_job_that_was_cancelled_by_hand_waits_no_more(slurm: FakeSlurm) -> None:
    run = send("1x2").run
    slurm.change("100", state="CANCELLED by 0")
    assert look(run)["state"] == "failed"
    assert look(run)["reason"] == "cancelled by root (the administrators or SLURM)"
    assert backends.stop([run])[0]["done"] == "already failed"


# --- Following ----------------------------------------------------------------------------------

KEYS = ["run", "run_dir", "state", "layout", "jobs", "reason", "step", "steps", "seconds_left"]


def test_a_list_has_the_promised_keys_in_their_order(slurm: FakeSlurm) -> None:
    run = send("1x4", "2x2").run
    slurm.change("101", reason="Resources", start="2026-11-16T08:00:00")
    slurm.change("100", start="2026-11-16T09:00:00")
    found = look(run)
    assert list(found)[: len(KEYS)] == KEYS
    assert found["run_dir"] == str(run.path)
    assert found["layout"] == "1x4,2x2"
    assert found["jobs"] == ["100", "101"]
    assert found["expected_start"] == "2026-11-16T08:00:00"
    assert found["reason"] == (
        "jobs with a higher priority come first; "
        "next in line: waits for nodes or GPUs to become free"
    )
    assert found["step"] is found["steps"] is found["seconds_left"] is None


def test_a_running_run_has_its_winners_layout_and_its_progress(slurm: FakeSlurm) -> None:
    run = send("1x4", "2x2").run
    begin(run, slurm, "101", "2x2")
    found = look(run)
    assert (found["state"], found["layout"], found["jobs"]) == ("running", "2x2", ["101"])
    assert (found["step"], found["steps"]) == (2, 200)
    assert found["seconds_left"] == pytest.approx(99.0, rel=0.01)  # of 198 steps
    assert found["nodes"] == ["n1", "n2"]
    assert found["reason"] is None


@pytest.mark.parametrize(
    ("state", "code", "reason"),
    [
        ("TIMEOUT", "0:0", "reached its time limit"),
        ("OUT_OF_MEMORY", "0:125", "ran out of the node's memory"),
        ("NODE_FAIL", "1:0", "a node failed"),
        ("CANCELLED by 1000", "0:15", "cancelled by user 1000"),
        ("FAILED", "127:0", "its command was not found"),
    ],
)
def test_the_end_of_a_job_in_words(slurm: FakeSlurm, state: str, code: str, reason: str) -> None:
    run = send("1x2").run
    slurm.change("100", state=state, code=code)
    assert look(run)["state"] == "failed"
    assert reason in look(run)["reason"]


def test_all_runs_are_one_question_each_to_squeue_and_sacct(slurm: FakeSlurm) -> None:
    runs = [send("1x1").run for _ in range(3)]
    slurm.change("101", state="FAILED", code="1:0")
    slurm.change("102", state="TIMEOUT")
    before = len(slurm.calls)
    backends.look(runs)
    asked = slurm.calls[before:]
    assert [call[0] for call in asked] == ["squeue", "sacct"]
    assert asked[0][1:4] == ("-h", "-u", str(os.getuid()))
    assert "101,102" in asked[1]


def test_runs_of_this_machine_alone_ask_slurm_nothing(slurm: FakeSlurm) -> None:
    run = RunDir(Path("runs/job-20261115-120000-aaaa"))
    run.path.mkdir(parents=True)
    run.write_info({"run": run.name, "backend": "local", "jobs": []})
    assert look(run)["state"] == "failed"
    assert slurm.calls == []


def test_a_layout_that_would_start_earlier_is_suggested(slurm: FakeSlurm) -> None:
    run = send("1x4").run
    slurm.change("100", start="2026-11-16T09:00:00")
    slurm.starts = {"1": "2026-11-15T01:00:00", "2": "2026-11-16T08:00:00", "4": "2026-11-17"}
    (line,) = submit.suggest_racers(run, look(run))
    assert line.startswith("2x2 would start at 2026-11-16T08:00:00: allranks race ")
    assert [path.name for path in run.path.glob(".test-*")] == []


@pytest.mark.parametrize("width", [60, 100])
def test_a_list_is_whole_at_any_width(slurm: FakeSlurm, width: int) -> None:
    runs = [send("1x4", "4x1").run for _ in range(2)]
    console = Console(width=width, file=io.StringIO(), color_system=None, force_terminal=True)
    show_runs(console, console, [look(run) for run in runs], [])
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]  # a StringIO
    for run, sent in zip(runs, ("100,101", "102,103"), strict=True):
        (named, *_) = [number for number, line in enumerate(lines) if line.startswith(run.name)]
        assert sent in "".join(lines[named : named + 2])


def test_a_list_in_a_pipe_is_one_line_a_run_with_the_same_columns(slurm: FakeSlurm) -> None:
    def listed(runs: list[RunDir]) -> list[list[str]]:
        console = Console(width=40, file=io.StringIO())
        aside = Console(file=io.StringIO())
        show_runs(console, aside, [look(run) for run in runs], ["try this"])
        assert "try this" in aside.file.getvalue()  # type: ignore[attr-defined]  # a StringIO
        lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
        return [re.split("  +", line) for line in lines]

    head = ["run", "state", "layout", "job", "step", "left", "why"]
    assert listed([]) == [head]
    runs = [send("1x4", "4x1").run, send("1x1").run]
    assert [row[:2] for row in listed(runs)] == [head[:2], *([run.name, "queued"] for run in runs)]
    begin(runs[1], slurm, "102", "1x1")
    rows = listed(runs)
    assert rows[0] == head and [len(row) for row in rows] == [len(head)] * 3
    assert rows[2][1:5] == ["running", "1x1", "102", "2/200"] and rows[2][-1] == "-"


# --- The command line ---------------------------------------------------------------------------


def typed(*args: str) -> subprocess.CompletedProcess[str]:
    return call_allranks(*args, cwd=Path.cwd())


def answer(*args: str) -> Any:
    done = typed(*args, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


def test_the_commands_and_their_json(slurm: FakeSlurm) -> None:
    sent = answer("submit", "--layout", "1x2")
    assert list(sent) == ["run", "run_dir", "jobs"]
    assert sent["jobs"] == ["100"]
    assert answer("race", "last", "2x1")["jobs"] == ["101"]
    (listed,) = answer("ls")
    assert set(KEYS) <= set(listed)
    assert listed["run"] == sent["run"]
    slurm.starts = {"1": "2026-11-15T01:00:00"}
    assert f"allranks race {sent['run']}" not in typed("ls", "last").stdout  # it waits in 1x2
    (stopped,) = answer("stop", "--all")
    assert stopped == {"run": sent["run"], "done": "taken out of the queue"}
    assert answer("resume", "last", "--layout", "4x1")["jobs"] == ["102"]


def test_a_dry_run_writes_nothing_and_prints_what_would_be_sent(slurm: FakeSlurm) -> None:
    args = ["submit", "--race", "1x4,4x1", "slurm.time=1h", "pipeline.micro_batches=2", "--dry-run"]
    shown = answer(*args)
    assert list(shown["table"]) == list(shown["scripts"]) == ["1x4", "4x1"]
    assert shown["table"]["4x1"]["nodes"] == 4
    assert "#SBATCH --nodes=4\n" in shown["scripts"]["4x1"]
    done = typed(*args)
    printed = done.stdout
    assert "note: pipeline.micro_batches has no effect on layout 4x1" in done.stderr
    assert printed.splitlines()[0].split() == ["layout", "1x4", "4x1"]
    for script in shown["scripts"].values():
        assert script in printed
    assert list(Path.cwd().iterdir()) == []
    assert slurm.of("sbatch") == []


def test_a_users_own_script_is_sent_as_it_is(slurm: FakeSlurm) -> None:
    done = typed("submit", "--layout", "1x2", "--json", "--", "python", "a.py", "--name", "a b")
    run = RunDir(Path(json.loads(done.stdout)["run_dir"]))
    assert load_resolved(run).argv == ["python", "a.py", "--name", "a b"]


def test_a_refusal_is_an_error_in_json_with_exit_code_1(slurm: FakeSlurm) -> None:
    slurm.said[SENDING] = QOS
    done = typed("submit", "--json")
    assert done.returncode == 1
    error = json.loads(done.stdout)["error"]
    assert "Invalid qos specification" in error["what"]
    assert "slurm.qos=" in error["fix"]


def test_logs_of_a_run_that_waits_say_so_and_end_with_json(
    slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = send("1x2").run

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", interrupt)
    done = typed("logs", run.name, "-f", "--json")
    assert done.stderr.startswith(f"{run.name} waits: ")
    assert json.loads(done.stdout) == {"run": run.name, "lines": []}
    assert done.returncode == 130
    for rank in ("2", "-2"):
        done = typed("logs", run.name, "-f", "--rank", rank)
        assert done.returncode == 2 and "rank" in done.stderr


def test_what_is_wrong_with_a_race_is_said_of_the_race(slurm: FakeSlurm) -> None:
    done = typed("submit", "--race", "nonsense")
    assert done.returncode == 2 and 'layout "nonsense"' in done.stderr
    assert "--layout" not in done.stderr
    run = send("1x2").run
    backends.stop([run])
    with pytest.raises(AllranksError, match="it is stopped") as refusal:
        jobs.race(run, "2x1")
    assert refusal.value.fix.startswith("continue it: allranks resume")


def test_stop_needs_to_know_what(slurm: FakeSlurm) -> None:
    for args in (["stop"], ["stop", "last", "--all"]):
        assert typed(*args).returncode == 2


WATCHED = """
import json, sys
from contextlib import suppress
from unittest import mock
from tests.fake_slurm import FakeSlurm
from allranks.cli.main import main

class Patch:
    setattr = staticmethod(setattr)

slurm = FakeSlurm().install(Patch)
for words in json.loads(sys.argv[1]):
    sys.argv[1:] = words
    with suppress(SystemExit):
        main()
    heavy = {"torch", "sklearn"} & set(sys.modules)
    print("\\nHEAVY" if heavy else "\\nLIGHT", words[0], file=sys.stderr)
print(json.dumps(slurm.states()), file=sys.stderr)
"""


def test_no_command_of_a_login_node_imports_torch(tmp_path: Path) -> None:
    commands = [
        ["submit", "--layout", "1x2"],
        ["submit", "--dry-run"],
        ["race", "last", "2x1"],
        ["ls"],
        ["ls", "last"],
        ["logs", "last"],
        ["stop", "last"],
        ["resume", "last", "--layout", "1x4"],
        ["cluster"],
        ["cluster", "--queue"],
    ]
    done = subprocess.run(
        [sys.executable, "-c", WATCHED, json.dumps(commands)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    seen = [line.split() for line in done.stderr.splitlines() if line[:5] in ("HEAVY", "LIGHT")]
    assert seen == [["LIGHT", words[0]] for words in commands], done.stderr
    cancelled = "CANCELLED by 1000"
    states = json.loads(done.stderr.splitlines()[-1])
    assert states == {"100": cancelled, "101": cancelled, "102": "PENDING"}


# --- Benchmarks in the queue --------------------------------------------------------------------


def bench(monkeypatch: pytest.MonkeyPatch, *layouts: str) -> list[Repeat]:
    """Runs of these layouts, sent by bench scaling; a Ctrl-C when all are in the queue."""

    def interrupt(run: RunDir, queue: run_state.Queue) -> dict[str, Any]:
        raise KeyboardInterrupt

    prepared = [prepare(Request(overrides=["task=spiral"], layout=layout)) for layout in layouts]
    monkeypatch.setattr(run_state, "describe", interrupt)
    planned = list(zip(layouts, prepared, strict=True))
    series = Series(planned, Console(file=io.StringIO()), {"kind": "scaling"})
    done = series.in_queue(backends.named("slurm"), repeat_of, "1x1")
    assert series.is_interrupted
    return done


def test_the_runs_of_a_benchmark_wait_for_each_other(
    slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench(monkeypatch, "1x1", "1x2", "1x1")
    scripts = [slurm.script(job) for job in ("100", "101", "102")]
    after = [re.findall("--dependency=(.*)", script) for script in scripts]
    assert after == [[], ["afterany:100"], ["afterany:101"]]
    # A task stops when it was measured: to go on with it would measure it for ever.
    assert all("#SBATCH --no-requeue\n" in script for script in scripts)


def test_a_benchmark_that_is_refused_takes_back_what_it_has_sent(
    slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm.said[SENDING] = [None, None, QOS]
    with pytest.raises(AllranksError, match=r"2x2: .*Invalid qos") as refusal:
        bench(monkeypatch, "1x1", "1x2", "2x2", "1x1")
    runs = [RunDir(path) for path in sorted(Path("runs").absolute().iterdir())]
    sent = [run for run in runs if run.info()["jobs"]]
    assert len(sent) == 2 and all(run.name in refusal.value.what for run in sent)
    assert "taken out of the queue" in refusal.value.what
    assert set(slurm.states().values()) == {"CANCELLED by 1000"}
    slurm.said |= {SENDING: [None, None, QOS], "scancel": DENIED}
    with pytest.raises(AllranksError, match="could not be stopped") as refusal:
        bench(monkeypatch, "1x1", "1x2", "2x2")
    assert "allranks stop " in refusal.value.fix


def test_a_baseline_that_the_queue_does_not_take_is_left_out(
    slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm.said[SENDING] = [QOS]
    (refused,) = bench(monkeypatch, "1x1", "1x2", "1x1", "1x2")
    assert refused.layout == "1x1" and "Invalid qos" in str(refused.problem)
    assert list(slurm.states()) == ["100", "101"]


def test_the_rungs_of_a_ladder_are_of_the_clusters_types(slurm: FakeSlurm) -> None:
    slurm.said["sinfo"] = "gpu:a100_sxm4_80gb:4"
    words = ["task=spiral", "slurm.requeue=true"]
    cli_slurm.submit(overrides=words, ladder="1x1@a100-80gb,1x2@a100-80gb")
    assert "--gres=gpu:a100_sxm4_80gb:1\n" in slurm.script("100")
    (path,) = Path("runs").absolute().iterdir()
    rungs = RunDir(path).info()["ladder"]["layouts"]
    assert rungs == ["1x1@a100_sxm4_80gb", "1x2@a100_sxm4_80gb"]
    with pytest.raises(AllranksError, match="no GPU of type v100"):  # before the first is measured
        cli_slurm.submit(overrides=words, ladder="1x1,1x2@v100")
