"""The command line of this environment, run as a process of its own."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol
from unittest import mock


class Allranks(Protocol):
    """What the fixture `allranks` gives."""

    def __call__(
        self,
        *args: str | Path,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float = 280,
    ) -> subprocess.CompletedProcess[str]: ...


def ask_allranks(*args: str, cwd: Path) -> str:
    """What `allranks ARGS` prints, by this process: for what is asked again and again."""
    from allranks.cli.main import main

    printed = io.StringIO()
    typed = mock.patch.object(sys, "argv", ["allranks", *args])
    shown = contextlib.redirect_stdout(printed)
    with typed, shown, contextlib.chdir(cwd), contextlib.suppress(SystemExit):
        main()
    return printed.getvalue()


def run_allranks(
    *args: str | Path, cwd: Path, env: Mapping[str, str] | None = None, timeout: float = 280
) -> subprocess.CompletedProcess[str]:
    """`allranks ARGS` in a folder, with variables on top of this process's own."""
    return subprocess.run(
        [sys.executable, "-m", "allranks", *map(str, args)],
        cwd=cwd,
        env={**os.environ, **(env or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
