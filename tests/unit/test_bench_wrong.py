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
from tests.commandline import Allranks
from tests.watch_runs import GrowingRun

from allranks.bench.plan_runs import plan_runs
from allranks.bench.precision import Trial
from allranks.bench.scaling import Repeat, as_json
from allranks.bench.scaling_screen import Progress
from allranks.cli import bench as cli_bench
from allranks.cli import bench_comm as cli_comm
from allranks.cli import bench_data as cli_bench_data
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
        (["bench", "scaling", "train.py"], "write it after --, as -- python train.py"),
        (["bench", "scaling", "python", "a.py"], "write it after --, as -- python a.py"),
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
    allranks: Allranks, tmp_path: Path, words: list[str], said: str
) -> None:
    done = allranks(*words)
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
    prepared = [
        prepare(Request(overrides=["task=spiral"], layout=layout, runs=tmp_path))
        for layout in ("1x1", "1x2", "1x4")
    ]
    progress = Progress(as_json=True, total=3)
    done = cli_bench.measure_here(prepared, progress)
    assert [str(layout) for layout in begun] == ["1x1", "1x2"]
    assert done[0].problem == "no port is free" and progress.is_interrupted
    with pytest.raises(typer.Exit) as left:
        cli_bench.tell(as_json(done), progress, as_json=True)
    assert left.value.exit_code == 130
    assert "stopped: 0 of 3 runs were measured" in capsys.readouterr().err


def test_what_is_wrong_with_the_first_run_is_wrong_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_here(*_: Any) -> Any:
        raise AllranksError("cannot write runs: Permission denied", fix="use --runs")

    monkeypatch.setattr(local, "run_here", run_here)
    prepared = [prepare(Request(overrides=["task=spiral"], layout="1x1", runs=tmp_path))]
    with pytest.raises(AllranksError, match="Permission denied"):
        cli_bench.measure_here(prepared, Progress(as_json=True, total=1))
    trials = [("fp32", prepared[0])]
    with pytest.raises(AllranksError, match="Permission denied"):
        cli_bench_data.run_trials(trials, Console(file=io.StringIO()), Signals())


def test_data_that_were_measured_until_a_ctrl_c_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    grown = GrowingRun(tmp_path, "1x1")
    grown.begin()
    grown.steps(30)

    def run_muted(*given: Any) -> node.Outcome:
        given[-1].received.append(signal.SIGINT)
        return node.Outcome(grown.run, {"state": "stopped"}, 75)

    monkeypatch.setattr(cli_bench_data, "run_muted", run_muted)
    monkeypatch.setattr(cli_bench_data, "found_in_task", lambda outcome: {"verdict": "fast"})
    with pytest.raises(typer.Exit) as left:
        cli_bench_data.data(overrides=["task=spiral"], runs=tmp_path, as_json=True)
    assert left.value.exit_code == 130
    told = capsys.readouterr()
    assert "measured by then" in told.err and json.loads(told.out)["verdict"] == "fast"


@pytest.mark.parametrize("in_json", [True, False])
def test_a_layout_that_was_refused_names_no_run(
    capsys: pytest.CaptureFixture[str], in_json: bool
) -> None:
    found = as_json([cli_bench.failed(Layout(1, 2), "port 29500 is in use; name another")])
    with pytest.raises(typer.Exit) as left:
        cli_bench.tell(found, Progress(as_json=in_json, total=1), as_json=in_json)
    said = capsys.readouterr()
    assert left.value.exit_code == 1
    assert "port 29500 is in use; name another" in said.err and "allranks doctor" not in said.err
    if in_json:  # one value, with the error and with what was measured
        told = json.loads(said.out)
        assert told["error"]["what"] == "1x2: port 29500 is in use; name another"
        assert told["error"]["fix"] and told["rows"]


def test_a_baseline_that_was_only_added_may_fail(capsys: pytest.CaptureFixture[str]) -> None:
    steps = {rank: {n: {"seconds": 1.0, "samples": 5} for n in range(1, 10)} for rank in (0, 1)}
    grew = timing_of(steps, None)
    done = [cli_bench.failed(Layout(1, 1), "out of memory"), Repeat("run", "1x2", grew)]
    cli_bench.tell(as_json(done, added=Layout(1, 1)), Progress(as_json=True, total=2), as_json=True)
    told = capsys.readouterr()
    assert "note: 1x1, added to compare with" in told.err and "--no-baseline" in told.err
    found = json.loads(told.out)
    assert "error" not in found and found["rows"][1]["efficiency"] == 1.0
    with pytest.raises(typer.Exit):  # who asked for it is told that it failed
        cli_bench.tell(as_json(done), Progress(as_json=True, total=2), as_json=True)


def test_precisions_that_were_measured_until_a_ctrl_c_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_trials(prepared: Any, console: Any, signals: Signals) -> list[Trial]:
        signals.received.append(signal.SIGINT)
        return [Trial("fp32", "a", 100.0), Trial("bf16", "b", problem="it was stopped")]

    monkeypatch.setattr(cli_bench_data, "run_trials", run_trials)
    with pytest.raises(typer.Exit) as left:
        cli_bench_data.precision(overrides=["task=spiral"], runs=tmp_path, as_json=True)
    assert left.value.exit_code == 130
    told = capsys.readouterr()
    assert "measured by then" in told.err
    found = json.loads(told.out)
    assert found["interrupted"] and found["rows"][0]["samples_per_second"] == 100.0


def test_a_precision_that_failed_is_an_error_for_programs_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done = [Trial("fp32", "a", 100.0), Trial("bf16", "b", problem="rank 0 failed")]
    monkeypatch.setattr(cli_bench_data, "run_trials", lambda *given: done)
    with pytest.raises(typer.Exit) as left:
        cli_bench_data.precision(overrides=["task=spiral"], runs=tmp_path, as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert left.value.exit_code == 1 and found["rows"]
    assert found["error"] == {"what": "bf16: rank 0 failed", "fix": "see allranks doctor b"}


@pytest.mark.parametrize("measured", [True, False])
def test_collectives_that_were_measured_until_a_ctrl_c_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], measured: bool
) -> None:
    run = GrowingRun(tmp_path, "1x2").run
    outcome = node.Outcome(run, {"state": "stopped"}, 130)
    rows = {**dict.fromkeys(("rows", "fits", "not_supported", "stopped"), ()), "complete": False}
    about = {"layout": "1x2", "library": "gloo", "ranks": 2, "nodes": 1, "device": "CPU"}
    about |= {"transport": {}, "played": False, "peak_GBps": {}, "run": run.name, "timing": ""}
    if measured:
        (run.path / "comm.json").write_text(json.dumps({**rows, **about}))
    with pytest.raises(AllranksError if not measured else typer.Exit) as left:
        cli_comm.show_outcome(outcome, is_interrupted=True, as_json=True)
    assert left.value.exit_code == 130  # type: ignore[attr-defined]  # both have it
    told = capsys.readouterr()
    assert not measured or json.loads(told.out)["complete"] is False


def test_a_runs_folder_says_from_its_beginning_which_benchmark_it_is_of(tmp_path: Path) -> None:
    plan = plan_runs("1x1", steps="10", repeats=1, weak=True)
    request = Request(overrides=["task=spiral", "batch_size=8"], layout="1x1", runs=tmp_path)
    prepared = prepare(request)
    prepared.bench = plan.for_job(prepared.job).bench
    info = json.loads((open_run(prepared).path / "run.json").read_text())
    assert info["bench"]["kind"] == "scaling" and info["bench"]["mode"] == "weak"
    assert info["bench"]["job"]["epochs"] == prepared.job.epochs
