"""Takes over the terminal for a live screen, and restores it whatever happens."""

from __future__ import annotations

import io
import os
import select
import shutil
import signal
import subprocess
import sys
import termios
import time
import tty
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any, Protocol

from rich.console import Console
from rich.text import Text

# Without line wrapping: a character that is wider than expected must not spoil the next line.
ENTER_SCREEN = "\x1b[?1049h\x1b[?25l\x1b[?7l\x1b[2J"
LEAVE_SCREEN = "\x1b[?7h\x1b[?25h\x1b[?1049l"
BEGIN_UPDATE, END_UPDATE = "\x1b[?2026h", "\x1b[?2026l"  # drawn in one go, where supported

KEYS = {
    **{"\x1b[A": "up", "\x1b[B": "down", "\x1b[C": "right", "\x1b[D": "left"},
    **{"\x1bOA": "up", "\x1bOB": "down", "\x1bOC": "right", "\x1bOD": "left"},
    **{"\x1b[5~": "page up", "\x1b[6~": "page down", "\x1b[H": "home", "\x1b[F": "end"},
    **{"\x1b[1~": "home", "\x1b[4~": "end", "\x1bOH": "home", "\x1bOF": "end"},
    **{"\r": "enter", "\n": "enter", "\t": "tab", "\x1b[Z": "tab", "\x1b": "escape"},
    **{"\x7f": "backspace", "\b": "backspace"},
}
# What these letters mean while no text is typed.
LETTERS = {"k": "up", "j": "down", "h": "left", "g": "home", "G": "end", "l": "enter"}
TICK_SECONDS = 1.0
SEQUENCE_SECONDS = 0.05  # for the rest of an arrow key to arrive, even over a slow line

# Waits for a word from its parent. If none comes, the parent was killed: restore the terminal.
GUARD = r"""
read -r word && exit
stty "$1" <&1 2>/dev/null
printf '\033[?7h\033[?25h\033[?1049l' >&2
"""


class Terminal:
    """`with Terminal() as terminal:` the alternate screen, no cursor, keys as they are pressed.

    A shell beside this process restores the terminal if this one is killed.
    """

    def __init__(self) -> None:
        self.input = sys.stdin.fileno()
        self._console = Console(file=sys.stdout, highlight=False)
        self._settings: list[Any] = []
        self._handlers: dict[signal.Signals, Any] = {}
        self._drawn: list[str] = []
        self._lines: list[Text] = []
        self._pending = ""
        self._wake_read, self._wake_write = os.pipe()
        self._guard: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Terminal:
        self._settings = termios.tcgetattr(self.input)
        if isinstance(
            sys.stdout, io.TextIOWrapper
        ):  # a terminal that cannot show a character gets ?
            sys.stdout.reconfigure(errors="replace")
        self._guard = start_guard(self.input)
        os.set_blocking(self._wake_write, False)
        for number, handler in (
            (signal.SIGTERM, self._end),
            (signal.SIGHUP, self._end),
            (signal.SIGTSTP, self._suspend),
            (signal.SIGWINCH, self._wake),
        ):
            self._handlers[number] = signal.signal(number, handler)
        self._take()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with suppress(OSError):  # the terminal itself may be gone
            self._give_back()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        if self._guard is not None and self._guard.stdin is not None:
            with suppress(OSError):
                self._guard.communicate(b"done\n")
        os.close(self._wake_read)
        os.close(self._wake_write)

    def size(self) -> tuple[int, int]:
        """Columns and lines."""
        size = shutil.get_terminal_size()
        with suppress(OSError):  # the variables COLUMNS and LINES do not follow a resize
            size = os.get_terminal_size(sys.stdout.fileno())
        return max(20, size.columns), max(4, size.lines)

    def draw(self, lines: Sequence[Text]) -> None:
        """Write the lines that have changed."""
        width, height = self.size()
        # An unchanged line is not rendered again.
        known = self._lines if self._drawn else []
        drawn = [
            self._drawn[row] if row < len(known) and known[row] == line else self._ansi(line, width)
            for row, line in enumerate(lines[:height])
        ]
        changes = [
            # Cleared first: at the end of a full line, it would take the last character with it.
            f"\x1b[{row};1H\x1b[2K{line}\x1b[0m"
            for row, line in enumerate(drawn, start=1)
            if row > len(self._drawn) or self._drawn[row - 1] != line
        ]
        if changes:
            self._write(BEGIN_UPDATE + "".join(changes) + END_UPDATE)
        self._drawn, self._lines = drawn, list(lines[:height])

    def redraw(self) -> None:
        """Draw everything again: the size has changed, or something else has written."""
        self._drawn = []
        self._write("\x1b[2J")

    def key(self, seconds: float) -> str | None:
        """The next key by its name, "resize", or None if there is none within `seconds`."""
        if not self._pending:
            ready, _, _ = select.select([self.input, self._wake_read], [], [], seconds)
            if self._wake_read in ready:
                os.read(self._wake_read, 1024)
                self.redraw()
                return "resize"
            if not ready:
                return None
            self._pending = self._read()
        if self._pending.startswith("\x1b"):
            while self._pending not in KEYS or self._pending == "\x1b":
                if not select.select([self.input], [], [], SEQUENCE_SECONDS)[0]:
                    break
                self._pending += self._read()
        return self._next_key()

    def _next_key(self) -> str:
        """Take one key off what was read; pasted text is many keys."""
        for length in range(min(4, len(self._pending)), 0, -1):
            word = self._pending[:length]
            if word in KEYS and (word != "\x1b" or len(self._pending) == 1):
                self._pending = self._pending[length:]
                return KEYS[word]
        if self._pending.startswith("\x1b"):
            self._pending = ""  # a key that we do not know
            return "unknown"
        word, self._pending = self._pending[0], self._pending[1:]
        return word

    def _read(self) -> str:
        data = os.read(self.input, 1024)
        if not data:  # the terminal is gone
            raise SystemExit(1)
        return data.decode(errors="replace")

    def _take(self) -> None:
        tty.setcbreak(self.input)
        self._write(ENTER_SCREEN)
        self._drawn = []

    def _give_back(self) -> None:
        termios.tcsetattr(self.input, termios.TCSADRAIN, self._settings)
        self._write(LEAVE_SCREEN)

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    def _ansi(self, line: Text, width: int) -> str:
        with self._console.capture() as capture:
            self._console.print(line, end="", no_wrap=True, crop=True, width=width)
        return capture.get()

    def _wake(self, number: int, frame: FrameType | None) -> None:
        with suppress(BlockingIOError):
            os.write(self._wake_write, b".")

    def _end(self, number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    def _suspend(self, number: int, frame: FrameType | None) -> None:
        """Ctrl-Z: give the shell its terminal back until `fg`."""
        self._give_back()
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, self._suspend)
        self._take()
        self._wake(number, frame)


class Screen(Protocol):
    """What is shown until the user quits."""

    is_over: bool

    def look(self) -> None:
        """Read what is new."""

    def draw(self, width: int, height: int) -> list[Text]:
        """The screen: `height` lines of at most `width` cells."""

    def press(self, key: str, rows: int) -> None:
        """Handle a key, on a screen of `rows` lines."""

    def close(self) -> None:
        """Called last, whatever happens to the terminal."""


def show(screen: Screen) -> None:
    """Look, draw and handle keys until the user quits."""
    try:
        with Terminal() as terminal:
            due = 0.0
            while not screen.is_over:
                if time.monotonic() >= due:
                    screen.look()
                    due = time.monotonic() + TICK_SECONDS
                terminal.draw(screen.draw(*terminal.size()))
                key = terminal.key(max(0.0, due - time.monotonic()))
                if key is not None and key != "resize":
                    screen.press(key, terminal.size()[1])
    finally:
        screen.close()


def start_guard(terminal: int) -> subprocess.Popen[bytes] | None:
    """A shell that outlives this process for a moment; None if there is no `stty`."""
    try:
        saved = subprocess.run(
            ["stty", "-g"], stdin=terminal, capture_output=True, text=True, check=True
        ).stdout.strip()
        # In its own session: a signal from the terminal that ends this process spares it.
        return subprocess.Popen(
            ["sh", "-c", GUARD, "sh", saved],
            stdin=subprocess.PIPE,
            stdout=terminal,
            stderr=sys.stdout.fileno(),
            start_new_session=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
