"""A live SLURM cluster for the tests that ask for it; each of them finds it idle."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.slurm.live import Cluster, unavailable
from tests.terminal.conftest import terminal as terminal  # a fixture here, too


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Started for the first test that asks, and down after the last test of all."""
    try:
        live = Cluster.start()
    except RuntimeError as error:
        unavailable(str(error))
    yield live
    live.stop()


# After no_leaks, so that what jobs leave behind is gone before it looks.
@pytest.fixture(autouse=True)
def clean_cluster(
    request: pytest.FixtureRequest, no_leaks: None, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """SLURM's commands talk to the cluster in this test, which leaves neither job nor fault."""
    if "cluster" not in request.fixturenames:
        yield
        return
    live: Cluster = request.getfixturevalue("cluster")
    for name, value in live.variables.items():
        monkeypatch.setenv(name, value)
    yield
    live.clean()
