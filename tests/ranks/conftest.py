"""Whatever real ranks write in a test here is declared in the schema of events."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from allranks.run.event_schema import undeclared


@pytest.fixture(autouse=True)
def declared_events(tmp_path: Path) -> Iterator[None]:
    yield
    found = []
    for path in tmp_path.rglob("attempts/*/rank-*.jsonl"):
        for line in path.read_bytes().splitlines():
            with suppress(ValueError):  # torn
                found += undeclared(json.loads(line))
    assert not found[:5]
