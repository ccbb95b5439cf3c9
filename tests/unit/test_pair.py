"""The test between two machines: what it means, and its talk over the loopback."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from allranks.cli.doctor import teller
from allranks.doctor.pair import talk
from allranks.doctor.pair.talk import (
    MOST_SILENT,
    Listening,
    check_as_listener,
    check_connection,
    connect,
    is_neighbour,
    split_target,
)
from allranks.doctor.pair.verdict import PairFacts, Side, verdict
from allranks.errors import AllranksError

HERE = Side(
    host="a",
    address="10.0.0.1",
    sees="10.0.0.2",
    interface="eth0",
    mtu=1500,
    link_rate=1.25e9,
    interfaces={"10.0.0.1": "eth0"},
)
THERE = Side(
    host="b",
    address="10.0.0.2",
    sees="10.0.0.1",
    interface="ens3",
    mtu=1500,
    interfaces={"10.0.0.2": "ens3"},
)
GOOD: dict[str, Any] = {
    **{"named": "b", "port": 29500, "addresses": ["10.0.0.2"], "here": HERE, "there": THERE},
    **{"path_mtu": 1500, "round_trip": 1e-4, "jitter": 1e-5, "clock_offset": 0.001},
    **{"rate_out": 1.1e9, "rate_in": 1.1e9, "rate_many": 1.15e9},
    **{"other_port_out": "", "other_port_in": ""},
}


def rows(listens: bool = False, **changes: Any) -> dict[str, tuple[str, str, str]]:
    found = verdict(PairFacts(**{**GOOD, **changes}), listens=listens)
    return {check.name: (check.status, check.value, check.fix) for check in found}


@pytest.mark.parametrize("listens", [False, True])
def test_a_good_way_passes_on_both_sides(listens: bool) -> None:
    found = rows(listens)
    assert {status for status, _, _ in found.values()} == {"pass"}
    assert found["interface"][2] == "--master 10.0.0.2:29500"


def test_several_interfaces_have_the_one_named_that_was_used() -> None:
    here = Side(**{**asdict(HERE), "interfaces": {"10.0.0.1": "eth0", "10.9.0.1": "ib0"}})
    found = rows(here=here, also={"10.9.0.2": "ib0"})
    assert "NCCL_SOCKET_IFNAME==eth0 GLOO_SOCKET_IFNAME=eth0" in found["interface"][2]
    assert "10.9.0.2 (ib0)" in found["interface"][1]


@pytest.mark.parametrize(
    ("changes", "name", "status", "fix"),
    [
        ({"other_port_in": "timeout"}, "port", "fail", "ip_local_port_range"),
        ({"round_trip": 0.02}, "latency", "warn", "same zone"),
        ({"rate_out": 1e8}, "bandwidth out", "warn", "ethtool -S eth0"),
        ({"rate_in": None}, "bandwidth in", "fail", "mtu 1500"),
        ({"rate_in": 1e3}, "bandwidth in", "fail", "mtu 1500"),
        ({"rate_many": 5e9}, "connections", "warn", "NCCL_SOCKET_NTHREADS"),
        ({"clock_offset": -30.0}, "clock", "warn", "set-ntp"),
        ({"refusals": {"10.9.9.9": "timeout"}}, "name", "warn", "use 10.0.0.2"),
        ({"addresses": ["127.0.1.1"]}, "name", "fail", "/etc/hosts"),
        ({"named": "10.0.0.2"}, "name", "not here", ""),
        ({"there": Side(**{**asdict(THERE), "sees": "9.9.9.9"})}, "route", "fail", "VPN"),
        ({"there": Side(**{**asdict(THERE), "mtu": 9000})}, "mtu", "warn", "eth0 mtu 1500"),
    ],
)
def test_what_is_wrong_on_the_way(
    changes: dict[str, Any], name: str, status: str, fix: str
) -> None:
    found = rows(**changes)
    assert found[name][0] == status, found[name]
    assert fix in found[name][2]


def test_the_listener_sees_the_other_direction() -> None:
    found = rows(listens=True, rate_out=1e8, other_port_out="timeout")
    assert found["bandwidth in"][0] == "warn" and "ens3" in found["bandwidth in"][2]
    assert "from there: timeout" in found["port"][1]


@pytest.mark.parametrize(
    ("changes", "name", "fix"),
    [
        ({"name_error": "Name or service not known", "addresses": []}, "name", "address"),
        ({"refusals": {"10.0.0.2": "refused"}}, "port", "doctor --listen 29500"),
        ({"refusals": {"10.0.0.2": "timeout"}}, "port", "firewall-cmd"),
        ({"refusals": {"10.0.0.2": "timeout"}, "neighbour": False}, "route", "ip addr"),
        ({"refusals": {"10.0.0.2": "no route"}}, "route", "ip route get 10.0.0.2"),
        ({"refusals": {"10.0.0.2": "forbidden"}}, "port", "nft list ruleset"),
        ({"stranger": "it said b'SSH-2.0'"}, "port", "doctor --listen"),
    ],
)
def test_where_the_way_ends(changes: dict[str, Any], name: str, fix: str) -> None:
    lost = {"here": None, "there": None, "round_trip": None}
    found = rows(**{**lost, **changes})
    assert found[name][0] == "fail" and fix in found[name][2], found


@contextmanager
def listener() -> Iterator[tuple[Listening, list[str], list[PairFacts | None]]]:
    """One that waits in a thread; what it tells meanwhile, and what it has found in the end."""
    said: list[str] = []
    heard: list[PairFacts | None] = []
    listening = Listening(0, said.append)
    thread = threading.Thread(target=lambda: heard.append(listening.wait(200)))
    thread.start()
    try:
        yield listening, said, heard
    finally:
        listening.close()
        thread.join(60)


def is_shown_the_door(there: socket.socket) -> bool:
    try:
        return there.recv(10) == b""
    except ConnectionResetError:
        return True


def wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_two_sides_over_the_loopback() -> None:
    with listener() as (listening, said, heard):
        # Strangers first: they must not take the place of the one that is waited for.
        with socket.create_connection(("127.0.0.1", listening.port), 5) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            assert is_shown_the_door(stranger)
        wait_until(lambda: len(said) == 1)
        with socket.create_connection(("127.0.0.1", listening.port), 5) as stranger:
            talk.say(stranger, session="guess", mode="down", seconds=1)
            assert is_shown_the_door(stranger)
        wait_until(lambda: len(said) == 2)
        found = connect("127.0.0.1", listening.port, seconds=0.1)
        wait_until(lambda: bool(heard))
    assert found.there is not None and found.there.interface == "lo", found
    assert (found.other_port_out, found.other_port_in) == ("", "")
    assert min(found.rate_out or 0, found.rate_in or 0, found.rate_many or 0) > 0
    assert found.round_trip is not None
    assert found.clock_offset is not None and abs(found.clock_offset) < 0.5
    assert heard[0] is not None and heard[0].rate_out == found.rate_out
    assert len(said) == 3 and "has connected" in said[-1]


def test_a_second_machine_is_told_to_wait() -> None:
    with (
        listener() as (listening, _, _),
        socket.create_connection(("127.0.0.1", listening.port), 5) as first,
    ):
        talk.say(first, allranks=talk.VERSION, nonce="n", side=asdict(HERE), port=1)
        assert talk.hear(first)["nonce"] == "n"
        found = connect("127.0.0.1", listening.port, seconds=0.1)
    assert "busy" in found.stranger


def test_what_answers_but_is_no_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(talk, "TALK_SECONDS", 30.0)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            there, _ = server.accept()
            with there:
                there.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
                there.recv(1000)

        thread = threading.Thread(target=answer)
        thread.start()
        found = connect("127.0.0.1", server.getsockname()[1])
        thread.join(60)
    assert "SSH-2.0" in found.stranger and found.there is None


def test_a_port_that_is_taken_is_said_before_anything_waits() -> None:
    with socket.create_server(("", 0)) as taken, pytest.raises(AllranksError, match="in use") as e:
        Listening(taken.getsockname()[1], print)
    assert "ss -ltnp" in e.value.fix


def test_what_the_other_machine_says_is_fit_for_a_terminal() -> None:
    fields = {**asdict(HERE), "host": "a\x1b[31m\nb" + "x" * 999}
    assert Side(**fields).host.startswith("a[31mb") and len(Side(**fields).host) < 256
    wrong: list[tuple[type, dict[str, Any], str]] = [
        (Side, {**fields, "interfaces": []}, "interfaces"),
        (PairFacts, {**GOOD, "rate_in": "fast"}, "rate_in"),
    ]
    for kind, values, name in wrong:
        with pytest.raises(ValueError, match=name) as odd:
            kind(**values)
        assert talk.in_words(odd.value) == f"it sent an invalid {name}"


def test_a_neighbour_is_looked_up_in_the_kernel_s_table(tmp_path: Path) -> None:
    table = tmp_path / "arp"
    table.write_text(
        "IP address HW type Flags HW address Mask Device\n"
        "10.0.0.2 0x1 0x2 52:54:00:00:00:01 * eth0\n"
        "10.0.0.3 0x1 0x0 00:00:00:00:00:00 * eth0\n"
    )
    assert is_neighbour("10.0.0.2", table) is True
    assert is_neighbour("10.0.0.3", table) is False
    assert is_neighbour("10.7.0.3", table) is None


def test_a_target_is_a_host_and_maybe_a_port() -> None:
    split = split_target
    assert split("node1") == ("node1", 29500) and split("node1:7") == ("node1", 7)
    assert split("[fd00::2]:7") == ("fd00::2", 7) and split("fd00::2") == ("fd00::2", 29500)


@pytest.mark.parametrize("target", ["node1:port", "node1:0", ":29500x"])
def test_a_target_that_is_none(target: str) -> None:
    with pytest.raises(AllranksError, match="HOST:PORT"):
        check_connection(target)


def test_silent_strangers_lock_nobody_out() -> None:
    with listener() as (listening, said, heard), ExitStack() as silent:
        for _ in range(MOST_SILENT + 8):
            silent.enter_context(socket.create_connection(("127.0.0.1", listening.port), 60))
        found = connect("127.0.0.1", listening.port, seconds=0.1)
        wait_until(lambda: bool(heard))
    assert found.there is not None and heard[0] is not None, said


def test_a_letter_now_and_then_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(talk, "TALK_SECONDS", 0.3)
    with listener() as (listening, said, _):
        with socket.create_connection(("127.0.0.1", listening.port), 60) as stranger:
            while not said:
                try:
                    stranger.sendall(b"[")
                except OSError:
                    break
                time.sleep(0.05)
        wait_until(lambda: bool(said))


def test_what_a_stranger_says_is_no_markup(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told: list[Callable[[str], None]] = []

    class Once:
        port = 1

        def __init__(self, port: int, tell: Callable[[str], None]) -> None:
            told.append(tell)

        def wait(self) -> PairFacts:
            told[0]("10.0.0.9: it said b'[/x]\x1b[2J'")
            return PairFacts(**GOOD)

    monkeypatch.setattr("allranks.doctor.pair.talk.Listening", Once)
    check_as_listener(1, teller(as_json=False))
    assert "it said b'[/x]'" in capsys.readouterr().out
