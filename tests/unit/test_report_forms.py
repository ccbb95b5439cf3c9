"""The report of run folders in any state: what is read, and what is written and shown."""

from __future__ import annotations

import io
import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.commandline import call_allranks
from tests.report_runs import make_run, scaling_study

from allranks.report.build import build
from allranks.report.facts import read_run
from allranks.report.files import data_block, inside_script, markdown, scaling_lines, write_files
from allranks.report.tables import show_report
from allranks.run.folder import RunDir
from allranks.show.text import in_markdown

GOLDEN = Path(__file__).parent / "golden" / "report.md"
HOSTILE = "a\"><img src=x onerror=alert(1)>'`|&_x_ \x1b[2J</script><script>alert(2)</script>"


def report_of(runs: list[RunDir]) -> dict[str, Any]:
    return build([read_run(run) for run in runs], created=1_790_100_000.0)


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return report_of(scaling_study(tmp_path_factory.mktemp("study")))


def test_the_study(study: dict[str, Any]) -> None:
    (section,) = study["sections"]
    assert [row["layout"] for row in section["rows"]] == ["1x1", "1x2", "1x4", "2x4"]
    assert section["mode"] == "strong" and section["samples"] == 200 * 256
    assert [row["num_failed"] for row in section["rows"]] == [0, 0, 0, 1]
    assert {row["seconds_kind"] for row in section["rows"]} == {"measured"}
    assert len(section["curves"]["loss"]) == len(section["curves"]["utilization"]) == 4
    assert any("CUDA out of memory" in note for note in section["notes"])


def test_parts_sum_to_the_step(study: dict[str, Any]) -> None:
    for row in study["sections"][0]["rows"]:
        assert sum(row["parts"].values()) == pytest.approx(row["step_seconds"], rel=0.02)


def test_markdown_is_as_it_was(study: dict[str, Any]) -> None:
    text = markdown({**study, "date": "2026-09-22 18:00"}, picture="scaling.png")
    assert text == GOLDEN.read_text()


@pytest.mark.parametrize("width", [60, 100])
def test_the_terminal_is_never_too_narrow(study: dict[str, Any], width: int) -> None:
    console = Console(width=width, record=True, file=io.StringIO())
    show_report(console, {**study, "prices": []})
    text = console.export_text()
    lines = text.splitlines()
    assert "best of both: 1x2" in text and "diminishing" in text
    tables = [line for line in lines if not line.startswith(("note:", "by ", "best "))]
    assert max(map(len, tables)) <= width


def test_names_are_inert_in_every_form(tmp_path: Path) -> None:
    run = make_run(tmp_path, "1x1", step_seconds=0.1, job={"name": HOSTILE})
    built = report_of([run])
    block = data_block(built)
    assert not set(block) & set("<>&") and json.loads(block) == json.loads(json.dumps(built))
    console = Console(width=100, record=True, file=io.StringIO())
    show_report(console, built)
    assert "\x1b[2J" not in console.export_text(clear=False)
    heading = next(line for line in markdown(built).splitlines() if line.startswith("## "))
    assert not re.search(r"(?<!\\)[<>`|*\[\]]", heading)


def test_markdown_cells_stay_cells() -> None:
    assert in_markdown("a|b_c _d_\n") == r"a\|b_c \_d\_"


def test_a_script_that_ends_its_element_is_not_put_on_the_page() -> None:
    with pytest.raises(AssertionError):
        inside_script("x = '</SCRIPT>'")


def test_torn_and_foreign_events_leave_the_rest(tmp_path: Path) -> None:
    run = make_run(tmp_path, "1x2", step_seconds=0.1, number=1)
    events = run.events(0, 1)
    events.write_bytes(events.read_bytes()[:-400] + b'\xff\xfe{"v":1,"event":"st')
    facts = read_run(run)
    assert facts.state == "failed" and facts.samples_per_second is not None
    foreign = make_run(tmp_path, "1x1", step_seconds=0.1, number=2)
    with foreign.events(0, 0).open("a") as file:
        file.write('{"event":"step","seconds":1}\n{"event":"metric","name":"x","value":"y"}\n')
    assert "rank-0.jsonl: a step event has no t" in (read_run(foreign).problem or "")
    report_of([run, foreign])


def test_runs_without_steps_say_so(tmp_path: Path) -> None:
    short = make_run(tmp_path, "1x1", step_seconds=0.1, steps=1, number=1)
    empty = RunDir(tmp_path / "language-20260921-130000-aaaa")
    empty.path.mkdir()
    queued = make_run(
        tmp_path, "1x1", step_seconds=0.1, number=2, info={"queued": True, "layout": "1x4,4x1"}
    )
    for file in queued.attempt(0).iterdir():
        file.unlink()
    queued.attempt(0).rmdir()
    built = report_of([short, empty, queued])
    notes = [note for section in built["sections"] for note in section["notes"]]
    assert any("too few steps" in note for note in notes)
    assert any("never started" in note for note in notes)
    assert any("not started yet" in note for note in notes)


def test_a_window_that_was_cut_out_is_no_finished_job(tmp_path: Path) -> None:
    run = make_run(tmp_path, "1x1", step_seconds=0.1, job={"steps": 1000})
    with run.events(0, 0).open("a") as file:
        file.write('{"v":1,"t":1,"event":"window","first":21,"last":60,"steady":true}\n')
    facts = read_run(run)
    assert not facts.is_complete and facts.timing and facts.timing.first_step == 21
    (row,) = report_of([run])["sections"][0]["rows"]
    assert row["seconds_kind"] == "predicted"
    assert row["seconds"] == pytest.approx(1000 * 0.1, rel=0.02)


def test_a_benchmark_does_not_change_how_long_the_job_is(tmp_path: Path) -> None:
    bench = {"bench": {"id": "b1", "job": {"epochs": None, "steps": 1000}}}
    endless = {"steps": 10_000_000}
    run = make_run(tmp_path, "1x1", step_seconds=0.1, job=endless, batch=64, info=bench)
    assert read_run(run).target_samples == 1000 * 64


def test_a_scripts_time_is_that_of_its_steps(tmp_path: Path) -> None:
    script = {"task": None, "command": "python train.py"}
    facts = read_run(make_run(tmp_path, "1x2", step_seconds=0.1, job=script))
    assert facts.seconds == pytest.approx(59 * 0.1 + 0.5, rel=0.02)  # the first step took five
    assert facts.samples == 60 * 256 and facts.target_samples is None  # only the script knows


def test_a_benchmark_of_weak_scaling_is_one_job(tmp_path: Path) -> None:
    bench = {"bench": {"id": "b1", "mode": "weak"}}
    one = make_run(tmp_path, "1x1", step_seconds=0.1, batch=64, number=1, info=bench)
    two = make_run(tmp_path, "1x2", step_seconds=0.105, batch=128, number=2, info=bench)
    (section,) = report_of([one, two])["sections"]
    assert section["mode"] == "weak"
    assert section["rows"][1]["efficiency"] == pytest.approx(1 / 1.05, rel=0.02)


def test_without_the_extra_the_rest_is_written(
    tmp_path: Path, study: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("allranks.report.files.find_spec", lambda name: None)
    lines, trouble = write_files(study, tmp_path)
    assert trouble is None and [path.name for path in tmp_path.iterdir()] == ["report.md"]
    assert "allranks[report]" in lines[-1] and "report.html, scaling.png" in lines[-1]
    assert "scaling.png" not in (tmp_path / "report.md").read_text()


def test_the_picture(tmp_path: Path, study: dict[str, Any]) -> None:
    pytest.importorskip("matplotlib")
    write_files(study, tmp_path)
    assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")


def test_layouts_with_as_many_ranks_stay_apart(tmp_path: Path) -> None:
    def edit(rank: int, event: dict[str, Any]) -> dict[str, Any]:
        return {**event, "exchanges": {"pipeline": event["wait"]}} if "wait" in event else event

    seconds = {"1x2:fsdp=2": 0.2, "1x4:fsdp=4": 0.11, "1x4:pp=2": 0.12}
    made = [
        make_run(tmp_path, layout, step_seconds=took, comm=0.02, number=number, edit=edit)
        for number, (layout, took) in enumerate(seconds.items())
    ]
    study = report_of(made)
    (section,) = study["sections"]
    assert {row["layout"]: row["baseline"] for row in section["rows"]} == dict.fromkeys(
        seconds, "1x2:fsdp=2"
    )
    ((line, rest),) = scaling_lines(study).values()
    assert [row["layout"] for row in line] == ["1x2:fsdp=2", "1x4:fsdp=4"]
    assert [row["layout"] for row in rest] == ["1x4:pp=2"]
    assert "speedup vs 1x2:fsdp=2" in markdown(study)
    assert "Waiting in a step, by exchange" in markdown(study)
    if find_spec("matplotlib"):
        write_files(study, tmp_path)
        assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")


def test_the_picture_of_many_ranks_and_of_several_jobs(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    sizes = {"1x1": 0.4, "1x4": 0.11, "4x1": 0.12, "8x8": 0.01}
    made = [
        make_run(tmp_path, layout, step_seconds=seconds, number=i, steps=20, phases=False)
        for i, (layout, seconds) in enumerate(sizes.items())
    ]
    made.append(make_run(tmp_path, "1x2", step_seconds=0.1, name="cost $ or $$", number=9))
    write_files(report_of(made), tmp_path)
    assert (tmp_path / "scaling.png").stat().st_size > 10_000


def test_the_command(tmp_path: Path) -> None:
    scaling_study(tmp_path / "runs")
    make_run(tmp_path / "runs", "1x1", step_seconds=0.1, name="older", number=0)
    done = call_allranks(
        "report", "--json", "--price", "h100=2", "--target", "0.5", "--out", "here", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    built = json.loads(done.stdout)
    assert [section["job"] for section in built["sections"]] == ["language"]
    assert built["prices"][0]["usd_per_hour"] == 2.0
    assert built["sections"][0]["rows"][2]["verdict"] == "good"
    assert "best of both" in done.stderr and (tmp_path / "here" / "report.md").exists()


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ([], "no run in runs"),
        (["nobody"], "no run 'nobody'"),
        (["--price", "h100"], "is not GPU=DOLLARS"),
        (["--prices", "none.yaml"], "cannot read none.yaml"),
    ],
)
def test_wrong_usage(tmp_path: Path, arguments: list[str], what: str) -> None:
    done = call_allranks("report", *arguments, cwd=tmp_path)
    assert done.returncode == 2 and what in done.stderr and "fix:" in done.stderr
    assert "Traceback" not in done.stderr
