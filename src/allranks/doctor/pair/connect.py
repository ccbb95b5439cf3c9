"""The side of a test that connects: every step of the way to the other machine, and back."""

from __future__ import annotations

import errno
import secrets
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from allranks.doctor.check import Check
from allranks.doctor.connectivity import OpenPort
from allranks.doctor.pair import protocol
from allranks.doctor.pair.facts import PairFacts, from_fields, path_mtu, plain, side_of, to_fields
from allranks.doctor.pair.protocol import Moved, Stranger
from allranks.doctor.pair.verdict import verdict
from allranks.errors import AllranksError

CONNECT_SECONDS = 3.0
KNOCK_SECONDS = 1.5  # the other side is known to be there
TRANSFER_SECONDS = 1.0
STREAMS = 4
ARP = Path("/proc/net/arp")
MOST_ADDRESSES = 8
DEFAULT_PORT = 29500


def check_connection(target: str) -> list[Check]:
    """Test the way to a machine that listens."""
    return verdict(connect(*split_target(target)), listens=False)


def split_target(target: str) -> tuple[str, int]:
    """HOST, HOST:PORT or [IPV6]:PORT."""
    host, colon, port = target.rpartition(":")
    if not colon or (":" in host and not host.startswith("[")):  # no port, or plain IPv6
        host, port = target, str(DEFAULT_PORT)
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise AllranksError(
            f"--connect {target} is not HOST:PORT", fix="write for example --connect node1:29500"
        )
    return host.strip("[]"), int(port)


def connect(host: str, port: int, *, seconds: float = TRANSFER_SECONDS) -> PairFacts:
    """All that can be found out about the way to a listener; stops where there is none."""
    facts = PairFacts(named=host, port=port)
    resolve(facts)
    for address in facts.addresses:
        try:
            control = socket.create_connection((address, port), CONNECT_SECONDS)
        except OSError as error:
            facts.refusals[address] = reason(error)
            facts.neighbour = is_neighbour(address)
            continue
        with control:
            control.settimeout(protocol.TALK_SECONDS)
            control.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            try:
                Test(facts, control, address, seconds).run()
            except (Stranger, OSError, ValueError, KeyError, TypeError) as error:
                facts.stranger = str(error) or type(error).__name__
        return facts
    return facts


def resolve(facts: PairFacts) -> None:
    try:
        found = socket.getaddrinfo(facts.named, facts.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        facts.name_error = getattr(error, "strerror", None) or str(error)
        return
    addresses = [str(target[0]) for *_, target in found]
    facts.addresses = list(dict.fromkeys(addresses))[:MOST_ADDRESSES]


def reason(error: OSError) -> str:
    """One word for how a connection failed."""
    if isinstance(error, TimeoutError) or error.errno == errno.ETIMEDOUT:
        return "timeout"
    known = {
        errno.ECONNREFUSED: "refused",
        errno.ENETUNREACH: "no route",
        errno.EHOSTUNREACH: "no route",
        errno.EACCES: "forbidden",
        errno.EPERM: "forbidden",
    }
    return known.get(error.errno or 0, error.strerror or str(error))


def knock(address: str, port: int) -> str:
    """Another port, of those that the kernel hands out, as gloo and NCCL use; "" if it answers."""
    if not 0 < port < 65536:
        raise ValueError("no port")
    try:
        with socket.create_connection((address, port), KNOCK_SECONDS):
            return ""
    except OSError as error:
        return reason(error)


def is_neighbour(address: str, arp: Path = ARP) -> bool | None:
    """Whether a machine with this address answers on the local network; None if it is not on it."""
    with suppress(OSError):
        for line in arp.read_text().splitlines()[1:]:
            words = line.split()
            if len(words) > 2 and words[0] == address:
                return words[2] != "0x0"
    return None


class Test:
    """One test with a listener that has answered."""

    def __init__(
        self, facts: PairFacts, control: socket.socket, address: str, seconds: float
    ) -> None:
        self.facts = facts
        self.control = control
        self.address = address
        self.seconds = seconds
        self.session = ""

    def run(self) -> None:
        facts, control = self.facts, self.control
        with OpenPort(socket.socket.close) as mine:  # at which the other one may knock
            nonce = secrets.token_hex(8)
            facts.here = side_of(control)
            protocol.say(
                control,
                allranks=protocol.VERSION,
                nonce=nonce,
                side=to_fields(facts.here),
                port=mine.port,
            )
            hello = protocol.hear(control)
            if hello.get("busy"):
                raise Stranger("it is busy with another machine: try again when it is done")
            if hello.get("allranks") != protocol.VERSION or hello.get("nonce") != nonce:
                raise Stranger("it is no `allranks doctor --listen` of this version")
            facts.there = from_fields(hello["side"])
            self.session = str(hello["session"])
            times = sorted(protocol.ping(control))
            facts.round_trip = times[len(times) // 2]
            facts.jitter = times[-len(times) // 20 or -1] - times[0]
            facts.clock_offset = self._clock()
            facts.other_port_out = knock(self.address, int(hello["port"]))
            facts.other_port_in = str(protocol.hear(control)["knocked"])[:200]
        facts.also = self._other_addresses()
        facts.rate_out = _rate([self._send()])
        facts.rate_in = _rate([self._receive()])
        facts.rate_many = _rate(protocol.together([self._send] * STREAMS))
        facts.path_mtu = path_mtu(control)
        protocol.say(control, report=summary(facts))

    def _clock(self) -> float:
        """By the quickest of several answers: a slow one may have been slow one way only."""
        found: list[tuple[float, float]] = []  # seconds that the answer took, offset
        for _ in range(protocol.CLOCKS):
            asked, start = time.time(), time.perf_counter()
            protocol.say(self.control, clock=True)
            theirs = float(protocol.hear(self.control)["time"])
            took = time.perf_counter() - start
            found.append((took, theirs - (asked + took / 2)))
        return min(found)[1]

    def _other_addresses(self) -> dict[str, str]:
        """Further addresses of the listener that lead to it too, and its interface of each."""
        there = self.facts.there
        assert there is not None
        others = [each for each in there.interfaces if each != plain(self.address)]

        def attempt(address: str) -> Callable[[], bool]:
            def call() -> bool:
                with self._open("hello", address=address, seconds=KNOCK_SECONDS) as line:
                    return bool(protocol.hear(line).get("session") == self.session)

            return call

        found = protocol.together([attempt(address) for address in others[:MOST_ADDRESSES]])
        reached = [address for address, is_it in zip(others, found, strict=False) if is_it]
        return {address: there.interfaces[address] for address in reached}

    def _open(
        self, mode: str, *, address: str | None = None, seconds: float = CONNECT_SECONDS
    ) -> socket.socket:
        line = socket.create_connection((address or self.address, self.facts.port), seconds)
        line.settimeout(protocol.TALK_SECONDS)
        protocol.say(line, session=self.session, mode=mode, seconds=self.seconds)
        return line

    def _send(self) -> Moved:
        with self._open("up") as line:
            protocol.send_for(line, self.seconds)
            line.settimeout(protocol.TALK_SECONDS)
            told = protocol.hear(line)
            return Moved(int(told["bytes"]), float(told["seconds"]))

    def _receive(self) -> Moved:
        with self._open("down") as line:
            return protocol.receive_all(line, self.seconds)


def _rate(moved: list[Moved | None]) -> float | None:
    """Of connections at once: what all of them carried, in the time of the slowest."""
    known = [each for each in moved if each is not None]
    if not known:
        return None
    return sum(each.num_bytes for each in known) / max(each.seconds for each in known)


def summary(facts: PairFacts) -> dict[str, Any]:
    """What the listener is told, to say it on its own screen."""
    keys = (
        *("round_trip", "jitter", "clock_offset", "rate_out", "rate_in", "rate_many"),
        *("path_mtu", "other_port_out", "other_port_in", "named", "also"),
    )
    return {key: getattr(facts, key) for key in keys}
