"""Situations in which numbers mislead: every screen says the same, and concludes as little.

A screen is a function from runs to what it shows of them, in `SCREENS`. A situation is a row of
`SITUATIONS`: runs, the last of which is the odd one, and what has to be said.
"""

from __future__ import annotations

import io
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.report_runs import make_run
from tests.verdict_runs import HEALTHY, Phases, cpu_trace, gpu_trace, planted
from tests.watch_runs import GrowingRun

from allranks.bench.measure import Ended
from allranks.bench.scaling import as_json, repeat_of, show
from allranks.doctor.diagnose import diagnosis, doubts, without_findings
from allranks.doctor.show import show_findings
from allranks.launch.screen import Screen
from allranks.report.build import build
from allranks.report.facts import read_run
from allranks.report.tables import show_report
from allranks.run.events import append_event
from allranks.run.folder import RunDir
from allranks.timing.limits.facts import Thresholds
from allranks.timing.remarks import remarks
from allranks.timing.result import result
from allranks.watch import page_data
from allranks.watch.draw import Scene, about_run
from allranks.watch.live import Watcher
from allranks.watch.status import gather, status_page

Event = dict[str, Any]


# --- Situations ----------------------------------------------------------------------------------


def runs_of(folder: Path, *, odd: dict[str, Any], base: float = 0.4, repeats: int = 1) -> None:
    """A run with one rank and one with two, of which the second is odd."""
    number = len([*folder.iterdir()])
    for _ in range(repeats):
        make_run(folder, "1x1", step_seconds=base, number=number, gpu=None, comm=0.0)
        number += 1
    make_run(
        folder, "1x2", **{"step_seconds": 0.22, "comm": 0.01, "gpu": None} | odd, number=number
    )


def edited(kind: str, change: Callable[[int, Event], Event]) -> dict[str, Any]:
    """A run in whose events of one kind some fields are different."""

    def edit(rank: int, event: Event) -> Event:
        return {**event, **change(rank, event)} if event["event"] == kind else event

    return {"edit": edit}


def alone(folder: Path) -> None:
    runs_of(folder, odd=edited("step", lambda _, e: {"wait": 0.0, "other": e["other"] + e["wait"]}))


def noisy(folder: Path) -> None:
    for number, seconds in enumerate((0.4, 0.404, 0.396)):
        make_run(folder, "1x1", step_seconds=seconds, number=number, gpu=None)
    for number, seconds in enumerate((0.22, 0.1, 0.5), start=3):
        make_run(folder, "1x2", step_seconds=seconds, number=number, gpu=None, comm=0.01)


def too_short(folder: Path) -> None:
    runs_of(folder, odd={"steps": 6})


def one_step(folder: Path) -> None:
    runs_of(folder, odd={"steps": 1})


def idle(folder: Path) -> None:
    def edit(rank: int, event: Event) -> Event:
        if event["event"] == "start":
            return {**event, "global_batch": 1, "rank_batch": [1, 0]}
        return {**event, "samples": 1 - rank} if event["event"] == "step" else event

    runs_of(folder, odd={"edit": edit})


def uneven_samples(folder: Path) -> None:
    runs_of(folder, odd=edited("step", lambda rank, _: {"samples": (192, 64)[rank]}))


def slow_loader(folder: Path) -> None:
    """Rank 1 waits 80 ms for its data, rank 0 half a millisecond."""

    def change(rank: int, event: Event) -> Event:
        data, wait = ((0.0005, 0.0895), (0.08, 0.01))[rank]
        return {"data": data, "wait": wait, "other": 0.0, "forward": event["seconds"] - 0.11}

    runs_of(
        folder,
        odd=edited("step", lambda r, e: {"backward": 0.02, "optimizer": 0.0, **change(r, e)}),
    )


def contended(folder: Path) -> None:
    def edit(rank: int, event: Event) -> Event:
        more: dict[str, Event] = {"start": {"threads": 2}, "device": {"cpu": 0.51}}
        return {**event, **more.get(event["event"], {})}

    make_run(folder, "1x1", step_seconds=0.4, gpu=None, edit=edit)
    faster = edited("start", lambda *_: {"threads": 1})
    make_run(
        folder, "1x2", step_seconds=0.4 / 6.834, number=1, steps=300, gpu=None, comm=0.002, **faster
    )


def compiling(folder: Path) -> None:
    def change(_: int, event: Event) -> Event:
        more = 6.0 if event["step"] <= 3 else 0.0
        return {"seconds": event["seconds"] + more, "forward": event["forward"] + more}

    runs_of(folder, odd=edited("step", change))


def ended_early(folder: Path) -> None:
    more = edited("start", lambda *_: {"steps": 1000})
    runs_of(folder, odd={"state": "stopped", "job": {"steps": 1000}, **more})


def resumed(folder: Path) -> None:
    command = {"task": None, "command": "python train.py", "steps": None}
    make_run(folder, "1x1", step_seconds=0.4, gpu=None, job=command)
    run = make_run(folder, "1x2", step_seconds=0.22, number=1, gpu=None, comm=0.01, job=command)
    shutil.copytree(run.attempt(0), run.attempt(1))
    attempts = [{"attempt": number, "layout": "1x2"} for number in (0, 1)]
    run.update_info(lambda info: info.update(attempts=attempts))


def unknown(folder: Path) -> None:
    command = {"task": None, "command": "python train.py", "steps": None}
    make_run(folder, "1x1", step_seconds=0.4, gpu=None, job=command)
    run = make_run(folder, "1x2", step_seconds=0.22, number=1, gpu=None, comm=0.01, job=command)
    count_as("unknown", run)


def count_as(samples: str, run: RunDir) -> None:
    for rank in run.ranks(0):
        why = "its batches are lists of lists"
        append_event(run.events(0, rank), "counted", samples=samples, epochs="measured", why=why)


@dataclass(frozen=True)
class Situation:
    """Runs, what every screen says of them, and whether a speedup follows from them."""

    make: Callable[[Path], None]
    says: tuple[str, ...]
    has_speedup: bool
    of_one_run: bool = True  # else of a comparison, which a screen of one run cannot know


SITUATIONS = {
    "copies that train alone": Situation(
        alone, ("no communication between its ranks was seen",), False
    ),
    "noisy repeats": Situation(
        noisy, ("1x2: its 3 repeats vary too much to compare it: 1,1",), False, of_one_run=False
    ),
    "too short": Situation(too_short, ("too short to judge: measured for only ",), False),
    "one step": Situation(
        one_step, ("too short to judge: too few steps were made (it takes two",), False
    ),
    "idle rank": Situation(
        idle, ("rank 1 gets no samples, as a batch has only 1 sample for 2 ranks",), True
    ),
    "uneven samples": Situation(
        uneven_samples, ("rank 0 trains on 192.0 samples a step, rank 1 on 64.0",), True
    ),
    "slow loader": Situation(slow_loader, ("ank 1 waits for its loader",), True),
    "contended baseline": Situation(
        contended,
        (
            " efficient against 1x1, too good to be true: 1x1 was slowed down",
            "2 threads and 0.51 CPUs in use on 1x1, 1 thread and 0.92 CPUs in use on 1x2",
        ),
        False,
        of_one_run=False,
    ),
    "compile time": Situation(
        compiling,
        ("1,164 samples/s after warm-up, ", " over the whole run: 3 slow steps, "),
        True,
    ),
    "early end": Situation(ended_early, ("it was stopped after 60 of 1,000 steps",), True),
    "resumed script": Situation(resumed, ("its 2 attempts made 120 steps, the last one 60",), True),
    "unknown samples": Situation(
        unknown, ("samples/s is unknown: its batches are lists of lists",), False
    ),
}


# --- Screens -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shown:
    text: str
    speedups: Sequence[float | None] = ()  # of 1x2
    conclusions: Sequence[object] = ()  # verdicts, choices, laws and predictions, if any is drawn


def on_console(show: Callable[[Console], None]) -> str:
    console = Console(width=4000, file=io.StringIO(), color_system=None)
    show(console)
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]  # a StringIO


def bench_scaling(runs: Sequence[RunDir]) -> Shown:
    found = as_json([repeat_of(Ended(run.info()["layout"], run)) for run in runs])
    rows = [row for row in found["rows"] if row["layout"] == "1x2"]
    text = on_console(lambda console: show(console, found)) + found["verdict"]
    is_drawn = "as fast as" in found["verdict"] or "it scales" in found["verdict"]
    return Shown(text, [row["speedup"] for row in rows], [found["fit"], is_drawn or None])


def report(runs: Sequence[RunDir]) -> Shown:
    found = build([read_run(run) for run in runs], created=0.0)
    (section,) = found["sections"]
    rows = [row for row in section["rows"] if row["layout"] == "1x2"]
    verdicts = {"good", "below target", "diminishing returns"}
    drawn = [word for row in rows for word in verdicts if word in row["verdict"]]
    text = on_console(lambda console: show_report(console, found))
    choices = [choice for choice in section["recommended"].values() if choice]
    return Shown(text, [row["speedup"] for row in rows], [*choices, *drawn])


def run(runs: Sequence[RunDir]) -> Shown:
    return Shown(on_console(lambda console: Screen(console).summary(result(runs[-1]))))


def doctor(runs: Sequence[RunDir]) -> Shown:
    folder, name = runs[-1].path.parent, runs[-1].name
    found = diagnosis(folder, [name], Thresholds())
    notes, without = doubts(folder, [name], found), without_findings(folder, [name])
    return Shown(on_console(lambda console: show_findings(console, found, without, notes)))


def watched(runs: Sequence[RunDir], show: Callable[[Any], str]) -> Shown:
    """By the watcher, of all runs; `show`: from the status of one to its text."""
    watcher = Watcher(runs[-1].path.parent, old=True)
    found = {one.view.run: one for one in gather(watcher)}
    watcher.close()
    odd = [found[one.name] for one in runs if one.info()["layout"] == "1x2"]
    return Shown("\n".join(map(show, odd)), [one.view.speedup for one in odd])


def status(runs: Sequence[RunDir]) -> Shown:
    machine: dict[str, Any] = {"slurm": None, "machine": {}, "notes": []}
    return watched(runs, lambda one: status_page([one], machine, {}, time.time()))


def watch(runs: Sequence[RunDir]) -> Shown:
    def lines(one: Any) -> str:
        return "\n".join(line.plain for line in about_run(one.view, Scene(runs=[one.view]), 4000))

    return watched(runs, lines)


def page(runs: Sequence[RunDir]) -> Shown:
    def words(one: Any) -> str:
        head = page_data.head(one.view, None, time.time())
        verdict = (" ".join(line) for line in head["verdict"])
        return "\n".join([*head["warnings"], str(head["tiles"]), *verdict])

    return watched(runs, words)


def verdicts(runs: Sequence[RunDir]) -> dict[str, Any]:
    """The verdict of the last run, as each command that has one prints it with --json."""
    last = runs[-1]
    watcher = Watcher(last.path.parent, [last])
    (watched,) = [one.view.as_json() for one in gather(watcher)]
    watcher.close()
    (section,) = build([read_run(last)], created=0.0)["sections"]
    return {
        "run": result(last)["verdict"],
        "watch": watched["verdict"],
        "report": section["runs"][0]["verdict"],
    }


SCREENS = (bench_scaling, report, run, doctor, status, watch, page)
OF_ONE_RUN = (run, doctor)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[RunDir]]:
    """The runs of every situation, made once."""
    found = {}
    for name, situation in SITUATIONS.items():
        folder = tmp_path_factory.mktemp(name.replace(" ", "-"))
        situation.make(folder)
        found[name] = [RunDir(path) for path in sorted(folder.iterdir())]
    return found


@pytest.mark.parametrize("screen", SCREENS, ids=lambda screen: screen.__name__)
@pytest.mark.parametrize("name", SITUATIONS)
def test_every_screen_says_the_same_and_concludes_no_more(
    made: dict[str, list[RunDir]], name: str, screen: Callable[[Sequence[RunDir]], Shown]
) -> None:
    situation = SITUATIONS[name]
    if screen in OF_ONE_RUN and not situation.of_one_run:
        return
    shown = screen(made[name])
    for words in situation.says:
        assert words in shown.text, shown.text
    assert all((speedup is not None) == situation.has_speedup for speedup in shown.speedups)
    if not situation.has_speedup:
        assert not any(shown.conclusions), shown.conclusions
        assert "nothing wrong" not in shown.text


@pytest.mark.parametrize("name", SITUATIONS)
def test_every_command_names_the_same_limit(made: dict[str, list[RunDir]], name: str) -> None:
    found = verdicts(made[name])
    assert found["run"] == found["watch"] == found["report"]


LIMITS: dict[str, tuple[Event, Sequence[Phases], float]] = {  # traces, phases, milliseconds
    "compute": (cpu_trace(), [HEALTHY], 1.0),
    "launches": (gpu_trace(20.0, launches=75.0), [HEALTHY], 1.0),
    "host": (cpu_trace(host=30.0, lines=[["train.py:52", 0.03]]), [HEALTHY], 1.0),
    "copies": (gpu_trace(30.0, copies=68.0, copied=4e8, pageable=4e8), [HEALTHY], 1.0),
    "data": (cpu_trace(), [HEALTHY, {**HEALTHY, "data": 300.0}], 1.0),
    "communication": (cpu_trace(), [HEALTHY], 60.0),
    "straggler": (cpu_trace(), [HEALTHY, {**HEALTHY, "forward": 130.0}], 1.0),
    "pauses": (cpu_trace(), [HEALTHY], 1.0),
}


@pytest.mark.parametrize("limit", LIMITS)
def test_every_screen_names_the_limit_and_why(tmp_path: Path, limit: str) -> None:
    trace, phases, comm = LIMITS[limit]

    def each(rank: int, number: int, step: Event) -> Event:
        is_pause = limit == "pauses" and number % 10 == 0
        return {**step, "evaluation": 0.5} if is_pause else step

    traces = dict.fromkeys(range(2), trace)
    runs = [planted(tmp_path, phases[0], phases[-1], comm=comm, traces=traces, each=each)]
    first, *others = verdicts(runs).values()
    assert first["limit"] == limit and all(other == first for other in others)
    for screen in SCREENS:
        text = " ".join(screen(runs).text.split()).replace("\\", "")
        if screen is doctor:  # whose findings are of what is wrong
            said = f"{first['why'][0].upper()}{first['why'][1:]}"
            assert (said in text) == (limit != "compute"), text
        else:
            assert f"limited by {limit}: {first['why']}" in text, text


@pytest.mark.parametrize(
    "name",
    ["copies that train alone", "idle rank", "early end", "resumed script", "unknown samples"],
)
def test_too_many_events_to_read_hide_nothing_and_are_not_called_short(
    made: dict[str, list[RunDir]], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit, value in {
        "allranks.timing.remarks.MOST_BYTES": 0,
        "allranks.timing.remarks.EARLY_EVENTS": 6,
        "allranks.watch.followed.LIVE_BYTES": 0,
        "allranks.watch.followed.REMARKED_EVENTS": 6,
    }.items():
        monkeypatch.setattr(limit, value)
    odd = made[name][-1]
    watcher = Watcher(odd.path.parent, old=True)
    watcher.poll(budget=60.0)
    view = next(one for one in watcher.runs() if one.run == odd.name)
    watcher.close()
    for said in (remarks(odd), view.remarks):
        text = "\n".join(one.text for one in said)
        assert all(words in text for words in SITUATIONS[name].says), text
        assert "too short" not in text
    assert (view.samples_per_second is None) == (name == "unknown samples")


@pytest.mark.parametrize("samples", ["about", "unknown"])
def test_what_samples_cost_is_as_sure_as_their_count(tmp_path: Path, samples: str) -> None:
    command = {"task": None, "command": "python train.py", "steps": None}
    count_as(samples, made := make_run(tmp_path, "1x1", step_seconds=0.4, job=command))
    found = build([read_run(made)], created=0.0)
    ((row,), text) = found["sections"][0]["rows"], on_console(lambda c: show_report(c, found))
    assert (row["seconds_kind"], row["usd"] is not None) == ("measured", True)
    assert (row["usd_per_million_samples"] is None) == (samples == "unknown")
    assert ("about 15,360 samples to train" in text) == (samples == "about")
    assert ("15,360" in text, "per M samples" in text) == (samples == "about",) * 2


def test_attempts_without_a_step_are_not_counted(tmp_path: Path) -> None:
    command = {"task": None, "command": "python train.py", "steps": None}
    made = make_run(tmp_path, "1x1", step_seconds=0.4, job=command, steps=1, state="failed")
    lines = made.events(0, 0).read_text().splitlines(keepends=True)
    made.events(0, 0).write_text("".join(line for line in lines if '"step"' not in line))
    shutil.copytree(made.attempt(0), made.attempt(1))
    assert "resumed-script" not in [one.kind for one in remarks(made)]
    made.events(0, 0).write_text("".join(lines))  # the first one trained
    made.events(1, 0).unlink()
    assert result(made)["samples"] == 256


@pytest.mark.parametrize(
    ("slow", "steps", "forbids"),
    [
        ((1,), 60, ()),  # before the steps that count
        ((1, 2, 3, 9), 16, ("speedup",)),  # one among them: the pace that counts is not the steady
        (tuple(range(4, 60, 4)), 60, None),  # until the end, as where a loader falls behind
    ],
)
def test_slow_steps_are_a_warm_up_only_at_the_beginning(
    tmp_path: Path, slow: Sequence[int], steps: int, forbids: tuple[str, ...] | None
) -> None:
    def change(_: int, event: Event) -> Event:
        more = 6.0 if event["step"] in slow else 0.0
        return {"seconds": event["seconds"] + more, "forward": event["forward"] + more}

    made = make_run(tmp_path, "1x1", step_seconds=0.5, steps=steps, **edited("step", change))
    said = [one for one in remarks(made) if one.kind == "warm-up"]
    assert [one.forbids for one in said] == ([] if forbids is None else [forbids])
    assert all("51" in one.text.partition(" samples/s after warm-up, ")[0] for one in said)


class Alone(GrowingRun):
    """A run whose ranks never wait for each other."""

    def _step(self, rank: int) -> Event:
        found = super()._step(rank)
        return {**found, "other": found["other"] + found["wait"], "wait": 0.0}


@pytest.mark.parametrize("kind", [GrowingRun, Alone])
def test_a_running_run_is_compared_only_if_it_can_be(
    tmp_path: Path, kind: type[GrowingRun]
) -> None:
    base = GrowingRun(tmp_path, "1x1", step_seconds=0.18, begin=time.time() - 100)
    base.begin()
    base.steps(100)
    base.end()
    running = kind(tmp_path, "1x2", number=1, begin=time.time() - 10)
    with running.live():
        running.begin(step=500)  # resumed: its first look comes after one step of its own
        running.steps(1)
        watcher = Watcher(tmp_path, old=True)
        watcher.poll(budget=float("inf"))
        running.steps(59)
        watcher.hurry(running.run.name)
        watcher.poll(budget=float("inf"))
        view = next(one for one in watcher.runs() if one.run == running.run.name)
        watcher.close()
    warnings = page_data.head(view, None, time.time())["warnings"]
    assert (view.efficiency is None) == (kind is Alone)
    assert any("no communication between its ranks was seen" in one for one in warnings) == (
        kind is Alone
    )
