"""Text from files and nodes without what a terminal would obey. Pure; no torch."""

from __future__ import annotations

import re

# Sequences: CSI; OSC, DCS, SOS, PM and APC with what they carry; then all other escapes.
# U+0080 to U+009F are the same in one character.
ESCAPES = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]?"
    r"|(?:\x1b[\]PX^_]|[\x9d\x90\x98\x9e\x9f])[^\x07\x1b\x9c\n]*(?:\x07|\x1b\\|\x9c)?"
    r"|\x1b[ -/]*[0-~]?"
)
# All other control characters but tab and newline; and those that turn the direction of reading.
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def without_escapes(text: str) -> str:
    """Only the sequences are taken out: returns still tell what was drawn over."""
    return ESCAPES.sub("", text)


def plain(text: str) -> str:
    """Text of any number of lines without anything that a terminal would obey."""
    return CONTROL.sub("", without_escapes(text))


def clean(text: str) -> str:
    """The same for what must stay one line; tabs become spaces."""
    return plain(text.expandtabs(4)).replace("\n", "")


def last_state(line: bytes) -> bytes:
    """What a terminal leaves of a line that was drawn over itself, as progress bars are."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]
