"""Here `allranks` need not import torch again and again; test_same_ranks starts it as users do."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
from tests.commandline import Allranks
from tests.forked import run_forked


@pytest.fixture
def allranks(tmp_path: Path) -> Allranks:
    """`allranks(*args)` is the command line in a fork of a process that has torch imported."""

    def run(
        *args: str | Path,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float = 150,
    ) -> subprocess.CompletedProcess[str]:
        return run_forked(*args, cwd=cwd or tmp_path, env=env, timeout=timeout)

    return run
