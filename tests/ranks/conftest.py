"""Whatever real ranks write in a test here is declared in the schema of events.

And `allranks` need not import torch again and again; test_doctor_machine_failures.py and others
start it as users do.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import pytest
from tests.commandline import Allranks
from tests.forked import run_forked

from allranks.run.event_schema import undeclared


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


@pytest.fixture(autouse=True)
def declared_events(tmp_path: Path) -> Iterator[None]:
    yield
    found = []
    for path in tmp_path.rglob("attempts/*/rank-*.jsonl"):
        for line in path.read_bytes().splitlines():
            with suppress(ValueError):  # torn
                found += undeclared(json.loads(line))
    assert not found[:5]
