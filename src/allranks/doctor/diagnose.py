"""The diagnosis of logs: read, put together, judged."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from allranks.doctor.catalogue import load
from allranks.doctor.facts import gather
from allranks.doctor.finding import Finding
from allranks.doctor.flight import flight_source, is_dump
from allranks.doctor.judge import judge, shown_path
from allranks.doctor.run_evidence import error_file
from allranks.doctor.scan import Scanned, Source, Words, scan
from allranks.errors import AllranksError

LOGS = ("*.log", "*.out", "*.err", "*.txt", "*.log.gz", "error.json", "*trace_rank_*")
MAX_FILES = 10_000
_NAMED_RANK = re.compile(r"(?:.*[._-])?rank[-_]?(\d+)(?:[._-]\w+)*")
_LOG_DIR = re.compile(r"attempt_\d+/(\d+)/std(?:err|out)\.log$")  # torchrun --log-dir
_ERROR_FILE = re.compile(r"error_file: (?P<path>/\S+)")


def diagnose_logs(paths: Sequence[Path]) -> list[Finding]:
    """What is wrong, by log files from anywhere; all of them are of one run."""
    scanned = read_logs([source for path in paths if (source := source_of(path))])
    unread = [one for one in scanned if one.problem]
    if unread and len(unread) == len(scanned):
        raise AllranksError(
            f"{unread[0].source.name} {unread[0].problem}", fix="name a log file that can be read"
        )
    return judge(gather(scanned), load())


def log_files(path: Path) -> list[Path]:
    """A file itself; of a folder, everything in it that looks like a log."""
    if not path.is_dir():
        return [path]
    root = path.resolve()
    # A link in the folder does not lead out of it.
    found = sorted(
        {
            file
            for form in LOGS
            for file in path.rglob(form)
            if file.is_file() and file.resolve().is_relative_to(root)
        }
    )
    if not found:
        raise AllranksError(
            f"{path} has no run.json and no logs ({', '.join(LOGS)})",
            fix="name a run folder, a folder of logs, or log files",
        )
    return found[:MAX_FILES]


def read_logs(sources: Sequence[Source]) -> list[Scanned]:
    """Every file, and the error files that they name and that are still there."""
    scanned = [_scan(source) for source in sources]
    named = {
        Path(match["path"])
        for one in scanned
        for hit in one.hits
        if (match := _ERROR_FILE.search(hit.line.text)) is not None
    }
    files = [error for path in sorted(named) if (error := error_file(path)) is not None]
    return scanned + [scan(source, words()) for source in files]


def _scan(source: Source) -> Scanned:
    """One file; a name that says a rank counts only where its lines do not name others."""
    found = scan(source, words())
    if source.rank is not None and found.ranks - {source.rank}:
        found = scan(replace(source, rank=None), words())
    return found


@cache
def words() -> Words:
    return Words(list(load().causes.values()))


def source_of(path: Path) -> Source | None:
    """A file as it is to be read, with the rank that its name may say."""
    if is_dump(path):
        return flight_source(path)
    if path.name == "error.json":
        return error_file(path)
    return Source(path, shown_path(path), rank_in_name(path), is_named=True)


def rank_in_name(path: Path) -> int | None:
    """rank-3.log, rank3.out, worker_rank_3.txt: one rank's own."""
    match = _NAMED_RANK.fullmatch(path.name) or _LOG_DIR.search(str(path))
    return int(match[1]) if match is not None else None
