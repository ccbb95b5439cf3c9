"""Tracebacks: of what ends a rank, recorded in its events, and as they are read from a log.

`record_exception` and `record_exit` are called in the rank (by `probe/inject` in a script, by
`train/rank.py` in a task) before anything is printed: whoever shows the rank's output then knows
that a traceback follows.
"""

from __future__ import annotations

import linecache
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from allranks.run import files
from allranks.run.events import append_event

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

MAX_MESSAGE = 2000  # characters
MAX_SOURCE = 160
MAX_FRAMES, OUTERMOST, INNERMOST = 40, 8, 30
MAX_CHAIN = 20
# Messages that only say that another rank is gone.
_ECHO = re.compile(
    r"(?:closed|reset) by (?:remote )?peer|communicator was aborted|broken pipe"
    r"|remote process (?:has )?(?:exited|terminated)"
    r"|pair closure|recvvalue failed|socket (?:timeout|closed|not connected)|clients joined"
    r"|timed ?out (?:waiting|after)|wait timeout|watchdog caught collective"
    r"|network error|failed to (?:recv|send)|connection (?:refused|was likely closed)",
    re.IGNORECASE,
)
_OF_RANKS = {"DistError", "DistNetworkError", "DistStoreError", "DistBackendError"}
# torch's C++ adds a stack of its own to a message.
_NATIVE_STACK = re.compile(r"\s*(?:Exception raised from .* \(most recent call first\)|C\+\+ Capt)")


@dataclass(frozen=True, slots=True)
class Frame:
    """One call in a stack or a traceback."""

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
        """Whether it is allranks' own code, which does not interest the user."""
        return self.file.startswith(OURS)

    @property
    def library(self) -> str:
        found = _PACKAGE.match(self.file)
        return found[1] if found else "Python"

    @property
    def short(self) -> str:
        """Where it is, relative to the current folder."""
        inside = f" in {self.function}" if self.function else ""
        return f"{short_path(self.file)}:{self.line}{inside}"

    @property
    def brief(self) -> str:
        """Without its folders: `train.py:9 in f`, `torch/_tensor.py:8 in g`."""
        _, _, inside = self.file.rpartition("-packages/")
        name = inside if inside != self.file else Path(self.file).name
        return f"{name}:{self.line} in {self.function}"

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


@dataclass(frozen=True, slots=True)
class PrintedException:
    """An exception as its printed traceback shows it, the outermost call first."""

    type: str  # as it is printed, with its module
    message: str
    frames: tuple[Frame, ...]
    last_line: int  # the number of the line with type and message

    @property
    def name(self) -> str:
        return self.type.rpartition(".")[2]


def short_path(file: str) -> str:
    """A file's path relative to the current folder, if it is below that."""
    try:
        here = os.getcwd()
    except OSError:  # the current folder was removed
        return file
    return os.path.relpath(file, here) if file.startswith(f"{here}/") else file


def source_lines(file: str) -> list[str]:
    """The lines of a Python file if it is here; an event may name any path at all."""
    path = Path(file)
    if path.suffix != ".py" or not files.is_regular(path):
        return []
    return linecache.getlines(file) if path.stat().st_size <= MAX_SOURCE_BYTES else []


def place_of(frames: Sequence[Frame]) -> Frame | None:
    """The innermost frame of the user's own code, or of any if there is none; outermost first."""
    own = [frame for frame in frames if frame.is_own]
    typed = [frame for frame in frames if frame.file in ("<string>", "<stdin>")]
    others = [frame for frame in frames if not frame.is_ours and frame.file]
    return next(reversed(own or typed or others), None)


def is_type(name: str) -> bool:
    """Whether a word at the beginning of a line names an exception."""
    last = name.rpartition(".")[2]
    return last[:1].isupper() or "." in name or last in ("error", "gaierror", "timeout")


def read_tracebacks(text: str) -> list[PrintedException]:
    """The tracebacks in a text, each with the first line of its message."""
    lines = [(number, _PREFIX.sub("", raw)) for number, raw in enumerate(text.splitlines())]
    begun = [number for number, line in lines if BEGIN.search(line)]
    found = (read_traceback(lines[number + 1 :]) for number in begun)
    return [one for one in found if one is not None]


def read_traceback(
    lines: Iterable[tuple[int, str]], most_foreign: int = 0
) -> PrintedException | None:
    """A traceback from the numbered lines after its first one; None if it does not end.

    `most_foreign`: how many lines of other processes may be in its middle.
    """
    frames: list[Frame] = []
    for number, line in lines:
        if (frame := FRAME.match(line)) is not None:
            frames.append(Frame(frame["file"], int(frame["line"]), frame["function"] or ""))
        elif not line or line[0].isspace() or line[0] in "^~":
            if frames and not frames[-1].source and line.strip(" ^~"):
                frames[-1] = replace(frames[-1], source=line.strip())
        elif (raised := RAISED.match(line)) is not None and is_type(raised["type"]):
            message = (raised["message"] or "").strip()
            return PrintedException(raised["type"], message, tuple(frames), number)
        elif frames or not most_foreign:
            most_foreign -= 1
            if most_foreign < 0 or BEGIN.search(line):
                return None
    return None


# --- What ends a rank --------------------------------------------------------------------------


def describe(error: BaseException, above: Sequence[Frame] = ()) -> dict[str, Any]:
    """An exception as plain data: its type, its message, where it was raised, and its cause.

    `above`: the calls that led to where it was caught, which its traceback does not contain.
    """
    fields = _describe_alone(error, above)
    earlier = [_describe_alone(one) for one in [*_chain(error)][1:]]
    own = [one for one in earlier if one["file"] and Frame(one["file"], 0, "").is_own]
    echoes = [is_echo(one["type"], one["message"]) for one in (fields, *earlier)]
    if echoes[0]:
        # Raised while cleaning up after an error of this rank's own: that one is the cause.
        first = next((one for one in own if not is_echo(one["type"], one["message"])), None)
        if first is not None:
            return {**first, "message": _bounded(first["message"]), "echo": False}
    fields["echo"] = any(echoes)
    inner = _inside(fields["message"]) or _inside(str(error.__cause__ or ""))
    if inner is not None:  # raised in another process, whose traceback is part of the message
        frames = [Frame(*frame) for frame in (*fields["frames"], *inner.pop("frames"))]
        return {**fields, **inner, **places(frames)}
    parts = getattr(error, "exceptions", ())  # of an ExceptionGroup
    if isinstance(parts, tuple) and parts and isinstance(parts[0], BaseException):
        earlier.append(_describe_alone(parts[0]))
    if earlier:
        fields["cause"] = in_a_line((own or earlier)[-1])
    fields["message"] = _bounded(fields["message"])
    return fields


def _describe_alone(error: BaseException, above: Sequence[Frame] = ()) -> dict[str, Any]:
    """One exception, without those that led to it."""
    frames = [*above, *map(_frame, traceback.extract_tb(error.__traceback__))]
    message = _message(error)
    if isinstance(error, SyntaxError) and error.filename:
        message = error.msg
        source = (error.text or "").strip()
        frames.append(Frame(os.path.abspath(error.filename), error.lineno or 0, "", source))
    return {"type": type(error).__name__, "message": message, **places(frames)}


def is_out_of_memory(text: str) -> bool:
    """Whether an exception, in words, says that a GPU or the host has no more memory."""
    kinds = ("OutOfMemoryError", "out of memory", "can't allocate memory", "MemoryError")
    return any(kind in text for kind in kinds)


def is_echo(name: str, message: str) -> bool:
    """Whether an error only says that another rank is gone."""
    if name == "PeerFailure":
        return True
    return name in {"RuntimeError", *_OF_RANKS} and bool(_ECHO.search(message))


# What the probe adds to an error event, from the exception.
more_about: list[Callable[[BaseException], dict[str, Any]]] = []


def record_exception(error: BaseException) -> None:
    """Record an uncaught exception, which is about to be printed."""
    record("error", {"pid": os.getpid(), **describe(error), **_more_about(error)})
    hide_ours(error)


def _more_about(error: BaseException) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for add in more_about:
        with suppress(Exception):  # only the script's own error matters
            found |= add(error)
    return found


def hide_ours(error: BaseException) -> None:
    """Remove allranks' own frames from an exception's traceback, and from those that led to it."""
    for one in _chain(error):
        one.__traceback__ = without_ours(one.__traceback__)


def record_exit(code: Any, *, kills: bool = False) -> None:
    """Record a call that ends this process with a code (sys.exit takes text too), or kills it."""
    frames = [*map(_frame, traceback.extract_stack(sys._getframe(1)))]
    while frames and frames[-1].file.endswith("probe/inject/sitecustomize.py"):
        frames.pop()
    error = sys.exc_info()[1]
    if not frames or frames[-1].is_ours or isinstance(error, SystemExit):
        return  # recorded already
    fields: dict[str, Any] = {"type": "SystemExit", "message": "", "echo": False}
    fields |= {"pid": os.getpid(), **places(frames)}
    if kills:
        fields |= {"type": "", "signal": signal.Signals(code).name}
    elif not isinstance(code, int):
        fields |= {"message": _bounded(str(code)), "exit": 1}
    elif error is not None:  # in an exception's handler: the script reports it itself
        fields |= {**describe(error, _above(error)), **_more_about(error), "exit": code & 0xFF}
        error = None
    else:
        fields["exit"] = code & 0xFF
    if error is not None:
        fields["cause"] = in_a_line(describe(error))
    record("error", fields)


def _above(error: BaseException) -> list[Frame]:
    """The calls that led to the one that caught an exception."""
    trace, frame = error.__traceback__, sys._getframe(1)
    while trace is not None and frame is not trace.tb_frame:
        if frame.f_back is None:
            return []
        frame = frame.f_back
    above = frame.f_back if trace is not None else None
    return [*map(_frame, traceback.extract_stack(above))] if above is not None else []


def record(event: str, fields: dict[str, Any]) -> None:
    """Write an event to the file of this process's rank, past its event log."""
    env = os.environ
    folder = Path(env["ALLRANKS_RUN_DIR"]) / "attempts" / env["ALLRANKS_ATTEMPT"]
    append_event(folder / f"rank-{env['RANK']}.jsonl", event, **fields)


def is_worker() -> bool:
    """Whether a rank's multiprocessing started this process: its parent reports its errors."""
    return any("multiprocessing" in word for word in getattr(sys, "orig_argv", ()))


def in_a_line(described: dict[str, Any]) -> str:
    """`KeyError: 'label' (train.py:31 in forward)`."""
    first = described["message"].strip().partition("\n")[0]
    text = f"{described['type']}: {first}" if first else described["type"]
    if not described.get("file"):
        return text
    place = Frame(described["file"], described["line"], described["function"])
    return f"{text} ({place.short})"


def without_ours(trace: TracebackType | None) -> TracebackType | None:
    """A traceback without allranks' frames; unchanged if none of it is the user's own code."""
    kept = []
    while trace is not None:
        kept.append((trace, Frame(trace.tb_frame.f_code.co_filename, 0, "")))
        trace = trace.tb_next
    if not any(frame.is_own for _, frame in kept):
        return kept[0][0] if kept else None
    inner = None
    for one, frame in reversed(kept):
        if not frame.is_ours:
            one.tb_next = inner
            inner = one
    return inner


def where_now(frame: FrameType | None) -> tuple[str, int, str] | None:
    """The innermost line of the user's own code in a thread. Cheap: reads no file."""
    while frame is not None:
        at = Frame(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        if at.is_own:
            return os.path.abspath(at.file), at.line, at.function
        frame = frame.f_back
    return None


def _inside(message: str) -> dict[str, Any] | None:
    """The exception whose traceback is part of a message: a data worker's, or a child process's."""
    printed = read_tracebacks(message)
    if not printed:
        return None
    last = printed[-1]
    more = message.splitlines()[last.last_line + 1 :]
    text = "\n".join([last.message, *more]).strip()
    frames = [_row(frame) for frame in last.frames]
    return {"type": last.name, "message": _bounded(text), "frames": frames}


def places(frames: list[Frame]) -> dict[str, Any]:
    """Frames, and the line to blame, as an event has them."""
    frames = [frame for frame in frames if not frame.is_ours] or frames
    place = place_of(frames)
    frames = [frame for _, same in groupby(frames) for frame in _without_repeats([*same])]
    if len(frames) > MAX_FRAMES:
        frames = [*frames[:OUTERMOST], _gone(frames[OUTERMOST:-INNERMOST]), *frames[-INNERMOST:]]
    return {
        "file": place.file if place else None,
        "line": place.line if place else None,
        "function": place.function if place else None,
        "frames": [_row(frame) for frame in frames],
    }


def _without_repeats(same: list[Frame]) -> list[Frame]:
    """A call that repeats over and over, shown twice."""
    return same if len(same) < 4 else [same[0], _gone(same[1:-1]), same[-1]]


def _gone(frames: Sequence[Frame]) -> Frame:
    """A placeholder for frames that are left out, with their number as its line."""
    return Frame("", sum(1 if frame.file else frame.line for frame in frames), "")


def _row(frame: Frame) -> list[Any]:
    return [frame.file, frame.line, frame.function, frame.source[:MAX_SOURCE]]


def _frame(summary: traceback.FrameSummary) -> Frame:
    file = summary.filename
    path = file if file.startswith("<") else os.path.abspath(file)
    return Frame(path, summary.lineno or 0, summary.name, summary.line or "")


def _message(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception:  # the user's own class, which cannot be printed
        return ""
    cut = _NATIVE_STACK.search(text)
    return text[: cut.start()] if cut and cut.start() > 0 else text


def _bounded(text: str) -> str:
    text = text.encode(errors="replace").decode()
    return text if len(text) <= MAX_MESSAGE else f"{text[:MAX_MESSAGE]}..."


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An exception and those that led to it, the newest first."""
    one: BaseException | None = error
    for _ in range(MAX_CHAIN):
        if one is None:
            return
        yield one
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)
