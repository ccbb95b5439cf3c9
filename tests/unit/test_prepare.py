"""From what was typed to a run that can be started."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import subprocess
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from allranks.errors import AllranksError
from allranks.job.job import load_job
from allranks.launch import env_secrets
from allranks.launch.checks import (
    check_command,
    check_machine,
    check_supported,
    settle_precision,
    warnings,
)
from allranks.launch.follow import exit_code_of
from allranks.launch.node import Place, describe_failure, outcome_of
from allranks.launch.prepare import (
    Prepared,
    Request,
    fill_command,
    find_python,
    hold_run,
    last_change,
    load_resolved,
    open_run,
    prepare,
    ranks_environment,
)
from allranks.layout import Layout
from allranks.machine import allotted
from allranks.machine.gpus import LocalGPU
from allranks.machine.processes import Signals
from allranks.run import claims, commits
from allranks.run.claims import Claim
from allranks.run.commits import seal, writing_folder
from allranks.run.events import append_event
from allranks.run.folder import RunDir

JOB = "name: mine\ntask: spiral\nbatch_size: 96\nsteps: 100\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a job file, from which everything here is typed."""
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").write_text(JOB)
    return tmp_path


def typed(*overrides: str, file: bool = True, **options: Any) -> Request:
    return Request(job_file=Path("job.yaml") if file else None, overrides=overrides, **options)


def started(*overrides: str, **options: Any) -> RunDir:
    """A run whose first attempt was started with this."""
    run = open_run(prepare(typed(*overrides, **options)))
    append_event(run.events(0, 0), "start")
    return run


def save(run: RunDir, step: int, **notes: Any) -> Path:
    writing = writing_folder(run.checkpoints, step)
    writing.mkdir(parents=True)
    (writing / ".metadata").write_bytes(b"metadata")
    manifest = {"step": step, "files": {".metadata": seal(writing / ".metadata")}, **notes}
    return commits.commit(run.checkpoints, step, manifest, keep=3).path


def failed(run: RunDir, prepared: Prepared, **end: Any) -> AllranksError:
    append_event(run.events(0, 0), "end", **{"state": "failed", "exit": 1, **end})
    return describe_failure(run, prepared, Place())


def test_only_what_left_a_checkpoint_is_to_be_gone_on_with() -> None:
    prepared = prepare(typed())
    run = open_run(prepared)
    again = f"; continue with {run.resume_command}"
    why = f"allranks doctor {run.reference} shows why; the rank's output is in "
    assert failed(run, prepared).fix == f"{why}{run.log(0, 0)}"
    save(run, 7)
    assert failed(run, prepared).fix == f"{why}{run.log(0, 0)}{again}"
    killed = failed(run, prepared, exit=-9, signal="SIGKILL")
    assert killed.fix.endswith(f"{again}; --max-restarts N would restart it automatically")


def test_a_script_that_failed_can_go_on_only_from_where_it_says_that_it_saves() -> None:
    command = ("python", "train.py")
    prepared = prepare(Request(job_file=None, command=command))
    assert "--resume" not in failed(open_run(prepared), prepared).fix
    prepared = prepare(Request(job_file=None, command=command, overrides=("last='{run}.pt'",)))
    run = open_run(prepared)
    assert "--resume" not in failed(run, prepared).fix
    Path(f"{run.name}.pt").touch()
    assert f"continue with {run.resume_command}" in failed(run, prepared).fix


@pytest.mark.parametrize(
    ("end", "overrides", "sent", "code"),
    [
        ({"exit": 0}, (), signal.SIGTERM, 75),  # it says that it was stopped as it wanted to be
        ({"exit": -15, "signal": "SIGTERM"}, ("last=job.yaml",), signal.SIGTERM, 75),
        ({"exit": -15, "signal": "SIGTERM"}, ("last=none.pt",), signal.SIGTERM, 1),
        ({"exit": -2, "signal": "SIGINT"}, (), signal.SIGINT, 130),
    ],
)
def test_who_started_a_script_and_who_waited_for_it_end_with_the_same_code(
    end: dict[str, Any], overrides: Sequence[str], sent: signal.Signals, code: int
) -> None:
    prepared = prepare(Request(command=("python", "train.py"), overrides=overrides))
    run = open_run(prepared)
    append_event(run.events(0, 0), "end", state="stopped", **end)
    signals = Signals()
    signals.note(sent, None)
    assert outcome_of(run, prepared, Place(), signals, "stopped").exit_code == code
    assert exit_code_of(run, "stopped") == code


def test_a_stopped_task_can_always_go_on() -> None:
    run = started()
    append_event(run.events(0, 0), "end", state="stopped", exit=75)
    assert [exit_code_of(run, state) for state in ("finished", "failed", "stopped")] == [0, 1, 75]
    run.job_file.unlink()
    assert exit_code_of(run, "stopped") == 75


# --- A new run ----------------------------------------------------------------------------------


def test_nothing_is_written_before_everything_is_checked(folder: Path) -> None:
    prepared = prepare(typed("seed=3", layout="1x2"))
    assert (prepared.job.seed, str(prepared.layout), prepared.attempt) == (3, "1x2", 0)
    assert prepared.run is None
    assert sorted(path.name for path in folder.iterdir()) == ["job.yaml"]


def test_the_run_folder_holds_the_job_as_resolved_and_its_origin(folder: Path) -> None:
    prepared = prepare(typed("seed=3"))
    run = open_run(prepared)
    assert run.path.parent == folder / "runs"
    assert load_job(run.job_file, resolved=True) == prepared.job
    info = run.info()
    assert info["run"] == run.name
    assert info["job_file"] == str(folder / "job.yaml")
    assert info["overrides"] == ["seed=3"]
    assert info["layout"] == "1x1"
    assert info["packages"]["torch"]
    assert info["hardware"]["cpus"]
    assert [attempt["attempt"] for attempt in info["attempts"]] == [0]


def test_what_others_may_have_written_is_not_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job file, a run folder, and the job in it; a group's folder is another matter."""
    run = started()
    again = Request(resume=str(run.path))
    for path, request in ((folder / "job.yaml", typed()), (run.path, again), (run.job_file, again)):
        mode = path.stat().st_mode & 0o777
        path.chmod(mode | 0o022)
        with pytest.raises(AllranksError, match=f"anyone may write to {path}"):
            prepare(request)
        path.chmod(mode | 0o020)
        prepare(request)
    monkeypatch.setattr(os, "geteuid", lambda: 4321)
    monkeypatch.setattr(os, "stat", of_user(4320, os.stat))
    for path, request in ((folder / "job.yaml", typed()), (run.path, again)):
        with pytest.raises(AllranksError, match=f"{path} belongs to user 4320: .* as user 4321"):
            prepare(request)
    monkeypatch.setenv("ALLRANKS_TRUST", f"/elsewhere{os.pathsep}{folder}")
    prepare(typed())
    prepare(again)


def of_user(owner: int, stat: Callable[..., os.stat_result]) -> Callable[..., os.stat_result]:
    def changed(*args: Any, **options: Any) -> os.stat_result:
        found = stat(*args, **options)
        return os.stat_result([*found[:4], owner, *found[5:]])

    return changed


def test_the_runs_folder_can_be_elsewhere(tmp_path: Path) -> None:
    assert open_run(prepare(typed(runs=tmp_path / "there"))).path.parent == tmp_path / "there"


# --- Resuming -----------------------------------------------------------------------------------


@pytest.mark.parametrize("file", [True, False])
def test_resuming_is_the_next_attempt_of_the_same_job(file: bool) -> None:
    run = started("seed=3")
    prepared = prepare(typed(file=file, resume="last"))
    assert prepared.run == run
    assert prepared.attempt == 1
    assert prepared.job.seed == 3  # what was typed at the start still holds
    assert prepared.changes == []
    assert any("step 0" in remark for remark in prepared.remarks)
    open_run(prepared)
    assert [attempt["attempt"] for attempt in run.info()["attempts"]] == [0, 1]


@pytest.mark.parametrize(
    "change", ["batch_size=97", "seed=1", "optimizer.lr=3e-4", "options.noise=0.1", "task=digits"]
)
def test_another_mathematics_is_refused_unless_forced(change: str) -> None:
    run = started()
    with pytest.raises(AllranksError, match="different mathematics") as refusal:
        prepare(typed(change, resume=run.name))
    assert change.partition("=")[0] in refusal.value.what
    assert "--force" in refusal.value.fix
    prepared = prepare(typed(change, resume=run.name, force=True))
    assert change.partition("=")[0] in [record["key"] for record in prepared.changes]


def test_a_changed_file_is_a_change(folder: Path) -> None:
    run = started()
    (folder / "job.yaml").write_text(JOB.replace("96", "128"))
    with pytest.raises(AllranksError, match="batch_size: 96 became 128"):
        prepare(typed(resume=run.name))
    # Without naming the file, the run's own job holds.
    assert prepare(typed(file=False, resume=run.name)).job.batch_size == 96


@pytest.mark.parametrize(
    ("change", "key"), [("log_every=1", "log_every"), ("checkpoint.every=5", "checkpoint.every")]
)
def test_other_changes_are_taken_over_and_recorded(change: str, key: str) -> None:
    run = started()
    prepared = prepare(typed(change, resume=run.name))
    assert [record["key"] for record in prepared.changes] == [key]
    open_run(prepared)
    assert run.info()["attempts"][-1]["changes"] == prepared.changes
    assert json.loads(json.dumps(prepared.changes)) == prepared.changes


def test_a_run_keeps_its_layout_unless_told_otherwise() -> None:
    run = started(layout="1x4")
    assert str(prepare(typed(resume=run.name)).layout) == "1x4"
    assert str(prepare(typed(resume=run.name, layout="1x2")).layout) == "1x2"


def test_a_live_run_is_refused() -> None:
    run = started()
    with run.held(), pytest.raises(AllranksError, match="is live"):
        prepare(typed(resume=run.name))


# --- A run of SLURM's, on this machine ----------------------------------------------------------


def resumed(run: RunDir) -> Prepared:
    with ExitStack() as held:
        return hold_run(prepare(typed(file=False, resume=run.name)), held)


def sent() -> RunDir:
    """A run that was queued, and whose job 100 has ended."""
    run = started()
    run.update_info(lambda info: info.update(backend="slurm", jobs=["100"]))
    assert claims.take(run.claims, Claim(number=0, job="100"))
    return run


def test_a_run_that_jobs_may_take_too_is_claimed_and_its_ranks_know() -> None:
    run = sent()
    prepared = resumed(run)
    holder = claims.newest(run.claims)
    assert holder is not None
    assert (holder.number, holder.job, holder.layout) == (1, "", "1x1")
    assert prepared.claim == 1
    env = ranks_environment(prepared, run, here=1, oversubscribe=False)
    assert env[claims.VARIABLE] == "1"


def test_a_run_of_this_machine_takes_a_claim_too_and_the_next_one_to_resume_it() -> None:
    with ExitStack() as held:
        prepared = hold_run(prepare(typed()), held)
    run = prepared.run
    assert run is not None and prepared.claim == 0
    open_run(prepared)
    assert resumed(run).claim == 1
    with pytest.raises(AllranksError, match="has lost the run"):
        claims.raise_if_lost(run.claims, 0)


def test_a_run_of_this_machine_needs_no_hard_links(monkeypatch: pytest.MonkeyPatch) -> None:
    run = started()

    def refuse(source: Path, target: Path) -> None:
        raise PermissionError(1, "no hard links here")

    monkeypatch.setattr(os, "link", refuse)
    prepared = resumed(run)
    assert prepared.claim is None
    monkeypatch.setenv(claims.VARIABLE, "7")  # of a rank that has started this process
    env = ranks_environment(prepared, run, here=1, oversubscribe=False)
    assert env[claims.VARIABLE] == ""
    run.update_info(lambda info: info.update(jobs=["100"]))
    with pytest.raises(AllranksError, match="no hard links"):
        resumed(run)


# --- Where locks are not seen -------------------------------------------------------------------


@pytest.fixture
def unseen_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", lambda descriptor, operation: None)


def claimed(run: RunDir, **holder: Any) -> None:
    assert claims.take(run.claims, Claim(number=0, **holder))


@pytest.mark.usefixtures("unseen_locks")
def test_a_run_whose_holder_is_alive_here_is_refused() -> None:
    run = started()
    with subprocess.Popen(["sleep", "60"]) as other:
        try:
            claimed(run, pid=other.pid)
            with pytest.raises(AllranksError, match=f"is live: process {other.pid} on"):
                resumed(run)
            append_event(run.events(0, 0), "end", state="stopped", exit=0)
            assert resumed(run).claim == 1  # the process does something else by now
        finally:
            other.kill()


@pytest.mark.usefixtures("unseen_locks")
def test_a_process_that_only_has_the_holders_number_holds_nothing() -> None:
    run = started()
    claimed(run, pid=1, time=0.0)  # before this machine was started
    assert resumed(run).claim == 1


@pytest.mark.usefixtures("unseen_locks")
def test_a_run_is_taken_visibly_from_a_holder_on_another_machine() -> None:
    run = started()
    claimed(run, pid=17, host="node7")
    prepared = resumed(run)
    assert prepared.claim == 1
    assert "takes the run from process 17 on node7" in prepared.remarks[-1]


def test_a_launcher_looks_for_a_newer_holder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "LOOK_SECONDS", 0.0)
    run = started()
    claimed(run)
    watch, other = (claims.Watch(run.claims, 0, looks=looks) for looks in (True, False))
    assert not watch.is_lost()
    assert claims.take(run.claims, Claim(number=1))
    assert watch.is_lost()
    assert not other.is_lost()
    with pytest.raises(AllranksError, match="has lost the run"):
        watch.raise_if_lost()


def test_who_is_beaten_by_a_job_does_not_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    run = sent()
    monkeypatch.setattr(claims, "next_number", lambda folder: 0)  # it looked a moment too early
    with pytest.raises(AllranksError, match=r"took run .* just now"):
        resumed(run)
    assert not run.is_live()


def test_a_claim_is_kept_where_another_attempt_came_in_between() -> None:
    run = sent()
    prepared = prepare(typed(file=False, resume=run.name))
    append_event(run.events(1, 0), "start")
    with ExitStack() as held:
        prepared = hold_run(prepared, held)
    assert (prepared.attempt, prepared.claim) == (2, 1)


def test_an_attempt_says_when_a_scripts_checkpoint_was_written() -> None:
    Path("job.yaml").write_text("command: train\nlast: '{ranks}.pt'\n")
    run = started(layout="1x2")
    job = load_job(run.job_file, resolved=True)
    assert last_change(run, job) is None
    Path("2.pt").touch()
    os.utime("2.pt", (0, 17))
    assert last_change(run, job) == 17
    open_run(prepare(typed(file=False, resume=run.name)))
    assert [attempt["last_changed"] for attempt in run.info()["attempts"]] == [None, 17]
    assert last_change(run, load_job(None)) is None


# --- Which checkpoint ---------------------------------------------------------------------------


def test_the_newest_whole_checkpoint_is_chosen_and_damage_told() -> None:
    run = started()
    save(run, 10)
    (save(run, 20) / ".metadata").write_bytes(b"METADATA")
    prepared = prepare(typed(resume=run.name))
    assert prepared.checkpoint == "step-10"
    assert any("step-20 is damaged" in remark for remark in prepared.remarks)
    assert any("after step 10" in remark for remark in prepared.remarks)


def test_without_a_whole_checkpoint_it_is_refused_not_restarted() -> None:
    run = started()
    (save(run, 20) / ".metadata").unlink()
    with pytest.raises(
        AllranksError, match="no readable checkpoint: step-20 is damaged"
    ) as refusal:
        prepare(typed(resume=run.name))
    assert refusal.value.exit_code == 1


@pytest.mark.parametrize(("layout", "threads"), [("1x2", 7), ("1x4", None), (None, 7)])
def test_the_thread_count_is_kept_on_the_same_layout(
    layout: str | None, threads: int | None
) -> None:
    run = started(layout="1x2")
    save(run, 10, layout="1x2", threads=7)
    assert prepare(typed(resume=run.name, layout=layout)).threads == threads


def test_opening_a_run_removes_what_a_killed_attempt_left() -> None:
    run = started()
    writing_folder(run.checkpoints, 5).mkdir(parents=True)
    open_run(prepare(typed(resume=run.name)))
    assert list(run.checkpoints.iterdir()) == []


# --- The user's own command ---------------------------------------------------------------------


def command(
    words: Sequence[str], *, attempt: int = 0, last: str | None = None, resume: str | None = None
) -> list[str]:
    overrides = [f"last={json.dumps(last)}", f"resume={json.dumps(resume)}"]
    job = load_job(None, overrides, command=words, layout="2x4")
    prepared = Prepared(request=Request(), job=job, run=None, attempt=attempt)
    return fill_command(prepared, RunDir(Path("runs/mine-20261101-120000-aaaa")), attempt)


def test_placeholders_are_filled() -> None:
    words = ["python", "train.py", "--nodes={nodes}", "{gpus}", "{ranks}", "{run}", "a b"]
    run = "mine-20261101-120000-aaaa"
    python = find_python("python", os.environ["PATH"])
    assert command(words) == [python, "train.py", "--nodes=2", "4", "8", run, "a b"]


def test_resume_is_appended_on_a_later_attempt_if_there_is_something_to_resume(
    tmp_path: Path,
) -> None:
    def train(attempt: int) -> list[str]:
        last = str(tmp_path / "my {run}" / "last.ckpt")
        return command(["train"], attempt=attempt, last=last, resume="--ckpt_path {last}")

    assert train(attempt=0) == ["train"]
    assert train(attempt=1) == ["train"]
    saved = tmp_path / "my mine-20261101-120000-aaaa" / "last.ckpt"
    saved.parent.mkdir()
    saved.touch()
    assert train(attempt=0) == ["train"]
    assert train(attempt=1) == ["train", "--ckpt_path", str(saved)]


def test_the_command_can_refer_to_its_checkpoint_itself() -> None:
    filled = command(["train", "--save", "{last}"], last="ckpt/{run}.pt")
    assert filled == ["train", "--save", "ckpt/mine-20261101-120000-aaaa.pt"]


# --- What ranks find ----------------------------------------------------------------------------

DEFAULTS = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "PYTORCH_ALLOC_CONF", "GLOO_SOCKET_IFNAME")


def environment(
    *overrides: str, here: int = 2, layout: str = "1x2", **options: Any
) -> dict[str, str]:
    prepared = prepare(typed(*overrides, layout=layout))
    prepared.threads = options.pop("threads", None)
    prepared.checkpoint = options.pop("checkpoint", "")
    return ranks_environment(
        prepared, RunDir(Path("/runs/x")), here=here, **{"oversubscribe": False, **options}
    )


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in (*DEFAULTS, "PYTORCH_CUDA_ALLOC_CONF", "NCCL_TIMEOUT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(allotted, "cpus_allotted", lambda: 8)
    return monkeypatch


@pytest.mark.usefixtures("clean")
def test_ranks_share_the_cpus_and_meet_on_the_loopback() -> None:
    env = environment(checkpoint="step-10")
    assert env["OMP_NUM_THREADS"] == "4"
    assert env["GLOO_SOCKET_IFNAME"] == "lo"
    assert env["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert env["NCCL_DEBUG"] == "WARN"
    assert env["ALLRANKS_RUN_DIR"] == "/runs/x"
    assert env["ALLRANKS_LAYOUT"] == "1x2"
    assert env["ALLRANKS_CHECKPOINT"] == "step-10"
    assert env["ALLRANKS_LAUNCHER"] == str(os.getpid())
    assert "ALLRANKS_OVERSUBSCRIBE" not in env


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize(("here", "threads"), [(1, "8"), (3, "2"), (16, "1")])
def test_threads_follow_the_share_and_are_never_none(here: int, threads: str) -> None:
    assert environment(here=here)["OMP_NUM_THREADS"] == threads
    assert environment(here=here, threads=5)["OMP_NUM_THREADS"] == "5"


@pytest.mark.parametrize("name", DEFAULTS)
def test_what_the_user_exported_is_left_alone(clean: pytest.MonkeyPatch, name: str) -> None:
    clean.setenv(name, "mine")
    assert name not in environment()


def test_the_old_name_of_the_allocators_variable_counts(clean: pytest.MonkeyPatch) -> None:
    clean.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    assert "PYTORCH_ALLOC_CONF" not in environment()


@pytest.mark.usefixtures("clean")
def test_the_jobs_env_is_above_the_defaults() -> None:
    env = environment("env.OMP_NUM_THREADS=3", "env.NCCL_DEBUG=INFO", "env.MY_OWN=x")
    assert (env["OMP_NUM_THREADS"], env["NCCL_DEBUG"], env["MY_OWN"]) == ("3", "INFO", "x")


@pytest.mark.usefixtures("clean")
def test_ranks_on_several_machines_do_not_meet_on_the_loopback() -> None:
    assert "GLOO_SOCKET_IFNAME" not in environment(layout="2x2", here=2)


@pytest.mark.usefixtures("clean")
def test_the_timeout_and_whether_it_was_set() -> None:
    assert environment()["ALLRANKS_TIMEOUT"] == "1800"
    assert environment()["ALLRANKS_TIMEOUT_IS_SET"] == "0"
    env = environment("timeout=5m", oversubscribe=True)
    assert (env["ALLRANKS_TIMEOUT"], env["ALLRANKS_TIMEOUT_IS_SET"]) == ("300", "1")
    assert env["ALLRANKS_OVERSUBSCRIBE"] == "1"


@pytest.mark.parametrize("where", ["exported", "job"])
def test_nccl_timeout_is_warned_of(clean: pytest.MonkeyPatch, where: str) -> None:
    assert warnings(prepare(typed()).job) == []
    if where == "exported":
        clean.setenv("NCCL_TIMEOUT", "60")
    job = prepare(typed(*(["env.NCCL_TIMEOUT=60"] if where == "job" else []))).job
    (warning,) = warnings(job)
    assert "NCCL_TIMEOUT" in warning
    assert "`timeout`" in warning


@pytest.mark.parametrize(
    ("batch", "layout", "said"),
    [
        (3, "1x4", "1 rank will never get a sample; write --layout 1x3, or batch_size=4"),
        (5, "4x2", "3 ranks will never get a sample; write --layout 4x1, or batch_size=8"),
        (1, "2x2", "3 ranks will never get a sample; write --layout 1x1, or batch_size=4"),
        (4, "1x4", None),
    ],
)
@pytest.mark.usefixtures("clean")
def test_a_batch_smaller_than_the_ranks_is_warned_of(
    batch: int, layout: str, said: str | None
) -> None:
    warned = warnings(prepare(typed(f"batch_size={batch}", layout=layout)).job)
    assert len(warned) == bool(said)
    assert not said or said in warned[0]
    smaller = re.findall(r"--layout (\S+),", " ".join(warned))
    assert not any(warnings(prepare(typed(f"batch_size={batch}", layout=x)).job) for x in smaller)


@pytest.mark.parametrize(
    ("overrides", "layouts", "said"),
    [
        (["micro_batches=4"], ["1x2"], "has no effect on layout 1x2, which has no pp; "
         "write --layout 1x2:pp=2, or micro_batch_size=4 to accumulate gradients"),
        (["micro_batches=4"], ["1x1"], "write --layout 1x2:pp=2, or micro_batch_size=8 to"),
        (["micro_batches=4"], ["1x4:tp=2"], "write --layout 1x4:tp=2,pp=2, or micro_batch_size=4"),
        (["schedule=gpipe", "micro_batches=4"], ["1x2"],
         "pipeline.schedule and pipeline.micro_batches have no effect"),
        (["schedule=1f1b"], ["1x2"], None),
        (["micro_batches=4"], ["1x1", "1x2:pp=2"], None),  # compared with each other
    ],
)  # fmt: skip
@pytest.mark.usefixtures("clean")
def test_a_pipeline_without_pp_is_warned_of(
    overrides: list[str], layouts: list[str], said: str | None
) -> None:
    words = ["batch_size=32", *(f"pipeline.{one}" for one in overrides)]
    warned = warnings(*(prepare(typed(*words, layout=one)).job for one in layouts))
    assert len(warned) == bool(said)
    assert not said or said in warned[0]


@pytest.mark.usefixtures("clean")
def test_two_sizes_of_micro_batches_are_warned_of() -> None:
    def warned(size: object, layout: str = "1x2:pp=2") -> list[str]:
        words = ["batch_size=32", f"micro_batch_size={size}", "pipeline.micro_batches=4"]
        return warnings(prepare(typed(*words, layout=layout)).job)

    assert warned(8) == warned("auto") == warned("null") == []
    (said,) = warned(4)
    assert "micro_batch_size=4 has no effect" in said and "micro-batches of 8 samples" in said
    assert warned(4, "1x2")[0].endswith("write --layout 1x2:pp=2")  # it accumulates already


# --- What the machine can hold ------------------------------------------------------------------


def gpus(number: int) -> list[LocalGPU]:
    return [LocalGPU.__new__(LocalGPU) for _ in range(number)]


def test_more_ranks_than_cores_are_remarked_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("allranks.launch.checks.local_gpus", lambda: [])
    monkeypatch.setattr(allotted, "cpus_allotted", lambda: 2)
    assert check_machine(Layout(1, 2), here=2, oversubscribe=False) == []
    (remark,) = check_machine(Layout(1, 4), here=4, oversubscribe=False)
    assert "4 ranks on 2 CPU" in remark


def test_far_too_many_ranks_are_started_only_if_that_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("allranks.launch.checks.local_gpus", lambda: [])
    monkeypatch.setattr(allotted, "cpus_allotted", lambda: 2)
    assert len(check_machine(Layout(1, 32), here=32, oversubscribe=False)) == 1
    with pytest.raises(AllranksError, match="64 ranks would take turns on 2 CPU") as refused:
        check_machine(Layout(1, 64), here=64, oversubscribe=False)
    assert "1x32" in refused.value.fix
    assert "--oversubscribe" in refused.value.fix
    assert len(check_machine(Layout(1, 64), here=64, oversubscribe=True)) == 1


@pytest.mark.parametrize(
    ("command", "what"),
    [
        (["python", "trian.py"], "the script 'trian.py' was not found in"),
        (["python3.12", "no/such.py", "--lr", "1"], "the script 'no/such.py' was not found in"),
        (["trainer", "--fast"], "program 'trainer' was not found here"),
        (["./plain.sh"], "program './plain.sh' is not executable"),
        (["plain.sh"], "write ./plain.sh"),
        (["python plain.py"], "leave out the quotes: -- python plain.py"),
        (["plain.py"], "write python plain.py"),
        (["."], "program '.' is a folder"),
        (["x" * 300], "was not found here"),
        (["python", "x" * 300 + ".py"], "was not found in"),
    ],
)
def test_a_command_that_is_not_there_is_refused_once(
    folder: Path, command: list[str], what: str
) -> None:
    for name in ("plain.sh", "plain.py"):
        (folder / name).write_text("#!/bin/sh\n")
    with pytest.raises(AllranksError, match=re.escape(what)):
        check_command(load_job(None, command=command))


def test_a_program_is_looked_for_where_the_ranks_will(folder: Path) -> None:
    (folder / "bin").mkdir()
    (folder / "bin" / "trainer").write_text("#!/bin/sh\n")
    (folder / "bin" / "trainer").chmod(0o755)
    check_command(load_job(None, [f"env.PATH={folder / 'bin'}"], command=["trainer"]))


@pytest.mark.parametrize(
    "command",
    [
        ["python", "train.py"],
        ["python", "-m", "trian"],
        ["python", "-u", "trian.py"],
        ["python", "{stage}/train.py"],
        ["sh", "-c", "python trian.py"],
        ["torchrun-of-{run}", "x"],
    ],
)
def test_a_command_that_may_be_there_is_not(folder: Path, command: list[str]) -> None:
    (folder / "train.py").touch()
    check_command(load_job(None, command=command))
    check_command(load_job(None))


def test_a_layout_larger_than_the_machine_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("allranks.launch.checks.local_gpus", lambda: [])
    monkeypatch.setattr(allotted, "cpus_allotted", lambda: 2)
    assert check_machine(Layout(1, 2), here=2, is_measured=True) == []
    remarks = check_machine(Layout(2, 4), here=8, is_measured=True)
    assert remarks == ["8 ranks on 2 CPU cores: they take turns"]
    with pytest.raises(AllranksError, match="layout 1x9 is larger than this machine") as refused:
        check_machine(Layout(1, 9), here=9, is_measured=True)
    assert "at most 1x8" in str(refused.value.fix)


def test_more_ranks_than_gpus_are_refused_unless_they_may_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("allranks.launch.checks.local_gpus", lambda: gpus(2))
    assert check_machine(Layout(1, 2), here=2, oversubscribe=False) == []
    with pytest.raises(AllranksError, match="needs 4 GPUs here, but this machine has 2") as refusal:
        check_machine(Layout(1, 4), here=4, oversubscribe=False)
    assert "--layout 1x2" in refusal.value.fix
    (remark,) = check_machine(Layout(1, 4), here=4, oversubscribe=True)
    assert "meaningless" in remark


def test_a_command_may_have_any_axes() -> None:
    check_supported(load_job(None, layout="2x2"))
    check_supported(load_job(None, command=["train"], layout="1x4:tp=2"))


def test_compress_is_refused_unless_several_ranks_hold_the_whole_model() -> None:
    check_supported(load_job(None, ["compress.name=topk"], layout="2x2"))
    for layout, why, instead in (
        ("1x1", "has only one rank", "1x2"),
        ("2x2:fsdp=2", "divides the model", "2x2"),
        ("1x4:pp=4", "divides the model", "1x4"),
    ):
        with pytest.raises(AllranksError, match=why) as refusal:
            check_supported(load_job(None, ["compress.name=topk"], layout=layout))
        assert refusal.value.fix == f"write --layout {instead}, or compress=null"


# --- A CPU that lists AMX and may not use it ----------------------------------------------------


@pytest.fixture
def usable(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """What such a CPU can be limited to; nothing in it: nobody may ask."""
    answers: list[str | None] = []
    monkeypatch.setattr(allotted, "usable_instructions", lambda: answers[0])
    monkeypatch.setattr("allranks.launch.checks.local_gpus", list)
    for name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"):
        monkeypatch.delenv(name, raising=False)
    return answers


OWN_SCRIPT = Request(command=("python", "train.py"))


@pytest.mark.parametrize("asked", [typed("precision=bf16"), OWN_SCRIPT], ids=["task", "script"])
def test_ranks_are_told_to_do_without_amx_and_the_run_says_why(
    usable: list[str | None], asked: Request
) -> None:
    usable.append("AVX512_CORE_BF16")
    prepared = prepare(asked)
    (remark,) = settle_precision(prepared)
    assert remark.startswith("ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16: ") and "SIGILL" in remark
    run = open_run(prepared)
    env = ranks_environment(prepared, run, here=1, oversubscribe=False)
    assert env["ONEDNN_MAX_CPU_ISA"] == "AVX512_CORE_BF16"
    (recorded,) = run.info()["attempts"][0]["settings"]
    assert f"{recorded['name']}={recorded['value']}: {recorded['reason']}" == remark


def test_nobody_waits_for_a_trial_that_cannot_matter(
    usable: list[str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    for overrides in ([], ["precision=fp32"], ["precision=bf16", "env.ONEDNN_MAX_CPU_ISA=AVX2"]):
        assert settle_precision(prepare(typed(*overrides))) == []
    monkeypatch.setattr("allranks.launch.checks.local_gpus", lambda: ["a GPU"])
    assert settle_precision(prepare(typed("precision=bf16"))) == []


def test_bf16_is_refused_only_where_nothing_works(usable: list[str | None]) -> None:
    usable.append("")
    assert settle_precision(prepare(typed("precision=bf16"))) == []
    usable[0] = None
    with pytest.raises(AllranksError, match="precision: bf16 cannot be computed") as refusal:
        settle_precision(prepare(typed("precision=bf16")))
    assert refusal.value.fix == "write precision: fp32"
    (remark,) = settle_precision(prepare(OWN_SCRIPT))  # it may compute in fp32 alone
    assert "SIGILL" in remark


# --- Secrets ------------------------------------------------------------------------------------


def test_secrets_of_the_environment_are_for_their_user_alone(folder: Path) -> None:
    job = "env: {WANDB_API_KEY: 0123456789abcdef, NCCL_DEBUG: INFO}\n"
    (folder / "job.yaml").write_text(JOB + job)
    typed = ["env.HF_TOKEN=hf_abcdefghijklmnopqrstuvwxyz", "env.DB='postgres://u:pa55@h/d'"]
    run = open_run(prepare(Request(job_file=Path("job.yaml"), overrides=typed)))
    values = {
        "WANDB_API_KEY": "0123456789abcdef",
        "HF_TOKEN": "hf_abcdefghijklmnopqrstuvwxyz",
        "DB": "postgres://u:pa55@h/d",
    }
    secrets = run.path / env_secrets.FILE
    assert secrets.stat().st_mode & 0o777 == 0o600
    assert json.loads(secrets.read_text()) == values
    others = [path for path in run.path.iterdir() if path != secrets and path.is_file()]
    for path in others:
        assert not [value for value in values.values() if value in path.read_text()], path
    assert load_job(run.job_file, resolved=True).env["NCCL_DEBUG"] == "INFO"
    # Their user goes on with them, by the run's own job and by a job file that has changed.
    for request in (Request(resume="last"), Request(job_file=Path("job.yaml"), resume="last")):
        again = prepare(request)
        assert values.items() <= again.job.env.items()
        assert not again.changes
    changed = prepare(Request(resume="last", overrides=["env.HF_TOKEN=hf_zyxwvutsrqponmlkjihg99"]))
    assert changed.changes == [
        {"key": "env.HF_TOKEN", "before": env_secrets.PLACEHOLDER, "now": env_secrets.PLACEHOLDER}
    ]
    open_run(changed)
    assert "hf_" not in run.job_file.read_text() + (run.path / "run.json").read_text()
    env = ranks_environment(prepare(Request(resume="last")), run, here=1, oversubscribe=False)
    assert env["HF_TOKEN"] == "hf_zyxwvutsrqponmlkjihg99"
    # Others can read the run, and cannot start it.
    secrets.unlink()
    assert load_resolved(run).env["DB"] == env_secrets.PLACEHOLDER
    with pytest.raises(AllranksError, match=r"the values of WANDB_API_KEY, .* are missing"):
        prepare(Request(resume="last"))


def test_a_whole_environment_that_was_typed_is_kept_without_its_secrets() -> None:
    typed = "env={A: b, MY_SECRET: abcdefgh, N: '1'}"
    kept = env_secrets.public_override(typed)
    assert "abcdefgh" not in kept
    job = load_job(None, [kept], command=["x"])
    assert job.env["MY_SECRET"] == env_secrets.PLACEHOLDER and job.env["N"] == "1"
    for harmless in ("steps=3", "env.A=b", "env={A: b}", "env=", "env=null"):
        assert env_secrets.public_override(harmless) == harmless
