"""Follows a run by its folder, in any backend: prints its logs, waits for its ranks or its end."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allranks.errors import STOPPED_AT_CHECKPOINT, STOPPED_AT_ONCE, AllranksError
from allranks.job.job import Job
from allranks.launch import backends
from allranks.launch.prepare import has_checkpoint, load_resolved
from allranks.layout import Layout
from allranks.machine.nodelist import compress
from allranks.run import claims, run_state
from allranks.run.failures import failure, failure_in_words, missing_in_words
from allranks.run.folder import RunDir, State
from allranks.run.logs import LogTail
from allranks.timing.result import result

READ_SECONDS = 0.3  # between two looks at the logs
ALIKE_SECONDS = 1.0  # within which ranks that print the same line do so
MOST_WAITING = 100_000  # lines
FIRST_PAUSE, LAST_PAUSE = 1.0, 20.0  # seconds between questions to a queue
SAVING_SECONDS = 300.0  # for ranks of other nodes that were told to stop as well
ENDING_SECONDS = 15.0  # for what other nodes' launchers write at the end
ENDED = ("finished", "failed", "stopped")


@dataclass(slots=True)
class Waiting:
    """A line that other ranks may print, too."""

    line: str
    ranks: list[int | str]
    since: float


class Together:
    """Lines of several ranks, each with its rank; a line that several print is shown once.

    A line waits a moment for the other ranks to print it too, and what came after it waits with it.
    """

    def __init__(self, num_ranks: int = 0) -> None:
        self.num_ranks = num_ranks
        self._waiting: deque[Waiting] = deque()
        self._by_line: dict[str, list[Waiting]] = {}

    @property
    def is_full(self) -> bool:
        return len(self._waiting) >= MOST_WAITING

    def add(self, rank: int | str, line: str) -> None:
        """`rank`: or the name of another source, whose lines are never joined with others."""
        alike = self._by_line.setdefault(line, [])
        for one in alike if isinstance(rank, int) else ():
            if rank not in one.ranks and isinstance(one.ranks[0], int):
                one.ranks.append(rank)
                return
        alike.append(Waiting(line, [rank], time.monotonic()))
        self._waiting.append(alike[-1])

    def ready(self, *, wait: bool = True) -> Iterator[str]:
        """Lines that need not wait any more; all of them without `wait`."""
        now = time.monotonic()
        while self._waiting:
            first = self._waiting[0]
            is_complete = len(first.ranks) == self.num_ranks or isinstance(first.ranks[0], str)
            if wait and not is_complete and now < first.since + ALIKE_SECONDS:
                return
            self._waiting.popleft()
            self._by_line[first.line].remove(first)
            if not self._by_line[first.line]:
                del self._by_line[first.line]
            names = sorted(map(str, first.ranks), key=lambda name: (len(name), name))
            yield f"[{compress(names).strip('[]')}] {first.line}"


class Logs:
    """The logs of a run's newest attempt: of one rank, or of all, each line with its rank.

    `rank` -1 is the job itself: what SLURM, the preflight and the launcher said.
    """

    def __init__(self, run: RunDir, rank: int | None) -> None:
        self.run = run
        self.rank = rank
        self._tails: dict[Path, LogTail] = {}
        self._together = Together()

    def check_rank(self) -> None:
        """Refuse a rank that this run cannot have."""
        layout = self.run.info().get("layout", "").partition("@")[0]
        try:
            ranks = Layout.parse(layout).ranks
        except AllranksError:  # run.json may say anything; a race has several layouts
            return
        if self.rank is not None and self.rank >= ranks and not self._files():
            raise AllranksError(
                f"run {self.run.name} has no rank {self.rank}: its layout {layout} has {ranks}",
                fix=f"write --rank N with N from 0 to {ranks - 1}, or -1 for the job itself",
            )

    def new_lines(self, *, wait: bool) -> Iterator[str]:
        """New lines of the newest attempt and of the job around it; without `wait` all the rest."""
        for path in self._files():
            self._tails.setdefault(path, LogTail(path))
        for path, tail in self._tails.items():
            yield from self._with_rank(path, tail.lines())
            if not wait:
                yield from self._with_rank(path, tail.last())
        yield from self._together.ready(wait=wait)

    def _with_rank(self, path: Path, lines: Iterator[str]) -> Iterator[str]:
        """Lines of a single rank, as they are; those of several, once all have printed."""
        if self.rank is not None:
            yield from lines
            return
        rank = path.stem.removeprefix("rank-")
        for line in lines:
            self._together.add(int(rank) if rank.isdigit() else "job", line)
            if self._together.is_full:
                yield from self._together.ready(wait=False)

    def _files(self) -> list[Path]:
        attempts = self.run.attempts()
        of_job = self.run.job_logs()
        of_ranks: list[Path] = []
        if attempts:
            ranks = self.run.logs(attempts[-1])
            of_ranks = [self.run.log(attempts[-1], rank) for rank in ranks]
        self._together.num_ranks = len(of_ranks)
        if self.rank is None:
            return [*of_job[-1:], *of_ranks]
        if self.rank < 0:
            return of_job
        return [path for path in of_ranks if path.stem == f"rank-{self.rank}"]


def show_logs(
    run: RunDir,
    rank: int | None,
    *,
    follow: bool,
    write: Callable[[str], None],
    say: Callable[[str], None],
) -> tuple[int, list[str]]:
    """Write the lines of a run; with `follow` until it has ended, or until a Ctrl-C.

    `say` is told why the run waits. Returns an exit code, and remarks on how the run ended.
    """
    logs = Logs(run, rank)
    logs.check_rank()
    now: dict[str, Any] = {}
    waits, num_shown, pause, next_question = "", 0, 1.0, time.monotonic()
    has_ended = not follow
    try:
        while True:
            # Asked before the logs are read: all that was written before the end is shown.
            if follow and time.monotonic() >= next_question:
                now = run_state.describe(run, backends.look([run]))
                has_ended = now["state"] in ENDED
                why = now["reason"] or "not started yet"
                if now["state"] == "queued" and why != waits:
                    say(f"{run.name} waits: {why}")
                    waits = why
                pause = min(30.0, 1.5 * pause)
                next_question = time.monotonic() + pause
            for line in logs.new_lines(wait=not has_ended):
                write(line)
                num_shown += 1
            if has_ended:
                break
            time.sleep(READ_SECONDS)
    except KeyboardInterrupt:
        return STOPPED_AT_ONCE, []
    if not num_shown and not follow:
        what = "has printed nothing yet" if rank is None else f"has no log of rank {rank}"
        problem = run.problem()
        raise AllranksError(
            f"run {run.name} {what}{f' ({problem})' if problem else ''}",
            fix=f"see how it is doing: allranks ls {run.name}; or wait for it: "
            f"allranks logs {run.name} -f",
            exit_code=1,
        )
    failed = None if run.is_live() else failure(run)
    remarks = [failure_in_words(failed)] if failed is not None else []
    if not follow:
        return 0, remarks
    if now["state"] != "finished":
        remarks.append(f"{run.name} {in_words(now)}")
    return exit_code_of(run, now["state"]), remarks


def wait_for_end(run: RunDir, say: Callable[[str], None]) -> dict[str, Any]:
    """The run as `allranks ls --json` shows it, once it neither waits nor runs."""
    told, pause = "", FIRST_PAUSE
    had_ended = False
    while True:
        now = run_state.describe(run, backends.look([run]))
        now["attempt"] = attempt_of_job(run)
        words = in_words(now)
        is_over = now["state"] in ENDED
        if not told.startswith(words) and (not is_over or had_ended):
            say(words)
            told, pause = words, FIRST_PAUSE
        if is_over and had_ended:
            return now
        # Asked once more before it is believed: a job may be leaving the queue for the next one.
        had_ended = is_over
        time.sleep(FIRST_PAUSE if had_ended else pause)
        pause = min(LAST_PAUSE, 1.3 * pause)


def wait_for_result(
    run: RunDir, say: Callable[[str], None]
) -> tuple[dict[str, Any], AllranksError | None]:
    """How a run ended, once it has; `say` gets a line for every change."""
    now = wait_for_end(run, say)
    ended = {**result(run, now["state"]), "jobs": run.info().get("jobs", [])}
    ended["reason"] = now["reason"]
    return ended, why_failed(run, now) if now["state"] == "failed" else None


def exit_code_of(run: RunDir, state: State) -> int:
    """The exit code of a command that waited for a run: the same as of the command that ran it."""
    if state != "stopped":
        return 0 if state == "finished" else 1
    with suppress(AllranksError):  # its job file may be gone
        attempt = max(run.attempts(), default=0)
        ends = [run.end(attempt, rank) or {} for rank in run.ranks(attempt)]
        is_interrupted = any(end.get("signal") == "SIGINT" for end in ends)
        return stopped_code(run, load_resolved(run), is_interrupted=is_interrupted)
    return STOPPED_AT_CHECKPOINT


def stopped_code(run: RunDir, job: Job, *, is_interrupted: bool) -> int:
    """The exit code of a stopped run: 75 if it can resume where it stopped.

    `is_interrupted`: whether Ctrl-C stopped it.
    """
    attempt = max(run.attempts(), default=0)
    ends = [run.end(attempt, rank) for rank in run.ranks(attempt)]
    if job.command is None or all(end and end["exit"] == 0 for end in ends):
        return STOPPED_AT_CHECKPOINT
    if has_checkpoint(job, run):
        return STOPPED_AT_CHECKPOINT
    return STOPPED_AT_ONCE if is_interrupted else 1


def attempt_of_job(run: RunDir) -> int | None:
    """The attempt that the job which holds a run has begun; None while it checks its nodes."""
    holder = claims.newest(run.claims)
    opened = run.info().get("attempts", [])[-1:]
    begun = [one["attempt"] for one in opened if holder is None or one["started"] >= holder.time]
    return int(begun[0]) if begun else None


def wait_for_ranks(
    run: RunDir,
    attempt: int,
    num_ranks: int,
    seconds: float,
    is_enough: Callable[[], bool],
    *,
    while_alive: bool = False,
) -> None:
    """Wait until all ranks of an attempt have ended, on other nodes too, or it `is_enough`.

    `seconds`: in all, or (`while_alive`) without a line or an event of the ranks that are left.

    The first node's launcher says what became of the run, and other nodes write their ranks' ends a
    moment later. The others meet there, too: without it they would fill their logs with errors.
    """
    deadline = time.monotonic() + seconds
    left = set(range(num_ranks))
    seen: dict[Path, int] = {}
    while left and time.monotonic() < deadline and not is_enough():
        left = {rank for rank in left if run.end(attempt, rank) is None}
        files = [file(attempt, rank) for rank in left for file in (run.events, run.log)]
        now = {path: path.stat().st_size for path in files if while_alive and path.exists()}
        if now != seen:
            deadline, seen = time.monotonic() + seconds, now
        time.sleep(0.2 if left else 0)


def in_words(now: Mapping[str, Any]) -> str:
    """The state of a run, in a line that differs only if something has changed."""
    state, reason = now["state"], now["reason"]
    if state == "queued":
        jobs = f" as job {', '.join(now['jobs'])}" if now["jobs"] else ""
        return f"queued{jobs}{f': {reason}' if reason else ''}"
    if state == "running":
        nodes = f" on {', '.join(now['nodes'])}" if now["nodes"] else ""
        also = f"; {reason}" if reason else ""
        begun = now["attempt"] is not None
        attempt = f", attempt {now['attempt']}" if begun else ""
        place = f"{nodes} (layout {now['layout']}, job {now['job']}{attempt}){also}"
        return f"running{place}" if begun else f"starting{place}"
    return f"{state}{f': {reason}' if reason else ''}"


def why_failed(run: RunDir, now: Mapping[str, Any]) -> AllranksError:
    """The error of a command that waited for a run that failed."""
    name, seen = run.reference, run.info().get("missing") or {}
    fix = f"allranks doctor {name} shows why; allranks logs {name} shows its output"
    if seen.get("attempt") == max(run.attempts(), default=0):
        _, fix = missing_in_words(seen)
    what = f"run {run.name} failed{': ' + now['reason'] if now['reason'] else ''}"
    return AllranksError(what, fix=fix, exit_code=1)
