"""Reads and writes SLURM's short form of many node names, without asking SLURM."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence

from allranks.errors import AllranksError

MOST_NODES = 100_000  # more is a typing error, not a cluster

_PART = re.compile(r"\[([^\[\]]*)\]|([A-Za-z0-9._-]+)")
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")
_NUMBERED = re.compile(r"(.*?)([0-9]{1,18})([^0-9]*)")
_NAME = re.compile(r"[A-Za-z0-9._-]+")


def expand(text: str) -> list[str]:
    """`a[1-2,07],login` as ['a1', 'a2', 'a07', 'login'], in the order of the text.

    A range is padded with zeros to the width of its first number. With several brackets the last
    one varies fastest, as in SLURM.
    """
    names: list[str] = []
    for item in _items(text):
        names += _names(item, text, MOST_NODES - len(names))
    return names


def compress(names: Sequence[str]) -> str:
    """The short form of these names, for people and for SLURM; `expand` returns the same list.

    Only neighbours are joined: sort the names first for the shortest text.
    """
    for name in names:
        if not _NAME.fullmatch(name):
            raise _wrong(f"{name!r} is not the name of a node")
    items = []
    # Names without a number are never joined, not even with numbered ones: gpu, gpu1.
    for (prefix, suffix, is_plain), group in itertools.groupby(
        map(_split, names), lambda parts: (parts[0], parts[2], parts[1] == "")
    ):
        numbers = [number for _, number, _ in group]
        if is_plain:
            items += [prefix] * len(numbers)
        elif len(numbers) == 1:
            items.append(f"{prefix}{numbers[0]}{suffix}")
        else:
            items.append(f"{prefix}[{','.join(_ranges(numbers))}]{suffix}")
    return ",".join(items)


def _wrong(what: str) -> AllranksError:
    return AllranksError(what, fix="write node names like a1, a[1-3,07] or a[1-2]b[3-4],login")


def _items(text: str) -> Iterator[str]:
    """The text split at the commas outside brackets."""
    text = text.strip()
    if not text:
        return
    start = depth = 0
    for place, letter in enumerate(text):
        depth += {"[": 1, "]": -1}.get(letter, 0)
        if not 0 <= depth <= 1:
            raise _wrong(f"node list {text!r}: bracket at character {place + 1} does not match")
        if letter == "," and depth == 0:
            yield text[start:place]
            start = place + 1
    if depth:
        raise _wrong(f"node list {text!r}: a bracket is not closed")
    yield text[start:]


def _names(item: str, text: str, most: int) -> list[str]:
    """All names of one item, such as a[1-2]b[3-4]."""
    parts: list[list[str]] = []
    end = 0
    for match in _PART.finditer(item):
        if match.start() != end:
            break
        end = match.end()
        parts.append([match[2]] if match[2] else _numbers(match[1], text, most))
    if end != len(item) or not item:
        raise _wrong(f"node list {text!r}: {item!r} is not the name of a node")
    count = 1
    for part in parts:
        count *= len(part)
    if count > most:
        raise _wrong(f"node list {text!r} has more than {MOST_NODES} names")
    return ["".join(words) for words in itertools.product(*parts)]


def _numbers(inside: str, text: str, most: int) -> list[str]:
    """The numbers inside a pair of brackets: '1-3,07' is 1, 2, 3, 07."""
    numbers: list[str] = []
    for piece in inside.split(","):
        match = _RANGE.fullmatch(piece)
        if match is None:
            raise _wrong(f"node list {text!r}: [{inside}] is not a list of numbers and ranges")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise _wrong(f"node list {text!r}: range {piece} ends before it starts")
        if len(numbers) + last - first >= most:
            raise _wrong(f"node list {text!r} has more than {MOST_NODES} names")
        numbers += [f"{number:0{len(match[1])}d}" for number in range(first, last + 1)]
    return numbers


def _split(name: str) -> tuple[str, str, str]:
    """The name's last number, empty if it has none, and what is before and after it."""
    match = _NUMBERED.fullmatch(name)
    return (match[1], match[2], match[3]) if match else (name, "", "")


def _ranges(numbers: Sequence[str]) -> Iterator[str]:
    first = last = numbers[0]
    for number in [*numbers[1:], ""]:
        if number and number == f"{int(last) + 1:0{len(first)}d}":
            last = number
            continue
        yield first if first == last else f"{first}-{last}"
        first = last = number
