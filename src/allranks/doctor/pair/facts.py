"""What a test between two machines found, as plain data that travels between them."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from allranks.machine.network import read, up_interfaces

TIMES = ("round_trip", "jitter", "clock_offset", "rate_out", "rate_in", "rate_many")
# What the side that connects tells the listener at the end.
REPORTED = (*TIMES, "path_mtu", "other_port_out", "other_port_in", "named", "also")


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One of the two machines, as it sees itself and the other."""

    host: str
    address: str  # its own end of the connection
    sees: str  # the other end
    interface: str | None = None  # that has the address
    mtu: int | None = None
    link_rate: float | None = None  # bytes per second that the interface can carry
    interfaces: Mapping[str, str] = field(default_factory=dict)  # by address, no loopback


@dataclass(slots=True, kw_only=True)
class PairFacts:
    """Seen from the side that connected. Rates are in bytes per second, times in seconds."""

    named: str  # what was typed
    port: int
    addresses: list[str] = field(default_factory=list)  # what the name resolves to
    name_error: str = ""
    refusals: dict[str, str] = field(default_factory=dict)  # address: why it could not be reached
    neighbour: bool | None = None  # whether a machine on the local network has the address
    stranger: str = ""  # what another program said there, or what went wrong
    here: Side | None = None
    there: Side | None = None
    path_mtu: int | None = None
    round_trip: float | None = None
    jitter: float | None = None  # between a quick and a slow round trip
    clock_offset: float | None = None  # of the other's clock
    rate_out: float | None = None  # one connection
    rate_in: float | None = None
    rate_many: float | None = None  # several connections at once, outwards
    other_port_out: str | None = None  # "" if a second port of theirs can be reached, else why not
    other_port_in: str | None = None  # the same, tried from there
    also: dict[str, str] = field(default_factory=dict)  # interfaces of further addresses that work


def side_of(connection: socket.socket) -> Side:
    """This machine's view of an open connection."""
    own = plain(str(connection.getsockname()[0]))
    interfaces = up_interfaces()
    name = next((each.name for each in interfaces if each.address == own), None)
    folder = Path("/sys/class/net") / (name or "-")
    mtu, megabits = read(folder / "mtu") or "", read(folder / "speed") or ""
    return Side(
        host=socket.gethostname(),
        address=own,
        sees=plain(str(connection.getpeername()[0])),
        interface=name,
        mtu=int(mtu) if mtu.isdecimal() else None,
        link_rate=int(megabits) * 1e6 / 8 if megabits.isdecimal() and int(megabits) else None,
        interfaces={each.address: each.name for each in interfaces if not each.is_loopback},
    )


def plain(address: str) -> str:
    """An address without a scope; an IPv4 address that came to an IPv6 socket as IPv4."""
    return address.removeprefix("::ffff:").partition("%")[0]


def from_fields(fields: Mapping[str, Any]) -> Side:
    """A Side as another machine sent it. Raises KeyError or ValueError if it is not one."""
    interfaces = fields["interfaces"]
    if not isinstance(interfaces, dict):
        raise ValueError("interfaces are not a mapping")
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
    """What the side that connected has measured. Raises KeyError or ValueError if it is wrong."""
    return PairFacts(
        named=_clean(fields["named"], 255),
        port=port,
        here=here,
        there=there,
        path_mtu=_number(fields["path_mtu"], int),
        other_port_out=_text(fields["other_port_out"]),
        other_port_in=_text(fields["other_port_in"]),
        also={_clean(key): _clean(value) for key, value in dict(fields["also"]).items()},
        **{key: _number(fields[key], float) for key in TIMES},
    )


def _clean(value: Any, length: int = 64) -> str:
    """Text from another machine, safe for a terminal."""
    return "".join(filter(str.isprintable, str(value)[:length]))


def _text(value: Any) -> str | None:
    return None if value is None else _clean(value)


def _number(value: Any, kind: Any) -> Any:
    return None if value is None else kind(value)
