"""Follows all runs of a folder: what every view of `allranks watch` reads from.

    watcher = Watcher(Path("runs"))
    while True:
        watcher.poll(detail={"digits-20261115-142301-3f9a"})  # read all ranks of these
        watcher.runs(), watcher.ranks(name), watcher.parts(name), watcher.history(name)

Only appended data is read; of runs that nobody looks at, only the first rank's file. SLURM is asked
about all runs at once. Not thread-safe: call it from one thread at a time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from allranks.launch.backends import look
from allranks.run.folder import RunDir, list_runs
from allranks.run.run_state import Queue, RunState, look_at_run, unreadable
from allranks.timing.verdict import judge
from allranks.watch.followed import ComparableRuns, Followed, modified, run_view
from allranks.watch.questions import Questions
from allranks.watch.reader import RunReader
from allranks.watch.views import History, Parts, RankView, RunView

LOOK_SECONDS = 2.0  # between looks at a run that is not selected
SLEEP_SECONDS = 10.0  # between looks at a run that has ended
FIND_SECONDS = 2.0
BUDGET_SECONDS = 0.2  # per poll, for folders that are read for the first time
OLD_SECONDS = 24 * 3600.0
ALWAYS_SHOWN = 10  # newest runs, however old
ASK_SECONDS = 10.0
MAX_SECONDS = 120.0
TIMES_ITS_ANSWER = 20  # a SLURM that is slow to answer is asked less often
CLOSE_SECONDS = 0.5
JUDGE_SECONDS = 20.0  # between judgements of a running run
FIRST_SECONDS = 3.0  # how long the first screen may wait for an answer

Ask = Callable[[Sequence[RunDir]], Queue]


class Asking:
    """SLURM's newest answer. A thread does the asking, so that nobody has to wait for it."""

    def __init__(self, ask: Ask = look, clock: Callable[[], float] = time.monotonic):
        self.answer = Queue()
        self.has_answered = False
        self._ask = ask
        self._clock = clock
        self._pause = ASK_SECONDS
        self._due = 0.0
        self._thread: threading.Thread | None = None

    def ask(self, runs: Sequence[RunDir], *, wait: float = 0.0) -> bool:
        """Ask if it is time to, and wait that long; returns whether an answer has come."""
        before = self.answer
        if runs and self._thread is None and self._clock() >= self._due:
            self._thread = threading.Thread(
                target=self._run, args=(list(runs),), name="slurm", daemon=True
            )
            self._thread.start()
        if self._thread is not None:
            self._thread.join(wait)
            if not self._thread.is_alive():
                self._thread = None
            elif not self.has_answered:
                self.answer = Queue(silent="it has not answered yet")
        return self.answer is not before

    def hurry(self) -> None:
        """The user has changed something: ask at the next opportunity."""
        self._due = 0.0

    def _run(self, runs: list[RunDir]) -> None:
        begin = self._clock()
        answer = self._ask(runs)
        took = self._clock() - begin
        if answer.silent:
            self._pause = min(MAX_SECONDS, 2 * self._pause)
        else:
            self._pause = min(MAX_SECONDS, max(ASK_SECONDS, TIMES_ITS_ANSWER * took))
        self._due = self._clock() + self._pause
        self.has_answered = True
        self.answer = answer

    def close(self) -> None:
        """Hardly wait for SLURM: a question still open ends with the process."""
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS)


class Watcher:
    """Follows the runs of a folder, or only some of them. Call `poll`, then the others."""

    def __init__(
        self,
        runs: Path,
        only: Sequence[RunDir] | None = None,
        *,
        old: bool = False,
        stalled: float | None = None,
        ask: Ask = look,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.folder = runs
        self.only = list(only) if only is not None else None
        self.shows_old = old or only is not None
        self.look_seconds = LOOK_SECONDS
        self.stalled = stalled  # seconds without a step; None: judged by earlier steps
        self._now = now
        self._asking = Asking(ask)
        self._judging = Questions(judge, JUDGE_SECONDS)
        self._followed: dict[str, Followed] = {}  # newest first
        self._newest: set[str] = set()
        self._find_due = 0.0
        self._folder_sign = -1
        self._is_first = True
        self._is_behind = False  # some paces of ended runs are still to be read

    def poll(self, detail: Collection[str] = (), *, budget: float = BUDGET_SECONDS) -> bool:
        """Read what is new, of runs in `detail` from all ranks; returns whether anything was."""
        begin = time.monotonic()
        has_news = self._find(begin)
        has_news |= self._ask_slurm()
        looked = []
        reading = time.monotonic()  # only now: asking SLURM may have taken a while
        for one in self._followed.values():
            is_wanted = one.run.name in detail
            if not is_wanted and begin < one.due:
                continue
            if not one.is_read and not is_wanted and time.monotonic() - reading > budget:
                continue
            has_news |= self._look(one, begin, all_ranks=is_wanted, budget=budget)
            looked.append(one)
        self._is_first = False
        if looked or self._is_behind:
            has_news |= self._compare(looked, reading + budget)
        return has_news | self._judge(detail)

    def judge_all(self) -> None:
        """Judge every run that is shown, now; `poll` judges only those in `detail`, in a thread."""
        for one in self._followed.values():
            if not one.is_hidden and has_steps(one.view):
                one.judgement = judge(one.run, one.measured)
                self._show(one)

    def shown(self, names: Collection[str]) -> list[tuple[RunDir, RunView]]:
        """These runs, with their views."""
        followed = (one for name, one in self._followed.items() if name in names)
        return [(one.run, one.view) for one in followed if one.view is not None]

    def runs(self) -> list[RunView]:
        """Queued and running runs, newest first, then the others."""
        shown = [one for one in self._followed.values() if one.view and not one.is_hidden]
        shown.sort(key=lambda one: one.view is not None and not one.view.is_active)
        return [one.view for one in shown if one.view is not None]

    def num_old(self) -> int:
        """How many runs are hidden because they ended long ago."""
        return sum(one.is_old for one in self._followed.values())

    def run_dir(self, name: str) -> RunDir | None:
        one = self._followed.get(name)
        return one.run if one else None

    def followed(self, name: str) -> Followed:
        """A run by its name, with its job.yaml, its run.json and the reader of its events."""
        return self._followed[name]

    def ranks(self, name: str) -> list[RankView]:
        """The ranks of a run that was in `detail`."""
        one = self._followed.get(name)
        if one is None:
            return []
        parts = one.reader.parts()
        slowest = parts.slowest_rank if parts else one.reader.longest_rank()
        readers = sorted(one.reader.ranks.items())
        return [reader.view(slowest=rank == slowest) for rank, reader in readers]

    def parts(self, name: str) -> Parts | None:
        one = self._followed.get(name)
        return one.reader.parts() if one else None

    def history(self, name: str) -> History | None:
        one = self._followed.get(name)
        return one.reader.history() if one else None

    def hurry(self, name: str) -> None:
        """The user has done something to this run: look at it, and ask SLURM, at the next poll."""
        self._asking.hurry()
        if name in self._followed:
            self._followed[name].due = 0.0

    @property
    def silence(self) -> str | None:
        """Why SLURM did not answer; None if it did."""
        return self._asking.answer.silent

    def close(self) -> None:
        self._asking.close()
        self._judging.close()

    def _find(self, now: float) -> bool:
        """Find runs that are new or gone; returns whether there are any."""
        if now < self._find_due:
            return False
        self._find_due = now + min(FIND_SECONDS, self.look_seconds)
        sign = modified(self.folder)
        if sign == self._folder_sign:
            return False
        self._folder_sign = sign
        found = list_runs(self.folder)
        before, now_here = self._followed, {}
        for run in self.only if self.only is not None else found:
            now_here[run.name] = before.get(run.name) or Followed(run, RunReader(run))
        if self.only is not None:
            jobs = {run.job_name for run in self.only}
            for run in found:
                if run.job_name in jobs and run.name not in now_here:
                    aside = Followed(run, RunReader(run), is_aside=True)
                    now_here[run.name] = before.get(run.name) or aside
        self._followed = now_here  # in one assignment: other threads look up runs by name
        self._newest = set(list(self._followed)[:ALWAYS_SHOWN])
        return list(before) != list(self._followed)

    def _ask_slurm(self) -> bool:
        """Ask SLURM; returns whether an answer has come, whose runs are then looked at again."""
        concerned = [one for one in self._followed.values() if one.may_have_jobs]
        for one in concerned:
            one.info = one.info or one.run.info()
        runs = [one.run for one in concerned if one.info.get("jobs")]
        has_answer = self._asking.ask(runs, wait=FIRST_SECONDS if self._is_first else 0.0)
        if has_answer:
            for one in concerned:
                one.due = 0.0
        return has_answer

    def _look(self, one: Followed, now: float, *, all_ranks: bool, budget: float) -> bool:
        before, is_changed = one.problem, False
        try:
            is_changed = self._read(one, now, all_ranks=all_ranks, budget=budget)
            if is_changed:
                one.problem = one.run.problem()
        except Exception as error:  # anything unforeseen spoils only this run's line
            one.status, one.problem = RunState("failed"), unreadable(error)
            one.is_read, one.due = True, now + SLEEP_SECONDS
        return is_changed or one.problem != before

    def _read(self, one: Followed, now: float, *, all_ranks: bool, budget: float) -> bool:
        is_changed = one.has_changed()
        was_active = one.is_active
        if is_changed or was_active or not one.is_settled:
            one.is_settled = not was_active and one.is_read  # judge again once all is written
            one.status = look_at_run(one.run, one.info, self._asking.answer)
        one.is_old = not self.shows_old and self._is_old(one)
        one.due = now + (self.look_seconds if one.is_active else SLEEP_SECONDS)
        is_wanted = all_ranks or not one.is_hidden
        if is_wanted and (is_changed or was_active or all_ranks or not one.is_settled):
            is_changed |= one.reader.look(all_ranks=all_ranks, seconds=budget)
        if is_wanted and one.is_active:
            one.look_for_remarks()
        one.is_read = True
        if is_changed or was_active:
            one.is_measured = False
        return is_changed

    def _compare(self, looked: Sequence[Followed], deadline: float) -> bool:
        """Update the views of these runs, and of others whose comparison they change."""
        for one in looked:
            one.find_sets()
        comparable = ComparableRuns(self._followed.values(), deadline)
        changed = {one.run.name for one in looked}
        for one in self._followed.values():
            if one.is_hidden:
                continue
            if not one.is_measured and comparable.measure(one) and one.is_measured:
                changed.add(one.run.name)
            if (comparison := comparable.of(one)) != one.comparison:
                one.comparison = comparison
                changed.add(one.run.name)
        self._is_behind = comparable.is_behind
        return any([self._show(self._followed[name]) for name in changed])

    def _judge(self, names: Collection[str]) -> bool:
        """Ask what limits these runs; returns whether any answer is new."""
        wanted = [(run, view) for run, view in self.shown(names) if has_steps(view)]
        if not self._judging.look(wanted):
            return False
        for one in self._followed.values():
            one.judgement = self._judging.of(one.run.name) or one.judgement
        return any([self._show(one) for one in self._followed.values()])

    def _show(self, one: Followed) -> bool:
        """Rebuild its view; returns whether it has changed."""
        if not one.is_read or one.is_hidden:
            return False
        try:
            view = run_view(one, now=self._now(), stalled=self.stalled)
        except Exception as error:  # spoils only this run's line
            view = RunView(
                run=one.run.name,
                run_dir=str(one.run.path),
                job=one.run.job_name,
                state="failed",
                reason=unreadable(error),
            )
        has_news, one.view = view != one.view, view
        return has_news

    def _is_old(self, one: Followed) -> bool:
        if one.is_active or one.run.name in self._newest:
            return False
        last = one.run.attempts()[-1:]
        lead = one.run.events(last[0], 0) if last else one.run.path
        return self._now() - modified(lead) / 1e9 > OLD_SECONDS


def has_steps(view: RunView | None) -> bool:
    return view is not None and bool(view.step)
