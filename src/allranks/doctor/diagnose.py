"""The diagnosis of logs: read, put together, judged."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

from allranks.doctor.catalogue import Catalogue, load
from allranks.doctor.facts import gather
from allranks.doctor.finding import Finding
from allranks.doctor.judge import judge, shown_path
from allranks.doctor.scan import Scanned, Source, Words, scan


def diagnose_logs(paths: Sequence[Path]) -> list[Finding]:
    """What is wrong, by log files from anywhere; all of them are of one run."""
    catalogue = load()
    return judge(gather(read_logs([source_of(path) for path in paths])), catalogue)


def read_logs(sources: Sequence[Source]) -> list[Scanned]:
    return [scan(source, words()) for source in sources]


@cache
def words() -> Words:
    return Words(list(_catalogue().causes.values()))


def _catalogue() -> Catalogue:
    return load()


def source_of(path: Path) -> Source:
    """A file, with the rank that its name may say."""
    return Source(path, shown_path(path), rank_in_name(path))


def rank_in_name(path: Path) -> int | None:
    """rank-3.log, rank3.out, rank_3.txt: one rank's own."""
    import re

    match = re.fullmatch(r"(?:.*[._-])?rank[-_]?(\d+)(?:[._-]\w+)*", path.name)
    if match is None:  # torchrun --log-dir: attempt_0/3/stderr.log
        match = re.search(r"attempt_\d+/(\d+)/std(?:err|out)\.log$", str(path))
    return int(match[1]) if match is not None else None
