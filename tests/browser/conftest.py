"""A real Chromium, for the tests that look at pages."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import Any, NoReturn

import pytest

CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
WAIT_MS = 120_000  # a busy machine takes long for anything


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Started for the first test that asks, and gone after the last test of all."""
    found = next(filter(None, map(shutil.which, CHROMIUM)), None)
    if found is None:
        unavailable("Chromium is not installed: tests/install.sh chromium, as root")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        unavailable("playwright is not installed")
    with sync_playwright() as playwright:
        # It starts and ends processes when it likes to: they are not what a test has left behind.
        env = {name: value for name, value in os.environ.items() if name != "ALLRANKS_TESTS"}
        # Chromium's own sandbox does not work for root, nor in most containers.
        live = playwright.chromium.launch(
            executable_path=found,
            args=["--no-sandbox", "--disable-gpu"],
            env=env,  # type: ignore[arg-type]  # it takes numbers, too
            timeout=WAIT_MS,
        )
        yield live
        live.close()


def unavailable(reason: str) -> NoReturn:
    """Skip the test; where nothing may be skipped, fail it."""
    if os.environ.get("ALLRANKS_NO_SKIPS"):
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)
