"""The reading core: what was appended is read once, in bounded memory, and SLURM asked seldom."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.watch_runs import GrowingRun, event_line

from allranks.run.folder import RunDir
from allranks.run.run_state import Queue, QueuedJob
from allranks.timing.verdict import Judgement, Verdict
from allranks.watch.live import ASK_SECONDS, MAX_SECONDS, Asking, Watcher
from allranks.watch.reader import MAX_BUCKETS, MAX_POINTS, Points, Series
from allranks.watch.tail import MAX_STEPS, WHOLE_BYTES, EventTail


def test_a_series_keeps_its_mean_however_long_it_gets() -> None:
    series = Series()
    for step in range(1, 100_001):
        series.add(step, float(step))
    means = [mean for mean in series.means() if mean is not None]
    assert len(series.sums) <= MAX_BUCKETS < 2 * len(series.sums)
    assert sum(series.sums) == pytest.approx(sum(range(1, 100_001)))
    assert means == sorted(means) and means[0] == (1 + series.width) / 2


def test_series_of_ranks_at_different_steps_share_a_grid() -> None:
    ahead, behind = Series(), Series()
    for step in range(1, MAX_BUCKETS + 2):
        ahead.add(step, 1.0)
        if step <= MAX_BUCKETS:
            behind.add(step, float(step))
    assert (ahead.width, behind.width) == (2, 1)
    assert behind.means(2)[:2] == [1.5, 3.5]


def test_points_are_thinned_and_go_back_with_an_attempt() -> None:
    points = Points()
    for step in range(1, 50_001):
        points.add(step, 1.0 / step)
    assert len(points.steps) <= MAX_POINTS and points.last == 1.0 / 50_000
    points.add(20_000, 7.0)
    points.add(20_001, None)
    assert points.steps[-1] == 20_001 and points.values[-1] is None
    assert points.steps == sorted(points.steps)


def test_a_tail_reads_each_event_once_and_waits_for_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.jsonl"
    tail = EventTail(path)
    assert tail.read() == []
    line = event_line(1.0, "step", step=1)
    path.write_text(line + line[:20])
    assert [event["step"] for event in tail.read()] == [1]
    assert tail.read() == []
    with path.open("a") as file:
        file.write(line[20:] + "{torn\n" + event_line(2.0, "step", step=2))
    assert [event["step"] for event in tail.read()] == [1, 2]


def test_of_very_many_steps_a_part_is_parsed_but_nothing_else_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.jsonl"
    lines = []
    for step in range(1, 30_001):
        fields = {"loss": 1.0} if step % 10 == 0 else {}
        lines.append(event_line(step, "step", step=step, seconds=0.1, **fields))
        if step % 1000 == 0:
            lines.append(event_line(step, "metric", step=step, name="a", value=step))
    path.write_text("".join(lines))
    events = EventTail(path).read()
    assert [e["value"] for e in events if e["event"] == "metric"] == [*range(1000, 30_001, 1000)]
    steps = [event["step"] for event in events if event["event"] == "step"]
    assert steps == sorted(steps) and steps[-1] == 30_000
    assert len(steps) <= 3 * 2 * MAX_STEPS  # of three chunks at most


def test_a_long_file_is_first_looked_at_in_some_places(tmp_path: Path) -> None:
    path = tmp_path / "rank-1.jsonl"
    padding = "x" * 200
    with path.open("w") as file:
        for step in range(1, 40_001):
            file.write(event_line(step, "step", step=step, padding=padding))
    assert path.stat().st_size > 4 * WHOLE_BYTES
    tail = EventTail(path)
    ends, places = tail.read_ends()
    assert (ends[0]["step"], ends[-1]["step"]) == (1, 40_000) and len(ends) < 500
    steps = sorted({event["step"] for events in [ends, *places] for event in events})
    assert len(steps) < 10_000
    assert max(after - before for before, after in pairwise(steps)) < 400
    with path.open("a") as file:
        file.write(event_line(1, "end", state="finished"))
    assert [event["event"] for event in tail.read()] == ["end"]


def test_the_past_of_long_files_is_read_little_by_little(tmp_path: Path) -> None:
    grown = GrowingRun(tmp_path, "1x2", steps=100_000)
    with grown.live():
        grown.begin()
        grown.steps(20_000)
        watcher = Watcher(tmp_path)
        watcher.poll({grown.run.name}, budget=0.0)
        assert [rank.step for rank in watcher.ranks(grown.run.name)] == [20_000, 20_000]
        history = watcher.history(grown.run.name)
        assert history is not None and None in history.ranks["wait"][1]
        watcher.poll({grown.run.name}, budget=math.inf)
        history = watcher.history(grown.run.name)
        assert history is not None and None not in history.ranks["wait"][1]


def test_a_live_run_is_followed_and_its_end_is_seen(tmp_path: Path) -> None:
    grown = GrowingRun(tmp_path, "1x2", steps=100, slowest=1)
    watcher = Watcher(tmp_path)
    with grown.live():
        grown.begin()
        grown.steps(30)
        watcher.poll(budget=math.inf)
        run = watcher.runs()[0]
        assert (run.state, run.step, run.steps, run.layout) == ("running", 30, 100, "1x2")
        assert run.samples_per_second == pytest.approx(1280)
        assert run.seconds_left == pytest.approx(7.0)
        assert (run.epoch, run.epochs, len(run.losses)) == (3, 10, 3)
        grown.steps(20)
        watcher.poll({run.run}, budget=math.inf)
        assert watcher.runs()[0].step == 50
        ranks = watcher.ranks(run.run)
        assert [rank.step for rank in ranks] == [50, 50]
        assert [rank.slowest for rank in ranks] == [False, True]
        assert ranks[0].wait == pytest.approx(0.02) and ranks[1].utilization == 75
        assert ranks[0].link == 12_500_000_000 and ranks[1].link is None
        grown.end(metrics={"val_accuracy": 0.5})
    watcher.poll({run.run}, budget=math.inf)
    watcher.poll({run.run}, budget=math.inf)
    ended = watcher.runs()[0]
    assert ended.state == "finished" and ended.metrics == {"val_accuracy": 0.5}
    assert ended.rank_hours == pytest.approx(50 * 0.1 * 2 / 3600, rel=0.1)
    parts, history = watcher.parts(run.run), watcher.history(run.run)
    assert parts is not None and parts.slowest_rank == 1 and parts.slowest_part == "backward"
    assert history is not None and len(history.ranks["seconds"][0]) == 50
    assert history.ranks["wait"][1][7] == pytest.approx(0.01)
    assert history.samples_per_second[0] == pytest.approx(1280)
    json.dumps([asdict(ended), asdict(ranks[0])])


def test_nothing_is_read_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grown = GrowingRun(tmp_path, "1x2")
    read: list[int] = []
    original = EventTail.read

    def counted(self: EventTail) -> list[dict[str, object]]:
        events = original(self)
        read.append(len(events))
        return events

    monkeypatch.setattr(EventTail, "read", counted)
    watcher = Watcher(tmp_path)
    with grown.live():
        grown.begin()
        for _ in range(5):
            grown.steps(10, device=False)
            watcher.poll({grown.run.name}, budget=math.inf)
    assert sum(read) == 2 * (1 + 50)


def test_only_the_lead_is_read_of_a_run_that_nobody_has_selected(tmp_path: Path) -> None:
    grown = GrowingRun(tmp_path, "1x4")
    watcher = Watcher(tmp_path)
    with grown.live():
        grown.begin()
        grown.steps(5)
        watcher.poll(budget=math.inf)
        assert [rank.rank for rank in watcher.ranks(grown.run.name)] == [0]


def test_a_later_attempt_takes_over_and_hours_add_up(tmp_path: Path) -> None:
    grown = GrowingRun(tmp_path, "1x2", steps=100)
    watcher = Watcher(tmp_path)
    grown.begin()
    grown.steps(60)
    grown.end("stopped")
    watcher.poll(budget=math.inf)
    first = watcher.runs()[0]
    assert (first.state, first.step) == ("stopped", 60)
    grown.begin(attempt=1, step=40)
    grown.steps(10)
    grown.end("stopped")
    watcher.poll({grown.run.name}, budget=math.inf)
    second = watcher.runs()[0]
    assert (second.step, second.attempt, second.attempts) == (50, 1, 2)
    assert second.loss_steps == (10, 20, 30, 40, 50)
    assert second.rank_hours == pytest.approx(70 * 0.1 * 2 / 3600, rel=0.1)


def test_efficiency_is_against_one_rank_of_the_same_job_and_device(tmp_path: Path) -> None:
    for number, (layout, seconds, gpu) in enumerate(
        [("1x1", 0.4, True), ("1x1", 0.1, False), ("1x4", 0.125, True)]
    ):
        grown = GrowingRun(tmp_path, layout, number=number, step_seconds=seconds, gpu=gpu)
        grown.begin()
        grown.steps(50)
        grown.end()
    watcher = Watcher(tmp_path)
    watcher.poll(budget=math.inf)
    runs = {run.layout: run for run in watcher.runs() if run.device != "CPU"}
    assert runs["1x4"].efficiency == pytest.approx(0.8)
    assert runs["1x4"].baseline == runs["1x1"].run
    assert runs["1x1"].efficiency == 1.0 and not runs["1x1"].is_compared
    # Also where only one of them was asked for.
    alone = Watcher(tmp_path, [RunDir(Path(runs["1x4"].run_dir))])
    alone.poll(budget=math.inf)
    assert [run.efficiency for run in alone.runs()] == [pytest.approx(0.8)]


def test_old_runs_are_left_out_unless_they_are_asked_for(tmp_path: Path) -> None:
    for number in range(15):
        grown = GrowingRun(tmp_path, "1x1", number=number, gpu=False)
        grown.begin()
        grown.end()
    later = time.time() + 3 * 24 * 3600
    watcher = Watcher(tmp_path, now=lambda: later)
    watcher.poll(budget=math.inf)
    assert (len(watcher.runs()), watcher.num_old()) == (10, 5)
    everything = Watcher(tmp_path, old=True, now=lambda: later)
    everything.poll(budget=math.inf)
    assert (len(everything.runs()), everything.num_old()) == (15, 0)


@pytest.mark.parametrize(
    ("passed", "limit", "is_stalled"),
    [(100, None, False), (200, None, True), (20, 10.0, True), (5, 10.0, False)],
)
def test_a_run_without_steps_for_longer_than_expected_is_stalled(
    tmp_path: Path, passed: float, limit: float | None, is_stalled: bool
) -> None:
    grown = GrowingRun(tmp_path, "1x1", begin=1000.0)
    watcher = Watcher(tmp_path, stalled=limit, now=lambda: grown.now + passed)
    with grown.live():
        grown.begin()
        grown.steps(20)
        watcher.poll(budget=math.inf)
        run = watcher.runs()[0]
    assert run.stalled is is_stalled and (run.seconds_left is None) is is_stalled
    assert (run.reason is not None and run.reason.startswith("stalled: no step")) is is_stalled


def test_long_pauses_between_steps_make_a_run_patient(tmp_path: Path) -> None:
    grown = GrowingRun(tmp_path, "1x1", begin=1000.0)
    watcher = Watcher(tmp_path, now=lambda: grown.now + 300)
    with grown.live():
        grown.begin()
        grown.steps(3)
        grown.now += 60  # a validation
        grown.steps(3)
        watcher.poll(budget=math.inf)
    assert not watcher.runs()[0].stalled


def test_a_folder_that_no_run_has_written_is_told_in_words(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "odd-20261115-120000-0000")
    run.attempt(0).mkdir(parents=True)
    run.events(0, 0).write_text('{"event":"end"}\n{"event":"step","step":"x"}\n[1]\nnull\n')
    watcher = Watcher(tmp_path)
    watcher.poll(budget=math.inf)
    assert watcher.runs()[0].state == "failed" and watcher.runs()[0].reason


def test_a_selected_run_is_judged_beside_the_reading_and_seldom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def judge(run: RunDir, measured: object = None) -> Judgement:
        asked.append(run.name)
        return Judgement(verdict=Verdict(limit="data", why=f"answer {len(asked)}"))

    monkeypatch.setattr("allranks.watch.live.judge", judge)
    growing, other = GrowingRun(tmp_path), GrowingRun(tmp_path, number=1)
    watcher, name = Watcher(tmp_path, old=True), growing.run.name

    def look_until(why: str) -> None:
        deadline = time.monotonic() + 60
        while f"limited by data: {why} (not sure)" not in shown() and time.monotonic() < deadline:
            watcher.poll({name})
        assert shown() == [f"limited by data: {why} (not sure)"]

    def shown() -> list[str]:
        views = [view for view in watcher.runs() if view.run == name]
        return [line.sentence for view in views for line in view.verdict_lines]

    with growing.live(), other.live():
        for one in (growing, other):
            one.begin()
            one.steps(30)
        look_until("answer 1")
        growing.steps(30)
        for _ in range(10):
            watcher.poll({name})
        assert asked == [name]
        growing.end()
    watcher.hurry(name)
    look_until("answer 2")
    watcher.close()


def slurm_run(tmp_path: Path) -> GrowingRun:
    return GrowingRun(tmp_path, "2x4", info={"backend": "slurm", "jobs": ["7"], "queued": True})


def test_a_run_that_waits_says_why_and_until_when(tmp_path: Path) -> None:
    slurm_run(tmp_path)
    job = QueuedJob("7", "PENDING", "Priority", "2026-11-15T16:40:00", (), why="others first")
    watcher = Watcher(tmp_path, ask=lambda runs: Queue(jobs={"7": job}))
    watcher.poll(budget=math.inf)
    run = watcher.runs()[0]
    assert (run.state, run.expected_start, run.jobs) == ("queued", "2026-11-15T16:40:00", ("7",))
    assert run.reason == "others first"
    watcher.close()


def test_slurm_is_asked_for_all_runs_at_once_and_seldom(tmp_path: Path) -> None:
    slurm_run(tmp_path)
    GrowingRun(tmp_path, number=1, info={"backend": "slurm", "jobs": ["8"], "queued": True})
    GrowingRun(tmp_path, number=2).begin()
    asked: list[int] = []

    def ask(runs: Sequence[RunDir]) -> Queue:
        asked.append(len(runs))
        waits = {job: QueuedJob(job, "PENDING", "", None, ()) for job in "78"}
        return Queue(jobs=waits)

    watcher = Watcher(tmp_path, ask=ask)
    for _ in range(50):
        watcher.poll(budget=math.inf)
    watcher.close()
    assert asked == [2]


def test_a_silent_slurm_is_asked_less_and_less_often() -> None:
    now = 0.0
    asked: list[float] = []

    def ask(runs: Sequence[RunDir]) -> Queue:
        asked.append(now)
        return Queue(silent="no answer")

    asking = Asking(ask, clock=lambda: now)
    for second in range(600):
        now = float(second)
        asking.ask([RunDir(Path("x"))], wait=5.0)
    asking.close()
    pauses = [after - before for before, after in pairwise(asked)]
    assert pauses == [2 * ASK_SECONDS, 4 * ASK_SECONDS, 8 * ASK_SECONDS, *[MAX_SECONDS] * 3]


def test_nobody_waits_for_a_slow_slurm(tmp_path: Path) -> None:
    slurm_run(tmp_path)
    release = threading.Event()

    def ask(runs: Sequence[RunDir]) -> Queue:
        release.wait(100)
        return Queue()

    watcher = Watcher(tmp_path, ask=ask)
    watcher._is_first = False  # the first screen waits for a moment
    begin = time.monotonic()
    watcher.poll(budget=math.inf)
    assert time.monotonic() - begin < 30.0
    assert watcher.runs()[0].state == "queued" and watcher.silence is not None
    release.set()
    watcher.close()


def test_a_first_screen_that_waited_for_slurm_shows_the_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm_run(tmp_path)
    now = [0.0]

    def ask(runs: Sequence[RunDir]) -> Queue:
        now[0] += 2.5
        return Queue()

    clock = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr("allranks.watch.live.time", clock)
    watcher = Watcher(tmp_path, ask=ask)
    watcher.poll()
    assert len(watcher.runs()) == 1
    watcher.close()


def test_runs_that_come_and_go_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("allranks.watch.live.FIND_SECONDS", 0.0)
    watcher = Watcher(tmp_path / "runs")
    watcher.poll(budget=math.inf)
    assert watcher.runs() == []
    first = GrowingRun(tmp_path / "runs", "1x1")
    first.begin()
    watcher.poll(budget=math.inf)
    assert [run.run for run in watcher.runs()] == [first.run.name]
    first.run.path.rename(tmp_path / first.run.name)
    watcher.poll(budget=math.inf)
    assert watcher.runs() == []


def test_a_first_look_at_many_runs_keeps_to_its_budget(tmp_path: Path) -> None:
    for number in range(5):
        GrowingRun(tmp_path, number=number).begin()
    watcher = Watcher(tmp_path)
    watcher.poll(budget=-1.0)
    assert watcher.runs() == []
    watcher.poll({f"digits-20261115-120003-{3:04x}"}, budget=-1.0)
    assert len(watcher.runs()) == 1
    watcher.poll(budget=math.inf)
    assert len(watcher.runs()) == 5
