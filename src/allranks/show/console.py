"""The console that everything for people is printed on."""

from __future__ import annotations

from typing import Any

from rich.console import Console


class PeopleConsole(Console):
    """A console whose reader may go away, which would make rich end the process.

    It prints text as it is: brackets in names and messages are not markup.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"markup": False, "emoji": False, **options})

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError
