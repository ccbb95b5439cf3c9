"""What ended a rank's process, described as plain data and written to its events. No torch.

Called in the rank (by `probe/inject` in a script, by `train/rank.py` in a task) before anything is
printed: whoever shows the rank's output then knows that a traceback follows.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from allranks.run.events import append_event
from allranks.run.frames import Frame, place_of, read_tracebacks

MAX_MESSAGE = 2000  # characters
MAX_SOURCE = 160
MAX_FRAMES, OUTERMOST, INNERMOST = 40, 8, 30
MAX_CHAIN = 20
# What a rank says when another one is gone.
_ECHO = re.compile(
    r"(?:closed|reset) by peer|broken pipe|remote process (?:has )?(?:exited|terminated)"
    r"|pair closure|recvvalue failed|socket (?:timeout|closed|not connected)|clients joined"
    r"|timed ?out (?:waiting|after)|wait timeout|watchdog caught collective"
    r"|network error|failed to (?:recv|send)|connection (?:refused|was likely closed)",
    re.IGNORECASE,
)
_OF_RANKS = {"DistError", "DistNetworkError", "DistStoreError", "DistBackendError"}
# torch's C++ adds a stack of its own to a message.
_NATIVE_STACK = re.compile(r"\s*(?:Exception raised from .* \(most recent call first\)|C\+\+ Capt)")


def describe(error: BaseException, above: Sequence[Frame] = ()) -> dict[str, Any]:
    """An exception: its type and message, where it was raised, and what it came from.

    `above`: the calls that led to where it was caught, which its traceback does not have.
    """
    fields = _describe_alone(error, above)
    earlier = [_describe_alone(one) for one in [*_chain(error)][1:]]
    own = [one for one in earlier if one["file"] and Frame(one["file"], 0, "").is_own]
    if _tells_of_others(fields):
        # Raised while cleaning up after an error of this rank's own: that one is the cause.
        first = next((one for one in own if not _tells_of_others(one)), None)
        if first is not None:
            return {**first, "message": _bounded(first["message"]), "echo": False}
    fields["echo"] = any(_tells_of_others(one) for one in (fields, *earlier))
    inner = _inside(fields["message"]) or _inside(str(error.__cause__ or ""))
    if inner is not None:  # raised in another process, whose traceback is part of the message
        frames = [Frame(*frame) for frame in (*fields["frames"], *inner.pop("frames"))]
        return {**fields, **inner, **_places(frames)}
    parts = getattr(error, "exceptions", ())  # of an ExceptionGroup
    if isinstance(parts, tuple) and parts and isinstance(parts[0], BaseException):
        earlier.append(_describe_alone(parts[0]))
    if earlier:
        fields["cause"] = in_a_line((own or earlier)[-1])
    fields["message"] = _bounded(fields["message"])
    return fields


def _describe_alone(error: BaseException, above: Sequence[Frame] = ()) -> dict[str, Any]:
    """An exception without those that it came from."""
    frames = [*above, *map(_frame, traceback.extract_tb(error.__traceback__))]
    message = _message(error)
    if isinstance(error, SyntaxError) and error.filename:
        message = error.msg
        source = (error.text or "").strip()
        frames.append(Frame(os.path.abspath(error.filename), error.lineno or 0, "", source))
    return {"type": type(error).__name__, "message": message, **_places(frames)}


def _tells_of_others(described: dict[str, Any]) -> bool:
    return is_echo(described["type"], described["message"])


def is_echo(name: str, message: str) -> bool:
    """Whether an error only says that another rank is gone."""
    if name == "PeerFailure":
        return True
    return name in {"RuntimeError", *_OF_RANKS} and bool(_ECHO.search(message))


def raised(error: BaseException) -> None:
    """Record an uncaught exception, which is about to be printed."""
    record("error", {"pid": os.getpid(), **describe(error)})
    hide_ours(error)


def hide_ours(error: BaseException) -> None:
    """Remove allranks' own frames from an exception's traceback, and from those that led to it."""
    for one in _chain(error):
        one.__traceback__ = without_ours(one.__traceback__)


def left(code: Any, *, kills: bool = False) -> None:
    """Record the call that ends this process with a code (a text, for sys.exit), or kills it."""
    frames = [*map(_frame, traceback.extract_stack(sys._getframe(1)))]
    while frames and frames[-1].file.endswith("probe/inject/sitecustomize.py"):
        frames.pop()
    error = sys.exc_info()[1]
    if not frames or frames[-1].is_ours or isinstance(error, SystemExit):
        return  # recorded already
    fields: dict[str, Any] = {"type": "SystemExit", "message": "", "echo": False}
    fields |= {"pid": os.getpid(), **_places(frames)}
    if kills:
        fields |= {"type": "", "signal": signal.Signals(code).name}
    elif not isinstance(code, int):
        fields |= {"message": _bounded(str(code)), "exit": 1}
    elif error is not None:  # in an exception's handler: the script reports it itself
        fields |= {**describe(error, _above(error)), "exit": code & 0xFF}
        error = None
    else:
        fields["exit"] = code & 0xFF
    if error is not None:
        fields["cause"] = in_a_line(describe(error))
    record("error", fields)


def _above(error: BaseException) -> list[Frame]:
    """The calls in progress above the one that caught an exception."""
    trace, frame = error.__traceback__, sys._getframe(1)
    while trace is not None and frame is not trace.tb_frame:
        if frame.f_back is None:
            return []
        frame = frame.f_back
    above = frame.f_back if trace is not None else None
    return [*map(_frame, traceback.extract_stack(above))] if above is not None else []


def record(event: str, fields: dict[str, Any]) -> None:
    """Write an event to the file of this process's rank, bypassing its event log."""
    env = os.environ
    folder = Path(env["ALLRANKS_RUN_DIR"]) / "attempts" / env["ALLRANKS_ATTEMPT"]
    append_event(folder / f"rank-{env['RANK']}.jsonl", event, **fields)


def is_worker() -> bool:
    """Whether this process was started by a rank's multiprocessing: its parent reports it."""
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
    """A traceback without allranks' own frames; all of it if no frame is the user's own code."""
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
    """The innermost line of the user's own code that a thread is at. Cheap: it reads no file."""
    while frame is not None:
        at = Frame(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        if at.is_own:
            return os.path.abspath(at.file), at.line, at.function
        frame = frame.f_back
    return None


def _inside(message: str) -> dict[str, Any] | None:
    """The exception whose traceback a message contains: a loader worker's, a spawned process's."""
    if "Traceback (most recent call last):" not in message:
        return None
    told = read_tracebacks(message)
    if not told:
        return None
    last = told[-1]
    more = message.splitlines()[last.last_line + 1 :]
    text = "\n".join([last.message, *more]).strip()
    frames = [_row(frame) for frame in last.frames]
    return {"type": last.type, "message": _bounded(text), "frames": frames}


def _places(frames: list[Frame]) -> dict[str, Any]:
    """Frames, and the line that is to blame, as an event holds them."""
    frames = [frame for frame in frames if not frame.is_ours] or frames
    place = place_of(frames)
    frames = [frame for _, same in groupby(frames) for frame in _few([*same])]
    if len(frames) > MAX_FRAMES:
        frames = [*frames[:OUTERMOST], _gone(frames[OUTERMOST:-INNERMOST]), *frames[-INNERMOST:]]
    return {
        "file": place.file if place else None,
        "line": place.line if place else None,
        "function": place.function if place else None,
        "frames": [_row(frame) for frame in frames],
    }


def _few(same: list[Frame]) -> list[Frame]:
    """A call that repeats over and over, shown once or twice."""
    return same if len(same) < 4 else [same[0], _gone(same[1:-1]), same[-1]]


def _gone(frames: Sequence[Frame]) -> Frame:
    """A placeholder for frames that are left out: their number."""
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
    except Exception:  # an exception class of the user's own
        return ""
    cut = _NATIVE_STACK.search(text)
    return text[: cut.start()] if cut and cut.start() > 0 else text


def _bounded(text: str) -> str:
    text = text.encode(errors="replace").decode()
    return text if len(text) <= MAX_MESSAGE else f"{text[:MAX_MESSAGE]}..."


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An exception and those that led to it, the last one first."""
    one: BaseException | None = error
    for _ in range(MAX_CHAIN):
        if one is None:
            return
        yield one
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)
