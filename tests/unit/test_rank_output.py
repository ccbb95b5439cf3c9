"""What ranks print, on the user's screen and in their logs: bars, several ranks, attempts."""

from __future__ import annotations

import io
import itertools
import os
import random
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console

from allranks.errors import AllranksError
from allranks.launch import follow, rank_output
from allranks.launch.follow import Together
from allranks.launch.rank_output import Echo, RankTerminal, ScreenLines, read_ranks
from allranks.launch.screen import StatusLine
from allranks.run.folder import RunDir

# What was drawn, and the lines that a terminal shows in the end.
DRAWN = {
    "plain text": ("one\ntwo\r\n\nthree", ["one", "two", "", "three"]),
    "a bar": ("\r 0%|  |\r50%|# |\r100%|##|\nbye\n", ["100%|##|", "bye"]),
    "a shorter state over a longer one": ("loading...\rdone\n", ["doneing..."]),
    "erased first": ("loading...\r\x1b[Kdone\n", ["done"]),
    "erased whole": ("loading...\x1b[2K\rdone\n", ["done"]),
    "colours and titles": ("\x1b]0;title\x07\x1b[1;31mred\x1b[0m\n", ["red"]),
    "backspaces": ("spin |\b/\b-\n", ["spin -"]),
    "two bars": (
        "\router 0%\n\rinner 0%\x1b[A\n\rinner 50%\x1b[A\n\rinner 99%\x1b[A\router 50%\n\n",
        ["outer 50%", "inner 99%"],
    ),
    "lines above a bar": (
        "bar 0%\n\x1b[1A\x1b[2Kfirst\nbar 50%\n\x1b[1A\x1b[2Ksecond\nbar 100%\n",
        ["first", "second", "bar 100%"],
    ),
    "a cleared rest": ("a\nb\nc\x1b[2A\r\x1b[Jdone\n", ["done"]),
    "moved right and to a column": ("a\x1b[2Cb\x1b[1Gx\n", ["x  b"]),
    "wide letters": ("caf\u00e9 \u2588\u2588\n", ["caf\u00e9 \u2588\u2588"]),
}


def lines_of(drawn: str, cuts: Sequence[int] = ()) -> list[str]:
    screen = ScreenLines()
    places = [0, *sorted(cuts), len(drawn)]
    pieces = [drawn[a:b] for a, b in itertools.pairwise(places)]
    return [*(line for piece in pieces for line in screen.feed(piece)), *screen.finish()]


@pytest.mark.parametrize("case", DRAWN)
def test_a_log_has_the_lines_that_a_terminal_would_show(case: str) -> None:
    drawn, expected = DRAWN[case]
    whole = lines_of(drawn)
    assert [line.rstrip() for line in whole] == expected
    chance = random.Random(0)
    for _ in range(20):  # wherever the pieces that are read end, but for lines given away too early
        found = lines_of(drawn, [chance.randrange(len(drawn) + 1) for _ in range(3)])
        assert [line for line in found if line in whole] == whole
        assert len(found) <= len(whole) + 2


def test_a_thousand_states_of_a_bar_are_one_line_of_a_log() -> None:
    screen = ScreenLines()
    for percent in range(1000):
        assert screen.feed(f"\r{percent}|####|\x1b[K") == []
    assert screen.feed("\n") == ["999|####|"]
    assert screen.column == 0


# --- Several ranks --------------------------------------------------------------------------------


def test_what_all_ranks_print_alike_is_shown_once() -> None:
    together = Together(3)
    for rank in range(3):
        together.add(rank, "warning: slow")
        together.add(rank, f"I am {rank}")
        together.add(rank, "warning: slow")  # a second time, by all of them again
    assert list(together.ready(wait=False)) == [
        *("[0-2] warning: slow", "[0] I am 0", "[0-2] warning: slow", "[1] I am 1", "[2] I am 2")
    ]


def test_a_line_waits_a_moment_for_the_ranks_that_may_print_it_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    together = Together(2)
    together.add(0, "first")
    together.add(0, "second")
    together.add(1, "second")
    assert list(together.ready()) == []
    together.add(1, "first")
    assert list(together.ready()) == ["[0-1] first", "[0-1] second"]
    together.add(1, "alone")
    monkeypatch.setattr(follow, "ALIKE_SECONDS", 0.0)
    assert list(together.ready()) == ["[1] alone"]


def test_lines_of_the_job_are_nobody_elses() -> None:
    together = Together(1)
    together.add("job", "starting")
    together.add(0, "starting")
    assert list(together.ready()) == ["[job] starting", "[0] starting"]


@pytest.mark.parametrize(
    ("text", "ranks"), [(None, None), ("all", [4, 5, 6, 7]), ("5", [5]), ("7,4,7", [4, 7])]
)
def test_ranks_to_show_are_read(text: str | None, ranks: list[int] | None) -> None:
    assert read_ranks(text, range(4, 8)) == ranks


@pytest.mark.parametrize("text", ["3", "8", "-1", "4,", "some", ""])
def test_ranks_that_are_not_here_cannot_be_shown(text: str) -> None:
    with pytest.raises(AllranksError, match="are 4 to 7"):
        read_ranks(text, range(4, 8))


# --- Attempts -------------------------------------------------------------------------------------


class Shown:
    """An echo into a string, and the logs that it reads."""

    def __init__(self, folder: Path, show: Sequence[int] | None = None) -> None:
        self.run, self.text = RunDir(folder), io.StringIO()
        console = Console(file=self.text, width=80)
        status = StatusLine(console)
        self.echo = Echo(console, 0, show, has_bar=False, write=status.put)

    def attempt(self, number: int, *texts: str) -> str:
        """What an attempt that prints this shows, whole or bit by bit."""
        before = len(self.text.getvalue())
        self.echo.begin(self.run, number)
        for text in texts:
            for rank in range(2):
                self.run.log(number, rank).parent.mkdir(parents=True, exist_ok=True)
                with self.run.log(number, rank).open("a") as file:
                    file.write(text)
            self.echo.update()
        self.echo.finish()
        return self.text.getvalue()[before:]


def test_an_attempt_begins_on_a_fresh_line(tmp_path: Path) -> None:
    shown = Shown(tmp_path)
    assert shown.attempt(0, "epoch 1\n", "lo", "ss 2.0") == "epoch 1\nloss 2.0\n"
    assert shown.attempt(1, "epoch 1\n") == "epoch 1\n"


def test_a_bar_keeps_its_returns_and_its_last_line_is_ended(tmp_path: Path) -> None:
    assert Shown(tmp_path).attempt(0, "\r10%", "\r20%") == "\r10%\r20%\n"


def test_several_ranks_are_shown_by_line(tmp_path: Path) -> None:
    shown = Shown(tmp_path, show=[0, 1])
    assert shown.attempt(0, "one\ntw", "o\nend") == "[0-1] one\n[0-1] two\n[0-1] end\n"


# --- A terminal of its own ------------------------------------------------------------------------


class Screened:
    """A rank's terminal on a pseudo-terminal of the test's, which plays the user's."""

    def __init__(self, folder: Path) -> None:
        self.shown: list[str] = []
        self.may_write = threading.Event()
        self.may_write.set()
        self.user, self._tty = os.openpty()
        self.terminal = RankTerminal(self._tty, self._write)
        self.log = folder / "attempt" / "rank-0.log"
        self.terminal.begin(self.log)
        self.rank = os.open(self.terminal.path, os.O_RDWR | os.O_NOCTTY)

    def _write(self, drawn: str) -> None:
        self.may_write.wait()
        self.shown.append(drawn)

    def draw(self, text: str) -> None:
        drawn = text.encode()
        while drawn:
            drawn = drawn[os.write(self.rank, drawn) :]

    def close(self) -> bool:
        os.close(self.rank)
        is_shown = self.terminal.close()
        for file in (self.user, self._tty):
            os.close(file)
        return is_shown


def test_what_a_rank_draws_is_shown_as_it_is_and_logged_by_line(tmp_path: Path) -> None:
    screened = Screened(tmp_path)
    screened.draw("hello\n\r10%\r100%\ncaf\u00e9 \x1b[31mred\x1b[0m\nno end")
    assert screened.close()
    assert "".join(screened.shown).endswith("\r100%\ncaf\u00e9 \x1b[31mred\x1b[0m\nno end")
    assert screened.log.read_text() == "hello\n100%\ncaf\u00e9 red\nno end\n"


@pytest.mark.parametrize("last", ["", "the end"])
def test_a_screen_that_takes_no_more_does_not_hold_up_the_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: str
) -> None:
    monkeypatch.setattr(rank_output, "FLUSH_SECONDS", 0.1)
    monkeypatch.setattr(rank_output, "MOST_QUEUED", 10_000)
    screened = Screened(tmp_path)
    screened.may_write.clear()
    lines = [f"line {number} {'x' * 80}" for number in range(2000)]
    screened.draw("\n".join([*lines, ""]))  # many times what a terminal keeps
    screened.terminal.begin(screened.log)  # all of it has been read
    screened.may_write.set()
    monkeypatch.setattr(rank_output, "FLUSH_SECONDS", 60.0)
    assert screened.terminal.flush()
    screened.draw(last)
    assert screened.close()
    assert screened.log.read_text().splitlines() == [*lines, *last.splitlines()]
    shown = "".join(screened.shown)
    assert shown.endswith(rank_output.LEFT_OUT + last) and len(shown) < 50_000


def test_a_slow_screen_gets_all_of_many_small_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_output, "FLUSH_SECONDS", 0.1)
    monkeypatch.setattr(rank_output, "READ_BYTES", 8)  # as of a rank that flushes often
    screened = Screened(tmp_path)
    screened.may_write.clear()
    drawn = "".join(f"line {number}\n" for number in range(3000))
    screened.draw(drawn)
    screened.terminal.begin(screened.log)  # all of it has been read
    screened.may_write.set()
    monkeypatch.setattr(rank_output, "FLUSH_SECONDS", 60.0)
    assert screened.close()
    assert "".join(screened.shown) == drawn


def test_lines_that_the_disk_did_not_take_are_written_later(tmp_path: Path) -> None:
    screened = Screened(tmp_path)
    screened.log.mkdir()  # stands for a full disk: it cannot be written to
    screened.draw("one\ntwo\n")
    screened.terminal.flush()
    screened.log.rmdir()
    screened.draw("three\n")
    assert screened.close()
    assert screened.log.read_text() == "one\ntwo\nthree\n"


def test_a_sequence_that_never_ends_swallows_nothing() -> None:
    found = lines_of("before\n\x1b]garbage\nline\n\x1b]0;rest")
    assert found == ["before", "]garbage", "line", "]0;rest"]
