"""The live screen of runs: what each key does. draw.py draws it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rich.text import Text

from allranks.errors import AllranksError
from allranks.watch.cells import Mark
from allranks.watch.draw import LOG_KEYS, Scene, help_screen, log_screen, screen
from allranks.watch.live import Watcher
from allranks.watch.logs import LogPage, first_log, log_files, log_titles
from allranks.watch.notify import Notifier
from allranks.watch.terminal import LETTERS
from allranks.watch.views import RankView, RunView

MESSAGE_SECONDS = 6.0

Stop = Callable[[str], str]  # takes a run's name, says what was done


@dataclass(slots=True)
class OpenLog:
    """A log that is open on the screen."""

    run: str
    file: str
    title: str
    page: LogPage
    wanted: str = ""  # the search term
    is_typed: bool = False  # the term is being typed
    is_found: bool = True

    def draw(self, width: int, height: int) -> list[Text]:
        lines = self.page.page(height - 2) or ["(this log is empty)"]
        bottom = f"{self.page.state()}  {LOG_KEYS}"
        if self.is_typed:
            bottom = f"search: {self.wanted}_  enter: search  escape: cancel"
        elif self.wanted and not self.is_found and self.page.found is None:
            bottom = f"{self.wanted!r} is not in this log  {bottom}"
        elif self.wanted:
            none = "" if self.is_found else "no more "
            bottom = f"{none}{self.wanted!r}  n: next above  N: next below  {bottom}"
        title = f"{self.run}  {self.title}"
        return log_screen(title, lines, width, height, bottom, self.wanted)

    def type(self, key: str, rows: int) -> None:
        """Handle a key while the search term is typed."""
        if key in ("enter", "escape"):
            self.is_typed = False
            self.wanted = self.wanted if key == "enter" else ""
            self.page.found = None
            self.find(rows, up=True)
        elif key == "backspace":
            self.wanted = self.wanted[:-1]
        elif len(key) == 1 and key.isprintable():
            self.wanted += key

    def find(self, rows: int, *, up: bool) -> None:
        self.is_found = not self.wanted or self.page.find(self.wanted, rows, up=up)


class RunScreen:
    """What the user sees, and what each key does."""

    def __init__(
        self, watcher: Watcher, marks: Mapping[str, Mark], stop: Stop, notifier: Notifier | None
    ) -> None:
        self.watcher, self.marks, self.notifier = watcher, marks, notifier
        self._stop = stop
        self.runs: list[RunView] = []
        self.ranks: list[RankView] = []
        self.selected: str | None = None
        self.selected_rank: int | None = None
        self.asked: str | None = None  # the run that the user is asked whether to stop
        self.shows_help = False
        self.log: OpenLog | None = None
        self.is_over = False
        self._message, self._message_until = "", 0.0
        self._stopping: list[threading.Thread] = []

    def look(self) -> None:
        """Read what is new."""
        self.watcher.poll({self.selected} if self.selected else ())
        self.runs = self.watcher.runs()
        names = [run.run for run in self.runs]
        if self.selected not in names:
            self.selected = names[0] if names else None
            self.selected_rank = None
            if self.selected:
                self.watcher.poll({self.selected})
        self.ranks = self.watcher.ranks(self.selected) if self.selected else []
        if self.selected_rank not in [rank.rank for rank in self.ranks]:
            self.selected_rank = None
        if self.log is not None:
            self.log.page.look()
        if self.notifier is not None:
            for name, state in self.notifier.look(self.runs).items():
                self.say(f"{name}: {state}")
            while self.notifier.problems:
                self.say(self.notifier.problems.pop())

    def draw(self, width: int, height: int) -> list[Text]:
        if self.shows_help:
            return help_screen(self.marks, width, height)
        if self.log is not None:
            return self.log.draw(width, height)
        return screen(self.scene(), width, height)

    def scene(self) -> Scene:
        message = self._message if time.monotonic() < self._message_until else ""
        if self.asked:
            message = f"stop {self.asked}? It saves a checkpoint first.  y: yes  n: no"
        return Scene(
            runs=self.runs,
            selected=self.selected,
            ranks=self.ranks,
            parts=self.watcher.parts(self.selected) if self.selected else None,
            selected_rank=self.selected_rank,
            message=message,
            asks=self.asked is not None,
            num_old=self.watcher.num_old(),
            silence=self.watcher.silence,
            now=time.time(),
            marks=self.marks,
        )

    def press(self, key: str, rows: int) -> None:
        """Handle a key on whichever screen is shown, of `rows` lines."""
        if self.log is not None and self.log.is_typed:
            return self.log.type(key, max(1, rows - 2))
        key = LETTERS.get(key, key)
        if self.shows_help:
            self.shows_help = False
        elif self.asked:
            self._answer(key)
        elif self.log is not None:
            self._press_in_log(self.log, key, rows)
        elif key in ("q", "Q"):
            self.is_over = True
        elif key == "?":
            self.shows_help = True
        elif key in ("up", "down", "page up", "page down", "home", "end"):
            self._move(key, rows)
        elif key in ("tab", "right", "left", "escape"):
            goes_in = key in ("tab", "right") and self.selected_rank is None and self.ranks
            self.selected_rank = self.ranks[0].rank if goes_in else None
        elif key == "enter":
            self._open_log()
        elif key == "s":
            self._ask_to_stop()

    def say(self, text: str) -> None:
        self._message, self._message_until = text, time.monotonic() + MESSAGE_SECONDS

    def close(self) -> None:
        """Wait until stops and notifications that were started are done."""
        for thread in self._stopping:
            thread.join()
        if self.notifier is not None:
            self.notifier.close()
        self.watcher.close()

    def _move(self, key: str, rows: int) -> None:
        in_ranks = self.selected_rank is not None
        names = [rank.rank for rank in self.ranks] if in_ranks else [run.run for run in self.runs]
        if not names:
            return
        at = names.index(self.selected_rank if in_ranks else self.selected)  # type: ignore[arg-type]
        page = max(1, rows // 2)
        change = {"up": -1, "down": 1, "page up": -page, "page down": page}.get(key, 0)
        at = {"home": 0, "end": len(names) - 1}.get(key, at + change)
        chosen = names[max(0, min(len(names) - 1, at))]
        if in_ranks:
            self.selected_rank = int(chosen)
        elif chosen != self.selected:
            self.selected = str(chosen)
            self.look()

    def _open_log(self, by: int = 0) -> None:
        """Open the log of the selected rank, else of the one that ended the run, else the first.

        `by`: how many logs after the one that is open now.
        """
        run = self.watcher.run_dir(self.selected) if self.selected else None
        if run is None:
            return
        files = log_files(run)
        rank = self.selected_rank
        if rank is None:
            rank = next((one.culprit for one in self.runs if one.run == run.name), None)
        name = first_log(files, rank)
        if self.log is not None and self.log.file in files:
            names = list(files)
            name = names[(names.index(self.log.file) + by) % len(names)]
        if name is None:
            self.say(f"{run.name} has no logs yet")
            return
        self.log = OpenLog(run.name, name, log_titles(files)[name], LogPage(files[name]))
        self.log.page.look()

    def _press_in_log(self, log: OpenLog, key: str, rows: int) -> None:
        page = max(1, rows - 2)
        moves = {"up": -1, "down": 1, "page up": -page, "page down": page, " ": page}
        moves |= {"home": -(1 << 60), "end": 1 << 60}
        if key in moves:
            log.page.scroll(moves[key], page)
        elif key == "/":
            log.wanted, log.is_typed = "", True
        elif key in ("n", "N"):
            log.find(page, up=key == "n")
        elif key in ("left", "right"):
            self._open_log(1 if key == "right" else -1)
        elif key in ("q", "escape", "enter"):
            self.log = None

    def _ask_to_stop(self) -> None:
        run = next((run for run in self.runs if run.run == self.selected), None)
        if run is not None and run.is_active:
            self.asked = run.run
        elif run is not None:
            self.say(f"{run.run}: already {run.state}")

    def _answer(self, key: str) -> None:
        name, self.asked = self.asked, None
        if key not in ("y", "Y") or name is None:
            self.say("not stopped")
            return
        self.say(f"{name}: stopping")

        def stop() -> None:
            try:
                self.say(f"{name}: {self._stop(name)}")
            except AllranksError as error:
                self.say(f"{error.what}; {error.fix}")
            self.watcher.hurry(name)

        thread = threading.Thread(target=stop, name="stop", daemon=True)
        thread.start()
        self._stopping.append(thread)
