"""How the two sides of a test talk: lines of JSON, pings, and bytes for a second. No torch.

Whoever connects sends a random number, which must come back with one of the listener's own: so
each side knows that the other is a doctor, and every further connection that it is the same one.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

VERSION = 2
LINE_BYTES = 1 << 16
BLOCK = bytes(1 << 18)
TALK_SECONDS = 10.0  # that one answer may take
LEAST_BYTES = 1 << 16  # fewer than that in a second is nothing: only small packets get through
PINGS = 40
CLOCKS = 8
MOST_SECONDS = 5.0  # of one transfer, whatever the other side asks for


CLOSED = "it closed the connection"


class Stranger(Exception):
    """Whoever answered is no doctor, or not the one that this test began with."""


@dataclass(frozen=True, slots=True)
class Moved:
    """Bytes that came, and how long they took."""

    num_bytes: int
    seconds: float

    @property
    def rate(self) -> float:
        return self.num_bytes / self.seconds if self.seconds > 0 else 0.0


def say(there: socket.socket, **fields: Any) -> None:
    there.sendall(json.dumps(fields).encode() + b"\n")


def hear(there: socket.socket) -> dict[str, Any]:
    """One line of JSON. Raises Stranger if it is none, OSError if it is not there in time.

    All of it has the time that one byte has elsewhere: a byte now and then keeps nobody waiting.
    """
    seconds, text = there.gettimeout() or TALK_SECONDS, bytearray()
    until = time.monotonic() + seconds
    try:
        while not text.endswith(b"\n"):
            there.settimeout(max(0.001, until - time.monotonic()))
            # One byte at a time: what follows a line may be a transfer.
            more = there.recv(1)
            if not more or len(text) > LINE_BYTES:
                raise Stranger(f"it said {bytes(text[:60])!r}" if text else CLOSED)
            text += more
    finally:
        there.settimeout(seconds)
    try:
        fields = json.loads(bytes(text))
    except (ValueError, RecursionError):
        raise Stranger(f"it said {bytes(text[:60])!r}") from None
    if not isinstance(fields, dict):
        raise Stranger(f"it said {bytes(text[:60])!r}")
    return fields


def ping(there: socket.socket) -> list[float]:
    """Seconds of round trips, the first left out."""
    times = []
    for _ in range(PINGS + 1):
        start = time.perf_counter()
        there.sendall(b"?")
        if not there.recv(1):
            raise Stranger("it closed the connection")
        times.append(time.perf_counter() - start)
    return times[1:]


def answer_pings(there: socket.socket) -> None:
    for _ in range(PINGS + 1):
        if not there.recv(1):
            raise Stranger("it closed the connection")
        there.sendall(b"!")


def send_for(there: socket.socket, seconds: float) -> None:
    """Send as fast as it goes for so long, then say that this is all."""
    end = time.monotonic() + min(seconds, MOST_SECONDS)
    there.settimeout(min(seconds, MOST_SECONDS) + TALK_SECONDS / 2)
    with suppress(TimeoutError):  # nothing gets through: the receiver will tell
        while time.monotonic() < end:
            there.send(BLOCK)
    there.shutdown(socket.SHUT_WR)


def receive_all(there: socket.socket, seconds: float) -> Moved:
    """Count what comes until the other side is done; the clock starts with the first byte."""
    buffer = bytearray(1 << 18)
    there.settimeout(min(seconds, MOST_SECONDS) + TALK_SECONDS / 2)
    num_bytes, first, last = 0, 0.0, 0.0
    with suppress(TimeoutError):
        while count := there.recv_into(buffer):
            last = time.perf_counter()
            if not num_bytes:
                first, count = last, 0  # what came with the first byte was sent before
                num_bytes = 1
            num_bytes += count
    return Moved(max(0, num_bytes - 1), max(1e-9, last - first))


def together(functions: list[Any]) -> list[Any]:
    """Call all at once, each in a thread; the result of each, None where it failed."""
    found: list[Any] = [None] * len(functions)

    def work(index: int) -> None:
        with suppress(OSError, Stranger, ValueError, KeyError):
            found[index] = functions[index]()

    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(MOST_SECONDS + TALK_SECONDS)
    return found
