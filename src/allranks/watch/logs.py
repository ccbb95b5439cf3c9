"""A run's logs: followed and searched in the terminal, and read in pieces for the page."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from allranks.run.files import is_regular, open_file
from allranks.run.folder import RunDir
from allranks.show.secrets import redact
from allranks.show.text import last_state, plain

RANK_LOG = re.compile(r"attempts/(?P<attempt>\d+)/rank-(?P<rank>\d+)\.log")
MAX_LINES = 500
MAX_CHARACTERS = 2000
MAX_BYTES = 4 * MAX_CHARACTERS  # of a line
TAIL_BYTES = 128 << 10
CHUNK_BYTES = 1 << 20
MAX_REST_BYTES = 64 << 10  # kept of a line without an end


def log_files(run: RunDir) -> dict[str, Path]:
    """The logs of a run by their names, the newest attempt's first, those of its jobs last.

    The page may ask for these names: nothing else is ever opened.
    """
    found = [
        run.log(attempt, rank) for attempt in reversed(run.attempts()) for rank in run.logs(attempt)
    ]
    found += sorted(run.job_logs(), reverse=True)
    return {str(path.relative_to(run.path)): path for path in found if is_regular(path)}


def log_titles(names: Iterable[str]) -> dict[str, str]:
    """Logs in words: `rank 3`, with the attempt if there were several."""
    parsed = {name: RANK_LOG.fullmatch(name) for name in names}
    several = len({match["attempt"] for match in parsed.values() if match}) > 1
    return {
        name: f"rank {match['rank']}" + (f", attempt {match['attempt']}" if several else "")
        if match
        else name
        for name, match in parsed.items()
    }


def first_log(names: Iterable[str], rank: int | None) -> str | None:
    """The newest log of a rank; if it has none, the first of all."""
    known = list(names)
    return next((name for name in known if name.endswith(f"/rank-{rank}.log")), [*known, None][0])


def read_lines(
    path: Path,
    *,
    query: str = "",
    after: int | None = None,
    line: int = 0,
    given_up: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """The last lines, or those after an offset, that contain `query`, and where to continue.

    `lines` are [number, text]; `rest` is an unfinished line; `found` counts all matches.
    `given_up`: asked repeatedly while reading; if true, reading ends early.
    """
    size = _size(path)
    if after is None or after > size:  # first look, or the file was started over
        after, line = (0, 0) if query else _tail_start(path, size, given_up)
    kept: deque[tuple[int, bytes]] = deque(maxlen=MAX_LINES)
    found, rest, wanted = 0, "", query.casefold()
    for start, block in _blocks(path, after):
        if not block.endswith(b"\n"):
            after, rest = start, shown(block)
            break
        # Most of a long file does not match: skip whole blocks.
        if not wanted or _may_hold(block, wanted):
            for number, raw in enumerate(block[:-1].split(b"\n"), start=line + 1):
                if not wanted or _may_hold(raw, wanted):
                    found += 1
                    kept.append((number, raw))
        after = start + len(block)
        line += block.count(b"\n")
        if after >= size + CHUNK_BYTES or given_up():  # it may grow as fast as we read
            break
    # Only now, as this is slow. A match inside a secret or a colour code does not count.
    lines = [[number, text] for number, raw in kept if wanted in (text := shown(raw)).casefold()]
    return {
        "lines": lines,
        "found": found - len(kept) + len(lines),
        "offset": after,
        "line": line,
        "rest": rest if wanted in rest.casefold() else "",
    }


def _may_hold(text: bytes, wanted: str) -> bool:
    if wanted.isascii():
        return wanted.encode() in text.lower()
    return wanted in text.decode(errors="replace").casefold()


def last_drawn(rest: bytes) -> bytes:
    """What a terminal would show of an unfinished line: progress bars overwrite themselves."""
    begin = rest.rstrip(b"\r").rfind(b"\r") + 1
    return rest[max(begin, len(rest) - MAX_REST_BYTES) :]


def _blocks(path: Path, after: int) -> Iterator[tuple[int, bytes]]:
    """Blocks of whole lines from an offset on, each with its offset; an unfinished line last.

    Of an unfinished line, overwritten text and all but its last bytes are skipped.
    """
    rest = b""
    try:
        with open_file(path) as file:
            file.seek(after)
            while chunk := file.read(CHUNK_BYTES):
                after += len(chunk)
                head, newline, rest = (rest + chunk).rpartition(b"\n")
                if newline:
                    yield after - len(rest) - len(head) - 1, head + newline
                rest = last_drawn(rest)
    except OSError:
        return
    if rest:
        yield after - len(rest), rest


def _tail_start(path: Path, size: int, given_up: Callable[[], bool]) -> tuple[int, int]:
    """Where the last lines begin, and how many lines come before."""
    if size <= TAIL_BYTES:
        return 0, 0
    try:
        with open_file(path) as file:
            file.seek(size - TAIL_BYTES)
            begin = file.read(TAIL_BYTES).find(b"\n") + 1
            start = size - TAIL_BYTES + begin
            file.seek(0)
            return start, _count_lines(file, start, given_up)
    except OSError:
        return 0, 0


def _count_lines(file: BinaryIO, end: int, given_up: Callable[[], bool]) -> int:
    count = 0
    while end > 0 and not given_up() and (chunk := file.read(min(CHUNK_BYTES, end))):
        count += chunk.count(b"\n")
        end -= len(chunk)
    return count


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return 0


def shown(raw: bytes) -> str:
    """A line as a terminal would show it, without colours and secrets."""
    line = last_state(raw)[:MAX_BYTES]
    # Redact before cutting: half a key would not be recognised.
    return redact(plain(line.decode(errors="replace")))[:MAX_CHARACTERS]


KEPT_BYTES = 4 << 20


class LogPage:
    """One log, a page at a time; follows its end unless scrolled up."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines: list[bytes] = []  # as in the file
        self.rest = b""  # a line that has not ended
        self.above: int | None = None  # number of lines up to the last shown; None: follow the end
        self.found: int | None = None  # the line that the search has reached
        self._offset = 0  # of the rest
        self._num_bytes = 0

    def look(self) -> None:
        """Read what is new."""
        size = _size(self.path)
        if size < self._offset:  # it was started over
            self.__init__(self.path)  # type: ignore[misc]
        if size - self._offset > KEPT_BYTES:
            self.lines, self._num_bytes, self._offset = [], 0, size - KEPT_BYTES
        self.rest = b""
        for start, block in _blocks(self.path, self._offset):
            if not block.endswith(b"\n"):
                self._offset, self.rest = start, block
                break
            self._offset = start + len(block)
            self.lines += [last_state(line)[:MAX_BYTES] for line in block[:-1].split(b"\n")]
            self._num_bytes += len(block)
        if self._num_bytes > 2 * KEPT_BYTES:
            half = len(self.lines) // 2
            self.lines = self.lines[half:]
            self._num_bytes //= 2
            self.above = max(0, self.above - half) if self.above is not None else None
            self.found = max(0, self.found - half) if self.found is not None else None

    def page(self, rows: int) -> list[str]:
        """`rows` lines up to where the page is scrolled to, without secrets."""
        lines = [*self.lines, self.rest] if self.rest else self.lines
        end = len(lines) if self.above is None else max(min(rows, len(lines)), self.above)
        # Only these: redacting everything that is kept would take seconds.
        return [shown(line) for line in lines[max(0, end - rows) : end]]

    def scroll(self, lines: int, rows: int) -> None:
        """Scroll up (negative) or down; at the end, start following again."""
        end = len(self.lines) if self.above is None else self.above
        end = max(min(rows, len(self.lines)), end + lines)
        self.above = None if end >= len(self.lines) else end

    def find(self, wanted: str, rows: int, *, up: bool) -> bool:
        """Scroll to the next line with this text; returns whether there is one.

        Starts from the last match, or from the end of the page.
        """
        here = self.found if self.found is not None else self.above or len(self.lines)
        low = wanted.casefold()
        places = range(here - 1, -1, -1) if up else range(here + 1, len(self.lines))
        for at in places:
            line = self.lines[at]
            # Search only what is shown, so that no secret can be guessed letter by letter.
            if _may_hold(line, low) and low in shown(line).casefold():
                self.found = at
                self.above = min(len(self.lines), max(rows, at + 1 + rows // 2))
                return True
        return False

    def state(self) -> str:
        if self.above is None:
            return "following"
        return f"line {self.above} of the last {len(self.lines)}"
