"""What the user sees of runs: remarks, banner, progress, summary, the tables of `ls` and drafts."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from rich.cells import cell_len, set_cell_size
from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from allranks.job.job import Job
from allranks.launch.rank_output import Echo
from allranks.layout import Layout
from allranks.run.events import read_events, read_last_events
from allranks.run.failures import failed_ranks, failure_in_words
from allranks.run.folder import RunDir
from allranks.run.record import Counted, RankRecord, steps_by_rank
from allranks.show.numbers import (
    NOTHING,
    count,
    duration,
    metric,
    moment,
    number,
    percent,
    progress,
)
from allranks.show.tables import STATE_STYLES, Cell, Table, aligned, show_table
from allranks.show.text import clean
from allranks.timing.remarks import SPEEDUP
from allranks.timing.result import compile_words, mfu_words, verdict_lines, verdict_table

PLAIN_LINE_SECONDS = 10.0
READ_SECONDS = 0.5
FIRST_STEP_SECONDS = 60.0  # without a step, before the user of a benchmark is told
FIRST_NOTE_SECONDS = 30.0  # until the second note on a wait; then twice as long each time
SHOWN_STEPS = 128  # that samples/s is measured over
PAUSES_MATTER = 1.1  # how many times longer a step is with its share of evaluations and saves
LIST_COLUMNS = ("run", "state", "layout", "job", "step", "left")


class Screen:
    """Follows one run. `console` decides whether people read stdout or, with --json, stderr.

    `echo`: show what the rank prints, too. `show`: what all of these print, line by line.
    """

    makes_steps = True  # what is shown; if not, nobody is told that there are none

    def __init__(
        self,
        console: Console,
        *,
        debug: bool = False,
        echo: bool = True,
        show: Sequence[int] | None = None,
    ) -> None:
        self.console = console
        self._status = StatusLine(console, lambda: self._echo.column if self._echo else 0)
        self._notes = Notes(self._note)
        self._wait_notes = Notes(self._note, after=2.0, over="")  # nodes start at about one time
        self.echo = echo
        self.debug = debug
        self.show = show
        self._echo: Echo | None = None
        self._run: RunDir | None = None
        self._job: Job | None = None
        self._rank = 0
        self._attempt = -1
        self._stopping = False
        self._bar: Bar | None = None

    def mute(self) -> None:
        """Show nothing more, because it can no longer be written."""
        self._bar = None
        self.makes_steps = False  # nobody would read that there are none
        self.console = Console(file=io.StringIO())
        self._status = StatusLine(self.console)

    def _put(self, text: str) -> None:
        try:
            self._status.put(text)
        except (OSError, ValueError):  # nobody sees it any more: the training goes on
            self.mute()

    def remark(self, text: str) -> None:
        with suppress(OSError, ValueError):
            self._note(text)

    def stalled(self, line: str | None, seconds: float = 0.0) -> None:
        """Show that the ranks make no progress; None takes it away when they do."""
        if not self.console.is_terminal:
            self._notes.show(line, seconds)
        elif self._bar is not None:
            self._bar.note(line)
        else:
            self._status.show(line)

    def waiting(self, line: str, seconds: float) -> None:
        """Show which nodes this one waits for, and how long; `stalled(None)` takes it away."""
        is_terminal = self.console.is_terminal
        self._status.show(line) if is_terminal else self._wait_notes.show(line, seconds)

    def _note(self, text: str) -> None:
        self._status.leave()
        self.console.print(Text(f"note: {text}", style="yellow"), soft_wrap=True)

    def stopping(self, signal_name: str) -> None:
        """Called for each rank that is told to stop; said once."""
        if not self._stopping:
            self._stopping = True
            self._status.leave()
            text = f"{signal_name}: stopping{self._when_stopping()}"
            self.console.print(Text(text, style="yellow"), soft_wrap=True)

    def _when_stopping(self) -> str:
        native = self._job is not None and self._job.command is None
        how = ", saving a checkpoint at the next step"
        if not native:
            how = "; the script was told to stop"
        return how + ("; Ctrl-C (again) stops at once" if self.console.is_terminal else "")

    def follow(self, run: RunDir, job: Job, rank: int) -> None:
        """Show this run from now on, as `rank` sees it."""
        self._run, self._job, self._rank = run, job, rank
        self.console.print(Text(f"{run.name}: starting {job.layout}", style="dim"), soft_wrap=True)
        if self.echo:
            ways = {"has_bar": job.command is None, "hides": not self.debug}
            self._echo = Echo(self.console, rank, self.show, write=self._put, **ways)

    def open_terminal(self) -> str | None:
        """The path of a terminal for the rank that is followed, if it gets one."""
        return self._echo.open_terminal() if self._echo is not None else None

    def starting(self, attempt: int) -> None:
        """Called by whoever starts the ranks of an attempt, just before."""
        if self._echo is not None and self._run is not None:
            self._echo.begin(self._run, attempt)

    def update(self, attempt: int) -> None:
        """Show what is new. Call it often: it reads the disk twice a second at most."""
        assert self._run is not None and self._job is not None
        if attempt != self._attempt:
            if self._attempt >= 0:
                self._close()
                died = failed_ranks(self._run, self._attempt)
                why = failure_in_words(died[0]) if died else "a rank died"
                self.remark(f"{why}: all ranks restart (attempt {attempt})")
            self._attempt = attempt
            self.starting(attempt)
            self._events = self._run.events(attempt, self._rank)
            self._start: dict[str, Any] | None = None
            self._next_read = 0.0
        now = time.monotonic()
        if now < self._next_read:
            return
        # A log is shown sooner than progress: people wait for their own script's lines.
        self._next_read = now + (READ_SECONDS if self._job.command is None else 0.1)
        if self._echo is not None:
            self._echo.update()
        if self._job.command is None:
            self._show_progress()

    def finish(self, attempt: int) -> None:
        """Show the rest and remove the bar."""
        self._next_read = 0.0
        self.update(attempt)
        if self._echo is not None:
            self._echo.finish()
        self._close()

    def summary(self, result: dict[str, Any], *, can_go_on: bool = True) -> None:
        """The table at the end, the folder, and the accuracy if there is one."""
        run, say = RunDir(Path(result["run_dir"])), partial(self.console.print, soft_wrap=True)
        with suppress(OSError):
            say(Text(result["run"], style="bold"))
            for remark in result.get("remarks", ()):
                word = "warning" if SPEEDUP in remark["forbids"] else "note"
                say(Text(f"{word}: {remark['text']}", style="yellow"))
            show_table(self.console, summary_table(result))
            say(Text(result["run_dir"]))
            if since := result.get("nonfinite_since"):
                lost = f"loss nan since step {since}: allranks doctor {run.reference} shows why"
                say(Text(lost, style="red"))
            if result.get("reason"):
                say(Text(result["reason"], style="yellow"))
            if result["state"] == "stopped" and can_go_on:
                say(f"continue with: {run.resume_command}")
            accuracy = result["metrics"].get("val_accuracy")
            if accuracy is not None:
                say(f"validation accuracy {percent(accuracy)}", highlight=False)

    def _show_progress(self) -> None:
        if self._start is None:
            self._start = next(read_events(self._events, kind="start"), None)
            if self._start is None:
                return
            assert self._run is not None and self._job is not None
            self._status.clear()
            self.console.print(banner(self._start, self._job), highlight=False, soft_wrap=True)
            self._bar = Bar(self.console, self._start, self._job)
        if self._bar is not None:
            self._bar.show(read_last_events(self._events))

    def _close(self) -> None:
        self._status.clear()
        if self._bar is not None:
            self._bar.close()
            self._bar = None


class StatusLine:
    """One line below everything else on a terminal, which `clear` removes without a trace.

    `column`: where the cursor is. Whoever writes anything else clears the line first; other threads
    write through `put`.
    """

    def __init__(self, console: Console, column: Callable[[], int] = lambda: 0) -> None:
        self._console = console
        self._column = column
        self._text = ""  # what is shown
        self._came_from = 0  # the column to go back to
        self._lock = threading.RLock()

    def put(self, text: str) -> None:
        """Write something else, from where the cursor is without the line."""
        with self._lock:
            self.clear()
            self._write(text)

    def show(self, text: str | None) -> None:
        """Show this line in place of the previous one; None: show no line."""
        with self._lock:
            if text is None:
                self.clear()
                return
            text = fitting(text, self._console.width - 1)
            if text == self._text:
                return
            before = ""
            if not self._text:
                self._came_from = self._column()
                before = "\r\n" if self._came_from > 0 else ""
            colour, plain = ("", "") if self._console.no_color else ("\x1b[33m", "\x1b[0m")
            # The cursor stays at its beginning: a terminal's ^C must not wrap below it.
            self._write(f"{before}\r{colour}{text}{plain}\x1b[K\r")
            self._text = text

    def clear(self) -> None:
        """Remove the line; the cursor goes back to where it was."""
        with self._lock:
            if not self._text:
                return
            back = ""
            if 0 < self._came_from < self._console.width:  # at the edge it was about to wrap
                back = f"\x1b[A\x1b[{self._came_from + 1}G"
            self._text = ""
            self._write(f"\r\x1b[K{back}")

    def leave(self) -> None:
        """Remove the line, and go to a fresh one: a rank's bar may have been left in mid-line."""
        with self._lock:
            self.clear()
            if self._column() > 0:
                self._write("\r\n")

    def _write(self, text: str) -> None:
        self._console.file.write(text)
        self._console.file.flush()


class Notes:
    """For output that cannot be redrawn: a note when a wait begins, then fewer, one at its end.

    `after`: seconds before the first one. `over`: what is said at the end; empty: nothing.
    """

    def __init__(
        self,
        note: Callable[[str], None],
        *,
        after: float = 0.0,
        over: str = "makes progress again after",
    ) -> None:
        self._note = note
        self._after = after
        self._over = over
        self._seconds: float | None = None  # as last reported
        self._next = 0.0

    def show(self, text: str | None, seconds: float) -> None:
        """`seconds`: that it has lasted. None: it is over."""
        if text is None or seconds < (self._seconds or 0.0):
            if self._seconds is not None and self._over:
                self._note(f"{self._over} {duration(self._seconds, whole=True)}")
            self._seconds = None
        if text is None or seconds < self._after:
            return
        if self._seconds is None or seconds >= self._next:
            self._note(text)
            self._next = FIRST_NOTE_SECONDS
            while self._next <= seconds:
                self._next *= 2
        self._seconds = seconds


def fitting(text: str, width: int) -> str:
    """As much of a line as a terminal has room for."""
    return text if cell_len(text) <= width else set_cell_size(text, max(0, width - 1)) + "…"


class NotedProgress(Progress):
    """A bar with a line of text below it while there is something to say."""

    note = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from super().get_renderables()
        if self.note:
            room = self.console.width - len("^C") - 1  # the terminal shows it at the end
            yield Text(fitting(self.note, room), style="yellow", no_wrap=True)


class Bar:
    """A progress bar on a terminal, a line every ten seconds elsewhere."""

    def __init__(self, console: Console, start: dict[str, Any], job: Job) -> None:
        self._console = console
        self._start = start
        self._epochs = job.epochs
        self._loss: float | None = None
        self._record = RankRecord(0, [start], most=SHOWN_STEPS)
        self._next_line = time.monotonic() + PLAIN_LINE_SECONDS
        self._progress: NotedProgress | None = None
        if console.is_terminal:
            self._progress = NotedProgress(
                TextColumn("{task.fields[where]}"),
                BarColumn(bar_width=20 if console.width >= 90 else 8),
                TextColumn("{task.fields[numbers]}"),
                console=console,
                refresh_per_second=4,
            )
            self._task = self._progress.add_task(
                "", total=start["steps"], completed=start["step"], where="", numbers=""
            )
            self._progress.start()

    def show(self, events: list[dict[str, Any]]) -> None:
        for event in RankRecord(0, events).steps:
            if event["step"] > (self._record.last_step or 0):
                self._record.take(event)
                self._loss = event["loss"] if event.get("loss") is not None else self._loss
        if not self._record.steps:
            return
        last = self._record.steps[-1]
        where, numbers = self._words(last, time.time())
        if self._progress is not None:
            room = self._console.width - len(where) - (24 if self._console.width >= 90 else 12)
            # A narrow terminal keeps the loss and the time left longest.
            while len(numbers) > 1 and len("  ".join(numbers)) > room:
                numbers.pop(-2)
            text = "  ".join(numbers)
            self._progress.update(self._task, completed=last["step"], where=where, numbers=text)
        elif time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + PLAIN_LINE_SECONDS
            step = f"step {last['step']}/{self._start['steps']}"
            line = "  ".join([where, step, *numbers])
            self._console.print(line, highlight=False, soft_wrap=True)

    def note(self, text: str | None) -> None:
        if self._progress is not None:
            self._progress.note = text or ""

    def close(self) -> None:
        self.note(None)
        if self._progress is not None:
            self._progress.stop()

    def _words(self, last: dict[str, Any], now: float) -> tuple[str, list[str]]:
        start, clock = self._start, self._record.clock
        epochs = self._epochs or -(-start["steps"] // start["steps_per_epoch"])
        numbers = []
        if self._loss is not None:
            numbers.append(f"loss {metric(self._loss)}")
        pace = self._record.samples_per_second(start["world_size"])
        if pace is not None and clock.seconds_per_step and clock.step_seconds:
            pauses = clock.seconds_per_step > PAUSES_MATTER * clock.step_seconds
            left = clock.seconds_left(start["steps"], now)
            numbers += [
                f"{number(1 / clock.seconds_per_step)} it/s",
                f"{number(pace)} samples/s{' while training' if pauses else ''}",
                f"{duration(left, whole=True)} left",
            ]
        return f"epoch {last['epoch']}/{epochs}", numbers


def banner(start: dict[str, Any], job: Job) -> str:
    """What is about to be trained, and how."""
    ranks, threads = start["world_size"], start["threads"]
    device = start["device"]
    if device == "CPU":
        device += f", {count(threads, 'thread')} a rank"
    compiled = ", compiled" if start["compile"] else ""
    length = f"{count(start['steps'], 'step')}, {count(start['steps_per_epoch'])} per epoch"
    rows = {
        "layout": f"{start['layout']}  ({count(ranks, 'rank')})",
        "ranks": f"{start['backend']} over {start['link']}" if ranks > 1 else "alone",
        "device": device,
        "model": f"{count(start['parameters'], 'parameter')}, {start['precision']}{compiled}",
        "batch": batch_product(start),
        "length": f"{count(job.epochs, 'epoch')}: {length}" if job.epochs else length,
    }
    return "\n".join(f"  {name:<8}{value}" for name, value in rows.items())


def batch_product(start: dict[str, Any]) -> str:
    """The effective batch, as micro-batch x ranks x accumulation."""
    accumulation = start["accumulation"]
    sizes = sorted({-(-size // accumulation) for size in start["rank_batch"]})
    micro = "-".join(str(size) for size in sizes)
    ranks = Layout.parse(start["layout"]).data_ranks
    even = sizes[0] * ranks * accumulation == start["global_batch"]
    sign = "=" if even and len(sizes) == 1 else "~"
    product = f"{micro} x {ranks} x {accumulation} {sign} {start['global_batch']}"
    what = "ranks" if ranks == start["world_size"] else "dp and fsdp"
    return f"{product}  (micro-batch x {what} x accumulation)"


class QuietScreen(Screen):
    """For a run that is only measured: shows nothing but what its user waits for."""

    def __init__(self, console: Console, *, makes_steps: bool = True) -> None:
        super().__init__(console, echo=False)
        self.makes_steps = makes_steps
        self._has_stepped = not makes_steps  # or it was said that it has not
        self._begin = time.monotonic()

    def remark(self, text: str) -> None:
        """Not shown: it was said before the first run."""

    def stalled(self, line: str | None, seconds: float = 0.0) -> None:
        self._notes.show(line, seconds)

    def _when_stopping(self) -> str:
        return "; what was measured is kept"

    def follow(self, run: RunDir, job: Job, rank: int) -> None:
        self._run, self._begin = run, time.monotonic()

    def update(self, attempt: int) -> None:
        """After a while without any step, say so: a script that makes none may never end."""
        if self._has_stepped or time.monotonic() - self._begin < FIRST_STEP_SECONDS:
            return
        self._has_stepped = True
        assert self._run is not None
        if not any(steps_by_rank(self._run).values()):
            super().remark(
                f"no optimizer step for {duration(FIRST_STEP_SECONDS)}; allranks logs "
                f"{self._run.name} shows its output, Ctrl-C ends it"
            )

    def finish(self, attempt: int) -> None:
        pass


def summary_table(result: dict[str, Any]) -> Table:
    """How a run ended."""
    style = {"finished": "green", "stopped": "yellow"}.get(result["state"], "red")
    rows: list[tuple[str, Cell]] = [("state", Text(result["state"], style=style))]
    rows.append(("layout", str(result["layout"])))
    if result["steps"] is not None:
        made = count(result["steps"])
        if "attempt_steps" in result:
            last = count(result["attempt_steps"])
            made += f" in {result['attempts']} attempts, {last} in the last one"
        about = "about " * (result.get("counted", {}).get("epochs") == "about")
        epochs = f" ({about}{count(result['epochs'], 'epoch')})" if result["epochs"] else ""
        rows.append(("steps", f"{made}{epochs}"))
    rows.append(("time", duration(result["seconds"])))
    values = result["metrics"].items()
    rows += [(name, metric(value)) for name, value in values if value is not None]
    if pace := throughput(result):
        rows.append(("throughput", pace))
    if result.get("compile"):
        rows.append(("step", compile_words(result["compile"])))
    return verdict_table(rows, verdict_lines(result))


def throughput(result: Mapping[str, Any]) -> str | None:
    """Samples/s if it is known, without and with evaluation, and model FLOPs utilisation."""
    counted, pace = Counted(**result.get("counted", {})), result["samples_per_second"]
    if not pace and counted.samples != "unknown":
        return None
    text = counted.words(f"{number(pace)} samples/s")
    if pace and result.get("evaluation_seconds"):
        whole = result["samples_per_second_with_evaluation"]
        share = percent(1 - whole / pace, 0)
        text += f", {number(whole)} with evaluation ({share} of the time)"
    return ", ".join(filter(None, [text, mfu_words(result.get("mfu"))]))


def show_runs(
    console: Console, aside: Console, runs: Sequence[Mapping[str, Any]], suggestions: Sequence[str]
) -> None:
    """On a terminal, a table that fits with the reasons below it; elsewhere, one line per run.

    `aside`: where suggestions go, which are not part of the list.
    """
    rows = [list_row(run) for run in runs]
    if not console.is_terminal:
        why = [Text(clean(why_of(run) or NOTHING)) for run in runs]
        columns = (*LIST_COLUMNS, "why")
        cells = [[*row, said] for row, said in zip(rows, why, strict=True)]
        for line in aligned(Table("", columns, cells, texts=columns)):
            console.print(line, soft_wrap=True)
    elif runs:
        show_table(console, Table("", LIST_COLUMNS, rows, texts=LIST_COLUMNS))
        for run in runs:
            name = f"{run['run']}: " if len(runs) > 1 else ""
            if said := why_of(run):
                style = "yellow" if run["problem"] else ""
                console.print(Text(clean(f"{name}{said}"), style=style), soft_wrap=True)
    if not runs:
        aside.print("no runs here: allranks run job.yaml starts one, allranks submit queues one")
    for line in suggestions:
        aside.print(Text(line, style="yellow"), soft_wrap=True)


def why_of(run: Mapping[str, Any]) -> str:
    """Why a run waits or has ended, and what is wrong with its folder."""
    return "; ".join(filter(None, [run["reason"], run["problem"]]))


def list_row(run: Mapping[str, Any]) -> list[Text]:
    """A run in the table of `allranks ls`."""
    job, left = run["job"], duration(run["seconds_left"], whole=True)
    if run["state"] == "queued":
        job = ",".join(run["jobs"])
        left = f"starts {moment(run['expected_start'])}" if run["expected_start"] else left
    made = progress(run["step"], run["steps"])
    if "attempt_steps" in run:
        made += f" in {run['attempts']} attempts"
    texts = (run["layout"], job, made, left)
    state = Text(run["state"], style=STATE_STYLES[run["state"]])
    return [Text(clean(run["run"])), state, *(Text(clean(text or NOTHING)) for text in texts)]


def show_draft(console: Console, columns: Mapping[str, Mapping[str, Any]]) -> None:
    """What each layout asks for, one column per layout."""
    names = next(iter(columns.values()), {})
    rows = [(name, *(str(column[name]) for column in columns.values())) for name in names]
    show_table(console, Table("", ("layout", *columns), rows, texts=tuple(columns)))
    console.print()
