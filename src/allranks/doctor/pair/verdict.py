"""A test between two machines: its facts, and what they mean for each of the two."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterator
from dataclasses import field
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator
from pydantic.dataclasses import dataclass

from allranks.doctor.finding import Check, failed, not_here, passed, warned
from allranks.machine.network import read_value, up_interfaces
from allranks.show import numbers
from allranks.show.numbers import duration

MOST_SKEW = 1.0  # seconds
SLOW_ROUND_TRIP = 2e-3
SHARE_OF_LINK = 0.5  # that a transfer should reach
SLOW_RATE = 110e6  # bytes per second: what an old 1 Gbit/s link carries
LEAST_RATE = 1 << 16  # less is nothing: only small packets get through
MANY_GAIN = 1.5
MOST_LETTERS = 255  # of a name
# What the side that connects tells the listener at the end.
REPORTED = (
    *("named", "round_trip", "jitter", "clock_offset", "rate_out", "rate_in", "rate_many"),
    *("path_mtu", "other_port_out", "other_port_in", "also"),
)


def printable(text: str) -> str:
    """Text from another machine, safe for a terminal."""
    return "".join(filter(str.isprintable, text[:MOST_LETTERS]))


Word = Annotated[str, AfterValidator(printable)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One of the two machines, as it sees itself and the other."""

    host: Word
    address: Word  # its own end of the connection
    sees: Word  # the other end
    interface: Word | None = None  # that has the address
    mtu: int | None = None
    link_rate: float | None = None  # bytes per second that the interface can carry
    interfaces: dict[Word, Word] = field(default_factory=dict)  # by address, no loopback


@dataclass(slots=True, kw_only=True)
class PairFacts:
    """Seen from the side that connected. Rates are in bytes per second, times in seconds."""

    named: Word  # what was typed
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
    other_port_out: Word | None = None  # "" if a second port of theirs can be reached, else why not
    other_port_in: Word | None = None  # of ours, tried from there
    also: dict[Word, Word] = field(default_factory=dict)  # further addresses that work


def side_of(connection: socket.socket) -> Side:
    """This machine's view of an open connection."""
    own = plain(str(connection.getsockname()[0]))
    interfaces = up_interfaces()
    name = next((each.name for each in interfaces if each.address == own), None)
    folder = Path("/sys/class/net") / (name or "-")
    mtu, megabits = read_value(folder / "mtu") or "", read_value(folder / "speed") or ""
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


def verdict(facts: PairFacts, *, listens: bool) -> list[Check]:
    """The checks, in the order in which a connection is made."""
    if facts.here is None or facts.there is None or facts.round_trip is None:
        return list(unreached(facts))
    own, other = (facts.there, facts.here) if listens else (facts.here, facts.there)
    return [
        name(facts) if not listens else passed("name", f"{other.host} connected from {own.sees}"),
        route(own, other),
        ports(facts, listens=listens),
        latency(facts),
        *bandwidth(facts, own, listens=listens),
        mtu(own, other, facts.path_mtu),
        clock(facts, other),
        interface(facts, own, other, listens=listens),
    ]


def unreached(facts: PairFacts) -> Iterator[Check]:
    """Where the way to the listener ends."""
    there = "allranks doctor --listen there prints the addresses to use"
    if facts.name_error:
        value = f"{facts.named} does not resolve: {facts.name_error}"
        yield failed("name", value, f"check the spelling, or use its address; {there}")
        return
    yield name(facts)
    for address, why in facts.refusals.items():
        yield refused(facts, address, why)
    if facts.stranger:
        fix = f"start allranks doctor --listen there, with another port if {facts.port} is taken"
        where = f"{facts.named}:{facts.port}"
        yield failed("port", f"{where} answers, but is no `allranks doctor`: {facts.stranger}", fix)


def refused(facts: PairFacts, address: str, why: str) -> Check:
    where = f"{address}:{facts.port}"
    listen = f"allranks doctor --listen {facts.port}"
    if why == "refused":
        fix = f"start {listen} there; if it is running, a firewall there rejects the port: open it"
        return failed("port", f"{where}: nothing is listening there (refused)", fix)
    if why == "no route":
        fix = f"ip route get {address}; use an address in a network that both machines share"
        return failed("route", f"{address}: no route from here", fix)
    if why == "forbidden":
        fix = "ask the site: a rule of this machine's own firewall forbids it (nft list ruleset)"
        return failed("port", f"{where}: this machine may not connect", fix)
    if why == "timeout" and facts.neighbour is False:
        fix = f"check the address with ip addr on the other machine; is it up? Then {listen} there"
        return failed("route", f"no machine on this network has the address {address}", fix)
    if why == "timeout":
        known = " (it is on this network)" if facts.neighbour else ""
        fix = (
            f"a firewall drops it: open the port there (firewall-cmd --add-port={facts.port}/tcp, "
            f"ufw allow {facts.port}/tcp, or the cloud's security group); is {address} right?"
        )
        return failed("port", f"{where}: no answer{known}", fix)
    return failed("port", f"{where}: {why}", f"start {listen} there")


def name(facts: PairFacts) -> Check:
    shown = ", ".join(facts.addresses)
    if _is_address(facts.named):
        return not_here("name", f"{facts.named} is an address")
    value = f"{facts.named} is {shown}"
    there = facts.there
    loops = [each for each in facts.addresses if ipaddress.ip_address(each).is_loopback]
    if loops and (there is None or facts.here is None or there.host != facts.here.host):
        fix = "use the address that the listener prints; correct the line in /etc/hosts"
        return failed("name", f"{value}: this machine itself", fix)
    if there is not None and facts.refusals:
        first = next(iter(facts.refusals))
        fix = f"use {there.address}, or correct the name: ranks try {first} first and wait"
        return warned("name", f"{value}, but {first} does not answer", fix)
    return passed("name", value)


def route(own: Side, other: Side) -> Check:
    value = f"{own.address} ({own.interface or 'no interface'}) to {own.sees}"
    if own.address != other.sees or other.address != own.sees:
        fix = "there is NAT between them: ranks need a network without it (VPN, same subnet)"
        return failed("route", f"{value}, but the other side sees {other.sees}", fix)
    return passed("route", value)


def ports(facts: PairFacts, *, listens: bool) -> Check:
    out, back = facts.other_port_out, facts.other_port_in
    if listens:
        out, back = back, out
    blocked = [
        f"{words} {why}" for words, why in (("from here:", out), ("from there:", back)) if why
    ]
    if not blocked:
        return passed("port", f"{facts.port} and the kernel's ephemeral ports work, both ways")
    return failed(
        "port",
        f"{facts.port} works, but other ports do not ({'; '.join(blocked)})",
        "gloo and NCCL use any port: open all between these machines, or at least those of "
        "sysctl net.ipv4.ip_local_port_range, both ways",
    )


def latency(facts: PairFacts) -> Check:
    assert facts.round_trip is not None
    value = f"{duration(facts.round_trip)} there and back"
    if facts.jitter is not None:
        value += f", up to {duration(facts.jitter)} more"
    if facts.round_trip > SLOW_ROUND_TRIP:
        fix = "use machines on one network (same zone, same switch): every exchange pays this"
        return warned("latency", value, fix)
    return passed("latency", value)


def bandwidth(facts: PairFacts, own: Side, *, listens: bool) -> Iterator[Check]:
    out, back = facts.rate_out, facts.rate_in
    if listens:
        out, back = back, out
    yield direction("bandwidth out", out, facts, own)
    yield direction("bandwidth in", back, facts, own)
    if facts.rate_many and facts.rate_out and facts.rate_many > MANY_GAIN * facts.rate_out:
        value = f"{rate(facts.rate_many)} with 4 connections at once"
        fix = "export NCCL_SOCKET_NTHREADS=4 NCCL_NSOCKS_PERTHREAD=2, on every node"
        yield warned("connections", value, fix)


def direction(label: str, measured: float | None, facts: PairFacts, own: Side) -> Check:
    assert facts.here is not None and facts.there is not None
    if measured is None or measured < LEAST_RATE:
        fix = (
            f"large packets are lost on the way: ip link set dev {own.interface} mtu 1500, on both"
        )
        return failed(label, "small packets get through, but large ones do not", fix)
    links = [side.link_rate for side in (facts.here, facts.there) if side.link_rate]
    value = rate(measured)
    if links and measured < SHARE_OF_LINK * min(links):
        fix = f"ethtool -S {own.interface} shows errors; is it shared, or the wrong one?"
        return warned(label, f"{value} of the link's {rate(min(links))}", fix)
    if not links and measured < SLOW_RATE:
        fix = "use faster interfaces if there are any; otherwise prefer layouts with fewer nodes"
        return warned(label, value, fix)
    return passed(label, value)


def mtu(own: Side, other: Side, path: int | None) -> Check:
    ends = [side.mtu for side in (own, other) if side.mtu]
    if not ends:
        return not_here("mtu", "not known")
    value = f"{path or min(ends)} bytes along the route"
    if len(set(ends)) > 1:
        value += f"; the interfaces have {own.mtu} here and {other.mtu} on {other.host}"
        fix = f"ip link set dev {own.interface} mtu {min(ends)}: both must be equal"
        return warned("mtu", value, fix)
    return passed("mtu", value)


def clock(facts: PairFacts, other: Side) -> Check:
    offset, slack = facts.clock_offset, (facts.round_trip or 0.0) / 2
    if offset is None:
        return not_here("clock", "not known")
    value = f"{duration(abs(offset))} apart, give or take {duration(slack)}"
    if abs(offset) - slack > MOST_SKEW:
        fix = f"timedatectl set-ntp true, here and on {other.host}: logs cannot be compared yet"
        return warned("clock", value, fix)
    return passed("clock", value)


def interface(facts: PairFacts, own: Side, other: Side, *, listens: bool) -> Check:
    """What to tell NCCL and gloo, with the interface names that the test really used."""
    if own.interface is None:
        return not_here("interface", f"no interface here has {own.address}")
    value = f"{own.interface} here, {other.interface} on {other.host}"
    tell = f"export NCCL_SOCKET_IFNAME=={own.interface} GLOO_SOCKET_IFNAME={own.interface}"
    master = own.address if listens else own.sees
    use = f"--master {master}:{facts.port}"
    if facts.also and not listens:
        ways = ", ".join(f"{address} ({iface})" for address, iface in facts.also.items())
        value += f"; {other.host} can also be reached at {ways}"
    has_choice = len(set(own.interfaces.values())) > 1 or bool(facts.also)
    return Check("interface", "pass", value, f"{tell}; {use}" if has_choice else use)


def rate(bytes_per_second: float) -> str:
    return f"{numbers.bit_rate(8 * bytes_per_second)} ({numbers.rate(bytes_per_second)})"


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
