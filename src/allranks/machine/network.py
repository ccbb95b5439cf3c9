"""This machine's network: its interfaces, the routes to others, InfiniBand's ports and counters."""

from __future__ import annotations

import ctypes
import ipaddress
import os
import re
import socket
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SYS = Path("/sys")
MOST_PEERS = 16  # whose routes are looked up; the nodes of one job share a network
LOOPBACK = "772"  # ARPHRD_LOOPBACK in /sys/class/net/*/type
INFINIBAND = "32"
RESOLVE_SECONDS = 3.0  # a look-up takes over 10 s if the name server does not answer


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
    interfaces: tuple[str, ...] = ()  # of the same device

    @property
    def bits_per_second(self) -> float | None:
        """The rate as a number; None if the kernel does not give one."""
        match = re.match(r"(\d{1,6}(?:\.\d{1,6})?) Gb/sec", self.rate)
        return float(match[1]) * 1e9 if match else None

    @property
    def name(self) -> str:
        return f"{self.device}:{self.number}"


def common_route(
    addresses: Sequence[str], interfaces: Sequence[Interface]
) -> tuple[str | None, str | None]:
    """The only interface with these addresses of ours, and the first of them; or None.

    A loopback address counts only if there is no other: a node's own name often has one.
    """
    by_address = {interface.address: interface for interface in interfaces}
    routes = [(by_address[address], address) for address in addresses if address in by_address]
    outward = [route for route in routes if not route[0].is_loopback]
    names = {interface.name for interface, _ in outward or routes}
    if len(names) != 1:
        return None, None
    interface, address = (outward or routes)[0]
    return interface.name, address


def address_towards(host: str) -> str | None:
    """The address that this machine would use to talk to another; nothing is sent."""
    try:
        targets = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return None
    for family, kind, protocol, _, target in targets:
        # Connecting a datagram socket only asks the kernel for the route.
        with suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0]).partition("%")[0]
    return None


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


def listen_on_every_address(port: int = 0, *, backlog: int | None = None) -> socket.socket:
    """A listening socket, IPv4 and IPv6; port 0: any free one. Raises OSError if it is taken."""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", port), family=family, dualstack_ipv6=both, backlog=backlog)


def is_taken(port: int) -> bool:
    """Whether something listens on a port of this machine."""
    with socket.socket() as probe:
        try:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", port))
        except OSError:
            return True
    return False


class _SocketAddress(ctypes.Structure):
    _fields_ = [("family", ctypes.c_ushort), ("data", ctypes.c_ubyte * 26)]


class _InterfaceAddress(ctypes.Structure):
    """The fields of glibc's and musl's struct ifaddrs that are used."""


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
    ports = [
        Port(
            device=folder.parent.parent.name,
            number=int(folder.name),
            state=(read_value(folder / "state") or "").rpartition(":")[2].strip() or "unknown",
            link_layer=read_value(folder / "link_layer") or "unknown",
            rate=read_value(folder / "rate") or "",
            interfaces=tuple(names_in(folder.parent.parent / "device/net")),
        )
        for folder in (sys_root / "class/infiniband").glob("*/ports/*")
        if folder.name.isdecimal()
    ]
    return sorted(ports, key=lambda port: (len(port.device), port.device, port.number))


def infiniband_bytes(sys_root: Path = SYS) -> tuple[int, int] | None:
    """Bytes that all ports have sent and received so far; None if nothing counts them."""
    folders = [*(sys_root / "class/infiniband").glob("*/ports/*/counters")]
    try:  # in words of four bytes
        sent = sum(int((folder / "port_xmit_data").read_text()) * 4 for folder in folders)
        received = sum(int((folder / "port_rcv_data").read_text()) * 4 for folder in folders)
    except (OSError, ValueError):
        return None
    return (sent, received) if folders else None


def network(sys: Path = SYS) -> list[dict[str, object]]:
    """The network interfaces except loopback. The speed is None if the driver does not know it."""
    interfaces: list[dict[str, object]] = []
    root = sys / "class/net"
    for name in names_in(root):
        kind = read_value(root / name / "type")
        if kind is None or kind == LOOPBACK:  # without a type it is a file: bonding_masters
            continue
        megabits = read_value(root / name / "speed") or ""
        known = re.fullmatch(r"[0-9]{1,9}", megabits) and int(megabits) > 0
        interfaces.append(
            {
                "name": name,
                "state": read_value(root / name / "operstate"),
                "kind": "infiniband" if kind == INFINIBAND else "ethernet",
                "bits_per_second": int(megabits) * 1e6 if known else None,
                "physical": (root / name / "device").exists(),
            }
        )
    return interfaces


def names_in(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def read_value(path: Path) -> str | None:
    """One value of sysfs; None if it is missing, or the driver refuses (EINVAL when down)."""
    try:
        return path.read_text(errors="replace").strip() or None
    except OSError:
        return None
