"""Exceptions of Python in logs: type, message, whose, and the line of the user's own code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from allranks.doctor.lines import Line, parse
from allranks.doctor.scan import Hit, Scanned, read_around

READ_BYTES = 1 << 16
MAX_TRACEBACKS = 400  # of a file; a crowd of ranks says the same thing
_RAISED = re.compile(r"^(?P<type>[A-Za-z_][\w.]*)(?:: (?P<message>.*))?$")
_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+)(?:, in (?P<function>\S+))?')
_INSTALLED = ("site-packages", "dist-packages", "<frozen", "<string>", "/lib/python3")
_PROCESS = re.compile(r"-- Process (?P<rank>\d+) terminated with the following error")
# They tell of a launcher, a signal or an orderly end, not of an error in a rank.
OF_LAUNCHERS = {
    "ChildFailedError",
    "SignalException",
    "KeyboardInterrupt",
    "SystemExit",
    "CalledProcessError",
    "ProcessRaisedException",
    "ProcessExitedException",
    "GeneratorExit",
    "BrokenPipeError",
}


@dataclass(frozen=True, slots=True)
class Raised:
    """One traceback."""

    mark: Hit  # its first line
    number: int  # the line with type and message
    type: str
    message: str
    where: str  # file:line of the user's code, or of the last frame
    frames: tuple[str, ...]  # file and function of each
    rank: int | None
    is_launchers: bool

    @property
    def text(self) -> str:
        return f"{self.type}: {self.message}" if self.message else self.type


def tracebacks(scanned: Scanned) -> list[Raised]:
    """The tracebacks of a file, the first and the last ones of very many."""
    marks = [hit for hit in scanned.hits if hit.cause.slug == "traceback"]
    if len(marks) > MAX_TRACEBACKS:
        marks = marks[: MAX_TRACEBACKS // 2] + marks[-MAX_TRACEBACKS // 2 :]
    found = []
    for mark in marks:
        raised = _read(mark)
        if raised is not None and _is_in_block(mark):
            raised = replace(raised, rank=_rank_above(mark, scanned), is_launchers=False)
        if raised is not None:
            found.append(raised)
    return found + [one for hit in scanned.hits if (one := _told(hit)) is not None]


def _told(hit: Hit) -> Raised | None:
    """What the launcher says of a rank that raised, where the rank's own log is not at hand."""
    what = hit.fields.get("what", "") if hit.cause.slug == "allranks-end" else ""
    raised = _RAISED.match(what)
    if raised is None or not _is_type(raised["type"]):
        return None
    place = re.search(r"\((\S+:\d+)\)?$", what)
    where, message = place[1] if place else "", (raised["message"] or "").strip()
    rank = int(hit.fields["rank"])
    return Raised(hit, hit.number, raised["type"], message, where, (), rank, False)


def _is_in_block(mark: Hit) -> bool:
    """In torchrun's list of failures, of a script whose main records its error."""
    return mark.line.text.lstrip().startswith("traceback :")


def _rank_above(mark: Hit, scanned: Scanned) -> int | None:
    ranks = [
        int(hit.fields["rank"])
        for hit in scanned.hits
        if hit.number < mark.number and hit.cause.slug == "agent-block" and "rank" in hit.fields
    ]
    return ranks[-1] if ranks else None


def _read(mark: Hit) -> Raised | None:
    frames: list[tuple[str, str]] = []
    functions: list[str] = []
    is_launchers = False
    for number, line in _own_lines(mark):
        frame = _FRAME.match(line.text)
        if frame is not None:
            frames.append((frame["file"], frame["line"]))
            functions.append(f"{frame['file']} {frame['function'] or ''}")
            is_launchers |= "torch/distributed/run.py" in frame["file"]
        elif not line.text or line.text[0].isspace() or line.text[0] in "^~":
            continue
        elif (raised := _RAISED.match(line.text)) is not None and _is_type(raised["type"]):
            name = raised["type"].rpartition(".")[2]
            own = [frame for frame in frames if not any(part in frame[0] for part in _INSTALLED)]
            place = (own or frames or [("", "")])[-1]
            return Raised(
                mark,
                number,
                raised["type"],
                (raised["message"] or "").strip(),
                ":".join(place) if place[0] else "",
                tuple(functions),
                mark.rank,
                is_launchers or name in OF_LAUNCHERS,
            )
        elif frames:
            return None  # lines of another process stand between
    return None


def _is_type(name: str) -> bool:
    last = name.rpartition(".")[2]
    return last[:1].isupper() or "." in name or last in ("error", "gaierror", "timeout")


def _own_lines(mark: Hit) -> Iterator[tuple[int, Line]]:
    """The lines behind a traceback's first one, without those of other ranks between them."""
    text = read_around(mark.source, mark.offset, READ_BYTES)
    for index, raw in enumerate(text.split("\n")):
        if index == 0:
            continue
        line = parse(raw.removeprefix("  ") if _is_in_block(mark) else raw)
        if not mark.line.is_prefixed or line.rank == mark.line.rank:
            yield mark.number + index, line
