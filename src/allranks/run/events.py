"""A rank's events: JSON lines, only ever appended to, that can be read while they are written.

events.toml declares the fields of each.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol

from allranks.errors import disk_error
from allranks.run import files
from allranks.run.event_schema import declared

SCHEMA_VERSION = 1
FLUSH_SECONDS = 0.5
# The writing thread holds Python's lock, so it releases it every few lines. Half a second's lines
# in one go would delay a step by milliseconds, and with it those of all other ranks.
LINES_AT_ONCE, BREATH_SECONDS = 10, 0.0002
MAX_LINE_BYTES = 1 << 20  # of an event; the longest traceback takes a hundredth of it


def _encoder() -> Callable[[Mapping[str, Any]], str]:
    """JSON on one line, by one encoder: json.dumps makes a new one each time, which is slow."""
    encoder = json.JSONEncoder(separators=(",", ":"), allow_nan=False)
    make: Any = getattr(json.encoder, "c_make_encoder", None)
    if make is None:
        return encoder.encode
    # Arguments: markers, default, string encoder, indent, separators, sort, skip, allow_nan.
    text = json.encoder.encode_basestring_ascii
    chunks = make(None, encoder.default, text, None, ":", ",", False, False, False)
    return lambda value: "".join(chunks(value, 0))


_encode = _encoder()


class Late(Protocol):
    """A `loss` that is still being computed or reduced when its event is recorded."""

    def ready(self) -> bool: ...
    def value(self) -> float | None: ...


class LateFields(Protocol):
    """The `phases` of a step that a device may not have finished: more fields of its event."""

    def ready(self) -> bool: ...
    def text(self) -> str: ...  # as JSON, without braces


WhatIsLate = Literal["hold", "wait", "drop"]  # hold it back, wait for it, or write without it


class EventLog:
    """Buffers events and writes them twice a second from a thread of its own.

    Recording an event costs one append: training never waits for formatting or for the file. An
    event with a `Late` value is held back, with those after it, until the value is there. `more`
    returns further lines to write, each time.
    """

    def __init__(
        self, path: Path, more: Callable[[WhatIsLate], Iterable[str]] | None = None
    ) -> None:
        self.path = path
        self._more = more
        self.error: OSError | None = None
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._buffer: list[dict[str, Any]] = []
        # For events that already have `v`, `t` and `event`: cheaper than `write`.
        self.append = self._buffer.append
        self._unwritten = b""
        self._writing = threading.Lock()
        self._closing = threading.Event()
        self._paused = False
        self._thread = threading.Thread(target=self._run, name="events", daemon=True)
        self._thread.start()

    def write(self, event: str, **fields: Any) -> None:
        """Record one event. Cheap; raises nothing."""
        self._buffer.append({"v": SCHEMA_VERSION, "t": time.time(), "event": event, **fields})

    def pause(self, paused: bool) -> None:
        """Keep the thread away from the device, or not; returns once that holds."""
        with self._writing:
            self._paused = paused

    def write_past(self, event: str, **fields: Any) -> None:
        """Write one event now, before those that are held back: it shows that the rank is alive."""
        record = {"v": SCHEMA_VERSION, "t": time.time(), "event": event, **fields}
        with self._writing:
            self._unwritten += format_event(record).encode()
            self._write()

    def flush(self, late: WhatIsLate = "hold", *, last_step: float = math.inf) -> None:
        """Write the events so far, up to `last_step`."""
        with self._writing:
            lines: list[str] = []
            more = () if self._more is None else self._more(late)
            for line in itertools.chain(more, self._known(late, last_step)):
                lines.append(line)
                if late == "hold" and len(lines) % LINES_AT_ONCE == 0:
                    time.sleep(BREATH_SECONDS)
            self._unwritten += "".join(lines).encode()
            self._write()

    def _known(self, late: WhatIsLate, last_step: float) -> Iterator[str]:
        """The lines of the events so far, up to the first that has to be waited for."""
        count = 0
        for event in list(self._buffer):  # others follow meanwhile
            if event.get("step", 0) > last_step:
                break
            loss: Any = event.get("loss")
            is_late = hasattr(loss, "ready")
            phases: LateFields | None = event.get("phases")
            if late == "hold" and (
                (is_late and not loss.ready()) or (phases and not is_ready(phases))
            ):
                break
            if is_late:
                _settle(event, loss, wait=late == "wait")
            yield format_event(event) if phases is None else _with_fields(event, late)
            count += 1
        del self._buffer[:count]

    def _write(self) -> None:
        try:
            while self._unwritten:
                written = os.write(self._file, self._unwritten)
                self._unwritten = self._unwritten[written:]
        except OSError as error:  # the next flush tries the rest again
            self.error = error

    def check(self) -> None:
        """Raise if an earlier write failed, for example on a full disk."""
        if self.error is not None:
            raise disk_error(self.error, self.path)

    def close(self) -> None:
        """Write everything and stop the thread; further events are lost."""
        self._closing.set()
        self._thread.join()
        self.flush("wait")
        os.close(self._file)

    def _run(self) -> None:
        while not self._closing.wait(FLUSH_SECONDS):
            with contextlib.suppress(Exception):  # the device is lost: later events may be complete
                if not self._paused:
                    self.flush()


def format_event(event: Mapping[str, Any]) -> str:
    """One line. A number that JSON does not have is null, and named in `nonfinite`."""
    try:
        return _encode(event) + "\n"
    except ValueError:
        bad = {k: v for k, v in event.items() if isinstance(v, float) and not math.isfinite(v)}
        names = {"nonfinite": {key: str(value) for key, value in bad.items()}} if bad else {}
        return to_json({**event, **names}, separators=(",", ":")) + "\n"


def to_json(value: Any, **options: Any) -> str:
    """Strict JSON: nan and inf become null, at any depth."""
    return json.dumps(_finite(value), allow_nan=False, **options)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def read_events(
    path: Path,
    most: int | None = None,
    *,
    last: int | None = None,
    kind: str = "",
    word: bytes = b"",
) -> Iterator[dict[str, Any]]:
    """The events of a file, checked; `most`, `last`: only those in its first or last bytes.

    A torn line (of a killed rank) is skipped; a missing file has no events. With `word` only lines
    that contain it are parsed, with `kind` only events of that name: finding a rare one is cheap.
    """
    word = word or (f'"{kind}"'.encode() if kind else b"")
    try:
        with files.open_file(path) as file:
            if last is not None and file.seek(0, os.SEEK_END) > last:
                file.seek(-last, os.SEEK_END)
                file.readline()  # probably cut
            elif last is not None:
                file.seek(0)
            for line in _lines(file, most):
                event = parse_line(line, path) if word in line else None
                if event is not None and kind in ("", event["event"]):
                    yield event
    except FileNotFoundError:
        return
    except OSError as error:  # not readable, or a disk that does not answer
        files.note(path, error.strerror or str(error))


def _lines(file: BinaryIO, most: int | None) -> Iterator[bytes]:
    """Lines, without those longer than an event can be."""
    is_cut = False
    while line := file.readline(MAX_LINE_BYTES):
        if not is_cut:
            yield line
        is_cut = len(line) == MAX_LINE_BYTES and not line.endswith(b"\n")
        if most is not None and file.tell() >= most:
            return


def read_last_events(
    path: Path, num_bytes: int = 16384, *, kind: str = "", word: bytes = b""
) -> list[dict[str, Any]]:
    """The events in the last bytes of a file, in the same time for a file of any size."""
    return [*read_events(path, last=num_bytes, kind=kind, word=word)]


def append_event(path: Path, event: str, **fields: Any) -> None:
    """Add one event to the file of a rank that can no longer write it itself."""
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {"v": SCHEMA_VERSION, "t": time.time(), "event": event, **fields}
    with path.open("ab+") as file:
        if file.tell() > 0:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")  # ends the torn line, so that this one can be read
        file.write(format_event(record).encode())


def is_ready(fields: LateFields) -> bool:
    """Whether the fields are known, or never will be: a device was lost."""
    try:
        return fields.ready()
    except Exception:
        return True


def _settle(event: dict[str, Any], loss: Late, *, wait: bool) -> None:
    """Put a late loss into its event, or remove the field if it will never come."""
    value = None
    # Even if a lost peer made the reduction fail, the events after this one must be written.
    with contextlib.suppress(Exception):
        value = loss.value() if wait or loss.ready() else None
    if value is None:
        del event["loss"]
    else:
        event["loss"] = value


def _with_fields(event: dict[str, Any], late: str) -> str:
    """The line of an event with late fields; without them if they will never come."""
    fields: LateFields = event.pop("phases")
    text = ""
    with contextlib.suppress(Exception):
        text = fields.text() if late == "wait" or fields.ready() else ""
    if not text:
        return format_event(event)
    event.pop("seconds", None)  # by the host's clock: only for want of a better one
    return f"{format_event(event)[:-2]},{text}}}\n"


# --- Parsing -------------------------------------------------------------------------------------

_TORN = b'{"v":'  # how every event begins, even one that was cut off


def parse_line(line: bytes, path: Path) -> dict[str, Any] | None:
    """The event on a line of a file, checked; None if the line is not an event."""
    try:
        event = files.parse_json(line)
    except ValueError:
        if not line.startswith(_TORN) and not _TORN.startswith(line.strip()):
            files.note(path, "it has a line that is not an event")
        return None
    return check_event(event, path)


def check_event(event: Any, path: Path) -> dict[str, Any] | None:
    """An event without fields of a wrong type; None if it lacks a field that it needs.

    Either is noted, with the event's file. Of an event that is not declared (a later version's)
    only the name and the time are kept.
    """
    if not isinstance(event, dict) or not isinstance(event.get("event"), str):
        files.note(path, "it has a line that is not an event")
        return None
    kind = event["event"]
    known = declared()
    if kind not in known:
        event = {name: event[name] for name in known["common"].fields if name in event}
    rules = known.get(kind, known["common"])
    found = files.checked(event, rules.checks, path)
    for name in rules.needed:
        if found.get(name) is None:
            files.note(path, f"a {kind[:40]} event has no {name}")
            return None
    return found
