"""What events.toml declares: the fields of each event, by which readers check what a rank wrote.

docs/reference/events.md is generated from it. A reader leaves out values of another type, and notes
them.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from allranks.run import files
from allranks.run.files import Check, is_count, is_integer, is_number, is_text, list_of, or_none


class Kind(NamedTuple):
    """A type: its name in the docs, and its check."""

    words: str
    check: Check


KINDS = {
    "text": Kind("text", is_text),
    "flag": Kind("true or false", files.is_flag),
    "count": Kind("count", is_count),
    "size": Kind("count", files.is_size),
    "positive": Kind("count", files.is_positive),
    "whole": Kind("number", is_integer),
    "number": Kind("number", is_number),
    "seconds": Kind("seconds", files.is_time),
    "phase": Kind("seconds", is_number),  # the difference of two clocks
    "time": Kind("UNIX time", files.is_time),
    "clock": Kind("UNIX time", is_number),  # by a host's clock, which may be wrong
    "bytes": Kind("bytes", is_number),
    "percent": Kind("percent", is_number),
    "watts": Kind("watts", is_number),
    "celsius": Kind("°C", is_number),
    "megahertz": Kind("MHz", is_number),
    "cpus": Kind("CPUs", is_number),
    "checksum": Kind("checksum", lambda value: is_text(value) or is_integer(value)),
    "state": Kind(
        "`finished`, `stopped` or `failed`", files.one_of("finished", "stopped", "failed")
    ),
    "certainty": Kind(
        "`measured`, `about` or `unknown`", files.one_of("measured", "about", "unknown")
    ),
    "counts": Kind("list of counts", lambda value: is_count(value) or list_of(is_count)(value)),
    "texts": Kind("list of texts", list_of(is_text)),
    "processes": Kind("list of process ids", list_of(is_count)),
    "list of seconds": Kind("list of seconds", list_of(is_number)),
    "list of lines": Kind("list of lines and seconds", list_of(files.row_of(is_text, is_number))),
    "sizes by line": Kind("list of lines and bytes", list_of(files.row_of(is_text, is_number))),
    "sizes by name": Kind("names and bytes", files.values_of(is_number)),
    "rates": Kind("bytes per second", files.values_of(is_number)),
    "texts by name": Kind("names and texts", files.values_of(is_text)),
    "numbers by name": Kind("names and numbers", files.values_of(or_none(is_number))),
    "place": Kind("file, line, function", files.row_of(is_text, is_integer, or_none(is_text))),
    "frames": Kind(
        "list of file, line, function, source",
        list_of(files.row_of(is_text, is_integer, is_text, is_text)),
    ),
    "error": Kind(
        "`what`, `fix`, `echo`, `stall`",
        files.mapping(
            {"what": is_text, "fix": is_text},
            dict.fromkeys(("echo", "stall", "own_ranks"), files.is_flag),
        ),
    ),
}


@dataclass(frozen=True, slots=True)
class Field:
    """One field of an event. `by`: who writes it, if not every writer of the event does."""

    kind: Kind
    meaning: str
    by: str = ""
    needed: bool = False  # an event without it is left out
    or_null: bool = False


@dataclass(frozen=True, slots=True)
class EventType:
    """One kind of event, who writes it, and how a reader checks it."""

    meaning: str
    by: str
    fields: dict[str, Field]
    checks: dict[str, Check]  # of its own fields, and of those that every event has
    needed: tuple[str, ...]


@cache
def declared() -> dict[str, EventType]:
    """The events by name; `common`: the fields that every event has."""
    text = Path(__file__).with_name("events.toml").read_text(encoding="utf-8")
    found: dict[str, EventType] = {}
    for name, said in tomllib.loads(text).items():
        fields = {
            field: Field(**{**row, "kind": KINDS[row["kind"]]})
            for field, row in said["fields"].items()
        }
        checks = {
            field: or_none(each.kind.check) if each.or_null else each.kind.check
            for field, each in fields.items()
        }
        needed = tuple(field for field, each in fields.items() if each.needed)
        if common := found.get("common"):
            checks, needed = common.checks | checks, common.needed + needed
        found[name] = EventType(said["meaning"], said["by"], fields, checks, needed)
    return found


def undeclared(event: dict[str, Any]) -> list[str]:
    """The fields of an event that are not declared, or have another type than declared."""
    kind = event.get("event")
    if kind not in declared():
        return [f"the event {kind!r}"]
    checks = declared()[kind].checks
    return [
        f"{name} = {value!r} of {kind}"
        for name, value in event.items()
        if name not in checks or not checks[name](value)
    ]
