"""A path that a rank did not find, and which nodes of its run have it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

# How Python, allranks and SLURM say that there is no such file.
_PATTERNS = tuple(
    re.compile(pattern)
    for pattern in (
        r"FileNotFoundError: (?:\[Errno 2\] )?No such file or directory: b?(['\"])(?P<path>.+?)\1",
        r"can't open file '(?P<path>.+?)': \[Errno 2\]",
        r"cannot run (?P<path>\S+): No such file or directory",
        r"stage: cannot read (?P<path>.+?): No such file or directory",
        r"[Uu]nable to (?:synchronously )?open file \(.*name = '(?P<path>.+?)', errno = 2",
        r"execve\(\): (?P<path>\S+): No such file or directory",
        r"(?P<path>/\S+): No such file or directory",
    )
)
LAST_LINES = 20  # which hold the reason for an end


def missing_path(lines: Iterable[str]) -> str | None:
    """The path that a rank did not find, by its last output; None if that is not why it ended."""
    last = [line for line in lines if line.strip()][-LAST_LINES:]
    for line in reversed(last):
        for pattern in _PATTERNS:
            if match := pattern.search(line):
                return match["path"]
    return None


def found_on(path: str, nodes: Mapping[str, bool], attempt: int) -> dict[str, Any] | None:
    """What run.json records about a path; None if every node has it."""
    if all(nodes.values()):
        return None
    return {
        "attempt": attempt,
        "path": path,
        "on": [node for node, has in nodes.items() if has],
        "not_on": [node for node, has in nodes.items() if not has],
    }


def in_words(found: Mapping[str, Any], *, is_task: bool = False) -> tuple[str, str]:
    """What is wrong, and the fix."""
    path, name = found["path"], os.path.basename(found["path"])
    absent = ", ".join(found["not_on"])
    if not found["on"]:
        return f"{path} is on none of the nodes ({absent})", "correct the path, or put it there"
    how = f"stage: [SHARED/{name}] and {{stage}}/{name} in the command"
    if is_task:
        how = "data.stage: local"
    return (
        f"{path} is on {', '.join(found['on'])} but not on {absent}",
        "put it on a disk that all nodes see, and use that path; to have it on each node's own "
        f"disk, let allranks copy it from there with {how}",
    )
