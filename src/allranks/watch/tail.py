"""Event files read as they grow: only what was appended, and of very much of it a fair part."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CHUNK_BYTES = 4 << 20
# Events of a kind that are taken from one chunk. A rank writes some hundred bytes a step: those
# of a second are taken whole, and of a file that is a day long every n-th.
MAX_STEPS = 1000
# A file that is longer than this when it is first opened is looked at in some places only.
WHOLE_BYTES = 2 << 20
HEAD_BYTES = 16 << 10
PLACES = 256
PLACE_BYTES = 4 << 10
TAIL_BYTES = 128 << 10

STEP = b'"event":"step"'
LOSS = b'"loss":'

_decode = json.JSONDecoder().decode

Event = dict[str, Any]


@dataclass(slots=True)
class EventTail:
    """One rank's file. `read` gives what is new; a line without its end waits for it."""

    path: Path
    offset: int = 0
    rest: bytes = b""

    def read(self) -> list[Event]:
        """Events that were appended. A file that is gone, or torn, has none."""
        try:
            if os.stat(self.path).st_size <= self.offset:
                return []
            with self.path.open("rb") as file:
                file.seek(self.offset)
                found: list[Event] = []
                while chunk := file.read(CHUNK_BYTES):
                    self.offset += len(chunk)
                    *lines, self.rest = (self.rest + chunk).split(b"\n")
                    found += parse(thin(lines))
                return found
        except OSError:  # not there yet, or a network disk that will be back
            return []

    def sample(self) -> list[Event]:
        """The first look at a long file: its head, its tail, and some places between them."""
        try:
            size = os.stat(self.path).st_size
            if self.offset or size <= WHOLE_BYTES:
                return self.read()
            lines: list[bytes] = []
            with self.path.open("rb", buffering=0) as file:
                lines += file.read(HEAD_BYTES).split(b"\n")[:-1]
                between = size - HEAD_BYTES - TAIL_BYTES
                for place in range(PLACES):
                    file.seek(HEAD_BYTES + between * place // PLACES)
                    lines += file.read(PLACE_BYTES).split(b"\n")[1:-1]
            self.offset = size - TAIL_BYTES
            tail = self.read()
        except OSError:
            return []
        return parse(lines) + tail  # the first line of the tail is cut, and skipped as torn


def thin(lines: list[bytes]) -> list[bytes]:
    """All lines that are not steps, and at most MAX_STEPS steps with a loss and as many without."""
    if len(lines) <= MAX_STEPS:
        return lines
    steps = [line for line in lines if STEP in line]
    if len(steps) <= MAX_STEPS:
        return lines
    with_loss = [line for line in steps if LOSS in line]
    kept = set(every(with_loss)) | set(every([line for line in steps if LOSS not in line]))
    kept.add(steps[-1])
    return [line for line in lines if STEP not in line or line in kept]


def every(lines: list[bytes]) -> list[bytes]:
    """Every n-th of too many."""
    return lines[:: -(-len(lines) // MAX_STEPS)] if lines else lines


def parse(lines: Iterable[bytes]) -> list[Event]:
    """Events; a torn line is skipped. All at once if that goes: it takes half the time."""
    lines = [line for line in lines if line]
    try:
        found = _decode("[" + b",".join(lines).decode() + "]")
    except ValueError:
        found = [event for line in lines if (event := _parse_one(line)) is not None]
    return [event for event in found if isinstance(event, dict) and "event" in event]


def _parse_one(line: bytes) -> Any:
    try:
        return _decode(line.decode())
    except ValueError:
        return None
