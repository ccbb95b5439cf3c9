"""How the launchers of several nodes meet, before any of them imports torch.

Node 0 listens where --master says. It names its run folder, which holds a key that only its user
can read; each side proves to the other that it has read the key, over numbers that are new every
time. So a stranger at that port cannot make a node run anything, nor come in as a node. When all
nodes are there, torch's store takes over the listening socket: nobody gets the port in between.

Every wait is shown, has an end, and ends at the first signal: torch's own waits ignore signals.
"""

from __future__ import annotations

import errno
import hmac
import ipaddress
import json
import math
import os
import re
import secrets
import socket
import stat
import threading
import time
from collections.abc import Callable
from concurrent import futures
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from allranks.errors import STOPPED_AT_ONCE, AllranksError
from allranks.launch.checks import check_owner
from allranks.machine.network import listen_on_every_address
from allranks.show.numbers import duration, listed
from allranks.show.text import clean

VERSION = 1
MEETING_SECONDS = 600.0  # for all nodes to come
CONNECT_SECONDS = 5.0
ANSWER_SECONDS = 30.0  # for whoever holds the port to say the right thing
FIRST_SECONDS = 2.0  # for another node 0 to say that it is one
SHOWN_SECONDS = 0.3  # a shorter wait is not worth a line
POLL_SECONDS = 0.05
MOST_BYTES = 1 << 14  # of a message
MOST_STRANGERS = 256  # at the door at once, besides the nodes
KEY_NAME = re.compile(r"\.door-[0-9a-f]{16}")

Message = dict[str, Any]
T = TypeVar("T")


class Interrupted(AllranksError):
    """The user stopped the launcher before it had ranks, for example while waiting for nodes."""

    def __init__(self) -> None:
        what = "stopped before any rank had started here"
        super().__init__(what, fix="type the command again", exit_code=STOPPED_AT_ONCE)


@dataclass(slots=True)
class Wait:
    """A wait that has an end. `show` gets what is waited for, and how many seconds so far.

    `interrupted`: whether a signal has come.
    """

    interrupted: Callable[[], bool]
    show: Callable[[str, float], None] = lambda text, seconds: None
    seconds: float = MEETING_SECONDS
    begin: float = field(default_factory=time.monotonic)

    def check(self, awaited: str, until: float = math.inf) -> None:
        """Call this many times a second; raises when the wait is over. `until`: if sooner."""
        if self.interrupted():
            raise Interrupted
        waited = time.monotonic() - self.begin
        if waited > self.seconds:
            raise AllranksError(
                f"gave up after waiting {duration(self.seconds, whole=True)} for {awaited}",
                fix="start every node of the layout within ten minutes, with the same --master "
                "HOST:PORT: a name of node 0's machine that all of them can resolve, and a "
                "free port there that no firewall blocks",
                exit_code=1,
            )
        if waited > SHOWN_SECONDS:
            left = min(self.seconds - waited, max(0.0, until - time.monotonic()))
            self.show(f"waiting for {awaited}; {duration(left, whole=True)} left", waited)

    def beside(self, call: Callable[[], T], awaited: str, seconds: float = math.inf) -> T:
        """The result of a blocking call, made in another thread. `seconds`: its own limit."""
        done: futures.Future[T] = futures.Future()

        def work() -> None:
            try:
                done.set_result(call())
            except Exception as error:
                done.set_exception(error)

        until = time.monotonic() + seconds
        threading.Thread(target=work, daemon=True).start()
        while not futures.wait([done], POLL_SECONDS).done:
            self.check(awaited, until)
        return done.result()


class Link:
    """Messages over a socket: one JSON object per line."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._unread = b""

    def close(self) -> None:
        self.hang_up()
        self.socket.close()

    def hang_up(self) -> None:
        """End the connection; a thread that waits for a message is woken by it."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def send(self, message: Message) -> None:
        self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, seconds: float = math.inf) -> Message:
        """The next message, all of it within `seconds`. Raises ValueError if it is not one."""
        until = time.monotonic() + seconds
        while b"\n" not in self._unread and len(self._unread) <= MOST_BYTES:
            left = max(0.001, until - time.monotonic())
            self.socket.settimeout(None if left == math.inf else left)
            try:
                read = self.socket.recv(MOST_BYTES)
            except TimeoutError:
                if self._unread:
                    raise ValueError(f"{quoted(self._unread)}, no more") from None
                silent = "it accepts connections, but says nothing"
                raise TimeoutError(errno.ETIMEDOUT, silent) from None
            if not read:
                raise ConnectionResetError(errno.ECONNRESET, "it closes the connection")
            self._unread += read
        line, _, self._unread = self._unread.partition(b"\n")
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            raise ValueError(quoted(line))
        return message


def quoted(said: bytes) -> str:
    return f"it says {clean(said[:60].decode(errors='replace'))!r}"


def with_proof(key: bytes, role: str, nonces: tuple[str, str], message: Message) -> Message:
    text = json.dumps([role, *nonces, message], sort_keys=True)
    return {**message, "proof": hmac.digest(key, text.encode(), "sha256").hex()}


def check_proof(key: bytes, role: str, nonces: tuple[str, str], message: Message) -> None:
    """Raises ValueError if whoever said this does not know the key."""
    said = {name: value for name, value in message.items() if name != "proof"}
    proof = with_proof(key, role, nonces, said)["proof"]
    if not hmac.compare_digest(proof.encode(), str(message.get("proof")).encode()):
        raise ValueError("it does not know the key in the run folder")


# --- Addresses -----------------------------------------------------------------------------------


def split_master(master: str | None) -> tuple[str, int]:
    """Address and port of node 0; any free port of this machine if it is alone."""
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


def listen(host: str, port: int) -> socket.socket:
    """A listening socket, on the loopback if `host` is on it, else on every address.

    A machine's own name is of no use here: /etc/hosts may make it another loopback address.
    """
    if not is_loopback(host):
        return listen_on_every_address(port, backlog=1024)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=1024)


def own_address(listener: socket.socket) -> str:
    """Where this machine itself reaches what it listens on."""
    address = str(listener.getsockname()[0])
    return "127.0.0.1" if address in ("::", "0.0.0.0") else address


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_own(family: int, address: Any) -> bool:
    """Whether an address is one of this machine's."""
    with socket.socket(family, socket.SOCK_DGRAM) as trial:
        try:
            trial.bind((address[0], 0))
        except OSError:
            return False
    return True


def resolve(host: str, port: int, wait: Wait) -> list[Any]:
    """What getaddrinfo knows of a name. Raises AllranksError if it knows nothing."""
    try:
        look_up = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
        return wait.beside(look_up, f"the address of {host}")
    except (socket.gaierror, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not a valid name"
        raise AllranksError(
            f"--master names {host}, which {socket.gethostname()} does not know: {why}",
            fix="write a name of node 0's machine that every node can resolve (getent hosts "
            "NAME), or its IP address",
            exit_code=1,
        ) from None


# --- Node 0 --------------------------------------------------------------------------------------


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
    """All nodes were there: where this one finds the store, and the socket that node 0 serves."""

    meeting: Meeting
    address: str
    port: int
    listener: socket.socket | None = None


def alone(mine: Meeting) -> Met:
    """All ranks are on this machine: nobody is to come, and nobody else can reach the store."""
    listener = listen("127.0.0.1", 0)
    return Met(mine, own_address(listener), listener.getsockname()[1], listener)


def receive(host: str, port: int, mine: Meeting, num_nodes: int, wait: Wait) -> Met:
    """Wait until all other nodes have come, and tell them what this one has decided."""
    is_here = any(is_own(family, address) for family, *_, address in resolve(host, port, wait))
    try:
        listener = listen(host, port)
    except OSError as error:
        raise _port_error(host, port, error) from None
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
    listener.settimeout(None)
    return Met(mine, own_address(listener), port, listener)


def _port_error(host: str, port: int, error: OSError) -> AllranksError:
    is_taken = error.errno == errno.EADDRINUSE
    if is_taken and (other := _other_node_0(host if is_loopback(host) else "127.0.0.1", port)):
        return duplicate(0, other, introduce())
    why = "something listens there" if is_taken else error.strerror
    return AllranksError(
        f"node 0 cannot listen on port {port} of {socket.gethostname()}: {why}",
        fix=f"give every node another port, such as --master {host}:{port + 1}; "
        f"to see who has this one: ss -ltnp 'sport = :{port}'",
        exit_code=1,
    )


def _other_node_0(address: str, port: int) -> Message | None:
    """What another node 0 says of itself, if that is what holds the port."""
    with suppress(OSError, ValueError):
        connection = socket.create_connection((address, port), FIRST_SECONDS)
        with closing(Link(connection)) as link:
            link.send({"allranks": VERSION, "nonce": secrets.token_hex(16)})
            said = link.receive(FIRST_SECONDS)
            return said if said.get("allranks") == VERSION and "pid" in said else None
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
class Door:
    """Lets nodes in. Each guest has a thread of its own, so a silent one keeps nobody out."""

    listener: socket.socket
    mine: Meeting
    key_name: str
    key: bytes
    num_nodes: int
    guests: list[Link] = field(default_factory=list)  # not known to be nodes, in order of arrival
    # Each with the numbers of its proof, and what it said of itself.
    nodes: dict[int, tuple[Link, tuple[str, str], Message]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def serve(self, wait: Wait, hint: str = "") -> None:
        """Until all nodes are in. `hint`: why they may not come."""
        self.listener.settimeout(POLL_SECONDS)
        try:
            while missing := [n for n in range(1, self.num_nodes) if n not in self.nodes]:
                wait.check(f"{names_of(missing)} of layout {self.mine.layout}{hint}")
                self._welcome()
            with self.lock:
                for link, nonces, _ in self.nodes.values():
                    with suppress(OSError):  # one that has just died is missed when ranks start
                        self._tell(link, nonces, {"meeting": asdict(self.mine)})
        finally:
            with self.lock:
                for link in [*self.guests, *(link for link, *_ in self.nodes.values())]:
                    link.hang_up()

    def _welcome(self) -> None:
        try:
            connection, _ = self.listener.accept()
        except TimeoutError:
            return
        except OSError:  # it is gone again, or there are no more files: others may leave
            time.sleep(POLL_SECONDS)
            return
        guest = Link(connection)
        with self.lock:
            self.guests.append(guest)
            if len(self.guests) > MOST_STRANGERS + self.num_nodes:
                self.guests[0].hang_up()
        threading.Thread(target=self._talk, args=(guest,), daemon=True).start()

    def _talk(self, guest: Link) -> None:
        """Find out whether a guest is a node; if so, keep the connection for as long as it does."""
        node = None
        try:
            nonces = self._greet(guest)
            node = self._let_in(guest, nonces, guest.receive(ANSWER_SECONDS))
            guest.receive()  # it has no more to say: this ends when it leaves
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            pass
        finally:
            with self.lock:
                if node is not None:
                    del self.nodes[node]
                elif guest in self.guests:
                    self.guests.remove(guest)
                guest.close()

    def _greet(self, guest: Link) -> tuple[str, str]:
        hello = guest.receive(ANSWER_SECONDS)
        if hello.get("allranks") != VERSION or not isinstance(hello["nonce"], str):
            raise ValueError("not one of us")
        nonces = (hello["nonce"], secrets.token_hex(16))
        where = {"run_dir": self.mine.run_dir, "key": self.key_name, "nonce": nonces[1]}
        port = self.listener.getsockname()[1]
        self._tell(guest, nonces, {"allranks": VERSION, **introduce(), **where, "port": port})
        return nonces

    def _let_in(self, guest: Link, nonces: tuple[str, str], card: Message) -> int:
        check_proof(self.key, "node", nonces, card)
        node, refused = int(card["node"]), None
        with self.lock:
            if card["layout"] != self.mine.layout:
                refused = AllranksError(
                    f"node 0 was started with --layout {self.mine.layout}, node {node} with "
                    f"{card['layout']}",
                    fix=f"type --layout {self.mine.layout} on every machine",
                )
            elif node in self.nodes or node == 0:
                refused = duplicate(node, self.nodes[node][2] if node else introduce(), card)
            else:
                self.guests.remove(guest)
                self.nodes[node] = guest, nonces, card
        if refused is not None:
            self._tell(guest, nonces, {"refused": {"what": refused.what, "fix": refused.fix}})
            raise ValueError("refused")
        return node

    def _tell(self, guest: Link, nonces: tuple[str, str], message: Message) -> None:
        guest.send(with_proof(self.key, "first", nonces, message))


def names_of(nodes: list[int]) -> str:
    """`node 1`, or `nodes 1 and 3`; the last of them may have just come."""
    return f"node{'s' if len(nodes) > 1 else ''} {listed(nodes)}" if nodes else "the other nodes"


# --- The other nodes -----------------------------------------------------------------------------


class NotYet(Exception):
    """Nobody listens at node 0's address."""


class NotRight(Exception):
    """What listens there does not behave as node 0 does; it may be starting, or ending."""


def enter(host: str, port: int, node: int, layout: str, wait: Wait) -> Met:
    """Go to node 0, and wait there until all nodes have come."""
    resolve(host, port, wait)
    why, odd_since = "not asked yet", 0.0
    while True:
        begin, awaited = time.monotonic(), f"node 0 at {host}:{port} ({why})"
        wait.check(awaited)
        try:
            with closing(_connect(host, port, wait, awaited)) as link:
                address = str(link.socket.getpeername()[0])
                key, nonces = _authenticate(link, host, port, node, wait)
                return Met(_wait_for_others(link, key, nonces, node, layout, wait), address, port)
        except NotYet as error:
            why, odd_since = str(error), 0.0
        except NotRight as error:
            why, odd_since = str(error), odd_since or begin
            if time.monotonic() > odd_since + ANSWER_SECONDS:
                raise not_node_0(host, port, why) from None
        time.sleep(0.2)


def _connect(host: str, port: int, wait: Wait, awaited: str) -> Link:
    call = partial(socket.create_connection, (host, port), CONNECT_SECONDS, all_errors=True)
    try:
        return Link(wait.beside(call, awaited))
    except ExceptionGroup as failed:
        # If a name has several addresses, wait for one where merely nobody listens yet.
        for error in failed.exceptions:
            if isinstance(error, ConnectionRefusedError):
                raise NotYet("nothing listens there yet") from None
            if isinstance(error, TimeoutError):
                raise NotYet("its machine does not answer") from None
        raise NotRight(_reason(failed.exceptions[0])) from None
    except OSError as error:
        raise NotRight(_reason(error)) from None


def _authenticate(
    link: Link, host: str, port: int, node: int, wait: Wait
) -> tuple[bytes, tuple[str, str]]:
    """The key and the numbers by which this node and node 0 believe each other."""
    nonce = secrets.token_hex(16)
    try:
        link.send({"allranks": VERSION, "nonce": nonce})
        awaited = f"node 0 at {host}:{port} to answer"
        said = wait.beside(lambda: link.receive(ANSWER_SECONDS), awaited, ANSWER_SECONDS)
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


def _wait_for_others(
    link: Link, key: bytes, nonces: tuple[str, str], node: int, layout: str, wait: Wait
) -> Meeting:
    try:
        card = {"node": node, "layout": layout, **introduce()}
        link.send(with_proof(key, "node", nonces, card))
        told = wait.beside(lambda: link.receive(), f"all other nodes of layout {layout}")
        check_proof(key, "first", nonces, told)
    except (OSError, ValueError):
        raise AllranksError(
            "node 0 ended before all nodes had joined",
            fix="start node 0 again, then this node",
            exit_code=1,
        ) from None
    if "refused" in told:
        raise AllranksError(told["refused"]["what"], fix=told["refused"]["fix"])
    meeting = Meeting(**told["meeting"])
    for path in (Path(meeting.run_dir), Path(meeting.run_dir, "job.yaml")):
        check_owner(path)
    return meeting


def _reason(error: Exception) -> str:
    if isinstance(error, ConnectionResetError | BrokenPipeError):
        return "it closes the connection"
    return getattr(error, "strerror", None) or str(error)


def not_node_0(host: str, port: int, why: str) -> AllranksError:
    return AllranksError(
        f"{host}:{port} is not node 0 of one of your runs: {why}",
        fix="if node 0 has not been started yet, something else has its port (on its machine: ss "
        f"-ltnp 'sport = :{port}'): give every node another, such as --master {host}:{port + 1}; "
        "if it has been started, its run began without this node, or a firewall is between them",
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
