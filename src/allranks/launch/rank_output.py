"""What ranks print, shown to whoever started them: one rank exactly as it draws, or several."""

from __future__ import annotations

import codecs
import fcntl
import os
import queue
import re
import select
import struct
import termios
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from rich.console import Console

from allranks.errors import AllranksError
from allranks.launch.follow import Together
from allranks.run.folder import RunDir
from allranks.run.logs import LogTail
from allranks.run.stacks import without_dumps

MAX_LOG_BYTES = 1 << 20  # shown at a time; the rest comes with the next update
# How Python's report of an exception begins, and of a signal that ends it.
TRACEBACK = re.compile(
    r"^(?:\x1b\[[\d;]*m|\[rank\d+\]: ?|[+| \u256d\u2500])*"  # colours, torch, groups, rich
    r"(?:(?:Exception Group )?Traceback \(most recent call last\)|File \"[^\"]+\", line \d"
    r"|Fatal Python error: )",
    re.MULTILINE,
)
HOLD_SECONDS, ENDING_SECONDS = 1.5, 10.0
READ_BYTES = 1 << 12
MOST_QUEUED = 1 << 20  # characters, for a screen that is slow to take them
FLUSH_SECONDS = 5.0
LEFT_OUT = "\r\n[left out: this terminal was too slow; the log has everything]\r\n"
MOST_HELD = 200  # lines; no screen is taller
MOST_UNWRITTEN = 10_000  # lines that a log could not take
# Text, or one control sequence of a terminal: CSI (group 1: numbers, 2: letter), OSC, others.
TOKENS = re.compile(
    r"\x1b\[([0-9;:<=>?]*)[ -/]*([@-~])"
    r"|\x1b\][^\x07\x1b\n]{0,4096}(?:\x07|\x1b\\)|\x1b[ -/]*[0-Z\\^-~]"
    r"|[\r\n\b\x07\x0b\x0c\x0e\x0f\x00]|[^\x1b\r\n\b\x07\x0b\x0c\x0e\x0f\x00]+|\x1b"
)
UNFINISHED = re.compile(r"\x1b(?:\[[0-9;:<=>? -/]*|\][^\x07\x1b\n]{0,4096}\x1b?|[ -/]*)?$")

text_decoder = partial(codecs.getincrementaldecoder("utf-8"), errors="replace")


class Echo:
    """Shows what ranks of a run print, attempt after attempt.

    `rank` as it draws, in a terminal of its own if the user is at one; or those in `show`, each
    line with its rank. `write` puts text on the screen. `has_bar`: allranks draws a bar below, so
    that only whole lines can be shown, through rich. `hides`: leave out the traceback that a rank
    ends with; the culprit's is shown later, once it is known.
    """

    def __init__(
        self,
        console: Console,
        rank: int,
        show: Sequence[int] | None,
        *,
        has_bar: bool,
        write: Callable[[str], None],
        hides: bool = True,
    ) -> None:
        self._console = console
        self._rank = rank
        self._show = show
        self._has_bar = has_bar
        self._write = write
        self._hides = hides
        self._without: WithoutTraceback | None = None
        self._lines = ScreenLines()
        self._terminal: RankTerminal | None = None
        self._log: Path | None = None
        self._lock = threading.Lock()
        self._drawing = threading.RLock()  # done by the terminal's thread, too

    @property
    def column(self) -> int:
        """Where the cursor is."""
        return self._lines.column

    def open_terminal(self) -> str | None:
        """The path of a terminal for the rank, if one can be had and somebody is there to look."""
        with suppress(OSError, ValueError):  # no file, or no more terminals on this machine
            screen = self._console.file.fileno()
            if not self._has_bar and self._show is None and os.isatty(screen):
                self._terminal = RankTerminal(screen, self._put)
        return self._terminal.path if self._terminal is not None else None

    def begin(self, run: RunDir, attempt: int) -> None:
        """The ranks of an attempt are about to start."""
        with self._lock:
            log = run.log(attempt, self._rank)
            if log == self._log:
                return
            self._show_new(wait=False)
            if self._terminal is not None:
                self._terminal.begin(log)
            self._end_line()
            ranks = [self._rank] if self._show is None else self._show
            self._log, self._position, self._decoder = log, 0, text_decoder()
            self._tails = {rank: LogTail(run.log(attempt, rank)) for rank in ranks}
            self._together = Together(len(ranks))
            self._without = WithoutTraceback(run, attempt, self._rank) if self._hides else None

    def update(self) -> None:
        """Show what is new."""
        with self._lock:
            self._show_new(wait=True)

    def finish(self) -> None:
        """Show the rest, and go to a fresh line."""
        with self._lock:
            self._show_new(wait=False)
            if self._terminal is None or self._terminal.close():  # else the screen takes no more
                self._end_line()

    def _show_new(self, *, wait: bool) -> None:
        if self._log is None:
            return
        if self._terminal is not None:
            self._terminal.resize()
        elif self._show is None:
            with suppress(FileNotFoundError), self._log.open("rb") as file:
                file.seek(self._position)
                drawn = file.read(MAX_LOG_BYTES)
                self._position += len(drawn)
                self._put(self._decoder.decode(drawn))
        else:
            for rank, tail in self._tails.items():
                for line in [*tail.lines(), *(() if wait else tail.last())]:
                    self._together.add(rank, line)
            for line in self._together.ready(wait=wait):
                self._draw(f"{line}\n")

    def _put(self, text: str) -> None:
        with self._drawing:
            text = without_dumps(text)
            self._draw(text if self._without is None else self._without(text))

    def _end_line(self) -> None:
        with self._drawing:
            if self._without is not None:
                self._draw(self._without.rest())
            if self._has_bar:
                self._print(self._lines.finish())
            elif self.column:
                self._draw("\n")

    def _draw(self, text: str) -> None:
        with self._drawing:
            lines = self._lines.feed(text)
            if self._has_bar:
                self._print(lines)
            elif text:
                self._write(text)  # not through rich, which removes what moves the cursor

    def _print(self, lines: Sequence[str]) -> None:
        for line in lines:
            self._console.out(line, highlight=False)


class WithoutTraceback:
    """What a rank prints, chunk by chunk, up to the traceback that it ends with.

    The launcher shows the culprit's last. So a traceback, and what follows it, is held back for as
    long as a rank may take to end after it: longer where its events say that it ends.
    """

    def __init__(self, run: RunDir, attempt: int, rank: int) -> None:
        self._run, self._attempt, self._rank = run, attempt, rank
        self._held = ""
        self._since = 0.0

    def __call__(self, text: str) -> str:
        """What to show now, with what was held back before; call it without text, too."""
        now = time.monotonic()
        if not self._held:
            found = TRACEBACK.search(text)
            if found is None:
                return text
            self._held, self._since = text[found.start() :], now
            return text[: found.start()]
        self._held += text
        # It goes on: what failed was caught, or was a process that it had started.
        goes_on = now >= self._since + (ENDING_SECONDS if self._is_ending() else HOLD_SECONDS)
        if not goes_on or (self._is_ending() and not text):
            return ""
        held, self._held = self._held, ""
        return held

    def rest(self) -> str:
        """What is held back when the rank has ended: nothing of one that failed."""
        end = self._run.end(self._attempt, self._rank)
        held, self._held = self._held, ""
        return "" if end is not None and end["state"] == "failed" else held

    def _is_ending(self) -> bool:
        if self._held.startswith("Fatal Python error"):
            return True
        errors = self._run.errors(self._attempt, self._rank)
        return any(event["type"] not in ("", "SystemExit") for event in errors)


def read_ranks(text: str | None, ranks: range) -> list[int] | None:
    """`--show 1`, `0,2` or `all`, of the ranks on this machine. Raises AllranksError."""
    if text is None or text == "all":
        return None if text is None else list(ranks)
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) in ranks for word in words):
        last = f" to {ranks[-1]}" if len(ranks) > 1 else ""
        raise AllranksError(
            f"--show {text} does not name ranks on this machine, which are {ranks[0]}{last}",
            fix=f"write --show {ranks[-1]}, --show 0,1 for several, or --show all",
        )
    return sorted({int(word) for word in words})


class ScreenLines:
    """The lines that remain of all that is drawn on a terminal: bars in their last state.

    A line is released once it can no longer be drawn over: as soon as the cursor is further below
    it than the cursor was ever moved up. So plain text is released line by line, and a progress
    bar, however many lines it has, as it was drawn last.
    """

    def __init__(self) -> None:
        self._rest = ""
        self._begin()

    def _begin(self) -> None:
        self._lines: list[str | None] = [""]  # None: released before, and not drawn over since
        self._row = 0
        self._reach = 0
        self.column = 0

    def feed(self, text: str) -> list[str]:
        """Lines that are now out of reach."""
        text = self._rest + text
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

    `screen`: a file descriptor of the user's terminal. `write` gets all that is drawn, and nothing
    several times a second, as it may hold something back. It is called in a thread of its own: a
    terminal that takes no more (Ctrl-S, a sleeping laptop) must not hold up the rank.
    """

    def __init__(self, screen: int, write: Callable[[str], None]) -> None:
        self._screen = screen
        self._write = write
        self._master, self._slave = os.openpty()
        self.path = os.ttyname(self._slave)
        self._size = b""
        self._decoder = text_decoder()
        self._lines = ScreenLines()
        self._log: Path | None = None
        self._unwritten: list[str] = []
        self._touched = 0.0
        self._lock = threading.Lock()
        self._is_open = True
        self._queue: queue.Queue[str] = queue.Queue()
        self._num_queued = self._num_shown = 0  # characters; the latter by the writer alone
        self._is_behind = False  # something was left out
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

    def flush(self) -> bool:
        """Wait until all is written; False if the user's terminal does not take it."""
        done = self._queue.all_tasks_done
        with done:
            return done.wait_for(lambda: not self._queue.unfinished_tasks, FLUSH_SECONDS)

    def close(self) -> bool:
        """Show the rest, complete the log, and end; False if the user's terminal takes no more."""
        with self._lock:
            if self._is_open:
                self._drain()
                self._append(self._lines.finish())
                if self._is_behind:
                    self._queue.put(LEFT_OUT)
        is_shown = self.flush()
        with self._lock:
            self._is_open = False
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
            text = self._decoder.decode(drawn)
            self._append(self._lines.feed(text))
            is_full = self._num_queued - self._num_shown > MOST_QUEUED
            if not is_full:
                text = LEFT_OUT + text if self._is_behind else text
                self._num_queued += len(text)
                self._queue.put(text)
            self._is_behind = is_full

    def _show(self) -> None:
        while self._is_open or not self._queue.empty():
            text = None
            with suppress(queue.Empty):
                text = self._queue.get(timeout=0.1)
            with suppress(Exception):  # whatever becomes of the screen, the rank must be read
                self._write(text or "")
            if text is not None:
                self._num_shown += len(text)
                self._queue.task_done()

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
