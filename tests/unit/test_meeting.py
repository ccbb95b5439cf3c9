"""Nodes meet at node 0's door: whoever else stands there runs nothing and keeps nobody waiting."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from tests.ports import free_port
from tests.unit.test_prepare import of_user

from allranks.errors import AllranksError
from allranks.launch import meeting
from allranks.launch.meeting import Interrupted, Meeting, Met, Wait, enter, receive, with_proof

HOST = "127.0.0.1"
GUARD = 60.0  # seconds; everything here takes a fraction of one


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "job.yaml").write_text("name: mine\n")
    return tmp_path / "run"


def waiting(seconds: float = GUARD) -> Wait:
    return Wait(lambda: False, seconds=seconds)


class Beside:
    """A call in a thread, and what came of it."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.result: Any = None
        self._call = call
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.result = self._call()
        except AllranksError as error:
            self.result = error

    def wait(self) -> Any:
        self._thread.join(GUARD)
        assert not self._thread.is_alive()
        return self.result


@contextmanager
def at_the_port(answer: Callable[[socket.socket], object]) -> Iterator[int]:
    """Something that accepts connections and does what it likes with them."""
    kept = []
    with socket.create_server((HOST, 0)) as server:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    kept.append(connection)
                    with suppress(OSError):
                        answer(connection)

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
    for connection in kept:
        connection.close()


def drip(connection: socket.socket) -> None:
    while True:
        connection.sendall(b"x")
        time.sleep(0.02)


def answer_as_http(connection: socket.socket) -> None:
    connection.recv(100)
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n<html>")


STRANGERS = {
    "silent": (lambda connection: None, "says nothing"),
    "drips": (drip, "it says 'xxx"),
    "http": (answer_as_http, "it says 'HTTP/1.1 400 Bad Request'"),
    "junk": (lambda connection: connection.sendall(b"\x80\x1b]0;x\x07\x1b[31m" * 9999), "it says"),
    "json": (lambda connection: connection.sendall(b"[" * 5000 + b"\n"), "it says"),
    "closes": (lambda connection: connection.close(), "it closes the connection"),
}


@pytest.mark.parametrize("kind", STRANGERS)
def test_a_stranger_at_node_0s_port_is_told_from_node_0(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It neither keeps a node waiting for ever nor gets its words into a terminal."""
    monkeypatch.setattr(meeting, "ANSWER_SECONDS", 0.4)
    monkeypatch.setattr(meeting, "FIRST_SECONDS", 0.1)
    answer, word = STRANGERS[kind]
    with at_the_port(answer) as port, pytest.raises(AllranksError) as caught:
        enter(HOST, port, 1, "2x1", waiting())
    assert f"{HOST}:{port} is not node 0 of one of your runs" in caught.value.what
    assert word in caught.value.what
    assert f"--master {HOST}:{port + 1}" in caught.value.fix
    assert "\x1b" not in caught.value.shown and "\x07" not in caught.value.shown
    with at_the_port(answer) as port, pytest.raises(AllranksError, match="something listens there"):
        receive(HOST, port, Meeting("/tmp", 0, "2x1", ""), 2, waiting())


def test_names_and_networks_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    name, message = "no-such-host.invalid", r"no-such-host.invalid, which .* does not know"
    with pytest.raises(AllranksError, match=message):
        enter(name, 1, 1, "2x1", waiting())
    with pytest.raises(AllranksError, match=message):
        receive(name, 1, Meeting("/tmp", 0, "2x1", ""), 2, waiting())
    monkeypatch.setattr(meeting, "ANSWER_SECONDS", 0.2)
    with pytest.raises(AllranksError, match=r"240\.0\.0\.1:9 is not node 0|waiting .* for node 0"):
        enter("240.0.0.1", 9, 1, "2x1", waiting(1.0))  # an address that no router takes


@pytest.mark.parametrize("node", [0, 1])
def test_a_wait_is_shown_ends_and_is_left_at_a_signal(node: int, run_dir: Path) -> None:
    port, shown = free_port(), list[str]()

    def go(wait: Wait) -> Met:
        if node:
            return enter(HOST, port, 1, "2x1", wait)
        return receive(HOST, port, Meeting(str(run_dir), 0, "2x1", ""), 2, wait)

    with pytest.raises(AllranksError, match=r"gave up after waiting .* for node") as caught:
        go(Wait(lambda: False, lambda text, seconds: shown.append(text), seconds=0.6))
    assert "--master HOST:PORT" in caught.value.fix
    awaited = "node 0 at 127.0.0.1" if node else "node 1 of layout 2x1"
    assert shown[0].startswith(f"waiting for {awaited}") and shown[0].endswith(" left")
    begin = time.monotonic()
    with pytest.raises(Interrupted):
        go(Wait(lambda: time.monotonic() > begin + 0.1))
    assert not list(run_dir.glob(".door-*"))


def test_nodes_are_named() -> None:
    names = [meeting.names_of(nodes) for nodes in ([1], [1, 3], [])]
    assert names == ["node 1", "nodes 1 and 3", "the other nodes"]


def test_nodes_meet_whatever_strangers_do_at_the_door(run_dir: Path) -> None:
    port = free_port()
    mine = Meeting(str(run_dir), 3, "3x1", "step-7")
    first = Beside(lambda: receive(HOST, port, mine, 3, waiting()))
    deadline = time.monotonic() + GUARD
    while not list(run_dir.glob(".door-*")):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    key_file = next(iter(run_dir.glob(".door-*")))
    assert key_file.stat().st_mode & 0o077 == 0
    silent = [socket.create_connection((HOST, port)) for _ in range(20)]
    for junk in (b"GET / HTTP/1.1\r\n\r\n", b"\0" * 99999, b"[]\n", b'{"allranks":1,"nonce":[]}\n'):
        with socket.create_connection((HOST, port)) as stranger, suppress(OSError):
            stranger.sendall(junk)
            assert stranger.recv(10) == b""  # sent away
    with socket.create_connection((HOST, port)) as stranger:  # says that it is node 1, knows no key
        stranger.sendall(b'{"allranks":1,"nonce":"a"}\n')
        greeting = json.loads(stranger.makefile().readline())
        assert key_file.read_text() not in json.dumps(greeting)
        card = {"node": 1, "layout": "3x1", "host": "x", "pid": 1}
        proved = with_proof(b"guessed", "node", ("a", greeting["nonce"]), card)
        stranger.sendall(json.dumps(proved).encode() + b"\n")
        assert stranger.recv(10) == b""
    with pytest.raises(AllranksError, match="started with --layout 3x1, node 1 with 2x2"):
        enter(HOST, port, 1, "2x2", waiting())
    with pytest.raises(AllranksError, match=f"--node-rank 0: process {os.getpid()}"):
        receive(HOST, port, mine, 3, waiting())
    both = [Beside(lambda: enter(HOST, port, 2, "3x1", waiting())) for _ in range(2)]
    while not (refused := [one.result for one in both if one.result is not None]):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert "two nodes claim to be --node-rank 2" in refused[0].what
    assert enter(HOST, port, 1, "3x1", waiting()).meeting == mine
    met = first.wait()
    assert met.meeting == mine and met.listener.getsockname() == (HOST, port)
    met.listener.close()
    assert not list(run_dir.glob(".door-*"))
    for one in silent:
        one.close()
    assert next(one.wait() for one in both if isinstance(one.wait(), Met)).meeting == mine


@pytest.mark.parametrize("whose", ["strangers", "mine"])
def test_a_stranger_who_plays_node_0_has_nothing_run(
    whose: str, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It names a folder of its own, or one of the user's, whose key it cannot read."""
    key = b"0" * 64
    (run_dir / ".door-0123456789abcdef").write_bytes(key)
    if whose == "strangers":
        monkeypatch.setattr(os, "geteuid", lambda: 4321)
        monkeypatch.setattr(os, "stat", of_user(4320, os.stat))
    known = key if whose == "strangers" else b"1" * 64

    def answer(connection: socket.socket) -> None:
        hello = json.loads(connection.makefile().readline())
        said = {"allranks": 1, "host": "x", "pid": 1, "nonce": "n", "port": port}
        said |= {"run_dir": str(run_dir), "key": ".door-0123456789abcdef"}
        proved = with_proof(known, "first", (hello["nonce"], "n"), said)
        connection.sendall(json.dumps(proved).encode() + b"\n")

    with at_the_port(answer) as port, pytest.raises(AllranksError) as caught:
        enter(HOST, port, 1, "2x1", waiting())
    expected = "belongs to user 4320" if whose == "strangers" else "does not know the key"
    assert expected in caught.value.what


def test_a_run_on_one_machine_is_reached_from_no_other(run_dir: Path) -> None:
    from allranks.launch.agent import open_store

    met = meeting.alone(Meeting(str(run_dir), 0, "1x2", ""))
    store = open_store(met, waiting())
    store.set("a", "b")
    port = f":{store.port:04X} "
    lines = Path("/proc/net/tcp").read_text().splitlines()
    listening = [line.split()[1] for line in lines if port in line and " 0A " in line]
    assert listening == [f"0100007F{port.strip()}"]
    if Path("/proc/net/tcp6").exists():
        lines = Path("/proc/net/tcp6").read_text().splitlines()
        assert not [line for line in lines if port in line and " 0A " in line]
