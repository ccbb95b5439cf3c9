"""What is typed wrong, or ended early, in benchmarks: refused before anything runs, or told."""

from __future__ import annotations

import io
import json
import signal
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console
from tests.commandline import call_allranks
from tests.watch_runs import GrowingRun

from allranks.bench import comm, data, precision
from allranks.bench.measure import Ended, Series
from allranks.bench.precision import Trial
from allranks.bench.scaling import Repeat, as_json, plan_runs, repeat_of, result_of
from allranks.cli import bench as cli_bench
from allranks.errors import AllranksError
from allranks.job.job import load_job
from allranks.launch import node, screen
from allranks.launch.backends import local
from allranks.launch.prepare import Prepared, Request, open_run, prepare
from allranks.layout import Layout
from allranks.machine.processes import Signals
from allranks.timing.steps import timing_of

LARGE = ("task=spiral", "batch_size=16384")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["bench", "scaling", "--price", "cpu=abc"], "abc is not a price"),
        (
            ["bench", "scaling", *LARGE, "--layouts", "1x1,8x1024"],
            "8x1024 is larger than",
        ),
        (
            ["bench", "data", *LARGE, "--layout", "8x1024"],
            "8x1024 is larger than",
        ),
        (["bench", "precision", *LARGE, "--layout", "8x1024"], "8x1024 is larger than"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_runs(
    tmp_path: Path, words: list[str], said: str
) -> None:
    done = call_allranks(*words, cwd=tmp_path)
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()


def quiet(console: Console, run: GrowingRun) -> screen.QuietScreen:
    shown = screen.QuietScreen(console)
    shown.follow(run.run, load_job(None, ["task=spiral"]), 0)
    return shown


@pytest.mark.parametrize("makes_steps", [True, False])
def test_a_script_without_steps_is_named_after_a_while(
    tmp_path: Path, makes_steps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    grown = GrowingRun(tmp_path, "1x2")
    grown.begin()
    if makes_steps:
        grown.steps(3)
    console = Console(file=io.StringIO(), width=200)
    shown = quiet(console, grown)
    shown.update(0)
    assert console.file.getvalue() == ""  # type: ignore[attr-defined]  # a StringIO
    monkeypatch.setattr(screen, "FIRST_STEP_SECONDS", 0.0)
    for _ in range(3):
        shown.update(0)
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert said.count("no optimizer step for") == (0 if makes_steps else 1)
    shown.stopping("SIGINT")
    shown.stopping("SIGINT")
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert said.count("stopping; what was measured is kept") == 1


def silent() -> Console:
    return Console(file=io.StringIO())


def series_of(runs: Path, *layouts: str) -> Series:
    planned = [
        (layout, prepare(Request(overrides=["task=spiral"], layout=layout, runs=runs)))
        for layout in layouts
    ]
    return Series(planned, silent(), {"kind": "scaling"})


def refused(layout: str, what: str) -> Repeat:
    return repeat_of(Ended(layout, None, AllranksError(what, fix="", exit_code=1)))


def test_a_ctrl_c_between_two_runs_ends_the_benchmark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    begun: list[Layout] = []

    def run_here(one: Prepared, place: Any, shown: Any, signals: Signals) -> Any:
        begun.append(one.layout)
        if len(begun) == 2:  # it came before this one had any rank
            signals.received.append(signal.SIGINT)
            raise AllranksError("stopped before all nodes were there", fix="", exit_code=130)
        raise AllranksError("no port is free", fix="", exit_code=1)

    monkeypatch.setattr(local, "run_here", run_here)
    series = series_of(tmp_path, "1x1", "1x2", "1x4")
    done = series.here(repeat_of)
    assert [str(layout) for layout in begun] == ["1x1", "1x2"]
    assert done[0].problem == "no port is free" and series.is_interrupted
    assert series.how_far(one.problem for one in done) == "0 of 3 runs were measured"
    ended = result_of(as_json(done), is_interrupted=True)
    with pytest.raises(typer.Exit) as left:
        cli_bench.finish(ended, None, silent(), as_json=True)
    assert left.value.exit_code == 130
    told = capsys.readouterr()
    assert "measured by then" in told.err and len(json.loads(told.out)["rows"]) == 2


def test_a_name_that_was_left_out_is_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_here(*_: Any) -> Any:
        raise AllranksError("no port is free", fix="", exit_code=1)

    monkeypatch.setattr(local, "run_here", run_here)
    series = series_of(tmp_path, "1x1", "1x2", "1x1", "1x2")

    def read(ended: Ended) -> str:
        series.left_out.add("1x1")
        return ended.name

    assert series.here(read) == ["1x1", "1x2", "1x2"] and not series.is_interrupted


def test_what_is_wrong_with_the_first_run_is_wrong_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_here(*_: Any) -> Any:
        raise AllranksError("cannot write runs: Permission denied", fix="use --runs")

    monkeypatch.setattr(local, "run_here", run_here)
    with pytest.raises(AllranksError, match="Permission denied"):
        series_of(tmp_path, "1x1").here(repeat_of)


def interrupted(monkeypatch: pytest.MonkeyPatch, run: GrowingRun) -> None:
    """Every run is that one, stopped by a Ctrl-C."""

    def run_here(prepared: Any, place: Any, shown: Any, signals: Signals) -> node.Outcome:
        signals.received.append(signal.SIGINT)
        return node.Outcome(run.run, {"state": "stopped"}, 75)

    monkeypatch.setattr(local, "run_here", run_here)


def test_data_that_were_measured_until_a_ctrl_c_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    interrupted(monkeypatch, GrowingRun(tmp_path, "1x1"))
    monkeypatch.setattr(data, "found_in_task", lambda ended: {"verdict": "fast"})
    with pytest.raises(typer.Exit) as left:
        cli_bench.data(overrides=["task=spiral"], runs=tmp_path, as_json=True)
    assert left.value.exit_code == 130
    told = capsys.readouterr()
    assert "measured by then" in told.err and json.loads(told.out)["verdict"] == "fast"


@pytest.mark.parametrize("in_json", [True, False])
def test_a_layout_that_was_refused_names_no_run(
    capsys: pytest.CaptureFixture[str], in_json: bool
) -> None:
    found = result_of(as_json([refused("1x2", "port 29500 is in use; name another")]))
    with pytest.raises(typer.Exit) as left:
        cli_bench.finish(found, None, silent(), as_json=in_json)
    said = capsys.readouterr()
    assert left.value.exit_code == 1
    assert "port 29500 is in use; name another" in said.err and "allranks doctor" not in said.err
    if in_json:  # one value, with the error and with what was measured
        told = json.loads(said.out)
        assert told["error"]["what"] == "1x2: port 29500 is in use; name another"
        assert told["error"]["fix"] and told["rows"]


def test_a_baseline_that_was_only_added_may_fail(capsys: pytest.CaptureFixture[str]) -> None:
    steps = {rank: {n: {"seconds": 1.0, "samples": 5} for n in range(1, 10)} for rank in (0, 1)}
    done = [refused("1x1", "out of memory"), Repeat("run", "1x2", timing_of(steps, None))]
    found = result_of(as_json(done, added=Layout(1, 1)))
    cli_bench.finish(found, None, silent(), as_json=True)
    told = capsys.readouterr()
    assert "note: 1x1, added for comparison" in told.err and "--no-baseline" in told.err
    printed = json.loads(told.out)
    assert "error" not in printed and printed["rows"][1]["efficiency"] == 1.0
    with pytest.raises(typer.Exit):  # who asked for it is told that it failed
        cli_bench.finish(result_of(as_json(done)), None, silent(), as_json=True)


def test_precisions_that_were_measured_until_a_ctrl_c_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    interrupted(monkeypatch, GrowingRun(tmp_path, "1x1"))
    monkeypatch.setattr(precision, "trial_of", lambda ended: Trial(ended.name, "a", 100.0))
    with pytest.raises(typer.Exit) as left:
        cli_bench.precision(overrides=["task=spiral"], runs=tmp_path, as_json=True)
    assert left.value.exit_code == 130
    told = capsys.readouterr()
    assert "stopped: 1 of " in told.err
    found = json.loads(told.out)
    assert found["interrupted"] and found["rows"][0]["samples_per_second"] == 100.0


def test_a_precision_that_failed_is_an_error_for_programs_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def trial_of(ended: Ended) -> Trial:
        is_bad = ended.name == "bf16"
        return Trial(ended.name, "b", None if is_bad else 100.0, problem="lost" if is_bad else None)

    run = GrowingRun(tmp_path, "1x1").run
    monkeypatch.setattr(local, "run_here", lambda *_: node.Outcome(run, {"state": "finished"}, 0))
    monkeypatch.setattr(precision, "trial_of", trial_of)
    asked = {"overrides": ["task=spiral"], "precisions": "fp32,bf16", "runs": tmp_path}
    with pytest.raises(typer.Exit) as left:
        cli_bench.precision(**asked, as_json=True)  # type: ignore[arg-type]
    found = json.loads(capsys.readouterr().out)
    assert left.value.exit_code == 1 and len(found["rows"][0]["repeats"]) == 3
    assert found["error"] == {"what": "bf16: lost", "fix": "see allranks doctor b"}


@pytest.mark.parametrize("measured", [True, False])
def test_collectives_that_were_measured_until_a_ctrl_c_are_shown(
    tmp_path: Path, measured: bool
) -> None:
    run = GrowingRun(tmp_path, "1x2").run
    if measured:
        (run.path / "comm.json").write_text(
            json.dumps({"complete": False, "rows": [], "peak_GBps": {}})
        )
        found = comm.result_of(Ended("comm", run), is_interrupted=True)
        assert found.is_interrupted and found.found["complete"] is False
        return
    with pytest.raises(AllranksError) as left:
        comm.result_of(Ended("comm", run), is_interrupted=True)
    assert left.value.exit_code == 130


def test_a_runs_folder_says_from_its_beginning_which_benchmark_it_is_of(tmp_path: Path) -> None:
    plan = plan_runs("1x1", steps="10", repeats=1, weak=True)
    request = Request(overrides=["task=spiral", "batch_size=8"], layout="1x1", runs=tmp_path)
    prepared = prepare(request)
    prepared.bench = plan.settings_for(prepared.job)[1]
    info = json.loads((open_run(prepared).path / "run.json").read_text())
    assert info["bench"]["kind"] == "scaling" and info["bench"]["mode"] == "weak"
    assert info["bench"]["job"]["epochs"] == prepared.job.epochs
