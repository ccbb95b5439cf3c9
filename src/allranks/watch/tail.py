"""Reads event files as they grow: only what was appended, thinned out if that is a lot."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import sub
from pathlib import Path

from allranks.run import files
from allranks.run.events import MAX_LINE_BYTES, check_event, parse_line
from allranks.run.record import Event

CHUNK_BYTES = 4 << 20
# Events of one kind taken from one chunk. A rank writes a few hundred bytes per step: the steps of
# a second are all taken, those of a day-long file only every n-th.
MAX_STEPS = 1000
LAST_STEPS = 32  # of a chunk, always taken: all ranks' last steps are compared
# If a file is longer than this when first opened, its head and tail are read first, and later
# samples of the rest.
WHOLE_BYTES = 512 << 10
HEAD_BYTES = 8 << 10
TAIL_BYTES = 32 << 10
PLACES = 256
PLACE_BYTES = 2 << 10

STEP = b'"event":"step"'
LOSS = b'"loss":'
TIME = re.compile(
    rb'"t":([0-9]{1,12}(?:[.][0-9]{1,20})?),"event":"step"'
)  # parsing every line would take too long

TORN = b'{"v":?'  # a line that begins like this is skipped
NO_EVENT = b"?"

_decode = json.JSONDecoder(parse_constant=lambda _: None).decode


@dataclass(slots=True)
class EventTail:
    """One rank's file. `read` returns what is new; an unfinished line is left for later."""

    path: Path
    offset: int = 0
    rest: bytes = b""

    def read(self) -> list[Event]:
        """Events appended since the last call; none if the file is gone or unreadable."""
        try:
            if self.path.lstat().st_size <= self.offset:
                return []
            with files.open_file(self.path) as file:
                file.seek(self.offset)
                found: list[Event] = []
                while chunk := file.read(CHUNK_BYTES):
                    self.offset += len(chunk)
                    *lines, self.rest = (self.rest + chunk).split(b"\n")
                    if len(self.rest) > MAX_LINE_BYTES:
                        self.rest = NO_EVENT
                    found += parse(thin(lines), self.path)
                return found
        except OSError as error:  # not there yet, or on a network disk that will come back
            self._note(error)
            return []

    def read_ends(self) -> tuple[list[Event], Iterator[list[Event]]]:
        """First look at a file: its head and tail, and an iterator over samples of the rest."""
        try:
            size = self.path.lstat().st_size
            if size <= WHOLE_BYTES:
                return self.read(), iter(())
            with files.open_file(self.path) as file:
                head = file.read(HEAD_BYTES).split(b"\n")[:-1]
        except OSError as error:
            self._note(error)
            return [], iter(())
        self.offset = size - TAIL_BYTES
        self.rest = TORN  # the tail begins in the middle of a line, which is skipped
        return parse(head, self.path) + self.read(), self._places(HEAD_BYTES, size - TAIL_BYTES)

    def _places(self, begin: int, end: int) -> Iterator[list[Event]]:
        try:
            with files.open_file(self.path) as file:
                for place in range(PLACES):
                    file.seek(begin + (end - begin) * place // PLACES)
                    yield parse(file.read(PLACE_BYTES).split(b"\n")[1:-1], self.path)
        except OSError:
            return

    def _note(self, error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):
            files.note(self.path, error.strerror or str(error))


def thin(lines: list[bytes]) -> list[bytes]:
    """All lines that are not steps, and a sample of the steps.

    Keeps about MAX_STEPS steps with a loss and as many without, the first and the last ones, and
    the two around the longest pause, by which we judge how long a run may be silent.
    """
    if len(lines) <= MAX_STEPS:
        return lines
    steps = [at for at, line in enumerate(lines) if STEP in line]
    if len(steps) <= MAX_STEPS:
        return lines
    plain = [at for at in steps if LOSS not in lines[at]]
    with_loss = [at for at in steps if LOSS in lines[at]]
    kept = {steps[0], *steps[-LAST_STEPS:], *every(plain), *every(with_loss)}
    kept.update(around_longest_pause(lines, steps))
    dropped = set(steps) - kept
    return [line for at, line in enumerate(lines) if at not in dropped]


def around_longest_pause(lines: list[bytes], steps: list[int]) -> tuple[int, int]:
    """The two consecutive steps with the most time between them."""
    found = TIME.findall(b"\n".join([lines[at] for at in steps]))
    if len(found) != len(steps):  # not written by allranks
        return steps[0], steps[-1]
    times = list(map(float, found))
    pauses = list(map(sub, times[1:], times))
    at = pauses.index(max(pauses))
    return steps[at], steps[at + 1]


def every(places: list[int]) -> list[int]:
    """Every n-th place, so that at most MAX_STEPS are left."""
    return places[:: -(-len(places) // MAX_STEPS)] if places else places


def parse(lines: Iterable[bytes], path: Path) -> list[Event]:
    """Parse events, skipping torn lines. Tries all lines at once first: twice as fast."""
    lines = [line for line in lines if line]
    text = b"[" + b",".join(lines) + b"]"
    try:
        all_at_once = files.cleaned(_decode(text.decode()), text)
        found = [check_event(event, path) for event in all_at_once]
    except (ValueError, RecursionError):
        found = [parse_line(line, path) for line in lines]
    return [event for event in found if event is not None]
