"""The test between two machines: one listens, the other connects and measures the way to it.

They talk in lines of JSON, pings, and a second of bytes each way. Whoever connects sends a random
number, which must come back together with a session's key from the listener: this proves that the
other side is a doctor, and the key proves that every further connection belongs to the same test.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from allranks.doctor.connectivity import ask_time, give_time, port_of, quickest, serve, stop
from allranks.doctor.finding import Check
from allranks.doctor.pair.verdict import REPORTED, PairFacts, Side, plain, side_of, verdict
from allranks.errors import AllranksError
from allranks.machine.network import listen_on_every_address, up_interfaces

VERSION = 3
DEFAULT_PORT = 29500
LINE_BYTES = 1 << 16
BLOCK = bytes(1 << 18)
TALK_SECONDS = 10.0  # the most that one answer may take
CONNECT_SECONDS = 3.0
KNOCK_SECONDS = 1.5  # shorter: the other side is known to be there
TRANSFER_SECONDS = 1.0
MOST_SECONDS = 5.0  # of one transfer, whatever the other side asks for
PINGS = 40
STREAMS = 4
MOST_ADDRESSES = 8
MOST_SILENT = 32  # connections that have said nothing yet
ARP = Path("/proc/net/arp")
IP_MTU = 14  # Linux's socket option: what the kernel believes the whole route carries
CLOSED = "it closed the connection"
REASONS = {
    errno.ETIMEDOUT: "timeout",
    errno.ECONNREFUSED: "refused",
    errno.ENETUNREACH: "no route",
    errno.EHOSTUNREACH: "no route",
    errno.EACCES: "forbidden",
    errno.EPERM: "forbidden",
}


class Stranger(Exception):
    """Whoever answered is not a doctor, or not the one that this test began with."""


TALK_ERRORS = (Stranger, OSError, ValueError, KeyError, TypeError)


def in_words(error: Exception) -> str:
    if isinstance(error, ValidationError):
        return f"it sent an invalid {error.errors()[0]['loc'][0]}"
    return str(error) or type(error).__name__


class Moved(NamedTuple):
    """How many bytes arrived, and how long they took."""

    num_bytes: int
    seconds: float


def say(there: socket.socket, **fields: Any) -> None:
    there.sendall(json.dumps(fields).encode() + b"\n")


def hear(there: socket.socket) -> dict[str, Any]:
    """One line of JSON. Raises Stranger if it is something else, OSError if it comes too late.

    The whole line must arrive within the socket's timeout: a byte now and then keeps nobody
    waiting.
    """
    seconds, text = there.gettimeout() or TALK_SECONDS, bytearray()
    until = time.monotonic() + seconds
    try:
        while not text.endswith(b"\n"):
            there.settimeout(max(0.001, until - time.monotonic()))
            # One byte at a time: a transfer may follow the line.
            more = there.recv(1)
            if not more or len(text) > LINE_BYTES:
                raise Stranger(f"it said {bytes(text[:60])!r}" if text else CLOSED)
            text += more
    finally:
        there.settimeout(seconds)
    with suppress(ValueError, RecursionError):
        fields = json.loads(bytes(text))
        if isinstance(fields, dict):
            return fields
    raise Stranger(f"it said {bytes(text[:60])!r}")


def send_for(there: socket.socket, seconds: float) -> None:
    """Send as fast as possible for this long, then say that there is no more."""
    there.settimeout(seconds + TALK_SECONDS / 2)
    end = time.monotonic() + seconds
    with suppress(TimeoutError):  # nothing gets through: the receiver will tell
        while time.monotonic() < end:
            there.send(BLOCK)
    there.shutdown(socket.SHUT_WR)


def receive_all(there: socket.socket, seconds: float) -> Moved:
    """Count what arrives until the other side is done; the clock starts with the first byte."""
    buffer = bytearray(1 << 18)
    there.settimeout(seconds + TALK_SECONDS / 2)
    num_bytes, first, last = 0, 0.0, 0.0
    with suppress(TimeoutError):
        while count := there.recv_into(buffer):
            last = time.perf_counter()
            if first:
                num_bytes += count
            else:
                first = last  # what came with the first byte had been sent before
    return Moved(num_bytes, max(1e-9, last - first))


def all_at_once(functions: Sequence[Callable[[], Any]]) -> list[Any]:
    """What each function returns, called in threads; None for those that failed."""

    def call(function: Callable[[], Any]) -> Any:
        with suppress(*TALK_ERRORS):
            return function()

    with ThreadPoolExecutor(max(1, len(functions))) as pool:
        return list(pool.map(call, functions))


def check_connection(target: str) -> list[Check]:
    """Test the way to a machine that listens."""
    return verdict(connect(*split_target(target)), listens=False)


def split_target(target: str) -> tuple[str, int]:
    """HOST, HOST:PORT or [IPV6]:PORT."""
    host, colon, port = target.rpartition(":")
    if not colon or (":" in host and not host.startswith("[")):  # no port, or plain IPv6
        host, port = target, str(DEFAULT_PORT)
    if not host or not _is_port(port):
        raise AllranksError(
            f"--connect {target} is not HOST:PORT", fix="write for example --connect node1:29500"
        )
    return host.strip("[]"), int(port)


def _is_port(text: str) -> bool:
    return text.isdecimal() and 0 < int(text) < 65536


def connect(host: str, port: int, *, seconds: float = TRANSFER_SECONDS) -> PairFacts:
    """All that can be found out about the way to a listener, as far as it leads."""
    facts = PairFacts(named=host, port=port)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        facts.name_error = getattr(error, "strerror", None) or str(error)
        return facts
    facts.addresses = list(dict.fromkeys(str(where[0]) for *_, where in found))[:MOST_ADDRESSES]
    for address in facts.addresses:
        try:
            control = socket.create_connection((address, port), CONNECT_SECONDS)
        except OSError as error:
            facts.refusals[address] = reason(error)
            facts.neighbour = is_neighbour(address)
            continue
        with control:
            control.settimeout(TALK_SECONDS)
            control.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            try:
                Test(facts, control, address, seconds).run()
            except TALK_ERRORS as error:
                facts.stranger = in_words(error)
        break
    return facts


def reason(error: OSError) -> str:
    """How a connection failed, in a word or two."""
    if isinstance(error, TimeoutError):
        return "timeout"
    return REASONS.get(error.errno or 0, error.strerror or str(error))


def knock(address: str, port: int) -> str:
    """Try one of the ports that the kernel hands out, as gloo and NCCL use; "" if it answers."""
    if not 0 < port < 65536:
        raise ValueError("no port")
    try:
        with socket.create_connection((address, port), KNOCK_SECONDS):
            return ""
    except OSError as error:
        return reason(error)


def is_neighbour(address: str, arp: Path = ARP) -> bool | None:
    """Whether a machine on the local network has this address; None if it is not a local one."""
    with suppress(OSError):
        for line in arp.read_text().splitlines()[1:]:
            words = line.split()
            if len(words) > 2 and words[0] == address:
                return words[2] != "0x0"
    return None


@dataclass(slots=True)
class Test:
    """One test with a listener that has answered."""

    facts: PairFacts
    control: socket.socket
    address: str
    seconds: float
    session: str = ""

    def run(self) -> None:
        facts, control = self.facts, self.control
        with listen_on_every_address() as mine:  # for the other side to knock at
            nonce = secrets.token_hex(8)
            facts.here = side_of(control)
            own = {"side": asdict(facts.here), "port": port_of(mine)}
            say(control, allranks=VERSION, nonce=nonce, **own)
            hello = hear(control)
            if hello.get("busy"):
                raise Stranger("it is busy with another machine: try again when it is done")
            if hello.get("allranks") != VERSION or hello.get("nonce") != nonce:
                raise Stranger("it is not an `allranks doctor --listen` of this version")
            facts.there = Side(**hello["side"])
            self.session = str(hello["session"])
            clocks = ask_time(control, PINGS + 1)[1:]  # the first one is always slow
            times = sorted(clock.round_trip for clock in clocks)
            facts.round_trip = times[len(times) // 2]
            facts.jitter = times[-len(times) // 20 or -1] - times[0]
            facts.clock_offset = quickest(clocks).offset
            facts.other_port_out = knock(self.address, int(hello["port"]))
            facts.other_port_in = str(hear(control)["knocked"])[:200]
        others = [each for each in facts.there.interfaces if each != plain(self.address)]
        others = others[:MOST_ADDRESSES]
        reached = all_at_once([partial(self._leads_there, address) for address in others])
        facts.also = {
            address: facts.there.interfaces[address]
            for address, is_it in zip(others, reached, strict=True)
            if is_it
        }
        facts.rate_out = _rate([self._send()])
        facts.rate_in = _rate([self._receive()])
        facts.rate_many = _rate(all_at_once([self._send] * STREAMS))
        with suppress(OSError):
            facts.path_mtu = control.getsockopt(socket.IPPROTO_IP, IP_MTU)
        say(control, report={key: getattr(facts, key) for key in REPORTED})

    def _leads_there(self, address: str) -> bool:
        """Whether another address of the listener leads to it too."""
        with self._open("hello", address=address, seconds=KNOCK_SECONDS) as line:
            return bool(hear(line).get("session") == self.session)

    def _open(
        self, mode: str, *, address: str | None = None, seconds: float = CONNECT_SECONDS
    ) -> socket.socket:
        line = socket.create_connection((address or self.address, self.facts.port), seconds)
        line.settimeout(TALK_SECONDS)
        say(line, session=self.session, mode=mode, seconds=self.seconds)
        return line

    def _send(self) -> Moved:
        with self._open("up") as line:
            send_for(line, self.seconds)
            line.settimeout(TALK_SECONDS)
            told = hear(line)
            return Moved(int(told["bytes"]), float(told["seconds"]))

    def _receive(self) -> Moved:
        with self._open("down") as line:
            return receive_all(line, self.seconds)


def _rate(moved: list[Moved | None]) -> float | None:
    """Bytes per second of several connections at once, by the slowest of them."""
    known = [each for each in moved if each is not None]
    if not known:
        return None
    return sum(each.num_bytes for each in known) / max(each.seconds for each in known)


def check_as_listener(port: int, tell: Callable[[str], None]) -> tuple[list[Check], str]:
    """Wait for one `doctor --connect`; the checks, and the other machine's name."""
    listening = Listening(port, tell)
    tell(f"listening on port {listening.port}; on the other machine type one of")
    for each in up_interfaces():
        if not each.is_loopback:
            host = f"[{each.address}]" if ":" in each.address else each.address
            tell(f"  allranks doctor --connect {host}:{listening.port}   # {each.name}")
    found = listening.wait()
    assert found is not None
    return verdict(found, listens=True), found.there.host if found.there else ""


def read_port(words: Sequence[str]) -> int:
    """The port that may follow --listen."""
    if not words:
        return DEFAULT_PORT
    if len(words) > 1 or not _is_port(words[0]):
        raise AllranksError(
            f"--listen {' '.join(words)} is not a port", fix="write for example --listen 29501"
        )
    return int(words[0])


class Listening:
    """A port that waits for `doctor --connect`; `tell` gets what happens, for people to read."""

    def __init__(self, port: int, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._session = ""  # of the machine that is being served
        self._serving = threading.Lock()
        self._silent: dict[socket.socket, None] = {}  # have said nothing yet; oldest first
        self._counting = threading.Lock()
        self._done = threading.Event()
        self._found: PairFacts | None = None
        try:
            self._socket = serve(self._answer, port)
        except OSError as error:
            raise AllranksError(
                f"cannot listen on port {port}: {os.strerror(error.errno or 0)}",
                fix=f"ss -ltnp 'sport = :{port}' shows what listens there; or name another port: "
                "--listen 29501",
                exit_code=1,
            ) from None
        self.port = port_of(self._socket)

    def wait(self, seconds: float | None = None) -> PairFacts | None:
        """Serve until one test is over; None if there was none within this time."""
        until = None if seconds is None else time.monotonic() + seconds
        while not self._done.wait(0.2):  # short, so that Ctrl-C is heard
            if until is not None and time.monotonic() > until:
                break
        self.close()
        return self._found

    def close(self) -> None:
        self._done.set()
        stop(self._socket)

    def _answer(self, connection: socket.socket) -> None:
        peer = "somebody"
        try:
            with connection:
                peer = plain(str(connection.getpeername()[0]))
                connection.settimeout(TALK_SECONDS)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                first = self._first_words(connection)
                if "session" in first:
                    self._carry(connection, first)
                else:
                    self._serve(connection, first, peer)
        except TALK_ERRORS as error:
            if not self._done.is_set():
                self._tell(f"{peer}: {in_words(error)}")

    def _first_words(self, connection: socket.socket) -> dict[str, Any]:
        with self._counting:
            self._silent[connection] = None
            if len(self._silent) > MOST_SILENT:  # the one that was silent longest makes room
                oldest = next(iter(self._silent))
                del self._silent[oldest]
                with suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread closes it
        try:
            return hear(connection)
        finally:
            with self._counting:
                self._silent.pop(connection, None)

    def _carry(self, line: socket.socket, first: Mapping[str, Any]) -> None:
        """A further connection of the machine that is being served: bytes in, or bytes out."""
        if not self._session or not secrets.compare_digest(str(first["session"]), self._session):
            raise Stranger("closed a connection that belongs to no test")
        seconds = min(float(first["seconds"]), MOST_SECONDS)
        if first["mode"] == "hello":
            say(line, session=self._session)
        elif first["mode"] == "up":
            moved = receive_all(line, seconds)
            say(line, bytes=moved.num_bytes, seconds=moved.seconds)
        else:
            send_for(line, seconds)

    def _serve(self, control: socket.socket, hello: Mapping[str, Any], peer: str) -> None:
        if hello.get("allranks") != VERSION:
            raise Stranger("it is not an `allranks doctor --connect` of this version")
        if not self._serving.acquire(blocking=False):
            say(control, busy=True)
            return
        try:
            self._session = secrets.token_hex(16)
            self._test(control, hello, peer)
        finally:
            self._session = ""
            self._serving.release()

    def _test(self, control: socket.socket, hello: Mapping[str, Any], peer: str) -> None:
        theirs, mine = Side(**hello["side"]), side_of(control)
        self._tell(f"{theirs.host} ({peer}) has connected; this takes a few seconds")
        nonce = str(hello["nonce"])[:64]
        with listen_on_every_address() as other:
            greeting = {"allranks": VERSION, "nonce": nonce, "session": self._session}
            say(control, **greeting, side=asdict(mine), port=port_of(other))
            give_time(control)
            say(control, knocked=knock(peer, int(hello["port"])))
            control.settimeout(10 * TALK_SECONDS)
            told = hear(control)["report"]
        measured = {key: told[key] for key in REPORTED}
        self._found = PairFacts(**measured, here=theirs, there=mine, port=self.port)
        self._done.set()
