"""Prints the logs of a run from its folder: what is there, or as it comes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from allranks.errors import AllranksError
from allranks.launch import backends
from allranks.launch.waiting import EXIT_CODES, in_words
from allranks.layout import Layout
from allranks.machine.nodelist import compress
from allranks.run import run_state
from allranks.run.failures import failure, failure_in_words
from allranks.run.folder import RunDir
from allranks.run.logs import LogTail

LOOK_SECONDS = 0.3
ALIKE_SECONDS = 1.0  # within which ranks that print the same line do so
MOST_WAITING = 100_000  # lines


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
        if self.rank is None or self.rank < 0 or "," in layout or not layout or self._files():
            return
        try:
            ranks = Layout.parse(layout).ranks
        except AllranksError:  # run.json may say anything
            return
        if self.rank >= ranks:
            raise AllranksError(
                f"run {self.run.name} has no rank {self.rank}: its layout {layout} has {ranks}",
                fix=f"write --rank N with N from 0 to {ranks - 1}, or -1 for the job itself",
            )

    def look(self) -> Iterator[str]:
        """Lines that are new, of the newest attempt and of the job around it."""
        for path in self._files():
            self._tails.setdefault(path, LogTail(path))
        for path, tail in self._tails.items():
            yield from self._with_rank(path, tail.lines())
        yield from self._together.ready()

    def rest(self) -> Iterator[str]:
        for path, tail in self._tails.items():
            yield from self._with_rank(path, tail.last())
        yield from self._together.ready(wait=False)

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


@dataclass(slots=True)
class Shown:
    """How printing a run's logs ended."""

    exit_code: int = 0
    remarks: list[str] = field(default_factory=list)  # why the run failed, how it ended


def show_logs(
    run: RunDir,
    rank: int | None,
    *,
    follow: bool,
    write: Callable[[str], None],
    say: Callable[[str], None],
) -> Shown:
    """Write the lines of a run; with `follow` until it has ended, or until a Ctrl-C.

    `say` is told why the run waits.
    """
    now: dict[str, Any] = {"state": "running"}
    told = ""

    def has_ended() -> bool:
        nonlocal told
        now.update(run_state.describe(run, backends.look([run])))
        waits = f"{run.name} waits: {now['reason'] or 'not started yet'}"
        if now["state"] == "queued" and waits != told:
            told = waits
            say(waits)
        return now["state"] not in ("queued", "running")

    try:
        show(run, rank, follow=follow, write=write, has_ended=has_ended)
    except KeyboardInterrupt:
        return Shown(130)
    failed = None if run.is_live() else failure(run)
    shown = Shown(remarks=[failure_in_words(failed)] if failed is not None else [])
    if follow:
        shown.exit_code = EXIT_CODES[now["state"]]
        if now["state"] != "finished":
            shown.remarks.append(f"{run.name} {in_words(now)}")
    return shown


def show(
    run: RunDir,
    rank: int | None,
    *,
    follow: bool,
    write: Callable[[str], None],
    has_ended: Callable[[], bool],
) -> None:
    """Write the lines of a run; with `follow` until it has ended."""
    logs = Logs(run, rank)
    logs.check_rank()
    shown = 0
    pause, next_question = 1.0, time.monotonic()
    while True:
        # Asked before the last look: what is written until the end is shown.
        ended = not follow
        if follow and time.monotonic() >= next_question:
            ended = has_ended()
            pause = min(30.0, 1.5 * pause)
            next_question = time.monotonic() + pause
        for line in logs.look():
            write(line)
            shown += 1
        if ended:
            break
        time.sleep(LOOK_SECONDS)
    for line in logs.rest():
        write(line)
        shown += 1
    if shown == 0 and not follow:
        what = "has printed nothing yet" if rank is None else f"has no log of rank {rank}"
        problem = run.problem()
        what += f" ({problem})" if problem else ""
        raise AllranksError(
            f"run {run.name} {what}",
            fix=f"see how it is doing: allranks ls {run.name}; or wait for it: "
            f"allranks logs {run.name} -f",
            exit_code=1,
        )
