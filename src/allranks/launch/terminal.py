"""A terminal for one rank: what it draws reaches the user's screen as it is, its log as lines."""

from __future__ import annotations

import codecs
import fcntl
import os
import re
import select
import struct
import termios
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

READ_BYTES = 1 << 16
MOST_QUEUED = 1 << 20  # bytes for a screen that is slow to take them
FLUSH_SECONDS = 5.0
LEFT_OUT = b"\r\n[left out what this terminal was too slow for; the log has all of it]\r\n"
MOST_HELD = 200  # lines; no screen is taller
MOST_UNWRITTEN = 10_000  # lines that a log could not take
# Text, or one control sequence of a terminal: CSI (group 1: numbers, 2: letter), OSC, others.
TOKENS = re.compile(
    r"\x1b\[([0-9;:<=>?]*)[ -/]*([@-~])"
    r"|\x1b\][^\x07\x1b\n]{0,4096}(?:\x07|\x1b\\)|\x1b[ -/]*[0-Z\\^-~]"
    r"|[\r\n\b\x07\x0b\x0c\x0e\x0f\x00]|[^\x1b\r\n\b\x07\x0b\x0c\x0e\x0f\x00]+|\x1b"
)
UNFINISHED = re.compile(r"\x1b(?:\[[0-9;:<=>? -/]*|\][^\x07\x1b\n]{0,4096}\x1b?|[ -/]*)?$")


class ScreenLines:
    """The lines that remain of all that is drawn on a terminal: bars in their last state.

    A line is released once it can no longer be drawn over: as soon as the cursor is further below
    it than the cursor was ever moved up. So plain text is released line by line, and a progress
    bar, however many lines it has, as it was drawn last.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._rest = ""
        self._begin()

    def _begin(self) -> None:
        self._lines: list[str | None] = [""]  # None: released before, and not drawn over since
        self._row = 0
        self._reach = 0
        self.column = 0

    def feed(self, drawn: bytes) -> list[str]:
        """Lines that are now out of reach."""
        text = self._rest + self._decoder.decode(drawn)
        cut = UNFINISHED.search(text)
        self._rest = text[cut.start() :] if cut else ""
        for token in TOKENS.finditer(text[: cut.start()] if cut else text):
            if token[2]:
                self._obey(token[1], token[2])
            elif token[0][0] != "\x1b":
                self._draw(token[0])
        return [line for line in self._beyond(self._reach) if line is not None]

    def finish(self) -> list[str]:
        """What is left, when nothing more will be drawn; the next line is a fresh one."""
        rest, self._rest = self._rest.lstrip("\x1b"), ""
        if rest:  # the beginning of a sequence that never ended
            self._draw(rest)
        left = [line for line in (*self._beyond(0), self._lines[0]) if line is not None]
        self._begin()
        return left if left[-1:] != [""] else left[:-1]

    def _beyond(self, reach: int) -> Iterator[str | None]:
        while len(self._lines) > min(reach, MOST_HELD) + 1:
            self._row = max(0, self._row - 1)
            yield self._lines.pop(0)

    def _draw(self, text: str) -> None:
        if text == "\n":  # and to the line's beginning: terminals are set up that way
            self._row += 1
            self.column = 0
            if self._row == len(self._lines):
                self._lines.append("")
        elif text == "\r":
            self.column = 0
        elif text == "\b":
            self.column = max(0, self.column - 1)
        elif text >= " " or text[0] == "\t":
            line = self._lines[self._row] or ""
            end = self.column + len(text)
            self._lines[self._row] = line[: self.column].ljust(self.column) + text + line[end:]
            self.column = end

    def _obey(self, numbers: str, letter: str) -> None:
        first = numbers.partition(";")[0]
        count = int(first) if first.isdecimal() else 0
        line = self._lines[self._row] or ""
        if letter in "AF":
            self._go_up(max(1, count))
        elif letter in "BE":
            self._row += max(1, count)
            self._lines += [""] * (self._row + 1 - len(self._lines))
        elif letter == "C":
            self.column += max(1, count)
        elif letter == "D":
            self.column = max(0, self.column - max(1, count))
        elif letter == "G":
            self.column = max(1, count) - 1
        elif letter == "K" and self._lines[self._row] is not None:
            blank = " " * min(self.column, len(line)) + line[self.column :]
            self._lines[self._row] = {0: line[: self.column], 1: blank, 2: ""}.get(count, line)
        elif letter == "J" and count == 0:
            self._lines[self._row :] = [line[: self.column]]
        if letter in "EF":
            self.column = 0

    def _go_up(self, count: int) -> None:
        missing = min(count, MOST_HELD) - self._row
        if missing > 0:
            self._lines[:0] = [None] * missing
            self._row += missing
        self._row = max(0, self._row - count)
        self._reach = max(self._reach, len(self._lines) - 1 - self._row)


class RankTerminal:
    """A pseudo-terminal of the size of the user's own, read by a thread as long as it is open.

    `screen`: a file descriptor of the user's terminal. `write` gets all that is drawn, in a thread
    of its own: a terminal that takes no more (Ctrl-S, a sleeping laptop) must not hold up the rank.
    """

    def __init__(self, screen: int, write: Callable[[bytes], None]) -> None:
        self._screen = screen
        self._write = write
        self._master, self._slave = os.openpty()
        self.path = os.ttyname(self._slave)
        self._size = b""
        self._lines = ScreenLines()
        self._log: Path | None = None
        self._unwritten: list[str] = []
        self._touched = 0.0
        self._lock = threading.Lock()
        self._is_open = True
        self._queue: deque[bytes] = deque()
        self._queued = 0  # bytes, with those that are being written
        self._is_behind = False  # something was left out
        self._change = threading.Condition()
        # What is drawn arrives as it was drawn: the user's terminal makes of it what it does.
        settings = termios.tcgetattr(self._slave)
        settings[1] &= ~termios.OPOST
        settings[3] &= ~(termios.ECHO | termios.ICANON | termios.ISIG)
        termios.tcsetattr(self._slave, termios.TCSANOW, settings)
        self.resize()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._writer = threading.Thread(target=self._show, daemon=True)
        self._reader.start()
        self._writer.start()

    def begin(self, log: Path) -> None:
        """A rank is about to draw here, whose log this is."""
        with self._lock:
            self._drain()
            self._append(self._lines.finish())
            log.parent.mkdir(parents=True, exist_ok=True)
            self._log = log
        self.flush()

    def resize(self) -> None:
        """Give it the size that the user's terminal has now: bars look before they draw."""
        with suppress(OSError):
            columns, rows = os.get_terminal_size(self._screen)
            size = struct.pack("HHHH", rows, columns, 0, 0)
            if size != self._size:
                self._size = size
                fcntl.ioctl(self._slave, termios.TIOCSWINSZ, size)

    def poke(self) -> None:
        """Have `write` called without anything new: it may hold something back."""
        with self._change:
            if not self._queue:
                self._queue.append(b"")
                self._change.notify_all()

    def flush(self) -> bool:
        """Wait until all is written; False if the user's terminal does not take it."""
        with self._change:
            return self._change.wait_for(
                lambda: not self._queue and not self._queued, FLUSH_SECONDS
            )

    def close(self) -> bool:
        """Show the rest, complete the log, and end; False if the user's terminal takes no more."""
        with self._lock:
            if self._is_open:
                self._drain()
                self._append(self._lines.finish())
        is_shown = self.flush()
        with self._lock, self._change:
            self._is_open = False
            self._change.notify_all()
        self._reader.join()
        os.close(self._slave)
        os.close(self._master)
        return is_shown

    def _read(self) -> None:
        while self._is_open:
            # Not for ever: what a rank left behind may keep it open.
            select.select([self._master], [], [], 0.2)
            with self._lock:
                if self._is_open:
                    self._drain()

    def _drain(self) -> None:
        while select.select([self._master], [], [], 0)[0]:
            try:
                drawn = os.read(self._master, READ_BYTES)
            except OSError:  # no rank has it open
                return
            self._append(self._lines.feed(drawn))
            self._enqueue(drawn)

    def _enqueue(self, drawn: bytes) -> None:
        with self._change:
            if self._queued > MOST_QUEUED:
                self._is_behind = True
                return
            if self._is_behind:
                drawn = LEFT_OUT + drawn
                self._is_behind = False
            self._queue.append(drawn)
            self._queued += len(drawn)
            self._change.notify_all()

    def _show(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._queue or not self._is_open)
                if not self._queue:
                    return
                drawn = self._queue.popleft()
            with suppress(Exception):  # whatever becomes of the screen, the rank must be read
                self._write(drawn)
            with self._change:
                self._queued -= len(drawn)
                self._change.notify_all()

    def _append(self, lines: list[str]) -> None:
        """To the log; while a bar is drawn, only the time of its last sign of life."""
        now = time.monotonic()
        if self._log is None or (not lines and now < self._touched + 1.0):
            return
        self._touched = now
        self._unwritten = [*self._unwritten, *lines][-MOST_UNWRITTEN:]
        with suppress(OSError):  # a full disk must not end a training: once more with the next line
            with self._log.open("a", encoding="utf-8", errors="replace") as file:
                file.write("".join(f"{line.rstrip()}\n" for line in self._unwritten))
            self._unwritten = []
            os.utime(self._log)
