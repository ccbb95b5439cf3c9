"""What `allranks run` refuses inside of a SLURM allocation, and what it says to type."""

from __future__ import annotations

from pathlib import Path

import pytest

from allranks.errors import AllranksError
from allranks.launch.backends.slurm.inside import check_allocation
from allranks.launch.prepare import Request
from allranks.layout import Layout

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
