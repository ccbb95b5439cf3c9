"""The line about ranks that make no progress: it comes, is rewritten, and goes without a trace."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console
from tests.unit.test_screen import START

from allranks.job.job import parse_job
from allranks.launch.screen import QuietScreen, Screen
from allranks.launch.status_line import StatusLine, fitting
from allranks.run.events import append_event
from allranks.run.folder import RunDir

LINE = "no step for 34 s: rank 1 is at train.py:9 in f"


def terminal(width: int = 80) -> tuple[Console, io.StringIO]:
    text = io.StringIO()
    return Console(file=text, force_terminal=True, no_color=True, width=width), text


def screen_of(text: str, width: int = 80) -> tuple[list[str], tuple[int, int]]:
    """What a terminal shows of this, and where its cursor is; of the few escapes that are used."""
    rows, row, column = [""], 0, 0
    while text:
        if text.startswith("\x1b["):
            end = next(at for at, letter in enumerate(text) if letter.isalpha())
            number = int(text[2:end] or 1)
            if text[end] == "A":
                row -= number
            elif text[end] == "G":
                column = number - 1
            elif text[end] == "K":
                rows[row] = rows[row][:column]
            text = text[end + 1 :]
            continue
        letter, text = text[0], text[1:]
        if letter == "\r":
            column = 0
        elif letter == "\n":
            row, column = row + 1, 0  # as a terminal driver does
            rows += [""] * (row + 1 - len(rows))
        else:
            rows[row] = rows[row][:column].ljust(column) + letter + rows[row][column + 1 :]
            column += 1
            assert column < width
    return rows, (row, column)


@pytest.mark.parametrize("before", ["", "epoch 1", "done\r\n", "done\r\nloss"])
def test_a_line_goes_without_a_trace(before: str) -> None:
    console, text = terminal()
    line = StatusLine(console, lambda: len(before.rpartition("\n")[2]))
    text.write(before)
    was = screen_of(before)
    line.show(LINE)
    rows, _ = screen_of(text.getvalue())
    assert rows[-1] == LINE and rows[:-1] == [row for row in was[0] if row]
    line.show("no step for 1 s")  # shorter: nothing of the longer one stays
    assert screen_of(text.getvalue())[0][-1] == "no step for 1 s"
    line.show(None)
    rows, cursor = screen_of(text.getvalue())
    assert [row for row in rows if row] == [row for row in was[0] if row] and cursor == was[1]
    size = len(text.getvalue())
    line.clear()
    assert len(text.getvalue()) == size  # once is enough


def test_a_line_never_wraps() -> None:
    console, text = terminal(20)
    StatusLine(console).show(LINE)
    assert screen_of(text.getvalue(), 20)[0] == ["no step for 34 s: …"]
    assert fitting("日本語" * 10, 9) == "日本語日…"


def test_where_nothing_can_be_taken_back_there_are_few_notes() -> None:
    text = io.StringIO()
    for make in (Screen, QuietScreen):
        screen = make(Console(file=text, width=200))
        for seconds in range(12, 130):
            screen.stalled(f"no step for {seconds} s: rank 1 is asleep", float(seconds))
        screen.stalled(None)
        screen.stalled(None)
    lines = [f"note: no step for {seconds} s: rank 1 is asleep" for seconds in (12, 30, 60, 120)]
    assert text.getvalue().splitlines() == [*lines, "note: makes progress again after 2m09s"] * 2


def test_with_a_bar_the_line_is_the_bar_s(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "job-20261101-120000-aaaa")
    append_event(run.events(0, 0), "start", **START)
    console, text = terminal(60)
    screen = Screen(console)
    screen.stalled("no first step after 130 s: rank 0 is at a.py:1 in f")
    screen.follow(run, parse_job({"task": "spiral"}), 0)
    screen.update(0)
    assert screen._bar is not None and screen._bar._progress is not None
    screen.stalled(f"{LINE}; and so on and so forth")
    screen._bar._progress.refresh()
    assert "no step for 34 s: rank 1 is at train.py:9 in f; and so o" in text.getvalue()
    screen.stalled(None)
    screen.finish(0)
    assert "no step" not in text.getvalue().rpartition("\x1b[2K")[2]


def test_what_a_script_prints_comes_before_the_line(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "job-20261101-120000-aaaa")
    run.log(0, 0).parent.mkdir(parents=True)
    run.log(0, 0).write_text("epoch 1")
    console, text = terminal()
    screen = Screen(console)
    screen.follow(run, parse_job({"command": "python x.py"}), 0)
    screen.update(0)
    screen.stalled(LINE)
    with run.log(0, 0).open("a") as log:
        log.write(" done\nepoch 2")
    screen.finish(0)
    rows, _ = screen_of(text.getvalue().replace("\x1b[2m", "").replace("\x1b[0m", ""))
    assert rows[-3:] == ["epoch 1 done", "epoch 2", ""]
