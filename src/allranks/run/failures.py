"""Which rank of a run failed first, by cause and by time, and the lines that show it. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from allranks.run import crash, files, stacks
from allranks.run.folder import RunDir
from allranks.run.frames import Frame, place_of, read_tracebacks, short_path, source_lines
from allranks.run.record import read_ends
from allranks.show.text import clean

LAST_WORDS = 160  # characters
LOG_BYTES = 1 << 16
FEW_LINES = 30  # after a traceback: torch's warnings, not a training that continues
CHILD_SECONDS = 30.0  # within which a process ends because of one that it has started
MAX_ROWS, COLUMNS = 12, 80  # of a traceback
MESSAGE_ROWS = 3  # below its first line
MAX_PARTS = 8  # of a list of ranks
_THREAD = re.compile(r"(?m)^(?=(?:Current thread|Thread) 0x)")
_OF_CPP = re.compile(r"(?m)^\s*what\(\):\s*(.+)$")  # an uncaught exception


def failure(run: RunDir) -> dict[str, Any] | None:
    """The rank that failed first in the last attempt, and why; None if none did.

    Ranks whose only trouble is that another one is gone are passed over: they are its echo. What is
    returned is the rank's end event with `rank`, `node`, `log`, `others` (in words) and, where they
    are known, `error`, `file`, `line`, `function`, `frames`, `cause`.
    """
    attempt = max(run.attempts(), default=0)
    failed = failed_ranks(run, attempt)
    if not failed:
        return None
    first, *others = failed
    words = [others_in_words(first, others)]
    if is_echo(first):
        ended = [rank for rank in run.ranks(attempt) if _has_ended_well(run, attempt, rank)]
        words += [_ended_early(run, attempt, ended)] if ended else []
    return {**first, "others": "; ".join(filter(None, words))}


def _ended_early(run: RunDir, attempt: int, ranks: Sequence[int]) -> str:
    """Ranks that finished while others still needed them: mostly they ran out of data."""
    step = read_ends(run, attempt, ranks[0]).last_step
    after = f" after step {step}" if step else ""
    return f"{ranks_in_words(ranks)} had ended by then{after}, without an error"


def _has_ended_well(run: RunDir, attempt: int, rank: int) -> bool:
    return (run.end(attempt, rank) or {}).get("exit") == 0


def failed_ranks(run: RunDir, attempt: int) -> list[dict[str, Any]]:
    """All ranks of an attempt that failed, the culprit first."""
    found = []
    for rank in run.ranks(attempt):
        end = run.end(attempt, rank)
        if end is not None and end["state"] == "failed":
            found.append(_told(run, attempt, rank, end))
    hosts = {one["node"] for one in found}
    for one in found:
        one["node"] = one["node"] if len(hosts) > 1 else None
    return sorted(found, key=lambda one: (is_echo(one), one["t"]))


def is_echo(failed: dict[str, Any]) -> bool:
    """Whether a rank only went down with another one."""
    return bool((failed.get("error") or {}).get("echo"))


def failure_in_words(failed: dict[str, Any]) -> str:
    """What `failure` found, on one line."""
    rank, error = failed["rank"], failed.get("error")
    named = f"rank {rank} on {failed['node']}" if failed.get("node") else f"rank {rank}"
    if error and error["fix"]:
        return f"rank {rank}: {error['what']}"
    if error:
        what = _first_line(error["what"])
        return f"{named} failed: {what}{_place(failed)}"
    if "signal" in failed:
        memory = " for its memory" if failed.get("memory_kills") else ""
        how = f"was killed by {failed['signal']}{memory}"
    else:
        how = f"ended with code {failed['exit']}"
    said = f": {failed['said']}" if failed.get("said") else ""
    return f"{named} {how}{said}{_place(failed)}"


def lines_of(failed: dict[str, Any]) -> list[str]:
    """What is shown between the error line and the fix: message, traceback, cause, other ranks."""
    what = (failed.get("error") or {}).get("what", "")
    lines = _message_lines(what)
    lines += traceback_lines([Frame(*row) for row in failed.get("frames", [])])
    if failed.get("cause"):
        lines.append(f"  caused by {_cut(failed['cause'])}")
    if failed.get("others"):
        lines.append(f"  {failed['others']}")
    return [clean(line) for line in lines]


def describe_for_json(failed: dict[str, Any]) -> dict[str, Any]:
    """What `failure` found, as fields for `--json`."""
    keys = ("rank", "node", "file", "line", "function", "cause", "others")
    found = {key: failed[key] for key in keys if failed.get(key) not in (None, "")}
    frames = [Frame(*row) for row in failed.get("frames", [])]
    return {**found, "log": failed["log"], "traceback": traceback_lines(frames)}


def traceback_lines(frames: Sequence[Frame], rows: int = MAX_ROWS) -> list[str]:
    """A traceback for `rows` rows of a terminal: the user's calls, those of libraries folded."""
    frames = [frame for frame in frames if not frame.is_ours]
    if not any(frame.is_own for frame in frames):
        parts = [_call(frame) for frame in frames[-3:] if frame.file]
    else:
        parts = []
        for is_own, some in groupby(frames, lambda frame: frame.is_own):
            calls = [*some]
            if is_own:
                parts += [_call(frame) for frame in calls]
            elif parts:  # what is above the user's first call only starts Python
                parts.append([_folded(calls)])
    return _fitting(parts, rows)


def _fitting(parts: Sequence[list[str]], rows: int) -> list[str]:
    """The outermost call and as many of the innermost ones as there is room for."""
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
    # Where only its number is known: the line as it is now, if the file is here.
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


def _first_line(text: str) -> str:
    return clean(_cut(text.strip().partition("\n")[0]))


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


def ranks_in_words(ranks: Iterable[int]) -> str:
    """`rank 1`, `ranks 0, 2 and 3`, `ranks 0-7 and 12`."""
    numbers = sorted(ranks)
    parts: list[str] = []
    for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        row = [number for _, number in run]
        parts += [f"{row[0]}-{row[-1]}"] if len(row) > 2 else [str(number) for number in row]
    if len(numbers) == 1:
        return f"rank {parts[0]}"
    if len(parts) > MAX_PARTS:
        return f"{len(numbers)} ranks"
    *most, last = parts
    return f"ranks {', '.join(most)} and {last}" if most else f"ranks {last}"


# --- What is known of one rank ------------------------------------------------------------------


def _told(run: RunDir, attempt: int, rank: int, end: dict[str, Any]) -> dict[str, Any]:
    """A rank's end, with what it or its log says about the cause."""
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
        return found  # that is how it reacted to the launcher's signal
    place = {key: told.get(key) for key in ("file", "line", "function", "frames", "cause")}
    found |= {"t": told.get("t", end["t"]), **{k: v for k, v in place.items() if v is not None}}
    if is_ended_by_launcher and not told["echo"]:
        found["exit"] = 1  # it was about to
    what = f"{told['type']}: {told['message']}" if told["message"] else told["type"]
    if told["type"] == "SystemExit":
        what = told["message"]
        found["said"] = "" if what else last_words(log)
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
    """The event that describes this end: the script may have carried on after earlier ones."""
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
    """What the end of a log shows where no event does: after a crash in C, or with another hook."""
    lines = [clean(line) for line in tail(log, LOG_BYTES)]
    text = "\n".join(lines)
    if "signal" in end:
        before, fatal, dump = text.rpartition("Fatal Python error:")
        said = _OF_CPP.findall(before or text)
        frames = _dumped(dump) if fatal else []
        return _as_event("", said[-1] if said else "", frames) if said or frames else None
    told = [one for one in read_tracebacks(text) if len(lines) - one.last_line < FEW_LINES]
    if not told:
        return None
    last = told[-1]
    return _as_event(last.type, last.message, last.frames)


def _dumped(dump: str) -> list[Frame]:
    """The calls of the thread that crashed; the main thread's, if none of those are the user's."""
    threads = [stacks.parse_dump(0, part) for part in _THREAD.split(dump)]
    own = [one for one in threads if one is not None and any(call.is_own for call in one.frames)]
    crashed = stacks.parse_dump(0, dump)
    found = crashed if crashed in own or not own else own[-1]
    return [*reversed(found.frames)] if found is not None else []


def _as_event(name: str, message: str, frames: Sequence[Frame]) -> dict[str, Any]:
    place = place_of(frames)
    return {
        **{"type": name, "message": message, "echo": crash.is_echo(name, message)},
        "file": place.file if place else None,
        "line": place.line if place else None,
        "function": place.function if place else None,
        "frames": [[one.file, one.line, one.function, one.source] for one in frames],
    }


def _last_seen(run: RunDir, attempt: int, rank: int, found: dict[str, Any]) -> dict[str, Any]:
    """Where a rank that was killed, or ended without a word, was by its last signs of life."""
    if found.get("error"):
        return {}
    more: dict[str, Any] = {"is_last_seen": True}
    record = read_ends(run, attempt, rank, 1 << 18)
    if record.last_step:
        more["steps"] = record.last_step
    if record.place:
        more |= dict(zip(("file", "line", "function"), record.place, strict=True))
        more["frames"] = [[*record.place, ""]]
    if record.heard:  # the launcher wrote its end, some time after others had reported theirs
        more["t"] = min(found["t"], record.heard)
    if "signal" not in found:
        more["said"] = last_words(Path(found["log"]))
        line = _only_exit(more.get("file", ""))
        if line is not None:
            more |= {"is_last_seen": False, "line": line, "function": ""}
            more["frames"] = [[more["file"], line, "", ""]]
    return more


def _only_exit(file: str) -> int | None:
    """The line that raises SystemExit, which no hook sees, if there is only one."""
    lines = [*enumerate(source_lines(file), 1)]
    found = [number for number, line in lines if re.match(r"\s*raise SystemExit\b", line)]
    return found[0] if len(found) == 1 else None


def last_words(log: Path) -> str:
    """The last line that a rank wrote."""
    lines = [clean(line).strip() for line in tail(log)]
    last = next((line for line in reversed(lines) if line), "")
    return last[:LAST_WORDS]


def tail(path: Path, size: int = 1 << 14) -> list[str]:
    """The last lines of a log, as text; none if the file does not exist."""
    try:
        with files.open_file(path) as file:
            file.seek(max(0, file.seek(0, 2) - size))
            return file.read(size).decode(errors="replace").splitlines()
    except OSError:
        return []
