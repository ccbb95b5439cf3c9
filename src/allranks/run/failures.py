"""Which rank of a run failed first, and why, and the lines that show it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from allranks.run import stacks, tracebacks
from allranks.run.folder import RunDir
from allranks.run.logs import last_line, tail
from allranks.run.record import read_ends
from allranks.run.tracebacks import Frame, places, read_tracebacks, short_path, source_lines
from allranks.show.numbers import ranks_in_words
from allranks.show.text import clean

LOG_BYTES = 1 << 16
FEW_LINES = 30  # after a traceback: torch's warnings; after more, training has gone on
CHILD_SECONDS = 30.0  # within which a process ends because of one that it has started
MAX_ROWS, COLUMNS = 12, 80  # of a traceback
MESSAGE_ROWS = 3  # below its first line
REASON_LINES = 20  # the last ones of a log, which contain the reason for its end
_THREAD = re.compile(r"(?m)^(?=(?:Current thread|Thread) 0x)")
# What a thread that still runs makes of the end that an exception brings about.
_NO_EXCEPTION = "terminate called without an active exception"
_OF_CPP = re.compile(r"(?m)^\s*what\(\):\s*(.+)$")  # an uncaught exception


def failure(run: RunDir) -> dict[str, Any] | None:
    """The rank that failed first in the last attempt, and why; None if none did.

    Ranks that failed only because another one was gone do not count. Returns the rank's end event
    with `rank`, `node`, `log`, `others` (in words) and, if known, `error`, `file`, `line`,
    `function`, `frames` and `cause`.
    """
    attempt = max(run.attempts(), default=0)
    failed = failed_ranks(run, attempt)
    if not failed:
        return None
    first, *others = failed
    words = [others_in_words(first, others)]
    if is_echo(first):
        # Ranks that finished while others still needed them: usually they ran out of data.
        ends = {rank: run.end(attempt, rank) or {} for rank in run.ranks(attempt)}
        ended = [rank for rank, end in ends.items() if end.get("exit") == 0]
        if ended:
            step = read_ends(run, attempt, ended[0]).last_step
            after = f" after step {step}" if step else ""
            words.append(f"{ranks_in_words(ended)} had ended by then{after}, without an error")
    return {**first, "others": "; ".join(filter(None, words))}


def failed_ranks(run: RunDir, attempt: int) -> list[dict[str, Any]]:
    """All ranks of an attempt that failed, the one to blame first."""
    found = []
    for rank in run.ranks(attempt):
        end = run.end(attempt, rank)
        if end is not None and end["state"] == "failed":
            found.append(_explained(run, attempt, rank, end))
    hosts = {one["node"] for one in found if one["node"]}  # one killed early has told none
    for one in found:
        one["node"] = one["node"] if len(hosts) > 1 else None
    return sorted(found, key=lambda one: (is_echo(one), one["t"]))


def is_echo(failed: dict[str, Any]) -> bool:
    """Whether a rank failed only because another one was gone."""
    return bool((failed.get("error") or {}).get("echo"))


def lacked_memory(failed: Mapping[str, Any]) -> bool:
    """Whether a failure, as `failure` returns it, is for want of memory."""
    return bool(failed.get("memory_kills")) or tracebacks.is_out_of_memory(
        (failed.get("error") or {}).get("what", "")
    )


def failure_in_words(failed: dict[str, Any]) -> str:
    """A failure, as `failure` returns it, on one line."""
    rank, error = failed["rank"], failed.get("error")
    named = f"rank {rank} on {failed['node']}" if failed.get("node") else f"rank {rank}"
    if error and error["fix"]:
        return f"rank {rank}: {error['what']}"
    if error:
        what = clean(_cut(error["what"].strip().partition("\n")[0]))
        return f"{named} failed: {what}{_place(failed)}"
    if "signal" in failed:
        memory = " for its memory" if failed.get("memory_kills") else ""
        how = f"was killed by {failed['signal']}{memory}"
    else:
        how = f"ended with code {failed['exit']}"
    said = f": {failed['said']}" if failed.get("said") else ""
    return f"{named} {how}{said}{_place(failed)}"


def failure_lines(failed: dict[str, Any]) -> list[str]:
    """What is shown between the error and its fix: message, traceback, cause, other ranks."""
    what = (failed.get("error") or {}).get("what", "")
    lines = _message_lines(what)
    lines += traceback_lines([Frame(*row) for row in failed.get("frames", [])])
    if failed.get("cause"):
        lines.append(f"  caused by {_cut(failed['cause'])}")
    if failed.get("others"):
        lines.append(f"  {failed['others']}")
    return [clean(line) for line in lines]


def describe_for_json(failed: dict[str, Any]) -> dict[str, Any]:
    """A failure, as `failure` returns it, as fields for `--json`."""
    keys = ("rank", "node", "file", "line", "function", "cause", "others")
    found = {key: failed[key] for key in keys if failed.get(key) not in (None, "")}
    frames = [Frame(*row) for row in failed.get("frames", [])]
    return {**found, "log": failed["log"], "traceback": traceback_lines(frames)}


def traceback_lines(frames: Sequence[Frame], rows: int = MAX_ROWS) -> list[str]:
    """A traceback in `rows` rows of a terminal: the user's calls, with libraries' folded."""
    frames = [frame for frame in frames if not frame.is_ours]
    if not any(frame.is_own for frame in frames):
        parts = [_call(frame) for frame in frames[-3:] if frame.file]
    else:
        parts = []
        for is_own, some in groupby(frames, lambda frame: frame.is_own):
            calls = [*some]
            if is_own:
                parts += [_call(frame) for frame in calls]
            elif parts:  # calls above the user's first one only start Python
                parts.append([_folded(calls)])
    return _fitting(parts, rows)


def _fitting(parts: Sequence[list[str]], rows: int) -> list[str]:
    """The outermost call, and as many of the innermost ones as there is room for."""
    if sum(map(_rows, parts)) <= rows:
        return [line for part in parts for line in part]
    left = rows - _rows(parts[0]) - 1
    kept: list[list[str]] = []
    for part in reversed(parts[1:]):
        left -= _rows(part)
        if left < 0 and kept:
            break
        kept.insert(0, part)
    gone = len(parts) - 1 - len(kept)
    between = [[f"  ... {gone} more calls"]] if gone else []
    return [line for part in (parts[0], *between, *kept) for line in part]


def _call(frame: Frame) -> list[str]:
    inside = f", in {frame.function}" if frame.function else ""
    lines = [f'  File "{short_path(frame.file)}", line {frame.line}{inside}']
    # Without its source: the line as it is now, if the file is here.
    source = frame.source or "".join(source_lines(frame.file)[frame.line - 1 : frame.line]).strip()
    return [*lines, f"    {_cut(source, COLUMNS - 4)}"] if source else lines


def _folded(frames: Sequence[Frame]) -> str:
    names = [*dict.fromkeys(frame.library for frame in frames if frame.file)]
    number = sum(1 if frame.file else frame.line for frame in frames)
    of = f" in {' and '.join(names[:3])}" if names else ""
    return f"  ... {number} frame{'' if number == 1 else 's'}{of}"


def _rows(lines: Iterable[str]) -> int:
    return sum(-(-len(line) // COLUMNS) for line in lines)


def _message_lines(what: str) -> list[str]:
    """The lines of a message after its first one."""
    more = [line.rstrip() for line in what.strip().splitlines()[1:] if line.strip()]
    shown = [f"  {_cut(line.strip(), COLUMNS - 2)}" for line in more[:MESSAGE_ROWS]]
    return [*shown, "  ..."] if len(more) > MESSAGE_ROWS else shown


def _cut(text: str, size: int = 2 * COLUMNS) -> str:
    return text if len(text) <= size else f"{text[: size - 3]}..."


def _place(failed: dict[str, Any]) -> str:
    words = []
    if failed.get("file"):
        at = Frame(failed["file"], failed["line"], failed["function"] or "").short
        words.append(f"last seen at {at}" if failed.get("is_last_seen") else at)
    if failed.get("is_last_seen") and failed.get("steps"):
        words.insert(0, f"after step {failed['steps']}")
    return f"  ({', '.join(words)})" if words else ""


def others_in_words(first: dict[str, Any], others: Sequence[dict[str, Any]]) -> str:
    """What happened to the ranks other than the one that failed first, on one line."""
    alike = [one for one in others if _kind(one) == _kind(first) and one.get("error")]
    fallen = [one for one in others if is_echo(one) and one not in alike]
    odd = [one for one in others if one not in alike and one not in fallen]
    words = []
    if alike:
        every = sorted(one["rank"] for one in [first, *alike])
        words.append(f"{ranks_in_words(every)} failed with the same error")
    if fallen:
        words.append(f"{ranks_in_words([one['rank'] for one in fallen])} went down with it")
    if odd:
        said = failure_in_words(odd[0]).replace(" failed: ", " failed differently: ", 1)
        words.append(said + (f", and {len(odd) - 1} more" if len(odd) > 1 else ""))
    return "; ".join(words)


def _kind(failed: dict[str, Any]) -> tuple[Any, ...]:
    what = (failed.get("error") or {}).get("what", "")
    return what.partition(":")[0], failed.get("file"), failed.get("line")


# --- What is known of one rank ------------------------------------------------------------------


def _explained(run: RunDir, attempt: int, rank: int, end: dict[str, Any]) -> dict[str, Any]:
    """A rank's end event, with what the rank or its log says about the cause."""
    start = run.start(attempt, rank) or {}
    log = run.log(attempt, rank)
    found = {**end, "rank": rank, "log": str(log), "node": start.get("host")}
    if (end.get("error") or {}).get("stall"):
        return found
    told = _error_event(run.errors(attempt, rank), end, start.get("pid"))
    is_ended_by_launcher = end.get("exit") is None
    if told is None and not end.get("error"):
        told = _from_log(log, end)
    if told is None:
        return found | _last_seen(run, attempt, rank, found)
    if is_ended_by_launcher and told["type"] in ("SystemExit", "KeyboardInterrupt", ""):
        return found  # its reaction to the launcher's signal
    place = {key: told.get(key) for key in ("file", "line", "function", "frames", "cause")}
    found |= {"t": told.get("t", end["t"]), **{k: v for k, v in place.items() if v is not None}}
    if is_ended_by_launcher and not told["echo"]:
        found["exit"] = 1  # as it was about to
    what = f"{told['type']}: {told['message']}" if told["message"] else told["type"]
    if told["type"] == "SystemExit":
        what = told["message"]
        found["said"] = "" if what else last_line(log)
    if not told["type"]:
        what, found["said"] = "", told["message"]
    fix = (end.get("error") or {}).get("fix", "")
    if fix:
        what = end["error"]["what"]
    if what:
        found["error"] = {"what": what, "fix": fix, "echo": told["echo"]}
    return found


def _error_event(
    events: Sequence[dict[str, Any]], end: dict[str, Any], process: int | None
) -> dict[str, Any] | None:
    """The event that describes this end; a script may have survived earlier ones."""
    code, name = end.get("exit"), end.get("signal")
    fitting = [
        event
        for event in events
        if (event["type"] not in ("", "SystemExit"))
        or (event["type"] == "" and event.get("signal") == name)
        or (event["type"] == "SystemExit" and code in (None, event.get("exit")))
    ]
    own = [event for event in fitting if process in (None, event.get("pid"))]
    of_children = [
        event for event in fitting if event not in own and end["t"] - event["t"] < CHILD_SECONDS
    ]
    passes_on = not own or own[-1]["type"] in ("SystemExit", "CalledProcessError")
    return next(reversed(of_children if of_children and passes_on else own), None)


def _from_log(log: Path, end: dict[str, Any]) -> dict[str, Any] | None:
    """What the end of a log shows without an event: after a crash in C, or with another hook."""
    lines = [clean(line) for line in tail(log, LOG_BYTES)]
    text = "\n".join(lines)
    before, aborted, _ = text.rpartition(_NO_EXCEPTION)
    printed = read_tracebacks(before if aborted else text)
    if "signal" in end and not (aborted and printed):
        before, fatal, dump = text.rpartition("Fatal Python error:")
        said = _OF_CPP.findall(before or text)
        frames = _dumped(dump) if fatal else []
        return _as_event("", said[-1] if said else "", frames) if said or frames else None
    num_lines = before.count("\n") if aborted else len(lines)
    told = [one for one in printed if num_lines - one.last_line < FEW_LINES]
    if not told:
        return None
    last = told[-1]
    return _as_event(last.name, last.message, last.frames)


def _dumped(dump: str) -> list[Frame]:
    """The calls of the thread that crashed, or of the main thread if none of them is the user's."""
    threads = [stacks.parse_dump(0, part) for part in _THREAD.split(dump)]
    own = [one for one in threads if one is not None and any(call.is_own for call in one.frames)]
    crashed = stacks.parse_dump(0, dump, crashed=True)
    found = crashed if crashed in own or not own else own[-1]
    return [*reversed(found.frames)] if found is not None else []


def _as_event(name: str, message: str, frames: Sequence[Frame]) -> dict[str, Any]:
    said = {"type": name, "message": message, "echo": tracebacks.is_echo(name, message)}
    return said | places([*frames])


def _last_seen(run: RunDir, attempt: int, rank: int, found: dict[str, Any]) -> dict[str, Any]:
    """Where a rank was last seen that was killed, or ended without saying why."""
    if found.get("error"):
        return {}
    more: dict[str, Any] = {"is_last_seen": True}
    record = read_ends(run, attempt, rank, 1 << 18)
    if record.last_step:
        more["steps"] = record.last_step
    if record.place:
        more |= dict(zip(("file", "line", "function"), record.place, strict=True))
        more["frames"] = [[*record.place, ""]]
    if record.heard:  # the launcher wrote its end, after others had written theirs
        more["t"] = min(found["t"], record.heard)
    if "signal" not in found:
        more["said"] = last_line(Path(found["log"]))
        line = _only_exit(more.get("file", ""))
        if line is not None:
            more |= {"is_last_seen": False, "line": line, "function": ""}
            more["frames"] = [[more["file"], line, "", ""]]
    return more


def _only_exit(file: str) -> int | None:
    """The line of a file that raises SystemExit, which no hook sees, if there is only one."""
    lines = [*enumerate(source_lines(file), 1)]
    found = [number for number, line in lines if re.match(r"\s*raise SystemExit\b", line)]
    return found[0] if len(found) == 1 else None


# --- A path that a rank did not find ------------------------------------------------------------

# How Python, allranks and SLURM say that there is no such file.
_NO_SUCH_FILE = tuple(
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


def missing_path(lines: Iterable[str]) -> str | None:
    """The path that a rank did not find, by its last output; None if that is not why it ended."""
    last = [line for line in lines if line.strip()][-REASON_LINES:]
    for line in reversed(last):
        for pattern in _NO_SUCH_FILE:
            if match := pattern.search(line):
                return match["path"]
    return None


def missing_in_words(found: Mapping[str, Any], *, is_task: bool = False) -> tuple[str, str]:
    """What run.json says about a path that some nodes do not have: what is wrong, and the fix."""
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
