"""A real terminal whose screen can be read, and whose keys can be pressed."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

WAIT_SECONDS = 150.0  # a busy machine takes long to import torch


class Terminal:
    """One window of a tmux server of its own."""

    def __init__(self, socket: Path) -> None:
        self.socket = socket

    def tmux(self, *words: str) -> str:
        done = subprocess.run(
            ["tmux", "-f", "/dev/null", "-S", str(self.socket), *words],
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )
        assert done.returncode == 0, f"tmux {words}: {done.stderr}"
        return done.stdout

    def start(self, *words: str | Path, width: int = 80, height: int = 24) -> None:
        """`allranks WORDS` in a window; when it has ended, its exit code is shown."""
        self.start_words(sys.executable, "-m", "allranks", *words, width=width, height=height)

    def start_words(self, *words: str | Path, width: int = 80, height: int = 24) -> None:
        """Any command in a window."""
        command = shlex.join(map(str, words))
        self.tmux(
            *("new-session", "-d", "-x", str(width), "-y", str(height), "sh", "-c"),
            # The shell is not one that mends its terminal after a command.
            f"trap : INT; echo $$ > {self.socket}.pid; {command}; echo left $?; exec sleep 1000",
        )

    def screen(self) -> str:
        return self.tmux("capture-pane", "-p")

    def press(self, *keys: str) -> None:
        self.tmux("send-keys", *keys)

    def fact(self, name: str) -> str:
        return self.tmux("display-message", "-p", f"#{{{name}}}").strip()

    def wait(self, seen: str | Callable[[str], bool]) -> str:
        """The first screen with that text, or for which that is true."""
        deadline = time.monotonic() + WAIT_SECONDS
        while True:
            screen = self.screen()
            if seen in screen if isinstance(seen, str) else seen(screen):
                return screen
            assert time.monotonic() < deadline, f"never seen: {seen}; the screen:\n{screen}"
            time.sleep(0.1)

    def child(self) -> int:
        """The process id of the command."""
        shell = Path(f"{self.socket}.pid").read_text().strip()
        return int(Path(f"/proc/{shell}/task/{shell}/children").read_text().split()[0])

    def settings(self) -> list[str]:
        """What `stty` says of this terminal."""
        command = ["stty", "-a", "-F", self.fact("pane_tty")]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()

    def check_sane(self) -> None:
        """The terminal is as it was before the command."""
        self.wait(lambda screen: self.fact("alternate_on") == "0")
        self.wait(lambda screen: self.fact("cursor_flag") == "1")
        self.wait(lambda screen: {"icanon", "echo", "isig"} <= set(self.settings()))


@contextmanager
def open_terminal(socket: Path) -> Iterator[Terminal]:
    if shutil.which("tmux") is None:
        reason = "tmux is not installed: tests/install.sh tmux, as root"
        if os.environ.get("ALLRANKS_NO_SKIPS"):
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)
    yield Terminal(socket)
    subprocess.run(["tmux", "-S", str(socket), "kill-server"], capture_output=True)


@pytest.fixture
def terminal(tmp_path: Path, no_leaks: None) -> Iterator[Terminal]:
    with open_terminal(tmp_path / "tmux") as live:
        yield live


@pytest.fixture
def other_terminal(tmp_path: Path, no_leaks: None) -> Iterator[Terminal]:
    with open_terminal(tmp_path / "other") as live:
        yield live
