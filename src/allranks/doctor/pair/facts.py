"""What a test between two machines found, as plain data that travels between them. No torch."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from allranks.machine.network import Interface, read, up_interfaces

SYS = Path("/sys")
IP_MTU = 14  # Linux's socket option: what the kernel believes the whole route carries


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One of the two machines, as it sees itself and the other one."""

    host: str
    address: str  # its own, on the connection
    sees: str  # the other one's, on the connection
    interface: str | None = None  # that has the address
    mtu: int | None = None
    link_rate: float | None = None  # bytes a second that the interface can at most
    interfaces: Mapping[str, str] = field(default_factory=dict)  # address: name, loopback left out


@dataclass(slots=True, kw_only=True)
class PairFacts:
    """Seen from the side that connected. Rates are bytes a second, times seconds."""

    named: str  # what was typed
    port: int
    addresses: list[str] = field(default_factory=list)  # that the name stands for
    name_error: str = ""
    refusals: dict[str, str] = field(default_factory=dict)  # address: why it could not be reached
    neighbour: bool | None = (
        None  # whether the address answers on the local network, if it is on it
    )
    stranger: str = ""  # what another program said there
    here: Side | None = None
    there: Side | None = None
    path_mtu: int | None = None
    round_trip: float | None = None
    jitter: float | None = None  # between a quick and a slow round trip
    clock_offset: float | None = None  # of the other one's clock
    rate_out: float | None = None  # one connection
    rate_in: float | None = None
    rate_many: float | None = None  # several at once, outwards
    other_port_out: str | None = None  # "" if a second port of theirs can be reached, else why not
    other_port_in: str | None = None  # the same from there
    also: dict[str, str] = field(default_factory=dict)  # further addresses that work: interface


def side_of(connection: socket.socket, sys_root: Path = SYS) -> Side:
    """This machine's view of an open connection."""
    own = plain(str(connection.getsockname()[0]))
    interfaces = up_interfaces()
    name = interface_of(own, interfaces)
    mtu = read(sys_root / "class/net" / (name or "-") / "mtu")
    megabits = read(sys_root / "class/net" / (name or "-") / "speed") or ""
    return Side(
        host=socket.gethostname(),
        address=own,
        sees=plain(str(connection.getpeername()[0])),
        interface=name,
        mtu=int(mtu) if mtu and mtu.isdecimal() else None,
        link_rate=int(megabits) * 1e6 / 8 if megabits.isdecimal() and int(megabits) else None,
        interfaces={each.address: each.name for each in interfaces if not each.is_loopback},
    )


def interface_of(address: str, interfaces: Sequence[Interface]) -> str | None:
    return next((each.name for each in interfaces if each.address == address), None)


def plain(address: str) -> str:
    """IPv4 as IPv4, also where it came to an IPv6 socket; no scope."""
    return address.removeprefix("::ffff:").partition("%")[0]


def path_mtu(connection: socket.socket) -> int | None:
    try:
        return connection.getsockopt(socket.IPPROTO_IP, IP_MTU)
    except OSError:
        return None


def to_fields(side: Side) -> dict[str, Any]:
    return {
        "host": side.host,
        "address": side.address,
        "sees": side.sees,
        "interface": side.interface,
        "mtu": side.mtu,
        "link_rate": side.link_rate,
        "interfaces": dict(side.interfaces),
    }


def from_fields(fields: Mapping[str, Any]) -> Side:
    """Raises KeyError or ValueError: it comes from another machine."""
    interfaces = fields["interfaces"]
    if not isinstance(interfaces, dict):
        raise ValueError("interfaces are no mapping")
    return Side(
        host=_clean(fields["host"], 255),
        address=_clean(fields["address"]),
        sees=_clean(fields["sees"]),
        interface=_text(fields.get("interface")),
        mtu=_number(fields.get("mtu"), int),
        link_rate=_number(fields.get("link_rate"), float),
        interfaces={_clean(key): _clean(value) for key, value in interfaces.items()},
    )


def from_report(fields: Mapping[str, Any], *, here: Side, there: Side, port: int) -> PairFacts:
    """What the side that connected has measured, told at the end. Raises as `from_fields` does."""
    times = ("round_trip", "jitter", "clock_offset", "rate_out", "rate_in", "rate_many")
    return PairFacts(
        named=_clean(fields["named"], 255),
        port=port,
        here=here,
        there=there,
        path_mtu=_number(fields["path_mtu"], int),
        other_port_out=_text(fields["other_port_out"]),
        other_port_in=_text(fields["other_port_in"]),
        also={_clean(key): _clean(value) for key, value in dict(fields["also"]).items()},
        **{key: _number(fields[key], float) for key in times},
    )


def _clean(value: Any, length: int = 64) -> str:
    """A word of another machine, fit for a terminal."""
    return "".join(filter(str.isprintable, str(value)[:length]))


def _text(value: Any) -> str | None:
    return None if value is None else _clean(value)


def _number(value: Any, kind: Any) -> Any:
    return None if value is None else kind(value)
