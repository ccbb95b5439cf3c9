"""Text from files and nodes made safe: a terminal or a page obeys nothing in it."""

from __future__ import annotations

import html
import re

# Sequences: CSI; OSC, DCS, SOS, PM and APC with what they carry; then all other escapes.
# U+0080 to U+009F are the same in one character.
ESCAPES = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]?"
    r"|(?:\x1b[\]PX^_]|[\x9d\x90\x98\x9e\x9f])[^\x07\x1b\x9c\n]*(?:\x07|\x1b\\|\x9c)?"
    r"|\x1b[ -/]*[0-~]?"
)
# All other control characters except tab and newline, and those that change the direction.
CONTROL = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069]"
)
NO_TEXT = re.compile(r"[\ud800-\udfff]")  # bytes of a file's name that are not UTF-8
COLOURS = re.compile(r"(\x1b\[[0-9;:]{0,64}m)")
NO_CODE = re.compile("[`<>]")
MARKED_UP = re.compile(r"([\\`*\[\]|#~]|(?<!\w)_|_(?!\w))")


def without_escapes(text: str) -> str:
    """Text without escape sequences; carriage returns stay, for `last_state`."""
    return ESCAPES.sub("", text)


def plain(text: str) -> str:
    """Text of any number of lines without anything that a terminal would obey."""
    return NO_TEXT.sub("\ufffd", CONTROL.sub("", without_escapes(text)))


def clean(text: str) -> str:
    """One line without anything that a terminal would obey; tabs become spaces."""
    return plain(text.expandtabs(4)).replace("\n", "")


def printable(text: str) -> str:
    """A file's name with odd characters replaced, not removed, so that they stay visible."""
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in text)


def coloured(line: str) -> str:
    """A line of a log for a terminal: plain except for its colours, which end with the line."""
    *pairs, last = COLOURS.split(line)
    if not pairs:
        return plain(line)
    text = "".join(part if at % 2 else plain(part) for at, part in enumerate([*pairs, last]))
    return f"{text}\x1b[0m"


def in_markdown(text: str) -> str:
    """One line that Markdown shows as it is, even in a table."""
    return MARKED_UP.sub(r"\\\1", html.escape(clean(text), quote=False))


def as_code(text: str) -> str:
    """One line as code in Markdown, without backticks and tags."""
    return f"`{NO_CODE.sub(chr(0xFFFD), clean(text))}`"


def last_state(line: bytes) -> bytes:
    """What a terminal shows of a line that was drawn over itself, as progress bars are."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]


def shortened(name: str, width: int) -> str:
    """A run's name without its middle if it is too long: its ends identify it."""
    if len(name) <= width or width < 8:
        return name[:width]
    tail = min(11, width // 2)  # of the time and the four digits after it
    return f"{name[: width - tail - 1]}…{name[-tail:]}"
