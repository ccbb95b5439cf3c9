"""Which runs are compared, and with which of them: the same in every command."""

from __future__ import annotations

import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from tests.report_runs import H100, make_run
from tests.watch_runs import GrowingRun

from allranks.bench.comm import run_to_show
from allranks.bench.measure import Ended
from allranks.bench.scaling import as_json, repeat_of
from allranks.errors import AllranksError
from allranks.report.build import build, chosen_runs, chosen_words
from allranks.report.facts import read_run
from allranks.run.folder import RunDir, find_runs
from allranks.run.record import final_step
from allranks.run.run_state import Queue, describe
from allranks.timing.comparison import Pace, compare, is_compared
from allranks.timing.steps import timing
from allranks.watch import followed
from allranks.watch.live import Watcher
from allranks.watch.status import gather

A100 = {"name": "NVIDIA A100-SXM4-80GB", "memory_bytes": 85_520_809_984}
NEITHER = (None, None)
SCALING = {"bench": {"id": "b1", "kind": "scaling", "job": {"epochs": 2, "steps": None}}}


def test_repeats_are_compared_by_their_medians_with_the_fewest_ranks() -> None:
    paces = {"1x1": (100.0, 100.0, 110.0), "1x2": (180.0, 180.0, 180.0), "1x4": (None,)}
    runs = [Pace(f"{n}-{i}", n, pace) for n in paces for i, pace in enumerate(paces[n])]
    one, two, four = compare(runs)
    assert (one.pace, two.speedup, two.efficiency, two.baseline) == (100.0, 1.8, 0.9, "1x1")
    assert two.samples_per_second is not None and two.samples_per_second.n == 3
    assert four.speedup is None and four.efficiency is None
    assert one.ratio(4, 360.0) == (3.6, 0.9)


def test_of_layouts_of_equal_size_the_faster_one_is_the_base() -> None:
    rows = compare([Pace("a", "2x1", 90.0), Pace("b", "1x2", 100.0), Pace("c", "1x1", None)])
    assert {row.layout: row.baseline for row in rows} == {"1x1": None, "1x2": "1x2", "2x1": "1x2"}
    assert [row.efficiency for row in rows] == [None, 1.0, 0.9]


def test_failed_runs_count_only_where_no_other_does() -> None:
    failed = Pace("a", "1x1", 50.0, "failed")
    (row,) = compare([failed, Pace("b", "1x1", 100.0), Pace("c", "1x1", 80.0, "stopped")])
    assert (row.counted, row.pace, row.num_failed, row.state) == (("b", "c"), 90.0, 1, "finished")
    alone, _ = compare([failed, Pace("c", "1x2", 100.0)])
    assert alone.counted == ("a",) and alone.state == "failed"


@pytest.mark.parametrize(
    ("mine", "theirs", "is_one"),
    [
        ({}, {}, True),
        ({}, {"id": "x", "kind": "scaling"}, True),
        ({}, {"id": "x", "kind": "data"}, False),
        ({"id": "x", "kind": "scaling"}, {"id": "x", "kind": "scaling"}, True),
        ({"id": "x", "kind": "scaling"}, {"id": "y", "kind": "scaling"}, False),
        ({"id": "x", "kind": "scaling"}, {}, False),
    ],
)
def test_a_benchmark_of_scaling_stays_among_itself(
    mine: dict[str, Any], theirs: dict[str, Any], is_one: bool
) -> None:
    assert is_compared({"bench": mine}, {"bench": theirs}) is is_one


# --- The same numbers in bench scaling, report, status and watch ---------------------------------


def made_up_runs(runs: Path, seed: int) -> list[RunDir]:
    """Repeats of several layouts, jobs and devices in one benchmark, failed and short ones too."""
    chance = random.Random(seed)
    made: list[RunDir] = []
    is_weak = chance.random() < 0.5
    bench = {"id": "b1", "kind": "scaling", **({"mode": "weak"} if is_weak else {})}
    devices: list[dict[str, Any] | None] = chance.choice([[H100], [None], [H100, A100]])
    most = 1.05 if seed % 2 else 1.6  # repeats that agree, and some that do not
    layouts = chance.sample(["1x1", "1x2", "2x1", "1x4", "2x2"], chance.randint(2, 4))
    for layout in layouts:
        nodes, per_node = map(int, layout.split("x"))
        for _ in range(chance.randint(1, 4)):
            number = len(made)
            run = make_run(
                runs,
                layout,
                step_seconds=0.4 / nodes / per_node * chance.uniform(most / 2, most)
                if most > 1.5
                else chance.uniform(1.0, most),
                number=number,
                steps=chance.choice([30, 30, 30, 1]),
                batch=64 * (nodes * per_node if is_weak else 1),
                state=chance.choice(["finished", "finished", "stopped", "failed", None]),
                gpu=chance.choice(devices),
                phases=chance.random() < 0.9,
                info={"bench": bench},
                job={"seed": number, "optimizer": {"lr": chance.choice([0.1, 0.1, 0.2])}},
            )
            made.append(run)
    return made


def numbers(row: Any) -> tuple[float | None, float | None]:
    return row["speedup"], row["efficiency"]


@pytest.mark.parametrize("seed", range(8))
def test_bench_scaling_report_status_and_watch_show_one_number(tmp_path: Path, seed: int) -> None:
    runs = made_up_runs(tmp_path, seed)
    facts = {run.name: read_run(run) for run in runs}
    expected: dict[str, Any] = {}  # by run, from the report
    for section in build(list(facts.values()), created=0.0)["sections"]:
        names = [run["run"] for run in section["runs"]]
        repeats = [repeat_of(Ended(run.info()["layout"], run)) for run in runs]
        measured = as_json([one for one in repeats if one.run in names])
        assert [(r["device"], r["layout"], *numbers(r)) for r in measured["rows"]] == [
            (r["device"], r["layout"], *numbers(r)) for r in section["rows"]
        ]
        for row in section["rows"]:
            if row["batch"]:  # what is shown fits: a step times samples/s is the batch
                pace = row["samples_per_second"]["median"]
                assert row["step_seconds"] * pace == pytest.approx(row["batch"])
                assert sum(row["parts"].values() if row["parts"] else [row["step_seconds"]]) == (
                    pytest.approx(row["step_seconds"])
                )
            counted = set(row["counted"])
            expected |= {run: numbers(row) if run in counted else NEITHER for run in row["runs"]}
    assert set(expected) == set(facts)
    assert seed % 2 == 0 or any(value != NEITHER for value in expected.values())
    watcher = Watcher(tmp_path, old=True)
    views = {one.view.run: asdict(one.view) for one in gather(watcher)}
    watcher.close()
    live = Watcher(tmp_path, old=True)
    live.poll(budget=float("inf"))
    assert {run: numbers(view) for run, view in views.items()} == expected
    assert {view.run: (view.speedup, view.efficiency) for view in live.runs()} == expected
    live.close()


def test_one_slow_repeat_moves_no_number(tmp_path: Path) -> None:
    """100, 100 and 110 samples/s against three times 180 are 90%, whoever is asked."""
    paces = [("1x1", 100), ("1x1", 100), ("1x1", 110), ("1x2", 180), ("1x2", 180), ("1x2", 180)]
    runs = [
        make_run(tmp_path, layout, step_seconds=256 / pace, number=number)
        for number, (layout, pace) in enumerate(paces)
    ]
    assert reported(runs)["1x2"]["efficiency"] == pytest.approx(0.9, rel=0.01)
    watcher = Watcher(tmp_path, old=True)
    shown = [one.view.efficiency for one in gather(watcher) if one.view.layout == "1x2"]
    watcher.close()
    assert shown == [reported(runs)["1x2"]["efficiency"]] * 3


def study(runs: Path) -> dict[str, RunDir]:
    """A job that ran by itself and in a benchmark; the newest run with one rank is the odd one."""
    made = [
        ("alone", "1x1", 0.40, {}),
        ("bench 1", "1x1", 0.44, SCALING),
        ("bench 4", "1x4", 0.12, SCALING),
        ("large", "1x4", 0.122, {}),
        ("odd", "1x1", 0.46, {}),
    ]
    return {
        name: make_run(runs, layout, step_seconds=seconds, number=number, info=info)
        for number, (name, layout, seconds, info) in enumerate(made)
    }


def reported(runs: list[RunDir]) -> dict[str, Any]:
    (section,) = build([read_run(run) for run in runs], created=0.0)["sections"]
    return {row["layout"]: row for row in section["rows"]}


@pytest.mark.parametrize("limit", [None, 0])
def test_status_watch_and_report_tell_the_same_efficiency(
    tmp_path: Path, limit: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if limit is not None:  # as of files too large to be read twice
        monkeypatch.setattr(followed, "AFFORDABLE_BYTES", limit)
        monkeypatch.setattr("tests.report_runs._World._end", lambda *_: {"exit": 0})
    runs = study(tmp_path)
    watcher = Watcher(tmp_path, old=True)
    found = {one.view.run: one.view for one in gather(watcher)}
    watcher.close()
    tolerance = 1e-9 if limit is None else 0.01
    # A run that stands alone: against all with one rank, as `report NAME`.
    large = found[runs["large"].name]
    everything = reported([*runs.values()])
    assert large.efficiency == pytest.approx(everything["1x4"]["efficiency"], rel=tolerance)
    assert large.baseline_layout == "1x1" and large.baseline == runs["odd"].name
    assert set(large.baseline_runs) == {runs[n].name for n in ("alone", "bench 1", "odd")}
    # One of a benchmark: against that benchmark's, as `report`.
    bench = found[runs["bench 4"].name]
    within = reported([runs["bench 1"], runs["bench 4"]])["1x4"]
    assert bench.efficiency == pytest.approx(within["efficiency"], rel=tolerance)
    assert bench.samples_per_second == pytest.approx(
        within["samples_per_second"]["median"], rel=tolerance
    )
    assert bench.baseline_runs == (runs["bench 1"].name,)
    odd = found[runs["odd"].name]
    assert (odd.speedup, odd.efficiency, odd.is_compared) == (1.0, 1.0, False)  # it is of the base


def test_a_live_screen_goes_on_measuring_and_measures_each_run_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = study(tmp_path)
    measured: list[str] = []

    def timed(run: RunDir, max_bytes: int) -> Any:
        measured.append(run.name)
        return timing(run)

    monkeypatch.setattr(followed, "affordable_timing", timed)
    watcher = Watcher(tmp_path, old=True)
    watcher.poll(budget=0.0)  # finds them, and has no time for more
    for _ in range(200):  # at once: no run is due
        watcher.poll(budget=0.05)
    found = {view.run: view for view in watcher.runs()}
    assert found[runs["large"].name].efficiency is not None
    for name in runs.values():
        watcher.hurry(name.name)  # they are looked at again, and nothing has changed
    watcher.poll()
    watcher.close()
    assert sorted(measured) == sorted(run.name for run in runs.values())


def test_large_files_do_not_hold_up_a_live_screen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(followed, "LIVE_BYTES", 0)
    monkeypatch.setattr(followed, "affordable_timing", lambda *_: pytest.fail("it was read whole"))
    runs = study(tmp_path)
    watcher = Watcher(tmp_path, old=True)
    for _ in range(20):
        watcher.poll(budget=5.0)
    found = {view.run: view for view in watcher.runs()}
    watcher.close()
    assert found[runs["large"].name].efficiency is not None


def test_without_one_rank_watch_too_compares_with_the_fewest(tmp_path: Path) -> None:
    two = make_run(tmp_path, "1x2", step_seconds=0.2, number=0)
    four = make_run(tmp_path, "1x4", step_seconds=0.125, number=1)
    watcher = Watcher(tmp_path, [four])
    watcher.poll(budget=float("inf"))
    (view,) = watcher.runs()
    assert view.efficiency == pytest.approx(reported([two, four])["1x4"]["efficiency"])
    assert (view.baseline_layout, view.baseline) == ("1x2", two.name)


def test_a_pace_that_is_not_read_yet_is_no_base(tmp_path: Path) -> None:
    runs = study(tmp_path)
    watcher = Watcher(tmp_path, old=True)
    seen = []
    for _ in range(20):
        watcher.poll(budget=0.0)
        views = {view.run: view for view in watcher.runs()}
        if runs["large"].name in views:
            seen.append(views[runs["large"].name].efficiency)
    watcher.poll(budget=float("inf"))
    views = {view.run: view for view in watcher.runs()}
    assert {value for value in seen if value is not None} <= {views[runs["large"].name].efficiency}


# --- How long a run that is measured is ----------------------------------------------------------


def test_a_run_that_is_measured_is_as_long_as_its_window(tmp_path: Path) -> None:
    start, window = {"steps": 10_000_000}, {"first": 31, "last": 230}
    assert final_step(start, {}, window) == 10_000_000
    assert final_step(start, SCALING, None) is None
    assert final_step(start, SCALING, window) == 230


def test_watch_and_ls_show_the_window_of_a_run_that_is_measured(tmp_path: Path) -> None:
    grown = GrowingRun(tmp_path, "1x2", steps=10_000_000, info=SCALING)
    grown.begin()
    watcher = Watcher(tmp_path)
    with grown.live():
        grown.steps(30)
        watcher.poll()
        (view,) = watcher.runs()
        assert (view.step, view.steps, view.seconds_left) == (30, None, None)
        assert view.epochs == 10  # of the job
        assert describe(grown.run, Queue())["steps"] is None
        grown.write(0, "window", first=31, last=230, steady=True)
        grown.steps(10)
        watcher.poll({grown.run.name})
        (view,) = watcher.runs()
        assert (view.step, view.steps) == (40, 230)
        assert view.seconds_left == pytest.approx(190 * 0.1, rel=0.01)
        shown = describe(grown.run, Queue())
        assert shown["steps"] == 230 and shown["seconds_left"] == pytest.approx(19.0, rel=0.01)


# --- Which runs a report is of -------------------------------------------------------------------


def named(runs: list[RunDir]) -> set[str]:
    return {run.name for run in runs}


def test_a_report_is_of_the_newest_benchmark_of_scaling(tmp_path: Path) -> None:
    made = study(tmp_path)
    newer = [
        make_run(tmp_path, layout, step_seconds=0.1, number=10 + n, info={"bench": bench})
        for n, (layout, bench) in enumerate(
            [("1x1", {"id": "n", "kind": "scaling"}), ("1x2", {"id": "n", "kind": "scaling"})]
        )
    ]
    for number, kind in enumerate(("data", "precision", "comm")):  # newest of all
        info = {"bench": {"id": kind, "kind": kind}}
        make_run(tmp_path, "1x1", step_seconds=0.1, number=20 + number, info=info)
    make_run(tmp_path, "1x1", step_seconds=0.1, name="other", number=0)
    runs, words = chosen_runs(tmp_path, [])
    assert named(runs) == named(newer)
    assert words is not None
    assert "the 2 runs of language in the newest bench scaling" in words
    assert "all runs of language: allranks report language" in words
    assert "Other jobs: other" in words
    # By the job's name: all that can be compared.
    runs, words = chosen_runs(tmp_path, ["language"])
    assert named(runs) == named([*made.values(), *newer])
    assert runs[0].name == newer[1].name  # the newest: there the report is written
    assert words == "Left out: 3 runs of other benchmarks."


def test_a_report_is_of_the_newest_job_where_its_newest_run_is_of_no_benchmark(
    tmp_path: Path,
) -> None:
    made = study(tmp_path)
    runs, words = chosen_runs(tmp_path, [])
    assert named(runs) == named([*made.values()])
    assert words == "Compared: the 5 runs of language, the newest job."


def test_a_word_stands_for_all_runs_of_a_job_or_that_begin_so(tmp_path: Path) -> None:
    for number, name in enumerate(("digits", "digits", "digits-big")):
        make_run(tmp_path, "1x1", step_seconds=0.1, name=name, number=number)
    assert len(find_runs(tmp_path, "digits")) == 2  # not digits-big
    assert len(find_runs(tmp_path, "dig")) == 3
    (one,) = find_runs(tmp_path, "digits-big-20260921-120002-0002")
    assert find_runs(tmp_path, str(one.path)) == [one]
    assert find_runs(tmp_path, "last") == [one]
    with pytest.raises(AllranksError, match="no run 'nobody'"):
        find_runs(tmp_path, "nobody")


def test_where_nothing_can_be_compared_that_is_said(tmp_path: Path) -> None:
    with pytest.raises(AllranksError, match="no run in"):
        chosen_runs(tmp_path, [])
    info = {"bench": {"id": "d", "kind": "data"}}
    run = make_run(tmp_path, "1x1", step_seconds=0.1, info=info)
    with pytest.raises(AllranksError, match="they are runs of bench data") as refusal:
        chosen_runs(tmp_path, [])
    assert "bench scaling" in refusal.value.fix
    assert chosen_runs(tmp_path, ["language"]) == ([run], None)  # it was asked for


def test_many_other_jobs_are_not_all_named() -> None:
    words = chosen_words("a", 1, is_bench=False, jobs=["a", "b", "c", "d", "e"])
    assert words == (
        "Compared: the 1 run of a, the newest job. Other jobs: b, c, d, … (allranks report NAME)."
    )


def test_the_last_run_of_bench_comm_is_none_of_another_command(tmp_path: Path) -> None:
    with pytest.raises(AllranksError, match="no run of bench comm"):
        run_to_show(tmp_path, "last")
    comm = make_run(tmp_path, "1x2", step_seconds=0.1, number=0, info={"bench": {"kind": "comm"}})
    other = make_run(tmp_path, "1x2", step_seconds=0.1, number=1, name="digits")
    assert run_to_show(tmp_path, "last") == comm == run_to_show(tmp_path, "language")
    with pytest.raises(AllranksError, match="is not a run of bench comm") as refusal:
        run_to_show(tmp_path, other.name)
    assert comm.name in refusal.value.fix
