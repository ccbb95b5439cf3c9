"""The machine itself, on made-up trees and the answers of programs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allranks.machine import inventory as machine
from allranks.machine.inventory import (
    answer,
    describe_machine,
    first_line,
    infiniband,
    nccl,
    newest_nccl,
    parse_nvcc,
    parse_torch_version,
    parse_ucx,
)
from allranks.machine.network import Port, network


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def port(device: str, state: str, rate: str, layer: str) -> dict[str, str]:
    folder = f"class/infiniband/{device}/ports/1"
    return {
        f"{folder}/state": f"{state}\n",
        f"{folder}/rate": f"{rate}\n",
        f"{folder}/link_layer": f"{layer}\n",
    }


def test_infiniband_ports_have_state_rate_and_link_layer(tmp_path: Path) -> None:
    sys = tree(
        tmp_path,
        port("mlx5_0", "4: ACTIVE", "200 Gb/sec (4X HDR)", "InfiniBand")
        | port("mlx5_1", "1: DOWN", "2.5 Gb/sec (1X SDR)", "Ethernet"),
    )
    (tmp_path / "class/infiniband/mlx5_0/device/net/ib0").mkdir(parents=True)
    first, second = infiniband(sys)
    assert first == {
        "device": "mlx5_0",
        "port": 1,
        "state": "active",
        "rate": "200 Gb/sec (4X HDR)",
        "bits_per_second": 200e9,
        "link_layer": "InfiniBand",
        "interfaces": ["ib0"],
    }
    assert (second["state"], second["bits_per_second"]) == ("down", 2.5e9)
    assert second["link_layer"] == "Ethernet"


def test_a_port_that_tells_nothing_is_still_listed(tmp_path: Path) -> None:
    (tmp_path / "class/infiniband/hfi1_0/ports/1").mkdir(parents=True)
    (found,) = infiniband(tmp_path)
    assert found["state"] is None and found["bits_per_second"] is None


def test_network_interfaces_have_a_speed_where_it_is_known(tmp_path: Path) -> None:
    files = {"lo/type": "772", "bonding_masters": "bond0"}
    files |= {"eth0/type": "1", "eth0/speed": "25000", "eth0/operstate": "up"}
    files |= {"ib0/type": "32", "ib0/speed": "200000", "ib0/operstate": "up"}
    files |= {"eth1/type": "1", "eth1/speed": "-1", "eth1/operstate": "down"}
    sys = tree(tmp_path, {f"class/net/{name}": text for name, text in files.items()})
    (tmp_path / "class/net/eth0/device").mkdir()
    eth0, eth1, ib0 = network(sys)
    assert eth0 == {
        "name": "eth0",
        "state": "up",
        "kind": "ethernet",
        "bits_per_second": 25e9,
        "physical": True,
    }
    assert eth1["bits_per_second"] is None and eth1["physical"] is False
    assert (ib0["kind"], ib0["bits_per_second"]) == ("infiniband", 200e9)


def test_no_links_at_all(tmp_path: Path) -> None:
    assert infiniband(tmp_path) == [] and network(tmp_path) == []


NVCC = """nvcc: NVIDIA (R) Cuda compiler driver
Copyright (c) 2005-2024 NVIDIA Corporation
Built on Thu_Mar_28_02:18:24_PDT_2024
Cuda compilation tools, release 12.4, V12.4.131
Build cuda_12.4.r12.4/compiler.34097967_0
"""
TORCH = """from typing import Optional

__all__ = ['__version__', 'debug', 'cuda', 'git_version', 'hip']
__version__ = '2.6.0+cu124'
debug = False
cuda: Optional[str] = '12.4'
git_version = '2236df1770800ffea5697b11b0bb0d910b2e59e1'
hip: Optional[str] = None
"""


def test_versions_are_read_from_what_programs_print() -> None:
    assert parse_nvcc(NVCC) == "12.4.131"
    assert parse_nvcc("release 9.2") == "9.2"
    assert parse_ucx("# Library version: 1.15.0\n# Library path: /lib/libucs.so.0\n") == "1.15.0"
    assert parse_ucx("# UCT version=1.8.1 revision 6b29558\n") == "1.8.1"
    assert parse_torch_version(TORCH) == "12.4"
    assert parse_torch_version(TORCH.replace("'12.4'", "None")) is None
    assert first_line("mpirun (Open MPI) 4.1.4\n\nReport bugs\n") == "mpirun (Open MPI) 4.1.4"
    assert parse_nvcc(None) is parse_ucx(None) is first_line(None) is first_line("\n") is None


@given(st.text())
def test_any_text_has_a_version_or_none(text: str) -> None:
    for parse in (parse_nvcc, parse_ucx, parse_torch_version, first_line):
        parse(text)
    newest_nccl([text])
    Port("mlx5_0", 1, "ACTIVE", "InfiniBand", text).bits_per_second  # noqa: B018


def test_nccl_of_the_package_comes_before_that_of_the_system(tmp_path: Path) -> None:
    for name in ("libnccl.so", "libnccl.so.2", "libnccl.so.2.9.6", "libnccl.so.2.18.3"):
        (tmp_path / name).touch()
    env = {"LD_LIBRARY_PATH": f"/nowhere:{tmp_path}"}
    assert nccl({}, env) == {"version": "2.18.3", "from": str(tmp_path)}
    package = nccl({"nvidia-nccl-cu12": "2.21.5"}, env)
    assert package == {"version": "2.21.5", "from": "nvidia-nccl-cu12"}


def test_nothing_is_waited_for_long(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "mpirun"
    program.write_text("#!/bin/sh\nexec sleep 30\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(machine, "PROGRAM_SECONDS", 0.2)
    assert answer("mpirun", "--version") is None
    assert answer("a-program-that-nobody-has") is None


def test_this_machine_is_described_in_plain_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "answer", lambda *_: None)
    found = json.loads(json.dumps(describe_machine()))
    assert found["cpus"] >= 1 and found["mpi"] is None and found["ucx"] is None
    assert {"driver", "driver_runs", "toolkit", "torch", "torch_cuda"} == set(found["cuda"])


def test_neither_torch_nor_numpy_is_imported() -> None:
    code = (
        "import sys, allranks.slurm.cluster_screen, allranks.slurm.queue\n"
        "from allranks.machine.inventory import describe_machine, package_versions\n"
        "describe_machine()\n"
        "assert {'python', 'allranks', 'torch', 'numpy'} <= set(package_versions())\n"
        "assert not {'torch', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=150)
