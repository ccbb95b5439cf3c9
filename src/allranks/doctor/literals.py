"""The words that a line must hold for a pattern to match it: what the fast search looks for."""

from __future__ import annotations

SHORTEST = 3  # characters; shorter words are in too many lines
LONG = 7  # from here on a word has four bytes at a multiple of four wherever it begins
# How common a character is in logs, roughly: the rarer the better to search for.
_COMMON = {char: 12 - place // 3 for place, char in enumerate(" etaoinsrhldcumfpgwybvkxjqz")}
# Long, and in the lines of every healthy run all the same.
_EVERYDAY = {"checkpoint", "collective", "network", "connection", "batch", "world", "backend"}
_EVERYDAY_TEXT = f" {' '.join(sorted(_EVERYDAY))} process worker memory device loading forward "
_EVERYDAY_TEXT += (
    "optimizer gradient tensor warning info error step loss rank epoch data file model "
)
_REPEATED = set("*+?{")


class NoWord(ValueError):
    """A pattern without a word of its own."""


def required_word(pattern: str) -> str:
    """The best run of plain characters that every match contains: long, then rare.

    Only the top level counts: not what is in groups, brackets or alternatives, nor a character
    that may be repeated or left out. Digits end a run: they differ from line to line.
    """
    runs, current, index = [], "", 0
    while index < len(pattern):
        plain, length = _next(pattern, index)
        after = pattern[index + length : index + length + 1]
        if plain is None or plain.isdigit() or after in _REPEATED:
            if after == "+" and plain is not None:
                current += plain
            runs.append(current)
            current = ""
        else:
            current += plain
        index += length
    runs.append(current)
    words = [run for run in runs if len(run.strip()) >= SHORTEST]
    if not words:
        raise NoWord(f"no word of {SHORTEST} plain characters outside of groups in {pattern!r}")
    return max(words, key=_worth)


def _worth(word: str) -> tuple[int, float]:
    is_everyday = any(word.strip().lower() in (each, f"{each}s") for each in _EVERYDAY)
    return SHORTEST if is_everyday else min(len(word), 12), -commonness(word)


def _next(pattern: str, index: int) -> tuple[str | None, int]:
    """The plain character at a place (None if there is none), and how long its spelling is."""
    char = pattern[index]
    if char == "\\":
        escaped = pattern[index + 1]
        return (None if escaped.isalnum() else escaped), 2
    if char == "[":
        # A bracket that comes first is a character.
        end = index + (3 if pattern[index + 1] == "^" else 2)
        while pattern[end - 1] == "\\" or pattern[end] != "]":
            end += 1
        return None, end + 1 - index
    if char == "(":
        return None, _group_end(pattern, index) - index
    if char == "|":
        raise NoWord(f"alternatives at the top level of {pattern!r}: write several patterns")
    if char == "{":
        return None, pattern.index("}", index) + 1 - index
    if char in ".^$*+?":
        return None, 1
    return char, 1


def _group_end(pattern: str, index: int) -> int:
    depth, place = 0, index
    while place < len(pattern):
        char = pattern[place]
        if char == "\\":
            place += 2
            continue
        if char == "[":
            place += _next(pattern, place)[1]
            continue
        depth += (char == "(") - (char == ")")
        place += 1
        if depth == 0:
            return place
    raise NoWord(f"a group of {pattern!r} does not end")


def commonness(word: str) -> float:
    """How many lines have it, as a rank: the mean over its characters."""
    return sum(_COMMON.get(char, 4) for char in word.lower()) / len(word)


def window_cost(window: str) -> tuple[int, float]:
    """How bad a part of a word is to search for: how much of it is in everyday words."""
    grams = [window[start : start + 4].lower() for start in range(len(window) - 3)]
    return sum(gram in _EVERYDAY_TEXT for gram in grams), commonness(window)
