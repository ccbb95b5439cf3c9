"""What a run's ranks print: all of it at once, or as it comes. From the run folder alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from allranks.errors import AllranksError
from allranks.layout import Layout
from allranks.rundir import RunDir

LOOK_SECONDS = 0.3
CHUNK_BYTES = 1 << 16


@dataclass(slots=True)
class Tail:
    """Reads the lines that were added to a file since the last look."""

    path: Path
    prefix: str
    offset: int = 0
    rest: bytes = field(default=b"")

    def lines(self) -> Iterator[str]:
        """Whole lines; the beginning of one waits for its end."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset)
                while chunk := file.read(CHUNK_BYTES):
                    self.offset += len(chunk)
                    *whole, self.rest = (self.rest + chunk).split(b"\n")
                    for line in whole:
                        yield self.prefix + line.decode(errors="replace")
        except FileNotFoundError:
            return

    def last(self) -> Iterator[str]:
        """What was never ended by a newline."""
        if self.rest:
            yield self.prefix + self.rest.decode(errors="replace")
            self.rest = b""


class Logs:
    """The logs of a run's newest attempt: of one rank, or of all, each line with its rank.

    `rank` -1 is the job itself: what SLURM, the preflight and the launcher said.
    """

    def __init__(self, run: RunDir, rank: int | None) -> None:
        self.run = run
        self.rank = rank
        self._attempt = -1
        self._tails: dict[Path, Tail] = {}

    def check_rank(self) -> None:
        """Refuse a rank that this run cannot have."""
        layout = self.run.info().get("layout", "").partition("@")[0]
        if self.rank is None or self.rank < 0 or "," in layout or not layout or self._files():
            return
        ranks = Layout.parse(layout).ranks
        if self.rank >= ranks:
            raise AllranksError(
                f"run {self.run.name} has no rank {self.rank}: its layout {layout} has {ranks}",
                fix=f"write --rank N with N from 0 to {ranks - 1}, or -1 for the job itself",
            )

    def look(self) -> Iterator[str]:
        """Lines that are new, of the newest attempt and of the job around it."""
        for path in self._files():
            if path not in self._tails:
                self._tails[path] = Tail(path, self._prefix(path))
        for tail in list(self._tails.values()):
            yield from tail.lines()

    def rest(self) -> Iterator[str]:
        for tail in self._tails.values():
            yield from tail.last()

    def _files(self) -> list[Path]:
        attempts = self.run.attempts()
        of_job = sorted(self.run.path.glob("slurm-*.log"), key=lambda path: path.stat().st_mtime)
        of_ranks: list[Path] = []
        if attempts:
            paths = self.run.attempt(attempts[-1]).glob("rank-*.log")
            of_ranks = sorted(paths, key=lambda path: int(path.stem.removeprefix("rank-")))
        if self.rank is None:
            return [*of_job[-1:], *of_ranks]
        if self.rank < 0:
            return of_job
        return [path for path in of_ranks if path.stem == f"rank-{self.rank}"]

    def _prefix(self, path: Path) -> str:
        if self.rank is not None:
            return ""
        if path.stem.startswith("rank-"):
            return f"[{path.stem.removeprefix('rank-')}] "
        return "[job] "


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
        raise AllranksError(
            f"run {run.name} {what}",
            fix=f"see how it is doing: allranks ls {run.name}; or wait for it: "
            f"allranks logs {run.name} -f",
            exit_code=1,
        )
