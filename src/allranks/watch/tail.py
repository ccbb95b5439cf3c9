"""Event files read as they grow: only what was appended, and of very much of it a fair part."""

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
# Events of a kind that are taken from one chunk. A rank writes some hundred bytes a step: those
# of a second are taken whole, and of a file that is a day long every n-th.
MAX_STEPS = 1000
LAST_STEPS = 32  # of a chunk, taken whole: all ranks' last steps are laid side by side
# Of a file that is longer than this when it is first opened, head and tail are read, and the rest
# is looked at later, in some places.
WHOLE_BYTES = 512 << 10
HEAD_BYTES = 8 << 10
TAIL_BYTES = 32 << 10
PLACES = 256
PLACE_BYTES = 2 << 10

STEP = b'"event":"step"'
LOSS = b'"loss":'
TIME = re.compile(
    rb'"t":([0-9]{1,12}(?:[.][0-9]{1,20})?),"event":"step"'
)  # parsing them all would take long

TORN = b'{"v":?'  # a line that begins so is passed over
NO_EVENT = b"?"

_decode = json.JSONDecoder(parse_constant=lambda _: None).decode


@dataclass(slots=True)
class EventTail:
    """One rank's file. `read` gives what is new; a line without its end waits for it."""

    path: Path
    offset: int = 0
    rest: bytes = b""

    def read(self) -> list[Event]:
        """Events that were appended. A file that is gone, or torn, has none."""
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
        except OSError as error:  # not there yet, or a network disk that will be back
            self._note(error)
            return []

    def read_ends(self) -> tuple[list[Event], Iterator[list[Event]]]:
        """The first look at a file: its head and tail, and what gives the places between them."""
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
        self.rest = TORN  # the first line of the tail is cut, and passed over like any torn one
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
    """All lines that are not steps, and a fair part of the others.

    Of steps with a loss at most MAX_STEPS, of those without as many; the first, the last ones, and
    the two around the longest pause: how long a run may be silent is judged by it.
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
    """The two steps next to each other with the most time between them."""
    found = TIME.findall(b"\n".join([lines[at] for at in steps]))
    if len(found) != len(steps):  # not as allranks writes them
        return steps[0], steps[-1]
    times = list(map(float, found))
    pauses = list(map(sub, times[1:], times))
    at = pauses.index(max(pauses))
    return steps[at], steps[at + 1]


def every(places: list[int]) -> list[int]:
    """Every n-th of too many."""
    return places[:: -(-len(places) // MAX_STEPS)] if places else places


def parse(lines: Iterable[bytes], path: Path) -> list[Event]:
    """Events; a torn line is skipped. All at once if that goes: it takes half the time."""
    lines = [line for line in lines if line]
    text = b"[" + b",".join(lines) + b"]"
    try:
        all_at_once = files.cleaned(_decode(text.decode()), text)
        found = [check_event(event, path) for event in all_at_once]
    except (ValueError, RecursionError):
        found = [parse_line(line, path) for line in lines]
    return [event for event in found if event is not None]
