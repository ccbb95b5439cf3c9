"""What launchers of several nodes say to each other, and how they wait for it. No torch.

Every wait is in Python, has an end, is shown, and ends at the first signal: torch's own waits are
deaf to signals.
"""

from __future__ import annotations

import errno
import hmac
import ipaddress
import json
import math
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from allranks.errors import AllranksError
from allranks.machine.network import listen_on_every_address
from allranks.show.numbers import duration
from allranks.show.text import clean

MEETING_SECONDS = 600.0  # for all nodes to come
CONNECT_SECONDS = 5.0
SHOWN_SECONDS = 0.3  # what takes less is not worth a line
POLL_SECONDS = 0.05
MOST_BYTES = 1 << 14  # of a message

Message = dict[str, Any]
T = TypeVar("T")


class Interrupted(AllranksError):
    """The user stopped the launcher while it waited for other nodes."""

    def __init__(self) -> None:
        what = "stopped while waiting for the other nodes: no rank runs here"
        super().__init__(what, fix="type the command again", exit_code=130)


class Wait:
    """Waiting that has an end. `show` gets what is waited for, and the seconds that it has taken.

    `interrupted`: whether a signal has come.
    """

    def __init__(
        self,
        interrupted: Callable[[], bool],
        show: Callable[[str, float], None] = lambda text, seconds: None,
        seconds: float = MEETING_SECONDS,
    ) -> None:
        self._interrupted = interrupted
        self._show = show
        self._seconds = seconds
        self._begin = time.monotonic()

    def look(self, awaited: str, until: float = math.inf) -> None:
        """To be called many times a second; raises when the wait is over. `until`: if earlier."""
        if self._interrupted():
            raise Interrupted
        waited = time.monotonic() - self._begin
        if waited > self._seconds:
            raise AllranksError(
                f"gave up after waiting {duration(self._seconds, whole=True)} for {awaited}",
                fix="start every node of the layout within ten minutes, with the same --master "
                "HOST:PORT: a name of node 0's machine that all of them know, and a free port "
                "there that no firewall closes",
                exit_code=1,
            )
        if waited > SHOWN_SECONDS:
            left = min(self._seconds - waited, max(0.0, until - time.monotonic()))
            self._show(f"waiting for {awaited}; {duration(left, whole=True)} left", waited)

    def pause(self, awaited: str, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.look(awaited)
            time.sleep(POLL_SECONDS)

    def beside(self, call: Callable[[], T], awaited: str) -> T:
        """The result of a call that is deaf to signals, made in a thread of its own."""
        done: list[T] = []
        failed: list[Exception] = []

        def work() -> None:
            try:
                done.append(call())
            except Exception as error:
                failed.append(error)

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        while thread.is_alive():
            self.look(awaited)
            thread.join(POLL_SECONDS)
        if failed:
            raise failed[0]
        return done[0]


def listen(host: str, port: int, *, alone: bool) -> socket.socket:
    """A listening socket: on the loopback for one machine, else on all of this machine's addresses.

    A machine's own name is of no use here: /etc/hosts may make it another loopback address.
    """
    if alone or is_loopback(host):
        host = host if is_loopback(host) else "127.0.0.1"
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=1024)
    return listen_on_every_address(port, backlog=1024)


def own_address(listener: socket.socket) -> str:
    """Where this machine itself reaches what it listens on."""
    address = str(listener.getsockname()[0])
    return "127.0.0.1" if address in ("::", "0.0.0.0") else address


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def split_master(master: str | None) -> tuple[str, int]:
    """Address and port of node 0's store; any free port of this machine if there is only one."""
    if master is None:
        return "127.0.0.1", 0
    host, colon, port = master.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    host = "127.0.0.1" if host == "localhost" else host
    if not (colon and host and port.isdigit() and 0 < int(port) < 65536):
        raise AllranksError(
            f"--master {master} is not HOST:PORT", fix="write for example --master node1:29500"
        )
    return host, int(port)


def is_own(family: int, address: Any) -> bool:
    """Whether an address is one of this machine's."""
    with socket.socket(family, socket.SOCK_DGRAM) as trial:
        try:
            trial.bind((address[0], 0))
        except OSError:
            return False
    return True


def resolve(host: str, port: int, wait: Wait) -> list[Any]:
    """Families and socket addresses of a name."""
    try:
        look_up = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
        found = wait.beside(look_up, f"the address of {host}")
    except (socket.gaierror, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not a valid name"
        raise AllranksError(
            f"--master names {host}, which {socket.gethostname()} does not know: {why}",
            fix="write a name of node 0's machine that every node can resolve (getent hosts "
            "NAME), or its IP address",
            exit_code=1,
        ) from None
    return [(family, address) for family, _, _, _, address in found]


def with_proof(key: bytes, role: str, nonces: tuple[str, str], message: Message) -> Message:
    text = json.dumps([role, *nonces, message], sort_keys=True)
    return {**message, "proof": hmac.digest(key, text.encode(), "sha256").hex()}


def check_proof(key: bytes, role: str, nonces: tuple[str, str], message: Message) -> None:
    """Raises ValueError if whoever said this does not know the key."""
    said = {name: value for name, value in message.items() if name != "proof"}
    proof = with_proof(key, role, nonces, said)["proof"]
    if not hmac.compare_digest(
        proof, str(message.get("proof")).encode("ascii", "replace").decode()
    ):
        raise ValueError("it does not know the key in the run folder")


class Link:
    """Messages over a socket: JSON, a line each."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.socket = connection
        self._unread = b""

    @classmethod
    def open(cls, family: int, address: Any) -> Link:
        """Begin to connect."""
        connection = socket.socket(family, socket.SOCK_STREAM)
        try:
            link = cls(connection)
            connection.connect(address)
        except BlockingIOError:
            pass
        except BaseException:
            connection.close()
            raise
        return link

    def __enter__(self) -> Link:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def finish_connecting(self, wait: Wait, awaited: str) -> None:
        until = time.monotonic() + CONNECT_SECONDS
        while not select.select([], [self.socket], [], POLL_SECONDS)[1]:
            wait.look(awaited)
            if time.monotonic() > until:
                raise TimeoutError(errno.ETIMEDOUT, "its machine does not answer")
        if code := self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise OSError(code, os.strerror(code))  # of the class that fits the code

    def send(self, message: Message) -> None:
        self.socket.sendall(json.dumps(message).encode() + b"\n")

    def take(self) -> Message | None:
        """A message, if a whole one is there. Raises ValueError for what is none."""
        try:
            read = self.socket.recv(MOST_BYTES)
        except BlockingIOError:
            return None
        if not read:
            raise ConnectionResetError(errno.ECONNRESET, "it closes the connection")
        line, newline, rest = (self._unread + read).partition(b"\n")
        if not newline and len(line) <= MOST_BYTES:
            self._unread = line
            return None
        self._unread = rest
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            raise ValueError(f"it says {clean(line[:60].decode(errors='replace'))!r}") from None
        if not isinstance(message, dict):
            raise ValueError(f"it says {clean(str(message)[:60])!r}")
        return message

    def receive(self, wait: Wait, awaited: str, seconds: float | None) -> Message:
        """The next message; `seconds`: at most, for all of it."""
        until = time.monotonic() + (math.inf if seconds is None else seconds)
        while True:
            if select.select([self.socket], [], [], POLL_SECONDS)[0]:
                message = self.take()
                if message is not None:
                    return message
            wait.look(awaited, until)
            if time.monotonic() > until:
                if self._unread:
                    raise ValueError(
                        f"it says {clean(self._unread[:60].decode(errors='replace'))!r}, no more"
                    )
                raise TimeoutError(errno.ETIMEDOUT, "it accepts connections, but says nothing")
