"""Feeds the page of `watch --web`: one thread reads for all browsers, each gets what is new."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from functools import cache, partial
from typing import Any

from allranks.run.folder import RunDir
from allranks.show.secrets import redact, redact_all
from allranks.watch import logs, page_data
from allranks.watch.cells import DEFAULT_MARKS, Mark
from allranks.watch.live import Watcher
from allranks.watch.page_data import Wish
from allranks.watch.questions import Questions
from allranks.watch.views import RunView

TICK_SECONDS = 0.5
LOOK_SECONDS = 1.0  # between looks at runs that nobody has chosen
MAX_TICK_SECONDS = 1.0
BUDGET_SECONDS = 0.4  # per look, for what was written before anybody looked
BEAT_SECONDS = 4.0
LONE_SECONDS = 2.0  # between looks while no browser is open
FILES_SECONDS = 5.0
PAST_SECONDS = 1.4
DIAGNOSE_SECONDS = 60.0  # between questions to the doctor about a running run

# The state of a page without runs.
NOTHING: dict[str, Any] = {
    **{"runs": {}, "order": [], "chosen": None, "problem": None},
    **{"curves": {}, "heat": None, "use": None, "ranks": {}, "columns": [], "parts": None},
    **{"head": None, "files": {}, "file": None, "findings": None},
}

UNANSWERED: dict[str, Any] = {"list": None, "problem": None}  # by the doctor

Notify = Callable[[list[RunView]], object]
Diagnose = Callable[[RunDir], list[dict[str, Any]]]


def findings_of(diagnose: Diagnose, run: RunDir) -> dict[str, Any]:
    """What the doctor finds in a run, or why it could not examine it."""
    try:
        return {"list": redact_all(diagnose(run)), "problem": None}
    except Exception as error:  # the page works without it, and says so
        return {"list": [], "problem": redact(f"{type(error).__name__}: {error}")}


class Hub:
    """Reads what browsers ask for. Only its thread calls the watcher."""

    def __init__(
        self,
        watcher: Watcher,
        *,
        marks: Mapping[str, Mark] = DEFAULT_MARKS,
        diagnose: Diagnose | None = None,
        notify: Notify | None = None,
    ) -> None:
        self.watcher = watcher
        watcher.look_seconds = LOOK_SECONDS
        self.marks = marks
        self._notify = notify
        self._findings = (
            Questions(partial(findings_of, diagnose), DIAGNOSE_SECONDS) if diagnose else None
        )
        self._wishes: dict[object, Wish] = {}  # one per connection
        self._pictures: dict[Wish, dict[str, Any]] = {}
        self._files: dict[str, tuple[float, list[str]]] = {}
        self._hurried: list[str] = []
        self._read: set[str] = set()  # runs whose ranks have all been read
        self._pasts: dict[str, tuple[float, dict[str, Any]]] = {}
        self._pasts_due = math.inf
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._news = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self) -> None:
        """Call this in the server's event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def close(self) -> None:
        """End all connections and the thread."""
        self._closing.set()
        self._wake.set()
        self._tell()

    @property
    def num_pages(self) -> int:
        """How many pages are connected now."""
        return len(self._wishes)

    def join(self, seconds: float) -> None:
        if self._thread.ident is not None:
            self._thread.join(seconds)

    def hurry(self, run: str) -> None:
        self._hurried.append(run)
        self._wake.set()

    async def follow(self, wish: Wish) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        """Everything once, then changes, and a beat when nothing changes. Ends with the server.

        Nothing is queued for a slow browser: it gets all changes at once when it is ready.
        """
        key = object()
        self._wishes[key] = wish
        self._wake.set()
        sent: dict[str, Any] | None = None
        last = time.monotonic()
        try:
            while not self._closing.is_set():
                news = self._news
                now = self._pictures.get(wish)
                if now is not None and now is not sent:
                    step = {} if sent is None else page_data.change(sent, now)
                    if sent is None:
                        yield "all", {"state": now}
                    elif step is not None:
                        yield "change", {"change": step}
                    last = time.monotonic() if step is not None else last
                    sent = now
                    continue
                if time.monotonic() - last >= BEAT_SECONDS:
                    last = time.monotonic()
                    yield "beat", {}
                with suppress(TimeoutError):
                    await asyncio.wait_for(news.wait(), BEAT_SECONDS)
        finally:
            del self._wishes[key]

    def _run(self) -> None:
        while not self._closing.is_set():
            if not self._wishes:  # nobody looks: nothing is read except for --notify
                self._pictures, self._pasts, self._read = {}, {}, set()
                self._wake.wait(None if self._notify is None else LONE_SECONDS)
                if not self._wake.is_set():
                    with suppress(Exception):  # there is no page to show it on
                        self.watcher.poll()
                        self._tell_notifier()
                self._wake.clear()
                continue
            self._wake.clear()
            begin = time.monotonic()
            try:
                self._look()
            except Exception as error:  # shown on the page; a later look may succeed
                self._show_problem(error)
            took = time.monotonic() - begin
            self._wake.wait(min(MAX_TICK_SECONDS, max(TICK_SECONDS, took)))

    def _tell_notifier(self) -> None:
        if self._notify is not None:
            self._notify(self.watcher.runs())

    def _look(self) -> None:
        wishes = set(self._wishes.copy().values())
        while self._hurried:
            self.watcher.hurry(self._hurried.pop())
        poll = partial(self.watcher.poll, budget=BUDGET_SECONDS)
        has_news = poll(self._names(wishes) & self._read)
        names = self._names(wishes)
        if not names <= self._read:
            # Reading all ranks for the first time can take seconds: show the rest before.
            self._show(wishes)
            poll(names)
            has_news, self._pasts = True, {}
        self._read = names
        if self._findings is not None:
            has_news |= self._findings.look(self.watcher.shown(names))
        self._tell_notifier()
        if has_news or wishes != set(self._pictures) or time.monotonic() >= self._pasts_due:
            self._show(wishes)

    def _names(self, wishes: set[Wish]) -> set[str]:
        return {name for wish in wishes if (name := self._chosen(wish)) is not None}

    def _show_problem(self, error: Exception) -> None:
        problem = redact(f"the run folders cannot be read: {type(error).__name__}: {error}")
        wishes = set(self._wishes.copy().values())
        before = {wish: self._pictures.get(wish, NOTHING) for wish in wishes}
        self._pictures = {wish: {**state, "problem": problem} for wish, state in before.items()}
        self._tell()

    def _show(self, wishes: set[Wish]) -> None:
        self._pasts_due = math.inf
        views = {view.run: view for view in self.watcher.runs()}
        runs = {name: page_data.run_line(view, time.time()) for name, view in views.items()}
        self._pictures = {wish: self._picture(wish, views, runs) for wish in wishes}
        self._tell()

    def _chosen(self, wish: Wish) -> str | None:
        """The run that was asked for, else the first in the list."""
        if wish.run is not None and self.watcher.run_dir(wish.run) is not None:
            return wish.run
        return next((view.run for view in self.watcher.runs()), None)

    def _picture(
        self, wish: Wish, views: dict[str, RunView], runs: dict[str, dict[str, Any]]
    ) -> dict[str, Any]:
        watcher, chosen = self.watcher, self._chosen(wish)
        state: dict[str, Any] = NOTHING | {"runs": runs, "order": list(runs), "chosen": chosen}
        state["curves"] = {}
        for name in (chosen, *wish.beside):
            if name in views:
                pace = self._past(name)["pace"]
                state["curves"][name] = {"loss": page_data.loss(views[name]), "pace": pace}
        if chosen is None or chosen not in views:
            return state
        view, files = views[chosen], self._log_files(chosen)
        state |= {
            "head": page_data.head(view, watcher.silence, time.time()),
            "files": logs.log_titles(files),
            "file": logs.first_log(files, view.culprit),
            "findings": self._found(view),
        }
        if chosen not in self._read:
            return state
        past = self._past(chosen)
        return state | {
            "heat": past["heat"](wish.metric),
            "use": past["use"],
            **page_data.rank_table(watcher.ranks(chosen), self.marks),
            "parts": page_data.parts_line(watcher.parts(chosen), view),
        }

    def _found(self, view: RunView) -> dict[str, Any] | None:
        """The doctor's findings, without the limit, which the page shows elsewhere."""
        if self._findings is None:
            return None
        found = self._findings.of(view.run) or UNANSWERED
        limit = view.judgement.verdict.cause if view.judgement else None
        others = [one for one in found["list"] or () if one["cause"] != limit]
        return found if found["list"] is None else {**found, "list": others}

    def _past(self, name: str) -> dict[str, Any]:
        """A run's curves: thousands of numbers, so they are not rebuilt at every look."""
        due, past = self._pasts.get(name, (0.0, {}))
        if time.monotonic() >= due:
            history = self.watcher.history(name)
            past = {
                "pace": page_data.pace(history),
                "use": page_data.use(history),
                "heat": cache(partial(page_data.heat, history)),
            }
            self._pasts[name] = (time.monotonic() + PAST_SECONDS, past)
        else:
            self._pasts_due = min(self._pasts_due, due)  # show it again once it may be rebuilt
        return past

    def _log_files(self, name: str) -> list[str]:
        due, files = self._files.get(name, (0.0, []))
        run = self.watcher.run_dir(name)
        if run is not None and time.monotonic() >= due:
            files = list(logs.log_files(run))
            self._files[name] = (time.monotonic() + FILES_SECONDS, files)
        return files

    def _tell(self) -> None:
        def tell() -> None:
            before, self._news = self._news, asyncio.Event()
            before.set()

        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(tell)
