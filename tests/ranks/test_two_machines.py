"""`doctor --listen` and `--connect` between two network namespaces: a link, and what can break it.

Needs root and iproute2. Namespaces have the same name service and host name, and nothing else in
common.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

pytestmark = pytest.mark.ranks

MBIT = 1e6 / 8


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@dataclass
class Pair:
    """Two machines, `left` at 10.77.0.1 and `right` at 10.77.0.2."""

    left: str
    right: str

    def start(self, space: str, *words: str) -> subprocess.Popen[str]:
        doctor = [sys.executable, "-m", "allranks", "doctor", "--json", *words]
        command = ["ip", "netns", "exec", space, *doctor]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def test(self, target: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """What the side that connects says, and the listener."""
        listener = self.start(self.left, "--listen")
        try:
            self._wait_for_listener()
            found = self.connect(target)
            out, errors = listener.communicate(timeout=90)
            assert listener.returncode in (0, 1), errors
            return found, json.loads(out)
        finally:
            listener.kill()
            listener.wait()

    def connect(self, target: str) -> dict[str, Any]:
        process = self.start(self.right, "--connect", target)
        out, errors = process.communicate(timeout=120)
        assert process.returncode in (0, 1), errors
        found: dict[str, Any] = json.loads(out)
        assert found["ok"] == (process.returncode == 0)
        return found

    def _wait_for_listener(self) -> None:
        until = time.monotonic() + 90
        while time.monotonic() < until:
            command = ["ip", "netns", "exec", self.left, "cat", "/proc/net/tcp6"]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            if f":{29500:04X} " in done.stdout:
                return
            time.sleep(0.05)
        raise AssertionError("nobody listens")


def wait_for_carrier(space: str, name: str) -> None:
    until = time.monotonic() + 60
    state = ""
    while state != "up" and time.monotonic() < until:
        command = ["ip", "netns", "exec", space, "cat", f"/sys/class/net/{name}/operstate"]
        state = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def pair() -> Iterator[Pair]:
    if os.geteuid() or not shutil.which("ip") or not shutil.which("tc"):
        pytest.skip("network namespaces need root and iproute2")
    spaces = [f"allranks-{side}-{os.getpid()}" for side in "ab"]
    try:
        try:
            for space in spaces:
                ip("netns", "add", space)
            ip(
                "link",
                "add",
                "va",
                "netns",
                spaces[0],
                "type",
                "veth",
                "peer",
                "vb",
                "netns",
                spaces[1],
            )
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr}")
        for number, (space, name) in enumerate(zip(spaces, ("va", "vb"), strict=True), start=1):
            ip("-n", space, "addr", "add", f"10.77.0.{number}/24", "dev", name)
            ip("-n", space, "link", "set", name, "up")
            ip("-n", space, "link", "set", "lo", "up")
        for space, name in zip(spaces, ("va", "vb"), strict=True):
            wait_for_carrier(space, name)
        yield Pair(*spaces)
    finally:
        for space in spaces:
            subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)


def status(found: dict[str, Any], name: str) -> tuple[str, str, str]:
    (check,) = [check for check in found["checks"] if check["check"] == name]
    return check["status"], check["value"], check["fix"]


def megabits(value: str) -> float:
    number, unit = value.split()[:2]
    return float(number) * {"Mbit/s": 1, "Gbit/s": 1000}[unit]


def test_a_shaped_link_is_measured_in_the_direction_that_is_slow(pair: Pair) -> None:
    shape = ["qdisc", "add", "dev", "va", "root", "tbf", "rate", "200mbit"]
    limits = ["burst", "256kb", "latency", "50ms"]
    subprocess.run(["tc", "-n", pair.left, *shape, *limits], check=True)
    here, there = pair.test("10.77.0.1:29500")
    slow, fast = status(here, "bandwidth in"), status(here, "bandwidth out")
    assert slow[0] == "warn" and 20 < megabits(slow[1]) < 220, slow
    assert megabits(fast[1]) > 1.5 * megabits(slow[1]), (fast, slow)  # that way is not shaped
    assert status(there, "bandwidth out")[1] == slow[1]
    assert status(here, "port")[0] == "pass"
    assert "vb here, va on" in status(here, "interface")[1]
    assert "--master 10.77.0.1:29500" in status(here, "interface")[2]
    assert "va here, vb on" in status(there, "interface")[1]
    assert status(here, "mtu")[1].startswith("1500 bytes")


def test_a_firewall_that_lets_one_port_through_is_found(pair: Pair) -> None:
    """Everything else that `right` opens is refused on its way out."""
    rule = ["rule", "add", "pref", "10", "ipproto", "tcp", "dport", "32768-60999", "unreachable"]
    try:
        ip("-n", pair.right, *rule)
    except subprocess.CalledProcessError:
        pytest.skip("this kernel has no rules by port")
    here, there = pair.test("10.77.0.1:29500")
    kind, value, fix = status(here, "port")
    assert kind == "fail" and "29500 works, but other ports do not" in value
    assert "ip_local_port_range" in fix and not here["ok"] and not there["ok"]


def test_the_ways_that_lead_nowhere(pair: Pair) -> None:
    assert status(pair.connect("10.77.0.1:29500"), "port")[1].endswith("(refused)")
    unknown = pair.connect("no-such-machine.invalid:29500")
    assert status(unknown, "name")[0] == "fail"
    far = pair.connect("10.99.0.1:29500")
    assert status(far, "route")[1] == "10.99.0.1: no route from here"
    # A firewall that drops: the answers never leave.
    ip("-n", pair.left, "route", "add", "blackhole", "10.77.0.2/32")
    kind, value, fix = status(pair.connect("10.77.0.1:29500"), "port")
    assert kind == "fail" and "no answer (it is on this network)" in value and "firewall" in fix
