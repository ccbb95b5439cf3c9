"""What a node has to talk to the others, and what NCCL and gloo must be told of it. No torch.

Nothing is set without a reason found on this very node; what the user set is never touched. Run as

    python -m allranks.launch.cluster.network --peers a,b[1-3] -- COMMAND ...

it becomes COMMAND with these settings in its environment, having printed each with its reason.
"""

from __future__ import annotations

import argparse
import ctypes
import ipaddress
import itertools
import os
import socket
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allranks.gpus import local_gpus, nvml
from allranks.hardware import address_towards
from allranks.nodelist import expand

SYS = Path("/sys")
MOST_PEERS = 16  # whose routes are looked up; the nodes of one job sit in one network
RESOLVE_SECONDS = 3.0  # a name server that does not answer keeps a look-up for 10 s and more
READ = 0  # pynvml's NVML_P2P_CAPS_INDEX_READ is a tuple by mistake, which NVML does not take
# NCCL looks at the same files to find out whether a network card may read a GPU's memory.
PEER_MEMORY = (
    "module/nvidia_peermem",
    "module/nv_peer_mem",
    "kernel/mm/memory_peers/nv_mem/version",
)


@dataclass(frozen=True, slots=True)
class Interface:
    """An address of a network interface that is up."""

    name: str
    address: str
    is_loopback: bool = False


@dataclass(frozen=True, slots=True)
class Port:
    """One port of an InfiniBand or RoCE device."""

    device: str
    number: int
    state: str  # ACTIVE, DOWN, INIT, ARMED
    link_layer: str  # InfiniBand or Ethernet
    rate: str  # in the kernel's words: "200 Gb/sec (4X HDR)"

    @property
    def name(self) -> str:
        return f"{self.device}:{self.number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeNetwork:
    """What was found on one node."""

    interface: str | None = None  # the one that all routes to the peers use
    address: str | None = None  # of this node, as the peers see it
    interfaces: tuple[Interface, ...] = ()  # all that are up and have an address
    ports: tuple[Port, ...] = ()
    has_peer_memory: bool = False  # nvidia_peermem is loaded: GPUDirect RDMA without DMA-BUF
    num_gpus: int = 0
    # What NVML says of GPUs reading each other's memory: None where it does not say, or of 1 GPU.
    gpus_reach_each_other: bool | None = None


@dataclass(frozen=True, slots=True)
class Setting:
    """A variable for the ranks of this node, and why."""

    name: str
    value: str
    reason: str


def settings(node: NodeNetwork, env: Mapping[str, str], *, num_nodes: int) -> list[Setting]:
    """What this node's facts ask for, less what `env` has already. Nodes may differ in it.

    Left to NCCL, whatever the facts: NCCL_NET_GDR_LEVEL and NCCL_P2P_LEVEL. NCCL finds the
    distances, nvidia_peermem and DMA-BUF by itself, and its manual lists them for debugging only.
    """
    found = [*_gpu_settings(node)]
    if num_nodes > 1:
        found += [*_socket_settings(node), *_infiniband_settings(node)]
    return [setting for setting in found if setting.name not in env]


def _socket_settings(node: NodeNetwork) -> Iterator[Setting]:
    if node.interface is None:
        return
    real = {interface.name for interface in node.interfaces if not interface.is_loopback}
    others = sorted(real - {node.interface})
    if node.interface in real and others:
        reason = f"the other nodes are reached through it, not through {', '.join(others)}"
        # `=`: without it NCCL takes every interface whose name starts like this.
        yield Setting("NCCL_SOCKET_IFNAME", f"={node.interface}", reason)
    reason = f"the other nodes are reached through it (from {node.address}); left alone, gloo "
    reason += "takes the address that this host's own name has here, often a loopback one"
    yield Setting("GLOO_SOCKET_IFNAME", node.interface, reason)


def _infiniband_settings(node: NodeNetwork) -> Iterator[Setting]:
    active = [port for port in node.ports if port.state == "ACTIVE"]
    down = [port for port in node.ports if port.state != "ACTIVE"]
    if not down:
        return
    words = ", ".join(f"{port.name} is {port.state}" for port in down)
    if not active:
        yield Setting("NCCL_IB_DISABLE", "1", f"no InfiniBand or RoCE port is active: {words}")
    else:
        names = ",".join(port.name for port in active)
        # `=`: without it mlx5_1 also means mlx5_10.
        yield Setting("NCCL_IB_HCA", f"={names}", f"only the active ports: {words}")


def _gpu_settings(node: NodeNetwork) -> Iterator[Setting]:
    if node.num_gpus > 1 and node.gpus_reach_each_other is False:
        reason = "by NVML no GPU here can read another's memory: NCCL goes through the host's"
        yield Setting("NCCL_P2P_DISABLE", "1", reason)


def describe_node(peers: Sequence[str], sys_root: Path = SYS) -> NodeNetwork:
    """Look at this node: routes to the peers (host names or addresses), cards, GPUs."""
    interfaces = tuple(up_interfaces())
    interface, address = common_route(addresses_towards(peers), interfaces)
    num_gpus, reach = _gpu_facts()
    return NodeNetwork(
        interface=interface,
        address=address,
        interfaces=interfaces,
        ports=tuple(infiniband_ports(sys_root)),
        has_peer_memory=any((sys_root / path).exists() for path in PEER_MEMORY),
        num_gpus=num_gpus,
        gpus_reach_each_other=reach,
    )


def common_route(
    addresses: Sequence[str], interfaces: Sequence[Interface]
) -> tuple[str | None, str | None]:
    """The one interface that has these addresses of ours, and the first of them; or None.

    A loopback address counts only if there is no other: a node's own name among the peers often
    has one.
    """
    by_address = {interface.address: interface for interface in interfaces}
    routes = [(by_address[address], address) for address in addresses if address in by_address]
    outward = [route for route in routes if not route[0].is_loopback]
    names = {interface.name for interface, _ in outward or routes}
    if len(names) != 1:
        return None, None
    interface, address = (outward or routes)[0]
    return interface.name, address


def addresses_towards(peers: Sequence[str]) -> list[str]:
    """This node's own addresses on the routes to the peers; nothing is sent."""
    found: dict[str, str] = {}

    def look_up(peer: str) -> None:
        address = address_towards(peer)
        if address is not None:
            found[peer] = address

    chosen = list(dict.fromkeys(peers))[:MOST_PEERS]
    threads = [threading.Thread(target=look_up, args=(peer,), daemon=True) for peer in chosen]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(RESOLVE_SECONDS)
    return [found[peer] for peer in chosen if peer in found]


class _SocketAddress(ctypes.Structure):
    _fields_ = [("family", ctypes.c_ushort), ("data", ctypes.c_ubyte * 26)]


class _InterfaceAddress(ctypes.Structure):
    """glibc's and musl's struct ifaddrs, as far as it is used."""


_InterfaceAddress._fields_ = [
    ("next", ctypes.POINTER(_InterfaceAddress)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.POINTER(_SocketAddress)),
]
IFF_UP, IFF_LOOPBACK, IFF_RUNNING = 0x1, 0x8, 0x40


def up_interfaces() -> list[Interface]:
    """Every address of every interface that is up and has a carrier. Linux only, else empty."""
    if sys.platform != "linux":
        return []
    libc = ctypes.CDLL(None, use_errno=True)
    first = ctypes.POINTER(_InterfaceAddress)()
    if libc.getifaddrs(ctypes.byref(first)) != 0:
        return []
    found = []
    try:
        entry = first
        while entry:
            here = entry.contents
            address = _address(here)
            if address and here.flags & IFF_UP and here.flags & IFF_RUNNING:
                is_loopback = bool(here.flags & IFF_LOOPBACK)
                found.append(Interface(here.name.decode(), address, is_loopback))
            entry = here.next
    finally:
        libc.freeifaddrs(first)
    return found


def _address(entry: Any) -> str | None:
    """The address of an entry of getifaddrs; None for packet sockets and link-local ones."""
    if not entry.address:
        return None
    family, data = entry.address.contents.family, entry.address.contents.data
    if family == socket.AF_INET:  # port, then address
        return str(ipaddress.IPv4Address(bytes(data[2:6])))
    if family == socket.AF_INET6:  # port, flow, then address
        address = ipaddress.IPv6Address(bytes(data[6:22]))
        return None if address.is_link_local else str(address)
    return None


def infiniband_ports(sys_root: Path = SYS) -> list[Port]:
    """Ports of all InfiniBand and RoCE devices, as the kernel shows them."""
    ports = []
    for folder in (sys_root / "class/infiniband").glob("*/ports/*"):
        if not folder.name.isdecimal():
            continue
        state = _read(folder / "state").rpartition(":")[2].strip() or "unknown"  # "4: ACTIVE"
        device, number = folder.parent.parent.name, int(folder.name)
        layer, rate = _read(folder / "link_layer") or "unknown", _read(folder / "rate")
        ports.append(Port(device, number, state, layer, rate))
    return sorted(ports, key=lambda port: (len(port.device), port.device, port.number))


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _gpu_facts() -> tuple[int, bool | None]:
    """The number of GPUs here, and whether any of them can read another's memory."""
    gpus = local_gpus()
    if len(gpus) < 2 or any(gpu.uuid.startswith("MIG-") for gpu in gpus):
        return len(gpus), None
    with nvml() as pynvml:
        if pynvml is None:
            return len(gpus), None
        try:
            handles = [pynvml.nvmlDeviceGetHandleByUUID(gpu.uuid) for gpu in gpus]
            states = {_reads(pynvml, a, b) for a, b in itertools.combinations(handles, 2)}
        except pynvml.NVMLError:
            return len(gpus), None
    if True in states:
        return len(gpus), True
    return len(gpus), None if None in states else False


def _reads(pynvml: Any, a: Any, b: Any) -> bool | None:
    """Whether two GPUs can read each other's memory; None if NVML does not know."""
    known = {
        pynvml.NVML_P2P_STATUS_OK: True,
        pynvml.NVML_P2P_STATUS_CHIPSET_NOT_SUPPORTED: False,
        pynvml.NVML_P2P_STATUS_GPU_NOT_SUPPORTED: False,
        pynvml.NVML_P2P_STATUS_DISABLED_BY_REGKEY: False,
    }
    return known.get(pynvml.nvmlDeviceGetP2PStatus(a, b, READ))


def apply(nodes: Sequence[str]) -> None:
    """Set what this node needs in our environment, and say why; `nodes`: all of the job."""
    own = {socket.gethostname(), socket.gethostname().partition(".")[0]}
    own |= {os.environ.get("SLURMD_NODENAME", "")}
    node = describe_node([name for name in nodes if name not in own])
    for setting in settings(node, os.environ, num_nodes=len(nodes)):
        os.environ[setting.name] = setting.value
        if os.environ.get("SLURM_LOCALID", "0") == "0":  # once a node
            host = os.environ.get("SLURMD_NODENAME", socket.gethostname())
            reason = f"{setting.name}={setting.value}: {setting.reason}"
            print(f"allranks: {host}: {reason}", file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m allranks.launch.cluster.network")
    parser.add_argument("--peers", required=True, help="the nodes of the job, this one among them")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args(arguments)
    apply(expand(options.peers))
    os.execvp(options.command[0], options.command)


if __name__ == "__main__":
    main()
