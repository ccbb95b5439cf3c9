"""Which nodes can connect to which, and how far apart their clocks are."""

from __future__ import annotations

import json
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from allranks.machine.network import listen_on_every_address
from allranks.run.folder import write_atomically

CONNECT_SECONDS = 2.0
ROUND_TRIPS, MOST_ROUND_TRIPS = 8, 100
NUM_THREADS = 16
NEVER_CAME = "never came"
TIME = struct.Struct("!d")


def serve(answer: Callable[[socket.socket], None], port: int = 0) -> socket.socket:
    """Listen on every address, IPv4 and IPv6; `answer` gets each connection in its own thread.

    Port 0 is any free one. Raises OSError if the port is taken.
    """
    listening = listen_on_every_address(port)

    def accept() -> None:
        with suppress(OSError):  # closed
            while True:
                connection, _ = listening.accept()
                threading.Thread(target=answer, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    return listening


def stop(listening: socket.socket) -> None:
    with suppress(OSError):  # wakes the thread that accepts
        listening.shutdown(socket.SHUT_RDWR)
    listening.close()


def port_of(listening: socket.socket) -> int:
    return int(listening.getsockname()[1])


class Listener:
    """A port that greets with this node's name, then gives the time whenever asked."""

    def __init__(self, node: str, clock: Callable[[], float] = time.time) -> None:
        self._node = node
        self._clock = clock
        self.greeted: list[float] = []  # when
        self._socket = serve(self._answer)
        self.port = port_of(self._socket)

    def close(self) -> None:
        stop(self._socket)

    def _answer(self, connection: socket.socket) -> None:
        with suppress(OSError), connection:
            connection.settimeout(2 * CONNECT_SECONDS)
            connection.sendall(f"{self._node}\n".encode())
            self.greeted.append(time.monotonic())
            give_time(connection, self._clock)


@dataclass(frozen=True, slots=True)
class Clock:
    """How far another node's clock is ahead of ours, to within half the round trip."""

    offset: float  # seconds
    round_trip: float


@dataclass(slots=True)
class Reached:
    """Peers that answered, with their clocks if asked for, and why the others did not."""

    answered: dict[str, Clock | None] = field(default_factory=dict)
    silent: dict[str, str] = field(default_factory=dict)


class Directory:
    """Where the nodes listen, as they say in files in the folder and through the store.

    Files come first, before torch is imported; but a network disk may show a new file late, and a
    node that cannot write has none.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._told: dict[str, Mapping[str, Any]] = {}

    def publish(self, node: str, entry: Mapping[str, Any]) -> None:
        write_atomically(self._folder / f"{node}.listen", json.dumps(dict(entry)))

    def tell(self, node: str, entry: Mapping[str, Any]) -> None:
        self._told[node] = entry

    def find(self, node: str) -> Mapping[str, Any] | None:
        if node in self._told:
            return self._told[node]
        try:
            entry = json.loads((self._folder / f"{node}.listen").read_bytes())
        except (OSError, ValueError):
            return None
        return entry if isinstance(entry, dict) else None


def reach_all(
    peers: Sequence[str],
    directory: Directory,
    *,
    deadline: float,
    ask_clock_of: str | None = None,
) -> Reached:
    """Connect to every peer, retrying until `deadline` (of time.monotonic)."""
    reached = Reached(silent=dict.fromkeys(peers, NEVER_CAME))
    waiting: queue.Queue[str] = queue.Queue()
    for peer in peers:
        waiting.put(peer)

    def work() -> None:
        while time.monotonic() < deadline and reached.silent:
            try:
                peer = waiting.get(timeout=0.1)
            except queue.Empty:
                continue
            entry = directory.find(peer)
            if entry is not None:
                try:
                    reached.answered[peer] = _greet(peer, entry, peer == ask_clock_of)
                    reached.silent.pop(peer)
                    continue
                except (OSError, ValueError, KeyError, TypeError) as error:
                    reached.silent[peer] = str(error) or type(error).__name__
            time.sleep(0.1)
            waiting.put(peer)

    count = min(NUM_THREADS, len(peers))
    threads = [threading.Thread(target=work, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return Reached(dict(reached.answered), dict(reached.silent))


def _greet(peer: str, entry: Mapping[str, Any], asks_clock: bool) -> Clock | None:
    """Connect once; raises OSError in the kernel's words, or ValueError for a wrong greeting."""
    failure: Exception = OSError("it has no address")
    for host in entry["addresses"]:
        try:
            with socket.create_connection((host, int(entry["port"])), CONNECT_SECONDS) as there:
                there.settimeout(2 * CONNECT_SECONDS)
                there.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                name = _line(there)
                if name == peer:
                    return quickest(ask_time(there, ROUND_TRIPS)) if asks_clock else None
                failure = ValueError(f"{host}:{entry['port']} is answered by {name!r}")
        except OSError as error:
            failure = OSError(f"{host}:{entry['port']}: {error.strerror or error}")
    raise failure


def give_time(there: socket.socket, clock: Callable[[], float] = time.time) -> None:
    """Answer every byte with the time, until the other side is done (a zero byte) or gone."""
    for _ in range(MOST_ROUND_TRIPS):
        if there.recv(1) in (b"", b"\0"):
            break
        there.sendall(TIME.pack(clock()))


def ask_time(there: socket.socket, times: int) -> list[Clock]:
    """The other side's clock, asked again and again."""
    clocks = []
    for _ in range(times):
        asked, start = time.time(), time.perf_counter()
        there.sendall(b"?")
        (answer,) = TIME.unpack(_exactly(there, TIME.size))
        round_trip = time.perf_counter() - start
        clocks.append(Clock(answer - (asked + round_trip / 2), round_trip))
    there.sendall(b"\0")
    return clocks


def quickest(clocks: Sequence[Clock]) -> Clock:
    """The most accurate of several answers: a slow one may be slow one way only."""
    return min(clocks, key=lambda each: each.round_trip)


def _line(there: socket.socket) -> str:
    text = b""
    while not text.endswith(b"\n") and len(text) < 300:
        text += _exactly(there, 1)
    return text.decode(errors="replace").rstrip("\n")


def _exactly(there: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = there.recv(size - len(data))
        if not more:
            raise OSError("the connection was closed at once")
        data += more
    return data
