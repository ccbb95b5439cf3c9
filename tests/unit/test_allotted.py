"""What this machine allots, from fixtures of /proc, cgroups, SLURM and git."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from allranks.machine import allotted, inventory
from allranks.machine.allotted import cgroup_folders, slurm_cpus
from allranks.machine.gpus import GIB, LocalGPU, find_gpu


@pytest.mark.parametrize(
    ("env", "cpus"),
    [
        ({}, None),
        ({"SLURM_CPUS_ON_NODE": "32"}, 32),
        # the batch shell of 4 tasks x 8 CPUs, from where one launcher starts every rank
        ({"SLURM_CPUS_ON_NODE": "32", "SLURM_CPUS_PER_TASK": "8"}, 32),
        # the launcher as the step's one task here
        ({"SLURM_CPUS_ON_NODE": "32", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}, 32),
        # one task for each rank
        (
            {
                "SLURM_CPUS_ON_NODE": "32",
                "SLURM_CPUS_PER_TASK": "8",
                "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
            },
            8,
        ),
        ({"SLURM_CPUS_ON_NODE": "32", "SLURM_STEP_TASKS_PER_NODE": "4"}, 8),
        (
            {
                "SLURM_CPUS_ON_NODE": "12",
                "SLURM_STEP_TASKS_PER_NODE": "4(x2),3",
                "SLURM_NODEID": "2",
            },
            4,
        ),
        ({"SLURM_CPUS_ON_NODE": "1", "SLURM_STEP_TASKS_PER_NODE": "4"}, 1),
        ({"SLURM_CPUS_PER_TASK": "6"}, 6),
        ({"SLURM_CPUS_ON_NODE": "many", "SLURM_STEP_TASKS_PER_NODE": "?"}, None),
    ],
)
def test_slurm_share(env: dict[str, str], cpus: int | None) -> None:
    assert slurm_cpus(env) == cpus


def test_tasks_per_node() -> None:
    assert allotted.parse_tasks_per_node("2(x3),1") == [2, 2, 2, 1]
    assert allotted.parse_tasks_per_node("4") == [4]
    assert allotted.parse_tasks_per_node("") == []


def test_cpu_max() -> None:
    assert allotted.parse_cpu_max("max 100000\n") is None
    assert allotted.parse_cpu_max("150000 100000\n") == 1.5


V2_MOUNT = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNT = (
    "23 22 0:5 / /proc rw - proc proc rw\n"
    "33 31 0:30 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    "34 31 0:31 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
)
DOCKER_MOUNT = "33 31 0:30 /docker/1f /sys/fs/cgroup/cpu ro - cgroup cgroup rw,cpu\n"


def test_cgroup_folders_from_the_process_up_to_the_root() -> None:
    root = "/sys/fs/cgroup"
    v2 = cgroup_folders("0::/system.slice/slurmstepd.scope/job_7\n", V2_MOUNT, "cpu")
    assert [str(folder) for folder in v2] == [
        f"{root}/system.slice/slurmstepd.scope/job_7",
        f"{root}/system.slice/slurmstepd.scope",
        f"{root}/system.slice",
        root,
    ]
    v1 = cgroup_folders("5:cpu,cpuacct:/slurm/job_7\n4:memory:/x\n", V1_MOUNT, "cpu")
    cpu = f"{root}/cpu,cpuacct"
    assert [str(folder) for folder in v1] == [f"{cpu}/slurm/job_7", f"{cpu}/slurm", cpu]
    docker = cgroup_folders("1:cpu:/docker/1f/sub\n", DOCKER_MOUNT, "cpu")
    assert [str(folder) for folder in docker] == [f"{root}/cpu/sub", f"{root}/cpu"]
    outside = cgroup_folders("0::/../../other\n", V2_MOUNT, "cpu")
    assert [str(folder) for folder in outside] == [root]
    assert cgroup_folders("0::/\n", V1_MOUNT, "cpu") == []


def fake_cgroup(monkeypatch: pytest.MonkeyPatch, folder: Path, kind: str, path: str) -> Path:
    """A /proc with this process in `path` of a cgroup mount; returns the mount point."""
    proc, mount = folder / "proc", folder / "mount"
    (proc / "self").mkdir(parents=True)
    mount.joinpath(path.lstrip("/")).mkdir(parents=True)
    line = f"0::{path}\n" if kind == "cgroup2" else f"3:cpu:{path}\n2:memory:{path}\n"
    (proc / "self/cgroup").write_text(line)
    (proc / "self/mountinfo").write_text(f"1 0 0:1 / {mount} rw - {kind} x rw,cpu,memory\n")
    monkeypatch.setattr(allotted, "PROC", proc)
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    return mount


def test_the_smallest_v2_limit_on_the_way_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mount = fake_cgroup(monkeypatch, tmp_path, "cgroup2", "/job/step")
    (mount / "job/step/cpu.max").write_text("800000 100000\n")
    (mount / "job/cpu.max").write_text("250000 100000\n")
    (mount / "job/step/memory.max").write_text("max\n")
    (mount / "job/memory.max").write_text("1048576\n")
    assert allotted.cpus_allotted() == 3
    assert allotted.memory_allotted() == 1048576
    monkeypatch.setenv("SLURM_CPUS_ON_NODE", "2")
    assert allotted.cpus_allotted() == 2


def test_v1_limits_and_none_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mount = fake_cgroup(monkeypatch, tmp_path, "cgroup", "/job")
    (mount / "job/cpu.cfs_quota_us").write_text("-1\n")
    (mount / "job/cpu.cfs_period_us").write_text("100000\n")
    (mount / "job/memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert allotted.cpus_allotted() == 16
    assert allotted.memory_allotted() == allotted.memory_total() > 2**20
    (mount / "job/cpu.cfs_quota_us").write_text("20000\n")
    assert allotted.cpus_allotted() == 1  # a fifth of a CPU is one to a thread pool
    monkeypatch.setattr(allotted, "PROC", tmp_path / "nowhere")
    assert allotted.cpus_allotted() == 16


def test_inventory_is_plain_json(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = LocalGPU(0, "GPU-a", "NVIDIA H200", 141 * GIB, "9.0", find_gpu("h200"))
    mystery = LocalGPU(1, "GPU-b", "Mystery", GIB, "9.9", None)
    versions = {"driver": "580.65.06", "cuda_driver": "13.1"}
    monkeypatch.setattr(inventory, "local_gpus", lambda: [gpu, mystery])
    monkeypatch.setattr(inventory, "gpu_link", lambda gpus: f"{len(gpus)} by NVLink")
    monkeypatch.setattr(inventory, "driver_versions", lambda: versions)
    recorded = json.loads(json.dumps(inventory.inventory()))
    assert recorded["gpu_link"] == "2 by NVLink"
    assert recorded.items() >= versions.items()
    assert [gpu["catalogue"] for gpu in recorded["gpus"]] == ["H200 SXM5", None]
    assert 1 <= recorded["cpus_allotted"] <= recorded["cpus"]
    assert recorded["memory_allotted_bytes"] <= recorded["memory_bytes"]
    assert all(recorded[key] for key in ("host", "os", "kernel", "cpu"))


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
    command = ["git", *identity, *arguments]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout


def test_code_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inventory, "GIT_SECONDS", 60.0)
    assert inventory.code_version(tmp_path / "absent") is None
    git(tmp_path, "init", "-q")
    assert inventory.code_version(tmp_path) is None  # nothing committed yet
    (tmp_path / "train.py").write_text("1\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "x", "--no-gpg-sign")
    commit = git(tmp_path, "rev-parse", "HEAD").strip()
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/log").write_text("untracked files are no change of the code\n")
    monkeypatch.setenv("GIT_DIR", "/elsewhere")
    assert inventory.code_version(tmp_path / "runs") == {"commit": commit, "dirty": False}
    (tmp_path / "train.py").write_text("2\n")
    assert inventory.code_version(tmp_path) == {"commit": commit, "dirty": True}
    monkeypatch.setattr(inventory, "GIT_SECONDS", 1e-9)
    assert inventory.code_version(tmp_path) is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert inventory.code_version(tmp_path) is None


# --- AMX that is listed, and may not be used ----------------------------------------------------

SIGILL = -4


class Trials:
    """In place of child processes that compute in bf16: how those end, by oneDNN's limit."""

    def __init__(self, **ends: int | None) -> None:
        self.ends = {"": SIGILL, **ends}
        self.tried: list[str] = []

    def __call__(self, limit: str) -> int | None:
        self.tried.append(limit)
        return self.ends.get(limit, SIGILL)


@pytest.fixture
def lists_amx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine whose CPU lists AMX; its /proc."""
    proc = tmp_path / "proc"
    (proc / "sys/kernel/random").mkdir(parents=True)
    (proc / "sys/kernel/random/boot_id").write_text("first\n")
    (proc / "cpuinfo").write_text("flags\t\t: fpu avx512_bf16 amx_bf16 amx_tile amx_int8\n")
    monkeypatch.setattr(allotted, "PROC", proc)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return proc


@pytest.mark.parametrize(
    ("ends", "usable", "tried"),
    [
        ({"": 0}, "", 1),
        ({"AVX512_CORE_BF16": 0}, "AVX512_CORE_BF16", 2),
        ({"AVX2": 0}, "AVX2", 4),
        ({}, None, 4),
    ],
)
def test_what_works_is_tried_once_for_each_boot(
    lists_amx: Path,
    monkeypatch: pytest.MonkeyPatch,
    ends: dict[str, int],
    usable: str | None,
    tried: int,
) -> None:
    trials = Trials(**ends)
    monkeypatch.setattr(allotted, "_try_half_precision", trials)
    for _ in range(2):
        assert allotted.usable_instructions() == usable
    assert len(trials.tried) == tried
    (lists_amx / "sys/kernel/random/boot_id").write_text("second\n")
    assert allotted.usable_instructions() == usable
    assert len(trials.tried) == 2 * tried


@pytest.mark.parametrize("end", [1, -9, None])  # no torch, no memory, no time
def test_a_trial_that_says_nothing_about_the_cpu_is_not_kept(
    lists_amx: Path, monkeypatch: pytest.MonkeyPatch, end: int | None
) -> None:
    trials = Trials(**{"": end})
    monkeypatch.setattr(allotted, "_try_half_precision", trials)
    assert allotted.usable_instructions() == allotted.usable_instructions() == ""
    assert trials.tried == ["", ""]


def test_a_cpu_without_amx_is_not_tried(lists_amx: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (lists_amx / "cpuinfo").write_text("flags\t\t: fpu avx2\n")
    monkeypatch.setattr(allotted, "_try_half_precision", lambda limit: pytest.fail("tried"))
    assert allotted.usable_instructions() == ""


def test_a_child_process_computes_in_bf16_and_fp16() -> None:
    assert allotted._try_half_precision("AVX2") == 0
