"""Inside a SLURM job: a file that a rank did not find, and an `allranks run` that is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from allranks.doctor.diagnose import on_which_nodes
from allranks.doctor.finding import Evidence, Finding
from allranks.errors import AllranksError
from allranks.launch.backends.slurm import in_job
from allranks.launch.backends.slurm.in_job import check_allocation
from allranks.launch.prepare import Request
from allranks.layout import Layout
from allranks.run.events import append_event
from allranks.run.failures import missing_in_words, missing_path
from allranks.run.folder import RunDir

PLACE = in_job.SlurmNodes(job="7", restart=0, nodes=("node1", "node2"), cpus_per_node=1)


@pytest.mark.parametrize(
    ("line", "path"),
    [
        ("FileNotFoundError: [Errno 2] No such file or directory: '/a b/x.pt'", "/a b/x.pt"),
        ('[rank1]: FileNotFoundError: [Errno 2] No such file or directory: "it\'s"', "it's"),
        ("FileNotFoundError: [Errno 2] No such file or directory: b'/x'", "/x"),
        ("python: can't open file '/w/train.py': [Errno 2] No such file or directory", None),
        ("cannot run ./train: No such file or directory", "./train"),
        ("stage: cannot read /data/x: No such file or directory", "/data/x"),
        ("OSError: Unable to open file (unable to open file: name = 'x.h5', errno = 2, e", "x.h5"),
        ("slurmstepd: error: execve(): /venv/python: No such file or directory", "/venv/python"),
        ("bash: line 1: /opt/x/run.sh: No such file or directory", "/opt/x/run.sh"),
        ("ValueError: no such data", None),
        ("PermissionError: [Errno 13] Permission denied: '/x'", None),
        ("", None),
    ],
)
def test_the_path_that_is_missing(line: str, path: str | None) -> None:
    if "train.py" in line:
        path = "/w/train.py"
    assert missing_path(["Traceback", line, ""]) == path


def test_what_was_said_long_before_the_end_is_not_its_reason() -> None:
    lines = ["FileNotFoundError: [Errno 2] No such file or directory: '/x'", *["step"] * 30]
    assert missing_path(lines) is None
    assert missing_path(lines[:10]) == "/x"


def test_words() -> None:
    seen = {"path": "/scratch/data.pt", "on": ["node1"], "not_on": ["node2", "node3"]}
    what, fix = missing_in_words(seen)
    assert what == "/scratch/data.pt is on node1 but not on node2, node3"
    assert "stage: [SHARED/data.pt]" in fix and "{stage}/data.pt" in fix
    assert "data.stage: local" in missing_in_words(seen, is_task=True)[1]
    seen = {"path": "/x", "on": [], "not_on": ["node1", "node2"]}
    assert missing_in_words(seen)[0] == "/x is on none of the nodes (node1, node2)"


def failed_run(folder: Path, said: str, cwd: str = "/work") -> RunDir:
    run = RunDir(folder)
    run.attempt(0).mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"cwd": cwd}))
    for rank in range(2):
        append_event(run.events(0, rank), "start", rank=rank)
        run.log(0, rank).write_text(said if rank else "RuntimeError: connection closed by peer\n")
        append_event(run.events(0, rank), "end", state="failed", exit=1)
    return run


def answer(monkeypatch: pytest.MonkeyPatch, printed: str) -> list[Sequence[str]]:
    asked: list[Sequence[str]] = []

    def output_of(command: Sequence[str], seconds: float, env: Mapping[str, str]) -> str | None:
        asked.append(command)
        return printed or None

    monkeypatch.setattr(in_job, "output_of", output_of)
    return asked


NOT_FOUND = "FileNotFoundError: [Errno 2] No such file or directory: 'data/x.pt'\n"


def test_the_nodes_are_asked_for_a_path_of_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = failed_run(tmp_path, NOT_FOUND)
    printed = "0 node1 /work\n0 node2 /work\n1 node2 /work/data/x.pt\n0 node1 /work/data/x.pt\n"
    asked = answer(monkeypatch, "hello from the site's profile\n" + printed)
    found = in_job.look_for_missing(run, 0, PLACE, [])
    assert found == {"attempt": 0, "path": "/work/data/x.pt", "on": ["node1"], "not_on": ["node2"]}
    assert list(asked[0][-2:]) == ["/work", "/work/data/x.pt"]


def test_a_working_folder_that_is_missing_is_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = failed_run(tmp_path, "python: can't open file '/tmp/a.py': [Errno 2] No such file")
    answer(monkeypatch, "0 node1 /work\n1 node2 /work\n1 node1 /tmp/a.py\n1 node2 /tmp/a.py\n")
    found = in_job.look_for_missing(run, 0, PLACE, [])
    assert found is not None and (found["path"], found["not_on"]) == ("/work", ["node2"])


@pytest.mark.parametrize("printed", ["", "0 node1 /work\n1 node2 /work/data/x.pt\n", "x"])
def test_nodes_that_do_not_answer_are_not_blamed(
    printed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = failed_run(tmp_path, NOT_FOUND)
    answer(monkeypatch, printed)
    assert in_job.look_for_missing(run, 0, PLACE, []) is None


def test_other_failures_ask_no_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = answer(monkeypatch, "")
    run = failed_run(tmp_path, "ValueError: no\n")
    assert in_job.look_for_missing(run, 0, PLACE, ["srun: error: exit code 1"]) is None
    assert asked == []


def test_errors_in_events_tell_it_too(tmp_path: Path) -> None:
    run = failed_run(tmp_path, "something else\n")
    what = "FileNotFoundError: [Errno 2] No such file or directory: '/x'"
    append_event(run.events(0, 1), "end", state="failed", exit=1, error={"what": what, "fix": ""})
    assert in_job.path_of_failure(run, 0) == "/x"


def test_the_doctor_names_the_nodes(tmp_path: Path) -> None:
    run = failed_run(tmp_path, NOT_FOUND)
    line = Evidence("rank-1.log", 1, NOT_FOUND)
    found = [Finding("rank-raised", "Rank 1 raised", "mend it", 1, "node2", evidence=(line,))]
    assert on_which_nodes(run, 0, found) == found
    path = "/work/data/x.pt"
    seen = {"attempt": 0, "path": path, "on": ["node1"], "not_on": ["node2"]}
    run.update_info(lambda info: info.update(missing=seen))
    (told,) = on_which_nodes(run, 0, found)
    assert (told.cause, told.rank, told.node) == ("missing-file", 1, "node2")
    assert told.title == "/work/data/x.pt is on node1 but not on node2"
    assert "stage:" in told.fix and len(told.evidence) == 2
    assert on_which_nodes(run, 1, found) == found  # of an earlier attempt


# --- `allranks run` inside an allocation -------------------------------------------------------

ALLOCATION = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[1-3]", "SLURM_NTASKS": "3"}
BATCH = {**ALLOCATION, "SLURM_PROCID": "0"}
INTERACTIVE = {**BATCH, "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"}
SHELL = {**BATCH, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"}  # srun --pty bash
STEP = {**SHELL, "SLURM_STEP_NUM_TASKS": "2"}
OLD_STEP = {**BATCH, "SLURM_STEPID": "1"}
SCRIPT = Request(typed=["run", "--layout", "2x2"], command=["python", "train.py", "a b"])


def refusal(layout: str, env: dict[str, str], request: Request = SCRIPT) -> AllranksError:
    with pytest.raises(AllranksError) as refused:
        check_allocation(Layout.parse(layout), request, env)
    assert refused.value.exit_code == 2
    return refused.value


@pytest.mark.parametrize("env", [{}, ALLOCATION, BATCH, INTERACTIVE, SHELL])
def test_a_layout_of_one_node_is_at_home_anywhere(env: dict[str, str]) -> None:
    check_allocation(Layout(1, 4), SCRIPT, env)


@pytest.mark.parametrize("env", [ALLOCATION, BATCH, INTERACTIVE, SHELL])
def test_nodes_are_not_played_inside_an_allocation_unless_it_is_meant(env: dict[str, str]) -> None:
    error = refusal("2x2", env)
    assert "2 nodes" in error.what and "all 4 ranks on this machine" in error.what
    assert "or add --here" in error.fix
    check_allocation(Layout(2, 2), Request(here=True), env)
    check_allocation(Layout(2, 2), SCRIPT, {})


@pytest.mark.parametrize("env", [STEP, OLD_STEP])
@pytest.mark.parametrize("layout", ["1x1", "2x2"])
def test_one_of_several_tasks_is_refused_whatever_is_meant(
    env: dict[str, str], layout: str
) -> None:
    for request in (SCRIPT, Request(here=True, typed=["run", "--here"])):
        error = refusal(layout, env, request)
        assert "tasks of an srun of job 7" in error.what
        assert "--here, and" not in error.fix


def test_the_lines_to_type() -> None:
    fix = refusal("2x2", ALLOCATION).fix
    assert fix.split("; or ") == [
        "start one launcher on each node: srun --nodes=2 --ntasks-per-node=1 --cpu-bind=none "
        "--nodelist=node[1-2] bash -c 'allranks run --layout 2x2 --node-rank $SLURM_NODEID "
        "--master node1:29500 -- python train.py '\"'\"'a b'\"'\"''",
        "send it to the queue: allranks submit --layout 2x2 -- python train.py 'a b'",
        "add --here to run all ranks on this machine",
    ]
    job = Request(typed=["run", "a.yaml"], job_file=Path("a.yaml"), overrides=["steps=3"])
    fix = refusal("4x1", ALLOCATION, job).fix  # more nodes than there are
    assert fix.startswith("send it to the queue: allranks submit a.yaml steps=3 --layout 4x1; or")
    assert refusal("1x1", STEP, job).fix.startswith("start it once: without srun")
    resumed = Request(typed=["run", "--resume", "last"], resume="last")
    assert "allranks resume last --layout 2x2" in refusal("2x2", ALLOCATION, resumed).fix


@pytest.mark.parametrize(
    ("kind", "fix"),
    [
        ("scaling", "measure layouts of a single node; or add --backend slurm; or add --here to"),
        ("comm", "measure layouts of a single node; or add --backend slurm"),
        ("data", "measure layouts of a single node"),
    ],
)
def test_benchmarks(kind: str, fix: str) -> None:
    request = Request(typed=["bench", kind])
    assert refusal("2x2", ALLOCATION, request).fix.startswith(fix)
    assert refusal("2x2", STEP, request).fix.startswith("start it once")


def test_a_shell_of_srun_with_a_terminal_is_one_task() -> None:
    check_allocation(Layout(1, 1), SCRIPT, {**STEP, "SLURM_PTY_PORT": "40001"})
