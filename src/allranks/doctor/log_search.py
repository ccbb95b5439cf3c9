"""Reads logs of any size and finds the lines that may matter: fast, in bounded memory.

Every pattern has a word that its lines must contain. A word of seven letters or more covers four
bytes at a multiple of four wherever it begins, so it is enough to look up every fourth position of
a chunk in a table of flags, all at once, and then, where there is a flag, the seven bytes around
it in another. Only lines with such a position are read by Python. The few short words (nan) are
searched for one by one.
"""

from __future__ import annotations

import atexit
import gzip
import io
import math
import os
import re
import shutil
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import IO

import numpy as np

from allranks.doctor.catalogue import LONG, Cause, Pattern, load, window_cost
from allranks.run import files
from allranks.show.numbers import size
from allranks.show.text import plain, without_escapes

CHUNK_BYTES = 1 << 21
MAX_LINE_BYTES = 1 << 16
MAX_PIPE_BYTES = 1 << 29  # of what is not a file, and may never end
KEPT_FIRST, KEPT_LAST = 4, 2  # hits per cause, rank and file; all marks are kept
MAX_MARKS = 20_000
MAX_SCANS = 1024  # of files that grow
_BLOCK = 1 << 18  # bytes looked up at once: what fits into a core's cache
_BITS = 20
_FACTOR = np.uint32(2654435761)  # spreads neighbouring values over the table
_SHIFT = np.uint32(32 - _BITS)
_OTHER = np.uint32(2246822519)
_BITS_OF = [np.uint32(8 * num_bytes) for num_bytes in range(4)]
_FOLD = np.uint32(0x20202020)  # capitals and small letters alike
_LONG_NUMBER = re.compile(r"(\d{15})\d+")  # too long for a rank or a size
_RANKS = re.compile(rb"(?:^|\n)\[rank(\d{1,5})\]:")  # which ranks printed anything at all
Grams = np.ndarray[tuple[int], np.dtype[np.uint32]]
Places = np.ndarray[tuple[int], np.dtype[np.intp]]
Truth = np.ndarray[tuple[int], np.dtype[np.bool_]]


@dataclass(frozen=True, slots=True)
class Source:
    """One file, and what is known of all its lines."""

    path: Path
    name: str  # as it is shown
    rank: int | None = None
    node: str | None = None
    content: bytes | None = None  # instead of the file's: its end, or what a command printed
    first_line: int = 1  # the number of the content's first line
    is_named: bool = False  # by the user: it may be a link or a pipe

    @property
    def is_told(self) -> bool:
        """Whether it is not a log but an event, or comes from the kernel, SLURM or run.json."""
        is_of_command = self.content is not None and self.path.suffix in ("", ".json")
        return is_of_command or self.path.suffix == ".jsonl"


@dataclass(frozen=True, slots=True)
class Hit:
    """A line that matches a pattern of a cause."""

    cause: Cause
    source: Source
    number: int  # of the line, from 1
    offset: int  # of the line, in bytes
    line: Line
    fields: dict[str, str]

    @property
    def rank(self) -> int | None:
        return self.source.rank if self.source.rank is not None else self.line.rank

    @property
    def node(self) -> str | None:
        return self.line.node or self.source.node


@dataclass(slots=True)
class Scanned:
    """What was found in one file."""

    source: Source
    hits: list[Hit] = field(default_factory=list)
    num_lines: int = 0
    num_bytes: int = 0
    ranks: set[int] = field(default_factory=set)
    problem: str = ""


Owned = tuple[Cause, Pattern]


class Words:
    """All words of all patterns: where a chunk has one, and which patterns it belongs to."""

    def __init__(self, causes: Sequence[Cause]) -> None:
        self._words: dict[bytes, list[Owned]] = {}
        for cause in causes:
            for pattern in cause.patterns:
                is_long = len(pattern.word) >= LONG
                word = (pattern.word.lower() if is_long else pattern.word).encode()
                self._words.setdefault(word, []).append((cause, pattern))
        self.short = [word for word in self._words if len(word) < LONG]
        self._grams: dict[int, list[tuple[int, bytes]]] = {}
        self._flags = np.zeros(1 << _BITS, dtype=np.bool_)  # four bytes of a word
        self._windows = np.zeros(1 << _BITS, dtype=np.bool_)  # its seven bytes around them
        for word in self._words:
            if len(word) >= LONG:
                self._add(word)

    def _add(self, word: bytes) -> None:
        windows = range(len(word) - LONG + 1)
        first = min(windows, key=lambda at: window_cost(word[at : at + LONG].decode()))
        head, tail = (_read(word[at : at + 4]) for at in (first, first + 3))
        self._windows[_places(head ^ (tail * _OTHER))] = True
        for start in range(first, first + 4):
            gram = _read(word[start : start + 4])
            self._grams.setdefault(int(gram[0]), []).append((start, word))
            self._flags[_places(gram)] = True

    def places(self, chunk: bytes) -> list[tuple[int, list[Owned]]]:
        """Where words are in a chunk, in order, and the patterns they belong to."""
        found: list[tuple[int, list[Owned]]] = []
        for begin in range(0, len(chunk), _BLOCK):
            count = (min(len(chunk), begin + _BLOCK) - begin) // 4
            grams = np.frombuffer(chunk, dtype="<u4", offset=begin, count=count) | _FOLD
            flagged = np.flatnonzero(self._flags.take(_places(grams), mode="clip"))
            chosen = flagged[self._is_known(grams, flagged)]
            for index, gram in zip(chosen.tolist(), grams.take(chosen).tolist(), strict=True):
                for start, word in self._grams.get(gram, ()):
                    place = begin + 4 * index - start
                    if place >= 0 and chunk[place : place + len(word)].lower() == word:
                        found.append((place, self._words[word]))
        for word in self.short:
            place = chunk.find(word)
            while place >= 0:
                found.append((place, self._words[word]))
                place = chunk.find(word, place + 1)
        return sorted(found, key=lambda one: one[0])

    def _is_known(self, grams: Grams, flagged: Places) -> Truth:
        """Whether the bytes around four flagged ones make up seven of a word."""
        # The first and the last have a neighbour in another block: they are always kept.
        is_known: Truth = (flagged == 0) | (flagged == len(grams) - 1)
        own = grams.take(flagged)
        before = grams.take(flagged - 1, mode="clip")
        after = grams.take(flagged + 1, mode="clip")
        for shift in range(4):  # bytes of the seven before the four; the first byte is the lowest
            head = (own << _BITS_OF[shift]) | (before >> _BITS_OF[4 - shift]) if shift else own
            rest = 3 - shift
            tail = (own >> _BITS_OF[rest]) | (after << _BITS_OF[4 - rest]) if rest else own
            is_known |= self._windows.take(_places(head ^ (tail * _OTHER)), mode="clip")
        return is_known


def _read(four: bytes) -> Grams:
    return np.frombuffer(four, dtype="<u4") | _FOLD


def _places(grams: Grams) -> Grams:
    """Where in a table of flags four bytes have theirs."""
    return (grams * _FACTOR) >> _SHIFT


@cache
def _all_words() -> Words:
    return Words(list(load().values()))


class LogScan:
    """Every line of a file that matches a pattern; of many alike, the first and the last.

    `read` continues where it stopped the last time, so each part of a growing log is read once.
    """

    def __init__(self, source: Source) -> None:
        self.found = Scanned(source)
        self.end = 0  # of the last whole line, in bytes
        self._number = source.first_line  # of the line there
        self._kept: dict[tuple[str, int | None], list[Hit]] = {}
        self._num_marks = 0

    def read(self) -> Scanned:
        """Everything that was found up to the end of the file as it is now."""
        found = self.found
        for hits in self._kept.values():  # a line that had not ended is read again
            hits[:] = [hit for hit in hits if hit.offset < self.end]
        try:
            for number, offset, raw, causes in self._lines():
                self._take(number, offset, raw, causes)
            found.problem = ""
        except (OSError, EOFError, zlib.error) as error:
            found.problem = f"cannot be read: {error}"
        found.hits = sorted(
            (hit for hits in self._kept.values() for hit in hits),
            key=lambda hit: (hit.number, hit.offset),
        )
        found.ranks |= {hit.rank for hit in found.hits if hit.rank is not None}
        return found

    def _take(self, number: int, offset: int, raw: str, causes: Iterable[Cause]) -> None:
        line = parse(raw)
        for cause in causes:
            if cause.kind == "mark" and self._num_marks >= MAX_MARKS:
                continue
            if (fields := cause.match(line.text)) is None:
                continue
            hit = Hit(cause, self.found.source, number, offset, line, fields)
            if cause.kind == "mark":
                self._num_marks += 1
                self._kept.setdefault((cause.slug, None), []).append(hit)
            else:
                hits = self._kept.setdefault((cause.slug, hit.rank), [])
                if len(hits) >= KEPT_FIRST + KEPT_LAST:
                    del hits[KEPT_FIRST]
                hits.append(hit)

    def _lines(self) -> Iterator[tuple[int, int, str, Iterable[Cause]]]:
        """Number, offset and text of each line that may matter, and to which causes."""
        offset, found = self.end, self.found
        for chunk in _chunks(found.source, offset):
            counted, number = 0, self._number
            places = _all_words().places(chunk)
            index = 0
            while index < len(places):
                place = places[index][0]
                start = max(chunk.rfind(b"\n", 0, place) + 1, place - MAX_LINE_BYTES)
                end = chunk.find(b"\n", place, place + MAX_LINE_BYTES)
                end = min(len(chunk), place + MAX_LINE_BYTES) if end < 0 else end
                number += chunk.count(b"\n", counted, start)
                counted = start
                owned: dict[int, list[Owned]] = {}  # a word may occur a thousand times in a line
                while index < len(places) and places[index][0] < end:
                    owned[id(places[index][1])] = places[index][1]
                    index += 1
                text = without_escapes(chunk[start:end].decode(errors="replace"))
                text = _LONG_NUMBER.sub(r"\1", text)
                # Most words are in lines that are about something else.
                causes = {
                    cause.slug: cause
                    for of_word in owned.values()
                    for cause, pattern in of_word
                    if pattern.may_match(text)
                }
                if causes:
                    yield number, offset + start, text, causes.values()
            self._number = number + chunk.count(b"\n", counted)
            self.end = offset + chunk.rfind(b"\n") + 1
            offset += len(chunk)
            found.num_lines, found.num_bytes = self._number - 1, offset
            # The first and, mostly, the last.
            if offset == len(chunk) or len(chunk) < CHUNK_BYTES // 2:
                found.ranks |= {int(rank) for rank in _RANKS.findall(chunk[-_BLOCK:])}


def scan(source: Source) -> Scanned:
    """Every line of a file that matches a pattern; of many alike, the first and the last."""
    return LogScan(source).read()


class GrowingLogs:
    """Scans of logs that are searched again and again: each part of a file is read once."""

    def __init__(self) -> None:
        self._known: dict[tuple[Path, int | None], tuple[int, LogScan]] = {}

    def scan(self, source: Source) -> Scanned:
        if source.content is not None:
            return scan(source)
        try:
            status = source.path.stat()
        except OSError:
            return scan(source)
        key = (source.path, source.rank)
        file, known = self._known.pop(key, (0, LogScan(source)))
        if file != status.st_ino or status.st_size < known.end:  # it was started over
            known = LogScan(source)
        self._known[key] = (status.st_ino, known)
        while len(self._known) > MAX_SCANS:
            del self._known[next(iter(self._known))]
        return known.read()


def _chunks(source: Source, begin: int = 0) -> Iterator[bytes]:
    """The file in pieces of whole lines, unless a line is longer than a piece."""
    with open_log(source) as file:
        if begin:  # a pipe cannot
            file.seek(begin)
        rest, num_bytes = b"", 0
        is_file = source.content is not None or source.path.is_file()
        while block := file.read(CHUNK_BYTES):
            num_bytes += len(block)
            if num_bytes > MAX_PIPE_BYTES and not is_file:
                raise OSError(f"it does not end within {size(MAX_PIPE_BYTES)}")
            block = rest + block
            cut = block.rfind(b"\n") + 1
            if cut == 0:
                if len(block) < 2 * CHUNK_BYTES:
                    rest = block
                    continue
                cut = len(block)
            yield block[:cut]
            rest = block[cut:]
        if rest:
            yield rest
    if source.content is None and source.path.suffix == ".gz":
        _, error = _unpacked(source.path, source.is_named)
        if error is not None:
            raise error


def open_log(source: Source) -> IO[bytes]:
    """Open a log; a compressed one is unpacked the first time."""
    if source.content is not None:
        return io.BytesIO(source.content)
    if source.path.suffix == ".gz":
        return _unpacked(source.path, source.is_named)[0].open("rb")
    return files.open_named(source.path) if source.is_named else files.open_file(source.path)


@cache
def _unpacked(path: Path, is_named: bool) -> tuple[Path, Exception | None]:
    """A compressed log, unpacked into a file that is removed with this process; and any error.

    It is unpacked once, because the lines around each finding are read again later.
    """
    number, name = tempfile.mkstemp(dir=_folder())
    error: Exception | None = None
    with os.fdopen(number, "wb") as unpacked:
        try:
            packed = files.open_named(path) if is_named else files.open_file(path)
            with packed, gzip.open(packed, "rb") as content:
                while block := content.read1(1 << 16):  # as far as a torn file goes
                    unpacked.write(block)
        except (OSError, EOFError, zlib.error) as why:
            error = why
    return Path(name), error


@cache
def _folder() -> str:
    folder = tempfile.mkdtemp(prefix="allranks-logs-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def read_around(source: Source, offset: int, num_bytes: int) -> str:
    """What a file contains from an offset on."""
    try:
        with open_log(source) as file:
            file.seek(offset)
            return file.read(num_bytes).decode(errors="replace")
    except (OSError, EOFError, zlib.error):
        return ""


_counted: dict[Path, tuple[int, int, int]] = {}  # file, bytes, lines: of files that grow


def num_lines(path: Path, num_bytes: float = math.inf) -> int:
    """How many lines a file has, or its first bytes; 0 if it cannot be read."""
    count = 0
    with suppress(OSError), files.open_file(path) as file:
        identity = os.fstat(file.fileno()).st_ino
        known, place, lines = _counted.get(path, (identity, 0, 0))
        if known == identity and place <= min(num_bytes, file.seek(0, os.SEEK_END)):
            count, num_bytes = lines, num_bytes - place
        else:
            place = 0
        file.seek(place)
        while num_bytes > 0 and (block := file.read(int(min(num_bytes, 1 << 20)))):
            count += block.count(b"\n")
            num_bytes -= len(block)
            place += len(block)
        _counted[path] = (identity, place, count)
    return count


# --- Whose line it is: rank, node and level, in all the ways that logs have to say so ------------

MOST_PREFIXES = 4
# What launchers put before each line; there may be several.
_PREFIXES = (
    re.compile(r"\[rank[: =]{0,2}(?P<rank>\d+)\]:? ?"),  # torch, after init_process_group
    re.compile(r"\[(?:\d+,)?(?P<rank>\d{1,5})\]<std(?:out|err)>: ?"),  # mpirun, horovodrun
    re.compile(r"\[[a-z_]\w*?\d+\]:"),  # torchrun --tee: role and local rank
    re.compile(r"\[(?P<rank>\d{1,4})\] (?!NCCL)"),  # allranks logs
    re.compile(r"\s{0,4}(?P<rank>\d{1,5}): "),  # srun --label
    re.compile(r"rank-?(?P<rank>\d+)[:|] "),
    re.compile(r"\w{8} \[rank=(?P<rank>\d+)\] \|\| "),  # Determined
    # What collected the log: a time stamp, Ray, docker compose, kubectl, journalctl, a quote.
    re.compile(
        r"\[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d(?::\d\d)?(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?\]?"
        r"(?:[ \t]|$)(?:\| )?"
    ),
    re.compile(r"\((?:\w+ )?pid=\d+(?:, ip=[\d.]+)?\) "),
    re.compile(r"\(raylet\) "),
    re.compile(r"ERROR \d\d-\d\d \d\d:\d\d:\d\d \[?[\w.]+:\d+\] "),  # vLLM
    re.compile(r"[\w.-]+-\d+ +\| "),
    re.compile(r"\[pod/\S+\] "),
    re.compile(r"[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \S+ [\w./-]+(?:\[\d+\])?: "),
    re.compile(r"> |\s{0,4}\| (?=\d{4}-\d\d-)|- [\w.]{1,40} - [A-Z]{4,8} - (?=\[rank\d)"),
)
_IN_LINE = (
    re.compile(r"\[(?:PG [^\][]*?)?Rank (?P<rank>\d+)\]"),  # ProcessGroupNCCL
    re.compile(r"^\[Rank (?P<rank>\d+)\]"),
    re.compile(r"\(RANK (?P<rank>\d+)\)"),  # a CheckpointException's parts
    re.compile(r"^(?:error: )?rank (?P<rank>\d+)[ :]"),
)
_BEGUN = re.compile(r"(?<=[^\s:\d])\s*(?:\[rank\d+\]: ?)?Traceback \(most recent call last\):")
_NCCL = re.compile(r"(?:^|[\] ])(?P<node>[\w.-]+):(?P<pid>\d+):\d+ \[-?\d+\] ")
_SLURMSTEPD = re.compile(r"slurmstepd-(?P<node>[\w.-]+): ")
_WARNING = re.compile(
    r"""^\[?W(?:\d{3,4}[ ]\d\d:|[ ]\w+\.cpp:)  # torch's own
    | \bWARN(?:ING)?\b(?!.*\bERROR\b) | \w*Warning: | \bINFO\b | \bDEBUG\b | ^\s*warnings\.warn
    """,
    re.VERBOSE,
)
_ERROR = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception|Interrupt|Exit)\b(?:: |$)")
# NCCL's warnings are its errors; up to 2.2 it did not put its name before them.
_NCCL_ERROR = re.compile(r"NCCL WARN|\[\d+\] \S+\.(?:h|cc|cu):\d+ WARN ")
# Looks like a rank's number but is the index in torchrun's list of failures.
_NO_RANK = re.compile(r"\[\d+\]:\s*$")


@dataclass(frozen=True, slots=True)
class Line:
    """A line without its prefixes, and what they say."""

    text: str
    rank: int | None = None
    node: str | None = None
    pid: int | None = None
    is_warning: bool = False
    is_prefixed: bool = False  # every line of that rank has it


def parse(raw: str) -> Line:
    """Split a line into its text and what it says about its origin."""
    text = without_escapes(raw)
    if "\r" in text:  # a progress bar overwrites itself: only the last version was seen
        text = text.rstrip("\r").rpartition("\r")[2]
    text = plain(text)
    if (begun := _BEGUN.search(text)) is not None:  # after a progress bar that has no line end
        text = text[begun.start() :].lstrip()
    rank: int | None = None
    for _ in range(MOST_PREFIXES):
        matches = (match for prefix in _PREFIXES if (match := prefix.match(text)) is not None)
        prefix = None if _NO_RANK.match(text) else next(matches, None)
        if prefix is None:
            break
        named = prefix.groupdict().get("rank")
        rank = int(named) if named is not None else rank
        text = text[prefix.end() :]
    is_prefixed = rank is not None
    if rank is None:
        found = next((m for one in _IN_LINE if (m := one.search(text))), None)
        rank = int(found["rank"]) if found else None
    node, pid = None, None
    if (nccl := _NCCL.search(text)) is not None and "NCCL" in text:
        node, pid = nccl["node"], int(nccl["pid"])
    elif (step := _SLURMSTEPD.search(text)) is not None:
        node = step["node"]
    return Line(text, rank, node, pid, _is_warning(text), is_prefixed)


def _is_warning(text: str) -> bool:
    if _ERROR.match(text) or _NCCL_ERROR.search(text):
        return False
    return _WARNING.search(text[:200]) is not None
