"""How wide the output is."""

from __future__ import annotations

import io

import pytest

from allranks.show.console import FILE_WIDTH, LEAST_WIDTH, PeopleConsole


@pytest.mark.parametrize(
    ("columns", "width"),
    [(None, FILE_WIDTH), ("70", 70), ("3", LEAST_WIDTH)],
)
def test_a_file_gets_wide_lines_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch, columns: str | None, width: int
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    assert PeopleConsole(file=io.StringIO()).width == width
