"""Events: written in order by a thread, read back whatever happened to the writer."""

from __future__ import annotations

import ast
import json
import math
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import allranks
from allranks.errors import AllranksError
from allranks.run import tracebacks
from allranks.run.event_schema import declared, undeclared
from allranks.run.events import (
    EventLog,
    append_event,
    format_event,
    read_events,
    read_last_events,
)


class Later:
    """A loss that arrives when told to."""

    def __init__(self) -> None:
        self.result: float | None = None
        self.arrived = threading.Event()

    def arrive(self, result: float) -> None:
        self.result = result
        self.arrived.set()

    def ready(self) -> bool:
        return self.arrived.is_set()

    def value(self) -> float | None:
        return self.result


def strict_json(line: str) -> Any:
    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    return json.loads(line, parse_constant=refuse)


def steps(path: Path) -> list[int]:
    return [event["step"] for event in read_events(path)]


# --- Writing ------------------------------------------------------------------------------------


def test_every_event_is_there_after_close_with_version_and_time(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "new" / "rank-0.jsonl")
    before = time.time()
    for step in range(1, 4):
        log.write("step", step=step, loss=0.5)
    log.write("end", state="finished")
    log.close()
    events = list(read_events(tmp_path / "new" / "rank-0.jsonl"))
    assert [event["event"] for event in events] == ["step", "step", "step", "end"]
    assert all(event["v"] == 1 for event in events)
    times = [event["t"] for event in events]
    assert times == sorted(times)
    assert before <= times[0] <= time.time()


def test_events_reach_the_disk_within_a_second_without_being_asked(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "rank-0.jsonl")
    log.write("step", step=1)
    deadline = time.monotonic() + 30
    while not steps(log.path) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert steps(log.path) == [1]
    log.close()


def test_a_late_value_holds_back_itself_and_what_is_behind_it(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "rank-0.jsonl")
    late = Later()
    log.write("step", step=1)
    log.write("step", step=2, loss=late)
    log.write("step", step=3)
    log.flush()
    assert steps(log.path) == [1]
    late.arrive(0.25)
    log.flush()
    assert steps(log.path) == [1, 2, 3]
    log.close()
    assert [event.get("loss") for event in read_events(log.path)] == [None, 0.25, None]


def test_a_flush_up_to_a_step_waits_for_no_later_one(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "rank-0.jsonl")
    log.write("start")
    log.write("step", step=1)
    late = Later()
    log.write("step", step=2, loss=late)
    log.write("step", step=3, loss=Later())  # not on its way yet: to wait for it would lose it
    late.arrive(0.5)
    log.flush("wait", last_step=2)
    assert [event.get("step") for event in read_events(log.path)] == [None, 1, 2]
    log.close()


def test_closing_waits_for_what_is_late_and_notes_what_never_came(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "rank-0.jsonl")
    log.write("step", step=1, loss=Later())  # its rank ended before the losses were reduced
    log.write("end", state="failed")
    log.close()
    first, last = read_events(log.path)
    assert first.get("loss") is None
    assert last["state"] == "failed"


def test_events_from_many_threads_are_all_whole(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "rank-0.jsonl")

    def write(thread: int) -> None:
        for step in range(200):
            log.write("step", step=1000 * thread + step)
            if step % 50 == 0:
                log.flush()

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    log.close()
    assert sorted(steps(log.path)) == sorted(1000 * t + s for t in range(4) for s in range(200))


def test_a_full_disk_is_noted_and_told_with_the_fix() -> None:
    log = EventLog(Path("/dev/full"))
    log.check()
    log.write("step", step=1)
    log.flush()
    assert log.error is not None
    with pytest.raises(AllranksError, match="No space left on device") as full:
        log.check()
    assert full.value.exit_code == 1
    assert "--resume" in full.value.fix
    log.write("step", step=2)
    log.close()


# --- One line -----------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_json_cannot_hold_becomes_null_and_keeps_its_name(value: float) -> None:
    line = format_event({"event": "step", "loss": value, "step": 3})
    event = strict_json(line)
    assert event["loss"] is None
    assert event["nonfinite"] == {"loss": str(value)}
    assert event["step"] == 3


VALUES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text())


@given(st.dictionaries(st.text(), VALUES))
def test_any_flat_event_is_one_line_of_strict_json(fields: dict[str, Any]) -> None:
    line = format_event({"event": "step", **fields})
    assert line.count("\n") == 1
    assert isinstance(strict_json(line), dict)


# --- Reading ------------------------------------------------------------------------------------


def test_a_missing_file_has_no_events(tmp_path: Path) -> None:
    assert list(read_events(tmp_path / "none.jsonl")) == []
    assert read_last_events(tmp_path / "none.jsonl") == []


@given(cut=st.integers(0, 200), after=st.booleans())
def test_a_torn_line_is_skipped_wherever_it_was_torn(
    tmp_path_factory: pytest.TempPathFactory, cut: int, after: bool
) -> None:
    path = tmp_path_factory.mktemp("torn") / "rank-0.jsonl"
    whole = format_event({"v": 1, "t": 0, "event": "step", "step": 1}).encode()
    torn = format_event({"v": 1, "t": 0, "event": "step", "step": 2, "name": "x" * 50}).encode()[
        :-1
    ]
    torn = torn[: min(cut, len(torn) - 1)]
    rest = (
        b"\n" + format_event({"v": 1, "t": 0, "event": "step", "step": 3}).encode()
        if after
        else b""
    )
    path.write_bytes(whole + torn + rest)
    assert steps(path) == ([1, 3] if after else [1])
    assert [event["step"] for event in read_last_events(path)] == steps(path)


def test_lines_of_another_kind_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.jsonl"
    lines = [b"17", b'"step"', b"{}", b"\xff\xfe", b"", b'{"t":0,"event":"step","step":1}']
    path.write_bytes(b"\n".join(lines) + b"\n")
    assert steps(path) == [1]


@pytest.mark.parametrize("num_bytes", [1, 40, 400, 4000, 100_000])
def test_the_last_events_are_the_end_of_all_of_them(tmp_path: Path, num_bytes: int) -> None:
    path = tmp_path / "rank-0.jsonl"
    events = ({"v": 1, "t": n, "event": "step", "step": n} for n in range(100))
    path.write_text("".join(map(format_event, events)))
    everything = list(read_events(path))
    last = read_last_events(path, num_bytes)
    assert last == everything[len(everything) - len(last) :]
    assert len(last) >= min(100, num_bytes // 45 - 2)


# --- An event added by another process ----------------------------------------------------------


def test_an_event_is_appended_after_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.jsonl"
    whole = format_event({"v": 1, "t": 0, "event": "step", "step": 1}).encode()
    path.write_bytes(whole + b'{"v":1,"event":"st')
    append_event(path, "end", state="failed", step=1)
    assert [event["event"] for event in read_events(path)] == ["step", "end"]


@pytest.mark.parametrize("content", [None, "", '{"v":1,"t":0,"event":"start"}\n'])
def test_an_event_is_appended_to_a_whole_file(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "attempts" / "rank-0.jsonl"
    if content is not None:
        path.parent.mkdir()
        path.write_text(content)
    append_event(path, "end", state="failed")
    assert path.read_text().count("\n") == (2 if content else 1)
    assert [event["event"] for event in read_events(path)][-1] == "end"


def test_a_number_that_json_cannot_hold_is_null_however_deep() -> None:
    line = format_event({"event": "end", "metrics": {"val_loss": math.nan, "accuracy": 0.5}})
    assert json.loads(line)["metrics"] == {"val_loss": None, "accuracy": 0.5}
    assert "NaN" not in line


class Lost:
    """A loss whose reduction failed with the rank that it came from."""

    def ready(self) -> bool:
        return True

    def value(self) -> float:
        raise RuntimeError("Connection reset by peer")


def test_a_lost_loss_does_not_cost_the_end(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "rank-0.jsonl")
    log.write("step", step=1, loss=Lost())
    log.write("end", state="failed")
    log.close()
    assert [event["event"] for event in read_events(log.path)] == ["step", "end"]


def test_a_sign_of_life_passes_events_that_are_held_back(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "rank-0.jsonl")
    late = Later()
    log.write("step", step=1, loss=late)
    log.write_past("device", doing="wait")
    log.flush()
    assert [event["event"] for event in read_events(log.path)] == ["device"]
    late.result = 1.0
    log.close()
    assert [event["event"] for event in read_events(log.path)] == ["device", "step"]


# --- The schema ---------------------------------------------------------------------------------

WRITERS = {"write": 0, "write_past": 0, "record": 0, "append_event": 1}  # where the name stands


def written_events() -> list[tuple[str, str, list[str]]]:
    """Each call in the package that writes an event: where, which, and the fields it names."""
    found = []
    for file in sorted(Path(allranks.__file__).parent.rglob("*.py")):
        text = file.read_text()
        if not any(f"{name}(" in text for name in WRITERS):
            continue
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.Call):
                continue
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            at = WRITERS.get(name, 0)
            if name not in WRITERS or len(node.args) <= at:
                continue
            event = node.args[at]
            if not isinstance(event, ast.Constant) or not isinstance(event.value, str):
                continue  # an event that is passed on
            if not node.keywords and len(node.args) == at + 1:
                continue  # text that is written elsewhere
            fields = [word.arg for word in node.keywords if word.arg is not None]
            for part in node.args[at + 1 :]:
                if isinstance(part, ast.Dict):
                    keys = [key for key in part.keys if isinstance(key, ast.Constant)]
                    fields += [str(key.value) for key in keys]
            found.append((f"{file.name}:{node.lineno}", event.value, fields))
    return found


def test_every_event_and_field_that_is_written_is_declared() -> None:
    written, known = written_events(), declared()
    unseen = known.keys() - {event for _, event, _ in written}
    assert unseen <= {"common", "step"}  # a step is written as a line at once
    for where, event, fields in written:
        assert event in known, where
        assert not fields or set(fields) <= known[event].checks.keys(), where


def test_what_ends_a_rank_is_described_as_declared() -> None:
    try:
        raise ValueError("no") from KeyError("label")
    except ValueError as error:
        event = {"v": 1, "t": 1.0, "event": "error", "pid": 1, **tracebacks.describe(error)}
    assert undeclared(event) == []


def test_of_an_event_of_a_later_version_the_name_and_time_are_read(tmp_path: Path) -> None:
    append_event(tmp_path / "rank-0.jsonl", "later", at="nowhere", step="many")
    (event,) = read_events(tmp_path / "rank-0.jsonl")
    assert event.keys() == {"v", "t", "event"}
