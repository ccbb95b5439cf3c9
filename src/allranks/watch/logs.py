"""The end of a log, as it grows: what a screen needs of a file of any size."""

from __future__ import annotations

from pathlib import Path

from allranks.run import files
from allranks.run.folder import RunDir
from allranks.show.text import last_state
from allranks.watch.loglines import MAX_CHARACTERS, last_drawn, shown

KEPT_BYTES = 4 << 20
JOB = -1  # in place of a rank: what SLURM, the preflight and the launcher said


class LogPage:
    """One log: its last lines, a page of them at a time, following its end unless scrolled up."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines: list[str] = []  # as they are in the file
        self.above: int | None = None  # lines above the last shown; None: follows the end
        self.found: int | None = None  # the line that a search has come to
        self.is_cut = False  # there is more before what is kept
        self._offset = 0
        self._rest = b""
        self._num_bytes = 0

    def look(self) -> bool:
        """Read what is new; whether there was anything."""
        try:
            size = self.path.lstat().st_size
            if size < self._offset:  # it was begun anew
                self.__init__(self.path)  # type: ignore[misc]
            if size <= self._offset:
                return False
            with files.open_file(self.path) as file:
                if size - self._offset > KEPT_BYTES:
                    self._offset = size - KEPT_BYTES
                    self._rest, self.lines, self.is_cut = b"", [], True
                    self._num_bytes = 0
                file.seek(self._offset)
                data = file.read(KEPT_BYTES)
        except OSError:
            return False
        self._offset += len(data)
        *whole, rest = (self._rest + data).split(b"\n")
        self._rest = last_drawn(rest)
        new = [readable(line) for line in whole]
        self.lines += new
        self._num_bytes += sum(map(len, new)) + len(new)
        if self._num_bytes > 2 * KEPT_BYTES:
            half = len(self.lines) // 2
            self.lines, self.is_cut = self.lines[half:], True
            self._num_bytes //= 2
            self.above = max(0, self.above - half) if self.above is not None else None
            self.found = max(0, self.found - half) if self.found is not None else None
        return True

    def page(self, rows: int) -> list[str]:
        """So many lines, the last of them where the page was scrolled to; no secrets."""
        lines = [*self.lines, readable(self._rest)] if self._rest else self.lines
        end = len(lines) if self.above is None else max(min(rows, len(lines)), self.above)
        # Only these: to look for secrets in all that is kept would take seconds.
        return [shown(line.encode()) for line in lines[max(0, end - rows) : end]]

    def scroll(self, lines: int, rows: int) -> None:
        """Up (negative) or down; the end is followed again once it is reached."""
        end = len(self.lines) if self.above is None else self.above
        end = max(min(rows, len(self.lines)), end + lines)
        self.above = None if end >= len(self.lines) else end

    def find(self, wanted: str, rows: int, *, up: bool) -> bool:
        """Scroll to the next line that holds it, into the middle of the page; whether there is one.

        From the line that was found last, or from the end of the page.
        """
        here = self.found if self.found is not None else self.above or len(self.lines)
        low = wanted.casefold()
        places = range(here - 1, -1, -1) if up else range(here + 1, len(self.lines))
        for at in places:
            line = self.lines[at]
            # What is not shown is not found: no secret can be guessed letter by letter.
            if low in line.casefold() and low in shown(line.encode()).casefold():
                self.found = at
                self.above = min(len(self.lines), max(rows, at + 1 + rows // 2))
                return True
        return False

    def state(self) -> str:
        if self.above is None:
            return "following"
        return f"line {self.above} of the last {len(self.lines)}"


def readable(line: bytes) -> str:
    """A line as a terminal would have left it: of a progress bar its last state."""
    return last_state(line)[: 4 * MAX_CHARACTERS].decode(errors="replace")


def log_ranks(run: RunDir) -> list[int]:
    """Whose logs there are in the newest attempt; JOB first, if SLURM has one."""
    attempts = run.attempts()
    ranks = run.logs(attempts[-1]) if attempts else []
    return [*([JOB] if job_log(run) else []), *ranks]


def log_path(run: RunDir, rank: int) -> Path | None:
    attempts = run.attempts()
    if rank == JOB:
        return job_log(run)
    return run.log(attempts[-1], rank) if attempts else None


def job_log(run: RunDir) -> Path | None:
    """The newest of what SLURM's jobs have said."""
    return next(reversed(run.job_logs()), None)
