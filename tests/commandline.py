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


def call_allranks(*args: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """`allranks ARGS` by this process: a tenth of a second, and fakes are seen."""
    from allranks.cli.commands import keep_typed
    from allranks.cli.main import main

    out, errors, words = io.StringIO(), io.StringIO(), ["allranks", *map(str, args)]
    code: object = 0
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(sys, "argv", words))
        stack.enter_context(contextlib.redirect_stdout(out))
        stack.enter_context(contextlib.redirect_stderr(errors))
        stack.enter_context(contextlib.chdir(cwd))
        stack.callback(keep_typed, [], None)  # other tests call commands without main()
        try:
            main()
        except SystemExit as ended:
            code = ended.code
    return subprocess.CompletedProcess(
        words, int(str(code or 0)), out.getvalue(), errors.getvalue()
    )


def ask_allranks(*args: str, cwd: Path) -> str:
    """What `allranks ARGS` prints, by this process: for what is asked again and again."""
    done = call_allranks(*args, cwd=cwd)
    sys.stderr.write(done.stderr)
    return done.stdout


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
