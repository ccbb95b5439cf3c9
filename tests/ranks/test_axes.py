"""Every axis computes what one rank computes: losses, norms of gradients, evaluations."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.ranks import run_ranks
from tests.training import trained

from allranks.layout import Layout

pytestmark = pytest.mark.ranks

TINY = {
    "task": "language",
    "options": {"context": 16, "tokens": "tokens.bin"},
    "batch_size": 12,
    "micro_batch_size": 2,  # so that gradients are accumulated
    "steps": 12,
    "optimizer": {"clip": 0.5},  # which most steps exceed
}


@pytest.fixture(autouse=True)
def tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """101 windows to train on: the last batch of an epoch has 5. And 5 to validate on."""
    ids = np.random.default_rng(0).integers(0, 64, 106 * 17) ** 2 % 256
    (tmp_path / "tokens.bin").write_bytes(ids.astype("<u2").tobytes())


LAYOUTS = [
    *("1x2", "1x2:fsdp=2", "1x2:tp=2", "1x4:fsdp=2", "1x4:tp=2", "1x4:fsdp=2,tp=2"),
    *("1x4:fsdp=4", "1x4:tp=4"),
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_axes_do_not_change_the_losses(tmp_path: Path, layout: str) -> None:
    (one,) = run_ranks(trained, 1, tmp_path, "1x1", tmp_path, TINY)
    found = run_ranks(trained, Layout.parse(layout).ranks, tmp_path, layout, tmp_path, TINY)
    print(max(abs(a / b - 1) for a, b in zip(found[0].losses, one.losses, strict=True)))
    print(max(abs(a / b - 1) for a, b in zip(found[0].norms, one.norms, strict=True)))
    assert found[0].losses == pytest.approx(one.losses, rel=1e-5)
    for rank in found:
        assert rank.norms == pytest.approx(one.norms, rel=1e-5)
        assert rank.metrics == pytest.approx(one.metrics, rel=1e-5)
    assert sum(rank.samples for rank in found) == one.samples
