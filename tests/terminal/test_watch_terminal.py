"""watch in a real terminal: what is on the screen, what keys do, and what is left behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.terminal.conftest import Terminal
from tests.watch_runs import GrowingRun

pytestmark = pytest.mark.terminal


@contextmanager
def growing(*runs: GrowingRun) -> Iterator[None]:
    """Runs that are live and make steps meanwhile."""
    over = threading.Event()

    def grow() -> None:
        while not over.wait(0.2):
            for run in runs:
                run.steps(2)

    for run in runs:
        run.begin()
        run.steps(10)
    thread = threading.Thread(target=grow)
    holds = [run.live() for run in runs]
    for hold in holds:
        hold.__enter__()
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        for hold in holds:
            hold.__exit__(None, None, None)


# A screen may be read while it is drawn: what is not there yet is waited for.


def step_of(screen: str, name: str) -> int:
    rows = [line for line in screen.splitlines() if line[2:].startswith(name)]
    found = re.search(r"([\d,]+)/1,000", rows[0] if rows else "")
    return int(found[1].replace(",", "")) if found else 0


def selected(screen: str) -> str:
    return next((line for line in screen.splitlines() if line.startswith("> ")), "")


def shows(*words: str) -> Callable[[str], bool]:
    """Whether all of these are on a screen."""
    return lambda screen: all(word in screen for word in words)


def test_at_80x24_and_wide(terminal: Terminal, tmp_path: Path) -> None:
    small = GrowingRun(tmp_path, "1x2", number=2, name="small", gpu=False)
    large = GrowingRun(tmp_path, "8x8", number=1, name="large", slowest=37)
    failed = GrowingRun(tmp_path, "1x2", number=0, name="crash")
    failed.begin()
    failed.end("failed", error={"what": "CUDA out of memory", "fix": "less"})
    with growing(small, large):
        terminal.start("watch", "--runs", tmp_path)
        screen = terminal.wait(shows("2 running, 1 failed", "rank 0: CUDA out of memory"))
        assert len(screen.splitlines()) == 24
        screen = terminal.wait(lambda screen: selected(screen).startswith("> small"))
        before = step_of(screen, "small")
        terminal.wait(lambda screen: step_of(screen, "small") > before)  # it is live

        terminal.press("j")
        terminal.wait(lambda screen: selected(screen).startswith("> large"))
        slowest = re.compile(r"^ +37 node5 .*< slowest$", re.MULTILINE)
        terminal.wait(lambda screen: slowest.search(screen) is not None)
        terminal.wait(shows("more ranks", "75!", "97+"))
        terminal.press("Tab", "Down", "Down")
        terminal.wait(lambda screen: re.search(r"^> +2 node1", screen, re.MULTILINE) is not None)
        terminal.press("Enter")
        terminal.wait("hello from rank 2")
        terminal.press("Right")
        terminal.wait("hello from rank 3")
        terminal.press("/")
        terminal.wait("search: _")
        terminal.press("jk", "BSpace", "BSpace", "from RANK", "Enter")
        terminal.wait("'from RANK'  n: next above")
        terminal.press("n")
        terminal.wait("no more 'from RANK'")
        terminal.press("q")
        terminal.wait("2 running")
        terminal.press("?")
        terminal.wait("marks: + is good")
        terminal.press("x", "s")
        terminal.wait("stop large-20261115-120001-0001? ")
        terminal.press("n")
        terminal.wait("not stopped")

        terminal.tmux("resize-window", "-x", "160", "-y", "40")
        terminal.wait(lambda screen: " eff " in screen or "hours" in screen)
        screen = terminal.wait(shows("large-20261115-120001-0001", "°C"))
        assert len(screen.splitlines()) == 40
        terminal.press("q")
        terminal.wait("left 0")
        terminal.check_sane()


@pytest.mark.ranks
def test_a_run_is_stopped_after_a_question(terminal: Terminal, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "allranks", "run", "task=spiral", "steps=1000000"]
    with (tmp_path / "out").open("w") as out:
        run = subprocess.Popen(words, cwd=tmp_path, stdout=out, stderr=out)
        try:
            told = f"echo $ALLRANKS_STATE >> {tmp_path}/told"
            terminal.start("watch", "--runs", tmp_path / "runs", "--notify", told)
            terminal.wait(lambda screen: re.search(r"\d/(1,000,000|1M)", screen) is not None)
            terminal.press("s")
            terminal.wait("y: yes")
            terminal.press("y")
            terminal.wait(lambda screen: " stopped " in selected(screen))
            assert run.wait(120) == 75, (tmp_path / "out").read_text()
        finally:
            run.kill()
            run.wait()
    terminal.press("s")
    terminal.wait("already stopped")
    terminal.press("q")
    terminal.wait("left 0")
    terminal.check_sane()
    assert (tmp_path / "told").read_text() == "stopped\n"


@pytest.mark.parametrize(
    ("how", "code"),
    [("C-c", 130), (signal.SIGTERM, 143), (signal.SIGKILL, 137)],
    ids=["Ctrl-C", "SIGTERM", "SIGKILL"],
)
def test_whatever_ends_it_the_terminal_is_as_before(
    terminal: Terminal, tmp_path: Path, how: str | signal.Signals, code: int
) -> None:
    GrowingRun(tmp_path, "1x2").begin()
    terminal.start("watch", "--runs", tmp_path)
    terminal.wait("1 failed")
    assert (terminal.fact("alternate_on"), terminal.fact("cursor_flag")) == ("1", "0")
    assert {"-icanon", "-echo", "isig"} <= set(terminal.settings())
    if isinstance(how, str):
        terminal.press(how)
    else:
        os.kill(terminal.child(), how)
    if how != signal.SIGKILL:  # then the shell's words went to the screen that is gone
        terminal.wait(f"left {code}")
    terminal.check_sane()
