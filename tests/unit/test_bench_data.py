"""From single measurements to a recommendation with its reason."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from allranks.bench import data
from allranks.bench.measure import Ended
from allranks.errors import AllranksError
from allranks.run.folder import RunDir
from allranks.run.record import Counted
from allranks.timing.steps import Timing

RUN = RunDir(Path("/runs/job-20260101-000000-abcd"))


Paces = Mapping[int, float | tuple[float, ...]]


def found(
    loading: Paces,
    training: Paces | None = None,
    step: float | tuple[float, ...] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """What ranks would have written: a pace for each number of workers, or one for each repeat."""
    kinds: dict[str, Mapping[Any, Any]] = {"loading": loading, "training": training or {}}
    kinds["step"] = {} if step is None else {None: step}
    measured = [
        {"kind": kind, "workers": workers, "repeat": number, "samples_per_second": pace}
        for kind, paces in kinds.items()
        for workers, values in paces.items()
        for number, pace in enumerate(values if isinstance(values, tuple) else (values,))
    ]
    return {
        "v": 1,
        "measured": measured,
        "world_size": 1,
        "batch_size": 50,
        "num_samples": 1000,
        "device": "cpu",
        "cpus": 4,
        "workers_of_job": 3,
        "is_direct": False,
        **more,
    }


def test_the_fewest_workers_that_train_as_fast() -> None:
    measured = found(
        {0: 1300, 1: 2600, 2: 5100, 4: 9000}, {0: 1200, 1: 2500, 2: 3850, 4: 3900}, 3900
    )
    answer = data.as_json(measured, RUN)
    assert answer["recommendation"]["num_workers"] == 2
    reason = (
        "training makes 3,850 samples/s with 2 workers, 2,500 with 1 worker, 3,900 with 4 workers; "
        "the step alone makes 3,900"
    )
    assert answer["recommendation"]["reason"] == reason
    assert (
        answer["verdict"] == f"data.num_workers=2 ({reason}): data loading keeps up with the step"
    )
    assert answer["limit"] == "step"
    assert answer["knee"] == 4
    assert answer["step"]["batches_per_second"] == 78
    assert answer["rows"][2]["batches_per_second"] == 102
    assert answer["rows"][1]["of_step"] == pytest.approx(2500 / 3900)
    assert not answer["is_disturbed"]


LIMITS = {
    "step": "data loading keeps up",
    "data": "data loading is the limit",
    "cpus": "is fast enough",
}


@pytest.mark.parametrize(
    ("loading", "training", "step", "limit", "workers", "words"),
    [
        # faster than the step, without any workers
        ({0: 9000, 1: 9000}, {0: 990, 1: 1000}, 1000, "step", 0, "keeps up with the step"),
        # slower with every number of them: at the knee, with a CPU left, with none left
        ({0: 500, 1: 900, 2: 950}, {0: 450, 1: 800, 2: 820}, 2000, "data", 1, "add nothing"),
        ({0: 200, 1: 400, 2: 800}, {0: 190, 1: 390, 2: 780}, 2000, "data", 2, "with --workers"),
        ({0: 200, 4: 800}, {0: 190, 4: 780}, 2000, "data", 4, "give each rank more CPUs"),
        ({4: 800}, {4: 780}, 2000, "data", 4, "try other numbers of workers"),
        # enough of them, but on the CPUs of the step
        ({0: 5000, 1: 6000}, {0: 1000, 1: 1500}, 2000, "cpus", 1, "fast enough (6,000), but 25%"),
        ({0: 900, 1: 2100}, {0: 800, 1: 790}, 2000, "cpus", 0, "with 1 worker (2,100), but 60%"),
        # more workers are worse
        ({0: 5000, 1: 4000}, {0: 980, 1: 700}, 1000, "step", 0, "700 with 1 worker"),
        # one repeat of each is as fast as the other
        (
            {0: 5000, 1: 5000},
            {0: (800, 900, 960), 1: (850, 950, 1100)},
            (900, 1000, 1010),
            "step",
            0,
            "950 with 1 worker (repeats differ as much); the step alone makes 1,000)",
        ),
        # the same medians, but repeats that do not meet
        (
            {0: 950, 1: 5000},
            {0: (890, 900, 910), 1: (940, 950, 960)},
            1000,
            "step",
            1,
            "900 with no workers",
        ),
    ],
)
def test_the_verdict_follows_from_what_was_measured(
    loading: Paces, training: Paces, step: Any, limit: str, workers: int, words: str
) -> None:
    answer = data.as_json(found(loading, training, step), RUN)
    assert answer["limit"] == limit
    assert answer["recommendation"]["num_workers"] == workers
    assert words in answer["verdict"]
    assert [name for name, said in LIMITS.items() if said in answer["verdict"]] == [limit]


@pytest.mark.parametrize(
    ("measured", "words"),
    [
        (found({0: 100}, {0: 400}, 200), "training with no workers was faster (400 samples/s)"),
        (found({1: 100}, {1: 180}, 200), "(180 samples/s) than loading its data (100)"),
        (found({0: (100, 110, 300)}), "repeats of loading with no workers range from 100 to 300"),
        (found({0: 900}, {0: (100, 300)}, 250), "repeats of training with no workers"),
        (found({0: 900}, {0: 150}, (100, 300)), "repeats of the step alone"),
        (
            found({1: 900, 2: 900}, {1: (100, 200, 250), 2: (200, 240, 250)}, 240),
            "repeats of training with 1 worker range from 100 to 250",
        ),
        (
            found({0: (100, 200, 400)}, {0: 90}, 350),
            "repeats of loading with no workers range from 100 to 400",
        ),
    ],
)
def test_of_what_contradicts_itself_nothing_is_recommended(
    measured: dict[str, Any], words: str
) -> None:
    answer = data.as_json(measured, RUN)
    assert answer["is_disturbed"] and answer["recommendation"] is None and answer["limit"] is None
    assert answer["verdict"].startswith(
        "no recommendation, as the measurements contradict each other"
    )
    assert words in answer["verdict"]
    assert not [said for said in LIMITS.values() if said in answer["verdict"]]
    assert "no recommendation" in drawn(answer, 100)


@pytest.mark.parametrize(
    ("measured", "limit"),
    [
        (found({0: (40000, 50000, 70000)}, {0: 1000}, 1000), "step"),
        (found({0: 800, 2: 1600}, {0: 700, 2: 1400}, (8000, 9000, 15000)), "data"),
        (found({0: 800}, {0: (400, 700, 780)}, 5000), "data"),
    ],
)
def test_repeats_that_differ_are_told_where_they_change_nothing(
    measured: dict[str, Any], limit: str
) -> None:
    answer = data.as_json(measured, RUN)
    assert answer["is_disturbed"] and answer["limit"] == limit and answer["recommendation"]
    assert "samples/s: something else may be running here" in drawn(answer, 200)


def test_knees_are_of_loading_alone() -> None:
    rising = drawn(data.as_json(found({0: 100, 1: 200, 2: 400}), RUN), 100)
    assert "loading still gains with 2 workers" in rising
    inside = drawn(data.as_json(found({0: 100, 1: 200, 2: 205}), RUN), 100)
    assert "loading gains less than a tenth beyond 1 worker" in inside
    assert "gains" not in drawn(data.as_json(found({1: 200}), RUN), 100)


def test_what_the_job_does_already_is_said() -> None:
    answer = data.as_json(found({3: 5000}, {3: 1000}, 1000), RUN)
    assert answer["verdict"].startswith("data.num_workers=3, as it is now (")


def test_only_the_data_were_measured() -> None:
    answer = data.as_json(found({0: 100, 1: 200, 2: 205}), RUN)
    assert answer["step"] is None
    assert answer["recommendation"]["num_workers"] == 1
    assert "the training itself was not measured" in answer["verdict"]
    assert data.as_json(found({}), RUN)["verdict"] == "nothing was measured"


@pytest.mark.parametrize("text", ["1,x", "-1", "1,,2", "99999"])
def test_workers_that_are_none(text: str) -> None:
    with pytest.raises(AllranksError, match="not a list of numbers"):
        data.read_workers(text)


def test_workers_are_read_once_each_in_order() -> None:
    assert data.read_workers("4, 0,4") == [0, 4]
    assert data.read_workers(None) == []


@pytest.mark.parametrize("content", [None, "", "{"])
def test_a_run_without_measurements(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "data.json").write_text(content)
    with pytest.raises(AllranksError, match="stopped before anything was measured"):
        data.found_in_task(Ended("data", RunDir(tmp_path)))


def timing(data_seconds: float | None) -> Timing:
    parts = None
    if data_seconds is not None:
        parts = {"compute": 0.1 - data_seconds, "comm": 0, "straggler": 0, "data": data_seconds}
    return Timing(
        first_step=2,
        last_step=11,
        ranks=1,
        steady=True,
        seconds=1.0,
        samples=1000,
        step_seconds=0.1,
        step_deviation=0.0,
        parts=parts,
        slowest_rank=None,
        slowest_share=0.0,
        slowest_part=None,
    )


def test_a_script_is_measured_as_it_is() -> None:
    answer = data.script_as_json(RUN, timing(0.05), 2, cpus=4)
    assert answer["data_share"] == 0.5
    assert answer["samples_per_second_without_waiting"] == 2000
    said = "steps spend 50.0% of their time waiting for data with 2 workers per rank, on 4 CPUs"
    advice = "give its DataLoader more workers, or make samples cheaper to prepare"
    assert answer["verdict"] == f"{said}: data loading is the limit; {advice}, and measure again"
    guess = replace(timing(0.05), counted=Counted(samples="about", why="a guess"))
    assert "about 1,000 (a guess)" in drawn(data.script_as_json(RUN, guess, 2, cpus=4), 80)
    unknown = replace(timing(0.05), counted=Counted(samples="unknown", why="no loader"))
    answer = data.script_as_json(RUN, unknown, 2, cpus=4)
    assert "unknown: no loader" in drawn(answer, 80) and answer["samples_per_second"] is None


@pytest.mark.parametrize(
    ("seconds", "workers", "cpus", "words", "never"),
    [
        (0.001, 0, 4, "with no workers per rank, on 4 CPUs: data loading keeps up", "limit"),
        (0.05, 4, 4, "data loading is the limit; make samples cheaper", "more workers"),
        (0.05, None, 4, "for data: data loading is the limit; give its DataLoader", "keep up"),
        (None, None, 1, "is not known", "limit"),
    ],
)
def test_what_a_script_is_told(
    seconds: float | None, workers: int | None, cpus: int, words: str, never: str
) -> None:
    verdict = data.script_as_json(RUN, timing(seconds), workers, cpus)["verdict"]
    assert words in verdict and never not in verdict


def drawn(answer: dict[str, Any], width: int) -> str:
    console = Console(file=io.StringIO(), width=width)
    data.show(console, answer)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]  # a StringIO


@pytest.mark.parametrize("width", [60, 100])
def test_tables_fit(width: int) -> None:
    paces = {0: 123456.0, 1: 223456.0, 16: 323456.0}
    measured = found(paces, paces, 523456.0, is_direct=True)
    text = drawn(data.as_json(measured, RUN), width)
    tables = [line for line in text.splitlines() if "  " in line.strip()]
    assert tables and max(map(len, tables)) <= width
    assert "323,456" in text
    assert "whole batches are fetched at once" in text
    assert "50.0%" in drawn(data.script_as_json(RUN, timing(0.05), None, 2), width)
