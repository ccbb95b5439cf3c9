"""Two machines on this one: network namespaces, each with an sshd of its own. Needs root."""

from __future__ import annotations

import os
import secrets
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SSHD = "/usr/sbin/sshd"


class Hosts:
    """`a` and `b`. What finds `self.bin` first on its PATH reaches them as `ssh a`, `ssh b`."""

    def __init__(self, folder: Path, unshared: Path | None) -> None:
        self.folder, self.unshared = folder, unshared
        self.mark = secrets.token_hex(2)
        self.net = f"10.{80 + os.getpid() % 100}.{int(self.mark[:2], 16)}"
        self.servers: dict[str, subprocess.Popen[bytes]] = {}
        self.bin = folder / "bin"

    def up(self) -> None:
        """Raises subprocess.CalledProcessError where that is not allowed."""
        bridge = f"br{self.mark}"
        ip("link", "add", bridge, "type", "bridge")
        ip("addr", "add", f"{self.net}.254/24", "dev", bridge)
        ip("link", "set", bridge, "up")
        for name in ("key", "host_key"):
            file = str(self.folder / name)
            subprocess.run(["ssh-keygen", "-qt", "ed25519", "-N", "", "-f", file], check=True)
        lines = [f"Host *\n  IdentityFile {self.folder}/key\n  StrictHostKeyChecking no"]
        lines.append(f"  UserKnownHostsFile {self.folder}/known\n  LogLevel ERROR\n")
        for number, name in enumerate("ab", start=1):
            space, link = self.space(name), f"v{name}{self.mark}"
            ip("netns", "add", space)
            ip("link", "add", link, "type", "veth", "peer", "eth0", "netns", space)
            ip("link", "set", link, "master", bridge, "up")
            ip("-n", space, "addr", "add", f"{self.net}.{number}/24", "dev", "eth0")
            ip("-n", space, "link", "set", "eth0", "up")
            ip("-n", space, "link", "set", "lo", "up")
            lines.append(f"Host {name}\n  HostName {self.net}.{number}\n")
            self._serve(name, f"{self.net}.{number}")
        (self.folder / "config").write_text("\n".join(lines))
        self.bin.mkdir()
        wrapper = self.bin / "ssh"
        ssh = shlex.quote(shutil.which("ssh") or "ssh")
        wrapper.write_text(f'#!/bin/sh\nexec {ssh} -F {self.folder}/config "$@"\n')
        wrapper.chmod(0o755)
        for name in "ab":
            self._wait_for(name)

    def space(self, name: str) -> str:
        return f"allranks-{name}-{self.mark}"

    def _serve(self, name: str, address: str) -> None:
        Path("/run/sshd").mkdir(exist_ok=True)
        options = {
            "ListenAddress": address,
            "HostKey": self.folder / "host_key",
            "AuthorizedKeysFile": self.folder / "key.pub",
            "PidFile": "none",
            "StrictModes": "no",
            "UsePAM": "no",
            "PermitRootLogin": "yes",
            "PasswordAuthentication": "no",
        }
        file = self.folder / f"sshd-{name}.conf"
        file.write_text("".join(f"{key} {value}\n" for key, value in options.items()))
        server = f"exec {SSHD} -D -e -f {shlex.quote(str(file))}"
        if self.unshared is not None:  # its own disk in place of that folder
            server = f"mount -t tmpfs none {shlex.quote(str(self.unshared))} && {server}"
        # Processes of its own as well: they all end with the first of them.
        words = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        with (self.folder / f"sshd-{name}.log").open("ab") as log:
            self.servers[name] = subprocess.Popen(
                ["ip", "netns", "exec", self.space(name), *words, "sh", "-c", server],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def _wait_for(self, name: str) -> None:
        until = time.monotonic() + 60
        while subprocess.run(
            [self.bin / "ssh", "-n", name, "true"], capture_output=True
        ).returncode:
            log = (self.folder / f"sshd-{name}.log").read_text()
            assert time.monotonic() < until and self.servers[name].poll() is None, log
            time.sleep(0.1)

    def crash(self, name: str) -> None:
        """Power loss: all of its processes die, and its link with them."""
        self.servers[name].kill()
        self.servers[name].wait()
        ip("netns", "del", self.space(name))

    def down(self) -> None:
        for server in self.servers.values():
            server.kill()
            server.wait()
        for name in "ab":
            subprocess.run(["ip", "netns", "del", self.space(name)], capture_output=True)
        subprocess.run(["ip", "link", "del", f"br{self.mark}"], capture_output=True)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@contextmanager
def two_hosts(folder: Path, unshared: Path | None = None) -> Iterator[Hosts]:
    hosts = Hosts(folder, unshared)
    try:
        hosts.up()
        yield hosts
    finally:
        hosts.down()
