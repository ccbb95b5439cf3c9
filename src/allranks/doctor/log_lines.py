"""Whose line is it? Rank, node and level of a line, in all the ways that logs have to say so."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from allranks.run import files
from allranks.show.text import plain, without_escapes

MOST_PREFIXES = 4
# What launchers put before each line; there may be several.
_PREFIXES = (
    re.compile(r"\[rank[: =]{0,2}(?P<rank>\d+)\]:? ?"),  # torch, after init_process_group
    re.compile(r"\[(?P<role>[a-z_]\w*?)(?P<local>\d+)\]:"),  # torchrun --tee: role and local rank
    re.compile(r"\[(?P<rank>\d{1,4})\] (?!NCCL)"),  # allranks logs
    re.compile(r"\s{0,4}(?P<rank>\d{1,5}): "),  # srun --label
    re.compile(r"rank-?(?P<rank>\d+)[:|] "),
    # What collected the log: a time stamp, Ray, docker compose, kubectl, journalctl, a quote.
    re.compile(
        r"\[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d(?::\d\d)?(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?\]?[ \t]"
    ),
    re.compile(r"\((?:\w+ )?pid=\d+(?:, ip=[\d.]+)?\) "),
    re.compile(r"[\w.-]+-\d+ +\| "),
    re.compile(r"\[pod/\S+\] "),
    re.compile(r"[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \S+ [\w./-]+(?:\[\d+\])?: "),
    re.compile(r"> "),
)
_IN_LINE = (
    re.compile(r"\[(?:PG [^\][]*?)?Rank (?P<rank>\d+)\]"),  # ProcessGroupNCCL
    re.compile(r"^\[Rank (?P<rank>\d+)\]"),
    re.compile(r"\(RANK (?P<rank>\d+)\)"),  # a CheckpointException's parts
    re.compile(r"^(?:error: )?rank (?P<rank>\d+)[ :]"),
)
_BEGUN = re.compile(r"(?<=[^\s:\d])\s*(?:\[rank\d+\]: ?)?Traceback \(most recent call last\):")
_NCCL = re.compile(r"(?:^|[\] ])(?P<node>[\w.-]+):(?P<pid>\d+):\d+ \[-?\d+\] ")
_SLURMSTEPD = re.compile(r"slurmstepd-(?P<node>[\w.-]+): ")
_WARNING = re.compile(
    r"""^\[?W\d{4}[ ]\d\d:  # torch's own
    | \bWARN(?:ING)?\b(?!.*\bERROR\b) | \w*Warning: | \bINFO\b | \bDEBUG\b | ^\s*warnings\.warn
    """,
    re.VERBOSE,
)
_ERROR = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception|Interrupt|Exit)\b(?:: |$)")
# Looks like a rank's number but is the index in torchrun's list of failures.
_NO_RANK = re.compile(r"\[\d+\]:\s*$")


@dataclass(frozen=True, slots=True)
class Line:
    """A line without its prefixes, and what they say."""

    text: str
    rank: int | None = None
    node: str | None = None
    pid: int | None = None
    local_rank: int | None = None
    is_warning: bool = False
    is_prefixed: bool = False  # every line of that rank has it


def parse(raw: str) -> Line:
    """Split a line into its text and what it says about its origin."""
    text = without_escapes(raw)
    if "\r" in text:  # a progress bar overwrites itself: only the last version was seen
        text = text.rstrip("\r").rpartition("\r")[2]
    text = plain(text)
    if (begun := _BEGUN.search(text)) is not None:  # after a progress bar that has no line end
        text = text[begun.start() :].lstrip()
    text, rank, local = _without_prefixes(text)
    is_prefixed = rank is not None
    if rank is None:
        found = next((m for one in _IN_LINE if (m := one.search(text))), None)
        rank = int(found["rank"]) if found else None
    node, pid = None, None
    if (nccl := _NCCL.search(text)) is not None and "NCCL" in text:
        node, pid = nccl["node"], int(nccl["pid"])
    elif (step := _SLURMSTEPD.search(text)) is not None:
        node = step["node"]
    return Line(text, rank, node, pid, local, _is_warning(text), is_prefixed)


def _without_prefixes(text: str) -> tuple[str, int | None, int | None]:
    """The text without its prefixes, and the rank and local rank in them."""
    rank: int | None = None
    local: int | None = None
    for _ in range(MOST_PREFIXES):
        found = (match for prefix in _PREFIXES if (match := prefix.match(text)) is not None)
        match = None if _NO_RANK.match(text) else next(found, None)
        if match is None:
            break
        groups = match.groupdict()
        if groups.get("rank") is not None:
            rank = int(groups["rank"])
        elif groups.get("local") is not None:
            local = int(groups["local"])
        text = text[match.end() :]
    return text, rank, local


def _is_warning(text: str) -> bool:
    if _ERROR.match(text) or "NCCL WARN" in text:  # NCCL's warnings are its errors
        return False
    return _WARNING.search(text[:200]) is not None


def num_lines(path: Path) -> int:
    """How many lines a file has; 0 if it cannot be read."""
    try:
        with files.open_file(path) as file:
            return sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))
    except OSError:
        return 0
