"""The side of a test that listens: answers one doctor at a time, and nobody else."""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from allranks.doctor.check import Check
from allranks.doctor.connectivity import OpenPort
from allranks.doctor.pair import protocol
from allranks.doctor.pair.connect import DEFAULT_PORT, knock
from allranks.doctor.pair.facts import (
    PairFacts,
    from_fields,
    from_report,
    plain,
    side_of,
    to_fields,
)
from allranks.doctor.pair.protocol import Stranger
from allranks.doctor.pair.verdict import verdict
from allranks.errors import AllranksError
from allranks.machine.network import up_interfaces

MOST_AT_ONCE = 32


def check_as_listener(port: int, say: Callable[[str], None]) -> tuple[list[Check], str]:
    """Wait for one `doctor --connect`; the checks, and the other machine's name."""
    listening = Listening(port, say)
    say(f"listening on port {listening.port}; on the other machine type one of")
    for each in up_interfaces():
        if not each.is_loopback:
            host = f"[{each.address}]" if ":" in each.address else each.address
            say(f"  allranks doctor --connect {host}:{listening.port}   # {each.name}")
    found = listening.wait()
    assert found is not None
    return verdict(found, listens=True), found.there.host if found.there else ""


def read_port(words: Sequence[str]) -> int:
    """The port that may follow --listen."""
    if not words:
        return DEFAULT_PORT
    if len(words) > 1 or not words[0].isdecimal() or not 0 < int(words[0]) < 65536:
        raise AllranksError(
            f"--listen {' '.join(words)} is not a port", fix="write for example --listen 29501"
        )
    return int(words[0])


class Listening:
    """A port that waits for `doctor --connect`. `told`: says what happens, for people."""

    def __init__(self, port: int, told: Callable[[str], None]) -> None:
        try:
            self._port = OpenPort(self._take, port)
        except OSError as error:
            raise AllranksError(
                f"cannot listen on port {port}: {os.strerror(error.errno or 0)}",
                fix=f"ss -ltnp 'sport = :{port}' shows who does; or name another: --listen 29501",
                exit_code=1,
            ) from None
        self.port = self._port.port
        self._told = told
        self._session = ""  # of the machine that is being served
        self._taking = threading.Lock()
        self._lines: dict[socket.socket, bool] = {}  # whether it has said anything; oldest first
        self._counting = threading.Lock()
        self._done = threading.Event()
        self._found: PairFacts | None = None

    def wait(self, seconds: float | None = None) -> PairFacts | None:
        """Serve until one test is over; None if none was within so many seconds."""
        self._port.begin()
        until = None if seconds is None else time.monotonic() + seconds
        while not self._done.wait(0.2):
            if until is not None and time.monotonic() > until:
                break
        self.close()
        return self._found

    def close(self) -> None:
        self._done.set()
        self._port.close()

    def _take(self, connection: socket.socket) -> None:
        with self._counting:
            silent = [line for line, has_spoken in self._lines.items() if not has_spoken]
            is_full = len(self._lines) >= MOST_AT_ONCE
            if is_full and silent:  # who was silent longest makes room
                self._lines.pop(silent[0])
                with suppress(OSError):
                    silent[0].shutdown(socket.SHUT_RDWR)  # its thread closes it
            elif is_full:
                connection.close()
                return
            self._lines[connection] = False
        threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        peer = "somebody"
        try:
            with connection:
                peer = plain(str(connection.getpeername()[0]))
                connection.settimeout(protocol.TALK_SECONDS)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                first = protocol.hear(connection)
                with self._counting:
                    if connection in self._lines:
                        self._lines[connection] = True
                if "session" in first:
                    self._carry(connection, first)
                else:
                    self._serve(connection, first, peer)
        except (Stranger, OSError, ValueError, KeyError, TypeError) as error:
            if not self._done.is_set():
                self._told(f"{peer}: {error or type(error).__name__}")
        finally:
            with self._counting:
                self._lines.pop(connection, None)

    def _carry(self, line: socket.socket, first: Mapping[str, Any]) -> None:
        """A connection of the machine that is being served: bytes in, or bytes out."""
        if not self._session or not secrets.compare_digest(str(first["session"]), self._session):
            raise Stranger("a connection that belongs to no test was closed")
        seconds = min(float(first["seconds"]), protocol.MOST_SECONDS)
        if first["mode"] == "hello":
            protocol.say(line, session=self._session)
        elif first["mode"] == "up":
            moved = protocol.receive_all(line, seconds)
            protocol.say(line, bytes=moved.num_bytes, seconds=moved.seconds)
        else:
            protocol.send_for(line, seconds)

    def _serve(self, control: socket.socket, hello: Mapping[str, Any], peer: str) -> None:
        if hello.get("allranks") != protocol.VERSION:
            raise Stranger("it is no `allranks doctor --connect` of this version")
        if not self._taking.acquire(blocking=False):
            protocol.say(control, busy=True)
            return
        try:
            self._session = secrets.token_hex(16)
            self._test(control, hello, peer)
        finally:
            self._session = ""
            self._taking.release()

    def _test(self, control: socket.socket, hello: Mapping[str, Any], peer: str) -> None:
        theirs, mine = from_fields(hello["side"]), side_of(control)
        self._told(f"{theirs.host} ({peer}) has connected; this takes a few seconds")
        with OpenPort(socket.socket.close) as port:
            protocol.say(
                control,
                allranks=protocol.VERSION,
                nonce=str(hello["nonce"])[:64],
                session=self._session,
                side=to_fields(mine),
                port=port.port,
            )
            protocol.answer_pings(control)
            for _ in range(protocol.CLOCKS):
                protocol.hear(control)  # asks for the time
                protocol.say(control, time=time.time())
            protocol.say(control, knocked=knock(peer, int(hello["port"])))
            control.settimeout(10 * protocol.TALK_SECONDS)
            told = protocol.hear(control)["report"]
        self._found = from_report(told, here=theirs, there=mine, port=self.port)
        self._done.set()
