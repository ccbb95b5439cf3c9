"""The profiler of a rank: when it starts and stops, and what happens when it cannot."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from allranks.bench.profile import LOUDNESS, VARIABLE, show_profile
from allranks.probe import profile
from allranks.probe.graphs import Graphs
from allranks.probe.profile import FIRST_STEP, Profile, profile_if_asked
from allranks.probe.profilers import UNLOADS, Profilers, export
from allranks.probe.tracing import Session
from allranks.run.events import append_event
from allranks.run.folder import RunDir
from allranks.timing.timeline import Timeline
from allranks.timing.trace import read_trace

INJECT = Path(profile.__file__).with_name("inject")


class Recorder:
    """What a Profile uses of the probe's."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rank = 0
        self.step = 0
        self.is_on = True
        self.device: Any = None
        self.timeline = Timeline()
        self.guarded = nullcontext()
        self.at_step: list[Any] = []
        self.at_fork: list[Any] = []
        self.at_capture: list[Any] = []
        self.after_capture: list[Any] = []
        self.events: list[dict[str, Any]] = []

    def write(self, event: str, **fields: Any) -> None:
        self.events.append({"event": event, **fields})

    def flush(self) -> None:
        pass

    def make_steps(self, count: int) -> None:
        for _ in range(count):
            self.step += 1
            torch.ones(4, 4) @ torch.ones(4, 4)
            for call in list(self.at_step):
                call(self.step)


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    return Recorder(tmp_path)


def new_profile(recorder: Any, steps: int) -> Profile:
    return Profile(recorder, Profilers(recorder), steps)


def is_unloaded(recorder: Any, profilers: Profilers, *, is_last: bool) -> bool:
    """Whether torch would unload what traces a GPU: it asks the environment as a trace ends."""
    session = Session(recorder, profilers, Graphs(profilers), is_last=is_last)
    session.start(1, lambda why: None, at_once=True)
    running, asked = profilers._running, []

    class Watched:
        use_device = None

        def __exit__(self, *args: Any) -> None:
            asked.append(os.environ.get(UNLOADS))
            running.__exit__(*args)

    profilers._running = Watched()
    recorder.device = "cuda"  # only from here on: there is none
    session.end()
    recorder.device = None
    session.close()
    assert UNLOADS not in os.environ  # the script's own profilers must not unload it
    return asked == ["1"]


def test_a_gpus_library_is_unloaded_after_the_last_trace_only(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(UNLOADS, "")
    monkeypatch.delenv(UNLOADS)
    monkeypatch.setattr(Profilers, "settle", lambda self: None)  # it calls the GPU's library
    any_recorder: Any = recorder
    profilers = Profilers(any_recorder)
    assert not is_unloaded(recorder, profilers, is_last=False)
    assert is_unloaded(recorder, profilers, is_last=True)
    profilers._graph_begins()
    monkeypatch.setattr("torch.version.cuda", "12.4")
    assert is_unloaded(recorder, profilers, is_last=True)
    monkeypatch.setattr("torch.version.cuda", "11.8")  # it would crash
    assert not is_unloaded(recorder, profilers, is_last=True)


def test_a_trace_ends_when_a_graph_is_captured_and_another_may_follow(recorder: Recorder) -> None:
    any_recorder: Any = recorder
    profilers = Profilers(any_recorder)
    session = Session(any_recorder, profilers, Graphs(profilers))
    session.start(1, lambda why: None, at_once=True)
    profilers._graph_begins()
    assert session.made is not None and session.is_before_graph and not profilers.is_running
    session.close()
    assert profilers.why_not() is None


def test_a_trace_may_end_by_a_signal_while_a_function_begins(recorder: Recorder) -> None:
    any_recorder: Any = recorder
    profilers, enter = Profilers(any_recorder), torch.ops.profiler._record_function_enter_new

    def interrupted(*args: Any) -> Any:
        profilers.stop()
        return enter(*args)

    profilers.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.ops.profiler, "_record_function_enter_new", interrupted)
        function = torch.profiler.record_function("the script's own")
        with function:
            assert function.record is not None and not profilers.is_running


def test_torchs_own_messages_are_as_without_our_profilers() -> None:
    """In a new process: torch sets their level when its profiler first starts."""
    begin = "from allranks.probe.profilers import *; from types import SimpleNamespace as Any\n"
    recorder = "Any(at_fork=[], at_capture=[], device=None, guarded=nullcontext())"
    ours = f"p = Profilers({recorder}); p.start(); p.stop()\n"
    own = "with torch.autograd.profiler.profile(use_kineto=True): pass\nprint(log_level().value)"
    levels = []
    for code in (begin, begin + ours):
        command = [sys.executable, "-c", f"import torch\n{code}{own}"]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        levels.append(done.stdout.split())
    assert levels[0] == levels[1]


def test_a_fork_within_a_trace_records_nothing(recorder: Recorder, tmp_path: Path) -> None:
    any_recorder: Any = recorder
    profilers = Profilers(any_recorder)
    profilers.start()
    running = profilers._running
    try:
        torch.ones(3).mul(2)
        for call in recorder.at_fork:
            call()
        torch.ones(3).sub(2)
    finally:
        torch.autograd._enable_record_function(True)
        assert profilers.stop() is None
        running.__exit__(None, None, None)
        profilers._end_functions()
    export(running, tmp_path / "trace.json")
    text = (tmp_path / "trace.json").read_text()
    assert "aten::mul" in text and "aten::sub" not in text


def test_so_many_steps_are_traced_once(recorder: Recorder) -> None:
    made = new_profile(recorder, 3)
    recorder.make_steps(FIRST_STEP + 10)
    assert recorder.at_step == []
    first = FIRST_STEP + 1
    event, reduced = recorder.events
    assert reduced["event"] == "trace" and reduced["device"] == "cpu" and reduced["busy"] > 0
    assert (reduced["first"], reduced["last"]) == (event["first"], event["last"])
    assert (event["event"], event["first"], event["last"]) == ("profile", first, first + 2)
    assert event["trace"] == "rank-0.trace.json.gz" and not event["with_device"]
    trace = read_trace(made.path, 0)
    assert trace is not None and trace.num_steps == 3
    assert [number for number, _ in trace.marks] == [first - 1, first, first + 1, first + 2]
    assert sum(span.name == "aten::mm" for span in trace.host) >= 3
    assert sorted(os.listdir(made.path.parent)) == ["rank-0.trace.json.gz"]
    made.finish()
    assert len(recorder.events) == 2


def test_a_script_that_ends_early_keeps_what_there_is(recorder: Recorder) -> None:
    made = new_profile(recorder, 50)
    recorder.make_steps(FIRST_STEP + 4)
    made.finish()
    trace = read_trace(made.path, 0)
    assert trace is not None and trace.num_steps == 4


@pytest.mark.parametrize("steps", [5, 8, FIRST_STEP])  # the last two with a profiler running
def test_too_few_steps_are_said(
    recorder: Recorder, capfd: pytest.CaptureFixture[str], steps: int
) -> None:
    made = new_profile(recorder, 5)
    recorder.make_steps(steps)
    made.finish()
    assert not made.path.exists()
    words = f"the script made {steps} steps, a profile needs {FIRST_STEP + 1}"
    assert capfd.readouterr().err.count(f"allranks: {words}\n") == 1
    assert recorder.events == [{"event": "profile", "problem": words}]


def test_a_trace_that_would_be_too_large_gets_fewer_steps(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(profile, "MAX_TRACE_BYTES", 10)
    made = new_profile(recorder, 1000)
    recorder.make_steps(FIRST_STEP + 3)
    trace = read_trace(made.path, 0)
    assert trace is not None and trace.num_steps == 1
    assert "1000 steps would make" in capfd.readouterr().err


def test_a_profiler_that_fails_leaves_the_script_alone(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("another profiler is running\nand more")

    monkeypatch.setattr(Profilers, "start", broken)
    made = new_profile(recorder, 5)
    recorder.make_steps(FIRST_STEP + 10)
    made.finish()
    said = capfd.readouterr().err
    assert said == "allranks: the profile is off: RuntimeError: another profiler is running\n"
    assert recorder.at_step == []
    assert "problem" in recorder.events[0]


@pytest.mark.parametrize("value", [None, "", "0", "many"])
def test_nothing_happens_unasked(recorder: Any, value: str | None) -> None:
    profilers = Profilers(recorder)
    profile_if_asked(recorder, profilers, {} if value is None else {profile.VARIABLE: value})
    assert recorder.at_step == []


def test_the_environment_asks(recorder: Any) -> None:
    profile_if_asked(recorder, Profilers(recorder), {profile.VARIABLE: "20"})
    assert len(recorder.at_step) == 1


@pytest.mark.parametrize(
    ("asked", "level"),
    [
        ({}, "None"),
        ({VARIABLE: "3"}, "6"),
        ({VARIABLE: "3", LOUDNESS: "0"}, "0"),
    ],
)
def test_the_profilers_own_remarks_are_for_those_who_ask(asked: dict[str, str], level: str) -> None:
    code = f"import os; print(os.environ.get({LOUDNESS!r}))"
    env = {"PYTHONPATH": str(INJECT), **asked}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == (level, "")


@pytest.mark.parametrize("with_device", [True, False])
def test_a_gpu_that_was_not_recorded_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_device: bool
) -> None:
    run = RunDir(tmp_path)
    append_event(run.events(0, 0), "profile", first=1, last=2, with_device=with_device)
    monkeypatch.setattr("allranks.bench.profile.summarise", lambda run: {"device": "cpu"})
    for name in ("markdown", "show"):
        monkeypatch.setattr(f"allranks.bench.profile.{name}", lambda *args: "")
    console = Console(file=io.StringIO())
    show_profile(run, console)
    said = console.file.getvalue()  # type: ignore[attr-defined]  # a StringIO
    assert ("nothing was recorded on the GPU" in said) == with_device
