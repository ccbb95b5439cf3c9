"""Frames of Python's tracebacks: whose they are, and how they are read from text. No torch."""

from __future__ import annotations

import linecache
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from allranks.run import files

MAX_SOURCE_BYTES = 4 << 20
OURS = f"{Path(__file__).parents[1]}/"
INSTALLED = ("site-packages", "dist-packages", "/lib/python3", "<", OURS)
FRAME = re.compile(
    r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d{1,9})(?:,? in (?P<function>\S+))?'
)
RAISED = re.compile(r"^(?P<type>[A-Za-z_](?:[\w.]|<locals>)*)(?::(?: (?P<message>.*))?)?$")
BEGIN = re.compile(r"Traceback \(most recent call last\):\s*$")
_PREFIX = re.compile(r"^\[rank\d+\]: ?")  # torch's, once ranks have met
_PACKAGE = re.compile(r".*(?:site-packages|dist-packages|/lib/python3(?:\.\d+)?)/([^/.]+)")


@dataclass(frozen=True, slots=True)
class Frame:
    """One call that is under way, or was."""

    file: str
    line: int
    function: str
    source: str = ""

    @property
    def is_own(self) -> bool:
        """Whether it is the user's code, not a library's."""
        return bool(self.file) and not any(part in self.file for part in INSTALLED)

    @property
    def is_ours(self) -> bool:
        """Whether it is allranks' own code, which is of no interest to the user."""
        return self.file.startswith(OURS)

    @property
    def library(self) -> str:
        found = _PACKAGE.match(self.file)
        return found[1] if found else "Python"

    @property
    def short(self) -> str:
        """Where it is, as seen from the current folder."""
        return f"{short_path(self.file)}:{self.line}" + (
            f" in {self.function}" if self.function else ""
        )

    @property
    def brief(self) -> str:
        """Without folders that the reader knows: `train.py:9 in f`, `torch/_tensor.py:8 in g`."""
        _, _, inside = self.file.rpartition("-packages/")
        name = inside if inside != self.file else Path(self.file).name
        return f"{name}:{self.line} in {self.function}"

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


@dataclass(frozen=True, slots=True)
class Told:
    """An exception as its printed traceback shows it, the outermost call first."""

    type: str
    message: str
    frames: tuple[Frame, ...]
    last_line: int  # of the text, counted from 0


def short_path(file: str) -> str:
    """A file's path relative to the current folder, if it is below that."""
    try:
        here = os.getcwd()
    except OSError:  # it was removed
        return file
    return os.path.relpath(file, here) if file.startswith(f"{here}/") else file


def source_lines(file: str) -> list[str]:
    """A file of Python as it is now, if it is here: an event may name any path at all."""
    path = Path(file)
    if path.suffix != ".py" or not files.is_regular(path):
        return []
    return linecache.getlines(file) if path.stat().st_size <= MAX_SOURCE_BYTES else []


def place_of(frames: Sequence[Frame]) -> Frame | None:
    """The innermost line of the user's own code (frames: outermost first), else of any."""
    own = [frame for frame in frames if frame.is_own]
    typed = [frame for frame in frames if frame.file in ("<string>", "<stdin>")]
    others = [frame for frame in frames if not frame.is_ours and frame.file]
    return next(reversed(own or typed or others), None)


def is_type(name: str) -> bool:
    """Whether a word at the beginning of a line is an exception's name."""
    last = name.rpartition(".")[2]
    return last[:1].isupper() or "." in name or last in ("error", "gaierror", "timeout")


def read_tracebacks(text: str) -> list[Told]:
    """The tracebacks in a text; of a message of several lines, only the first."""
    found: list[Told] = []
    frames: list[Frame] | None = None
    source: list[str] = []
    for number, raw in enumerate(text.splitlines()):
        line = _PREFIX.sub("", raw)
        if BEGIN.search(line):
            frames, source = [], []
            continue
        if frames is None:
            continue
        frame = FRAME.match(line)
        if frame is not None:
            frames.append(Frame(frame["file"], int(frame["line"]), frame["function"] or ""))
            source = []
        elif line[:1].isspace() and line.strip(" ^~"):
            if frames and not source:
                source.append(line.strip())
                last = frames[-1]
                frames[-1] = Frame(last.file, last.line, last.function, source[0])
        elif line and not line[0].isspace():
            raised = RAISED.match(line)
            if raised is not None and is_type(raised["type"]) and frames:
                name = raised["type"].rpartition(".")[2]
                message = (raised["message"] or "").strip()
                found.append(Told(name, message, tuple(frames), number))
            frames = None
    return found
