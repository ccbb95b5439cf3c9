"""What ranks print, on the screen of whoever started them: one rank as it is, or several."""

from __future__ import annotations

import codecs
import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from rich.console import Console

from allranks.errors import AllranksError
from allranks.launch.logs import Together
from allranks.launch.terminal import RankTerminal, ScreenLines
from allranks.run.folder import RunDir
from allranks.run.logs import LogTail
from allranks.run.stacks import without_dumps

MAX_LOG_BYTES = 1 << 20  # shown at a time; the rest comes with the next look
MOST_KEPT = 1000  # lines of an attempt, to know them again in the next
MOST_IN_LINE = 1 << 12  # bytes of one of them
# How Python's report of an exception begins, and of a signal that ends it.
TRACEBACK = re.compile(
    r"^(?:\x1b\[[\d;]*m|\[rank\d+\]: ?|[+| \u256d\u2500])*"  # colours, torch, groups, rich
    r"(?:(?:Exception Group )?Traceback \(most recent call last\)|File \"[^\"]+\", line \d"
    r"|Fatal Python error: )",
    re.MULTILINE,
)
HOLD_SECONDS, ENDING_SECONDS = 1.5, 10.0
PIECES = re.compile(rb"[^\n]*\n|[^\n]+")


class Echo:
    """Shows what ranks of a run print, attempt after attempt.

    `rank` as it is, in a terminal of its own if the user is at one; or those in `show`, each line
    with its rank. `has_bar`: allranks itself draws below. `write` puts text on the screen. `hides`:
    leave out the traceback that a rank ends with; the culprit's is shown later, once it is known.
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
        self._hides = hides
        self._without: WithoutTraceback | None = None
        self._output = Output(console, write, has_bar=has_bar)
        self._terminal: RankTerminal | None = None
        self._log: Path | None = None
        self._position = 0
        self._tails: dict[int, LogTail] = {}
        self._lock = threading.Lock()
        self._drawing = threading.Lock()  # which the terminal's thread and another may do
        self._has_bar = has_bar

    @property
    def column(self) -> int:
        """Where the cursor is."""
        return self._output.column

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
            if run.log(attempt, self._rank) == self._log:
                return
            self._look(wait=False)
            ranks = [self._rank] if self._show is None else self._show
            self._log, self._position = run.log(attempt, self._rank), 0
            self._tails = {rank: LogTail(run.log(attempt, rank)) for rank in ranks}
            self._together = Together(len(ranks))
            if self._terminal is not None:
                self._terminal.begin(self._log)
            self._show_held()
            self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
            self._without = WithoutTraceback(run, attempt, self._rank) if self._hides else None
            self._output.begin()

    def look(self) -> None:
        """Show what is new."""
        with self._lock:
            self._look(wait=True)

    def finish(self) -> None:
        """Show the rest, and go to a fresh line."""
        with self._lock:
            self._look(wait=False)
            if self._terminal is not None and not self._terminal.close():
                return  # the screen takes no more
            self._show_held()
            self._output.finish()

    def _look(self, *, wait: bool) -> None:
        if self._log is None:
            return
        if self._terminal is not None:
            self._terminal.resize()
            self._terminal.poke()
        elif self._show is None:
            self._read_log(self._log)
        else:
            for rank, tail in self._tails.items():
                for line in [*tail.lines(), *(() if wait else tail.last())]:
                    self._together.add(rank, line)
            for line in self._together.ready(wait=wait):
                self._output.put(f"{line}\n".encode())

    def _read_log(self, log: Path) -> None:
        with suppress(FileNotFoundError), log.open("rb") as file:
            file.seek(self._position)
            drawn = file.read(MAX_LOG_BYTES)
            self._position += len(drawn)
            self._put(drawn)

    def _put(self, drawn: bytes) -> None:
        with self._drawing:
            text = without_dumps(self._decoder.decode(drawn))
            if self._without is not None:
                text = self._without(text)
            self._output.put(text.encode())

    def _show_held(self) -> None:
        if self._without is not None:
            self._output.put(self._without.rest().encode())


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


class Output:
    """A stream of text on the user's screen.

    `has_bar`: something is drawn below it, so that only whole lines can be shown, through rich.
    """

    def __init__(
        self, console: Console, write: Callable[[str], None], *, has_bar: bool = False
    ) -> None:
        self._console = console
        self._put = write
        self._has_bar = has_bar
        self._screen = ScreenLines()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._lock = threading.RLock()
        self._repeats = Repeats([])

    @property
    def column(self) -> int:
        """Where the cursor is."""
        return self._screen.column

    def begin(self) -> None:
        """Another attempt begins, maybe with the same lines as the last one."""
        self.finish()
        self._repeats = Repeats(self._repeats.lines)

    def put(self, drawn: bytes) -> None:
        with self._lock:
            self._write(self._repeats.pass_on(drawn))

    def finish(self) -> None:
        """Show the rest, and go to a fresh line."""
        with self._lock:
            self._write(self._repeats.rest())
            if self._has_bar:
                self._print(self._screen.finish())
            elif self.column:
                self._write(b"\n")

    def _write(self, drawn: bytes) -> None:
        lines = self._screen.feed(drawn)
        if self._has_bar:
            self._print(lines)
        elif drawn:
            self._raw(drawn)

    def _print(self, lines: list[str]) -> None:
        for line in lines:
            self._console.out(line, highlight=False)

    def _raw(self, drawn: bytes) -> None:
        # Not through rich, which removes what moves the cursor.
        self._put(self._decoder.decode(drawn))


class Repeats:
    """Lines that an attempt begins with just like the previous one: they are not shown again."""

    def __init__(self, before: list[bytes]) -> None:
        self.lines: list[bytes] = []  # the first ones of this attempt
        self._line = b""
        self._before = before
        self._num_same = 0
        self._is_same = bool(before)
        self._held = b""

    def pass_on(self, drawn: bytes) -> bytes:
        """What to show of it."""
        if not self._is_same and len(self.lines) >= MOST_KEPT:
            return drawn
        return b"".join(self._pass_piece(piece) for piece in PIECES.findall(drawn))

    def rest(self) -> bytes:
        """What was held back until it was known to be new, and a note on what was not shown."""
        held, self._held, was_same, self._is_same = self._held, b"", self._is_same, False
        num_same = self._num_same
        is_any = was_same and num_same
        return (b"[%d lines as in the previous attempt]\n" % num_same if is_any else b"") + held

    def _pass_piece(self, piece: bytes) -> bytes:
        if len(self._line) < MOST_IN_LINE:  # of a bar that is drawn over and over, the beginning
            self._line += piece
        if piece.endswith(b"\n"):
            if len(self.lines) < MOST_KEPT:
                self.lines.append(self._line)
            self._line = b""
        if not self._is_same:
            return piece
        self._held += piece
        expected = self._before[self._num_same] if self._num_same < len(self._before) else b""
        if not expected.startswith(self._held):
            return self.rest()
        if self._held == expected:
            self._num_same += 1
            self._held = b""
        return b""
