"""The causes that the doctor knows: one readable file per family in causes/, read and checked.

Each cause in a family's file has

    slug, title      its permanent name, and one line. {field|otherwise} is filled from the log;
                     [a part with a {field}] is left out if the field is unknown
    given            fields of title and fix that a rule in Python works out; others are groups of
                     the patterns, or known of every finding (KNOWN)
    kind             root: explains a failure by itself; the first root found wins (the default)
                     soft: wrong, but does not end a run at once
                     generic: true of many failures; reported if nothing better is known
                     echo: what ranks print because another rank is in trouble; never a finding
                     mark: a fact that the reasoning needs; never a finding
    patterns         regular expressions, one of which must match a line; case is ignored.
                     Named groups are fields for title and fix; rank, node, pid say whose it is.
                     `- slurm: …` counts only where that speaker is heard (speakers.py)
    speaker          of all patterns that name none
    unless           expressions that must not match the line
    until            expressions of a later line that takes it back
    raised           tracebacks that show it: `exception` (type and message) and `within`, the files
                     and functions of its frames, as expressions
    where            comparisons of sizes that were captured: "unused + free >= tried and …"
    culprit          line (the default), none (the same for all ranks), or the number of a rank
    on_warning       true: a line that is only a warning counts too
    confidence       high (the default), medium, low
    unsure           expressions of lines that show it with medium confidence only
    explains         slugs of causes that follow from this one and are not reported with it
    cause, fix       what happened, and what to type or change
    fix_for          other fixes where more is known: task, lightning, slurm, accelerate, or what a
                     rule in Python finds out
    references       where to read more
    examples         lines that must be recognised: a test proves each"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from re import _parser  # type: ignore[attr-defined]
from typing import Any, Literal

import yaml

from allranks.doctor.finding import Confidence, Evidence, Finding

FOLDER = Path(__file__).parent / "causes"
Kind = Literal["root", "soft", "generic", "echo", "mark"]
# Escaped characters and those in brackets do not repeat anything.
_REPEAT = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|[*+]")
_AT_MOST = {"*": "{0,1000}", "+": "{1,1000}"}
_FIELD = re.compile(r"\{(\w+)\}")
# Fields that a finding may have without a line that shows them.
KNOWN = frozenset({"rank", "rank_word", "node", "job", "half_micro_batch", "lower_lr"})
# {field|otherwise}, or [a part that {field} is needed for]
_PLACE = re.compile(r"\{(?P<field>\w+)\|(?P<otherwise>[^{}]*)\}|\[(?P<part>[^][]*?\{\w+\}[^][]*)\]")


@dataclass(frozen=True, slots=True)
class Pattern:
    """A regular expression, and a word that every match contains."""

    word: str
    text: str
    speaker: str = ""  # the program that must have printed it; empty: no other program says this

    def search(self, line: str) -> re.Match[str] | None:
        return _compiled(self.text).search(line)

    def may_match(self, raw: str) -> bool:
        """Whether a line may match once its prefixes are removed: they matter to `^` alone."""
        return self.text.startswith("^") or self.search(raw) is not None


@dataclass(frozen=True, slots=True)
class Exceptional:
    """What a traceback must have: its exception, and one of its frames."""

    exception: str
    within: str

    def fits(self, text: str, frames: Sequence[str]) -> bool:
        within = _compiled(self.within)
        return _compiled(self.exception).search(text) is not None and any(
            within.search(frame) for frame in frames
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """One entry of a family's file."""

    slug: str
    family: str
    title: str
    kind: Kind = "root"
    patterns: tuple[Pattern, ...] = ()
    speaker: str = ""
    raised: tuple[Exceptional, ...] = ()
    unless: tuple[str, ...] = ()
    until: tuple[str, ...] = ()
    where: str = ""
    culprit: str | int = "line"
    on_warning: bool = False
    confidence: Confidence = "high"
    unsure: tuple[str, ...] = ()
    explains: tuple[str, ...] = ()
    cause: str = ""
    fix: str = ""
    fix_for: Mapping[str, str] = field(default_factory=dict)
    given: tuple[str, ...] = ()
    references: tuple[str, ...] = ()
    examples: tuple[str, ...] = ()

    @property
    def is_finding(self) -> bool:
        return self.kind in ("root", "soft", "generic")

    def match(self, line: str) -> dict[str, str] | None:
        """The fields of a line, from all patterns that match it; None if none does."""
        fields: dict[str, str] | None = None
        for pattern in self.patterns:
            found = pattern.search(line)
            if found is not None:
                new = {key: value for key, value in found.groupdict().items() if value is not None}
                fields = {**new, **(fields or {})}
        if fields is None or any(_compiled(text).search(line) for text in self.unless):
            return None
        return fields if not self.where or holds(self.where, fields) else None

    def speakers(self, line: str) -> frozenset[str]:
        """The programs that may have printed a matching line; empty if it is unmistakable."""
        found = {pattern.speaker for pattern in self.patterns if pattern.search(line) is not None}
        return frozenset() if "" in found else frozenset(found)

    def is_withdrawn(self, later: str) -> bool:
        """Whether what was printed after a line revokes it."""
        return any(_compiled(text).search(later) for text in self.until)

    def confidence_of(self, lines: Sequence[str]) -> Confidence:
        """How sure these lines make it: as sure as the surest of them."""
        told = [any(_compiled(text).search(line) for text in self.unsure) for line in lines]
        return "medium" if self.confidence == "high" and told and all(told) else self.confidence

    def words(self, fields: Mapping[str, Any]) -> str:
        return fill(self.title, fields)

    def advice(self, fields: Mapping[str, Any], situations: Sequence[str] = ()) -> str:
        """The fix for the first situation that has one of its own, or the general fix."""
        for situation in situations:
            if situation in self.fix_for:
                return fill(self.fix_for[situation], fields)
        return fill(self.fix, fields)


def fill(text: str, fields: Mapping[str, Any]) -> str:
    """`{port|the port}` becomes the field, or what is after the bar if it is unknown.

    `[: {path}]` is left out unless all its fields are known.
    """
    known = {key: str(value).strip() for key, value in fields.items() if value is not None}

    def filled(place: re.Match[str]) -> str:
        part = place["part"]
        if part is None:
            return known.get(place["field"]) or place["otherwise"]
        is_complete = all(known.get(field) for field in _FIELD.findall(part))
        return _FIELD.sub(lambda field: known[field[1]], part) if is_complete else ""

    return re.sub(r"\s+", " ", _PLACE.sub(filled, text)).strip()


def holds(where: str, fields: Mapping[str, str]) -> bool:
    """Whether a comparison such as `unused + free >= tried`, or all of several, are true."""
    pairs = [part.split(" >= ") for part in where.split(" and ")]
    try:
        return all(_sum(more, fields) >= _sum(less, fields) for more, less in pairs)
    except KeyError:
        return False


def _sum(text: str, fields: Mapping[str, str]) -> float:
    """The bytes of `2 * free + unused`. Raises KeyError if a field is not known, or is no size."""
    total = 0.0
    for part in text.split(" + "):
        factor, _, name = part.rpartition(" * ")
        match = re.fullmatch(r"([\d.]+)\s*([KMGT]?)i?(?:B|bytes)?", fields[name].strip())
        if match is None:
            raise KeyError(name)
        total += float(factor or 1) * float(match[1]) * 1024 ** " KMGT".index(match[2] or " ")
    return total


@cache
def _compiled(text: str) -> re.Pattern[str]:
    """Compiled when first needed: most patterns never are."""
    return re.compile(bounded(text), re.IGNORECASE)


def bounded(text: str) -> str:
    """A pattern whose `*` and `+` are limited, but enough for any line that people read.

    Without a limit, the time for a line of many kilobytes grows with the square of its length.
    """
    return _REPEAT.sub(lambda found: _AT_MOST.get(found[0], found[0]), text)


@cache
def load(folder: Path = FOLDER) -> Mapping[str, Cause]:
    """Every cause of every family, by its slug. Raises ValueError for a text with a gap."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return {
        entry["slug"]: _parse(entry, path.stem)
        for path in sorted(folder.glob("*.yaml"))
        for entry in yaml.load(path.read_text(), Loader=loader)
    }


def _parse(entry: Mapping[str, Any], family: str) -> Cause:
    """One entry of a family's file. Raises TypeError for an unknown key."""
    lists = {key: tuple(value) for key, value in entry.items() if isinstance(value, list)}
    texts = {key: " ".join(str(entry.get(key, "")).split()) for key in ("title", "cause", "fix")}
    speaker = entry.get("speaker", "")
    lists["patterns"] = tuple(_pattern(one, speaker) for one in lists.get("patterns", ()))
    lists["raised"] = tuple(Exceptional(**one) for one in lists.get("raised", ()))
    cause = Cause(**{"family": family, **entry, **lists, **texts})
    if unfilled := _unfilled(cause):
        names = ", ".join(sorted(unfilled))
        raise ValueError(f"nothing fills {names} in the title or fix of {cause.slug}")
    return cause


def _unfilled(cause: Cause) -> set[str]:
    """Fields of its texts that nothing fills, or whose braces would be shown as they are."""
    texts = "\n".join((cause.title, cause.fix, *cause.fix_for.values()))
    groups = (name for one in cause.patterns for name in re.findall(r"\(\?P<(\w+)>", one.text))
    needed = set(re.findall(r"\{(\w+)[|}]", texts))
    return needed - {*KNOWN, *cause.given, *groups} | set(_FIELD.findall(_PLACE.sub("", texts)))


def _pattern(one: str | Mapping[str, str], speaker: str) -> Pattern:
    """`expression`, or `speaker: expression`."""
    if not isinstance(one, str):
        [(speaker, one)] = one.items()
    return Pattern(required_word(one), one, speaker)


def known_findings() -> list[Cause]:
    """The causes that may become findings."""
    return [cause for cause in load().values() if cause.is_finding]


def as_json() -> list[dict[str, Any]]:
    """What `doctor --list --json` prints."""
    return [
        {
            "cause": cause.slug,
            "family": cause.family,
            "title": cause.words({}),
            "about": cause.cause,
            "fix": cause.advice({}),
            "references": list(cause.references),
        }
        for cause in known_findings()
    ]


def finding(
    slug: str, evidence: Sequence[Evidence], situations: Sequence[str] = (), **fields: str
) -> Finding:
    """A known cause as a finding that blames no rank."""
    cause = load()[slug]
    title, fix = cause.words(fields), cause.advice(fields, situations)
    return Finding(slug, title, fix, confidence=cause.confidence, evidence=tuple(evidence))


SHORTEST = 3  # characters; shorter words are in too many lines
LONG = 7  # from here on a word has four bytes at a multiple of four wherever it begins
# Roughly how common a character is in logs: the rarer, the better to search for.
_COMMON = {char: 12 - place // 3 for place, char in enumerate(" etaoinsrhldcumfpgwybvkxjqz")}
# Long, but in the lines of every healthy run.
_EVERYDAY = ("backend", "batch", "checkpoint", "collective", "connection", "loss", "network")
_EVERYDAY_TEXT = (
    f" {' '.join(_EVERYDAY)} process worker memory device loading forward optimizer gradient "
    "tensor warning info error step loss rank epoch data file model world "
)


def required_word(pattern: str) -> str:
    """The best run of plain characters that every match contains: long, then rare.

    What is in brackets or alternatives, or may be left out, does not count. Digits end a run: they
    differ from line to line.
    """
    runs = [""]
    for operation, value in _outside_groups(_parser.parse(pattern)):
        is_repeated = str(operation) == "MAX_REPEAT" and value[0] > 0  # at least once
        if is_repeated and len(value[2]) == 1:
            operation, value = value[2][0]
        char = chr(value) if str(operation) == "LITERAL" else ""
        if char and not char.isdigit():
            runs[-1] += char
        if is_repeated or not char or char.isdigit():
            runs.append("")
    words = [run for run in runs if len(run.strip()) >= SHORTEST]
    if not words:
        raise ValueError(f"no word of {SHORTEST} plain characters outside of groups in {pattern!r}")
    return max(words, key=_worth)


def _outside_groups(parsed: Iterable[tuple[Any, Any]]) -> Iterator[tuple[Any, Any]]:
    """The operations of an expression, with those of its plain groups, which repeat nothing."""
    for operation, value in parsed:
        if str(operation) == "SUBPATTERN":
            yield from _outside_groups(value[3])
        else:
            yield operation, value


def _worth(word: str) -> tuple[int, float]:
    is_everyday = any(word.strip().lower() in (each, f"{each}s") for each in _EVERYDAY)
    return 0 if is_everyday else min(len(word), 12), -commonness(word)


def commonness(word: str) -> float:
    """How common a word is in logs: the mean over its characters."""
    return sum(_COMMON.get(char, 4) for char in word.lower()) / len(word)


def window_cost(window: str) -> tuple[int, float]:
    """How bad a part of a word is to search for: how much of it occurs in everyday words."""
    grams = [window[start : start + 4].lower() for start in range(len(window) - 3)]
    return sum(gram in _EVERYDAY_TEXT for gram in grams), commonness(window)
