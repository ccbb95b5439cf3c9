"""Events that are evidence are shown as sentences."""

from __future__ import annotations

from pathlib import Path

import pytest

from allranks.doctor.diagnose import read_logs
from allranks.doctor.failure_facts import gather
from allranks.doctor.judge import judge
from allranks.doctor.log_search import Source
from allranks.doctor.run_evidence import event_in_words
from allranks.run.events import format_event


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (
            {"event": "step", "step": 41, "loss": 0.51234567, "seconds": 0.1},
            "step 41: loss 0.51235",
        ),
        (
            {"event": "step", "step": 41, "loss": float("nan"), "seconds": 0.1},
            "step 41: loss nan (not a number)",
        ),
        ({"event": "step", "step": 7, "seconds": 0.125}, "step 7: took 125ms"),
        (
            {"event": "metric", "step": 9, "name": "val_loss", "value": float("inf")},
            "step 9: val_loss inf",
        ),
        (
            {"event": "end", "state": "failed", "exit": -9, "signal": "SIGKILL"},
            "the rank's end: failed by SIGKILL",
        ),
        (
            {"event": "end", "state": "failed", "exit": 1, "error": {"what": "OSError: full"}},
            "the rank's end: failed with exit code 1: OSError: full",
        ),
        ({"event": "dataset", "samples_per_epoch": 60}, "dataset: samples_per_epoch 60"),
    ],
)
def test_an_event_in_words(event: dict[str, object], words: str) -> None:
    assert event_in_words(format_event({"v": 1, "t": 1.0, **event})) == words


@pytest.mark.parametrize(
    "line", ['{"v":1,"t":1.0,"event":"st', "no event", "[1]", '{"event":"step"}']
)
def test_what_is_no_event_stays_as_it_is(line: str) -> None:
    assert event_in_words(line) == line


def test_evidence_of_events_keeps_its_file_and_line(tmp_path: Path) -> None:
    losses = [0.5, 0.4, float("nan")]
    events = [
        {"v": 1, "t": 1.0, "event": "step", "step": number, "loss": loss, "seconds": 0.1}
        for number, loss in enumerate(losses, 1)
    ]
    path = tmp_path / "rank-0.jsonl"
    path.write_text("".join(map(format_event, events)))
    (found,) = judge(gather(read_logs([Source(path, "rank-0.jsonl", 0)])))
    (line,) = found.evidence
    assert found.cause == "nan-loss" and "at step 3" in found.title
    assert (line.file, line.line, line.text) == (
        "rank-0.jsonl",
        3,
        "step 3: loss nan (not a number)",
    )
