"""The logs of ranks: their last lines, and their lines as they are added."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from allranks.run import files
from allranks.show.text import clean, last_state

CHUNK_BYTES = 1 << 16
MAX_LINE = 160  # characters of the last line that are shown


@dataclass(slots=True)
class LogTail:
    """Reads the lines that were added to a file since the last call."""

    path: Path
    offset: int = 0
    begun: list[bytes] = field(default_factory=list)  # pieces of a line that has not ended

    def lines(self) -> Iterator[str]:
        """The new lines, without one that has not ended yet."""
        try:
            with files.open_file(self.path) as file:
                file.seek(self.offset)
                while chunk := file.read(CHUNK_BYTES):
                    self.offset += len(chunk)
                    whole, newline, begun = chunk.rpartition(b"\n")
                    if newline:
                        lines = b"".join([*self.begun, whole]).split(b"\n")
                        self.begun.clear()
                        for line in lines:
                            yield last_state(line).decode(errors="replace")
                    self.begun.append(begun)
        except FileNotFoundError:
            return
        except OSError as error:
            files.note(self.path, error.strerror or str(error))

    def last(self) -> Iterator[str]:
        """A last line without a newline."""
        line = b"".join(self.begun)
        self.begun.clear()
        if line:
            yield last_state(line).decode(errors="replace")


def tail(path: Path, size: int = 1 << 14) -> list[str]:
    """The last lines of a log, as text; none if there is no such file."""
    try:
        with files.open_file(path) as file:
            file.seek(max(0, file.seek(0, 2) - size))
            return file.read(size).decode(errors="replace").splitlines()
    except OSError:
        return []


def last_line(log: Path) -> str:
    """The last line that a rank printed, without what a terminal would obey."""
    lines = [clean(line).strip() for line in tail(log)]
    return next((line for line in reversed(lines) if line), "")[:MAX_LINE]
