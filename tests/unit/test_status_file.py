"""A page is written whole, and never in the place of a device."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from allranks.errors import AllranksError
from allranks.watch.status import write_page


def test_a_pipe_stays_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_page(pipe, "page")
        assert os.read(reader, 100) == b"page"
    finally:
        os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_a_page_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    write_page(tmp_path / "page.md", "old")
    write_page(tmp_path / "page.md", "new")
    assert [path.name for path in tmp_path.iterdir()] == ["page.md"]
    assert (tmp_path / "page.md").read_text() == "new"


def test_what_cannot_be_written_is_said(tmp_path: Path) -> None:
    with pytest.raises(AllranksError, match="cannot write"):
        write_page(tmp_path / "missing" / "page.md", "page")
