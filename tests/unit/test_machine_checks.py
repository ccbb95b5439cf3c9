"""Every check of a machine, on both sides of its line; and the facts of made-up and real ones."""

from __future__ import annotations

import json
import sys
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console

from allranks.cli.doctor import doctor
from allranks.doctor.finding import failed, passed, warned
from allranks.doctor.machine.checks import check_machine, folder_check, has_kernels, variables
from allranks.doctor.machine.facts import MachineFacts, TorchFacts, collect, has_nvidia_card
from allranks.doctor.machine.here import as_checks
from allranks.doctor.show import show_checks
from allranks.launch.backends.slurm.node_gate import Verdict
from allranks.machine.disks import FolderFacts, look_at
from allranks.machine.gpus import LocalGPU
from allranks.machine.network import Interface, Port

GIB = 1 << 30
LO, ETH = Interface("lo", "127.0.0.1", True), Interface("eth0", "10.0.0.5")
GPU = LocalGPU(0, "GPU-0", "NVIDIA H200", 139 * GIB, "9.0", None)
PORT = Port("mlx5_0", 1, "ACTIVE", "InfiniBand", "400 Gb/sec (4X NDR)")
DOWN = Port("mlx5_1", 1, "DOWN", "InfiniBand", "10 Gb/sec")
ARCHS = ["sm_80", "sm_90", "compute_90"]
ASKED = {"available": True, "archs": ARCHS, "seconds": 3.0}
CUDA = TorchFacts(version="2.13.0", cuda="12.8", nccl="2.27", asked=ASKED)
RUNS = FolderFacts(path="/runs", use="runs", kind="ext4", free_bytes=100 * GIB, write_speed=5e8)
DATA = FolderFacts(path="/data", use="data", kind="nfs4", is_network=True, free_bytes=GIB)

HEALTHY: dict[str, Any] = {
    "has_driver": True,
    "nvml_answers": True,
    "driver": "570.1",
    "driver_cuda": "12.8",
    "gpus": (GPU, GPU),
    "num_gpus_in_all": 2,
    "gpu_link": "NVLink",
    "peer_access": True,
    "health": passed("health", "2 GPUs without fault"),
    "torch": CUDA,
    "interfaces": (LO, ETH),
    "names": ("lo", "eth0"),
    "ports": (PORT,),
    "host_address": "10.0.0.5",
    "cpus": 64,
    "cpus_allotted": 16,
    "memory_bytes": 512 * GIB,
    "memory_allotted": 512 * GIB,
    "limits": {"nofile": (65536, 65536), "memlock": (-1, -1), "stack": (8 << 20, -1)},
    "shm": (256 * GIB, 255 * GIB),
    "clock_synchronised": True,
    "clock_error": 0.002,
    "folders": (RUNS,),
}


def facts(**changes: Any) -> MachineFacts:
    return MachineFacts(**{**HEALTHY, **changes})


def test_a_healthy_machine_passes_every_check() -> None:
    checks = check_machine(facts())
    assert {check.status for check in checks} == {"pass"}, checks
    assert len({check.name for check in checks}) >= 18


def test_a_laptop_has_things_not_here_and_fails_nothing() -> None:
    bare = facts(
        **{"has_driver": False, "nvml_answers": False, "gpus": (), "num_gpus_in_all": 0},
        **{"health": None, "ports": (), "torch": TorchFacts(version="2.13.0+cpu")},
    )
    statuses = {check.name: check.status for check in check_machine(bare)}
    absent = ("driver", "cuda", "gpu health", "peer access", "infiniband", "nccl")
    assert {statuses[name] for name in absent} == {"not here"}
    assert set(statuses.values()) == {"pass", "not here"}


CASES: list[tuple[str, str, dict[str, Any], str]] = [
    # The check's name, how it ends, what is different, what the fix has.
    ("driver", "fail", {"nvml_answers": False, "gpus": ()}, "nvidia-smi"),
    (
        "driver",
        "fail",
        {"has_driver": False, "has_nvidia_card": True, "gpus": ()},
        "--gpus all",
    ),
    (
        "driver",
        "fail",
        {"gpus": (), "env": {"CUDA_VISIBLE_DEVICES": ""}},
        "unset CUDA_VISIBLE_DEVICES",
    ),
    ("torch", "fail", {"torch": TorchFacts()}, "pip install torch"),
    (
        "torch",
        "fail",
        {"torch": TorchFacts(version="2.13", cuda="12.8", problem="libcudart.so.12: no such")},
        "new environment",
    ),
    (
        "torch",
        "warn",
        {"torch": TorchFacts(version="2.13", cuda="12.8", asked={**ASKED, "seconds": 40.0})},
        "local disk",
    ),
    ("cuda", "fail", {"driver_cuda": "11.8"}, "whl/cu118"),
    ("cuda", "warn", {"driver_cuda": "12.4"}, "driver"),
    ("cuda", "fail", {"torch": TorchFacts(version="2.13+cpu")}, "whl/cu128"),
    (
        "cuda",
        "fail",
        {"torch": TorchFacts(version="2", cuda="12.8", asked={**ASKED, "available": False})},
        "torch.cuda.init",
    ),
    (
        "kernels",
        "fail",
        {"gpus": (LocalGPU(0, "GPU-0", "Tesla V100", GIB, "7.0", None),)},
        "older torch",
    ),
    (
        "gpu health",
        "fail",
        {"health": failed("health", "GPU 1: a faulty row could not be replaced")},
        "--exclude",
    ),
    (
        "gpu health",
        "warn",
        {"health": warned("health", "GPU 0: slowed down: power brake")},
        "nvidia-smi",
    ),
    ("peer access", "warn", {"peer_access": False}, "NVLink"),
    ("peer access", "not here", {"peer_access": None}, ""),
    (
        "nccl",
        "warn",
        {"other_nccl": ("/usr/lib/libnccl.so.2.18.3",)},
        "LD_LIBRARY_PATH",
    ),
    ("nccl", "fail", {"torch": TorchFacts(version="2")}, "pip install"),
    ("interfaces", "not here", {"interfaces": (LO,)}, ""),
    ("infiniband", "fail", {"ports": (DOWN,)}, "NCCL_IB_DISABLE=1"),
    (
        "infiniband",
        "warn",
        {"ports": (PORT, DOWN)},
        "NCCL_IB_HCA==mlx5_0:1",
    ),
    (
        "own name",
        "warn",
        {"host_address": None},
        "GLOO_SOCKET_IFNAME=eth0",
    ),
    (
        "own name",
        "fail",
        {"host_address": "127.0.1.1", "env": {"SLURM_JOB_NODELIST": "n[1-2]"}},
        "GLOO_SOCKET_IFNAME=eth0",
    ),
    ("own name", "pass", {"host_address": "127.0.1.1"}, ""),
    ("port", "warn", {"default_port_taken": True}, "ss -ltnp"),
    (
        "open files",
        "warn",
        {"limits": {"nofile": (1024, 524288)}},
        "ulimit -n 65536",
    ),
    ("open files", "fail", {"limits": {"nofile": (256, 256)}}, "site"),
    (
        "locked memory",
        "fail",
        {"limits": {"memlock": (65536, 65536)}},
        "ulimit -l unlimited",
    ),
    (
        "locked memory",
        "pass",
        {"limits": {"memlock": (65536, 65536)}, "ports": ()},
        "",
    ),
    ("stack", "warn", {"limits": {"stack": (1 << 18, -1)}}, "-s 8192"),
    (
        "processes",
        "warn",
        {"limits": {"nproc": (512, 4096)}},
        "ulimit -u 4096",
    ),
    (
        "shared memory",
        "fail",
        {"shm": (64 << 20, 64 << 20)},
        "--ipc=host",
    ),
    (
        "shared memory",
        "warn",
        {"shm": (256 * GIB, 1 << 20)},
        "ls -l /dev/shm",
    ),
    ("shared memory", "fail", {"shm": None}, "docker"),
    ("cpus", "warn", {"cpus_allotted": 2}, "use fewer ranks"),
    (
        "cpus",
        "warn",
        {"cpus_allotted": 1, "gpus": (), "env": {"SLURM_JOB_ID": "7"}},
        "--cpus-per-task=4",
    ),
    ("memory", "warn", {"memory_allotted": 8 * GIB}, "--mem=0"),
    ("clock", "warn", {"clock_synchronised": False}, "timedatectl"),
    ("clock", "warn", {"clock_error": 5.0}, "chrony"),
    ("clock", "not here", {"clock_synchronised": None}, ""),
]


@pytest.mark.parametrize(("name", "status", "changes", "fix"), CASES)
def test_each_check_says_what_is_wrong_and_what_to_type(
    name: str, status: str, changes: dict[str, Any], fix: str
) -> None:
    (found,) = [check for check in check_machine(facts(**changes)) if check.name == name]
    assert found.status == status, found
    assert fix in found.fix
    assert bool(found.fix) == (status in ("warn", "fail"))
    assert found.value


def folder(**changes: Any) -> FolderFacts:
    values = {name: getattr(RUNS, name) for name in RUNS.__dataclass_fields__}
    return FolderFacts(**{**values, **changes})


@pytest.mark.parametrize(
    ("changes", "status", "fix"),
    [
        ({}, "pass", ""),
        ({"free_bytes": GIB // 2}, "fail", "--runs DIR"),
        ({"free_bytes": 5 * GIB}, "warn", "--runs DIR"),
        ({"free_files": 0}, "fail", "remove old runs"),
        ({"is_memory": True}, "warn", "--runs DIR"),
        ({"write_speed": 1e6}, "warn", "checkpoint.every"),
        ({"problem": "Read-only file system"}, "fail", "ALLRANKS_RUNS"),
        ({"use": "data", "read_speed": 1e9}, "pass", ""),
        ({"use": "data", "read_speed": 1e6}, "warn", "bench data"),
        ({"use": "data", "read_speed": 1e6, "is_network": True}, "warn", "data.stage=local"),
        ({"use": "data", "problem": "there is no such folder"}, "fail", "--data"),
        ({"use": "data"}, "warn", "files"),
    ],
)
def test_folders_have_room_and_speed(changes: dict[str, Any], status: str, fix: str) -> None:
    found = folder_check(folder(**changes))
    assert found.status == status, found
    assert fix in found.fix


@pytest.mark.parametrize(
    ("env", "name", "status", "fix"),
    [
        ({"NCCL_SOCKET_IFNAME": "ib0"}, "NCCL_SOCKET_IFNAME", "fail", "=eth0"),
        ({"GLOO_SOCKET_IFNAME": "bond0"}, "GLOO_SOCKET_IFNAME", "fail", "=eth0"),
        (
            {"NCCL_SOCKET_IFNAME": "lo", "SLURM_JOB_NODELIST": "n[1-2]"},
            "NCCL_SOCKET_IFNAME",
            "fail",
            "=eth0",
        ),
        ({"NCCL_IB_DISABLE": "1"}, "NCCL_IB_DISABLE", "warn", "unset NCCL_IB_DISABLE"),
        ({"NCCL_NET": "Socket"}, "NCCL_NET", "warn", "unset NCCL_NET"),
        ({"NCCL_IB_HCA": "=mlx4_0:1"}, "NCCL_IB_HCA", "fail", "unset NCCL_IB_HCA"),
        ({"CUDA_VISIBLE_DEVICES": ""}, "CUDA_VISIBLE_DEVICES", "fail", "unset"),
        ({"CUDA_VISIBLE_DEVICES": "0,7"}, "CUDA_VISIBLE_DEVICES", "fail", "0 to 1"),
        (
            {"CUDA_VISIBLE_DEVICES": "0,1", "SLURM_JOB_GPUS": "1"},
            "CUDA_VISIBLE_DEVICES",
            "warn",
            "SLURM sets it",
        ),
        ({"WORLD_SIZE": "4", "RANK": "0"}, "left over", "fail", "unset RANK WORLD_SIZE"),
        ({"MASTER_ADDR": "node1"}, "left over", "warn", "unset MASTER_ADDR"),
        ({"OMP_NUM_THREADS": "128"}, "OMP_NUM_THREADS", "warn", "unset OMP_NUM_THREADS"),
        ({"OMP_PROC_BIND": "true"}, "OMP_PROC_BIND", "warn", "unset OMP_PROC_BIND"),
        (
            {"PYTORCH_CUDA_ALLOC_CONF": "a:1", "PYTORCH_ALLOC_CONF": "b:1"},
            "PYTORCH_ALLOC_CONF",
            "warn",
            "unset PYTORCH_CUDA_ALLOC_CONF",
        ),
        ({"NCCL_P2P_DISABLE": "1"}, "NCCL_P2P_DISABLE", "warn", "unset NCCL_P2P_DISABLE"),
        ({"TORCH_DISTRIBUTED_DEBUG": "detail"}, "TORCH_DISTRIBUTED_DEBUG", "warn", "unset"),
        ({"NCCL_BLOCKING_WAIT": "1"}, "NCCL_BLOCKING_WAIT", "warn", "TORCH_NCCL_BLOCKING_WAIT=1"),
        ({"NCCL_TIMEOUT": "1800"}, "NCCL_TIMEOUT", "warn", "timeout: 10m"),
    ],
)
def test_variables_that_fight(env: dict[str, str], name: str, status: str, fix: str) -> None:
    (found,) = variables(facts(env=env))
    assert (found.name, found.status) == (name, status), found
    assert fix in found.fix


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"NCCL_SOCKET_IFNAME": "eth"},
        {"NCCL_SOCKET_IFNAME": "=eth0"},
        {"NCCL_SOCKET_IFNAME": "^docker,lo"},
        {"GLOO_SOCKET_IFNAME": "lo"},
        {"NCCL_IB_HCA": "mlx5"},
        {"NCCL_IB_DISABLE": "0"},
        {"CUDA_VISIBLE_DEVICES": "0,1", "SLURM_JOB_GPUS": "4,5"},
        {"CUDA_VISIBLE_DEVICES": "GPU-8f6a,GPU-1b2c"},
        {"WORLD_SIZE": "4", "RANK": "0", "ALLRANKS_RUN_DIR": "/runs/x"},
        {"OMP_NUM_THREADS": "16", "OMP_PROC_BIND": "false"},
        {"PYTORCH_CUDA_ALLOC_CONF": "a:1", "PYTORCH_ALLOC_CONF": "a:1"},
        {"CUDA_LAUNCH_BLOCKING": "0"},
    ],
)
def test_variables_that_do_not(env: dict[str, str]) -> None:
    (found,) = variables(facts(env=env))
    assert found.status == "pass", found


def test_p2p_may_be_off_where_there_is_none() -> None:
    off = facts(env={"NCCL_P2P_DISABLE": "1"}, peer_access=False)
    assert [check.status for check in variables(off)] == ["pass"]


def test_kernels_run_on_newer_gpus_of_their_major() -> None:
    assert has_kernels("8.6", ["sm_80"]) and has_kernels("10.0", ["compute_90"])
    assert not has_kernels("7.5", ["sm_80"]) and not has_kernels("10.0", ["sm_90"])


def test_facts_come_from_the_given_roots(tmp_path: Path) -> None:
    card = tmp_path / "sys/bus/pci/devices/0000:01:00.0"
    card.mkdir(parents=True)
    (card / "vendor").write_text("0x10de\n")
    (card / "class").write_text("0x030200\n")
    port = tmp_path / "sys/class/infiniband/mlx5_0/ports/1"
    port.mkdir(parents=True)
    (port / "state").write_text("4: ACTIVE\n")
    (tmp_path / "sys/class/net/made_up0").mkdir(parents=True)
    roots = {"sys_root": tmp_path / "sys", "shm": tmp_path / "no-shm"}
    found = collect(tmp_path / "runs", [tmp_path / "absent"], env={"A": "b"}, **roots)
    assert found.has_nvidia_card and not has_nvidia_card(tmp_path)
    assert found.ports[0].name == "mlx5_0:1" and found.names == ("made_up0",)
    assert found.shm is None and found.env == {"A": "b"}
    runs, data = found.folders
    assert runs.free_bytes and runs.write_speed and data.problem
    assert not list(tmp_path.glob(".allranks-speed*"))
    assert "torch" not in sys.modules or found.torch.version  # by its files


def test_a_folder_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x" * 100_000)
    assert look_at(tmp_path, "data", writes=False).read_speed
    assert look_at(Path("/proc"), "runs", writes=True).problem


def test_the_screen_fits_a_narrow_terminal_and_keeps_every_word() -> None:
    checks = check_machine(facts(env={"WORLD_SIZE": "2"}, driver_cuda="11.8"))
    output = StringIO()
    show_checks(checks, "node1", 1.0, Console(file=output, width=60))
    lines = output.getvalue().splitlines()
    assert max(map(len, lines)) <= 75  # a long URL is not cut
    text = " ".join(output.getvalue().split())
    assert "unset WORLD_SIZE" in text and "https://download.pytorch.org/whl/cu118" in text
    assert lines[-1].startswith("node1: ") and "2 fail" in lines[-1]


def test_nodes_that_failed_are_failures_with_what_to_exclude() -> None:
    bad = Verdict(("a", "b"), failed={"b": "cannot be reached by a"}, warnings=["a: clock is off"])
    rows = as_checks(bad)
    assert [(row.name, row.status) for row in rows] == [("b", "fail"), ("a", "warn")]
    assert "--exclude=b" in rows[0].fix
    good = Verdict(("a", "b"), bandwidth=1.5e9, backend="gloo")
    assert [row.status for row in as_checks(good)] == ["pass"]


def test_this_machine_is_checked_in_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WORLD_SIZE", "RANK", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(typer.Exit):
        doctor(runs=tmp_path, as_json=True)
    printed = json.loads(capsys.readouterr().out)
    assert {"host", "ok", "seconds", "checks"} <= set(printed)
    assert {"check", "status", "value", "fix"} == set(printed["checks"][0])
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(typer.Exit) as ended:
        doctor(runs=tmp_path, as_json=True)
    assert ended.value.exit_code == 1
