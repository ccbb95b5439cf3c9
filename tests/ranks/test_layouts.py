"""The layout never changes the mathematics: whole runs of the command line, compared."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.forked import run_forked

from allranks.run.commits import commits
from allranks.run.events import read_events
from allranks.run.folder import RunDir

pytestmark = pytest.mark.ranks

Train = Callable[..., "Trained"]


@dataclass(frozen=True)
class Trained:
    """A finished run."""

    result: dict[str, Any]
    run: RunDir

    @property
    def losses(self) -> list[float]:
        events = [e for e in read_events(self.run.events(0, 0)) if e["event"] == "step"]
        assert [event["step"] for event in events] == list(range(1, self.result["steps"] + 1))
        return [event["loss"] for event in events]

    @property
    def weights(self) -> dict[str, Any]:
        """Checksums of the tensors of its last checkpoint."""
        files: dict[str, Any] = commits(self.run.checkpoints)[0].manifest()["files"]
        return {name: entry for name, entry in files.items() if name.endswith(".distcp")}

    def samples_of_ranks(self) -> list[int]:
        """Samples in all that each rank says it trained on."""
        return [
            sum(e["samples"] for e in read_events(self.run.events(0, rank)) if e["event"] == "step")
            for rank in self.run.ranks(0)
        ]


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Train:
    """`train(layout, *overrides)`: every run is made once, and compared with many."""
    made: dict[tuple[str, ...], Trained] = {}
    folder = tmp_path_factory.mktemp("layouts")
    (folder / "tokens.bin").write_bytes(
        bytes([byte for i in range(20_000) for byte in (i % 251, 0)])
    )

    def trained(layout: str, *overrides: str, again: bool = False) -> Trained:
        key = (layout, *overrides, str(again))
        if key not in made:
            options = ["log_every=1", "precision=fp32", *overrides, "--layout", layout, "--json"]
            outcome = run_forked("run", *options, cwd=folder)
            assert outcome.returncode == 0, outcome.stderr
            result = json.loads(outcome.stdout)
            assert (result["state"], result["layout"]) == ("finished", layout)
            made[key] = Trained(result, RunDir(Path(result["run_dir"])))
        return made[key]

    return trained


# A prime: no number of ranks cuts it evenly.
SPIRAL = ("task=spiral", "batch_size=97", "steps=60")
LANGUAGE = ("task=language", "options.tokens=tokens.bin", "batch_size=8", "steps=20")
DIGITS = ("task=digits", "options.norm=batch", "batch_size=50", "steps=30")


@pytest.mark.parametrize(
    ("layout", "more"),
    [
        pytest.param("1x2", [], marks=pytest.mark.soak),
        ("1x4", []),
        ("1x2", ["micro_batch_size=13"]),
    ],
)
def test_spiral_has_the_same_losses_on_every_layout(
    train: Train, layout: str, more: list[str]
) -> None:
    one, other = train("1x1", *SPIRAL), train(layout, *SPIRAL, *more)
    assert other.losses == pytest.approx(one.losses, rel=1e-5)
    assert sum(other.samples_of_ranks()) == sum(one.samples_of_ranks()) == 60 * 97
    assert other.result["metrics"] == pytest.approx(one.result["metrics"], rel=1e-4)


@pytest.mark.parametrize("layout", [pytest.param("1x1", marks=pytest.mark.soak), "1x2"])
def test_two_runs_of_one_layout_are_identical_to_the_bit(train: Train, layout: str) -> None:
    one, other = train(layout, *SPIRAL), train(layout, *SPIRAL, again=True)
    assert one.run != other.run
    assert one.losses == other.losses
    assert one.weights == other.weights
    assert one.result["metrics"] == other.result["metrics"]


def test_language_has_the_same_losses_with_ranks_and_accumulation(train: Train) -> None:
    one, other = train("1x1", *LANGUAGE), train("1x2", *LANGUAGE, "micro_batch_size=2")
    assert other.losses == pytest.approx(one.losses, rel=1e-5)


def test_batchnorm_does_not_see_the_layout(train: Train) -> None:
    one, other = train("1x1", *DIGITS), train("1x2", *DIGITS)
    assert other.losses == pytest.approx(one.losses, rel=1e-4)
    assert other.result["metrics"] == pytest.approx(one.result["metrics"], rel=1e-2)
