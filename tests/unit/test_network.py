"""What follows for NCCL and gloo from what a node has."""

from __future__ import annotations

import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from allranks.launch.network import NodeNetwork, describe_node, settings
from allranks.machine.gpus import LocalGPU
from allranks.machine.network import (
    Interface,
    Port,
    addresses_towards,
    common_route,
    infiniband_ports,
    up_interfaces,
)
from allranks.machine.processes import Setting

LO = Interface("lo", "127.0.0.1", True)
ETH = Interface("eth0", "10.0.0.5")
IB = Interface("ib0", "10.1.0.5")


def values(found: list[Setting]) -> dict[str, str]:
    assert all(len(setting.reason) > 20 for setting in found)
    return {setting.name: setting.value for setting in found}


def port(name: str, state: str, number: int = 1) -> Port:
    return Port(name, number, state, "InfiniBand", "200 Gb/sec (4X HDR)")


def make_port(sys_root: Path, device: str, number: int, state: str, layer: str = "") -> None:
    folder = sys_root / "class/infiniband" / device / "ports" / str(number)
    folder.mkdir(parents=True)
    (folder / "state").write_text(f"{state}\n")
    (folder / "link_layer").write_text(f"{layer or 'InfiniBand'}\n")
    (folder / "rate").write_text("100 Gb/sec (4X EDR)\n")


def test_one_interface_is_for_gloo_alone() -> None:
    node = NodeNetwork(interface="eth0", address="10.0.0.5", interfaces=(LO, ETH))
    assert values(settings(node, {}, num_nodes=2)) == {"GLOO_SOCKET_IFNAME": "eth0"}


def test_of_several_interfaces_both_are_told_the_one_with_the_route() -> None:
    node = NodeNetwork(interface="ib0", address="10.1.0.5", interfaces=(LO, ETH, IB))
    found = settings(node, {}, num_nodes=2)
    assert values(found) == {"NCCL_SOCKET_IFNAME": "=ib0", "GLOO_SOCKET_IFNAME": "ib0"}
    assert "eth0" in found[0].reason and "10.1.0.5" in found[1].reason


def test_two_addresses_of_one_interface_are_one_interface() -> None:
    second = Interface("eth0", "fd00::5")
    node = NodeNetwork(interface="eth0", address="10.0.0.5", interfaces=(LO, ETH, second))
    assert values(settings(node, {}, num_nodes=2)) == {"GLOO_SOCKET_IFNAME": "eth0"}


def test_nodes_that_share_a_machine_meet_on_its_loopback() -> None:
    node = NodeNetwork(interface="lo", address="127.0.0.1", interfaces=(LO, ETH, IB))
    assert values(settings(node, {}, num_nodes=4)) == {"GLOO_SOCKET_IFNAME": "lo"}


def test_no_route_no_setting() -> None:
    assert settings(NodeNetwork(interfaces=(LO, ETH, IB)), {}, num_nodes=2) == []


def test_what_the_user_set_is_left_alone() -> None:
    node = NodeNetwork(
        interface="eth0",
        address="10.0.0.5",
        interfaces=(ETH, IB),
        ports=(port("mlx5_0", "DOWN"),),
        num_gpus=2,
        gpus_reach_each_other=False,
    )
    names = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_IB_DISABLE", "NCCL_P2P_DISABLE")
    assert set(values(settings(node, {}, num_nodes=2))) == set(names)
    assert settings(node, dict.fromkeys(names, ""), num_nodes=2) == []


def test_a_single_node_needs_no_network() -> None:
    node = NodeNetwork(
        interface="eth0", interfaces=(ETH, IB), ports=(port("mlx5_0", "DOWN"),), num_gpus=8
    )
    assert settings(node, {}, num_nodes=1) == []


@pytest.mark.parametrize(
    ("ports", "expected"),
    [
        ([], {}),
        ([port("mlx5_0", "ACTIVE"), port("mlx5_1", "ACTIVE")], {}),
        ([port("mlx5_0", "DOWN"), port("mlx5_1", "INIT")], {"NCCL_IB_DISABLE": "1"}),
        (
            [port("mlx5_0", "ACTIVE"), port("mlx5_1", "DOWN"), port("mlx5_1", "ACTIVE", 2)],
            {"NCCL_IB_HCA": "=mlx5_0:1,mlx5_1:2"},
        ),
    ],
)
def test_infiniband_is_used_as_far_as_it_is_up(ports: list[Port], expected: dict[str, str]) -> None:
    found = settings(NodeNetwork(ports=tuple(ports)), {}, num_nodes=2)
    assert values(found) == expected
    if expected:
        assert "mlx5_1:1 is" in found[0].reason


@pytest.mark.parametrize(("reach", "expected"), [(True, {}), (None, {}), (False, {"1"})])
def test_gpus_that_cannot_reach_each_other(reach: bool | None, expected: set[str]) -> None:
    node = NodeNetwork(num_gpus=4, gpus_reach_each_other=reach)
    assert set(values(settings(node, {}, num_nodes=1)).values()) == set(expected)


@pytest.mark.parametrize(
    ("statuses", "reach"),
    [([0, 0, 0], True), ([0, 1, 1], True), ([1, 2, 4], False), ([1, 1, 6], None)],
)
def test_what_nvml_says_of_pairs(
    statuses: list[int], reach: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter(statuses)

    def status(a: str, b: str, index: int) -> int:
        assert isinstance(index, int)
        return next(answers)

    fake = SimpleNamespace(
        NVMLError=OSError,
        NVML_P2P_STATUS_OK=0,
        NVML_P2P_STATUS_CHIPSET_NOT_SUPPORTED=1,
        NVML_P2P_STATUS_GPU_NOT_SUPPORTED=2,
        NVML_P2P_STATUS_DISABLED_BY_REGKEY=4,
        nvmlDeviceGetHandleByUUID=str,
        nvmlDeviceGetP2PStatus=status,
    )
    gpus = [LocalGPU(i, f"GPU-{i}", "NVIDIA L40S", 0, "8.9", None) for i in range(3)]
    monkeypatch.setattr("allranks.launch.network.local_gpus", lambda: gpus)
    monkeypatch.setattr("allranks.machine.gpus.nvml", lambda: nullcontext(fake))
    node = describe_node([], tmp_path)
    assert (node.num_gpus, node.gpus_reach_each_other) == (3, reach)


def test_ports_are_read_from_the_kernels_files(tmp_path: Path) -> None:
    make_port(tmp_path, "mlx5_10", 1, "1: DOWN")
    make_port(tmp_path, "mlx5_2", 1, "4: ACTIVE")
    make_port(tmp_path, "mlx5_2", 2, "4: ACTIVE", "Ethernet")
    (tmp_path / "class/infiniband/broken/ports/1").mkdir(parents=True)
    ports = {each.name: each for each in infiniband_ports(tmp_path)}
    assert list(ports) == ["broken:1", "mlx5_2:1", "mlx5_2:2", "mlx5_10:1"]
    assert [each.state for each in ports.values()] == ["unknown", "ACTIVE", "ACTIVE", "DOWN"]
    assert ports["mlx5_2:2"].link_layer == "Ethernet"
    assert ports["mlx5_10:1"].rate == "100 Gb/sec (4X EDR)"


def test_the_route_is_the_interface_that_has_the_address() -> None:
    assert common_route(["10.0.0.5", "10.0.0.5"], [LO, ETH, IB]) == ("eth0", "10.0.0.5")
    assert common_route(["127.0.0.1", "10.0.0.5"], [LO, ETH, IB]) == ("eth0", "10.0.0.5")
    assert common_route(["127.0.0.1"], [LO, ETH]) == ("lo", "127.0.0.1")
    assert common_route(["10.0.0.5", "10.1.0.5"], [LO, ETH, IB]) == (None, None)
    assert common_route(["10.9.9.9"], [LO, ETH]) == (None, None)
    assert common_route([], [LO, ETH]) == (None, None)


def test_this_machine_has_a_loopback(tmp_path: Path) -> None:
    assert "127.0.0.1" in addresses_towards(["127.0.0.1", "no.such.name.invalid"])
    assert Interface("lo", "127.0.0.1", True) in up_interfaces()
    node = describe_node(["127.0.0.1"], tmp_path)
    assert (node.interface, node.address, node.ports) == ("lo", "127.0.0.1", ())


def test_a_command_is_run_with_the_settings_and_their_reasons() -> None:
    show = "import os; print(os.environ.get('GLOO_SOCKET_IFNAME'))"
    command = [
        sys.executable,
        "-m",
        "allranks.launch.network",
        "--peers",
        "127.0.0.1,127.0.0.2",
    ]
    done = subprocess.run(
        [*command, "--", sys.executable, "-c", show], capture_output=True, text=True, check=True
    )
    assert done.stdout == "lo\n"
    assert "GLOO_SOCKET_IFNAME=lo: the other nodes are reached" in done.stderr
