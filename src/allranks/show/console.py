"""The console that everything for people is printed on."""

from __future__ import annotations

import os
from typing import Any

from rich.console import Console

LEAST_WIDTH = 20  # characters: a smaller COLUMNS is not taken seriously
FILE_WIDTH = 160  # so that commands can be copied from a log


class PeopleConsole(Console):
    """A console whose reader may go away, which would make rich end the process.

    It prints text as it is: brackets in names and messages are not markup.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"markup": False, "emoji": False, **options})
        is_known = self.is_terminal or os.environ.get("COLUMNS") or "width" in options
        self.width = max(LEAST_WIDTH, self.width if is_known else FILE_WIDTH)

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError
