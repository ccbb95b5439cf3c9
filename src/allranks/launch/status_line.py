"""What is said about ranks that make no progress: a line that comes and goes, or a few notes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from rich.cells import cell_len, set_cell_size
from rich.console import Console, RenderableType
from rich.progress import Progress
from rich.text import Text

from allranks.show.numbers import duration

FIRST_NOTE_SECONDS = 30.0  # after the one at the beginning; then twice as long each time


class StatusLine:
    """One line below everything else on a terminal, which `clear` removes without a trace.

    `column`: where the cursor is. Whoever writes anything else clears the line first; other threads
    write through `put`.
    """

    def __init__(self, console: Console, column: Callable[[], int] = lambda: 0) -> None:
        self._console = console
        self._column = column
        self._text = ""  # what is shown
        self._came_from = 0  # the column to go back to
        self._lock = threading.RLock()

    def put(self, text: str) -> None:
        """Write something else, from where the cursor is without the line."""
        with self._lock:
            self.clear()
            self._write(text)

    def show(self, text: str | None) -> None:
        """Show this line in place of the previous one; None: show no line."""
        with self._lock:
            return self.clear() if text is None else self._show(text)

    def _show(self, text: str) -> None:
        text = fitting(text, self._console.width - 1)
        if text == self._text:
            return
        before = ""
        if not self._text:
            self._came_from = self._column()
            before = "\r\n" if self._came_from > 0 else ""
        colour, plain = ("", "") if self._console.no_color else ("\x1b[33m", "\x1b[0m")
        # The cursor stays at its beginning: the ^C that a terminal shows must not wrap below it.
        self._write(f"{before}\r{colour}{text}{plain}\x1b[K\r")
        self._text = text

    def clear(self) -> None:
        """Remove the line; the cursor goes back to where it was."""
        with self._lock:
            if not self._text:
                return
            back = ""
            if 0 < self._came_from < self._console.width:  # at the edge it was about to wrap
                back = f"\x1b[A\x1b[{self._came_from + 1}G"
            self._text = ""
            self._write(f"\r\x1b[K{back}")

    def leave(self) -> None:
        """Remove the line, and go to a fresh one: a rank's bar may have been left in mid-line."""
        with self._lock:
            self.clear()
            if self._column() > 0:
                self._write("\r\n")

    def _write(self, text: str) -> None:
        self._console.file.write(text)
        self._console.file.flush()


class Notes:
    """Where nothing can be taken back: a note when a wait begins, then fewer, one at its end.

    `after`: seconds before the first one. `over`: what is said at the end; empty: nothing.
    """

    def __init__(
        self,
        note: Callable[[str], None],
        *,
        after: float = 0.0,
        over: str = "makes progress again after",
    ) -> None:
        self._note = note
        self._after = after
        self._over = over
        self._seconds: float | None = None  # as last reported
        self._next = 0.0

    def show(self, text: str | None, seconds: float) -> None:
        """`seconds`: that it has lasted. None: it is over."""
        if text is None or seconds < (self._seconds or 0.0):
            if self._seconds is not None and self._over:
                self._note(f"{self._over} {duration(self._seconds, whole=True)}")
            self._seconds = None
        if text is None or seconds < self._after:
            return
        if self._seconds is None or seconds >= self._next:
            self._note(text)
            self._next = FIRST_NOTE_SECONDS
            while self._next <= seconds:
                self._next *= 2
        self._seconds = seconds


def fitting(text: str, width: int) -> str:
    """As much of a line as a terminal has room for."""
    return text if cell_len(text) <= width else set_cell_size(text, max(0, width - 1)) + "…"


class NotedProgress(Progress):
    """A bar with a line of text below it while there is something to say."""

    note = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from super().get_renderables()
        if self.note:
            room = self.console.width - len("^C") - 1  # the terminal shows it at the end
            yield Text(fitting(self.note, room), style="yellow", no_wrap=True)
