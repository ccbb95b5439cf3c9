"""A rank's events in words, for people who see one as evidence."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from allranks.run.tracebacks import in_a_line
from allranks.show.numbers import duration, size

Event = Mapping[str, Any]


def event_in_words(line: str) -> str:
    """What one line of a rank's events says; the line itself if it is not a whole event."""
    try:
        event = json.loads(line)
        say = _SAY.get(event["event"])
        return say(event) if say is not None else _others(event)
    except (ValueError, KeyError, TypeError, AttributeError):
        return line


def _step(event: Event) -> str:
    values = {key: _number(event, key) for key in ("loss", "grad_norm") if key in event}
    values |= {key: f"{value} (not a number)" for key, value in _odd(event).items()}
    words = [f"{key} {value}" for key, value in values.items()]
    if not words:
        words = [f"took {duration(event['seconds'])}"]
    return f"step {event['step']}: {', '.join(words)}"


def _nonfinite(event: Event) -> str:
    return f"step {event['step']}: the rank's own loss is {event['loss']}, for the first time"


def _metric(event: Event) -> str:
    return f"step {event['step']}: {event['name']} {_number(event, 'value')}"


def _device(event: Event) -> str:
    words = []
    if event.get("doing"):
        words.append(f"at {event['doing']} for {duration(event['doing_seconds'])}")
    if isinstance(event.get("host_memory"), int):
        words.append(f"host memory up to {size(event['host_memory'])} so far")
    if isinstance(event.get("memory"), int):
        words.append(f"GPU memory {size(event['memory'])}")
    step = f"step {event['step']}: " if "step" in event else ""
    return step + (", ".join(words) or "alive")


def _checkpoint(event: Event) -> str:
    return f"step {event['step']}: a checkpoint was committed after {duration(event['seconds'])}"


def _start(event: Event) -> str:
    return f"rank {event['rank']} of {event['world_size']} started on {event['host']}"


def _end(event: Event) -> str:
    how = [f"by {event['signal']}"] if event.get("signal") else []
    if not how and event.get("exit") is not None:
        how = [f"with exit code {event['exit']}"]
    text = " ".join([f"the rank's end: {event['state']}", *how])
    error = event.get("error") or {}
    return f"{text}: {error['what']}" if error.get("what") else text


def _error(event: Event) -> str:
    """An error as failures report it; a rank that only exited has no message."""
    return f"what ended it: {in_a_line(dict(event)) or event.get('signal')}"


def _others(event: Event) -> str:
    said = {key: value for key, value in event.items() if key not in ("v", "t", "event")}
    words = [f"{key} {value}" for key, value in said.items() if not isinstance(value, dict | list)]
    return f"{event['event']}: {', '.join(words)}" if words else str(event["event"])


def _odd(event: Event) -> dict[str, str]:
    """Numbers that JSON cannot hold, by name."""
    named = event.get("nonfinite")
    return {str(key): str(value) for key, value in named.items()} if named else {}


def _number(event: Event, key: str) -> str:
    value = event.get(key)
    return _odd(event).get(key, str(value)) if value is None else f"{value:.6g}"


_SAY: Mapping[str, Callable[[Event], str]] = {
    "step": _step,
    "nonfinite": _nonfinite,
    "metric": _metric,
    "device": _device,
    "checkpoint": _checkpoint,
    "start": _start,
    "end": _end,
    "error": _error,
}
