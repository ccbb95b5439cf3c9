"""Python tracebacks in logs: the exception, its rank, and the line of the user's own code."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from allranks.doctor.log_search import Hit, Scanned, parse, read_around
from allranks.run.tracebacks import RAISED, PrintedException, is_type, read_traceback

READ_BYTES = 1 << 16
CONTEXT_BYTES = 300
LAST_BYTES = 1000  # of a log, which tell how it ended
MOST_FOREIGN = 4  # lines of other processes in the middle of a traceback
ENOUGH_PROGRESS = 4  # lines; other ranks may print one or two before they notice
MAX_TRACEBACKS = 400  # of a file; many ranks say the same thing
_PROGRESS = re.compile(
    r"\b(?:epoch|step|iter(?:ation)?|batch|loss|it/s)\b\W{0,4}[\w/ ]{0,12}\d|\d(?:it/s|s/it)", re.I
)
_WELL = re.compile(
    r"""\b(?:train\w*|job|run|fit\w*|script|everything|all)\b.{0,30}
        \b(?:complete[d]?|finished|done|succeeded|successful\w*)\b
    | \b(?-i:COMPLETED)\b | exit(?:ed)?\ (?:with\ )?(?:code|status):?\ 0\b
    | Trainer\.fit`?\ stopped | train_runtime
    """,
    re.IGNORECASE | re.VERBOSE,
)
_COUNTED = re.compile(r"\b(?:epoch|step|iter(?:ation)?)s?\W{0,4}(\d{1,9})", re.I)
_RAISES = re.compile(r"\b(?:raise|assert)\b")
_CHAINED = re.compile(
    r"direct cause of the following exception|During handling of the above exception"
)
# From torch.multiprocessing.spawn; and from a logger's message above its traceback.
_PROCESS = re.compile(r"-- Process (?P<rank>\d+) terminated with the following error")
_NAMED = re.compile(r"\brank\W{0,2}(?P<rank>\d{1,5})\b", re.I)
# They come from a launcher, a signal or an orderly end, not from an error in a rank.
OF_LAUNCHERS = {
    "ChildFailedError",
    "SignalException",
    "KeyboardInterrupt",
    "SystemExit",
    "ProcessRaisedException",
    "ProcessExitedException",
    "GeneratorExit",
    "ActorDiedError",  # of Ray, about another process
    "RayActorError",
}
_LAUNCHER = re.compile(r"torch/distributed/(?:run\.py|elastic/agent/)")
_STARTED = re.compile(r"python|\.py\b|torchrun|deepspeed")  # by a launcher, as its command


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
    is_own_code: bool = False  # raised by the user's own code
    goes_on: bool = False  # caught: the work goes on after it
    before: Raised | None = None  # the exception it was raised from, or while handling it

    @property
    def text(self) -> str:
        return f"{self.type}: {self.message}" if self.message else self.type

    @property
    def chain(self) -> tuple[Raised, ...]:
        """This exception and those that led to it, the first of them first."""
        return (*self.before.chain, self) if self.before is not None else (self,)


def tracebacks(scanned: Scanned) -> list[Raised]:
    """The tracebacks of a file; of very many, the first and the last."""
    marks = [hit for hit in scanned.hits if hit.cause.slug == "traceback"]
    if len(marks) > MAX_TRACEBACKS:
        marks = marks[: MAX_TRACEBACKS // 2] + marks[-MAX_TRACEBACKS // 2 :]
    found: list[Raised] = []
    for mark in marks:
        raised = _read(mark)
        if raised is not None and _is_in_block(mark):
            raised = replace(raised, rank=_rank_above(mark, scanned), is_launchers=False)
        if raised is not None:
            found.append(_with_context(raised, found))
    return found + [one for hit in scanned.hits if (one := _told(hit)) is not None]


def _told(hit: Hit) -> Raised | None:
    """What the launcher says about a rank that raised, if the rank's own log is not here."""
    what = hit.fields.get("what", "") if hit.cause.slug == "allranks-end" else ""
    raised = RAISED.match(what)
    if raised is None or not is_type(raised["type"]):
        return None
    place = re.search(r"\((\S+:\d+)(?: in \S+)?\)?$", what)
    where, message = place[1] if place else "", (raised["message"] or "").strip()
    rank = int(hit.fields["rank"])
    return Raised(hit, hit.number, raised["type"], message, where, (), rank, False)


def _with_context(raised: Raised, found: Sequence[Raised]) -> Raised:
    """Add what the lines above it say: its process, and the exception it follows from."""
    mark = raised.mark
    start = max(0, mark.offset - CONTEXT_BYTES)
    text = read_around(mark.source, start, mark.offset - start) if mark.offset else ""
    above = text.rstrip("\n").rpartition("\n")[2]
    if raised.rank is None and (named := _PROCESS.search(text) or _NAMED.search(above)) is not None:
        raised = replace(raised, rank=int(named["rank"]))
    last = next((one for one in reversed(found) if one.rank == raised.rank), None)
    before = last if _CHAINED.search(text) else None
    # torch puts the rank before a traceback only if the exception was not caught.
    num_lines = raised.number - mark.number + 1
    goes_on = not mark.line.is_prefixed and has_progress(mark, num_lines)
    return replace(raised, before=before, goes_on=goes_on)


def has_progress(hit: Hit, num_lines: int = 1) -> bool:
    """Whether steps, epochs or losses are printed after this many lines from a hit on."""
    lines = read_around(hit.source, hit.offset, READ_BYTES).split("\n")[num_lines:]
    return sum(_PROGRESS.search(line[:400]) is not None for line in lines) >= ENOUGH_PROGRESS


def has_gone_on(hit: Hit) -> bool:
    """Whether several more steps follow a hit. One may just be other ranks finishing theirs."""
    lines = read_around(hit.source, hit.offset, READ_BYTES).split("\n")[1:]
    counted = {found[1] for line in lines if (found := _COUNTED.search(line[:400])) is not None}
    return len(counted) >= ENOUGH_PROGRESS


def ends_well(hit: Hit, num_bytes: int) -> bool:
    """Whether one of a log's last lines, after a hit, says that everything is done."""
    start = max(hit.offset, num_bytes - LAST_BYTES)
    lines = read_around(hit.source, start, LAST_BYTES).split("\n")
    return any(_WELL.search(line[:400]) for line in lines[1 if start == hit.offset else 0 :])


def _is_in_block(mark: Hit) -> bool:
    """Whether it is in torchrun's list of failures, of a script whose main records its error."""
    return mark.line.text.lstrip().startswith("traceback :")


def _rank_above(mark: Hit, scanned: Scanned) -> int | None:
    ranks = [
        int(hit.fields["rank"])
        for hit in scanned.hits
        if hit.number < mark.number and hit.cause.slug == "agent-block" and "rank" in hit.fields
    ]
    return ranks[-1] if ranks else None


def _read(mark: Hit) -> Raised | None:
    printed = read_traceback(_own_lines(mark), MOST_FOREIGN)
    if printed is None:
        return None
    frames = printed.frames
    own = [frame for frame in frames if frame.is_own]
    place = next(reversed(own or frames), None)
    is_launchers = any(_LAUNCHER.search(frame.file) for frame in frames)
    is_launchers |= bool(frames) and frames[-1].file.endswith("torch/multiprocessing/spawn.py")
    return Raised(
        mark,
        printed.last_line,
        printed.type,
        printed.message,
        f"{place.file}:{place.line}" if place is not None else "",
        tuple(f"{frame.file} {frame.function}".replace("\\", "/") for frame in frames),
        mark.rank,
        is_launchers or printed.name in OF_LAUNCHERS or _is_of_command(printed),
        bool(own) and own[-1] is frames[-1] and bool(_RAISES.search(frames[-1].source)),
    )


def _is_of_command(printed: PrintedException) -> bool:
    """Whether a launcher reports that the script it started has failed."""
    return printed.name == "CalledProcessError" and bool(_STARTED.search(printed.message))


def _own_lines(mark: Hit) -> Iterator[tuple[int, str]]:
    """The lines after a traceback's first, without those of other ranks in between."""
    lines = read_around(mark.source, mark.offset, READ_BYTES).split("\n")[1:]
    for number, raw in enumerate(lines, mark.number + 1):
        line = parse(raw.removeprefix("  ") if _is_in_block(mark) else raw)
        is_empty = not line.text and bool(raw.strip())  # nothing but a prefix
        if not is_empty and (not mark.line.is_prefixed or line.rank == mark.line.rank):
            yield number, line.text
