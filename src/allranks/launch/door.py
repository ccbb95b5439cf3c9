"""How the launchers of several nodes meet: at node 0's door, before torch is imported. No torch.

Node 0 listens where --master says. It names its run folder, in which lies a key that its user alone
may read; each side proves to the other that it has read it, over numbers that are new every time.
So a stranger at that port can make no node run anything, and none can come in as a node. When all
nodes are there, torch's store takes over the listening socket: nobody gets the port in between.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import selectors
import socket
import stat
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from allranks.errors import AllranksError
from allranks.launch.checks import check_owner
from allranks.launch.link import (
    POLL_SECONDS,
    Link,
    Message,
    Wait,
    check_proof,
    is_loopback,
    is_own,
    listen,
    own_address,
    resolve,
    with_proof,
)
from allranks.show.text import clean

VERSION = 1
ANSWER_SECONDS = 30.0  # for whoever holds the port to say the right thing
FIRST_SECONDS = 2.0  # for another node 0 to say that it is one
MOST_STRANGERS = 256  # at the door at once, besides the nodes
KEY_NAME = re.compile(r"\.door-[0-9a-f]{16}")


@dataclass(frozen=True, slots=True)
class Meeting:
    """What node 0 decides for all nodes."""

    run_dir: str
    attempt: int
    layout: str
    checkpoint: str
    claim: int | None = None  # under which the ranks of all nodes work


@dataclass(frozen=True, slots=True)
class Met:
    """All nodes were there; where this one finds the store, and what node 0 serves it with."""

    meeting: Meeting
    address: str
    port: int
    listener: socket.socket | None = None


def alone(mine: Meeting) -> Met:
    """On one machine: nobody is to come, and nobody else is to reach the store."""
    listener = listen("127.0.0.1", 0, alone=True)
    return Met(mine, own_address(listener), listener.getsockname()[1], listener)


# --- Node 0 --------------------------------------------------------------------------------------


def receive(host: str, port: int, mine: Meeting, num_nodes: int, wait: Wait) -> Met:
    """Serve the door until all other nodes have come, and tell them what this one has decided."""
    is_here = any(is_own(*one) for one in resolve(host, port, wait))
    try:
        listener = listen(host, port, alone=False)
    except OSError as error:
        raise _port_error(host, port, error, wait) from None
    # Behind a router a machine does not know its address from outside: that is no error.
    hint = "" if is_here else f" ({host}, where they look for node 0, may be another machine)"
    try:
        key_file = Path(mine.run_dir) / f".door-{secrets.token_hex(8)}"
        key = secrets.token_hex(32).encode()
        descriptor = os.open(key_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.write(descriptor, key)
            os.fsync(descriptor)
            Door(listener, mine, key_file.name, key, num_nodes).serve(wait, hint)
        finally:
            os.close(descriptor)
            key_file.unlink(missing_ok=True)
    except BaseException:
        listener.close()
        raise
    listener.setblocking(True)
    return Met(mine, own_address(listener), port, listener)


def _port_error(host: str, port: int, error: OSError, wait: Wait) -> AllranksError:
    if error.errno == errno.EADDRINUSE:
        other = _first_there(host if is_loopback(host) else "127.0.0.1", port, wait)
        if other is not None:
            return duplicate(0, other, introduce())
    why = "something listens there" if error.errno == errno.EADDRINUSE else error.strerror
    return AllranksError(
        f"node 0 cannot listen on port {port} of {socket.gethostname()}: {why}",
        fix=f"give every node another port, such as --master {host}:{port + 1}; "
        f"to see who has this one: ss -ltnp 'sport = :{port}'",
        exit_code=1,
    )


def _first_there(address: str, port: int, wait: Wait) -> Message | None:
    """Who says that it is node 0, if that is what holds the port."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with _connect([(family, (address, port))], wait, "the other node 0") as link:
            link.send({"allranks": VERSION, "nonce": secrets.token_hex(16)})
            said = link.receive(wait, "the other node 0", FIRST_SECONDS)
            return said if said.get("allranks") == VERSION and "pid" in said else None
    except (OSError, ValueError, NotYet, NotRight):
        return None


def introduce() -> Message:
    return {"host": socket.gethostname(), "pid": os.getpid()}


def duplicate(node: int, there: Message, here: Message) -> AllranksError:
    both = [clean(f"process {one['pid']} on {one['host']}") for one in (there, here)]
    return AllranksError(
        f"two nodes claim to be --node-rank {node}: {both[0]}, and {both[1]}",
        fix="give each machine of the layout its own --node-rank, counted from 0",
    )


@dataclass(slots=True)
class Guest:
    """A connection to the door: a node, or something that has not shown yet what it is."""

    link: Link
    nonces: tuple[str, str] = ("", "")
    came: float = field(default_factory=time.monotonic)
    node: int | None = None  # once it has proved that it is one
    card: Message = field(default_factory=dict)


class Door:
    """Lets nodes in. One thread, no wait for any single guest: a silent one keeps nobody out."""

    def __init__(
        self, listener: socket.socket, mine: Meeting, key_name: str, key: bytes, num_nodes: int
    ) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._mine = mine
        self._key_name = key_name
        self._key = key
        self._num_nodes = num_nodes
        self._guests: dict[socket.socket, Guest] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)

    def serve(self, wait: Wait, hint: str = "") -> None:
        """Until all nodes are in. `hint`: why they may not come."""
        try:
            while missing := self._missing():
                wait.look(f"{names_of(missing)} of layout {self._mine.layout}{hint}")
                for ready, _ in self._selector.select(POLL_SECONDS):
                    if ready.fileobj is self._listener:
                        self._welcome()
                    else:
                        self._hear(self._guests[ready.fileobj])  # type: ignore[index]  # a socket
                self._send_strangers_away()
            for guest in self._guests.values():
                with suppress(OSError):  # one that has just died is missed when ranks start
                    if guest.node is not None:
                        self._tell(guest, {"meeting": asdict(self._mine)})
        finally:
            for guest in [*self._guests.values()]:
                self._leave(guest)
            self._selector.close()

    def _missing(self) -> list[int]:
        there = {guest.node for guest in self._guests.values()}
        return [node for node in range(1, self._num_nodes) if node not in there]

    def _welcome(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # it is gone again, or there are no more files: others may leave
            return
        self._guests[connection] = Guest(Link(connection))
        self._selector.register(connection, selectors.EVENT_READ)

    def _hear(self, guest: Guest) -> None:
        try:
            message = guest.link.take()
            if message is None:
                return
            if guest.node is not None:
                raise ValueError("a node has no more to say")
            if guest.nonces == ("", ""):
                self._greet(guest, message)
            else:
                self._let_in(guest, message)
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            self._leave(guest)

    def _greet(self, guest: Guest, message: Message) -> None:
        if message.get("allranks") != VERSION or not isinstance(message["nonce"], str):
            raise ValueError("not one of us")
        guest.nonces = (message["nonce"], secrets.token_hex(16))
        where = {"run_dir": self._mine.run_dir, "key": self._key_name, "nonce": guest.nonces[1]}
        port = self._listener.getsockname()[1]
        self._tell(guest, {"allranks": VERSION, **introduce(), **where, "port": port})

    def _let_in(self, guest: Guest, message: Message) -> None:
        check_proof(self._key, "node", guest.nonces, message)
        node = message["node"]
        others = {other.node: other for other in self._guests.values() if other.node is not None}
        refused = None
        if message["layout"] != self._mine.layout:
            refused = AllranksError(
                f"node 0 was started with --layout {self._mine.layout}, node {node} with "
                f"{message['layout']}",
                fix=f"type --layout {self._mine.layout} on every machine",
            )
        elif node in others or node == 0:
            refused = duplicate(node, others[node].card if node else introduce(), message)
        if refused is not None:
            self._tell(guest, {"refused": {"what": refused.what, "fix": refused.fix}})
            raise ValueError("refused")
        guest.node, guest.card = int(node), message

    def _tell(self, guest: Guest, message: Message) -> None:
        guest.link.send(with_proof(self._key, "first", guest.nonces, message))

    def _send_strangers_away(self) -> None:
        strangers = [guest for guest in self._guests.values() if guest.node is None]
        late = time.monotonic() - ANSWER_SECONDS
        too_many = len(strangers) - MOST_STRANGERS - self._num_nodes
        for number, guest in enumerate(strangers):  # as they came
            if guest.came < late or number < too_many:
                self._leave(guest)

    def _leave(self, guest: Guest) -> None:
        if self._guests.pop(guest.link.socket, None) is not None:
            self._selector.unregister(guest.link.socket)
            guest.link.socket.close()


def names_of(nodes: list[int]) -> str:
    """`node 1`, or `nodes 1, 3`."""
    if len(nodes) == 1:
        return f"node {nodes[0]}"
    shown = ", ".join(str(node) for node in nodes[:8])
    return f"nodes {shown}" + (f" and {len(nodes) - 8} more" if len(nodes) > 8 else "")


# --- The other nodes -----------------------------------------------------------------------------


class NotYet(Exception):
    """Nobody is at the door."""


class NotRight(Exception):
    """What is there does not behave as node 0 does; it may be on its way out, or in."""


def enter(host: str, port: int, node: int, layout: str, wait: Wait) -> Met:
    """Go to node 0's door, and wait there until all nodes have come."""
    addresses = resolve(host, port, wait)
    why, odd_since = "not asked yet", 0.0
    while True:
        begin = time.monotonic()
        try:
            with _connect(addresses, wait, f"node 0 at {host}:{port} ({why})") as link:
                key, nonces = _know_each_other(link, host, port, node, wait)
                meeting = _wait_inside(link, key, nonces, node, layout, wait)
                return Met(meeting, str(link.socket.getpeername()[0]), port)
        except NotYet as error:
            why, odd_since = str(error), 0.0
        except NotRight as error:
            why, odd_since = str(error), odd_since or begin
            if time.monotonic() > odd_since + ANSWER_SECONDS:
                raise not_node_0(host, port, why) from None
        wait.pause(f"node 0 at {host}:{port} ({why})", 0.2)


def _know_each_other(
    link: Link, host: str, port: int, node: int, wait: Wait
) -> tuple[bytes, tuple[str, str]]:
    """The key and the numbers by which this node and node 0 believe each other."""
    nonce = secrets.token_hex(16)
    try:
        link.send({"allranks": VERSION, "nonce": nonce})
        said = link.receive(wait, f"node 0 at {host}:{port} to answer", ANSWER_SECONDS)
        if said.get("allranks") != VERSION or said.get("port") != port:
            raise ValueError(f"it says {json.dumps(said)[:60]}")
        nonces = (nonce, str(said.get("nonce")))
        key = read_key(Path(str(said.get("run_dir"))), str(said.get("key")), node)
        check_proof(key, "first", nonces, said)
        return key, nonces
    except ValueError as error:
        raise not_node_0(host, port, clean(str(error))) from None
    except OSError as error:
        raise NotRight(_reason(error)) from None


def _wait_inside(
    link: Link, key: bytes, nonces: tuple[str, str], node: int, layout: str, wait: Wait
) -> Meeting:
    try:
        card = {"node": node, "layout": layout, **introduce()}
        link.send(with_proof(key, "node", nonces, card))
        told = link.receive(wait, f"all other nodes of layout {layout}", None)
        check_proof(key, "first", nonces, told)
    except (OSError, ValueError):
        raise AllranksError(
            "node 0 left before all nodes were there",
            fix="start node 0 again, then this node",
            exit_code=1,
        ) from None
    if "refused" in told:
        raise AllranksError(told["refused"]["what"], fix=told["refused"]["fix"])
    meeting = Meeting(**told["meeting"])
    for path in (Path(meeting.run_dir), Path(meeting.run_dir, "job.yaml")):
        check_owner(path)
    return meeting


def _connect(addresses: list[Any], wait: Wait, awaited: str) -> Link:
    failed: list[OSError] = []
    for family, address in addresses:
        try:
            link = Link.open(family, address)
            try:
                link.finish_connecting(wait, awaited)
                return link
            except BaseException:
                link.socket.close()
                raise
        except OSError as error:
            failed.append(error)
    # If a name has several addresses, wait for one where merely nobody listens yet.
    waits = [one for one in failed if isinstance(one, ConnectionRefusedError | TimeoutError)]
    if waits:
        raise NotYet(_reason(waits[0]))
    raise NotRight(_reason(failed[0]))


def _reason(error: OSError) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "nothing listens there yet"
    if isinstance(error, ConnectionResetError | BrokenPipeError):
        return "it closes the connection"
    return error.strerror or str(error)


def not_node_0(host: str, port: int, why: str) -> AllranksError:
    return AllranksError(
        f"{host}:{port} is not node 0 of a run of yours: {why}",
        fix="if node 0 has not been started yet, something else has its port (on its machine: ss "
        f"-ltnp 'sport = :{port}'): give every node another, such as --master {host}:{port + 1}; "
        "if it has been, its run began without this node, or a firewall is between them",
        exit_code=1,
    )


def read_key(run_dir: Path, name: str, node: int) -> bytes:
    """The key that node 0 has left in its run folder, which must be a folder of this user's."""
    if not run_dir.is_absolute() or not KEY_NAME.fullmatch(name):
        raise ValueError("it names no run folder")
    me, folder = f"node {node} ({socket.gethostname()})", clean(str(run_dir))
    try:
        inside = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY)  # once: a link may be changed
        try:
            check_owner(run_dir, os.fstat(inside))
            check_owner(run_dir / "job.yaml", os.stat("job.yaml", dir_fd=inside))
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
            with open(os.open(name, flags, dir_fd=inside), "rb") as file:
                info = os.fstat(file.fileno())
                key = file.read(100)
            is_its_own = info.st_uid == os.fstat(inside).st_uid
        finally:
            os.close(inside)
        if stat.S_ISREG(info.st_mode) and len(key) == 64 and is_its_own:
            return key
    except AllranksError as error:  # without its fix: a stranger's folder is not to be trusted
        raise ValueError(error.what) from None
    except OSError as error:
        raise AllranksError(
            f"{me} does not see the run folder of node 0, {folder}: {error.strerror}",
            fix="give every machine the same --runs DIR, on a disk that all of them share, and "
            "start every node as the same user",
        ) from None
    raise ValueError(f"the key that it names in {folder} is not valid")
