"""A log read as it grows: the lines that were added to it since the last look."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from allranks.run import files
from allranks.show.text import last_state

CHUNK_BYTES = 1 << 16


@dataclass(slots=True)
class LogTail:
    """Reads the lines that were added to a file since the last look."""

    path: Path
    offset: int = 0
    begun: list[bytes] = field(default_factory=list)  # of a line, in pieces: it may be very long

    def lines(self) -> Iterator[str]:
        """Whole lines; the beginning of one waits for its end."""
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
        """What was never ended by a newline."""
        line = b"".join(self.begun)
        self.begun.clear()
        if line:
            yield last_state(line).decode(errors="replace")
